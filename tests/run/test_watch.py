"""Workers that are slow, hang or leave: the report or the error names them with their phase, step and line."""

import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rapidformer_templates import Data
from rapidformer_templates.errors import WorkerHangs
from rapidformer_templates.run import watch
from rapidformer_templates.run.run import Run
from rapidformer_templates.run.watch import COMPARED, STEP, HangWatch, find_stragglers
from rapidformer_templates.system.phase_clock import BACKWARD, EXCHANGE, FORWARD, UPDATE, PhaseClock
from rapidformer_templates.system.workers import Workers
from tests.support.parallel_jobs import JOBS
from tests.support.programs import wait_until
from tests.support.selection import by_default, few
from tests.support.worker_pool import run_in_workers

DATA, FORWARDS = COMPARED.index(watch.DATA), COMPARED.index(FORWARD)


def _times(forward: float, data: float = 1.0, waiting: float = 0.0) -> list[float]:
    phases = [0.0] * len(COMPARED)
    phases[FORWARDS], phases[DATA] = forward, data
    return [forward + data, *phases, waiting]


def test_the_slow_worker_and_its_phase_are_found() -> None:
    (one,) = find_stragglers([_times(9), _times(10), _times(11, data=10), _times(8)], [0] * 4, 1.5)
    assert one == (2, watch.DATA, [21, 10], [10, 1])


@pytest.mark.parametrize(
    ("times", "stages", "found"),
    [
        ([_times(9), _times(13.9)], [0, 0], []),  # 1.5 × (9 + 1) = 14 + 1
        ([_times(9), _times(14.0)], [0, 0], [1]),
        ([_times(9), _times(14.0), _times(9), _times(90)], [0] * 4, [1, 3]),
        ([_times(10), _times(12), _times(9), _times(11)], [0] * 4, []),
        ([_times(1, waiting=100), _times(9, waiting=92)], [0, 0], []),  # the others hardly lose time
        ([_times(1, waiting=100), _times(19, waiting=82)], [0, 0], [1]),
        ([_times(10), _times(30), _times(10), _times(30)], [0, 1, 0, 1], []),  # peers are of the same stage
        ([_times(10), _times(30), _times(20), _times(30)], [0, 1, 0, 1], [2]),
        ([_times(10), _times(30)], [0, 1], []),
    ],
)
def test_peers_are_compared_by_their_median(times: list[list[float]], stages: list[int], found: list[int]) -> None:
    assert [rank for rank, *_ in find_stragglers(times, stages, 1.5)] == found


