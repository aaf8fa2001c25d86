"""A worker that hangs or leaves ends the run, and the message names it with its step and its line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rapidformer_templates.errors import WorkerHangs
from rapidformer_templates.run import watch
from rapidformer_templates.run.watch import STEP, HangWatch
from rapidformer_templates.system.phase_clock import PhaseClock
from rapidformer_templates.system.workers import Workers
from tests.support.programs import wait_until
from tests.support.selection import by_default

ROOT = Path(__file__).parents[2]
SCRIPT = "tests/support/scripts/hanging.py"
FLAGS = "--train-iters 12 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --device cpu --save-interval 2"
LAYOUTS = {
    "replicas": "--nproc-per-node 2",
    "fsdp": "--nproc-per-node 2 --fsdp-memory-optimization",
    "zero-2": "--nproc-per-node 2 --zero-2-memory-optimization",
    "2 × 2": "--nproc-per-node 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
}
HANGS = {
    "sleeps": r"worker 1 on \S+ makes no progress: hanging\.py:43 in on_step_end \(step 5, hooks and own code\)",
    "reads": r"worker 1 on \S+ makes no progress: hanging\.py:27 in __getitem__ \(step 6, loading data\)",
    "stops": r"worker 1 on \S+ does not respond \(stopped or gone\)",
}
WAITING = r"worker 0 in \w+, \S+ in \w+ \(step [56], "


def _run(how: str, rank: int, layout: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, SCRIPT, how, str(rank), *FLAGS.split(), *LAYOUTS[layout].split()]
    return subprocess.run(
        [*words, "--save", str(folder), "--worker-timeout", "6"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=240,
    )


CASES = [(how, layout) for how in HANGS for layout in LAYOUTS if how == "sleeps" or layout != "fsdp"]


@pytest.mark.distributed
@pytest.mark.parametrize(("how", "layout"), by_default([("stops", "replicas")], CASES))
def test_a_worker_that_hangs_is_named(how: str, layout: str, tmp_path: Path) -> None:
    ended = _run(how, 1, layout, tmp_path / "run")
    assert ended.returncode == WorkerHangs.exit_status, ended.stderr
    assert re.search(HANGS[how], ended.stderr), ended.stderr
    assert layout != "replicas" or re.search(WAITING, ended.stderr), ended.stderr
    assert "--resume continues from step-4" in ended.stderr
    stacks = {path.name: path.read_text() for path in (tmp_path / "run/stacks").iterdir()}
    assert ("rank-1.txt" in stacks) == (how != "stops")  # a stopped worker cannot write
    assert "all_reduce" in stacks["rank-0.txt"] or layout != "replicas"


@pytest.mark.distributed
@pytest.mark.longer
def test_the_first_worker_keeps_the_store_and_can_stop_as_well(tmp_path: Path) -> None:
    ended = _run("stops", 0, "replicas", tmp_path / "run")
    assert ended.returncode == WorkerHangs.exit_status, ended.stderr
    assert "worker 0 at 127.0.0.1 does not respond (stopped or gone)" in ended.stderr


LEAVES = {
    "exits": [r"worker 1 has called sys.exit\(\)"],
    "leaves": ["worker 1 left the other workers with status 0"],
    # Gloo aborts one of the two workers that exchange numbers of different sizes: which one, is not determined.
    "calls another collective": [
        r"worker [01] was killed by SIGABRT after \d+ s",
        r"\n  where  (hanging\.py:53 in on_step_end|workers\.py:\d+ in sum)\n",
        "such as different collectives in two workers",
    ],
}


@pytest.mark.distributed
@pytest.mark.parametrize("how", by_default(["exits"], LEAVES))
def test_a_worker_that_leaves_is_named(how: str, tmp_path: Path) -> None:
    ended = _run(how, 1, "replicas", tmp_path / "run")
    assert ended.returncode == 1
    assert all(re.search(text, ended.stderr) for text in LEAVES[how]), ended.stderr
    assert "Traceback" not in ended.stderr or "collective" in how


class BusyStore:
    """The store of 300 workers that all make progress, which is slow to answer. It counts its requests."""

    def __init__(self) -> None:
        self.checks, self.reads, self.beat = 0, 0, 0

    def clone(self) -> BusyStore:
        return self

    def set(self, key: str, value: str) -> None:
        self.activity = json.loads(value) | {"is_overdue": False}

    def check(self, keys: list[str]) -> bool:
        self.checks += 1
        time.sleep(0.3)
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.reads, self.beat = self.reads + 1, self.beat + 1
        return [json.dumps(self.activity | {"beat": self.beat}).encode() for _ in keys]


def test_a_busy_store_is_asked_little_and_nobody_is_blamed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "BEAT", 0.05)
    blamed: list[BaseException] = []
    monkeypatch.setattr(watch, "report_error", blamed.append)
    store: Any = BusyStore()
    watching = HangWatch(PhaseClock())
    watching.longest[STEP] = 0.01
    watching.enter(STEP, 5)
    with watching.running(Silent(1, 1, 300, torch.device("cpu"), store=store), 0.5, None, lambda: ""):
        wait_until(lambda: store.reads >= 4, "the worker is overdue and does not ask what the others do")
    assert (blamed, store.checks) == ([], store.reads)


class Silent(Workers):
    """A worker that waits for nobody."""

    def barrier(self) -> None:
        pass


def test_no_worker_ends_before_all_have_stopped_publishing() -> None:
    """The first worker keeps the store. Torch prints C++ frames if another one publishes after it has ended."""
    publishing: list[bool] = []

    class Two(Workers):
        def barrier(self) -> None:
            publishing.append(any(thread.name == "watch workers" for thread in threading.enumerate()))

    two = Two(0, 0, 2, torch.device("cpu"))
    with HangWatch(two.clock).running(two, 600, None, lambda: ""):
        assert publishing == []
    assert publishing == [True, False]
