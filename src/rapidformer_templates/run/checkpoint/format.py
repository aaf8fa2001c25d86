"""The checkpoint format. A checkpoint folder is complete, or it does not count.

A checkpoint is written to ``step-N.tmp/`` as safetensors and JSON, never pickle. Each rank writes its own
tensors, in files of bounded size. The index lists the boxes of each tensor and their files, so that any layout can
read what another has written. A manifest has the size and CRC-32 of every file. Files and folder are flushed to
disk. Then the folder is renamed to ``step-N/``, its parent is flushed, and ``latest`` is written last. If a session
went back to an earlier step, ``latest`` also lists the later checkpoints that it left.

All workers must see the same folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol, TypedDict, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from rapidformer_templates.engines.shards import Shard, ShardKind, shards_to_write
from rapidformer_templates.errors import CheckpointError, StorageFailed
from rapidformer_templates.run.checkpoint import tensor_file
from rapidformer_templates.system import files as storage
from rapidformer_templates.system.files import Seal, crc32, explain, sync, to_json, write_synced, write_text
from rapidformer_templates.system.process_state import capture
from rapidformer_templates.system.terminal import say
from rapidformer_templates.system.workers import Workers

FORMAT = 3
READABLE = (2, FORMAT)
"""Formats that can be read. In format 2 the index lacks the shapes of boxes."""

T = TypeVar("T")
KINDS: tuple[ShardKind, ...] = ("weights", "optimizer")
PART_BYTES = 10**9
"""Maximum bytes per file. An engine that fetches state from elsewhere also needs this much memory at a time."""

FAILURES = (OSError, MemoryError)
"""Errors of a save that are not bugs in this library or in the model."""


def step_of(folder: Path) -> int:
    """The step of a checkpoint folder: ``step-40`` → 40."""
    return int(folder.name.removeprefix("step-"))


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step}"


def candidates(root: Path) -> list[Path]:
    """Return the finished checkpoints of a run, newest first, then those that training left by going back.

    Raises:
        CheckpointError: the folder exists but cannot be read. That does not mean that there are none.
    """
    try:
        names, left = os.listdir(root), _left(root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        what, to_do = explain(error)
        raise CheckpointError(f"{root} cannot be read: {what}", hint=to_do) from error
    return sorted(_steps(root, names), key=lambda folder: (folder.name not in left, step_of(folder)), reverse=True)


def _steps(root: Path, names: Iterable[str]) -> list[Path]:
    return [root / name for name in names if re.fullmatch(r"step-\d+", name)]


def _left(root: Path) -> set[str]:
    """Return the names of the checkpoints that training left by going back to an earlier step."""
    try:
        return set((root / "latest").read_text(encoding="utf-8").split()[1:])
    except (FileNotFoundError, UnicodeDecodeError):
        return set()


def leave_later(root: Path, step: int) -> None:
    """Let the checkpoints that are later than a step to save, and an earlier one of this step, come last.

    A session that went back saves the step again. The storage may fail before that is complete.
    """
    folders = _steps(root, os.listdir(root))
    if any(step_of(folder) > step for folder in folders):
        left = {folder.name for folder in folders if step_of(folder) >= step}
        _write_latest(root, folder_of(root, step).name, _left(root) | left)


def _write_latest(root: Path, newest: str, left: Iterable[str]) -> None:
    write_text(root / "latest", "\n".join([newest, *sorted(left)]) + "\n")


def is_checkpoint(path: Path) -> bool:
    return (path / "manifest.json").is_file()


class ShardSource(Protocol):
    """The part of an engine that a checkpoint needs."""

    def shards(self, kind: ShardKind) -> Iterator[Shard]:
        """Yield this worker's part of all ``weights`` or of the ``optimizer`` state."""

    def state(self) -> dict[str, Any]:
        """Return the remaining state as plain values for JSON."""


Location = tuple[str, str, list[int], list[int]]
"""Where a box is stored: (file, key in the file, offset in the whole tensor, shape)."""

IndexEntry = tuple[str, str, list[int], Location]
"""A box in the index: (kind, name, whole shape, location)."""


class TensorLocations(TypedDict):
    """A tensor in the index."""

    shape: list[int]
    boxes: list[Location]


