"""A switch that saves memory never takes more than plain DDP. Every switch that shards states is tested."""

import ctypes
import gc
import importlib.util
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer_templates import Data, Trainer
from rapidformer_templates.planning.checks import PARTITIONING
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.run.receipts import BYTES_BY_RANK
from rapidformer_templates.system import process_state
from rapidformer_templates.system.process_state import (
    M_MMAP_THRESHOLD,
    _mallopt,
    resident_bytes,
    use_default_allocator,
)
from tests.support.selection import selected
from tests.support.worker_pool import start_workers

pytestmark = [pytest.mark.distributed, pytest.mark.longer]

VOCABULARY, LENGTH = 1024, 16
SWITCHES = [
    switch
    for switch in REGISTRY.switches
    if switch.family == PARTITIONING and (not switch.needs_package or importlib.util.find_spec(switch.needs_package))
]
FLAGS = {"none": ""} | {switch.name: " ".join(map(spelling, switch.on)) for switch in SWITCHES}
STEPS = (
    "--device cpu --lr 1e-4 --train-iters 2 --micro-batch-size 1 --global-batch-size 4 --mixed-precision bf16 --no-save"
)
NAMES = [switch.name for switch in SWITCHES]


class Job(Trainer):
    """Weights outweigh everything else in a step: 8 million parameters, with a micro batch of 16 tokens."""

    width, blocks = 384, 4

    def build_data(self) -> Data:
        tokens = torch.randint(VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(0))
        return Data(train=[{"input_ids": row, "labels": row} for row in tokens])

    def build_model(self) -> Any:
        sizes: dict[str, Any] = {"n_embd": self.width, "n_layer": self.blocks, "n_head": 4, "n_positions": LENGTH}
        sizes |= {"bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=VOCABULARY, use_cache=False))


class Small(Job):
    """Imports and builds everything that a run needs."""

    width, blocks = 32, 2


def _train(kind: type[Job], flags: str) -> tuple[int, float]:
    """Return (bytes of states and buckets on the worker with most, largest growth of this process in MB)."""
    gc.collect()  # what the previous run has left
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak so far is the present size
    before = resident_bytes("VmRSS") / 1e6
    receipts = kind([*STEPS.split(), *flags.split()]).fit()["receipts"]
    held = max(sum(rank.get(name, 0) for name in BYTES_BY_RANK) for rank in receipts["held_bytes_by_rank"])
    return held, resident_bytes("VmHWM") / 1e6 - before


def _train_again(flags: str) -> tuple[int, float]:
    """Return the smallest growth of three runs. It depends on how far a worker is ahead of the other one."""
    return min(_train(Job, flags) for _ in range(3))


@contextmanager
def _freed_memory_is_given_back() -> Iterator[None]:
    """Return freed memory in every run. Otherwise a run would be measured with memory of the previous one."""

    def give_back() -> None:
        _mallopt({M_MMAP_THRESHOLD: 2**16})

    with (
        mock.patch.object(process_state, "keep_freed_memory", give_back),
        mock.patch.object(process_state, "give_freed_memory_back", give_back),
    ):
        give_back()
        yield
    use_default_allocator()


def _train_all(workers: Any, switches: list[str]) -> dict[str, tuple[int, float]]:
    with _freed_memory_is_given_back():
        for switch in switches:
            _train(Small, FLAGS[switch])
        return {switch: _train_again(FLAGS[switch]) for switch in switches}


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, float]]:
    """The larger figure of the two workers for each switch.

    The workers are not forks. A fork fills the holes in the memory of this process, which counts as growth.
    """
    folder = tmp_path_factory.mktemp("measured")
    chosen = ["none", *selected(request, "switch")]
    workers = start_workers(2, str(folder), _train_all, chosen, method="spawn")
    while not workers.join():
        pass
    ranks = [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2)]
    return {case: (ranks[0][case][0], max(rank[case][1] for rank in ranks)) for case in ranks[0]}


@pytest.mark.parametrize("switch", NAMES)
def test_a_worker_holds_fewer_bytes_and_grows_no_larger_than_under_ddp(switch: str, measured: Any) -> None:
    (held, grown), (under_ddp, grown_under_ddp) = measured[switch], measured["none"]
    assert held < under_ddp
    assert grown <= grown_under_ddp
