"""kill -9 while two workers write a checkpoint: the previous one is intact, and the run resumes from it bit for bit."""

from __future__ import annotations

import contextlib
import io
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_runs import ENGINES, SAVED, STEPS, WholeRuns, run
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers, start_workers

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
pytest.importorskip("fairscale", reason="needs fairscale: pip install 'rapidformer_templates[fairscale]'")
pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed, pytest.mark.slow, pytest.mark.durable]

KILLED = ("fsdp", "sdp", "zero-2", "zero-3")


def _hang_in_second_save(workers: Any, folder: str, engine: str) -> None:
    """Write half of each worker's first file of the last checkpoint, report it, and wait to be killed."""
    pwrite = os.pwrite

    def hang(descriptor: int, data: Any, place: int) -> int:
        if f"step-{STEPS}.tmp" not in os.readlink(f"/proc/self/fd/{descriptor}"):
            return pwrite(descriptor, data, place)
        pwrite(descriptor, data[: len(data) // 2], place)
        Path(f"{folder}-in-save-{workers.rank}").touch()
        time.sleep(600)
        raise AssertionError("nobody killed this process")

    os.pwrite = hang
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


def _resume(workers: Any, folder: str, engine: str) -> tuple[Any, str]:
    """Return the curve, and the messages of this worker."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        curve = run(folder, engine, 2, "--resume")
    return curve, said.getvalue()


@pytest.mark.parametrize("engine", by_default(["zero-2"], KILLED))
def test_the_earlier_checkpoint_is_whole_and_taken(engine: str, tmp_path: Path, whole_runs: WholeRuns) -> None:
    folder = tmp_path / engine
    _begin_and_kill(str(folder), engine, str(tmp_path))
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    assert left == {"latest", f"step-{SAVED}", f"step-{STEPS}.tmp"}
    assert ENGINES[engine]
    curve, said = run_in_workers(2, _resume, str(folder), engine)[0]
    assert f"resuming from {folder}/checkpoints/step-{SAVED}" in said
    assert curve == whole_runs.curves[engine][SAVED:]
