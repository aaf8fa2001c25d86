"""Saving while the training goes on: a step waits for a copy of the state in host memory, and no longer.

A thread of each rank writes its copy. The ranks agree on what has become of it in the main thread, between
two steps, where they exchange a few numbers anyway. So no collective runs beside those of the training, no
rank polls a folder, and a full disk can be told to all. The price is that of several workers none knows
before the next step that all have written; rank 0 makes the folder a checkpoint then.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from rapidformer_templates import checkpoint, tensor_file
from rapidformer_templates.checkpoint import Attempt, File, Report, Source, for_each_file
from rapidformer_templates.tensor_file import Copy
from rapidformer_templates.workers import Workers


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
        self._protected: int | None = None
        self._writing: Future[Report | None] | None = None
        self._finishing: Future[None] | None = None

    @property
    def pending(self) -> bool:
        return self._attempt is not None

    @property
    def busy(self) -> bool:
        """Whether this rank's thread has work to do."""
        stage = self._finishing or self._writing
        return stage is not None and not stage.done()

    def start(self, step: int, engine: Source, progress: Mapping[str, Any], protected: int | None) -> None:
        """Copy the state, and begin to write it; no save may be pending.

        Args:
            step, engine, progress: as for :func:`checkpoint.save`.
            protected: as for :func:`checkpoint.delete_older`.

        Raises:
            CheckpointError: there is no memory for the copy, or no folder; earlier checkpoints are untouched.
        """
        assert not self.pending
        attempt = Attempt(self._root, step, engine.state(), progress, self._workers)
        attempt.begin()
        copies, report = attempt.together(lambda: self._copy(engine))
        self._attempt, self._protected = attempt, protected
        self._writing = self._thread.submit(self._write, attempt, copies, report)

    def _copy(self, engine: Source) -> tuple[dict[str, Copy], Report]:
        copies: dict[str, Copy] = {}
        report: Report = {"index": [], "files": {}}

        def copy(file: File) -> None:
            copies[file.name] = tensor_file.copy_whole(file.tensors, file.metadata, self._memory.get(file.name))
            self._memory[file.name] = copies[file.name].memory
            report["index"] += file.index

        for_each_file(engine, self._workers.rank, copy)
        if self._workers.device.type == "cuda":
            torch.cuda.synchronize(self._workers.device)
        return copies, report

    def _write(self, attempt: Attempt, copies: Mapping[str, Copy], report: Report) -> Report:
        """In the thread: write this rank's share; alone, also the rest."""
        for name, copy in copies.items():
            report["files"][name] = tensor_file.write_copy(attempt.folder / name, copy)
        if self._workers.world == 1:
            self._finish(attempt, [report])
        return report

    def _finish(self, attempt: Attempt, reports: list[Report]) -> None:
        """In the thread of rank 0."""
        attempt.finish(reports)
        checkpoint.delete_older(self._root, self._keep, self._protected)

    def proceed(self) -> Path | None:
        """Once no rank is :attr:`busy`: the next stage of the pending save; the checkpoint, when it is whole.

        Raises:
            CheckpointError: some rank could not write; the save is given up.
        """
        attempt, stage = self._attempt, self._finishing or self._writing
        assert attempt is not None
        assert stage is not None
        try:
            result = attempt.together(stage.result)
        except BaseException:
            self._forget()
            raise
        if self._finishing is not None or self._workers.world == 1:
            self._forget()
            return attempt.final
        reports = self._workers.gather(result)
        rest = self._finish if self._workers.is_main else _nothing
        self._finishing = self._thread.submit(rest, attempt, reports)
        return None

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
        self._attempt = self._writing = self._finishing = None


def _nothing(attempt: Attempt, reports: list[Report]) -> None:
    """What a rank other than 0 has to do for the last stage."""
