"""Tables of the sample order: made once, then memory-mapped by every process that needs them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rapidformer_templates.data.indexed.dataset import IndexedDataset, bin_path, idx_path
from rapidformer_templates.data.indexed.writer import read_sums
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.system.files import key_of, new_folder

Tables = dict[str, np.ndarray]


def cache_root(config: RunConfig) -> Path:
    """``--data-cache-dir``, else ``rapidformer_templates`` in the user's cache folder (the XDG standard)."""
    if config.data.data_cache_dir:
        return Path(config.data.data_cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rapidformer_templates"


def identity(prefix: str) -> list[Any]:
    """What tells one version of an indexed data set from another: place, sizes and times of its files."""
    stats = [path.stat() for path in (idx_path(prefix), bin_path(prefix))]
    return [str(Path(prefix).resolve()), *[(s.st_size, s.st_mtime_ns) for s in stats]]


def contents(dataset: IndexedDataset) -> str:
    """A few words that differ for sets of other tokens, where the checksums beside them tell."""
    sums = read_sums(dataset.prefix)
    return f" ({key_of(sums['bin']['crc32'])[:12]})" if sums else ""


class IndexCache:
    """Groups of tables in a folder. Several processes may ask at once: the first makes them, the others wait.

    Args:
        root: the folder; None keeps tables in the memory of each process.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root

    def __call__(self, name: str, make: Callable[[], Tables]) -> Tables:
        """The tables of the group ``name``, made by ``make`` on first use.

        Raises:
            DataError: the folder cannot be written to, or what it holds is damaged.
        """
        if self.root is None:
            return make()
        folder = self.root / name
        try:
            make_once(folder, lambda temporary: _write(temporary, make()))
            return _read(folder)
        except OSError as error:
            hint = "free some space, or choose another folder with --data-cache-dir"
            raise DataError(f"the sample index cannot be kept: {error}", where=str(self.root), hint=hint) from error


def _read(folder: Path) -> Tables:
    files = sorted(folder.glob("*.npy"))
    try:
        # Plain views: an item of numpy's memmap class costs several times as much.
        return {file.stem: np.asarray(np.load(file, mmap_mode="r")) for file in files}
    except (ValueError, EOFError) as error:  # cut, by a crash of the machine or a full disk
        hint = "delete this folder; it is made anew"
        raise DataError("the cache of the sample index is damaged", where=str(folder), hint=hint) from error


def _write(folder: Path, tables: Tables) -> None:
    for name, table in tables.items():
        np.save(folder / f"{name}.npy", table)


def make_once(folder: Path, write: Callable[[Path], None]) -> None:
    """Make a folder, unless it is there. Several processes may ask at once: the first makes it, the others wait.

    Args:
        folder: what is made; it is whole or not there.
        write: fills a new folder under a temporary name.
    """
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / f"{folder.name}.lock"):
        if not folder.is_dir():
            with new_folder(folder) as temporary:
                write(temporary)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Alone among processes; the lock goes with the process, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
