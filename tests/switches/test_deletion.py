"""A switch is one file or folder: the package imports, plans and trains without it."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.support.selection import by_default

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
    "distributed_optimizer.py": "distributed-optimizer",
    "frozen_parameters.py": "frozen-parameters",
    "tf32.py": "tf32",
}
"""Files and folders of switches that no other switch needs, each with one of its switches."""

RUN = """
import sys
import torch
from rapidformer_templates import Data, Trainer
from rapidformer_templates.commands.main import main
from rapidformer_templates.planning.registry import REGISTRY
from transformers import GPT2Config, GPT2LMHeadModel

assert sys.argv[1] not in [switch.name for switch in REGISTRY.switches]
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


@pytest.mark.slow
@pytest.mark.parametrize("removed", by_default(("lora",), OPTIONAL))
def test_the_package_works_without_the_switch(removed: str, tmp_path: Path) -> None:
    package = tmp_path / SOURCE.name
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    place = package / "switches" / removed
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-c", RUN, OPTIONAL[removed]]
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
