"""Where a run starts: at the beginning, or where a checkpoint left it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rapidformer_templates.checkpoint import Reader, candidates, is_checkpoint, newest_whole
from rapidformer_templates.data.order import Order
from rapidformer_templates.data.task_flags import sample_flags
from rapidformer_templates.engines.base import Engine
from rapidformer_templates.errors import CheckpointError
from rapidformer_templates.loop import Position
from rapidformer_templates.random_state import restore, seed_all
from rapidformer_templates.report import say
from rapidformer_templates.run_folder import RunFolder
from rapidformer_templates.workers import Workers

if TYPE_CHECKING:
    from rapidformer_templates.trainer import Trainer


def take_up(template: Trainer, engine: Engine, folder: RunFolder | None, order: Order, workers: Workers) -> Position:
    """Put engine and random states where ``--resume`` or ``--load`` say; the run's position.

    Raises:
        CheckpointError: no checkpoint is whole, or it does not fit this run.
    """
    training = template.config.training
    fresh = Position(data=order.depends_on() | sample_flags(template.config))
    path = _newest(folder.checkpoints, workers) if folder and training.resume else None
    weights_only = path is None and training.weights_only
    if path is None and training.resume:
        say(workers, "nothing to resume yet: starting from the beginning")
    if path is None and training.load:
        path = _to_load(Path(training.load), workers)
    if path is None or weights_only:
        if path is not None:
            engine.load(Reader(path), optimizer=False)
        seed_all(training.seed + 1 + workers.stream)
        return fresh
    reader = Reader(path)
    saved = Position(**{name: reader.state[name] for name in Position.__dataclass_fields__})
    _check_fit(reader, engine, saved, fresh, path)
    engine.load(reader, optimizer=True)
    engine.load_state(reader.state["engine"])
    _restore_random_state(reader, training.seed, saved.step, workers)
    return saved


def _newest(root: Path, workers: Workers) -> Path | None:
    """The newest whole checkpoint of a run, or None where there is none at all.

    Raises:
        CheckpointError: there are some, and none is whole.
    """
    found, passed_over = newest_whole(root, workers)
    for line in passed_over:
        say(workers, f"passed over {line}", loud=True)
    if found is not None:
        say(workers, f"going on from {found}")
    elif passed_over:
        raise CheckpointError(
            f"no checkpoint in {root} is whole: {'; '.join(passed_over)}",
            hint="start anew with --overwrite, or put a copy there",
        )
    return found


def _to_load(path: Path, workers: Workers) -> Path:
    if is_checkpoint(path):
        return path
    found = _newest(path / "checkpoints", workers) if candidates(path / "checkpoints") else None
    if found is None:
        raise CheckpointError(f"{path} is neither a checkpoint nor a run folder with one", where="--load")
    return found


def _check_fit(reader: Reader, engine: Engine, saved: Position, fresh: Position, path: Path) -> None:
    """Refuse a checkpoint whose run would go on otherwise than it began."""
    changed = [
        f"{name} was {saved.data.get(name)}, is {fresh.data.get(name)}"
        for name in fresh.data | saved.data
        if saved.data.get(name) != fresh.data.get(name)
    ]
    if changed:
        raise CheckpointError(
            f"the order of the data would change: {'; '.join(changed)}",
            where=str(path),
            hint="go on with the same values, or take the weights alone with --load … --weights-only",
        )
    kind, used = reader.state["engine"]["optimizer"], engine.state()["optimizer"]
    if kind != used:
        raise CheckpointError(
            f"the checkpoint holds the state of {kind}, this run uses {used}",
            where=str(path),
            hint="use the same --optimizer, or take the weights alone with --load … --weights-only",
        )


def _restore_random_state(reader: Reader, seed: int, step: int, workers: Workers) -> None:
    saved = reader.state.get("layout", [1, reader.state["world"], 1])
    if saved == workers.layout:
        restore(*reader.random_state(workers.rank))
        return
    # Other workers have other streams of random numbers; seeded by the step, they repeat no earlier ones.
    seed_all(seed + 1 + workers.stream + step * workers.world)
    stages, replicas, tensor = saved
    by = f"{stages} × {replicas} × {tensor} workers" if stages * tensor > 1 else f"{replicas} workers"
    say(workers, f"random states were saved by {by}: seeded anew for {workers.world}")
