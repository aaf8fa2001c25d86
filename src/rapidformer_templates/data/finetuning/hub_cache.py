"""Hub data sets in the cache of ``datasets``. Nothing is downloaded, and torch is not imported.

The cache has ``OWNER___NAME/CONFIGURATION/VERSION/HASH/`` with Arrow files ``NAME-PART.arrow``, which may be sharded.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from rapidformer_templates.errors import DataError

PART_NAMES = {"train": "train", "test": "test"} | dict.fromkeys(("valid", "validation", "val", "dev", "eval"), "valid")
"""Names of parts in data sets, mapped to our names."""

HUB_NAME = re.compile(r"(?:[\w.-]+/)?[\w.-]+")


@dataclass(frozen=True)
class Cached:
    """A hub data set in the cache of ``datasets``.

    Attributes:
        name: the name on the hub.
        config: the configuration of the data set.
        folder: the folder with its parts.
    """

    name: str
    config: str
    folder: Path


def cache_root() -> Path:
    """Return the cache folder of ``datasets``. It follows the same environment variables."""
    home = os.environ.get("HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
    return Path(os.environ.get("HF_DATASETS_CACHE", os.path.join(home, "datasets"))).expanduser()


def _cached_folder(name: str) -> Path:
    owner, _, last = name.rpartition("/")
    snake = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", last)).lower()
    return cache_root() / (f"{owner}___{snake}" if owner else snake)


def is_cached(name: str) -> bool:
    """Return whether the cache of ``datasets`` has a folder for a hub data set."""
    return HUB_NAME.fullmatch(name) is not None and _cached_folder(name).is_dir()


def is_owned(name: str) -> bool:
    """Return whether a name has the form ``owner/name`` of a hub data set and is not the path of a folder."""
    return HUB_NAME.fullmatch(name) is not None and "/" in name and not Path(name).parent.is_dir()


def find_cached(name: str, config: str | None, flag: str) -> Cached:
    """Find the newest version of a hub data set in the cache of ``datasets``.

    Args:
        name: the name on the hub.
        config: its configuration. None selects the only one, or the one named default.
        flag: the flag that names the data set, for messages.

    Raises:
        DataError: the cache does not have it, or has several configurations.
    """
    folder = _cached_folder(name)
    by_config: dict[str, list[Path]] = {}
    for info in folder.glob("*/*/*/dataset_info.json") if HUB_NAME.fullmatch(name) else ():
        by_config.setdefault(info.parents[2].name, []).append(info.parent)
    if not by_config:
        load = f"python -c 'import datasets; datasets.load_dataset(\"{name}\")'"
        hint = f"nothing is downloaded here: name a folder with files, or load it once where there is a network: {load}"
        raise DataError(
            f"there is no folder {name}, and no data set of that name in {cache_root()}", where=flag, hint=hint
        )
    config_name = config or ("default" if "default" in by_config else next(iter(by_config)))
    if config_name not in by_config or (config is None and "default" not in by_config and len(by_config) > 1):
        message = (
            f"{name} has no configuration '{config}' in the cache" if config else f"{name} has several configurations"
        )
        hint = f"give --data-dir {name} --data-name CONFIGURATION; the cache has {', '.join(sorted(by_config))}"
        raise DataError(message, where="--data-name" if config else flag, hint=hint)
    return Cached(name, config_name, max(by_config[config_name], key=lambda version: version.stat().st_mtime))


def cached_files(cached: Cached) -> dict[str, list[Path]]:
    """Return the Arrow files of each part of a cached data set, by the part's name in the cache."""
    parts: dict[str, list[Path]] = {}
    for path in sorted(cached.folder.glob("*.arrow")):
        split = re.fullmatch(r".+-(\w+?)(?:-\d+-of-\d+)?", path.stem)
        if split and split[1] in PART_NAMES:
            parts.setdefault(split[1], []).append(path)
    return parts
