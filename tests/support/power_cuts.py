"""Power cuts: records what a program changes in a folder, and lists the states in which a power cut may leave the disk.

The functions of ``os`` that change or flush files are wrapped. Before and after each call, the folder is compared with
its last known contents. So the recording also has what native code writes between two calls (safetensors, torch),
in one piece per file. A flush by native code would be missed, and its data would count as not flushed.

The model of the states comes from ALICE (Pillai et al., OSDI 2014) and CrashMonkey (Mohan et al., OSDI 2018). A change
is durable when its file, or the folder of its name, has been flushed afterwards. All other changes may be lost, torn or
reordered:

- a name may be durable without the bytes of its file, which is then empty or has zeros
- the bytes may be durable without the name
- a rename, a new name and a removed name are all or nothing
- of a write, the first half may be durable
"""

import fcntl
import os
import pickle
import random
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

CHANGING = ("rename", "replace", "link", "unlink", "remove", "rmdir", "mkdir", "truncate", "ftruncate", "pwrite")
FLUSHING = ("fsync", "fdatasync")

BEGIN = "begin"
"""The first report of a recording. Earlier events are the contents that the folder had at first."""

ROOT = 0
"""Number of the recorded folder itself, which every power cut leaves in place."""


@dataclass(frozen=True)
class Link:
    """A new name in a folder. Each file and each folder has a number, which is never used again.

    Attributes:
        inode: the number that the file system has given it.
    """

    folder: int
    name: str
    node: int
    is_folder: bool
    inode: int


@dataclass(frozen=True)
class Unlink:
    """A name that was removed from a folder."""

    folder: int
    name: str


@dataclass(frozen=True)
class Rename:
    """A file or folder that got another name, in one step."""

    folder: int
    name: str
    new_folder: int
    new_name: str
    node: int
    is_folder: bool


@dataclass(frozen=True)
class Write:
    """Bytes that were written into a file."""

    node: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Truncate:
    """A new size of a file."""

    node: int
    size: int


@dataclass(frozen=True)
class Flush:
    """A flush of a file's bytes, or of a folder's names."""

    node: int


@dataclass(frozen=True)
class Report:
    """A message of the program to its user, such as a checkpoint that is saved."""

    what: str
    step: int


Change = Link | Unlink | Rename | Write | Truncate
Event = Change | Flush | Report


@dataclass
class Disk:
    """The contents of a folder.

    Attributes:
        names: number of each entry by name, for each folder.
        files: bytes of each file.
    """

    names: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[int, bytes] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        """Change the contents. Names in a folder that does not exist yet are kept until it does."""
        match event:
            case Link(folder, name, node, is_folder):
                self._add_name(folder, name, node, is_folder)
            case Unlink(folder, name):
                self.names.get(folder, {}).pop(name, None)
            case Rename(folder, name, new_folder, new_name, node, is_folder):
                self.names.get(folder, {}).pop(name, None)
                self._add_name(new_folder, new_name, node, is_folder)
            case Write(node, offset, data):
                old = self.files.get(node, b"").ljust(offset, b"\0")
                self.files[node] = old[:offset] + data + old[offset + len(data) :]
            case Truncate(node, size):
                self.files[node] = self.files.get(node, b"")[:size].ljust(size, b"\0")

    def _add_name(self, folder: int, name: str, node: int, is_folder: bool) -> None:
        self.names.setdefault(folder, {})[name] = node
        if is_folder:
            self.names.setdefault(node, {})

    def tree(self) -> dict[str, bytes | None]:
        """Return the contents by path. The content of a folder is None."""
        found: dict[str, bytes | None] = {}

        def walk(folder: int, path: str) -> None:
            for name, node in self.names.get(folder, {}).items():
                if node in self.names:
                    found[path + name] = None
                    walk(node, f"{path}{name}/")
                else:
                    found[path + name] = self.files.get(node, b"")

        walk(ROOT, "")
        return found


def write_tree(tree: Mapping[str, bytes | None], folder: Path) -> None:
    """Write contents from :meth:`Disk.tree` into a folder."""
    folder.mkdir(parents=True)
    for path, data in tree.items():  # a folder comes before its contents
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)


