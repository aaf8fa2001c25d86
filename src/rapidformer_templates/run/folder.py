"""The run folder: plan, metrics, summary, checkpoints, export. Its contents are a public contract.

A run holds an operating system lock on a file in the folder, so that one run at a time writes to it, and so that all of
its workers see that folder. The kernel releases the lock when the process ends, even after a crash. The first worker
takes an exclusive lock, and then shares it with the others, so that no run can start while any worker of an earlier one
lives. The file describes the owner of the lock. It also contains a random token, from which the other workers know that
they see the same folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from rapidformer_templates.errors import ConfigError, RapidformerError
from rapidformer_templates.planning.flag_values import TEST
from rapidformer_templates.planning.tasks import metric_name
from rapidformer_templates.system.files import (
    JSON_ERRORS,
    explain,
    finite,
    make_folder,
    remove_trials,
    sync,
    try_writing,
    write_json,
    write_text,
    writing,
)

if TYPE_CHECKING:
    from rapidformer_templates.system.workers import Workers

CONTENTS = (
    "plan.json", "deepspeed.json", "reference.safetensors", "metrics.jsonl", "trackers", "summary.json", "curves.png",
    "profile", "stacks", "checkpoints", "model", "export",
)  # fmt: skip

Summary = dict[str, Any]
"""The content of ``summary.json``, which ``fit`` returns. docs/run-folder.md lists its fields."""

MetricsLine = Mapping[str, Any]
"""A line of ``metrics.jsonl``: ``step``, and other values by name."""

TORCHRUN_ID = "TORCHELASTIC_RUN_ID"
"""Environment variable in which torchrun gives its workers the id of the launch."""

MAX_LINES_BYTES = 1 << 20
"""Bytes of lines of metrics that are kept in memory. More are flushed to the disk before the next save."""

TRASH = "overwritten.tmp"
"""The folder into which ``--overwrite`` moves files before it deletes them."""


class RunFolder:
    """Paths and writers of ``--save DIR``. Only rank 0 writes here, except for checkpoints."""

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
        self.stacks = self.path / "stacks"

    def read_summary(self) -> Summary:
        """Return the summary that an earlier process wrote. It is empty if there is none that can be read."""
        try:
            summary = json.loads(self.summary.read_text(encoding="utf-8"))
        except JSON_ERRORS:
            return {}
        return summary if isinstance(summary, dict) else {}

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Check that no earlier run would be overwritten by mistake.

        Raises:
            ConfigError: the folder contains a run, but neither or both of ``--resume`` and ``--overwrite`` were given.
                Or it is not a folder. Or the files to delete do not belong to a run, or are links.
        """
        if resume and overwrite:
            message = "--resume continues the run that --overwrite deletes"
            raise ConfigError(message, where="--overwrite", hint="leave one of them out")
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file", where="--save", hint="give a folder")
        existing = [name for name in CONTENTS if (self.path / name).exists()]
        if existing and not resume and not overwrite:
            hint = "--resume continues it, --overwrite empties it, another --save leaves it alone"
            raise ConfigError(f"{self.path} already holds a run ({', '.join(existing)})", where="--save", hint=hint)

        is_run = self.plan.exists() or (self.path / TRASH).exists()  # or a run whose removal was interrupted
        if existing and overwrite and not is_run:
            message = f"{self.path} holds no run, and --overwrite would delete its {', '.join(existing)}"
            raise ConfigError(message, where="--overwrite", hint="give another --save, or move them elsewhere")
        links = [name for name in existing if (self.path / name).is_symlink()]
        if links and overwrite:
            message = f"{', '.join(links)} in {self.path} is a link, and nothing is deleted through links"
            hint = "empty its target by hand and remove the link, or give another --save"
            raise ConfigError(message, where="--overwrite", hint=hint)

    def is_of_restarted_launch(self) -> bool:
        """Return whether torchrun has started this worker again, and this launch has written the folder.

        The id of a launch may be used again. So the folder must also have been written since torchrun's agent started.
        """
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
            return False
        try:
            agent = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
            uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
            age = uptime - int(agent.split()[19]) / os.sysconf("SC_CLK_TCK")
            is_later = self.plan.stat().st_mtime > time.time() - age
            launch = json.loads(self.plan.read_text(encoding="utf-8")).get("torchrun")
        except JSON_ERRORS:
            return False
        return is_later and launch is not None and launch == os.environ.get(TORCHRUN_ID)

    def would_delete(self, path: str | Path) -> bool:
        """Whether ``--overwrite`` would delete a file, a checkpoint or a run folder."""
        read = (Path(path).resolve(), Path(path).resolve() / "checkpoints")
        return any(p.exists() and p.is_relative_to(self.path.resolve() / name) for p in read for name in CONTENTS)

    def prepare(self, plan: Mapping[str, Any], *, overwrite: bool) -> None:
        """Create the folder, and write the plan and the DeepSpeed configuration.

        ``overwrite`` removes the files of an earlier run, and no others.
        """
        trash = self.path / TRASH
        with writing(self.path):
            shutil.rmtree(trash, ignore_errors=True)  # also that of a run that was killed here
            if overwrite:
                trash.mkdir()
                # Its checkpoints first, because no run can resume from the rest.
                for name in sorted(CONTENTS, key=lambda name: name != "checkpoints"):
                    if (self.path / name).exists():
                        (self.path / name).rename(trash / name)
                sync(self.path)
                shutil.rmtree(trash, ignore_errors=True)
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            for unfinished in self.checkpoints.glob("step-*.tmp"):  # a run was killed here while it wrote or deleted
                shutil.rmtree(unfinished, ignore_errors=True)
            launch = os.environ.get(TORCHRUN_ID)
            write_json(self.plan, {**plan, "torchrun": launch} if launch else plan)
            if "deepspeed" in plan["engine_options"]:
                write_json(self.path / "deepspeed.json", plan["engine_options"]["deepspeed"])


