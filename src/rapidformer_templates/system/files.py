"""Durable files: flushed to the disk, and either complete or absent.

Small files are written under a temporary name and then renamed. Large files bypass the page cache. They belong in a
folder that is renamed when it is complete. Files for workers are private: no other user can read or write them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypedDict

from rapidformer_templates.errors import RapidformerError

JSON_ERRORS = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Errors of reading a JSON file that is damaged or has another form."""

PAGE = 4096
"""Alignment in bytes, in memory and in the file, of data that bypasses the page cache."""

DIRECT = getattr(os, "O_DIRECT", 0)


REASONS = {
    errno.ENOSPC: ("the disk is full", "free some space"),
    errno.EDQUOT: ("the quota of this disk is used up", "free some space"),
    errno.EROFS: ("the file system is read-only", "mount it for writing"),
    errno.EACCES: ("this process is not allowed to write there", "change the permissions"),
    errno.EPERM: ("this process is not allowed to write there", "change the permissions"),
    errno.EIO: ("the disk reports an error", "check the disk (dmesg says more)"),
    errno.ENOENT: ("a folder does not exist, or no longer exists", "check that its file system is mounted"),
    errno.ESTALE: ("the network file system has lost the folder", "mount it again"),
    errno.ENOTDIR: ("a part of the path is a file", "use another path"),
    errno.EEXIST: ("a file or a broken link is in its place", "move it away"),
    errno.ELOOP: ("its links form a loop", "fix the links"),
    errno.ENOMEM: ("there is not enough memory", "leave more memory free"),
}
"""Meaning of errors of the operating system for a user, and what to do about them."""

MAY_PASS = {
    errno.EAGAIN, errno.EBUSY, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EDQUOT, errno.EHOSTDOWN,
    errno.EHOSTUNREACH, errno.EINTR, errno.EIO, errno.ENETDOWN, errno.ENETUNREACH, errno.ENODEV, errno.ENOENT,
    errno.ENOLCK, errno.ENOSPC, errno.ENOTCONN, errno.ENXIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT,
}  # fmt: skip
"""Errors of storage that is full, read-only, not mounted or not reachable, perhaps only for a while."""

RETRY_SECONDS = (1, 2, 4, 8, 16, 16)
"""Pauses in seconds before each further try of a save that failed with one of these errors: 47 s in total."""


def explain(error: OSError) -> tuple[str, str]:
    """Return (what is wrong, what to do) for a file or folder that cannot be read or written."""
    what, to_do = REASONS.get(error.errno or 0, ("it failed", "fix what the system reports"))
    return (what if error.errno == errno.ENOSPC else f"{what} ({error})"), to_do


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Explain to the user why the code inside the context cannot write a file or a folder.

    Raises:
        RapidformerError: an error of the operating system, in words.
    """
    try:
        yield
    except OSError as error:
        what, to_do = explain(error)
        raise RapidformerError(f"{path} cannot be written: {what}", hint=to_do) from error


class Seal(TypedDict):
    """Size in bytes and CRC-32 of a file, which show that it is complete."""

    bytes: int
    crc32: int


def sync(path: Path) -> None:
    """Flush a file, or the directory entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents if they are missing, and flush their names to the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        with suppress(PermissionError):  # a folder that may be written to, but not read, cannot be flushed
            sync(path.parent)