class Time:
    """A clock that advances by a second with each look, and by what a job needs."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1
        return self.seconds


def test_a_clock_separates_the_time_in_which_a_worker_waits() -> None:
    time = Time()
    clock = PhaseClock(time)

    def exchange() -> None:
        time.seconds += 100

    clock.enter(FORWARD)
    clock.wait(exchange)
    time.seconds += 10
    clock.enter(BACKWARD)
    clock.enter(FORWARD)
    busy, waiting = clock.take()
    assert (busy[FORWARD], waiting[FORWARD]) == (10 + 2 + 1, 100 + 1)
    assert (busy[BACKWARD], waiting[BACKWARD]) == (1, 0)
    assert clock.take()[0] == {FORWARD: 1}


class SlowSamples(list[Any]):
    """Samples that are slow to read."""

    def __init__(self, samples: list[Any], delay: Any) -> None:
        super().__init__(samples)
        self.delay = delay

    def __getitem__(self, index: Any) -> Any:
        self.delay()
        return super().__getitem__(index)


class Slow(JOBS["llama-4-tied"]):  # type: ignore[misc]
    """One worker is slow in one phase. Time passes only there, and with each look at the clock."""

    rank, phase = 0, ""

    def run_begins(self, run: Run) -> None:
        super().run_begins(run)
        self.time, self.is_slow = Time(), run.workers.rank == self.rank
        run.workers.clock.now = self.time
        run.workers.clock.take()

    def _pass(self, phase: str) -> None:
        if self.is_slow and phase == self.phase:
            self.time.seconds += 1000

    def build_data(self) -> Data:
        data: Data = super().build_data()
        data.train = SlowSamples(data.train, lambda: self._pass(watch.DATA))  # type: ignore[arg-type]
        return data

    def compute_loss(self, model: Any, batch: Any) -> Any:
        self._pass(FORWARD)
        return super().compute_loss(model, batch)

    def on_step_end(self, step: int, result: Any) -> None:
        self._pass(watch.OWN_CODE)


SLOW_LAYOUTS = {
    "ddp": (2, ""),
    "fsdp": (2, "--fsdp-memory-optimization"),
    "zero-2": (2, "--zero-2-memory-optimization"),
    "tensor": (2, "--tensor-model-parallel-size 2"),
    "pipeline × data": (4, "--pipeline-model-parallel-size 2"),
}
"""Number of workers and flags."""


def _train_slow(workers: Any, rank: int, phase: str, flags: str) -> tuple[list[Any], list[str], list[dict[str, Any]]]:
    job = type("Job", (Slow,), {"rank": rank, "phase": phase})(flags.split())
    lines: list[dict[str, Any]] = []
    with (
        mock.patch.object(watch, "PERIOD", 4),
        mock.patch.object(watch, "say") as say,
        mock.patch("rapidformer_templates.run.log.Log.record", lambda log, line: lines.append(line)),
    ):
        summary = job.fit()
    return summary["stragglers"], [call.args[1] for call in say.call_args_list], lines


SLOW_FLAGS = "--train-iters 12 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --log-interval 1"
SLOW_CASES = [(layout, phase) for layout in SLOW_LAYOUTS for phase in (FORWARD, watch.DATA, watch.OWN_CODE)]


@pytest.mark.distributed
@pytest.mark.parametrize(("layout", "phase"), few([("ddp", watch.DATA)], SLOW_CASES))
def test_a_slow_worker_is_reported(layout: str, phase: str) -> None:
    count, flags = SLOW_LAYOUTS[layout]
    for found, messages, lines in run_in_workers(count, _train_slow, 1, phase, f"{SLOW_FLAGS} {flags}"):
        (one,) = found
        assert (one["rank"], one["phase"], one["reports"]) == (1, phase, 2)
        assert (one["first_step"], one["last_step"]) == (4, 11)
        assert len(messages) == 2
        assert messages[1].startswith("steps 8 to 11: worker 1 on ")
        assert f"it loses most in {phase}: " in messages[1]
        assert [line["step"] for line in lines if line.get("straggler") == 1] == [8, 12]


@pytest.mark.longer
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "rank", "flags"),
    [("ddp", 1, "--straggler-factor 0"), ("pipeline × data", -1, "")],
)
def test_equal_workers_and_a_factor_of_0_are_silent(layout: str, rank: int, flags: str) -> None:
    count, layout_flags = SLOW_LAYOUTS[layout]
    for found, messages, _ in run_in_workers(count, _train_slow, rank, FORWARD, f"{SLOW_FLAGS} {layout_flags} {flags}"):
        assert (found, messages) == ([], [])


def _phases_with_waits(workers: Any, flags: str) -> tuple[set[str], list[str]]:
    """Return the phases in which this worker waited, and the phases that it entered."""
    seen: set[str] = set()
    entered: list[str] = []
    enter = PhaseClock.enter

    def record(clock: PhaseClock, phase: str) -> None:
        entered.append(phase)
        enter(clock, phase)

    class Job(Slow):
        def on_step_end(self, step: int, result: Any) -> None:
            _, waiting = self.run_clock.take()
            seen.update(phase for phase, seconds in waiting.items() if seconds)
            dist.barrier()
            assert self.run_clock.take()[1][watch.OWN_CODE] >= 1

        def run_begins(self, run: Run) -> None:
            super().run_begins(run)
            self.run_clock = run.workers.clock

    with mock.patch.object(PhaseClock, "enter", record):
        Job(flags.split()).fit()
    return seen, entered


WAITS = {
    "ddp": {watch.EXCHANGE, EXCHANGE},
    "fsdp": {watch.EXCHANGE, EXCHANGE, FORWARD, BACKWARD, UPDATE},
    "zero-2": {watch.EXCHANGE, EXCHANGE, BACKWARD, UPDATE},
    "tensor": {watch.EXCHANGE, EXCHANGE, FORWARD, BACKWARD, UPDATE},
    "pipeline × data": {watch.EXCHANGE, EXCHANGE, FORWARD, BACKWARD, UPDATE},
}
"""The phases in which a worker of each layout waits for others."""


@pytest.mark.longer
@pytest.mark.distributed
@pytest.mark.parametrize("layout", SLOW_LAYOUTS)
def test_waits_in_collectives_do_not_count(layout: str) -> None:
    count, flags = SLOW_LAYOUTS[layout]
    for seen, entered in run_in_workers(count, _phases_with_waits, f"{SLOW_FLAGS} {flags}"):
        assert seen >= WAITS[layout]
        after_backward = [entered[i + 1 : i + 3] for i, phase in enumerate(entered) if phase == BACKWARD]
        # DDP's engine enters the exchange inside of the last backward, before DDP waits for its buckets.
        assert ([EXCHANGE, EXCHANGE] in after_backward) == (layout == "ddp")


ROOT = Path(__file__).parents[2]
SCRIPT = "tests/support/scripts/hanging.py"
FLAGS = "--train-iters 12 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --device cpu --save-interval 2"
LAYOUTS = {
    "replicas": "--nproc-per-node 2",
    "fsdp": "--nproc-per-node 2 --fsdp-memory-optimization",
    "zero-2": "--nproc-per-node 2 --zero-2-memory-optimization",
}
HANGS = {
    "sleeps": r"worker 1 on \S+ makes no progress: hanging\.py:41 in on_step_end \(step 5, hooks and own code\)",
    "reads": r"worker 1 on \S+ makes no progress: hanging\.py:25 in __getitem__ \(step 6, loading data\)",
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


@pytest.mark.distributed
@pytest.mark.parametrize(("how", "layout"), few([], itertools.product(HANGS, LAYOUTS)))
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


IN_SESSIONS = {
    "in generate": r"worker 1 on \S+ makes no progress: hanging_session\.py:20 in wait \(step 1, evaluation\)",
    "after evaluate": r"worker 1 .* progress: hanging_session\.py:26 in main \(step 1, hooks and own code\)",
    "slow": None,
}


@pytest.mark.distributed
@pytest.mark.parametrize("how", by_default(["after evaluate"], IN_SESSIONS))
def test_sessions_name_a_worker_that_hangs_and_wait_for_slow_tokens(how: str) -> None:
    """Twenty tokens take 10 s, each of them half a second. A phase may take 6 s."""
    script, flags = "tests/support/scripts/hanging_session.py", "--nproc-per-node 2 --worker-timeout 2"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    words = [sys.executable, script, how, *flags.split()]
    ended = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    named = IN_SESSIONS[how]
    if named is None:
        assert (ended.returncode, ended.stdout.count("done")) == (0, 2), ended.stderr
        return
    assert ended.returncode == WorkerHangs.exit_status
    assert re.search(named, ended.stderr), ended.stderr
    assert "continue from your last checkpoint; --worker-timeout (now 2 s)" in ended.stderr


LEAVES = {
    "exits": [r"worker 1 has called sys.exit\(\)"],
    "leaves": ["worker 1 left the other workers with status 0"],
    # Gloo aborts one of the two workers that exchange numbers of different sizes: which one, is not determined.
    "calls another collective": [
        r"worker [01] was killed by SIGABRT after \d+ s",
        r"\n  where  (hanging\.py:51 in on_step_end|workers\.py:\d+ in sum)\n",
        "such as different collectives in two workers",
    ],
}


@pytest.mark.longer
@pytest.mark.distributed
@pytest.mark.parametrize("how", LEAVES)
def test_a_worker_that_leaves_is_named(how: str, tmp_path: Path) -> None:
    ended = _run(how, 1, "replicas", tmp_path / "run")
    assert ended.returncode == 1
    assert all(re.search(text, ended.stderr) for text in LEAVES[how]), ended.stderr
    assert "Traceback" not in ended.stderr or "collective" in how


class BusyStore:
    """The store of 300 workers, which is slow to answer. All but the stopped one make progress. It counts requests."""

    def __init__(self, stopped: int | None) -> None:
        self.stopped, self.checks, self.reads, self.beat = stopped, 0, 0, 0

    def clone(self) -> Self:
        return self

    def set(self, key: str, value: str) -> None:
        self.activity = json.loads(value) | {"is_overdue": False}

    def check(self, keys: list[str]) -> bool:
        self.checks += 1
        time.sleep(0.1)
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.reads, self.beat = self.reads + 1, self.beat + 1
        beats = {f"watch/{self.stopped}": 0}
        return [json.dumps(self.activity | {"beat": beats.get(key, self.beat)}).encode() for key in keys]


@pytest.mark.parametrize("stopped", [None, 7])
def test_a_busy_store_is_asked_little_and_only_a_worker_that_stands_still_is_blamed(
    stopped: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "BEAT", 0.01)
    blamed: list[Any] = []
    monkeypatch.setattr(watch, "report_error", blamed.append)
    store: Any = BusyStore(stopped)
    watching = HangWatch(PhaseClock())
    watching.longest[STEP] = 0.01
    watching.enter(STEP, 5)
    with watching.running(Silent(1, 1, 300, torch.device("cpu"), store=store), 0.8, None, lambda: ""):
        wait_until(
            lambda: bool(blamed) if stopped else store.reads >= 2,
            "the worker is overdue and does not ask what the others do",
        )
    wait_until(lambda: "watch workers" not in {thread.name for thread in threading.enumerate()}, "it still watches")
    assert store.checks == store.reads
    assert bool(blamed) == bool(stopped)
    if stopped:
        assert re.search(r": worker 7 on \S+ does not respond \(stopped or gone\); last seen: ", blamed[0].message)


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
