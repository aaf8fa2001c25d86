"""The states in which a power cut may leave the disk, after each event of a recording.

The model comes from ALICE (Pillai et al., OSDI 2014) and CrashMonkey (Mohan et al., OSDI 2018). A change is durable
when its file, or the folder of its name, has been flushed afterwards. All other changes may be lost, torn or reordered:

- a name may be durable without the bytes of its file, which is then empty or has zeros
- the bytes may be durable without the name
- a rename, a new name and a removed name are all or nothing
- of a write, the first half may be durable
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.recorded_writes import BEGIN, Disk, Event, Flush, Link, Rename, Report, Truncate, Unlink, Write

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
