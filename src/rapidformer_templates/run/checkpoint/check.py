"""Checks which checkpoints are complete, and deletes old ones. The ranks share the work: one rank reads each file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rapidformer_templates.errors import CheckpointError
from rapidformer_templates.run.checkpoint.format import FORMAT, KINDS, READABLE, candidates, step_of
from rapidformer_templates.system.files import JSON_ERRORS, crc32, explain
from rapidformer_templates.system.workers import Workers


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
    except JSON_ERRORS as error:
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
    except JSON_ERRORS as error:
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
    for folder in workers.broadcast(candidates(root) if workers.is_main else []):
        problem = problem_on_all_ranks(folder, workers)
        if problem is None:
            return folder, passed_over
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
