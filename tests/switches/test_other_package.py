"""A switch from another package works like ours, without changing a line of this package."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.registry import REGISTRY, _check_unique

ROOT = Path(__file__).parents[2]
NAME, FLAG = "gradient-shrink", "--embedding-gradient-shrink"
RUN = (
    "--task pretraining --model-type gpt2 --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 32"
    " --device cpu"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which only the package is installed."""
    folder = tmp_path_factory.mktemp("other")
    shutil.copytree(ROOT / "tests/other_package", folder / "source")
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(folder / "site")]
    subprocess.run([sys.executable, *install, str(folder / "source")], check=True, capture_output=True)
    return folder / "site"


def run(place: Path | None, *words: str, status: int = 0) -> str:
    """Return the output of Python, with the package installed or without it."""
    paths = [str(place or ""), os.environ.get("PYTHONPATH", ""), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, *words], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def rapidformer(place: Path | None, words: str, status: int = 0) -> str:
    return run(place, "-m", "rapidformer_templates", *words.split(), status=status)


ONE_AFTER_ANOTHER = """
import contextlib, io, json, sys
from rapidformer_templates.commands.main import main

said = []
for words in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            status = main(words.split())
        except SystemExit as end:
            status = end.code or 0
    said.append((status, out.getvalue()))
print(json.dumps(said))
"""


def several(place: Path, *commands: str) -> list[tuple[int, str]]:
    """Return (status, output) of each command. All run in one process with the package installed."""
    said: list[tuple[int, str]] = json.loads(run(place, "-c", ONE_AFTER_ANOTHER, json.dumps(commands)))
    return said


@pytest.mark.slow
def test_it_is_in_the_help_the_catalogue_and_the_plan(place: Path) -> None:
    assert NAME in rapidformer(place, "switches")
    plan = f"plan {RUN} {FLAG} 0.1"
    commands = ("--help-all", "explain GS001", plan, f"{plan} --onnx-runtime-training")
    (helped, usage), (explained, rule), (planned, switches), (status, refused) = several(place, *commands)
    assert (helped, explained, planned, status) == (0, 0, 0, 2)
    assert FLAG in usage
    assert "Shrunk gradients of embeddings are not captured." in rule
    assert NAME in switches
    assert "error[GS001]: a captured graph cannot contain a custom gradient" in refused
    assert FLAG in rapidformer(None, f"plan {RUN} {FLAG} 0.1", status=2)


@pytest.mark.longer
@pytest.mark.distributed
def test_it_acts_is_measured_predicted_and_can_fail(place: Path) -> None:
    """The tests that are generated from the registry check it."""
    cases = [
        f"tests/run/test_receipts.py::test_a_switch_that_does_nothing_ends_the_run[{NAME}-all]",
        f"tests/switches/auto_strategy/test_predicted_states.py::test_a_run_holds_what_is_predicted[{NAME}]",
    ]
    assert "failed" not in run(place, "-m", "pytest", "-q", "-p", "no:cacheprovider", *cases)


@pytest.mark.slow
def test_a_package_that_cannot_be_used_is_named(place: Path, tmp_path: Path) -> None:
    broken = tmp_path / "site"
    shutil.copytree(place, broken)
    (broken / "gradient_shrink/declaration.py").write_text("import nothing_of_this_name\n")
    said = rapidformer(broken, "--help", status=1)
    assert "the switches of the package gradient-shrink cannot be loaded: ModuleNotFoundError" in said


@dataclasses.dataclass(frozen=True)
class Taken:
    """Acceleration"""

    epochs: int = 1


@dataclasses.dataclass(frozen=True)
class Free:
    """Acceleration"""

    quite_new: bool = False


@pytest.mark.parametrize(
    ("differing", "message"),
    [
        ({"name": "mine", "options": Taken}, "the flag --epochs is declared twice"),
        ({"options": Free}, "the switch tf32 is declared twice"),
    ],
)
def test_what_is_taken_is_told(differing: dict[str, Any], message: str) -> None:
    other = dataclasses.replace(REGISTRY["tf32"], **differing)
    with pytest.raises(ConfigError, match=message):
        _check_unique([*REGISTRY.switches, other])
