"""Workers that drift apart end the run before it saves. The message names them, the values and the step."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rapidformer_templates.errors import ReplicasDiffer
from rapidformer_templates.run.replica_check import CHUNK, checksum
from rapidformer_templates.run.run import Run
from tests.support.parallel_jobs import JOBS
from tests.support.selection import by_default
from tests.support.worker_pool import Failure, outcomes_in_workers, run_in_workers

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

FLAGS = "--train-iters 3 --micro-batch-size 1 --global-batch-size 12 --lr 1e-3 --check-replicas 1"
NORM, MATRIX = "model.layers.0.input_layernorm.weight", "model.layers.0.mlp.up_proj.weight"
LAYOUTS = {
    "ddp": (3, ""),
    "hybrid": (4, "--fsdp-memory-optimization --fsdp-shard-size 2"),
    "zero-2": (2, "--zero-2-memory-optimization"),
    "tensor × data": (4, "--tensor-model-parallel-size 2"),
    "pipeline × data": (4, "--pipeline-model-parallel-size 2"),
}
"""Number of workers and flags."""

EITHER = r"worker {} on \S+ and worker {} on \S+ differ, and any of them may be wrong"


class Drifting(JOBS["llama-4-tied"]):  # type: ignore[misc]
    """One worker has a fault in the second step.

    Attributes:
        fault: ``weights``, ``optimizer``, or a gradient before the exchange (``computed``) or after it (``received``).
        rank: the worker.
        name: the parameter.
    """

    fault, rank, name = "", 0, ""

    def run_begins(self, run: Run) -> None:
        super().run_begins(run)
        self._observed, self._is_here = run, run.workers.rank == self.rank

    def on_train_start(self) -> None:
        super().on_train_start()
        engine = self._observed.engine
        if self._is_here and self.fault == "received gradient":
            engine.before_update.append(lambda: self._flip("gradients", self._observed.position.step == 1))

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        is_wrong = self.fault == "computed gradient" and self._observed.workers.data_rank == self.rank
        loss = super().compute_loss(model, batch)
        return loss * 1.5 if is_wrong else loss

    def on_step_end(self, step: int, result: Any) -> None:
        super().on_step_end(step, result)
        if not self._is_here or step != 2:
            return
        if self.fault == "weights":
            (parameter,) = (p for name, p in self.model.named_parameters() if name.endswith(self.name))
            _flip_bit(parameter.to_local() if hasattr(parameter, "to_local") else parameter.data)
        elif self.fault == "optimizer":
            self._flip("optimizer", True)

    def _flip(self, kind: Any, is_due: bool) -> None:
        name = f"{self.name}/exp_avg" if kind == "optimizer" else self.name
        for shard in self._observed.engine.shards(kind) if is_due else ():
            if shard.name == name:
                _flip_bit(shard.values, 26)  # of the exponent, because Adam may round one of the mantissa away


def _flip_bit(values: torch.Tensor, bit: int = 0) -> None:
    """Flip a bit of the last value, by default the last bit of the mantissa."""
    with torch.no_grad():
        values.view(-1).view(torch.int32)[-1] ^= 1 << bit


def _train(workers: Any, fault: str, rank: int, name: str, flags: str) -> list[tuple[float, float]]:
    kind = type("Job", (Drifting,), {"fault": fault, "rank": rank, "name": name})
    job = kind([*f"{FLAGS} {flags}".split()])
    job.fit()
    return job.curve  # type: ignore[no-any-return]


WEIGHTS, STATE = "the weights of {}", "exp_avg of {} in the optimizer"
THIRD = r"worker {} on \S+ differs from workers {}"
CASES = {
    ("ddp", "weights"): (2, MATRIX, WEIGHTS, THIRD.format(2, "0, 1")),
    ("ddp", "optimizer"): (0, MATRIX, STATE, THIRD.format(0, "1, 2")),
    ("ddp", "received gradient"): (1, MATRIX, WEIGHTS, THIRD.format(1, "0, 2")),
    ("hybrid", "optimizer"): (2, MATRIX, STATE, EITHER.format(0, 2)),
    ("hybrid", "received gradient"): (3, MATRIX, WEIGHTS, EITHER.format(1, 3)),
    ("zero-2", "weights"): (1, MATRIX, WEIGHTS, EITHER.format(0, 1)),
    ("tensor × data", "weights"): (3, MATRIX, WEIGHTS, EITHER.format(1, 3)),
    ("tensor × data", "optimizer"): (0, NORM, STATE, THIRD.format(0, "1, 2, 3")),
    ("pipeline × data", "weights"): (1, MATRIX, WEIGHTS, EITHER.format(0, 1)),
    ("pipeline × data", "optimizer"): (0, MATRIX, STATE, EITHER.format(0, 1)),
}
"""Rank and parameter of the fault, what the message calls the values, and how it names the workers."""


@pytest.mark.parametrize(("layout", "fault"), by_default([("ddp", "weights")], CASES))
def test_a_flipped_bit_is_found_and_named(layout: str, fault: str) -> None:
    count, flags = LAYOUTS[layout]
    rank, name, values, workers = CASES[layout, fault]
    for outcome in outcomes_in_workers(count, _train, fault, rank, name, flags):
        assert isinstance(outcome, Failure), "the run did not end"
        assert outcome.kind == "ReplicasDiffer", outcome.trace
        assert re.search(f"after step 2 {workers}", outcome.text), outcome.text
        assert values.format(name) in outcome.text


NOT_FOUND = [(layout, "computed gradient") for layout in LAYOUTS] + [("zero-2", "optimizer")]
"""Faults that reach all workers equally, or values that only one worker has."""


@pytest.mark.parametrize(("layout", "fault"), by_default([], [*NOT_FOUND, *((layout, "") for layout in LAYOUTS)]))
def test_workers_that_agree_train_to_the_end(layout: str, fault: str) -> None:
    count, flags = LAYOUTS[layout]
    flags += " --train-iters 4"  # a wrong optimizer state changes the weights of step 3 and the loss of step 4
    curves = run_in_workers(count, _train, fault, 0, MATRIX, flags)
    unmodified = run_in_workers(count, _train, "", 0, MATRIX, f"{flags} --check-replicas 0")
    assert len(curves[0]) == 4
    assert (curves == unmodified) == (not fault)


def _save(workers: Any, folder: str, flags: str) -> list[str]:
    kind = type("Job", (Drifting,), {"fault": "weights", "rank": 1, "name": MATRIX})
    job = kind([*FLAGS.replace("--check-replicas 1", flags).split(), "--save-interval", "1", "--no-export-model"],
               save=folder, no_save=False)  # fmt: skip
    try:
        job.fit()
    except ReplicasDiffer as error:
        return [error.render()]
    return []


def test_a_run_ends_before_it_saves_other_values(tmp_path: Path) -> None:
    (message,), _ = run_in_workers(2, _save, str(tmp_path / "compared"), "--async-save")
    assert "after step 2 " in message
    assert "continue with --resume" in message
    assert [path.name for path in (tmp_path / "compared/checkpoints").glob("step-*")] == ["step-1"]
    assert run_in_workers(2, _save, str(tmp_path / "not compared"), "--check-replicas 0") == [[], []]
    assert (tmp_path / "not compared/checkpoints/step-3").is_dir()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("count", [1, 7, 64, 1001])
def test_a_checksum_depends_on_every_bit_and_not_on_the_address(dtype: torch.dtype, count: int) -> None:
    values = torch.randint(0, 2, (count + 3,)).to(dtype)[:count]
    elsewhere = torch.cat([values[:1], values])[1:]
    total = int(checksum(values))
    assert int(checksum(elsewhere)) == total
    octets = elsewhere.view(torch.uint8)
    for position in range(0, octets.numel(), max(5, octets.numel() // 99)):
        for bit in range(8 if dtype != torch.bool else 1):
            octets[position] ^= 1 << bit
            assert int(checksum(elsewhere)) != total
            octets[position] ^= 1 << bit


def test_a_checksum_takes_long_tensors_at_any_address() -> None:
    values = torch.arange(CHUNK + 5, dtype=torch.float32)
    assert int(checksum(torch.cat([values[:1], values])[1:])) == int(checksum(values))
    words = np.frombuffer(values[: CHUNK + 4].numpy().tobytes(), dtype=np.int64)
    rest = np.frombuffer(values[CHUNK + 4 :].numpy().tobytes(), dtype=np.uint8)
    assert int(checksum(values)) == int(words.sum()) + int(rest.sum())
