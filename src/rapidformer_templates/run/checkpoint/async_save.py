"""Saving while the training goes on: a step waits for a copy of the state in host memory, and no longer.

A thread of each rank writes its copy. The ranks agree on what has become of it in the main thread, between
two steps, where they exchange a few numbers anyway. So no collective runs beside those of the training, no
rank polls a folder, and a full disk can be told to all. The price is that of several workers none knows
before the next step that all have written; rank 0 makes the folder a checkpoint then.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rapidformer_templates.run.checkpoint import check as checkpoint_check
from rapidformer_templates.run.checkpoint import tensor_file
from rapidformer_templates.run.checkpoint.format import Attempt, File, Source, Written, for_each_file
from rapidformer_templates.run.checkpoint.tensor_file import Copy
from rapidformer_templates.run.console import say
from rapidformer_templates.system import accelerator
from rapidformer_templates.system.workers import Workers

Parts = Generator[Callable[[], Any], Any, str | None]


class AsyncSaver:
    """Writes one checkpoint at a time in the background.

    All ranks call its methods alike, :meth:`close` aside. The memory of the copies is kept for the next save;
    the first save of a process is slower, because it has to get that memory.

    Attributes:
        pending: whether a save is under way; the same on all ranks.
    """

    def __init__(self, root: Path, workers: Workers, keep: int) -> None:
        """Save into the ``checkpoints`` folder ``root``, of which the newest ``keep`` are kept."""
        self._root = root
        self._workers = workers
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._memory: dict[str, torch.Tensor] = {}
        self._attempt: Attempt | None = None
        self._parts: Parts | None = None
        self._part: Future[Any] | None = None

    @property
    def pending(self) -> bool:
        return self._attempt is not None

    @property
    def busy(self) -> bool:
        """Whether this rank's thread has work to do."""
        return self._part is not None and not self._part.done()

    def start(self, step: int, engine: Source, progress: Mapping[str, Any], protected: int | None) -> None:
        """Copy the state, and begin to write it; no save may be pending.

        Args:
            step, engine, progress: as for :func:`checkpoint.save`.
            protected: as for :func:`checkpoint_check.delete_older`.

        Raises:
            CheckpointError: there is no memory for the copy, or no folder; earlier checkpoints are untouched.
        """
        assert not self.pending
        attempt = Attempt(self._root, step, engine.state(), progress, self._workers)
        attempt.begin()
        copies, written = attempt.together(lambda: self._copy(engine))
        self._attempt = attempt
        self._parts = self._parts_of(attempt, copies, written, protected)
        alone = self._workers.world == 1
        self._part = self._thread.submit(partial(_through, self._parts) if alone else next(self._parts))

    def _copy(self, engine: Source) -> tuple[dict[str, Copy], Written]:
        copies: dict[str, Copy] = {}
        written: Written = {"index": [], "files": {}}

        def copy(file: File) -> None:
            copies[file.name] = tensor_file.copy_whole(file.tensors, file.metadata, self._memory.get(file.name))
            self._memory[file.name] = copies[file.name].memory
            written["index"] += file.index

        for_each_file(engine, self._workers.rank, copy)
        accelerator.synchronize(self._workers.device)
        return copies, written

    def _parts_of(self, attempt: Attempt, copies: Mapping[str, Copy], written: Written, protected: int | None) -> Parts:
        """What the thread has to do, part by part; in between all ranks exchange what came of a part.

        Returns:
            What people should know of older checkpoints that were not deleted.
        """
        workers, main = self._workers, self._workers.is_main

        def write() -> Written:
            for name, copy in copies.items():
                written["files"][name] = tensor_file.write_copy(attempt.folder / name, copy)
            return written

        by_rank = workers.gather((yield write))
        yield (lambda: attempt.finish(by_rank)) if main else _nothing
        doomed = workers.broadcast(checkpoint_check.surplus(attempt.final, self._keep, protected))
        if not doomed:
            return None
        check = partial(checkpoint_check.problem_of, attempt.final, workers.rank, workers.world)
        problems = workers.gather((yield check))
        problem = next((p for p in problems if p), None)
        if problem:
            return checkpoint_check.not_deleted(attempt.final, problem)
        problem = yield (lambda: checkpoint_check.delete(doomed)) if main else _nothing
        return problem

    def proceed(self) -> Path | None:
        """Once no rank is :attr:`busy`: the next part of the pending save; the checkpoint, when it is whole.

        Raises:
            CheckpointError: some rank could not write; the save is given up.
        """
        attempt, parts, part = self._attempt, self._parts, self._part
        assert attempt is not None
        assert parts is not None
        assert part is not None
        try:
            result = attempt.together(part.result)
        except BaseException:
            self._forget()
            raise
        if self._workers.world > 1:
            try:
                self._part = self._thread.submit(parts.send(result))
            except StopIteration as end:
                result = end.value
            else:
                return None
        self._forget()
        if result:
            say(self._workers, result, loud=True)
        return attempt.final

    def wait(self) -> Path | None:
        """Until the pending save is whole: that checkpoint; None where none is pending.

        Raises:
            CheckpointError: as :meth:`proceed`.
        """
        whole = None
        while self.pending:
            whole = self.proceed()  # waits for this rank's thread, and then for the other ranks
        return whole

    def close(self) -> None:
        """Let the thread end what it does; for a run that cannot go on, on this rank alone."""
        self._thread.shutdown()

    def _forget(self) -> None:
        self._attempt = self._parts = self._part = None


def _through(parts: Parts) -> str | None:
    """All parts of the only worker, which has nobody to exchange anything with."""
    result = None
    while True:
        try:
            part = parts.send(result)
        except StopIteration as end:
            problem: str | None = end.value
            return problem
        result = part()


def _nothing() -> None:
    """What a rank other than 0 has to do in some parts."""