class Recorder:
    """Records a folder in any number of processes. Each has a recorder with the same folder and the same log.

    Args:
        root: the folder. Its first contents count as flushed.
        log: the recording, a file outside of the folder.
    """

    def __init__(self, root: Path, log: Path) -> None:
        self.root, self.log = root, log
        self._lock = threading.RLock()
        self._disk, self._numbers = Disk(), {root.stat().st_ino: ROOT}
        self._file = log.open("a+b")
        self._read = 0  # bytes of the log that this process knows
        self._count = 1  # of nodes so far

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what this process does inside the context."""
        with ExitStack() as stack:
            with self._locked():
                is_first = not self._read
                self._compare()
                if is_first:
                    for node in list(self._numbers.values()):
                        self._add(Flush(node))
                    self._add(Report(BEGIN, 0))
            for name in CHANGING + FLUSHING:
                stack.enter_context(mock.patch.object(os, name, self._recorded(getattr(os, name), name in FLUSHING)))
            yield
            self.look()

    def look(self) -> None:
        """Record what has changed since the last call."""
        with self._locked():
            self._compare()

    def report(self, what: str, step: int) -> None:
        """Record what the program reports now."""
        with self._locked():
            self._compare()
            self._add(Report(what, step))

    def _recorded(self, function: Callable[..., Any], flushes: bool) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            with self._locked():
                self._compare()
                result = function(*arguments, **named)
                if flushes:
                    node = self._numbers.get(os.fstat(arguments[0]).st_ino)
                    if node is not None:
                        self._add(Flush(node))
                else:
                    self._compare()
                return result

        return call

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other threads and processes from changing the folder in a recorded call, and read what they recorded."""
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                self._file.seek(self._read)
                while True:
                    try:
                        self._apply(pickle.load(self._file))
                    except EOFError:
                        break
                    self._read = self._file.tell()
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _add(self, event: Event) -> None:
        self._file.seek(0, os.SEEK_END)
        pickle.dump(event, self._file)
        self._file.flush()
        self._read = self._file.tell()
        self._apply(event)

    def _apply(self, event: Event) -> None:
        self._disk.apply(event)
        if isinstance(event, Link):
            self._numbers[event.inode] = event.node
            self._count = max(self._count, event.node + 1)

    def _compare(self) -> None:
        """Record the difference between the folder and the last known contents."""
        names: dict[int, dict[str, tuple[int, bool]]] = {}  # inodes, and whether they are folders, by folder
        contents: dict[int, bytes] = {}
        self._walk(self.root, self.root.stat().st_ino, names, contents)
        inodes = {node: inode for inode, node in self._numbers.items()}
        here = {inode for entries in names.values() for inode, _ in entries.values()} | {self.root.stat().st_ino}
        before = {(f, n): node for f, entries in self._disk.names.items() for n, node in entries.items() if f in inodes}
        for inode in set(self._numbers) - here:  # gone: the file system may give the number to another file
            del self._numbers[inode]
        gone = {inodes[node]: (f, n) for (f, n), node in before.items() if node in inodes}
        new: dict[tuple[int, str], int] = {}
        for inode, entries in names.items():
            folder = self._numbers[inode]
            for name, (entry, is_folder) in entries.items():
                new[folder, name] = entry
                if self._numbers.get(entry, -1) == before.get((folder, name)):
                    continue
                if entry in gone and entry in self._numbers and new.get(gone[entry]) != entry:
                    self._add(Rename(*gone[entry], folder, name, self._numbers[entry], is_folder))
                else:
                    self._add(Link(folder, name, self._numbers.get(entry, self._count), is_folder, entry))
        for folder, name in before:
            if (folder, name) not in new and name in self._disk.names[folder]:
                self._add(Unlink(folder, name))
        for inode, data in contents.items():
            self._compare_data(self._numbers[inode], data)

    def _walk(
        self, path: Path, inode: int, names: dict[int, dict[str, tuple[int, bool]]], contents: dict[int, bytes]
    ) -> None:
        """Read a folder, parents first. Files that another process removes meanwhile are left out."""
        names[inode] = {}
        for name in sorted(os.listdir(path)):
            try:
                found = os.lstat(path / name)
                if stat.S_ISREG(found.st_mode):
                    contents[found.st_ino] = (path / name).read_bytes()
                elif not stat.S_ISDIR(found.st_mode):
                    continue
            except FileNotFoundError:
                continue
            names[inode][name] = (found.st_ino, stat.S_ISDIR(found.st_mode))
            if stat.S_ISDIR(found.st_mode):
                self._walk(path / name, found.st_ino, names, contents)

    def _compare_data(self, node: int, data: bytes) -> None:
        old = self._disk.files.get(node, b"")
        if data == old:
            return
        if old.startswith(data):
            self._add(Truncate(node, len(data)))
        elif data.startswith(old):
            self._add(Write(node, len(old), data[len(old) :]))
        else:  # opened again, and replaced
            self._add(Truncate(node, 0))
            self._add(Write(node, 0, data))


