"""Checkpoints: folders that are whole or do not count.

A checkpoint is written to ``step-N.tmp/``: safetensors and JSON, never pickle. Each rank writes what
it holds, in parts of bounded size; the index tells where the boxes of each tensor lie, so that any layout
can read what another wrote. A manifest has the size and CRC-32 of every file. Files and folder are flushed
to the disk, the folder is renamed to ``step-N/``, its parent flushed, and ``latest`` is written last.

All workers must see the same folder.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar

import torch
from safetensors import safe_open

from rapidformer_templates import tensor_file
from rapidformer_templates.engines.base import Piece
from rapidformer_templates.errors import CheckpointError
from rapidformer_templates.files import Seal, crc32, sync, to_json, write_synced, write_text
from rapidformer_templates.random_state import capture
from rapidformer_templates.workers import Workers

FORMAT = 2
T = TypeVar("T")
KINDS = ("weights", "optimizer")
PART_BYTES = 10**9
"""So much goes into a file; of a state that an engine brings from elsewhere, so much is in memory at a time."""

FAILURES = (OSError, MemoryError, RuntimeError, ValueError)
"""What may go wrong in a save without a mistake in this library."""


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


class Report(TypedDict):
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
    report = attempt.together(lambda: attempt.write_share(engine))
    reports = workers.gather(report)
    attempt.together(lambda: attempt.finish(reports) if workers.is_main else None)
    return attempt.final


class Attempt:
    """A checkpoint that is being written: its stages, which all ranks go through alike.

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
        state = {"format": FORMAT, "step": step, "world": workers.world, "layout": workers.layout}
        self._state = {**state, "engine": engine, **progress}

    def begin(self) -> None:
        """Make an empty folder; what a run that was killed in a save has left is removed."""
        self.together(lambda: self._make_folder() if self.workers.is_main else None)

    def _make_folder(self) -> None:
        for stale in self.root.glob("step-*.tmp"):
            shutil.rmtree(stale)
        self.folder.mkdir(parents=True)

    def write_share(self, engine: Source) -> Report:
        """Write what this rank holds."""
        report: Report = {"index": [], "files": {}}

        def write(file: File) -> None:
            report["index"] += file.index
            report["files"][file.name] = tensor_file.write(self.folder / file.name, file.tensors, file.metadata)

        for_each_file(engine, self.workers.rank, write)
        return report

    def finish(self, reports: Sequence[Report]) -> None:
        """On one rank, once all have written: index, state, manifest; from the renaming on it counts."""
        index: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
        files: dict[str, Seal] = {}
        for report in reports:
            files |= report["files"]
            for kind, name, shape, box in report["index"]:
                index[kind].setdefault(name, {"shape": shape, "boxes": []})["boxes"].append(box)
        for name, content in (("index.json", index), ("state.json", self._state)):
            files[name] = write_synced(self.folder / name, to_json(content))
        write_synced(self.folder / "manifest.json", to_json({"format": FORMAT, "files": files}))
        sync(self.folder)
        if self.final.exists():
            shutil.rmtree(self.final)
        self.folder.rename(self.final)
        sync(self.root)
        write_text(self.root / "latest", self.final.name + "\n")

    def together(self, body: Callable[[], T]) -> T:
        """Run ``body`` on each rank; what it returns on this one.

        Raises:
            CheckpointError: it failed on some rank; raised on all of them.
        """
        results: list[T] = []
        failure: Exception | None = None
        try:
            results.append(body())
        except FAILURES as error:
            failure = error
        self.agree(failure)
        return results[0]

    def agree(self, failure: BaseException | None) -> None:
        """Give up, on all ranks alike, if one of them has failed.

        Raises:
            CheckpointError: one has.
        """
        problem = next((p for p in self.workers.gather(_in_words(failure)) if p), None)
        if problem is None:
            return
        if self.workers.is_main:
            shutil.rmtree(self.folder, ignore_errors=True)
        earlier = next((path.name for path in candidates(self.root)), None)
        raise CheckpointError(
            f"the checkpoint of step {step_of(self.final)} could not be written: {problem}",
            where=str(self.final),
            hint=f"make room and go on with --resume from {earlier}" if earlier else "make room and start again",
        ) from failure


def _in_words(failure: BaseException | None) -> str | None:
    if failure is None:
        return None
    return "the disk is full" if getattr(failure, "errno", None) == errno.ENOSPC else str(failure)


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
            except FAILURES as error:
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


def problem_of(folder: Path, ranks: Iterable[int] = (0,), ranks_in_all: int = 1) -> str | None:
    """What is wrong with a checkpoint, or None.

    Args:
        folder: a checkpoint.
        ranks: checks the files that fall to these ranks when ``ranks_in_all`` share the work.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"manifest.json cannot be read ({error})"
    if manifest.get("format") != FORMAT:
        return f"format {manifest.get('format')} is not the format {FORMAT} of this version"
    mine = set(ranks)
    for place, (name, seal) in enumerate(sorted(files.items())):
        path = folder / name
        if Path(name).name != name:
            return f"{name} leaves the folder"
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != seal["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {seal['bytes']}"
        if place % ranks_in_all in mine and crc32(path) != seal["crc32"]:
            return f"{name} is damaged (its CRC-32 differs)"
    try:
        absent = sorted(_needed(folder) - set(files))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"index.json or state.json cannot be read ({error})"
    return f"the manifest does not list {', '.join(absent)}" if absent else None


def _needed(folder: Path) -> set[str]:
    """The files that a checkpoint must have, by what it says of itself."""
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    needed = {"index.json", "state.json"}
    for rank in range(state["world"]):
        needed |= {f"random-{rank:05d}.safetensors", *(f"{kind}-{rank:05d}-00000.safetensors" for kind in KINDS)}
    for kind in KINDS:
        needed |= {box[0] for entry in index[kind].values() for box in entry["boxes"]}
    return needed


def newest_whole(root: Path, workers: Workers) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that validates on every rank, and what was wrong with newer ones."""
    passed_over: list[str] = []
    for folder in workers.broadcast(candidates(root)):
        problems = workers.gather(problem_of(folder, (workers.rank,), workers.world))
        problem = next((p for p in problems if p), None)
        if problem is None:
            return folder, passed_over
        passed_over.append(f"{folder.name}: {problem}")
    return None, passed_over


def delete_older(root: Path, keep: int, protected: int | None) -> None:
    """Delete all but the newest ``keep`` checkpoints, once the newest one validates.

    Args:
        protected: step of a checkpoint that stays in any case (the best one).
    """
    found = candidates(root)
    if len(found) <= keep or problem_of(found[0]) is not None:
        return
    for folder in found[keep:]:
        if step_of(folder) != protected:
            shutil.rmtree(folder)


class Reader:
    """Reads boxes of the tensors of a checkpoint, whatever layout wrote them.

    Raises:
        CheckpointError: the folder is no whole checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        problem = problem_of(folder)
        if problem:
            raise CheckpointError(f"the checkpoint cannot be used: {problem}", where=str(folder))
        self.folder = folder
        self.index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        self.state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        self._open: dict[str, Any] = {}

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
            self._open[name] = safe_open(self.folder / name, framework="pt")
        return self._open[name]
