"""A switch is one file or folder: the package works without it, and another package can add one as easily."""

import ast
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates import flag
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.registry import REGISTRY, _check_names

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


@pytest.mark.longer
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
        f"tests/run/test_receipts.py::test_a_switch_that_does_nothing_ends_the_run[{NAME}]",
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


@dataclasses.dataclass(frozen=True)
class Lonely:
    """Acceleration"""

    also_new: bool = flag(False, "new", only_with=("quite_old", True))


@pytest.mark.parametrize(
    ("differing", "message"),
    [
        ({"name": "mine", "options": Taken}, "the flag --epochs is declared twice"),
        ({"options": Free}, "the switch tf32 is declared twice"),
        ({"name": "mine", "options": Lonely}, "the flag --also-new needs --quite-old, which does not exist"),
    ],
)
def test_what_is_taken_is_told(differing: dict[str, Any], message: str) -> None:
    other = dataclasses.replace(REGISTRY["tf32"], **differing)
    with pytest.raises(ConfigError, match=message):
        _check_names([*REGISTRY.switches, other])


def test_a_name_without_a_value_is_no_pair() -> None:
    with pytest.raises(TypeError, match="only_with='lr' is not a pair"):
        flag(False, "new", only_with="lr")  # type: ignore[arg-type]


SOURCE = Path(__file__).parents[2] / "src/rapidformer_templates"
OPTIONAL = {
    "onnx_runtime": "onnx-runtime",
    "lora": "lora",
    "oss": "oss",
    "fused_loss": "fused-linear-cross-entropy",
    "offload_activations": "offload-activations",
    "dynamic_shape": "dynamic-shape",
    "flash_attention": "flash-attention",
    "torch_compile": "torch-compile",
    "fp8": "fp8-products",
    "frozen_parameters.py": "frozen-parameters",
}
"""Files and folders of switches that no other switch needs, each with one of its switches."""

ALONE = """
import sys
import torch
from rapidformer_templates import Data, Trainer
from rapidformer_templates.commands.main import main
from rapidformer_templates.planning.registry import REGISTRY
from transformers import GPT2Config, GPT2LMHeadModel

assert {switch.name for switch in REGISTRY.switches}.isdisjoint(sys.argv[1:])
FLAGS = "--checkpoint-activations --micro-batch-size 2 --train-iters 1 --lr 1e-3 --device cpu".split()
assert main(["plan", "--task", "causal_lm", *FLAGS]) == 0

class Job(Trainer):
    def build_data(self):
        tokens = torch.arange(32).view(4, 8)
        return Data(train=[{"input_ids": row, "labels": row} for row in tokens])

    def build_model(self):
        return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1))

    def on_step_end(self, step, result):
        self.steps = step

job = Job([*FLAGS, "--no-save"])
job.fit()
assert job.steps == 1
"""


@pytest.mark.longer
def test_the_package_works_without_the_switches(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / SOURCE.name, ignore=shutil.ignore_patterns("__pycache__", *OPTIONAL))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-c", ALONE, *OPTIONAL.values()]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


PLANNER = "switches/auto_strategy"
"""The planner traces what the other switches do to a model."""


@cache
def _imports() -> list[tuple[str, str]]:
    """Return (module, module that it imports from at its top) of the package without the planner."""
    found = []
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        statements = [] if name.startswith(PLANNER) else ast.parse(path.read_text(encoding="utf-8")).body
        found += [(name, node.module or "") for node in statements if isinstance(node, ast.ImportFrom)]
    return found


def _importers(removed: str) -> list[str]:
    """Return the modules outside of a switch that import it at their top."""
    module = f"rapidformer_templates.switches.{removed.removesuffix('.py')}."
    outside = [(name, imported) for name, imported in _imports() if not name.startswith(f"switches/{removed}")]
    return [name for name, imported in outside if f"{imported}.".startswith(module)]


def test_no_other_module_needs_an_optional_switch() -> None:
    assert {removed: _importers(removed) for removed in OPTIONAL} == {removed: [] for removed in OPTIONAL}