class Written(TypedDict):
    """The result of writing on one rank.

    Attributes:
        index: the boxes.
        files: seal (size and checksum) of each file by name.
    """

    index: list[IndexEntry]
    files: dict[str, Seal]


@dataclass
class TensorFile:
    """A file that a rank must write, with its part of the index."""

    name: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    index: list[IndexEntry] = field(default_factory=list)
    metadata: dict[str, str] | None = None


def save(
    root: Path,
    step: int,
    engine: ShardSource,
    progress: Mapping[str, object],
    workers: Workers,
    *,
    retries: bool = True,
) -> Path:
    """Write a checkpoint. Call it on every rank: all return or all raise.

    Args:
        root: the run's ``checkpoints`` folder.
        step: number of completed steps.
        progress: the progress of the run as plain values for JSON.
        retries: whether to try again for a while if the storage fails.

    Raises:
        StorageFailed: the storage has failed, for example because it is full. Earlier checkpoints are unchanged.
        CheckpointError: the checkpoint cannot be written for another reason.
    """
    attempt = Attempt(root, step, engine.state(), progress, workers, retries=retries)
    attempt.begin()
    written = attempt.run_together(lambda: attempt.write_share(engine), retries=retries)
    by_rank = workers.gather_on_main(written)
    attempt.run_together(lambda: attempt.finish(by_rank) if workers.is_main else None, retries=retries)
    return attempt.final


class Attempt:
    """A checkpoint that is being written. All ranks go through its steps together.

    Attributes:
        folder, final: the temporary folder, and the path that it is renamed to.
        retries: whether parts of it are tried again if the storage fails.
    """

    def __init__(
        self,
        root: Path,
        step: int,
        engine: Mapping[str, object],
        progress: Mapping[str, object],
        workers: Workers,
        *,
        retries: bool = True,
    ) -> None:
        self.root = root
        self.workers = workers
        self.retries = retries
        self._is_renamed = False
        self.final = folder_of(root, step)
        self.folder = self.final.with_name(self.final.name + ".tmp")
        state = {"format": FORMAT, "step": step, "world": workers.world, "layout": workers.dimensions}
        self._state = {**state, "engine": engine, **progress}

    def begin(self) -> None:
        """Create an empty folder, and delete what a run that was killed during a save has left."""

        def make_folder() -> None:
            for stale in self.root.glob("step-*.tmp"):
                shutil.rmtree(stale, ignore_errors=stale != self.folder)
            self.root.mkdir(exist_ok=True)  # without its parents: they are missing if the storage is not mounted
            self.folder.mkdir()

        self.run_together(make_folder if self.workers.is_main else lambda: None, retries=self.retries)

    def write_share(self, engine: ShardSource) -> Written:
        """Write the tensors of this rank."""
        written: Written = {"index": [], "files": {}}

        def write(file: TensorFile) -> None:
            written["index"] += file.index
            written["files"][file.name] = tensor_file.write(self.folder / file.name, file.tensors, file.metadata)

        for_each_file(engine, self.workers.rank, write)
        return written

    def finish(self, by_rank: Sequence[Written]) -> None:
        """Write index, state and manifest on one rank after all have written. Renaming makes the checkpoint count.

        It may be called again after an error.
        """
        old = self.final.with_name(self.final.name + "-old.tmp")
        if not self._is_renamed:
            index: dict[str, dict[str, TensorLocations]] = {kind: {} for kind in KINDS}
            files: dict[str, Seal] = {}
            for written in by_rank:
                files |= written["files"]
                for kind, name, shape, box in written["index"]:
                    index[kind].setdefault(name, {"shape": shape, "boxes": []})["boxes"].append(box)
            for name, content in (("index.json", index), ("state.json", self._state)):
                files[name] = write_synced(self.folder / name, to_json(content))
            write_synced(self.folder / "manifest.json", to_json({"format": FORMAT, "files": files}))
            sync(self.folder)
            if self.final.exists():  # a broken checkpoint that a resume has skipped
                self.final.rename(old)
            self.folder.rename(self.final)
            self._is_renamed = True
        sync(self.root)
        shutil.rmtree(old, ignore_errors=True)
        left = (name for name in _left(self.root) if (self.root / name).exists() and name != self.final.name)
        _write_latest(self.root, self.final.name, left)

    def run_together(self, body: Callable[[], T], *, retries: bool = False) -> T:
        """Run ``body`` on each rank and return its local result.

        Args:
            body: may be called again.
            retries: whether all ranks try again for a while if the storage of some has failed.

        Raises:
            StorageFailed: the storage has failed on some rank. Raised on all ranks.
            CheckpointError: another file error or a memory error occurred on some rank. Raised on all ranks.
            Exception: any other error of the body. Other ranks raise a RuntimeError that reports it.
        """
        pauses = storage.RETRY_SECONDS if retries else ()
        number = 0
        while True:
            results: list[T] = []
            failure: Exception | None = None
            try:
                results.append(body())
            except Exception as error:  # the other ranks wait for the outcome
                failure = error
            failures = [f for f in self.workers.gather(_describe_failure(failure)) if f is not None]
            if not failures:
                return results[0]
            if number == len(pauses) or not all(f.may_pass for f in failures):
                self._give_up(failure, failures)
            number += 1
            self.announce_retry(failures[0].what, number)
            time.sleep(pauses[number - 1])

    def announce_retry(self, what: str, number: int) -> None:
        """Report on the main rank that a part of the save failed, and will be tried again after a pause."""
        pauses, when = storage.RETRY_SECONDS, f"could not be written yet: {what}; trying again in"
        tries = f"{pauses[number - 1]} s ({number} of {len(pauses)})"
        say(self.workers, f"the checkpoint of step {step_of(self.final)} {when} {tries}", loud=True)

    def _give_up(self, failure: Exception | None, failures: Sequence[SaveFailure]) -> NoReturn:
        """Remove what was written, and raise an error.

        Args:
            failure: the error of this rank.
            failures: the errors of all ranks that had one.
        """
        if self.workers.is_main:
            shutil.rmtree(self.folder, ignore_errors=True)
        if failure is not None and not isinstance(failure, FAILURES):
            raise failure
        first = min(failures, key=lambda f: f.to_do is not None)
        if first.to_do is None:
            raise RuntimeError(f"another worker failed in a save:\n{first.what}")
        earlier = None
        with suppress(CheckpointError):  # the storage is not there
            earlier = next((path.name for path in candidates(self.root)), None)
        to_do = f"{first.to_do} and " + (f"continue with --resume from {earlier}" if earlier else "start again")
        may_pass = all(f.may_pass for f in failures)
        seconds = sum(storage.RETRY_SECONDS) if self.retries and may_pass else 0
        error = StorageFailed if may_pass else CheckpointError
        tried = f" (tried for {seconds:g} s)" if seconds else ""
        message = f"the checkpoint of step {step_of(self.final)} could not be written: {first.what}{tried}"
        raise error(message, where=str(self.final), hint=to_do) from failure