def read_events(log: Path) -> list[Event]:
    """Return a recording."""
    events: list[Event] = []
    with log.open("rb") as file:
        while True:
            try:
                events.append(pickle.load(file))
            except EOFError:
                return events


NEWEST = 12
"""Number of the latest changes that are lost and kept one by one. Older ones are lost file by file."""

RANDOM = 8
"""Number of random choices of changes after each event."""


@dataclass(frozen=True)
class CrashState:
    """A state in which a power cut may leave the disk.

    Attributes:
        events: number of events before the cut.
        tree: contents by path, see :meth:`Disk.tree`.
    """

    events: int
    tree: dict[str, bytes | None]


def crash_states(events: Sequence[Event]) -> Iterator[CrashState]:
    """Yield the distinct states of each prefix of a recording.

    A state is yielded again if the run has reported more in the meantime.
    """
    durable: list[int] = []
    pending: list[int] = []
    tried: set[tuple[tuple[int, str], ...]] = set()
    seen: set[object] = set()
    first = next((i for i, event in enumerate(events, start=1) if event == Report(BEGIN, 0)), 0)
    for number, event in enumerate(events, start=1):
        if isinstance(event, Report):
            seen, tried = set(), set()
        elif isinstance(event, Flush):
            flushed = [i for i in pending if _is_covered(events[i], event.node)]
            durable = sorted(durable + flushed)
            pending = [i for i in pending if i not in set(flushed)]
        else:
            pending.append(number - 1)
        for kept in _variants(events, pending) if number >= first else ():
            chosen = tuple(sorted([*((i, "") for i in durable), *kept.items()]))
            if chosen in tried:
                continue
            tried.add(chosen)
            tree = _disk_of(events, chosen).tree()
            signature = hash(tuple(sorted(tree.items(), key=lambda item: item[0])))
            if signature not in seen:
                seen.add(signature)
                yield CrashState(number, tree)


def reported(events: Iterable[Event], what: str) -> int:
    """Return the last step that the run has reported, or 0."""
    return max((event.step for event in events if isinstance(event, Report) and event.what == what), default=0)


def _is_covered(event: Event, node: int) -> bool:
    match event:
        case Write(changed) | Truncate(changed) | Link(changed) | Unlink(changed):
            return changed == node
        case Rename(folder, _, new_folder):
            return node in (folder, new_folder)
    return False


def _variants(events: Sequence[Event], pending: list[int]) -> Iterator[dict[int, str]]:
    """Yield the changes that become durable, with what is left of each: "" (all), "half" or "zeros"."""
    data = [i for i in pending if isinstance(events[i], Write | Truncate)]
    whole = dict.fromkeys(pending, "")
    yield whole
    yield {}
    yield {i: "" for i in pending if i not in data}  # names before data
    yield {i: "zeros" if i in data else "" for i in pending}
    yield dict.fromkeys(data, "")  # data before names
    for i in data:
        yield {**whole, i: "half"}
    for node in {_owner(events[i]) for i in pending}:
        yield {i: "" for i in pending if _owner(events[i]) != node}
        yield {i: "" for i in pending if _owner(events[i]) == node}
        yield {i: "zeros" if _owner(events[i]) == node and i in data else "" for i in pending}
    for place, i in enumerate(pending[-NEWEST:], start=max(0, len(pending) - NEWEST)):
        yield dict.fromkeys(pending[:place], "")
        yield {j: "" for j in pending if j != i}
        yield {i: ""}
        yield {**dict.fromkeys(pending[:place], ""), i: "half"}
    draw = random.Random(len(events))
    for _ in range(RANDOM):
        yield {i: draw.choice(("", "half", "zeros")) if i in data else "" for i in pending if draw.random() < 0.5}


def _owner(event: Event) -> int:
    """Return the file or the folder that a change belongs to."""
    return event.node if isinstance(event, Write | Truncate) else event.folder  # type: ignore[union-attr]


def _disk_of(events: Sequence[Event], chosen: Iterable[tuple[int, str]]) -> Disk:
    disk = Disk()
    for i, what in chosen:
        event = events[i]
        if what and isinstance(event, Write):
            data = event.data[: len(event.data) // 2] if what == "half" else bytes(len(event.data))
            event = Write(event.node, event.offset, data)
        elif what == "half" and not isinstance(event, Truncate):
            continue  # a change of names is all or nothing
        disk.apply(event)
    return disk
