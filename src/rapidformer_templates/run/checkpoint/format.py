"""Checkpoints: folders that are whole or do not count.

A checkpoint is written to ``step-N.tmp/``: safetensors and JSON, never pickle. Each rank writes what
it holds, in parts of bounded size; the index tells where the boxes of each tensor lie, so that any layout
can read what another wrote. A manifest has the size and CRC-32 of every file. Files and folder are flushed
to the disk, the folder is renamed to ``step-N/``, its parent flushed, and ``latest`` is written last.

All workers must see the same folder.
"""

from __future__ import annotations

import json
import shutil
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from rapidformer_templates.engines.contract import Piece
from rapidformer_templates.errors import CheckpointError
from rapidformer_templates.run.checkpoint import tensor_file
from rapidformer_templates.system.files import Seal, explain, sync, to_json, write_synced, write_text
from rapidformer_templates.system.random_state import capture
from rapidformer_templates.system.workers import Workers

FORMAT = 2
T = TypeVar("T")
KINDS = ("weights", "optimizer")
PART_BYTES = 10**9
"""So much goes into a file; of a state that an engine brings from elsewhere, so much is in memory at a time."""

FAILURES = (OSError, MemoryError)
"""What may go wrong in a save without a mistake in this library or in the model."""


def step_of(folder: Path) -> int:
    """The step of a checkpoint folder: ``step-40`` → 40."""
    return int(folder.name.removeprefix("step-"))


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step}"


def candidates(root: Path) -> list[Path]:
    """Finished checkpoints of a run, newest first."""
    found = [path for path in root.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=step_of, reverse=True)


def is_checkpoint(path: Path) -> bool:
    return (path / "manifest.json").is_file()


class Source(Protocol):
    """What a checkpoint needs of an engine."""

    def pieces(self, kind: str) -> Iterator[Piece]:
        """What this rank has to write of ``weights`` or ``optimizer``."""

    def state(self) -> dict[str, Any]:
        """What else must be kept: plain values for JSON."""


class Written(TypedDict):
    """What a rank has written.

    Attributes:
        index: (kind, name, whole shape, [file, key, offset]) of each box.
        files: their seals by name.
    """

    index: list[tuple[str, str, list[int], list[Any]]]
    files: dict[str, Seal]


@dataclass
class File:
    """A file that a rank has to write, and its part of the index."""

    name: str
    tensors: dict[str, torch.Tensor]
    index: list[tuple[str, str, list[int], list[Any]]]
    metadata: dict[str, str] | None = None


def save(root: Path, step: int, engine: Source, progress: Mapping[str, Any], workers: Workers) -> Path:
    """Write a checkpoint; every rank must call it, and all return or raise alike.

    Args:
        root: the run's ``checkpoints`` folder.
        step: number of steps that are done.
        progress: where the run stands: plain values for JSON.

    Raises:
        CheckpointError: it cannot be written, a full disk for instance; earlier ones are untouched.
    """
    attempt = Attempt(root, step, engine.state(), progress, workers)
    attempt.begin()
    written = attempt.together(lambda: attempt.write_share(engine))
    by_rank = workers.gather(written)
    attempt.together(lambda: attempt.finish(by_rank) if workers.is_main else None)
    return attempt.final


