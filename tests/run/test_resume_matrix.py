"""Any engine resumes what any other engine has saved with any number of workers. The curve is the uninterrupted one.

Also after a kill -9 while two workers write a checkpoint.
"""

import contextlib
import io
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.crash_points import hang_in_writes
from tests.support.engine_runs import ENGINES, SAVED, STEPS, WholeRuns, run, run_all
from tests.support.parity import assert_close
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers, start_workers

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
pytest.importorskip("fairscale", reason="needs fairscale: pip install 'rapidformer_templates[fairscale]'")
pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed, pytest.mark.slow]

NAMES = list(ENGINES)
NEXT = list(zip(NAMES, [*NAMES[1:], NAMES[0]], strict=True))
"""Pairs (source, target). There is only one format. So each engine only writes for one other engine and reads from one.

Four workers of an engine resume a run that two workers of the previous engine in the list have saved.
"""


def half_of(whole: Path, copy: Path) -> None:
    """Copy a run as if it had died after its first checkpoint."""
    shutil.copytree(whole, copy, ignore=shutil.ignore_patterns(f"step-{STEPS}", "summary.json"))
    (copy / "checkpoints" / "latest").write_text(f"step-{SAVED}\n")


def _go_on(workers: Any, folder: str, engine: str) -> Any:
    return run(folder, engine, workers.world, "--resume")


def resumed(workers: int, source: str, target: str, whole: WholeRuns, folder: Path) -> Any:
    """Return the second half of the target's run after the source's first half, trained by two workers."""
    half_of(whole.root / source, folder / "run")
    return run_in_workers(workers, _go_on, str(folder / "run"), target)[0]


@pytest.fixture(scope="module")
def whole_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> WholeRuns:
    """Train with the engines that the selected tests start from."""
    root = tmp_path_factory.mktemp("whole-runs")
    names = [name for name in ENGINES if name in selected(request, "source")]
    return WholeRuns(root, run_in_workers(2, run_all, str(root), names)[0])


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    curve = run(str(tmp_path_factory.mktemp("reference") / "run"), "plain", 1)
    assert len({loss for loss, _ in curve}) == STEPS, "the reference moves"
    return curve


@pytest.mark.parametrize(("source", "target"), by_default([("plain", "fsdp")], NEXT))
def test_four_workers_of_the_next_engine_go_on(
    source: str, target: str, whole_runs: WholeRuns, reference: Any, tmp_path: Path
) -> None:
    assert_close(resumed(4, source, target, whole_runs, tmp_path), reference[SAVED:])


@pytest.mark.longer
@pytest.mark.parametrize("source", NAMES)
def test_the_same_engine_goes_on_bitwise(source: str, whole_runs: WholeRuns, reference: Any, tmp_path: Path) -> None:
    assert_close(whole_runs.curves[source], reference)
    assert resumed(2, source, source, whole_runs, tmp_path) == whole_runs.curves[source][SAVED:]


@pytest.mark.longer
@pytest.mark.parametrize("source", NAMES)
def test_two_workers_one_and_two_again(source: str, whole_runs: WholeRuns, tmp_path: Path, reference: Any) -> None:
    folder = tmp_path / "run"
    half_of(whole_runs.root / source, folder)
    begun = run(str(folder), source, 1, "--resume", "--save-interval", "1", dies_after=SAVED + 2)
    assert_close(begun, reference[SAVED : SAVED + 2])
    # The checkpoint of the step in which a run dies is never written.
    assert_close(run_in_workers(2, _go_on, str(folder), source)[0], reference[SAVED + 1 :])


def _hang_in_second_save(workers: Any, folder: str, engine: str) -> None:
    """Write half of each worker's first file of the last checkpoint, report it, and wait to be killed."""
    hang_in_writes(f"step-{STEPS}.tmp", Path(f"{folder}-in-save-{workers.rank}").touch)
    run(folder, engine, 2)


def _begin_and_kill(folder: str, engine: str, work: str) -> None:
    context = start_workers(2, work, _hang_in_second_save, folder, engine)
    marks = [Path(f"{folder}-in-save-{rank}") for rank in (0, 1)]
    while not all(mark.exists() for mark in marks):
        assert all(process.is_alive() for process in context.processes), "a worker ended before it was killed"
        time.sleep(0.02)
    for process in context.processes:
        process.kill()
    for process in context.processes:
        process.join()


def _resume_with_messages(workers: Any, folder: str, engine: str) -> tuple[Any, str]:
    """Return the curve, and the messages of this worker."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        curve = run(folder, engine, 2, "--resume")
    return curve, said.getvalue()


@pytest.mark.longer
@pytest.mark.durable
@pytest.mark.parametrize("source", ["fsdp", "sdp", "zero-2", "zero-3"])
def test_killed_in_a_save_it_takes_the_earlier_checkpoint(source: str, tmp_path: Path, whole_runs: WholeRuns) -> None:
    folder = tmp_path / source
    _begin_and_kill(str(folder), source, str(tmp_path))
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    assert left == {"latest", f"step-{SAVED}", f"step-{STEPS}.tmp"}
    curve, said = run_in_workers(2, _resume_with_messages, str(folder), source)[0]
    assert f"resuming from {folder}/checkpoints/step-{SAVED}" in said
    assert curve == whole_runs.curves[source][SAVED:]