def user_cache() -> Path:
    """Return this package's folder in the user's cache folder (XDG standard)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rapidformer_templates"


def write_text(path: Path, text: str) -> None:
    """Write a text file so that it is either complete or absent."""
    temporary = path.with_name(path.name + ".tmp")
    write_synced(temporary, text)
    temporary.rename(path)
    sync(path.parent)


def write_synced(path: Path, text: str) -> Seal:
    """Write and flush a text file in a folder that is not in use yet. The folder is not flushed."""
    content = text.encode()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(content), "crc32": zlib.crc32(content)}


TRIAL = ".try-"
"""First characters of the files by which :func:`try_writing` tests a folder."""


def try_writing(folder: Path) -> None:
    """Write a page into a folder and remove it.

    Raises:
        OSError: that is not possible.
    """
    descriptor, name = tempfile.mkstemp(prefix=TRIAL, dir=folder)
    try:
        write_at(descriptor, memoryview(bytes(PAGE)), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        os.unlink(name)


def remove_trials(folder: Path) -> None:
    """Remove the files that processes have left that were killed in :func:`try_writing`. No other may be in it."""
    for path in folder.glob(TRIAL + "*"):
        path.unlink(missing_ok=True)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder with a temporary name. After the context it is flushed and replaces ``folder``.

    At any time ``folder`` is complete or absent. If the context raises an error, the temporary folder is removed.
    """
    temporary, old = (folder.with_name(f"{folder.name}{ending}") for ending in (".tmp", "-old.tmp"))
    for path in (temporary, old):
        shutil.rmtree(path, ignore_errors=True)  # left by a process that was killed
    make_folder(folder.parent)
    temporary.mkdir()
    try:
        yield temporary
        readable = temporary.stat().st_mode & 0o666  # as in the umask, because safetensors makes its files private
        for path in (*temporary.rglob("*"), temporary):
            if path.is_file():
                path.chmod(readable)
            sync(path)
        if folder.exists():
            folder.rename(old)  # deleted later: a half-deleted folder must not look complete
        temporary.rename(folder)
        sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_json(path: Path, value: object) -> None:
    write_text(path, to_json(value))


def to_json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def finite(value: object) -> object:
    """Convert values for JSON. Infinite numbers and NaN become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value


def hash_of(facts: object) -> str:
    """Return a short hash that changes if a fact changes."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


LFS = b"version https://git-lfs.github.com/"


def check_downloaded(files: Iterable[Path], error: type[RapidformerError]) -> None:
    """Raise an ``error`` if git-lfs has left a pointer in place of a file."""
    for path in files:
        with suppress(OSError):
            if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(LFS):
                message = f"{path.name} is a pointer of git-lfs, not the file itself"
                raise error(message, where=str(path), hint="run git lfs pull in that folder")


def crc32(path: Path) -> int:
    """Return the CRC-32 of a file's bytes."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value


@contextmanager
def unbuffered(path: Path) -> Iterator[int]:
    """Yield the descriptor of a new file whose writes bypass the page cache. It is flushed after the context.

    A copy in the page cache would cost time and memory, and nobody reads it. If a file system does not support this,
    the writes go through the cache.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        descriptor = os.open(path, flags | DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.open(path, flags, 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``. A file from :func:`unbuffered` needs whole pages, other files any bytes.

    Raises:
        OSError: it cannot be written.
    """
    through_cache = False
    while data:
        try:
            count = os.pwrite(descriptor, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or through_cache:
                raise
            # The file system has larger pages, or this is the rest of a partial write.
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~DIRECT)
            through_cache = True
            continue
        data, offset = data[count:], offset + count


PREFIX = "rapidformer-workers-"
"""No other folders begin with it, because one that nobody has locked is removed."""


@contextmanager
def private_folder() -> Iterator[Path]:
    """Yield a temporary folder that only this user can open. It is removed after the context."""
    remove_leftovers()
    while True:  # another launcher may find the folder before it is locked, and remove it
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks, where no launcher removes folders of others
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits while another launcher removes it
            if folder.exists():
                break
            os.close(descriptor)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the next launcher removes what is left
        os.close(descriptor)


def private(path: str, flags: int) -> int:
    """Open a file that only this user can read, as the ``opener`` of :func:`open`."""
    return os.open(path, flags, 0o600)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only this user can read."""
    with open(path, "wb", opener=private) as file:
        file.write(content)


def check_private(path: Path) -> None:
    """Check that only this user can have written a file, before something in it is executed.

    Raises:
        RapidformerError: the file or its folder belongs to another user, or others have access.
    """
    for place in (path, path.parent):
        status = os.stat(place, follow_symlinks=False)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise RapidformerError(
                f"{place} is accessible to other users, so it may not be what the launcher has written",
                hint="check who has changed it, and start the run again",
            )


def remove_leftovers() -> None:
    """Remove the temporary folders of this user's launchers that have been killed."""
    with os.scandir(tempfile.gettempdir()) as entries:
        folders = [entry for entry in entries if entry.name.startswith(PREFIX)]
    for entry in folders:
        with suppress(OSError):  # removed in the meantime, of another user, or locked
            if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(entry.path)
            finally:
                os.close(descriptor)
