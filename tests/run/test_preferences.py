"""Runs on preferences: no cut into batches or workers, and no way to have the reference, changes a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.preference_runs import STEPS, judged, make, pairs, run, run_all
from tests.support.worker_group import run_in_workers

Curve = list[list[float]]

LORA = ("--lora-rank", "2")
FSDP, ZERO = "--fsdp-memory-optimization", "--zero-3-memory-optimization"
ENGINES: Mapping[str, tuple[str, ...]] = {
    "ddp": (),
    "fsdp": (FSDP,),
    "zero-1": ("--zero-1-memory-optimization",),
    "zero-3": (ZERO, "--zero-3-param-persistence-threshold", "40"),
    "oss": ("--oss-memory-optimization",),
}
"""Ways to divide the trained model and the copy of it."""


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory, gpt_folder: Path) -> Mapping[str, list[str]]:
    folder = tmp_path_factory.mktemp("preferences")
    of_pairs = make(folder / "pairs", gpt_folder, pairs())
    of_judged = make(folder / "judged", gpt_folder, judged())
    losses = {loss: [*of_pairs, "--preference-loss", loss] for loss in ("dpo", "ipo", "orpo", "simpo")}
    return {
        **losses,
        "kto": [*of_judged, "--preference-loss", "kto"],
        "kto of pairs": [*of_pairs, "--preference-loss", "kto"],
        "reward": [*of_pairs, "--task", "reward"],
    }


def check_alike(curves: Mapping[str, Curve], wanted: Curve, tolerance: float = 2e-4) -> None:
    for name, curve in curves.items():
        assert len(curve) == len(wanted) == STEPS + 1, name
        for got, want in zip(curve, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=1e-5, err_msg=name)


def in_workers(count: int, folder: Path, runs: Mapping[str, Sequence[str]]) -> dict[str, Curve]:
    told = run_in_workers(count, run_all, {str(folder / name): list(flags) for name, flags in runs.items()})
    return {Path(name).name: curve for name, curve in told[0].items()}


def test_micro_batches_and_workers_change_nothing(flags: Mapping[str, list[str]], tmp_path: Path) -> None:
    whole = {name: run([*given, "--micro-batch-size", "4"], tmp_path / name) for name, given in flags.items()}
    for name, given in flags.items():
        check_alike({name: run([*given, "--micro-batch-size", "1"], tmp_path / f"{name} cut")}, whole[name])
    both = in_workers(2, tmp_path / "two", {n: [*g, "--micro-batch-size", "1"] for n, g in flags.items()})
    for name, curve in both.items():
        check_alike({name: curve}, whole[name])


def test_every_engine_holds_the_copy_and_every_reference_is_the_same(
    flags: Mapping[str, list[str]], tmp_path: Path
) -> None:
    given = [*flags["dpo"], "--micro-batch-size", "2"]
    whole = run(given, tmp_path / "whole")
    precomputed = ("--precompute-reference",)
    runs = {name: [*given, *more] for name, more in ENGINES.items()}
    runs |= {f"{name} once": [*given, *ENGINES[name], *precomputed] for name in ("ddp", "zero-3")}
    check_alike(in_workers(2, tmp_path, runs), whole)
    beside = run([*given, *LORA], tmp_path / "adapters")
    runs = {name: [*given, *LORA, *more] for name, more in ENGINES.items() if name != "oss"}
    runs["once"] = [*given, *LORA, *precomputed]
    check_alike(in_workers(2, tmp_path / "adapted", runs), beside)
