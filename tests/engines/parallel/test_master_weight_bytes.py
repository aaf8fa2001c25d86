"""Bytes of 16-bit weights, their masters and gradients on each worker: measured, and by formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.support.jobs import VOCABULARY, CausalJob
from tests.support.worker_pool import run_in_workers

pytestmark = pytest.mark.distributed

FLAGS = "--mixed-precision bf16 --train-iters 2 --micro-batch-size 2 --global-batch-size 16 --lr 1e-3"
TENSOR = "--tensor-model-parallel-size 2"
WAYS = {
    "none": "",
    "distributed-optimizer": "--use-distributed-optimizer",
    "zero-1": f"{TENSOR} --zero-1-memory-optimization",
    "zero-2": f"{TENSOR} --zero-2-memory-optimization",
}
WIDTH, BLOCKS = 128, 2


class Measured(CausalJob):
    """Large enough that padding and norms are small in comparison."""

    def make(self) -> torch.nn.Module:
        sizes = {"n_positions": 64, "n_embd": WIDTH, "n_layer": BLOCKS, "n_head": 2}
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY + 1, **sizes, **dropouts))


def _bytes(workers: Any) -> dict[str, Any]:
    found = {}
    for name, flags in WAYS.items():
        receipts = Measured([*FLAGS.split(), *flags.split()]).fit()["receipts"]
        found[name] = receipts["held_bytes_by_rank"]
    return found


@pytest.fixture(scope="module")
def bytes_of_workers() -> dict[str, Any]:
    return run_in_workers(4, _bytes)[0]


def _counts() -> tuple[int, int, int]:
    """Return the number of elements that tensor parallelism divides, of other elements, and of norms."""
    norms = (2 * BLOCKS + 1) * 2 * WIDTH
    rows = BLOCKS * 2 * WIDTH  # biases of the products that the group sums
    divided = BLOCKS * (12 * WIDTH**2 + 7 * WIDTH) + (VOCABULARY + 1) * WIDTH
    return divided, rows + 64 * WIDTH, norms


@pytest.mark.parametrize("way", WAYS)
def test_bytes_a_worker(way: str, bytes_of_workers: Any) -> None:
    divided, whole, norms = _counts()
    tensor = 2 if "zero" in way else 1
    replicas = 4 // tensor
    narrow, shares = divided // tensor + whole, 1 if way == "none" else replicas
    for worker in bytes_of_workers[way]:
        assert worker["parameter_bytes"] == pytest.approx(2 * narrow + 4 * norms, rel=2e-3)
        # Masters and two moments. A norm is its own master.
        assert worker["optimizer_state_bytes"] == pytest.approx((12 * narrow + 8 * norms) / shares, rel=5e-3)
        assert worker["gradient_bytes"] == pytest.approx(4 * (narrow + norms) / shares, rel=5e-3)
        promised = {"none": 18, "distributed-optimizer": 2 + 4 + 12 / 4, "zero-1": 2 + 4 + 12 / 2, "zero-2": 2 + 16 / 2}
        extra = 2 * norms / narrow  # norms stay fp32
        assert sum(worker.values()) / (narrow + norms) <= promised[way] + extra + 0.01