class SaveFailure(NamedTuple):
    """The failure of a save on one rank, for all ranks.

    Attributes:
        what: the problem, or the stack trace of a bug.
        to_do: the remedy. None for a bug.
        may_pass: whether the storage has failed, perhaps only for a while.
    """

    what: str
    to_do: str | None
    may_pass: bool = False


def _describe_failure(failure: Exception | None) -> SaveFailure | None:
    if failure is None:
        return None
    if isinstance(failure, OSError):
        return SaveFailure(*explain(failure), failure.errno in storage.MAY_PASS)
    if isinstance(failure, MemoryError):
        return SaveFailure(f"there is not enough memory {failure}".strip(), "leave more memory free")
    return SaveFailure("".join(traceback.format_exception(failure)).rstrip(), None)


def for_each_file(engine: ShardSource, rank: int, body: Callable[[TensorFile], None]) -> None:
    """Call ``body`` with each file that a rank must write.

    An error in ``body`` is raised at the end. An engine may exchange tensors with other ranks while it yields its
    shards, and they would wait forever for a rank that stops.
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


def _files(engine: ShardSource, rank: int) -> Iterator[TensorFile]:
    """Yield each file as soon as it is full. Earlier files do not stay in memory.

    The key of a box is its name, plus a number from the second box of a tensor on. A kind without boxes has one empty
    file.
    """
    for kind in KINDS:
        counts: Counter[str] = Counter()
        file, number, size = TensorFile(f"{kind}-{rank:05d}-00000.safetensors"), 0, 0
        for shard in shards_to_write(engine.shards(kind)):
            for offset, values in shard.parts():
                length = values.numel() * values.itemsize
                if file.tensors and size + length > PART_BYTES:
                    yield file
                    file.tensors.clear()  # free memory before the engine yields more
                    number += 1
                    file, size = TensorFile(f"{kind}-{rank:05d}-{number:05d}.safetensors"), 0
                again = counts[shard.name]
                counts[shard.name] += 1
                key = f"{shard.name}#{again}" if again else shard.name
                file.tensors[key] = values.contiguous()
                location = (file.name, key, list(offset), list(values.shape))
                file.index.append((kind, shard.name, list(shard.shape), location))
                size += length
        if file.tensors or not number:
            yield file
            file.tensors.clear()
    tensors, metadata = capture()
    yield TensorFile(f"random-{rank:05d}.safetensors", tensors, [], metadata)


# Complete checkpoints, and old ones. The ranks share the work: one rank reads each file.


def problem_of(folder: Path, rank: int = 0, world: int = 1, *, contents: bool = True) -> str | None:
    """Return what is wrong with a checkpoint, or None.

    Args:
        folder: a checkpoint.
        rank: index of this rank among ``world`` ranks that share the work. Each checks a part of the files.
        contents: whether to read the files. Otherwise only their existence and size are checked.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        files = {name: (seal["bytes"], seal["crc32"]) for name, seal in manifest["files"].items()}
    except storage.JSON_ERRORS as error:
        return f"manifest.json cannot be read ({error})"
    if manifest.get("format") not in READABLE:
        return f"format {manifest.get('format')} is not the format {FORMAT} of this version"
    for name in sorted(files)[rank::world]:
        problem = _problem_of_file(folder, name, *files[name], contents=contents)
        if problem:
            return problem
    if rank:
        return None
    needed = {"index.json", "state.json"}
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        for rank in range(state["world"]):
            needed |= {f"random-{rank:05d}.safetensors", *(f"{kind}-{rank:05d}-00000.safetensors" for kind in KINDS)}
        for kind in KINDS:
            needed |= {box[0] for entry in index[kind].values() for box in entry["boxes"]}
        absent = sorted(needed - set(files))
    except storage.JSON_ERRORS as error:
        return f"index.json or state.json cannot be read ({error})"
    return f"the manifest does not list {', '.join(map(str, absent))}" if absent else None


