"""The files of a run contain the weights of its engine, for every engine and layout. They are read without the product.

The parity tests train without files (:mod:`tests.support.parity`). These tests check the files that they do not write.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.resolve import DDP_ENGINE
from tests.support import parity
from tests.support.combinations import Combination, smallest
from tests.support.engine_layouts import NAMES
from tests.support.jobs import DeepJob
from tests.support.parity import Trained
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

STEPS = 2
FLAGS = f"--train-iters {STEPS} --lr 1e-2 --log-interval 1 --eval-interval 1 --no-keep-best --device cpu"

ALONE = "one process"
RUNS = {name: smallest(switches) for name, switches in NAMES.items()}
LONGER = {
    *("replicas", "context 2", "hybrid sharding", "tensor 2, zero-2", "pipeline-parallel", "tensor-parallel"),
    *("expert-parallel", "oss", "zero-1", "zero-2"),
}
"""For ``make test-longer``. Another run has the same parts of tensors, or other parts of the same engine."""

Tensors = dict[str, torch.Tensor]


def assert_equal(found: Tensors, wanted: Tensors) -> None:
    """Assert that names, shapes and bits are equal."""
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert found[name].shape == weight.shape, name
        assert torch.equal(found[name].double(), weight), name


def read_checkpoint(folder: Path) -> Tensors:
    """Return the weights of a checkpoint by its index, without the product's reader.

    Raises:
        AssertionError: A value is in two boxes, or in none.
    """
    weights: Tensors = {}
    read = cache(load_file)
    for name, entry in json.loads((folder / "index.json").read_text())["weights"].items():
        whole = torch.zeros(entry["shape"], dtype=torch.float32)
        times = torch.zeros(entry["shape"], dtype=torch.int32)
        for file, key, offset in entry["boxes"]:
            part = read(folder / file)[key]
            assert part.dtype == whole.dtype, f"{name} is {part.dtype}"
            place = tuple(slice(o, o + size) for o, size in zip(offset, part.shape, strict=True))
            whole[place] = part
            times[place] += 1
        assert bool((times == 1).all()), f"{name}: parts of it are written twice, or not at all"
        weights[name] = whole
    return weights


def _write(workers: Any, folder: str, flags: tuple[str, ...]) -> Trained:
    return parity.trained(DeepJob([*FLAGS.split(), *flags, "--save", folder, "--export-model"]))


@pytest.mark.parametrize("name", by_default([ALONE, *(run for run in RUNS if run not in LONGER)], [ALONE, *RUNS]))
def test_the_files_have_the_numbers_of_the_run(name: str, tmp_path: Path) -> None:
    """Read the export with safetensors and with transformers, which supports all of these models but mixtures."""
    found, folder = RUNS.get(name), tmp_path / "run"
    if name == ALONE:
        run = _write(None, str(folder), ("--micro-batch-size", "4"))
    elif found is None:
        needed = {REGISTRY[switch].needs_package or "" for switch in NAMES[name]} - {""}
        pytest.skip(f"needs {', '.join(sorted(needed))}")
    else:
        run = run_in_workers(found.world, _write, str(folder), found.flags)[0]
    assert_equal(read_checkpoint(folder / f"checkpoints/step-{STEPS}"), run["weights"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines == run["lines"]
    assert [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line] == run["curve"]
    assert len(run["curve"]) == len(run["evaluations"]) == STEPS
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(run["summary"]))
    assert_equal(load_file(folder / "export" / "model.safetensors"), run["weights"])
    if "expert-parallel" not in NAMES.get(name, ()):
        read = AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float32).state_dict()
        assert torch.equal(read.pop("lm_head.weight"), read["transformer.wte.weight"])  # they are tied
        assert_equal(read, run["weights"])


def test_every_engine_is_here() -> None:
    plans = {found.plan.engine for found in RUNS.values() if isinstance(found, Combination)}
    missing = {REGISTRY[switch].engine for name, found in RUNS.items() if found is None for switch in NAMES[name]}
    assert plans | missing == {switch.engine for switch in REGISTRY.switches if switch.engine} | {DDP_ENGINE}
