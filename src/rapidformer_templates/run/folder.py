"""The run folder: plan, metrics, summary, checkpoints, export. Its contents are a public contract."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.metrics import TEST, metric_name
from rapidformer_templates.system.files import finite, sync, write_json, write_text, writing

CONTENTS = (
    "plan.json",
    "deepspeed.json",
    "reference.safetensors",
    "metrics.jsonl",
    "trackers",
    "summary.json",
    "curves.png",
    "profile",
    "checkpoints",
    "model",
    "export",
)

TRASH = "overwritten.tmp"
"""Where ``--overwrite`` moves what it deletes."""


class RunFolder:
    """Paths and writers of ``--save DIR``. Only rank 0 writes here, checkpoints aside."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.plan = self.path / "plan.json"
        self.metrics = self.path / "metrics.jsonl"
        self.reference = self.path / "reference.safetensors"
        self.trackers = self.path / "trackers"
        self.summary = self.path / "summary.json"
        self.curves = self.path / "curves.png"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.export = self.path / "export"
        self.profile = self.path / "profile"

    def read_summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads(self.summary.read_text(encoding="utf-8"))
        return summary

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Refuse to write over an earlier run.

        Raises:
            ConfigError: the folder holds a run, and neither ``--resume`` nor ``--overwrite`` was given, or both;
                or it is no folder; or what would be deleted is no run's, or a link.
        """
        if resume and overwrite:
            raise ConfigError(
                "--resume goes on with the run that --overwrite deletes",
                where="--overwrite",
                hint="leave one of them out",
            )
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file", where="--save", hint="give a folder")
        held = [name for name in CONTENTS if (self.path / name).exists()]
        if held and not resume and not overwrite:
            raise ConfigError(
                f"{self.path} already holds a run ({', '.join(held)})",
                where="--save",
                hint="--resume goes on with it, --overwrite empties it, another --save leaves it alone",
            )

        is_run = self.plan.exists() or (self.path / TRASH).exists()  # or a run whose removal was interrupted
        if held and overwrite and not is_run:
            raise ConfigError(
                f"{self.path} holds no run, and --overwrite would delete its {', '.join(held)}",
                where="--overwrite",
                hint="give another --save, or move them elsewhere",
            )
        links = [name for name in held if (self.path / name).is_symlink()]
        if links and overwrite:
            raise ConfigError(
                f"{', '.join(links)} in {self.path} is a link, and nothing is deleted through links",
                where="--overwrite",
                hint="empty by hand what it leads to and remove it, or give another --save",
            )

    def holds(self, path: str | Path) -> bool:
        """Whether a file, a checkpoint or a run folder is among what ``--overwrite`` deletes."""
        read = (Path(path).resolve(), Path(path).resolve() / "checkpoints")
        return any(p.exists() and p.is_relative_to(self.path.resolve() / name) for p in read for name in CONTENTS)

    def prepare(self, plan: Mapping[str, Any], *, overwrite: bool) -> None:
        """Make the folder, and write the plan and what DeepSpeed is told.

        ``overwrite`` removes an earlier run's files, and no others.
        """
        trash = self.path / TRASH
        with writing(self.path):
            if overwrite:
                self._move_into(trash)
            shutil.rmtree(trash, ignore_errors=True)  # also that of a run that was killed here
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            write_json(self.plan, plan)
            if "deepspeed" in plan["engine_options"]:
                write_json(self.path / "deepspeed.json", plan["engine_options"]["deepspeed"])

    def _move_into(self, trash: Path) -> None:
        """Take an earlier run away. Its checkpoints go at once and first: of what is left no run can go on."""
        shutil.rmtree(trash, ignore_errors=True)
        trash.mkdir()
        for name in sorted(CONTENTS, key=lambda name: name != "checkpoints"):
            if (self.path / name).exists():
                (self.path / name).rename(trash / name)
        sync(self.path)


class MetricsFile:
    """``metrics.jsonl``: one JSON object a line, each on its way to the disk as soon as it is written.

    Attributes:
        garbled: numbers of the lines that could not be read, and are left out.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        """Open the file and drop what was written after ``last_step``: the run will write it again."""
        lines = dict(_lines(path))
        self.garbled = [number for number, line in lines.items() if line is None]
        kept = [line for line in lines.values() if line is not None and line["step"] <= last_step]
        with writing(path):
            if path.exists():
                write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
            self._file: TextIO = path.open("a", encoding="utf-8")
        self._path = path

    def write(self, line: Mapping[str, Any]) -> None:
        """Write a line; numbers that are infinite or NaN, which JSON does not know, become null."""
        with writing(self._path):
            self._file.write(json.dumps(finite(line), allow_nan=False) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Flush to the disk, so that no checkpoint is ahead of its metrics."""
        with writing(self._path):
            os.fsync(self._file.fileno())
            sync(self._path.parent)

    def close(self) -> None:
        self._file.close()


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(number, line) of those that were written to their end; None for one that is no line of metrics.

    A run that was killed may leave half a line at the end, and a disk anything in the middle.
    """
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        yield number, value if isinstance(value, dict) and isinstance(value.get("step"), int) else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl`` that can be read."""
    return [line for _, line in _lines(path) if line is not None]


def is_of_test(line: Mapping[str, Any]) -> bool:
    """Whether a line of metrics is of the test part; its step is that of the exported weights."""
    return any(name.startswith(metric_name(TEST, "")) for name in line)
