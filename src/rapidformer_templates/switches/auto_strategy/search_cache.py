"""Results of earlier searches in the user's cache folder, so that an equal search needs neither traces nor torch.

The name of a file is a hash of everything that a result depends on: flags, machine, devices, versions of packages, the
source of this package, and the files that flags name. Files are written under a temporary name and then renamed. A file
that cannot be read is ignored. This module does not import torch.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from hashlib import sha256
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.environment import Environment, version_of_package
from rapidformer_templates.planning.hub import cached_folder
from rapidformer_templates.planning.registry import SWITCHES
from rapidformer_templates.switches.auto_strategy.layouts import Layout
from rapidformer_templates.switches.auto_strategy.results import (
    Candidate,
    Memory,
    Rejected,
    SearchResult,
    SetupMemory,
    Unknown,
)
from rapidformer_templates.switches.auto_strategy.step_seconds import Timing
from rapidformer_templates.switches.auto_strategy.timing import Hardware
from rapidformer_templates.switches.auto_strategy.whole_training import ModelTotals
from rapidformer_templates.system.files import JSON_ERRORS, hash_of, user_cache

KEPT = 50
"""Number of results that stay in the folder. The oldest ones are deleted."""


def cache_folder() -> Path:
    """Return the folder of the results."""
    return user_cache() / "searches"


def cache_file(config: RunConfig, environment: Environment, hardware: Hardware, *, by_memory: bool) -> Path | None:
    """Return the file of a search. None if other packages add switches, whose source is not known here.

    Args:
        by_memory: whether the blocks of each stage are chosen by predicted memory.
    """
    if entry_points(group=SWITCHES):
        return None
    facts = {
        "versions": {name: version_of_package(name) for name in ("torch", "transformers")} | {"python": sys.version},
        "machine": platform.machine(),
        "source": _source_hash(),
        "flags": {name: repr(value) for name, value in config.items()},
        "origins": dict(config.origins),
        "environment": repr(environment),
        "hardware": repr(hardware),
        "by_memory": by_memory,
        "files": sorted(_files_of(config)),
    }
    return cache_folder() / f"{hash_of(facts)}.json"


@cache
def _source_hash() -> str:
    """Return a hash of the source files of this package."""
    root, content = Path(__file__).parents[2], sha256()
    for file in sorted([*root.rglob("*.py"), *root.rglob("*.toml")]):
        content.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return content.hexdigest()


def _files_of(config: RunConfig) -> Iterator[str]:
    """Yield the path, size and time of each file that a flag names, and of each file in a folder that it names."""
    model, data = config.model, config.data
    on_hub = ((model.pretrained_model_name_or_path, model.revision), (data.tokenizer_path, None))
    folders = [cached_folder(name, revision, "config") for name, revision in on_hub if name]
    unread = ("save", "data_dir", "data_path", "data_cache_dir")  # a plan reads no samples
    values = [value for name, value in config.items() if isinstance(value, str) and name not in unread]
    for path in [*map(Path, values), *filter(None, folders)]:
        with suppress(OSError, ValueError):  # a text that cannot be the name of a file
            for file in [path, *(sorted(path.iterdir()) if path.is_dir() else ())]:
                facts = file.stat()
                yield f"{file.resolve()} {facts.st_size} {facts.st_mtime_ns}"


def read_result(file: Path) -> SearchResult | None:
    """Return an earlier result, or None if there is none. A file that cannot be read is ignored with a note."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        return replace(_decoded(stored), file=file)
    except FileNotFoundError:
        return None
    except JSON_ERRORS as error:
        print(f"note: {file} is damaged and is ignored ({type(error).__name__}: {error})", file=sys.stderr)
        return None


def write_result(file: Path, result: SearchResult) -> None:
    """Store a result. If the folder cannot be written to, a note says so."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(_encoded(result)), encoding="utf-8")
        temporary.replace(file)
        by_age = sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        for old in by_age[:-KEPT]:
            old.unlink(missing_ok=True)
    except OSError as error:
        print(f"note: the result of the search is not stored in {file.parent} ({error})", file=sys.stderr)


def _encoded(result: SearchResult) -> dict[str, object]:
    return {
        "layouts": [asdict(candidate) for candidate in result.layouts],
        "rejected": [asdict(rejected) for rejected in result.rejected],
        "totals": asdict(result.totals),
        "not_predicted": [asdict(unknown) for unknown in result.not_predicted],
    }


def _decoded(stored: dict[str, Any]) -> SearchResult:
    return SearchResult(
        layouts=tuple(_candidate(**values) for values in stored["layouts"]),
        rejected=tuple(Rejected(_layout(**values["layout"]), values["constraint"]) for values in stored["rejected"]),
        totals=ModelTotals(**stored["totals"]),
        not_predicted=tuple(
            Unknown(values["switch"], tuple(values["kinds"]), values["why"]) for values in stored["not_predicted"]
        ),
    )


def _candidate(
    *, layout: dict[str, Any], memory: dict[str, int], setup: dict[str, int], timing: dict[str, float], **rest: float
) -> Candidate:
    return Candidate(_layout(**layout), Memory(**memory), SetupMemory(**setup), Timing(**timing), **rest)


def _layout(*, stages: list[int], **sizes: Any) -> Layout:
    return Layout(**sizes, stages=tuple(stages))
