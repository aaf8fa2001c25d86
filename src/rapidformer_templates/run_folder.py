"""The run folder: plan, metrics, summary, checkpoints, export. Its contents are a public contract."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.files import sync, write_json

CONTENTS = (
    "plan.json",
    "deepspeed.json",
    "metrics.jsonl",
    "summary.json",
    "curves.png",
    "profile",
    "checkpoints",
    "export",
)


class RunFolder:
    """Paths and writers of ``--save DIR``. Only rank 0 writes here, checkpoints aside."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.plan = self.path / "plan.json"
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"
        self.curves = self.path / "curves.png"
        self.checkpoints = self.path / "checkpoints"
        self.export = self.path / "export"
        self.profile = self.path / "profile"

    def read_summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads(self.summary.read_text(encoding="utf-8"))
        return summary

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Refuse to write over an earlier run.

        Raises:
            ConfigError: the folder holds a run, and neither ``--resume`` nor ``--overwrite`` was given;
                or it is no folder.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file", where="--save", hint="give a folder")
        held = [name for name in CONTENTS if (self.path / name).exists()]
        if held and not resume and not overwrite:
            raise ConfigError(
                f"{self.path} already holds a run ({', '.join(held)})",
                where="--save",
                hint="--resume goes on with it, --overwrite empties it, another --save leaves it alone",
            )

    def prepare(self, plan: Mapping[str, Any], *, overwrite: bool) -> None:
        """Make the folder, and write the plan and what DeepSpeed is told.

        ``overwrite`` removes an earlier run's files, and no others.
        """
        if overwrite:
            for name in CONTENTS:
                old = self.path / name
                if old.is_dir():
                    shutil.rmtree(old)
                else:
                    old.unlink(missing_ok=True)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        write_json(self.plan, plan)
        if "deepspeed" in plan["engine_options"]:
            write_json(self.path / "deepspeed.json", plan["engine_options"]["deepspeed"])


class MetricsFile:
    """``metrics.jsonl``: one JSON object a line, each on its way to the disk as soon as it is written."""

    def __init__(self, path: Path, last_step: int) -> None:
        """Open the file and drop what was written after ``last_step``: the run will write it again."""
        kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= last_step]
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        temporary.rename(path)
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._path = path

    def write(self, line: Mapping[str, Any]) -> None:
        """Write a line; numbers that are infinite or NaN, which JSON does not know, become null."""
        known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        self._file.write(json.dumps(known, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Flush to the disk, so that no checkpoint is ahead of its metrics."""
        os.fsync(self._file.fileno())
        sync(self._path.parent)

    def close(self) -> None:
        self._file.close()


def _whole_lines(path: Path) -> list[str]:
    """The lines that were written to their end; a run that was killed may leave half a line."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    return text.split("\n")[:-1]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``."""
    return [json.loads(line) for line in _whole_lines(path)]
