"""Ensures that one run at a time writes to a run folder, and that all of its workers see that folder.

A run holds an operating system lock on a file in the folder. The kernel releases it when the process ends, even after
a crash. The first worker takes an exclusive lock, and then shares it with the others, so that no run can start while
any worker of an earlier one lives. The file describes the owner of the lock. It also contains a random token, from
which the other workers know that they see the same folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rapidformer_templates.errors import ConfigError, RapidformerError
from rapidformer_templates.system.files import explain, make_folder, remove_trials, try_writing

if TYPE_CHECKING:
    from rapidformer_templates.system.workers import Workers

T = TypeVar("T")

NAME = "run.lock"

VISIBILITY_SECONDS = 10.0
"""Seconds within which a network file system shows a new file on other nodes."""

NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
"""Error codes of a file system without locks."""

_descriptors: set[int] = set()


def _close_after_fork() -> None:
    """Close the lock in a forked process. Otherwise a loader process that outlives its run would keep it."""
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_after_fork)


class RunLock:
    """The lock of a run folder, for one worker.

    Attributes:
        works: whether the file system supports locks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / NAME
        self.works = True
        self._created_folder = self._is_owner = False
        self._descriptor: int | None = None

    def acquire(self) -> str:
        """Create the folder and lock it for this worker. Returns the token by which others recognize the folder.

        Raises:
            ConfigError: another run has the lock, or the folder is not writable.
        """
        token = secrets.token_hex(16)
        with self._explain_errors():
            self._created_folder = not self.folder.exists()
            make_folder(self.folder)
            descriptor = self._open(os.O_CREAT, fcntl.LOCK_EX)
            self._is_owner = True
            if self.works:
                for folder in (self.folder, self.folder / "checkpoints"):
                    remove_trials(folder)
            os.truncate(descriptor, 0)
            owner = {
                "host": socket.gethostname(),
                "process": os.getpid(),
                "since": time.strftime("%Y-%m-%d %H:%M:%S"),
                "command": shlex.join(sys.orig_argv),
                "word": token,
            }
            os.pwrite(descriptor, json.dumps(owner).encode() + b"\n", 0)
            os.fsync(descriptor)
        return token

    def try_writing(self) -> None:
        """Check that the folder and its checkpoints can be written to.

        Raises:
            ConfigError: the folder, or that of the checkpoints, is not writable.
        """
        with self._explain_errors():
            try_writing(self.folder)
            checkpoints = self.folder / "checkpoints"
            if os.path.lexists(checkpoints):  # may be a link to another disk
                try_writing(checkpoints)

    def allow_sharing(self) -> None:
        """Allow the other workers of this run to lock the folder, too."""
        with self._explain_errors():
            self._lock(fcntl.LOCK_SH)

    def acquire_shared(self, token: str, *, write: bool) -> bool:
        """Share the lock of the first worker. Returns whether this worker sees the same folder.

        Args:
            token: the token that :meth:`acquire` returned to the first worker.
            write: whether to check that the folder is writable.

        Raises:
            ConfigError: this worker cannot write to the folder.
        """
        end = time.monotonic() + VISIBILITY_SECONDS
        while self._owner().get("word") != token:
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        with self._explain_errors():
            self._open(0, fcntl.LOCK_SH)
        if write:
            self.try_writing()
        return True

    def release(self, *, remove: bool) -> None:
        """Release the lock. ``remove`` also deletes the file, and the folder if this run created it and it is empty."""
        # Errors are harmless: the kernel releases the lock at exit, and the file does not matter.
        with contextlib.suppress(OSError):
            if remove and self._is_owner:
                self.path.unlink(missing_ok=True)
            if remove and self._created_folder and not any(self.folder.iterdir()):
                self.folder.rmdir()
        self._close()

    def _open(self, flags: int, kind: int) -> int:
        """Open the file and lock it. Retry if an earlier run has removed it in the meantime."""
        while True:
            self._descriptor = descriptor = os.open(self.path, os.O_RDWR | flags, 0o666)
            _descriptors.add(descriptor)
            self._lock(kind)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(self.path), os.fstat(descriptor)):
                    return descriptor
            self._close()

    def _lock(self, kind: int) -> None:
        assert self._descriptor is not None
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            self._close()
            owner, other = self._owner(), "it does not say which"
            if owner:
                process = f"process {owner.get('process')} on {owner.get('host')}"
                other = f"{process}, since {owner.get('since')}: {owner.get('command')}"
            hint = "wait until it has ended, or give another folder"
            raise ConfigError(f"another run writes into {self.folder}: {other}", where="--save", hint=hint) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            self.works = False

    def _close(self) -> None:
        if self._descriptor is not None:
            _descriptors.discard(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _owner(self) -> dict[str, object]:
        """Read the description of the lock's owner. Empty if the file is missing or not yet written."""
        try:
            owner = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return owner if isinstance(owner, dict) else {}

    @contextlib.contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what, to_do = explain(error)
            message = f"{self.folder} cannot be written to: {what}"
            raise ConfigError(message, where="--save", hint=f"{to_do}, or give another folder") from error


def try_folder(folder: Path) -> None:
    """Check that a run could write to its folder now.

    Raises:
        ConfigError: another run has the lock, or the folder is not writable.
    """
    lock = RunLock(folder)
    try:
        lock.acquire()
        lock.try_writing()
    finally:
        lock.release(remove=True)


@contextlib.contextmanager
def lock_folder(folder: Path, workers: Workers) -> Iterator[bool]:
    """Lock a run folder inside the context. Yields False if the file system has no locks. Call it on every rank.

    Raises:
        ConfigError: another run has the lock, or a worker cannot write to the folder or does not see it. Raised on all
            ranks.
    """
    lock = RunLock(folder)
    together = True
    try:
        token = _all_or_none(workers, lambda: lock.acquire() if workers.is_main else "")[0]
        if workers.world > 1:
            _all_or_none(workers, lambda: lock.allow_sharing() if workers.is_main else None)
            first = workers.local_rank == 0
            visible = _all_or_none(workers, lambda: workers.is_main or lock.acquire_shared(token, write=first))
            hosts = workers.gather(socket.gethostname())
            blind = [f"{rank} on {hosts[rank]}" for rank, sees in enumerate(visible) if not sees]
            if blind:
                raise ConfigError(
                    f"{folder} is not one folder for all workers: what rank 0 writes there on {hosts[0]} is not "
                    f"visible to rank {', '.join(blind[:8])}{' …' if len(blind) > 8 else ''}",
                    where="--save",
                    hint="give a folder that all nodes share, such as one on NFS or Lustre, by the same path",
                )
        together = workers.world == 1
        yield lock.works
        together = True
    finally:
        # If only this worker has failed, the others still hold the lock, and the file must stay.
        lock.release(remove=workers.is_main and together)


def _all_or_none(workers: Workers, body: Callable[[], T]) -> list[T]:
    """Return the result of ``body`` from every rank. The first error of any rank is raised on all."""
    result: list[T] = []
    problem = None
    try:
        result.append(body())
    except RapidformerError as error:
        problem = error
    results = workers.gather((result, problem))
    for _, other in results:
        if other is not None:
            raise other
    return [value for values, _ in results for value in values]
