"""Hub data sets: from the cache of ``datasets``, else downloaded by it. Torch is not imported.

The cache has ``OWNER___NAME/CONFIGURATION/VERSION/HASH/`` with Arrow files ``NAME-PART.arrow``, which may be sharded.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.hub import download_error, is_unreachable, log_in_hint, only_one_process, reason

PART_NAMES = {"train": "train", "test": "test"} | dict.fromkeys(("valid", "validation", "val", "dev", "eval"), "valid")
"""Names of parts in data sets, mapped to our names."""

HUB_NAME = re.compile(r"(?:[\w.-]+/)?[\w.-]+")


def cache_root() -> Path:
    """Return the cache folder of ``datasets``. It follows the same environment variables."""
    home = os.environ.get("HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
    return Path(os.environ.get("HF_DATASETS_CACHE", os.path.join(home, "datasets"))).expanduser()


def _cached_folder(name: str) -> Path:
    owner, _, last = name.rpartition("/")
    snake = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", last)).lower()
    return cache_root() / (f"{owner}___{snake}" if owner else snake)


def may_be_data_set(name: str) -> bool:
    """Return whether a hub data set is in the cache, or a name has the form ``owner/name`` and is not a path."""
    is_owned = "/" in name and not Path(name).parent.is_dir()
    return HUB_NAME.fullmatch(name) is not None and (is_owned or _cached_folder(name).is_dir())


def find_or_download(name: str, config: str | None, flag: str) -> Path:
    """Find the newest version of a hub data set in the cache of ``datasets``. If there is none, download it.

    One process of a node downloads, and the others wait for it. Returns the folder with its parts.

    Args:
        name: the name on the hub.
        config: its configuration. None selects the only one in the cache, or the one named default.
        flag: the flag that names the data set, for messages.

    Raises:
        DataError: it cannot be downloaded, or the cache has several configurations and none is chosen.
    """
    if not HUB_NAME.fullmatch(name):
        raise DataError(f"there is no folder {name}", where=flag, hint="give the folder that holds the files")
    cached = _find_cached(name, config, flag)
    if cached is not None:
        return cached
    try:
        with only_one_process(name):
            cached = _find_cached(name, config, flag)
            if cached is None:
                import datasets
                from huggingface_hub import HfApi

                HfApi().dataset_info(name)  # raises the hub's own error, which datasets would replace
                datasets.load_dataset(name, config, cache_dir=str(cache_root()))
                cached = _find_cached(name, config, flag)
    except DataError:
        raise
    except Exception as error:  # huggingface_hub, its HTTP client and datasets each raise different errors
        raise _download_error(error, name, config, flag) from error
    if cached is None:
        raise DataError(f"{name} was downloaded, but it is not in {cache_root()}", where=flag, hint="report this error")
    return cached


def _find_cached(name: str, config: str | None, flag: str) -> Path | None:
    by_config: dict[str, list[Path]] = {}
    for info in _cached_folder(name).glob("*/*/*/dataset_info.json"):
        by_config.setdefault(info.parents[2].name, []).append(info.parent)
    if config is None and "default" not in by_config and len(by_config) > 1:
        hint = f"give --data-config NAME; the cache has {', '.join(sorted(by_config))}"
        raise DataError(f"{name} has several configurations", where=flag, hint=hint)
    config_name = config or ("default" if "default" in by_config else next(iter(by_config), ""))
    if config_name not in by_config:
        return None
    return max(by_config[config_name], key=lambda version: version.stat().st_mtime)


def _download_error(error: Exception, name: str, config: str | None, flag: str) -> Exception:
    """Return the error for the user. ``datasets`` raises other errors for configurations and gated files."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    page = f"{constants.ENDPOINT}/datasets/{name}"
    is_of_datasets = not isinstance(error, HfHubHTTPError) and not is_unreachable(error)
    if is_of_datasets and isinstance(error, ValueError):
        hint = f"give --data-config NAME; {page} lists the configurations"
        message = f"{name} cannot be read: {reason(error)}"
        return DataError(message, where="--data-config" if config else flag, hint=hint)
    if is_of_datasets and "gated" in str(error):
        hint = f"ask for access at {page}, then {log_in_hint()}"
        return DataError(f"the data set '{name}' is gated, and you have no access", where=flag, hint=hint)
    arguments = f'"{name}"' + (f', "{config}"' if config else "")
    command = f"python -c 'import datasets; datasets.load_dataset({arguments})'"
    configs = sorted({info.parents[2].name for info in _cached_folder(name).glob("*/*/*/dataset_info.json")})
    command += f"; the cache has {', '.join(configs)}" if configs else ""
    return download_error(error, name, flag=flag, kind="data set", cache=str(cache_root()), download_command=command)


def cached_files(folder: Path, name: str, splits: str | None = None) -> dict[str, list[Path]]:
    """Return the Arrow files of each part of a cached data set, by the part's name.

    Args:
        folder, name: the folder of the data set, and its name on the hub.
        splits: names of its splits for training, validation and test, with commas between them. None finds the usual
            names.

    Raises:
        DataError: a split does not exist, or none has a usual name.
    """
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.arrow")):
        split = re.fullmatch(r".+-(\w+?)(?:-\d+-of-\d+)?", path.stem)
        if split:
            files.setdefault(split[1], []).append(path)
    parts = {name: name for name in files if name in PART_NAMES}
    if splits is not None:
        parts = dict(zip(("train", "valid", "test"), splits.split(","), strict=False))
    unknown = [name for name in parts.values() if name not in files]
    if unknown or not parts:
        problem = f"has no split '{unknown[0]}'" if unknown else "has no split with a usual name"
        hint = f"give --data-split TRAIN,VALIDATION,TEST or the first of them; the splits are {', '.join(files)}"
        raise DataError(f"{name} {problem}", where="--data-split" if splits else "--data-name", hint=hint)
    return {part: files[name] for part, name in parts.items()}