def _problem_of_file(folder: Path, name: str, size: int, crc: int, *, contents: bool) -> str | None:
    if Path(name).name != name:
        return f"{name} is outside the folder"
    path = folder / name
    try:
        size_on_disk = path.stat().st_size
        if size_on_disk != size:
            return f"{name} has {size_on_disk} bytes instead of {size}"
        return f"{name} is damaged (its CRC-32 differs)" if contents and crc32(path) != crc else None
    except FileNotFoundError:
        return f"{name} is missing"
    except ValueError:  # a zero byte
        return f"{name!r} is not the name of a file"
    except OSError as error:
        return f"{name} cannot be read: {explain(error)[0]}"


def problem_on_all_ranks(folder: Path, workers: Workers) -> str | None:
    """Return what is wrong with a checkpoint, or None. Call it on every rank. Each reads its share of the files."""
    return next((p for p in workers.gather(problem_of(folder, workers.rank, workers.world)) if p), None)


def newest_complete(root: Path, workers: Workers) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint, and the problems of newer ones. Call it on every rank."""
    passed_over: list[str] = []
    folders = workers.broadcast(candidates(root) if workers.is_main else [])
    for number, folder in enumerate(folders):
        problem = problem_on_all_ranks(folder, workers)
        if problem is None:
            left = [other.name for other in folders[number:] if step_of(other) > step_of(folder)]
            return folder, [*passed_over, *(f"{name}: training went back to an earlier step" for name in left)]
        passed_over.append(f"{folder.name}: {problem}")
    return None, passed_over


def delete_older(newest: Path, keep: int, protected: int | None, workers: Workers) -> str | None:
    """Delete older checkpoints after verifying the new one. Call it on every rank. Each reads its share.

    Args:
        newest: the new checkpoint.
        keep: number of checkpoints to keep, including the new one.
        protected: step of a checkpoint that is never deleted (the best one).

    Returns:
        A message for users if some were not deleted. The new checkpoint is not affected.
    """
    doomed = surplus(newest, keep, protected, workers)
    if not doomed:
        return None
    problem = problem_on_all_ranks(newest, workers)
    if problem:
        return not_deleted_message(newest, problem)
    return delete(doomed) if workers.is_main else None


def surplus(newest: Path, keep: int, protected: int | None, workers: Workers) -> list[Path]:
    """Return the checkpoints that :func:`delete_older` deletes. Call it on every rank.

    There are none if the folder cannot be read. The next save deletes them.
    """
    doomed: list[Path] = []
    if workers.is_main:
        with suppress(CheckpointError):
            older = [folder for folder in candidates(newest.parent) if step_of(folder) < step_of(newest)]
            doomed = [folder for folder in older[keep - 1 :] if step_of(folder) != protected]
    return workers.broadcast(doomed)


def not_deleted_message(newest: Path, problem: str) -> str:
    return f"{newest.name} was written, but cannot be read back ({problem}): older checkpoints are kept"


def delete(folders: Iterable[Path]) -> str | None:
    """Delete checkpoints. Returns the problems, or None."""
    problems = []
    for folder in folders:
        doomed = folder.with_name(folder.name + ".tmp")
        try:
            folder.rename(doomed)  # a half-deleted folder must not look like a checkpoint
            shutil.rmtree(doomed)
        except OSError as error:
            problems.append(f"{folder.name} could not be deleted: {explain(error)[0]}")
    return "; ".join(problems) or None


class Reader:
    """Reads boxes of the tensors in a checkpoint that any layout has written. It opens only files with these boxes.

    All ranks together have already checked that the checkpoint is complete. The reader does not check again.

    Raises:
        CheckpointError: a file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, safe_open] = {}
        self.index: dict[str, dict[str, TensorLocations]]
        with self._readable("index.json or state.json"):
            self.index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
            self.state = json.loads((folder / "state.json").read_text(encoding="utf-8"))

    def names(self, kind: str) -> dict[str, tuple[int, ...]]:
        return {name: tuple(entry["shape"]) for name, entry in self.index[kind].items()}

    def read(self, kind: str, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        result: torch.Tensor | None = None
        covered = 0
        for file, key, begin, *more in self.index[kind][name]["boxes"]:
            box = more[0] if more else self._file(file).get_slice(key).get_shape()
            lows = [max(o, b) for o, b in zip(offset, begin, strict=True)]
            highs = [min(o + s, b + x) for o, s, b, x in zip(offset, shape, begin, box, strict=True)]
            if any(low >= high for low, high in zip(lows, highs, strict=True)):
                continue
            inside = tuple(slice(low - b, high - b) for low, high, b in zip(lows, highs, begin, strict=True))
            part = self._file(file).get_slice(key)[inside] if inside else self._file(file).get_tensor(key)
            if result is None:
                result = torch.empty(tuple(shape), dtype=part.dtype)
            target = tuple(slice(low - o, high - o) for low, high, o in zip(lows, highs, offset, strict=True))
            result[target] = part
            covered += part.numel()
        if result is None or covered != result.numel():
            raise CheckpointError(f"parts of {name} are missing in the checkpoint", where=str(self.folder))
        return result

    def mapped(self, kind: str, name: str) -> torch.Tensor | None:
        """Return a tensor that uses the memory of a mapped file. None if the checkpoint has it in several parts."""
        entry = self.index[kind][name]
        if len(entry["boxes"]) != 1:
            return None
        file, key, *_ = entry["boxes"][0]
        tensor: torch.Tensor = self._file(file).get_tensor(key)
        return tensor if list(tensor.shape) == entry["shape"] else None

    def random_state(self, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return the random state that a rank saved."""
        source = self._file(f"random-{rank:05d}.safetensors")
        return {key: source.get_tensor(key) for key in source.keys()}, source.metadata()  # noqa: SIM118

    def _file(self, name: str) -> safe_open:
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
            hint = "--resume skips a checkpoint that is not intact"
            raise CheckpointError(f"{name} cannot be read ({error})", where=str(self.folder), hint=hint) from error
