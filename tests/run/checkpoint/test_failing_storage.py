"""Storage that fails for a while, or for ever: saves are tried again, and no complete checkpoint is lost.

The faults are injected into the calls of the operating system.
"""

import contextlib
import errno
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rapidformer_templates.errors import CheckpointError, StorageFailed
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.checkpoint.async_save import AsyncSaver
from rapidformer_templates.run.folder import read_metrics
from rapidformer_templates.system import files
from rapidformer_templates.system.workers import Workers
from tests.support.engine_runs import run
from tests.support.lines import FLAGS, Line, Worsening
from tests.support.messages import Says
from tests.support.selection import by_default
from tests.support.shelf import Shelf
from tests.support.worker_pool import alone, run_in_workers

pytestmark = pytest.mark.durable

CHANGES = ("pwrite", "write", "fsync", "rename", "mkdir", "rmdir", "unlink", "truncate", "listdir", "scandir")
PAUSES = (0.01, 0.02, 0.04)


@contextlib.contextmanager
def faults(fails: Callable[[str], int | None], calls: tuple[str, ...] = CHANGES) -> Iterator[None]:
    """Let calls of the operating system fail inside the context.

    Args:
        fails: takes ``"call path"`` and returns the number of an error, or None.
    """

    def faulty(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(target: Any, *arguments: Any, **named: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
            error = fails(f"{name} {path}")
            if error is not None:
                raise OSError(error, os.strerror(error), path)
            return real(target, *arguments, **named)

        return call

    with contextlib.ExitStack() as stack:
        for name in calls:
            stack.enter_context(mock.patch.object(os, name, faulty(name)))
        stack.enter_context(mock.patch.object(files, "RETRY_SECONDS", PAUSES))
        yield


class Storage:
    """A file system that is gone for some calls."""

    def __init__(self, error: int, first: int, last: float) -> None:
        self.error, self.first, self.last = error, first, last
        self.calls = 0

    def __call__(self, call: str) -> int | None:
        if "/checkpoints" not in call:
            return None
        self.calls += 1
        return self.error if self.first <= self.calls <= self.last else None


def train(folder: Path, *flags: str) -> Line:
    job = Line([*FLAGS, "--train-iters", "10", "--save", str(folder), "--save-interval", "2", *flags])
    job.fit()
    return job


TRANSIENT = ("EIO", "ESTALE", "ETIMEDOUT", "EROFS", "ENOSPC", "EAGAIN", "EDQUOT", "ENOENT")


@pytest.mark.parametrize("name", TRANSIENT)
def test_a_save_is_tried_again_with_a_message(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failures = iter([getattr(errno, name)] * 2)
    with faults(lambda call: next(failures, None) if call.startswith("pwrite") else None):
        path = checkpoint.save(tmp_path, 1, Shelf(), {}, alone())
    assert checkpoint.problem_of(path) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]
    lines = [line for line in capsys.readouterr().err.splitlines() if "could not be written yet" in line]
    assert [line.partition("; trying again in ")[2] for line in lines] == ["0.01 s (1 of 3)", "0.02 s (2 of 3)"]


def test_other_errors_are_not_tried_again(tmp_path: Path) -> None:
    calls: list[str] = []
    denied = lambda call: calls.append(call) or (errno.EACCES if call.startswith("pwrite") else None)  # noqa: E731
    with faults(denied), pytest.raises(CheckpointError, match="not allowed to write") as caught:
        checkpoint.save(tmp_path, 1, Shelf(), {}, alone())
    assert not isinstance(caught.value, StorageFailed)
    assert len([call for call in calls if call.startswith("pwrite")]) == 1


@pytest.mark.parametrize("background", by_default([False], [False, True]))
def test_any_call_may_fail_once(background: bool, tmp_path: Path) -> None:
    """Let every fifth call of two saves fail in turn. Each of these saves leaves an intact checkpoint."""

    def save_twice(root: Path, fault: Storage) -> None:
        root.mkdir(parents=True)
        with faults(fault), contextlib.closing(AsyncSaver(root, alone(), keep=1)) as saver:
            for step in (1, 2):
                if background:
                    saver.start(step, Shelf(), {}, None)
                    saver.wait()
                else:
                    path = checkpoint.save(root, step, Shelf(), {}, alone())
                    checkpoint.delete_older(path, 1, None, alone())

    counted = Storage(0, 0, -1)
    save_twice(tmp_path / "checkpoints-whole", counted)
    assert counted.calls > 40
    for number in range(1 + background, counted.calls + 1, 5):
        root = tmp_path / f"checkpoints-{number}"
        save_twice(root, Storage(errno.EIO, number, number))
        assert checkpoint.problem_of(root / "step-2") is None
        assert {path.name.removesuffix(".tmp") for path in root.iterdir()} <= {"latest", "step-1", "step-2"}
        assert (root / "latest").read_text() == "step-2\n"


@pytest.mark.parametrize("flags", by_default([["--async-save"]], [[], ["--async-save"]]), ids=["waiting", "async"])
def test_training_continues_without_saves(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The storage is gone from step 3 to step 7. Step 4 is tried several times, step 6 once, and step 8 is saved."""
    whole = train(tmp_path / "whole", *flags)
    gone = {"now": False}

    class Passing(Line):
        def on_step_end(self, step: int, result: Any) -> None:
            gone["now"] = 3 <= step <= 7

    job = Passing([*FLAGS, "--epochs", "2", "--save", str(tmp_path / "run"), "--save-interval", "2", *flags])
    with faults(lambda call: errno.ESTALE if gone["now"] and f"{tmp_path}/run" in call else None):
        job.fit()
    printed = capsys.readouterr().err
    assert torch.equal(job.model.weight, whole.model.weight)
    saved = {path.name for path in checkpoint.candidates(tmp_path / "run" / "checkpoints")}
    assert saved == {"step-8", "step-10"} | ({"step-2"} & saved)
    assert "the checkpoint of step 4 could not be written: the network file system has lost the folder" in printed
    assert "training continues, and the next save tries again" in printed
    assert "the checkpoint of step 6 could not be written yet" not in printed
    steps = [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert steps == [line["step"] for line in read_metrics(tmp_path / "whole" / "metrics.jsonl")]


@pytest.mark.parametrize("flags", [[], ["--async-save"]], ids=["waiting", "async"])
def test_the_end_of_a_run_names_the_last_good_checkpoint(flags: list[str], tmp_path: Path, says: Says) -> None:
    folder = tmp_path / "run"

    def lost(call: str) -> int | None:
        return errno.EIO if re.search(r"(pwrite|fsync|rename) .*step-(6|8|10)\b", call) else None

    with faults(lost), says(StorageFailed):
        train(folder, "--keep-checkpoints", "1", *flags)
    assert checkpoint.problem_of(folder / "checkpoints" / "step-4") is None
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["latest", "step-4"]


def test_a_folder_that_cannot_be_read_is_not_a_run_without_checkpoints(tmp_path: Path, says: Says) -> None:
    checkpoint.save(tmp_path / "checkpoints", 1, Shelf(), {}, alone())
    with faults(lambda call: errno.EIO if "listdir" in call or "scandir" in call else None), says(CheckpointError):
        checkpoint.candidates(tmp_path / "checkpoints")


def _two_workers(workers: Workers, root: str) -> tuple[list[Any], str]:
    """Let the storage of worker 1 fail for a while, then for good. Returns the curve, and what was printed."""
    failures = iter([errno.ETIMEDOUT] * 2)

    def fails(call: str) -> int | None:
        return next(failures, None) if workers.rank == 1 and re.search("pwrite .*step-3", call) else None

    with contextlib.redirect_stderr(io.StringIO()) as printed, faults(fails):
        curves = [run(f"{root}/{kind}", "plain", 2, *flags) for kind, flags in KINDS.items()]
    curves.append(run(f"{root}/whole", "plain", 2))
    return curves, printed.getvalue()


KINDS = {"waiting": (), "async": ("--async-save",)}


@pytest.mark.distributed
def test_workers_try_again_together(tmp_path: Path) -> None:
    (curves, printed), _ = run_in_workers(2, _two_workers, str(tmp_path))
    assert curves == [curves[-1]] * 3
    assert "step 3 could not be written yet: it failed ([Errno 110] Connection timed out" in printed
    for kind in KINDS:
        for step in (3, 6):
            assert checkpoint.problem_of(tmp_path / kind / "checkpoints" / f"step-{step}") is None


@pytest.mark.longer
@pytest.mark.parametrize("flags", [[], ["--async-save"]], ids=["waiting", "async"])
def test_a_best_step_that_could_not_be_saved_is_not_the_best(flags: list[str], tmp_path: Path) -> None:
    """The lowest of the other losses counts, and its checkpoint is still there at the end."""

    def losses(folder: Path) -> dict[int, float]:
        lines = read_metrics(folder / "metrics.jsonl")
        return {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}

    given = f"{' '.join(FLAGS)} --train-iters 30 --eval-interval 3 --save-interval 30 --keep-checkpoints 1 --keep-best"
    Worsening([*given.split(), "--save", str(tmp_path / "whole")]).fit()
    by_step = losses(tmp_path / "whole")
    best, expected, *_ = sorted(by_step, key=lambda step: by_step[step])
    assert best < 30
    with faults(lambda call: errno.EROFS if re.search(rf"pwrite .*step-{best}\b", call) else None):
        summary = Worsening([*given.split(), "--save", str(tmp_path / "run"), *flags]).fit()
    assert losses(tmp_path / "run") == by_step
    assert summary["best"]["step"] == expected
    assert checkpoint.problem_of(tmp_path / "run" / "checkpoints" / f"step-{expected}") is None
