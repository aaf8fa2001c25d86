"""Saves checkpoints in the background. A step only waits for a copy of the state in host memory.

A thread on each rank writes its copy. The main threads exchange a few numbers between two steps anyway, and use this to
agree on the state of the save. So no collective runs concurrently with training, no rank polls a folder, and a full
disk can be reported to all ranks. The drawback: with several workers, no rank knows before the next step that all have
written. Rank 0 completes the checkpoint then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.checkpoint import tensor_file
from rapidformer_templates.run.checkpoint.format import Attempt, ShardSource, TensorFile, Written, for_each_file
from rapidformer_templates.run.checkpoint.tensor_file import Copy
from rapidformer_templates.system import accelerator
from rapidformer_templates.system import files as storage
from rapidformer_templates.system.files import MAY_PASS, explain
from rapidformer_templates.system.terminal import say
from rapidformer_templates.system.workers import Workers

Parts = Generator[Callable[[], object], Any, str | None]


class AsyncSaver:
    """Writes one checkpoint at a time in the background.

    All ranks must call its methods in the same order, except :meth:`close`. The memory of the copies is kept for the
    next save. The first save of a process is slower, because it has to allocate that memory.

    Attributes:
        pending: whether a save is in progress, the same on all ranks.
    """

    def __init__(self, root: Path, workers: Workers, keep: int) -> None:
        """Save to the ``checkpoints`` folder ``root``, which keeps the newest ``keep`` checkpoints."""
        self._root = root
        self._workers = workers
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._is_closing = threading.Event()
        self._memory: dict[str, torch.Tensor] = {}
        self._attempt: Attempt | None = None
        self._parts: Parts | None = None
        self._part: Future[Any] | None = None

    @property
    def pending(self) -> bool:
        return self._attempt is not None

    @property
    def busy(self) -> bool:
        """Whether this rank's thread is working."""
        return self._part is not None and not self._part.done()

    def start(
        self,
        step: int,
        engine: ShardSource,
        progress: Mapping[str, object],
        protected: int | None,
        *,
        retries: bool = True,
    ) -> None:
        """Copy the state and start to write it. No save may be pending.

        Args:
            step, engine, progress, retries: see :func:`checkpoint.save`.
            protected: see :func:`checkpoint.delete_older`.

        Raises:
            CheckpointError: there is not enough memory for the copy, or no folder. Earlier checkpoints are unchanged.
        """
        assert not self.pending
        attempt = Attempt(self._root, step, engine.state(), progress, self._workers, retries=retries)
        attempt.begin()
        copies, written = attempt.run_together(lambda: self._copy(engine))
        self._attempt = attempt
        self._parts = self._parts_of(attempt, copies, written, protected)
        alone = self._workers.world == 1
        run = partial(self._run_parts, attempt) if alone else self._with_retries(attempt, next(self._parts))
        self._part = self._thread.submit(run)

    def _copy(self, engine: ShardSource) -> tuple[dict[str, Copy], Written]:
        copies: dict[str, Copy] = {}
        written: Written = {"index": [], "files": {}}

        def copy(file: TensorFile) -> None:
            copies[file.name] = tensor_file.copy_to_memory(file.tensors, file.metadata, self._memory.get(file.name))
            self._memory[file.name] = copies[file.name].memory
            written["index"] += file.index

        for_each_file(engine, self._workers.rank, copy)
        accelerator.synchronize(self._workers.device)
        return copies, written

    def _parts_of(self, attempt: Attempt, copies: Mapping[str, Copy], written: Written, protected: int | None) -> Parts:
        """Yield the work of the thread in parts. Between parts, all ranks exchange their results.

        Returns:
            A message for users about older checkpoints that were not deleted.
        """
        workers, main = self._workers, self._workers.is_main

        def write() -> Written:
            for name, copy in copies.items():
                written["files"][name] = tensor_file.write_copy(attempt.folder / name, copy)
            return written

        by_rank = workers.gather_on_main((yield write))
        yield (lambda: attempt.finish(by_rank)) if main else lambda: None
        doomed = checkpoint.surplus(attempt.final, self._keep, protected, workers)
        if not doomed:
            return None
        check = partial(checkpoint.problem_of, attempt.final, workers.rank, workers.world)
        problems = workers.gather((yield check))
        problem = next((p for p in problems if p), None)
        if problem:
            return checkpoint.not_deleted_message(attempt.final, problem)
        problem = yield (lambda: checkpoint.delete(doomed)) if main else lambda: None
        return problem

    def proceed(self) -> Path | None:
        """Start the next part of the pending save, once no rank is :attr:`busy`. Returns the checkpoint when complete.

        Raises:
            StorageFailed, CheckpointError: some rank could not write. The save is aborted.
        """
        attempt, parts, part = self._attempt, self._parts, self._part
        assert attempt is not None
        assert parts is not None
        assert part is not None
        try:
            result = attempt.run_together(part.result)
        except BaseException:
            self._clear()
            raise
        if self._workers.world > 1:
            try:
                self._part = self._thread.submit(self._with_retries(attempt, parts.send(result)))
            except StopIteration as end:
                result = end.value
            else:
                return None
        self._clear()
        if result:
            say(self._workers, result, loud=True)
        return attempt.final

    def wait(self) -> Path | None:
        """Wait for the pending save and return its checkpoint. None if no save is pending.

        Raises:
            CheckpointError: see :meth:`proceed`.
        """
        whole = None
        while self.pending:
            whole = self.proceed()  # waits for this rank's thread, and then for the other ranks
        return whole

    def close(self) -> None:
        """Wait for the thread to finish. If a run cannot continue, a rank may call this alone."""
        self._is_closing.set()
        self._thread.shutdown()

    def _clear(self) -> None:
        self._attempt = self._parts = self._part = None

    def _run_parts(self, attempt: Attempt) -> str | None:
        """Run all parts on a single worker, which exchanges nothing."""
        assert self._parts
        result = None
        while True:
            try:
                part = self._parts.send(result)
            except StopIteration as end:
                problem: str | None = end.value
                return problem
            result = self._with_retries(attempt, part)()

    def _with_retries(self, attempt: Attempt, part: Callable[[], object]) -> Callable[[], Any]:
        """Return a part that this rank's thread tries again for a while if the storage fails."""

        def run() -> object:
            for number, pause in enumerate(storage.RETRY_SECONDS if attempt.retries else (), start=1):
                try:
                    return part()
                except OSError as error:
                    if error.errno not in MAY_PASS:
                        raise
                    attempt.announce_retry(explain(error)[0], number)
                    if self._is_closing.wait(pause):
                        raise
            return part()

        return run
