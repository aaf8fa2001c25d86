"""Saves the checkpoints of a run, and restores a run from one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from rapidformer_templates.data.fingerprints import KEPT, Fingerprint, contents, difference, first_samples
from rapidformer_templates.data.loader import field_of
from rapidformer_templates.data.order import PASSES
from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.optimizer_state import WithoutAverages, has_averages
from rapidformer_templates.errors import CheckpointError, StorageFailed, counted
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.data_rules import sample_flags
from rapidformer_templates.planning.hub import PRETRAINED
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.checkpoint.async_save import AsyncSaver
from rapidformer_templates.run.checkpoint.format import Reader, newest_complete, problem_of, problem_on_all_ranks
from rapidformer_templates.run.export import ExportedWeights
from rapidformer_templates.run.folder import RunFolder
from rapidformer_templates.run.hooks import states_of
from rapidformer_templates.run.log import Log
from rapidformer_templates.run.performance import Meter
from rapidformer_templates.run.run import Best, Position, Run
from rapidformer_templates.system.files import JSON_ERRORS
from rapidformer_templates.system.process_state import restore, seed_all
from rapidformer_templates.system.terminal import say
from rapidformer_templates.system.workers import Workers


class Checkpoints:
    """The checkpoints of a run, in its folder. With ``--async-save`` they are written while the run continues.

    If the storage fails, a save is tried again for a while. If that does not help, training continues without this
    checkpoint, until the next save. Only the last save of a run must succeed. All ranks call the methods in the same
    order.

    Attributes:
        has_failed: whether the newest save has failed.
    """

    def __init__(self, run: Run, folder: RunFolder, log: Log, meter: Meter) -> None:
        self.run, self.log, self.meter = run, log, meter
        self._root, self._keep = folder.checkpoints, run.config.training.keep_checkpoints
        self.has_failed = False
        self._saved_best = self._written_best = (run.position.best, run.position.best_loss)
        is_async = run.config.training.async_save
        self._saver = AsyncSaver(self._root, run.workers, self._keep) if is_async else None

    @property
    def lacks_best(self) -> bool:
        """Whether the best evaluation is newer than the last checkpoint."""
        return self.run.position.best != self._saved_best[0]

    @property
    def is_writing(self) -> bool:
        """Whether this rank is writing a checkpoint in the background."""
        return self._saver is not None and self._saver.busy

    def save(self, *, is_last: bool) -> None:
        """Save a checkpoint at the current position. An earlier save in the background ends first.

        Raises:
            StorageFailed: the last save has failed.
            CheckpointError: the checkpoint cannot be written for another reason.
        """
        with self.meter.paused():
            self.log.sync()
            if self._saver:
                self._complete(self._saver.wait)
            self.run.position.callbacks = states_of(self.run.callbacks)
            # Storage that has failed for so long is only tried once, except at the end.
            self._complete(partial(self._write, retries=is_last or not self.has_failed), is_last=is_last)

    def _write(self, *, retries: bool) -> Path | None:
        """Write a checkpoint, or start to write it in the background."""
        run, position = self.run, self.run.position
        progress = position.to_state()
        best = position.best["step"] if position.best else None
        self._written_best = (position.best, position.best_loss)
        if self._saver:
            self._saver.start(position.step, run.engine, progress, best, retries=retries)
            return None
        path = checkpoint.save(self._root, position.step, run.engine, progress, run.workers, retries=retries)
        problem = checkpoint.delete_older(path, self._keep, best, run.workers)
        if problem:
            say(run.workers, problem, loud=True)
        return path

    def proceed(self) -> None:
        """Continue a save in the background, once no rank is writing."""
        if self._saver and self._saver.pending:
            self._complete(self._saver.proceed)

    def wait(self, *, is_last: bool) -> None:
        """Wait until a save in the background is complete.

        Raises:
            StorageFailed, CheckpointError: see :meth:`save`.
        """
        if self._saver:
            with self.meter.paused():
                self._complete(self._saver.wait, is_last=is_last)

    def close(self) -> None:
        """End the thread that saves in the background."""
        if self._saver:
            self._saver.close()

    def _complete(self, save: Callable[[], Path | None], *, is_last: bool = False) -> None:
        """Announce the checkpoint if ``save`` returns one. Continue without it if the storage has failed.

        The best step then is the one before, because the weights of this one are lost with the next update.
        """
        position = self.run.position
        try:
            path = save()
        except StorageFailed as error:
            self.has_failed = True
            if is_last:
                raise
            if position.best == self._written_best[0]:
                position.best, position.best_loss = self._saved_best
            say(self.run.workers, f"{error.message}: training continues, and the next save tries again", loud=True)
            return
        if path:
            self.has_failed, self._saved_best = False, self._written_best
            if self.log.failure:
                self.log.sync()
            step = checkpoint.step_of(path)
            self.log.progress.tell(step, f"saved {path}")
            self.run.notify("on_checkpoint", step, path)


def load_exported(run: Run, weights: ExportedWeights) -> None:
    """Load the weights that a checkpoint's export has into the model of a run.

    Raises:
        CheckpointError: they do not fit the model, or the base of adapters has changed.
    """
    base = run.engine.assembly.base
    check_base(weights.reader, base.identity if base else None)
    run.engine.load(weights, optimizer=False)


def restore_run(run: Run) -> Position:
    """Restore engine and random state for ``--resume`` or ``--load``, and return the run's position.

    Raises:
        CheckpointError: no checkpoint is complete, or it does not fit this run.
    """
    training, folder, engine, workers = run.config.training, run.folder, run.engine, run.workers
    base = engine.assembly.base
    fresh = Position(
        data=run.order.depends_on() | sample_flags(run.config),
        fingerprint=_fingerprint(run) if folder or training.load else {},
        base=base.identity if base else None,
        settings=engine.assembly.settings,
    )
    path = _newest(folder.checkpoints, workers) if folder and training.resume else None
    weights_only = path is None and training.weights_only
    if path is None and training.resume:
        assert folder is not None, "--resume has no effect without --save"
        line = f"--resume found no checkpoint in {folder.checkpoints}: training starts from the beginning"
        say(workers, line, loud=True)
    if path is None and training.load:
        path = checkpoint_to_load(Path(training.load), workers)
    if path is None or weights_only:
        if path is not None:
            reader = Reader(path)
            check_base(reader, fresh.base)
            if others := _other_settings(reader, fresh.settings):
                say(workers, f"its weights compute something else here: {others}", loud=True)
            with _of_its_model(path):
                engine.load(reader, optimizer=False)
        seed_all(training.seed + 1 + workers.stream)
        return fresh
    reader = Reader(path)
    saved = Position.from_state(reader.state)
    check_base(reader, fresh.base)
    check_settings(reader, fresh.settings)
    _check_data(saved, fresh, path, run)
    saved.data, saved.fingerprint = fresh.data, fresh.fingerprint
    saved.best = _best_of_this_run(saved, reader, run)
    if saved.best is None:
        saved.evaluations_since_best = 0
    restore_engine(reader, engine, run.config, workers)
    return saved


@contextmanager
def _of_its_model(folder: Path) -> Iterator[None]:
    """Add the checkpoint, and the model that its run began with, to an error."""
    try:
        yield
    except CheckpointError as error:
        with suppress(*JSON_ERRORS):
            values = json.loads(RunFolder(folder.parent.parent).plan.read_text(encoding="utf-8"))["values"]
            named = [f"{flag} {values[flag]['value']}" for flag in (PRETRAINED, "--model-type") if flag in values]
            error.where = error.where or " of a run with ".join([str(folder), *named])
        error.where = error.where or str(folder)
        raise


def restore_engine(reader: Reader, engine: Engine, config: RunConfig, workers: Workers) -> None:
    """Restore engine and random state from a checkpoint.

    Raises:
        CheckpointError: the optimizer or a tensor differs. Nothing has been changed.
    """
    kind, used = reader.state["engine"]["optimizer"], engine.state()["optimizer"]
    if kind != used:
        message = f"the checkpoint holds the state of {kind}, this run uses {used}"
        hint = "use the same --optimizer, or take only the weights with --load … --weights-only"
        raise CheckpointError(message, where=str(reader.folder), hint=hint)
    with _of_its_model(reader.folder):
        engine.load(reader if config.training.ema_decay is not None else WithoutAverages(reader), optimizer=True)
    engine.load_state(reader.state["engine"])

    saved = reader.state.get("layout", [1, reader.state["world"], 1])
    if saved == workers.dimensions:
        restore(*reader.random_state(workers.rank))
        return
    # Other workers have other random streams. Seeding them with the step avoids repeating earlier numbers, and every
    # try to resume draws the same ones.
    seed_all(config.training.seed + 1 + workers.stream + int(reader.state["step"]) * workers.world)
    by = f"{' × '.join(map(str, saved))} workers" if math.prod(saved) > saved[1] else counted(saved[1], "worker")
    divided_alike = (saved[0], saved[2:]) == (workers.dimensions[0], workers.dimensions[2:])
    if config.launch.min_workers is not None and divided_alike:
        dropout = "dropout does not depend on them (--min-workers)"
    else:
        dropout = "dropout draws other masks (a run with --min-workers draws the same ones with fewer replicas)"
    say(workers, f"random states were saved by {by}: reseeded for {workers.world}; {dropout}")


NOT_COMPARED = {"template", "--resume", "--save", "--load", "--overwrite", "--config", "--user-script"}
"""Values that do not affect a resumed run."""


def show_changes(folder: RunFolder, plan: Mapping[str, Any], workers: Workers) -> None:
    """Report the flags whose values have changed since the run was last started. Another version has other defaults.

    Args:
        plan: the content of ``plan.json`` that will replace the last one.
    """

    def all_values(plan: Mapping[str, Any]) -> dict[str, object]:
        return {**plan.get("defaults", {}), **{name: entry["value"] for name, entry in plan["values"].items()}}

    if not workers.is_main or not folder.plan.exists():
        return
    try:
        saved = json.loads(folder.plan.read_text(encoding="utf-8"))
        before, given = all_values(saved), saved["values"].keys() | plan["values"].keys()
    except JSON_ERRORS as error:
        say(workers, f"{folder.plan} cannot be read ({error}): what has changed is unknown", loud=True)
        return
    now = all_values(json.loads(json.dumps(plan)))
    named = sorted((given | (before.keys() & now.keys())) - NOT_COMPARED)
    pairs = {name: (before.get(name), now.get(name)) for name in named}
    changes = []
    for name, (was, value) in pairs.items():
        if was != value:
            is_now = "its default" if value is None else value
            changes.append(f"{name} {'its default' if was is None else was} → {is_now}")
    if changes:
        say(workers, f"note       changed since the run was last started: {', '.join(changes)}")


def _newest(root: Path, workers: Workers) -> Path | None:
    """Return the newest complete checkpoint of a run, or None if it has no checkpoints.

    Raises:
        CheckpointError: there are checkpoints, but none is complete.
    """
    newest, passed_over = newest_complete(root, workers)
    for line in passed_over:
        say(workers, f"skipped {line}", loud=True)
    if newest is not None:
        say(workers, f"resuming from {newest}")
    elif passed_over:
        message = f"no checkpoint in {root} is intact: {'; '.join(passed_over)}"
        raise CheckpointError(message, hint="start again with --overwrite, or put a copy there")
    return newest


def checkpoint_to_load(path: Path, workers: Workers) -> Path:
    """Return the checkpoint at a path: the path itself, or the newest complete one of a run folder.

    Raises:
        CheckpointError: the path is neither, or the checkpoint is not complete.
    """
    if workers.broadcast(checkpoint.is_checkpoint(path)):
        problem = problem_on_all_ranks(path, workers)
        if problem:
            raise CheckpointError(f"the checkpoint cannot be used: {problem}", where=str(path))
        return path
    newest = _newest(path / "checkpoints", workers)
    if newest is None:
        raise CheckpointError(f"{path} is neither a checkpoint nor a run folder with one", where="--load")
    return newest


def _best_of_this_run(saved: Position, reader: Reader, run: Run) -> Best | None:
    """Return the best evaluation so far, if its checkpoint is in this run's folder."""
    best, path, folder, workers = saved.best, reader.folder, run.folder, run.workers
    if best is None or folder is None:
        return None
    if run.config.training.ema_decay is None and has_averages(reader):
        so_far = f"step {best['step']} is the best one with averages of the weights (--ema-decay)"
        say(workers, f"{so_far}, which this run does not have: the next evaluation counts as best", loud=True)
        return None
    if path.parent.resolve() != folder.checkpoints.resolve():
        so_far = f"step {best['step']}, {best['metric']} {best['value']:.6g}"
        source = f"belongs to {path.parent.parent}: this run looks for its own"
        say(workers, f"the best evaluation so far ({so_far}) {source}")
        return None
    saved_at = checkpoint.folder_of(folder.checkpoints, best["step"])
    problem = workers.broadcast(problem_of(saved_at, contents=False) if workers.is_main else None)
    if problem:
        lost = f"the best checkpoint is lost ({saved_at.name}: {problem})"
        say(workers, f"{lost}: the next evaluation counts as best", loud=True)
        return None
    return best


