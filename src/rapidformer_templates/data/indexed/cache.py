"""Tables of the sample order. They are built once, then memory-mapped by every process that needs them."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from rapidformer_templates.data.indexed.dataset import IndexedDataset, bin_path, idx_path
from rapidformer_templates.data.indexed.writer import read_sums
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.system.files import hash_of, new_folder, user_cache

Tables = dict[str, np.ndarray]


def cache_root(config: RunConfig) -> Path:
    """Return ``--data-cache-dir``, else ``rapidformer_templates`` in the user's cache folder (XDG standard)."""
    return Path(config.data.data_cache_dir) if config.data.data_cache_dir else user_cache()


def identity(prefix: str) -> list[str | tuple[int, int]]:
    """Identify a version of an indexed data set: the location, sizes and modification times of its files."""
    stats = [path.stat() for path in (idx_path(prefix), bin_path(prefix))]
    return [str(Path(prefix).resolve()), *[(s.st_size, s.st_mtime_ns) for s in stats]]


def contents(dataset: IndexedDataset) -> str:
    """Return a short text that differs for sets with different tokens. Empty if the set has no checksums."""
    sums = read_sums(dataset.prefix)
    return f" ({hash_of(sums['bin']['crc32'])[:12]})" if sums else ""


class IndexCache:
    """Groups of tables in a folder. If several processes ask at once, the first builds them and the others wait.

    Args:
        root: the folder. None keeps the tables in the memory of each process.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root

    def __call__(self, name: str, make: Callable[[], Tables]) -> Tables:
        """Return the tables of the group ``name``. On first use ``make`` builds them.

        Raises:
            DataError: the folder cannot be written to, or its contents are damaged.
        """
        if self.root is None:
            return make()
        folder = self.root / name
        try:
            make_once(folder, lambda temporary: _write(temporary, make()))
            return _read(folder)
        except OSError as error:
            hint = "free some space, or choose another folder with --data-cache-dir"
            raise DataError(f"the sample index cannot be saved: {error}", where=str(self.root), hint=hint) from error


def _read(folder: Path) -> Tables:
    files = sorted(folder.glob("*.npy"))
    try:
        # Use plain views, because indexing numpy's memmap class is several times slower.
        return {file.stem: np.asarray(np.load(file, mmap_mode="r")) for file in files}
    except (ValueError, EOFError) as error:  # truncated by a crash of the machine or a full disk
        hint = "delete this folder; it will be created again"
        raise DataError("the cache of the sample index is damaged", where=str(folder), hint=hint) from error


def _write(folder: Path, tables: Tables) -> None:
    for name, table in tables.items():
        np.save(folder / f"{name}.npy", table)


def make_once(folder: Path, write: Callable[[Path], object]) -> None:
    """Create a folder unless it exists. If several processes ask at once, the first creates it and the others wait.

    Args:
        folder: the folder, which is either complete or absent.
        write: fills a new folder that has a temporary name.
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
    """Hold an exclusive lock among processes. It is released when the process ends in any way."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
