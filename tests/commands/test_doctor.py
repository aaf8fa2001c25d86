"""``rapidformer doctor``: what is installed, what is broken, and how to fix it."""

from __future__ import annotations

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
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.switches.zero import compiled_parts as deepspeed_parts


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
    for name in doctor.OPTIONAL_PACKAGES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


def examined(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the packages and parts by name, as ``--json`` prints them."""
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"machine", "packages", "deepspeed_parts"}
    return {found["name"]: found for found in [*report["packages"], *report["deepspeed_parts"]["parts"]]}


def test_package_that_raises_and_one_that_is_absent(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_package(site, "onnx", "raise OSError('libfoo.so: undefined symbol\\nand more')")
    add_package(site, "torchao", "print('{noise'); import sys; sys.exit(3)")
    monkeypatch.setattr(doctor, "OPTIONAL_PACKAGES", ("onnx", "torchao", "surely_absent"))
    found = examined(capsys)
    assert found["onnx"]["state"] == "does not import"
    assert found["onnx"]["version"] == "1.2"
    assert found["onnx"]["detail"] == "OSError: libfoo.so: undefined symbol"
    assert found["torchao"]["detail"] == "SystemExit: 3"
    assert found["surely_absent"] == {
        "name": "surely_absent",
        "state": "not installed",
        "version": "",
        "detail": "pip install surely_absent",
        "serves": [],
    }


@pytest.mark.slow
def test_crash_and_hang_on_import_are_findings(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "hanging"

    class SlowlyStarted(subprocess.Popen[str]):
        """A process whose limit counts from the moment when it hangs. A busy machine starts Python slowly."""

        def communicate(self, *arguments: Any, timeout: float | None = None) -> tuple[str, str]:
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
    assert {name: facts["error"] for name, facts in found.items()} == {
        "crashes": "was killed by SIGSEGV while it was imported",
        "hangs": "hung for 1 s while it was imported",
        "works": None,
    }


def test_version_that_has_lost_a_private_name(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_package(site, "fairscale", "", version="9.0")
    (site / "fairscale/nn").mkdir()
    (site / "fairscale/nn/__init__.py").write_text("")
    (site / "fairscale/nn/data_parallel.py").write_text("class ShardedDataParallel: _trainable_params = []")
    (site / "fairscale/optim").mkdir()
    (site / "fairscale/optim/oss.py").write_text("")
    monkeypatch.setattr(doctor, "OPTIONAL_PACKAGES", ("fairscale",))
    found = examined(capsys)["fairscale"]
    assert (found["state"], found["version"]) == ("lacks what this version uses", "9.0")
    assert "no _should_accumulate_grads: without it, OSS with sharded gradients" in found["detail"]
    assert "_trainable_params" not in found["detail"]


@pytest.mark.parametrize(("version", "state"), [("0.49.2", "needs a GPU"), ("0.50.0", "ok")])
def test_packages_that_need_a_gpu(
    version: str, state: str, site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "OPTIONAL_PACKAGES", ("bitsandbytes", "apex"))
    add_package(site, "bitsandbytes", "", version)
    add_package(site, "apex", "")  # as on the public index
    found = examined(capsys)
    assert found["bitsandbytes"]["state"] == state
    assert found["bitsandbytes"]["serves"] == ["lora (nf4)", "adamw_bnb_8bit"]
    assert found["apex"]["state"] == "not Nvidia's"
    assert "github.com/NVIDIA/apex" in found["apex"]["detail"]


def test_every_package_of_a_switch_is_looked_at() -> None:
    needed = {switch.needs_package for switch in REGISTRY.switches if switch.needs_package}
    assert needed <= set(doctor.OPTIONAL_PACKAGES)
    for switch in REGISTRY.switches:
        if switch.needs_package:
            assert switch.name in doctor.serves(switch.needs_package)


def test_table_is_quiet_about_what_is_fine(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_package(site, "onnx", "")
    add_package(site, "torchao", "raise ImportError('no [bold]libfoo[/bold] here')")
    monkeypatch.setattr(doctor, "OPTIONAL_PACKAGES", ("onnx", "torchao"))
    monkeypatch.setenv("COLUMNS", "140")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = {row[1].strip(): row[2].strip() for row in (line.split("│") for line in lines) if row[1:]}
    assert (cells["onnx"], cells["torchao"]) == ("1.2 ok", "1.2 does not import")
    assert {"python", "device", "cores", "memory"} <= set(cells)
    details = dict(line.split(maxsplit=1) for line in lines[lines.index("Details:") + 1 :])
    assert details["torchao"] == "ImportError: no [bold]libfoo[/bold] here"
    assert "onnx" not in details


@pytest.mark.parametrize("columns", ["70", "80"])
def test_a_narrow_terminal_breaks_no_word(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "probe", lambda modules: {})
    monkeypatch.setenv("COLUMNS", columns)
    report = doctor.examine("cpu")
    doctor.show(report)
    text = capsys.readouterr().out
    findings = [*report["packages"], *report["deepspeed_parts"]["parts"]]
    words = [finding.name for finding in findings] + [word for finding in findings for word in finding.serves]
    assert [word for word in words if not all(part in text for part in word.split())] == []
    installs = [finding.detail for finding in findings if "pip install" in finding.detail]
    assert len(installs) > 5
    assert [line for line in installs if line not in text] == []


def test_compiled_parts(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_package(site, "deepspeed", "", "9.9")
    monkeypatch.setattr(doctor, "OPTIONAL_PACKAGES", ("deepspeed",))
    reasons = {"async_io": "libaio's header or library is missing: apt-get install libaio-dev"}
    monkeypatch.setattr(deepspeed_parts, "problems", lambda part, device: reasons.get(part))
    found = examined(capsys)
    assert found["cpu_adam"]["state"] == "not built yet"
    assert found["cpu_adam"]["detail"].endswith("or now by rapidformer doctor --build cpu_adam")
    assert found["async_io"]["state"] == "cannot be built"
    assert found["async_io"]["detail"] == reasons["async_io"]

    lock = deepspeed_parts.folder("cpu") / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w"):
        assert examined(capsys)["cpu_adam"]["state"] == "in use"
    found = examined(capsys)
    assert found["cpu_adam"]["state"] == "stale lock"
    assert found["cpu_adam"]["detail"] == f"{lock}: the next run removes it"
    monkeypatch.setenv(deepspeed_parts.FOLDER, str(lock.parents[1].rename(tmp_path / "mine")))
    assert examined(capsys)["cpu_adam"]["detail"].endswith("lock: delete it if nothing is building there")


def test_build(site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    add_package(site, "deepspeed", "", "9.9")
    monkeypatch.setattr(doctor, "OPTIONAL_PACKAGES", ())
    monkeypatch.setattr(deepspeed_parts, "export", lambda device: None)
    built: list[tuple[list[str], str]] = []
    monkeypatch.setattr(deepspeed_parts, "build", lambda parts, device: built.append((list(parts), device)))
    reasons = {"async_io": "no libaio"}
    monkeypatch.setattr(deepspeed_parts, "problems", lambda part, device: reasons.get(part))
    assert main(["doctor", "--build"]) == 0
    assert main(["doctor", "--build", "async_io"]) == 0
    assert built == [(["cpu_adam"], "cpu"), (["async_io"], "cpu")]
    reasons["cpu_adam"] = "no C++ compiler (c++) on PATH: apt-get install g++"
    capsys.readouterr()
    assert main(["doctor", "--build"]) == 2
    assert capsys.readouterr().err == f"error: DeepSpeed's parts cannot be built here: {reasons['cpu_adam']}\n"


@pytest.mark.longer
def test_no_torch_is_imported_here(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import subprocess

    program = (
        "import sys; from rapidformer_templates.commands import doctor;"
        "from rapidformer_templates.switches.zero import compiled_parts; doctor.main(['--json']);"
        "heavy = {'torch', 'transformers', 'deepspeed'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    packages = {found["name"]: found for found in json.loads(done.stdout)["packages"]}
    assert packages["torch"]["state"] == "ok"
    assert packages["torch"]["serves"] == ["everything"]