FACTS_OF_DATA = ("training samples", "the corpus", PASSES, "shapes", "checksum of the lengths")
"""Keys of ``Position.data`` that ``--allow-changed-data`` lets change. Others are flags and the files of a stream."""


def _check_data(saved: Position, fresh: Position, path: Path, run: Run) -> None:
    """Raise an error for a checkpoint with which the run would continue with other samples, unless a flag allows it."""
    allowed = run.config.training.allow_changed_data
    hint = "continue with the same values, or take only the weights with --load … --weights-only"
    changed = [name for name in fresh.data | saved.data if saved.data.get(name) != fresh.data.get(name)]
    texts = [f"{name} was {saved.data.get(name)}, is {fresh.data.get(name)}" for name in changed if name != PASSES]
    if changed == [batch := "--global-batch-size"]:
        hint = f"give {batch} {saved.data.get(batch)}: without it, the batch follows --micro-batch-size and the workers"
    texts = texts or ["the version that saved it orders the samples in another way"]
    message = f"the order of the data would change: {'; '.join(texts)}"
    if not changed and (how := difference(saved.fingerprint, fresh.fingerprint)):
        message = f"the training samples are not those of the checkpoint: {how}"
        hint = "use the same files, tokenizer and chat template (some write the date)"
    elif not changed:
        return
    if set(changed) <= set(FACTS_OF_DATA):
        if allowed:
            say(run.workers, f"{message} (--allow-changed-data)", loud=True)
            return
        hint += ", or continue with --allow-changed-data"
    raise CheckpointError(message, where=str(path), hint=hint)


