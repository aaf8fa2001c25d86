"""Traces that are made at the same time equal traces that are made one after the other."""

from __future__ import annotations

import os
import sys

import pytest

from rapidformer_templates.switches.auto_strategy.layouts import RECOMPUTED
from rapidformer_templates.switches.auto_strategy.model_shapes import TRACED_SAMPLES, Variant
from rapidformer_templates.switches.auto_strategy.tracing import in_forks
from tests.support.model_shapes import shapes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks safely")


def test_each_core_has_a_process_and_failures_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    known = {"here": 1}

    def fails() -> tuple[int, int]:
        raise ValueError

    def dies() -> tuple[int, int]:
        os._exit(1)

    told = in_forks([lambda: (known["here"], os.getpid()), fails, dies, lambda: (2, os.getpid())])
    assert sorted(number for number, _ in told) == [1, 2]
    assert len({os.getpid(), *(pid for _, pid in told)}) == 3


def test_one_process_runs_several_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    pids = in_forks([os.getpid] * 5)
    assert len(pids) == 5
    assert len({*pids, os.getpid()}) == 3


def test_one_task_is_left_to_whoever_needs_it() -> None:
    assert in_forks([os.getpid]) == []


@pytest.mark.slow
@pytest.mark.longer
def test_traces_made_together_are_those_made_alone() -> None:
    variants = [Variant(samples, recompute, tensor=tensor, sequence_parallel=tensor > 1)
                for samples in TRACED_SAMPLES for recompute in RECOMPUTED for tensor in (1, 2)]  # fmt: skip
    together, alone = shapes("gpt2"), shapes("gpt2")
    together.prepare(variants)
    assert together._traces.keys() == set(variants)
    assert together._traces == {variant: alone._traced(variant) for variant in variants}
    assert together._gradients == alone._gradients