class MetricsFile:
    """``metrics.jsonl``: one JSON object per line. Each is passed to the operating system immediately.

    Lines stay in memory until they are on the disk. After an error, the file is opened again at the next call, which
    writes all of them again.

    Attributes:
        garbled: numbers of the lines that could not be read, and are left out.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        """Open the file and drop lines after ``last_step``, because the run will write them again."""
        lines = dict(_lines(path))
        self.garbled = [number for number, line in lines.items() if line is None]
        remaining = [line for line in lines.values() if line is not None and line["step"] <= last_step]
        with writing(path):
            if path.exists():
                write_text(path, "".join(json.dumps(line) + "\n" for line in remaining))
            self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            self._synced = os.fstat(self._descriptor).st_size
        self._path = path
        self._lines = bytearray()  # that are not known to be on the disk
        self._written = 0  # bytes of them that the operating system has

    def write(self, line: Mapping[str, object]) -> None:
        """Write a line. Infinite and NaN values become null, because JSON does not support them.

        Raises:
            RapidformerError: it could not be written. The next call tries again.
        """
        self._lines += json.dumps(finite(line), allow_nan=False).encode() + b"\n"
        with self._writing():
            self._flush()
        if len(self._lines) > MAX_LINES_BYTES:
            self.sync()

    def sync(self) -> None:
        """Flush to disk, so that no checkpoint is ahead of its metrics.

        Raises:
            RapidformerError: that was not possible. The next call tries again.
        """
        with self._writing():
            os.fsync(self._flush())
            sync(self._path.parent)
            self._synced += len(self._lines)
            self._lines.clear()
            self._written = 0

    def close(self) -> None:
        """Close the file. An error that the file system reports only now concerns lines that were not synced."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Explain errors inside the context, and close the file after one."""
        try:
            with writing(self._path):
                yield
        except RapidformerError:
            self.close()
            raise

    def _flush(self) -> int:
        """Pass all lines to the operating system. Returns the descriptor of the file."""
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            os.truncate(self._descriptor, self._synced)
            self._written = 0
        while self._written < len(self._lines):
            self._written += os.write(self._descriptor, self._lines[self._written :])
        return self._descriptor


def _lines(path: Path) -> Iterator[tuple[int, MetricsLine | None]]:
    """Yield (number, line) for each complete line, with None for a line that is not valid.

    A killed run may leave half a line at the end, and a damaged disk anything in the middle.
    """
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        yield number, value if isinstance(value, dict) and isinstance(value.get("step"), int) else None


def read_metrics(path: Path) -> list[MetricsLine]:
    """Return the readable lines of a ``metrics.jsonl``."""
    return [line for _, line in _lines(path) if line is not None]


def is_test_line(line: Mapping[str, object]) -> bool:
    """Whether a line contains metrics of the test set. Its step is the step of the exported weights."""
    return any(name.startswith(metric_name(TEST, "")) for name in line)


T = TypeVar("T")

LOCK = "run.lock"

VISIBILITY_SECONDS = 10.0
"""Seconds within which a network file system shows a new file on other nodes."""

ENDING_SECONDS = 1.0
"""Seconds to wait for a lock. A process that was killed keeps its locks until all of its threads have ended."""

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
        self.path = folder / LOCK
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
        end = time.monotonic() + ENDING_SECONDS
        while True:
            try:
                fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    self._refuse()
                time.sleep(0.05)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                self.works = False
                return

    def _refuse(self) -> NoReturn:
        self._close()
        owner, other = self._owner(), "it does not say which"
        if owner:
            process = f"process {owner.get('process')} on {owner.get('host')}"
            other = f"{process}, since {owner.get('since')}: {owner.get('command')}"
        hint = "wait until it has ended, or give another folder"
        raise ConfigError(f"another run writes into {self.folder}: {other}", where="--save", hint=hint)

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
        token = all_or_none(workers, lambda: lock.acquire() if workers.is_main else "")[0]
        if workers.world > 1:
            all_or_none(workers, lambda: lock.allow_sharing() if workers.is_main else None)
            first = workers.local_rank == 0
            visible = all_or_none(workers, lambda: workers.is_main or lock.acquire_shared(token, write=first))
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


def all_or_none(workers: Workers, body: Callable[[], T]) -> list[T]:
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
