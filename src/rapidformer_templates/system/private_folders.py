"""Temporary folders of a launcher and its workers, which no other user can read or write.

A launcher keeps a lock on its folder, which the kernel releases when the launcher ends. The next launcher of the same
user removes the folders of launchers that were killed. Imports no torch.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rapidformer_templates.errors import RapidformerError

PREFIX = "rapidformer-workers-"
"""No other folders begin with it, because one that nobody has locked is removed."""


@contextmanager
def private_folder() -> Iterator[Path]:
    """Yield a temporary folder that only this user can open. It is removed after the context."""
    remove_leftovers()
    folder, descriptor = _locked_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the next launcher removes what is left
        os.close(descriptor)


def _locked_folder() -> tuple[Path, int]:
    """Make a folder and lock it. Returns it, and its open descriptor.

    Another launcher may find the folder before it is locked, and remove it. Then a new one is made.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks, where no launcher removes folders of others
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits while another launcher removes it
            if folder.exists():
                return folder, descriptor
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
