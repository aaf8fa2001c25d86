"""The files of a run contain the weights of its engine, for every engine and layout. They are read without the product.

The parity tests train without files (:mod:`tests.support.parity`). These tests check the files that they do not write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
from tests.support.selection import by_default, selected
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
EXPERTS = {name for name, switches in NAMES.items() if "expert-parallel" in switches}

Tensors = dict[str, torch.Tensor]


def _write(workers: Any, folder: str, runs: Mapping[str, tuple[str, ...]]) -> dict[str, Trained]:
    """Train several runs, each in a separate folder."""
    return {name: parity.trained(_job(f"{folder}/{name}", flags)) for name, flags in runs.items()}


def _job(folder: str, flags: tuple[str, ...]) -> DeepJob:
    return DeepJob([*FLAGS.split(), *flags, "--save", folder, "--export-model"])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("written")


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, root: Path) -> dict[str, Trained]:
    """Return the results of the runs by their engines. One job trains those with two workers, one those with four."""
    runs = {name: found for name in selected(request, "name") if (found := RUNS.get(name))}
    results = _write(None, str(root), {ALONE: ("--micro-batch-size", "4")})
    for world in sorted({found.world for found in runs.values()}):
        flags = {name: found.flags for name, found in runs.items() if found.world == world}
        results |= run_in_workers(world, _write, str(root), flags)[0]
    return results


@pytest.fixture(params=by_default([ALONE, *(run for run in RUNS if run not in LONGER)], [ALONE, *RUNS]))
def name(request: pytest.FixtureRequest) -> str:
    run: str = request.param
    if run != ALONE and RUNS[run] is None:
        needed = {REGISTRY[switch].needs_package or "" for switch in NAMES[run]} - {""}
        pytest.skip(f"needs {', '.join(sorted(needed))}")
    return run


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


def assert_equal(found: Tensors, wanted: Tensors) -> None:
    """Assert that names, shapes and bits are equal."""
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert found[name].shape == weight.shape, name
        assert torch.equal(found[name].double(), weight), name


def test_the_checkpoint_has_the_weights_of_the_engine(name: str, ended: dict[str, Trained], root: Path) -> None:
    assert_equal(read_checkpoint(root / name / f"checkpoints/step-{STEPS}"), ended[name]["weights"])


def test_the_export_has_the_weights_of_the_engine(name: str, ended: dict[str, Trained], root: Path) -> None:
    """Read the export with safetensors and with transformers, which supports all of these models but mixtures."""
    weights, export = ended[name]["weights"], root / name / "export"
    assert_equal(load_file(export / "model.safetensors"), weights)
    if name not in EXPERTS:
        read = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).state_dict()
        tied = read.pop("lm_head.weight")
        assert torch.equal(tied, read["transformer.wte.weight"])
        assert_equal(read, weights)


def test_the_metrics_are_those_of_the_run(name: str, ended: dict[str, Trained], root: Path) -> None:
    lines = [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]
    assert lines == ended[name]["lines"]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    assert [line["eval_loss"] for line in lines if "eval_loss" in line] == ended[name]["evaluations"]
    assert [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line] == ended[name]["curve"]


def test_the_summary_is_that_of_the_run(name: str, ended: dict[str, Trained], root: Path) -> None:
    assert json.loads((root / name / "summary.json").read_text()) == json.loads(json.dumps(ended[name]["summary"]))


def test_every_engine_is_here() -> None:
    plans = [found.plan for found in RUNS.values() if isinstance(found, Combination)]
    engines = {switch.engine for switch in REGISTRY.switches if switch.engine}
    missing = {switch.engine for name, found in RUNS.items() if found is None for switch in _of(name)}
    assert {plan.engine for plan in plans} | missing == engines | {DDP_ENGINE}


def _of(name: str) -> list[Any]:
    return [REGISTRY[switch] for switch in NAMES[name]]
