"""Saves the checkpoints of a run, and reports each one that is complete."""

from __future__ import annotations

from pathlib import Path

from rapidformer_templates.run.callbacks import states_of
from rapidformer_templates.run.checkpoint import check as checkpoint_check
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.checkpoint.async_save import AsyncSaver
from rapidformer_templates.run.folder import RunFolder
from rapidformer_templates.run.log import Log
from rapidformer_templates.run.meter import Meter
from rapidformer_templates.run.run import Run
from rapidformer_templates.system.terminal import say


class Checkpoints:
    """The checkpoints of a run, in its folder. With ``--async-save`` they are written while the run continues.

    All ranks call the methods in the same order.
    """

    def __init__(self, run: Run, folder: RunFolder, log: Log, meter: Meter) -> None:
        self.run, self.log, self.meter = run, log, meter
        self._root, self._keep = folder.checkpoints, run.config.training.keep_checkpoints
        is_async = run.config.training.async_save
        self._saver = AsyncSaver(self._root, run.workers, self._keep) if is_async else None

    @property
    def is_writing(self) -> bool:
        """Whether this rank is writing a checkpoint in the background."""
        return self._saver is not None and self._saver.busy

    def save(self) -> None:
        """Save a checkpoint at the current position. The last save in the background ends first."""
        run, position = self.run, self.run.position
        with self.meter.paused():
            self.log.sync()
            position.callbacks = states_of(run.callbacks)
            progress = position.to_state()
            best = position.best["step"] if position.best else None
            if self._saver:
                self._announce(self._saver.wait())
                self._saver.start(position.step, run.engine, progress, best)
                return
            path = checkpoint.save(self._root, position.step, run.engine, progress, run.workers)
            problem = checkpoint_check.delete_older(path, self._keep, best, run.workers)
            if problem:
                say(run.workers, problem, loud=True)
        self._announce(path)

    def proceed(self) -> None:
        """Continue a save in the background, once no rank is writing."""
        if self._saver and self._saver.pending:
            self._announce(self._saver.proceed())

    def wait(self) -> None:
        """Wait until a save in the background is complete."""
        if self._saver:
            with self.meter.paused():
                self._announce(self._saver.wait())

    def close(self) -> None:
        """End the thread that saves in the background."""
        if self._saver:
            self._saver.close()

    def _announce(self, path: Path | None) -> None:
        if path:
            step = checkpoint.step_of(path)
            self.log.progress.saved(step, path)
            self.run.notify("on_checkpoint", step, path)