class Attempt:
    """A checkpoint that is being written: its steps, which all ranks go through alike.

    Attributes:
        folder, final: where it is written, and what that is renamed to.
    """

    def __init__(
        self, root: Path, step: int, engine: Mapping[str, Any], progress: Mapping[str, Any], workers: Workers
    ) -> None:
        self.root = root
        self.workers = workers
        self.final = folder_of(root, step)
        self.folder = self.final.with_name(self.final.name + ".tmp")
        state = {"format": FORMAT, "step": step, "world": workers.world, "layout": workers.dimensions}
        self._state = {**state, "engine": engine, **progress}

    def begin(self) -> None:
        """Make an empty folder; what a run that was killed in a save has left is removed."""
        self.together(lambda: self._make_folder() if self.workers.is_main else None)

    def _make_folder(self) -> None:
        for stale in self.root.glob("step-*.tmp"):
            shutil.rmtree(stale, ignore_errors=stale != self.folder)
        self.folder.mkdir(parents=True)

    def write_share(self, engine: Source) -> Written:
        """Write what this rank holds."""
        written: Written = {"index": [], "files": {}}

        def write(file: File) -> None:
            written["index"] += file.index
            written["files"][file.name] = tensor_file.write(self.folder / file.name, file.tensors, file.metadata)

        for_each_file(engine, self.workers.rank, write)
        return written

    def finish(self, by_rank: Sequence[Written]) -> None:
        """On one rank, once all have written: index, state, manifest; from the renaming on it counts."""
        index: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
        files: dict[str, Seal] = {}
        for written in by_rank:
            files |= written["files"]
            for kind, name, shape, box in written["index"]:
                index[kind].setdefault(name, {"shape": shape, "boxes": []})["boxes"].append(box)
        for name, content in (("index.json", index), ("state.json", self._state)):
            files[name] = write_synced(self.folder / name, to_json(content))
        write_synced(self.folder / "manifest.json", to_json({"format": FORMAT, "files": files}))
        sync(self.folder)
        old = self.final.with_name(self.final.name + "-old.tmp")
        if self.final.exists():  # one that a resume has passed over
            self.final.rename(old)
        self.folder.rename(self.final)
        sync(self.root)
        shutil.rmtree(old, ignore_errors=True)
        write_text(self.root / "latest", self.final.name + "\n")

    def together(self, body: Callable[[], T]) -> T:
        """Run ``body`` on each rank; what it returns on this one.

        Raises:
            CheckpointError: something around it failed on some rank; raised on all of them.
            Exception: what else the body raised; on other ranks a RuntimeError that tells of it.
        """
        results: list[T] = []
        failure: Exception | None = None
        try:
            results.append(body())
        except Exception as error:  # the other ranks wait to be told
            failure = error
        self.agree(failure)
        return results[0]

    def agree(self, failure: Exception | None) -> None:
        """Give up, on all ranks alike, if one of them has failed.

        Raises:
            CheckpointError, Exception: as :meth:`together`.
        """
        told = [t for t in self.workers.gather(_told(failure)) if t is not None]
        if not told:
            return
        if self.workers.is_main:
            shutil.rmtree(self.folder, ignore_errors=True)
        if failure is not None and not isinstance(failure, FAILURES):
            raise failure
        what, to_do = min(told, key=lambda t: t[1] is not None)
        if to_do is None:
            raise RuntimeError(f"another worker failed in a save:\n{what}")
        earlier = next((path.name for path in candidates(self.root)), None)
        raise CheckpointError(
            f"the checkpoint of step {step_of(self.final)} could not be written: {what}",
            where=str(self.final),
            hint=f"{to_do} and go on with --resume from {earlier}" if earlier else f"{to_do} and start again",
        ) from failure


def _told(failure: Exception | None) -> tuple[str, str | None] | None:
    """(what went wrong, what to do about it) for all ranks; (the stack trace, None) of a mistake in the code."""
    if failure is None:
        return None
    if isinstance(failure, OSError):
        return explain(failure)
    if isinstance(failure, MemoryError):
        return f"there is not enough memory {failure}".strip(), "leave more memory free"
    return "".join(traceback.format_exception(failure)).rstrip(), None


def for_each_file(engine: Source, rank: int, body: Callable[[File], None]) -> None:
    """Call ``body`` with each file that a rank has to write.

    What the body raises is raised at the end: an engine may exchange tensors with other ranks while it
    brings its pieces, and these would wait for ever for a rank that brings no more.
    """
    failure: Exception | None = None
    for file in _files(engine, rank):
        if failure is None:
            try:
                body(file)
            except Exception as error:
                failure = error
    if failure is not None:
        raise failure


