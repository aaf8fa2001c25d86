"""Runs the recipes of ``examples/recipes`` in this process or in a group of workers."""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support import parity
from tests.support.worker_pool import run_in_workers

FOLDER = Path(__file__).parents[2] / "examples/recipes"
LAYOUTS: Mapping[str, str] = {
    "ddp": "",
    "fsdp": "--fsdp-memory-optimization",
    "zero-1": "--zero-1-memory-optimization",
    "zero-3": "--zero-3-memory-optimization --zero-3-param-persistence-threshold 40",
    "tensor": "--tensor-model-parallel-size 2",
    "distributed optimizer": "--use-distributed-optimizer",
}
"""Ways to train with two workers."""


def recipe(name: str) -> ModuleType:
    """Import a recipe as a module."""
    module_name = f"recipe_{name}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module_name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[module_name]


def train(name: str, template: str, flags: Sequence[str]) -> parity.Trained:
    """Train a template of a recipe, without files unless the flags contain ``--save``.

    ``curve`` has (loss, gradient norm) of each step. It comes from rank 0, like the other values of lines.
    """
    where = [] if "--save" in flags else ["--no-save"]
    job = getattr(recipe(name), template)([*flags, *where, "--device", "cpu", "--log-interval", "1"])
    found = parity.trained(job)
    found["curve"] = [(line["loss"], line["grad_norm"]) for line in found["lines"] if "loss" in line]
    return found


def train_in_workers(
    count: int, name: str, template: str, runs: Mapping[str, Sequence[str]]
) -> dict[str, parity.Trained]:
    """Train several runs of a recipe one after the other in one group of workers. Return what rank 0 has seen."""
    found: dict[str, parity.Trained] = run_in_workers(count, _train_all, name, template, runs)[0]
    return found


def _train_all(workers: Any, name: str, template: str, runs: Mapping[str, Sequence[str]]) -> dict[str, parity.Trained]:
    return {run: train(name, template, flags) for run, flags in runs.items()}
