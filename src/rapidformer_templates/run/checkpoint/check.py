"""Which checkpoints are whole, and which are deleted. The ranks share the work: each file is read by one of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from rapidformer_templates.run.checkpoint.format import FORMAT, KINDS, candidates, step_of
from rapidformer_templates.system.files import crc32, explain
from rapidformer_templates.system.workers import Workers


def problem_of(folder: Path, rank: int = 0, world: int = 1, *, contents: bool = True) -> str | None:
    """What is wrong with a checkpoint, or None.

    Args:
        folder: a checkpoint.
        rank: of the ``world`` that share the work; each looks at the files that fall to it.
        contents: whether they are read; otherwise they need only be there.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        files = {name: (seal["bytes"], seal["crc32"]) for name, seal in manifest["files"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"manifest.json cannot be read ({error})"
    if manifest.get("format") != FORMAT:
        return f"format {manifest.get('format')} is not the format {FORMAT} of this version"
    for name in sorted(files)[rank::world]:
        problem = _problem_of_file(folder, name, *files[name], contents=contents)
        if problem:
            return problem
    if rank:
        return None
    try:
        absent = sorted(_needed(folder) - set(files))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"index.json or state.json cannot be read ({error})"
    return f"the manifest does not list {', '.join(absent)}" if absent else None


def _problem_of_file(folder: Path, name: str, size: int, crc: int, *, contents: bool) -> str | None:
    if Path(name).name != name:
        return f"{name} leaves the folder"
    path = folder / name
    try:
        there = path.stat().st_size
        if there != size:
            return f"{name} has {there} bytes instead of {size}"
        return f"{name} is damaged (its CRC-32 differs)" if contents and crc32(path) != crc else None
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {explain(error)[0]}"


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


def problem_together(folder: Path, workers: Workers) -> str | None:
    """What is wrong with a checkpoint, or None; every rank must call it, and reads its share of the files."""
    return next((p for p in workers.gather(problem_of(folder, workers.rank, workers.world)) if p), None)


def newest_whole(root: Path, workers: Workers) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and what was wrong with newer ones; every rank must call it."""
    passed_over: list[str] = []
    for folder in workers.broadcast(candidates(root)):
        problem = problem_together(folder, workers)
        if problem is None:
            return folder, passed_over
        passed_over.append(f"{folder.name}: {problem}")
    return None, passed_over


def delete_older(newest: Path, keep: int, protected: int | None, workers: Workers) -> str | None:
    """Delete older checkpoints, once a new one is read back whole; every rank must call it, and reads its share.

    Args:
        newest: the new one.
        keep: so many are kept, the new one among them.
        protected: step of a checkpoint that stays in any case (the best one).

    Returns:
        What people should know: why some were not deleted. The new one does not depend on it.
    """
    doomed = workers.broadcast(surplus(newest, keep, protected))
    if not doomed:
        return None
    problem = problem_together(newest, workers)
    if problem:
        return not_deleted(newest, problem)
    return delete(doomed) if workers.is_main else None


def surplus(newest: Path, keep: int, protected: int | None) -> list[Path]:
    """The checkpoints that :func:`delete_older` deletes."""
    older = [folder for folder in candidates(newest.parent) if step_of(folder) < step_of(newest)]
    return [folder for folder in older[keep - 1 :] if step_of(folder) != protected]


def not_deleted(newest: Path, problem: str) -> str:
    return f"{newest.name} was written, and cannot be read back ({problem}): older checkpoints are kept"


def delete(folders: Iterable[Path]) -> str | None:
    """Delete checkpoints; what went wrong, or None."""
    problems = []
    for folder in folders:
        doomed = folder.with_name(folder.name + ".tmp")
        try:
            folder.rename(doomed)  # what is half deleted must not look like a checkpoint
            shutil.rmtree(doomed)
        except OSError as error:
            problems.append(f"{folder.name} could not be deleted: {explain(error)[0]}")
    return "; ".join(problems) or None
