"""Checkpoints: folders that are whole or do not count.

A checkpoint is written to ``step-N.tmp/``: safetensors and JSON, never pickle. Each rank writes what
it holds; the index tells where the boxes of each tensor lie, so that any layout can read what
another wrote. A manifest has the size and CRC-32 of every file. Files and folder are flushed to the
disk, the folder is renamed to ``step-N/``, its parent flushed, and ``latest`` is written last.

All workers must see the same folder.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rapidformer_templates.engines.base import Engine, Piece
from rapidformer_templates.errors import CheckpointError
from rapidformer_templates.files import crc32, sync, write_json, write_text
from rapidformer_templates.random_state import capture
from rapidformer_templates.workers import Workers

FORMAT = 2
KINDS = ("weights", "optimizer")


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


def save(root: Path, step: int, engine: Engine, progress: Mapping[str, Any], workers: Workers) -> Path:
    """Write a checkpoint; every rank must call it, and all return or raise alike.

    Args:
        root: the run's ``checkpoints`` folder.
        step: number of steps that are done.
        progress: where the run stands: plain values for JSON.

    Raises:
        CheckpointError: it cannot be written, a full disk for instance; earlier ones are untouched.
    """
    final = folder_of(root, step)
    folder = final.with_name(final.name + ".tmp")
    if workers.is_main:
        shutil.rmtree(folder, ignore_errors=True)
    error = _collective(workers, lambda: folder.mkdir(parents=True) if workers.is_main else None)
    reports: list[Any] = []
    if error is None:
        report: dict[str, Any] = {}
        error = _collective(workers, lambda: report.update(_write_share(folder, engine, workers)))
        reports = workers.gather(report)
    if error is None:
        state = {"format": FORMAT, "step": step, "world": workers.world, "engine": engine.state(), **progress}
        error = _collective(workers, lambda: _finish(folder, final, reports, state) if workers.is_main else None)
    if error is not None:
        if workers.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        earlier = next((path.name for path in candidates(root)), None)
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written: {error}",
            where=str(final),
            hint=f"make room and go on with --resume from {earlier}" if earlier else "make room and start again",
        )
    return final


def _collective(workers: Workers, body: Any) -> str | None:
    """Run ``body`` on each rank; the first error of any of them, told to all."""
    problem = None
    try:
        body()
    except (OSError, SafetensorError) as failure:
        full = getattr(failure, "errno", None) == errno.ENOSPC or "No space left" in str(failure)
        problem = "the disk is full" if full else f"{failure}"
    return next((p for p in workers.gather(problem) if p), None)


def _write_share(folder: Path, engine: Engine, workers: Workers) -> dict[str, Any]:
    """Write what this rank holds; what the index and the manifest have to say of it."""
    report: dict[str, Any] = {"index": [], "files": {}}
    for kind in KINDS:
        name = f"{kind}-{workers.rank:05d}.safetensors"
        boxes = _keyed(engine.pieces(kind))
        save_file({key: piece.tensor.detach().cpu().contiguous() for key, piece in boxes.items()}, folder / name)
        report["index"] += [
            [kind, piece.name, list(piece.shape), [name, key, list(piece.offset)]] for key, piece in boxes.items()
        ]
        report["files"][name] = _sealed(folder / name)
    name = f"random-{workers.rank:05d}.safetensors"
    tensors, metadata = capture()
    save_file(tensors, folder / name, metadata=metadata)
    report["files"][name] = _sealed(folder / name)
    return report


def _keyed(pieces: Iterable[Piece]) -> dict[str, Piece]:
    """Pieces by their keys in a file: the name, with a number where a rank holds several boxes of a tensor."""
    keyed: dict[str, Piece] = {}
    counts: Counter[str] = Counter()
    for piece in pieces:
        keyed[f"{piece.name}#{counts[piece.name]}" if counts[piece.name] else piece.name] = piece
        counts[piece.name] += 1
    return keyed


def _sealed(path: Path) -> dict[str, int]:
    sync(path)
    return {"bytes": path.stat().st_size, "crc32": crc32(path)}


def _finish(folder: Path, final: Path, reports: list[dict[str, Any]], state: dict[str, Any]) -> None:
    index: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    for report in reports:
        for kind, name, shape, box in report["index"]:
            index[kind].setdefault(name, {"shape": shape, "boxes": []})["boxes"].append(box)
    write_json(folder / "index.json", index)
    write_json(folder / "state.json", state)
    files = {name: seal for report in reports for name, seal in report["files"].items()}
    files |= {name: _sealed(folder / name) for name in ("index.json", "state.json")}
    write_json(folder / "manifest.json", {"format": FORMAT, "files": files})
    sync(folder)
    if final.exists():
        shutil.rmtree(final)
    folder.rename(final)
    sync(final.parent)
    write_text(final.parent / "latest", final.name + "\n")


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
    needed = {"index.json", "state.json", *(f"{kind}-00000.safetensors" for kind in (*KINDS, "random"))}
    if absent := sorted(needed - set(files)):
        return f"the manifest does not list {', '.join(absent)}"
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
    return None


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