def _files(engine: Source, rank: int) -> Iterator[File]:
    """The files, each as soon as it is full: earlier ones do not stay in memory."""
    for kind in KINDS:
        for number, pieces in enumerate(_parts(_keyed(engine.pieces(kind)))):
            name = f"{kind}-{rank:05d}-{number:05d}.safetensors"
            index = [
                (kind, piece.name, list(piece.shape), [name, key, list(piece.offset)]) for key, piece in pieces.items()
            ]
            file = File(name, {key: piece.tensor for key, piece in pieces.items()}, index)
            pieces.clear()
            yield file
            file.tensors.clear()  # before the engine brings more
    tensors, metadata = capture()
    yield File(f"random-{rank:05d}.safetensors", tensors, [], metadata)


def _parts(pieces: Iterable[tuple[str, Piece]]) -> Iterator[dict[str, Piece]]:
    """Pieces by the files they go into; there is one file even if there are no pieces."""
    part: dict[str, Piece] = {}
    size, number = 0, 0
    for key, piece in pieces:
        length = piece.tensor.numel() * piece.tensor.itemsize
        if part and size + length > PART_BYTES:
            yield part
            part, size, number = {}, 0, number + 1
        part[key] = piece
        size += length
    if part or not number:
        yield part


def _keyed(pieces: Iterable[Piece]) -> Iterator[tuple[str, Piece]]:
    """Pieces with their keys in a file: the name, with a number where a rank holds several boxes of a tensor."""
    counts: Counter[str] = Counter()
    for piece in pieces:
        yield (f"{piece.name}#{counts[piece.name]}" if counts[piece.name] else piece.name), piece
        counts[piece.name] += 1


class Reader:
    """Reads boxes of the tensors of a checkpoint, whatever layout wrote them.

    That the checkpoint is whole was seen before, by all ranks together: it is not read a second time for that.

    Raises:
        CheckpointError: a file cannot be read after all.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        with self._readable("index.json or state.json"):
            self.index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
            self.state = json.loads((folder / "state.json").read_text(encoding="utf-8"))

    def names(self, kind: str) -> dict[str, tuple[int, ...]]:
        return {name: tuple(entry["shape"]) for name, entry in self.index[kind].items()}

    def read(self, kind: str, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        result: torch.Tensor | None = None
        covered = 0
        for file, key, begin in self.index[kind][name]["boxes"]:
            source = self._file(file).get_slice(key)
            box = source.get_shape()
            lows = [max(o, b) for o, b in zip(offset, begin, strict=True)]
            highs = [min(o + s, b + x) for o, s, b, x in zip(offset, shape, begin, box, strict=True)]
            if any(low >= high for low, high in zip(lows, highs, strict=True)):
                continue
            inside = tuple(slice(low - b, high - b) for low, high, b in zip(lows, highs, begin, strict=True))
            part = source[inside] if inside else self._file(file).get_tensor(key)
            if result is None:
                result = torch.empty(tuple(shape), dtype=part.dtype)
            target = tuple(slice(low - o, high - o) for low, high, o in zip(lows, highs, offset, strict=True))
            result[target] = part
            covered += part.numel()
        if result is None or covered != result.numel():
            raise CheckpointError(f"parts of {name} are missing in the checkpoint", where=str(self.folder))
        return result

    def random_state(self, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """The random state that a rank had."""
        source = self._file(f"random-{rank:05d}.safetensors")
        return {key: source.get_tensor(key) for key in source.keys()}, source.metadata()  # noqa: SIM118

    def _file(self, name: str) -> Any:
        if Path(name).name != name:
            raise CheckpointError(f"{name} is not a file of the checkpoint", where=str(self.folder))
        if name not in self._open:
            with self._readable(name):
                self._open[name] = safe_open(self.folder / name, framework="pt")
        return self._open[name]

    @contextmanager
    def _readable(self, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(
                f"{name} cannot be read ({error})",
                where=str(self.folder),
                hint="--resume passes over a checkpoint that is not whole",
            ) from error
