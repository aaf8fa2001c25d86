"""Predicted memory of adapters in a mixture, compared with the receipts of runs: equal to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rapidformer_templates.planning.environment import detect
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.switches.auto_strategy.layouts import layout_of, memory_options_of
from rapidformer_templates.switches.auto_strategy.memory import states_by_worker
from rapidformer_templates.switches.auto_strategy.model_of_flags import with_switches
from rapidformer_templates.switches.auto_strategy.model_shapes import ModelShapes
from rapidformer_templates.switches.auto_strategy.state_bytes import StateBytes
from tests.support import mixtures, parity
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
pytestmark = pytest.mark.distributed

STEPS = (
    "--device cpu --train-iters 1 --micro-batch-size 2 --lr 1e-3 --no-export-model --num-experts 4 --moe-loss-coeff 0.2"
    " --lora-rank 3 --lora-target-modules all-linear,experts,gate"
)
CASES = {  # name: (workers, flags)
    "alone": (1, ""),
    "int8": (1, "--quantize-base int8"),
    "int4, bf16": (1, "--quantize-base int4 --mixed-precision bf16"),
    "half": (1, "--quantize-base half --mixed-precision bf16"),
    "fsdp": (2, "--fsdp-memory-optimization"),
    "distributed optimizer": (2, "--use-distributed-optimizer --quantize-base int4"),
    "divided experts": (2, "--expert-parallel"),
    "divided experts, zero-1": (2, "--expert-parallel --zero-1-memory-optimization"),
    "divided experts, fsdp": (2, "--expert-parallel --fsdp-memory-optimization"),
    "shards": (2, "--tensor-model-parallel-size 2"),
}

DEFAULT = ("alone", "int8", "int4, bf16", "half", "shards", "divided experts, zero-1", "divided experts, fsdp")


def _held(workers: Any, names: list[str]) -> dict[str, list[StateBytes]]:
    """Return the bytes that each rank holds according to the receipts."""
    found = {}
    for name in names:
        run = parity.train("mixtral-wide", False, f"{STEPS} {CASES[name][1]}")
        kinds = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes")
        ranks = run["summary"]["receipts"]["held_bytes_by_rank"]
        found[name] = [StateBytes(*(rank[kind] for kind in kinds)) for rank in ranks]
    return found


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> dict[str, list[StateBytes]]:
    names = {*selected(request, "name"), *DEFAULT}
    alone, two = (
        [name for name, (workers, _) in CASES.items() if workers == count and name in names] for count in (1, 2)
    )
    return _held(None, alone) | run_in_workers(2, _held, two)[0]


def _predicted(name: str) -> list[StateBytes]:
    workers, flags = CASES[name]
    job = mixtures.WideJob([*STEPS.split(), *flags.split(), "--nproc-per-node", str(workers)])
    plan = resolve(job.config, detect("Trainer", "test", device="cpu", world_size=workers))

    def batch(samples: int) -> dict[str, torch.Tensor]:
        return dict.fromkeys(("input_ids", "labels"), torch.zeros((samples, 16), dtype=torch.long))

    of_model = ModelShapes(lambda blocks: with_switches(mixtures.tiny("mixtral", blocks or 4), job.config, plan), batch)
    return states_by_worker(of_model, layout_of(plan), memory_options_of(plan, of_model.width))


@pytest.mark.parametrize("name", by_default(DEFAULT, CASES))
def test_a_run_holds_what_is_predicted(name: str, measured: dict[str, list[StateBytes]]) -> None:
    assert measured[name] == _predicted(name)


def test_experts_in_codes_take_fewer_bytes(measured: dict[str, list[StateBytes]]) -> None:
    """Their stacks, four layers of 4 experts, take one byte per number and a scale per row."""
    linear = 4 * 4 * (16 * 16)
    stacks = 4 * 4 * 3 * 16 * 24
    rows = 4 * (4 * 16 + 4 * (48 + 16))
    saved = measured["alone"][0].parameters - measured["int8"][0].parameters
    assert saved == 3 * (linear + stacks) - 4 * rows
