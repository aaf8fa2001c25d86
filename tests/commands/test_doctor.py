"""``rapidformer doctor``: what is installed, what is broken, and how to fix it."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates.commands import doctor
from rapidformer_templates.commands.main import main
from rapidformer_templates.planning import environment
from rapidformer_templates.planning.optimizers import OPTIMIZER_PACKAGES
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.switches.zero import compiled_parts as deepspeed_parts
from tests.support.messages import Says


def add_package(site: Path, name: str, body: str, version: str = "1.2") -> None:
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text(body)
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder for fake packages, which is searched before all others. There is no GPU, and no slow import."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(deepspeed_parts.FOLDER, raising=False)
    monkeypatch.setattr(environment, "detect_gpu", lambda: None)
    monkeypatch.setattr(doctor, "REQUIRED_PACKAGES", ())
    environment.version_of_package.cache_clear()
    for name in doctor.OPTIONAL_PACKAGES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


def use_only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for module in (doctor, environment):
        monkeypatch.setattr(module, "OPTIONAL_PACKAGES", names)


def examined(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the packages and parts by name, as ``--json`` prints them."""
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"machine", "packages", "deepspeed_parts"}
    return {found["name"]: found for found in [*report["packages"], *report["deepspeed_parts"]]}


def test_package_that_raises_and_one_that_is_absent(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    add_package(site, "onnx", "raise OSError('libfoo.so: undefined symbol\\nand more')")
    add_package(site, "torchao", "import os; print('{noise'); os.write(1, b'{noise'); import sys; sys.exit(3)")
    add_package(site, "apex", "")  # as on the public index, and not Nvidia's
    names = ("onnx", "torchao", "apex")
    use_only(monkeypatch, *names)
    found = examined(capsys)
    says.text("\n".join(str(found[name]) for name in names))


@pytest.mark.longer
@pytest.mark.slow
def test_crash_and_hang_on_import_are_findings(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "hanging"

    class SlowlyStarted(subprocess.Popen[bytes]):
        """A process whose limit counts from the moment when it hangs. A busy machine starts Python slowly."""

        def communicate(self, *arguments: Any, timeout: float | None = None) -> tuple[bytes, bytes]:
            while not hanging.exists() and self.poll() is None:
                time.sleep(0.02)
            hanging.unlink(missing_ok=True)
            return super().communicate(*arguments, timeout=timeout)

    add_package(site, "crashes", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    add_package(site, "hangs", f"import pathlib, time; pathlib.Path({str(hanging)!r}).touch(); time.sleep(600)")
    add_package(site, "works", "")
    monkeypatch.setattr(doctor, "IMPORT_SECONDS", 1)
    monkeypatch.setattr(subprocess, "Popen", SlowlyStarted)
    found = doctor.probe({name: name for name in ("crashes", "hangs", "works")})
    errors = {"crashes": doctor.CRASHED, "hangs": doctor.CRASHED, "works": ""}
    assert {name: facts["error"] for name, facts in found.items()} == errors


def test_every_package_of_a_switch_is_looked_at_and_installed_as_the_switch_says() -> None:
    for switch in REGISTRY.switches:
        if name := switch.needs_package:
            assert name in environment.OPTIONAL_PACKAGES
            assert switch.install is None or doctor.INSTALLS[name] in switch.install or name == "apex"
    for name, package in OPTIMIZER_PACKAGES.items():
        assert name not in doctor.OWN_EXTRAS or package.install == doctor.INSTALLS[name]


def test_what_is_printed(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    add_package(site, "onnx", "")
    add_package(site, "torchao", "raise ImportError('no [bold]libfoo[/bold] here')")
    use_only(monkeypatch, "onnx", "torchao", "peft")
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "installed_packages", lambda: {"onnx": "1.2", "torchao": "1.2"})
    assert main(["doctor"]) == 0
    machine, packages = capsys.readouterr().out.split("Packages")
    names = [line.split()[0] for line in machine.splitlines() if line.strip()]
    assert names == ["Machine", "python", "rapidformer_templates", "device", "cores"]
    says.text(packages.partition("DeepSpeed's compiled parts")[0])


def test_compiled_parts(site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    add_package(site, "deepspeed", "", "9.9")
    use_only(monkeypatch, "deepspeed")
    reasons = {"async_io": "libaio's header or library is missing: apt-get install libaio-dev"}
    monkeypatch.setattr(deepspeed_parts, "problems", lambda part, device: reasons.get(part))
    found = examined(capsys)
    assert found["cpu_adam"]["state"] == "not built yet"
    assert found["cpu_adam"]["detail"].endswith("or by rapidformer doctor --build cpu_adam")
    assert found["async_io"]["state"] == "cannot be built"
    assert found["async_io"]["detail"] == reasons["async_io"]


def test_build(site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    add_package(site, "deepspeed", "", "9.9")
    use_only(monkeypatch)
    monkeypatch.setattr(deepspeed_parts, "export", lambda device: None)
    built: list[tuple[list[str], str]] = []
    monkeypatch.setattr(deepspeed_parts, "build", lambda parts, device: built.append((list(parts), device)))
    monkeypatch.setattr(deepspeed_parts, "problems", lambda part, device: {"async_io": "no libaio"}.get(part))
    assert main(["doctor", "--build"]) == 0
    assert main(["doctor", "--build", "async_io"]) == 0
    assert built == [(["cpu_adam"], "cpu"), (["async_io"], "cpu")]
