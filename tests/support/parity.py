"""Train a layout without files: the weights come from the engine, not from a checkpoint.

``tests/run/test_exports.py`` compares the files that a run writes.
"""

import hashlib
import os
import pickle
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypedDict
from unittest import mock

import torch
from filelock import FileLock

from rapidformer_templates import Trainer
from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.shards import shards_to_write
from rapidformer_templates.run import fit
from rapidformer_templates.run.log import Log
from rapidformer_templates.run.run import Run
from rapidformer_templates.system.workers import Workers
from tests.support import jobs
from tests.support.worker_pool import run_in_workers


class Trained(TypedDict):
    """The result of a run. ``curve``, ``lines`` and ``evaluations`` come from this rank.

    Attributes:
        curve: (loss, gradient norm) of each step.
        weights: full tensors in fp64 by canonical name.
        averages: the same of the averaged weights, if the run keeps them.
        summary: the content of ``summary.json``.
        lines: the content of ``metrics.jsonl``, on rank 0.
        evaluations: ``eval_loss`` of each evaluation.
    """

    curve: list[tuple[float, float]]
    weights: dict[str, torch.Tensor]
    averages: dict[str, torch.Tensor]
    summary: dict[str, Any]
    lines: list[dict[str, Any]]
    evaluations: list[float]


def train(job: str, double: bool, flags: str, *more: str, lr: str | None = "1e-3") -> Trained:
    """Train a job of :mod:`tests.support.jobs`, in fp64 if ``double``.

    Args:
        more: flags whose values may contain spaces.
        lr: learning rate, or None if the flags contain one.
    """
    kind = type(job, ((jobs.OTHERS | jobs.JOBS)[job],), {"double": double})
    rate = ["--lr", lr] if lr else []
    return trained(kind([*flags.split(), *more, *rate, "--log-interval", "1"]))


ENGINES = {
    "ddp": "", "oss": "--oss-memory-optimization", "sdp": "--oss-sdp-memory-optimization",
    "fsdp": "--fsdp-memory-optimization", "zero-1": "--zero-1-memory-optimization",
    "zero-2": "--zero-2-memory-optimization", "zero-3": "--zero-3-memory-optimization",
    "distributed-optimizer": "--use-distributed-optimizer", "tensor": "--tensor-model-parallel-size 2",
    "pipeline": "--pipeline-model-parallel-size 2", "context": "--context-parallel-size 2",
}  # fmt: skip
"""Flags of one run of each engine with two workers, and of those that divide a model."""

FOLDER = "RAPIDFORMER_TEST_REFERENCES"
"""Environment variable with the folder of this session's runs, which all test processes share."""


@cache
def reference(job: str, double: bool, flags: str, *, lr: str | None = "1e-3") -> Trained:
    """Train a job in this process, once per session. Callers must not change the result.

    Args:
        job, double, flags, lr: see :func:`train`.
    """
    found: Trained = _once((job, double, flags.split(), lr), lambda: train(job, double, flags, lr=lr))
    return found


@cache
def observed(workers: int, job: str, double: bool, flags: str, *, lr: str | None = "1e-3") -> list[Trained]:
    """Train a job in a group of workers, once per session, and return what each rank has seen.

    Tests of one layout look at the same run. Callers must not change the result.

    Args:
        workers: at most four.
        job, double, flags, lr: see :func:`train`.
    """
    key = (workers, job, double, flags.split(), lr)
    found: list[Trained] = _once(key, lambda: run_in_workers(workers, _trained, job, double, flags, lr))
    return found


def _trained(workers: Workers, job: str, double: bool, flags: str, lr: str | None) -> Trained:
    return train(job, double, flags, lr=lr)


def _once(key: object, make: Callable[[], Any]) -> Any:
    """Return what ``make`` returns. It is called once per session, by one of the test processes."""
    folder = Path(os.environ.get(FOLDER) or tempfile.mkdtemp())
    file = folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.pickle"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            half = file.with_suffix(".tmp")
            half.write_bytes(pickle.dumps(make()))
            half.rename(file)
        return pickle.loads(file.read_bytes())


def trained(template: Trainer) -> Trained:
    """Train a template in this process or in this group of workers. Every worker must call it."""
    weights: dict[str, torch.Tensor] = {}
    averages: dict[str, torch.Tensor] = {}
    lines: list[dict[str, Any]] = []
    record = Log.record

    def take(run: Run) -> None:
        weights.update(whole_weights(run.engine, run.workers))
        if template.config.training.ema_decay is not None:
            with run.engine.averaged():
                averages.update(whole_weights(run.engine, run.workers))

    def record_too(log: Log, line: Mapping[str, Any]) -> None:
        lines.append(dict(line))
        record(log, line)

    with mock.patch.object(Log, "record", record_too):
        summary = fit.fit(template, take)
    evaluations = [line["eval_loss"] for line in lines if "eval_loss" in line]
    curve: list[tuple[float, float]] = getattr(template, "curve", [])
    return {
        "curve": curve, "weights": weights, "averages": averages, "summary": summary, "lines": lines,
        "evaluations": evaluations,
    }  # fmt: skip


def whole_weights(engine: Engine, workers: Workers) -> dict[str, torch.Tensor]:
    """Gather from all workers the weights that an engine would write to a checkpoint, in fp64.

    Raises:
        AssertionError: a part of a tensor is written twice or not at all.
    """
    boxes = [
        (shard.name, shard.shape, offset, _widest(values.detach().cpu()).clone())
        for shard in shards_to_write(engine.shards("weights"))
        for offset, values in shard.parts()
    ]
    weights: dict[str, torch.Tensor] = {}
    times: dict[str, torch.Tensor] = {}
    for name, shape, offset, values in chain.from_iterable(workers.gather(boxes)):
        place = tuple(slice(o, o + size) for o, size in zip(offset, values.shape, strict=True))
        weights.setdefault(name, torch.zeros(shape, dtype=values.dtype))[place] = values
        times.setdefault(name, torch.zeros(shape, dtype=torch.uint8))[place] += 1
    for name, count in times.items():
        assert bool((count == 1).all()), f"{name}: parts of it are written twice, or not at all"
    return weights


def _widest(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def assert_close(found: Any, wanted: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Compare numbers or tensors in fp64."""
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64), torch.as_tensor(wanted, dtype=torch.float64), rtol=rtol, atol=atol
    )


EXACT = 1e-10, 1e-12
"""Bounds (rtol, atol) in fp64, which separates rounding from mistakes."""


def assert_follows(
    found: Trained, wanted: Trained, rtol: float = 1e-5, atol: float = 1e-6, weights: tuple[float, float] | None = None
) -> None:
    """Check that losses, gradient norms, evaluations and weights of a run are those of another one.

    Args:
        weights: other bounds (rtol, atol) of the weights. Adam divides a gradient by its own magnitude, so in fp32 a
            gradient near zero shows its rounding in full.
    """
    for key in ("curve", "evaluations"):
        assert_close(found[key], wanted[key], rtol, atol)  # type: ignore[literal-required]
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, weight in wanted["weights"].items():
        assert_close(found["weights"][name], weight, *(weights or (rtol, atol)))


def weights_apart(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Return the norm of the difference of all weights, divided by the norm of the wanted weights."""
    apart = sum(float((found[name] - weight).square().sum()) for name, weight in wanted.items())
    whole = sum(float(weight.square().sum()) for weight in wanted.values())
    return float((apart / whole) ** 0.5)