def _fingerprint(run: Run) -> Fingerprint:
    """Return the fingerprint of the training samples, which is the same in every layout."""
    found: Fingerprint = {}
    if run.workers.is_main:
        checksums, batch = first_samples(run.data, run.config.training.seed)
        ids, text = field_of(batch, "input_ids"), ""
        if run.task and ids is not None:
            text = str(run.task.tokenizer.decode(ids.flatten().tolist()[:KEPT]))[:KEPT]
        found = {"some": checksums, "all": contents(run.data.train), "text": text} if checksums else {}
    return run.workers.broadcast(found)


def check_base(reader: Reader, identity: str | None) -> None:
    """Raise an error if a checkpoint's adapters belong to another base, or if only one side has adapters."""
    base = reader.state.get("base")
    if base == identity:
        return
    if base and identity:
        what = f"the adapters in it were trained with other base weights ({base}) than those of this model ({identity})"
        hint = "name the base that they were trained with"
    elif base:
        what, hint = "it holds adapters, and this model has none", "train with the same --lora-rank"
    else:
        what = "it holds a whole model, and this run trains adapters"
        hint = "export it, and train adapters of that folder"
    raise CheckpointError(what, where=str(reader.folder), hint=hint)


def _other_settings(reader: Reader, settings: Mapping[str, object]) -> str:
    """Return with which other settings the weights of a checkpoint were trained. Older versions have saved none."""
    before = reader.state.get("settings", {})
    changed = [name for name in before.keys() & settings.keys() if before[name] != settings[name]]
    return ", ".join(f"they were trained with {name} {before[name]}, not {settings[name]}" for name in sorted(changed))


def check_settings(reader: Reader, settings: Mapping[str, object]) -> None:
    """Raise an error if the weights of a checkpoint would compute something else with these settings."""
    if others := _other_settings(reader, settings):
        hint = "continue with the same values, or take only the weights with --load … --weights-only"
        raise CheckpointError(
            f"its weights would compute something else: {others}", where=str(reader.folder), hint=hint
        )
