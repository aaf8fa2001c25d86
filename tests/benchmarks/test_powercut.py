"""Power cuts: the model of a disk, its recordings, and what a run leaves in each state."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.crash_states import crash_states
from benchmarks.powercut import EXPORTED, OUR_RUNS, RUN, STEPS, Ours, continue_each, judge, record
from benchmarks.recorded_writes import (
    BEGIN,
    Disk,
    Event,
    Flush,
    Link,
    Recorder,
    Rename,
    Report,
    Unlink,
    Write,
    read_events,
)
from rapidformer_templates.system import files
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

ROOT = Path(__file__).parents[2]


def trees(events: list[Event]) -> list[dict[str, bytes | None]]:
    found: list[dict[str, bytes | None]] = []
    for state in crash_states(events):
        if state.tree not in found:
            found.append(state.tree)
    return found


NEW_FILE = [Link(0, "a.tmp", 1, False, 11), Write(1, 0, b"1234")]
RENAMED = Rename(0, "a.tmp", 0, "a", 1, False)


def test_without_flushes_everything_is_possible() -> None:
    """The states of a file that is written and renamed, derived by hand."""
    values = (b"", b"12", b"1234", b"\0\0\0\0")
    expected = [{}, *({name: value} for name in ("a.tmp", "a") for value in values)]
    found = trees([*NEW_FILE, RENAMED])
    assert all(tree in found for tree in expected)
    assert len(found) == len(expected)


def test_a_flushed_file_is_whole_or_has_no_new_name() -> None:
    found = trees([*NEW_FILE, Flush(1), RENAMED, Flush(0)])
    assert [tree for tree in found if "a" in tree] == [{"a": b"1234"}]
    *_, last = crash_states([*NEW_FILE, Flush(1), RENAMED, Flush(0), Write(1, 4, b"5")])
    assert "a" in last.tree


def test_a_name_in_a_folder_needs_a_flush_of_the_folder() -> None:
    """POSIX allows that a flushed file has no name."""
    made = [Link(0, "f", 1, True, 11), Flush(0), Link(1, "a", 2, False, 12), Write(2, 0, b"1234"), Flush(2)]
    ready = Report(BEGIN, 0)
    assert trees([*made, ready]) == [{"f": None, "f/a": b"1234"}, {"f": None}]
    assert trees([*made, Flush(1), ready]) == [{"f": None, "f/a": b"1234"}]


def test_a_recording_has_what_native_code_writes(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    (root / "old").write_text("12")
    recorder = Recorder(root, tmp_path / "log")
    with recorder.recording():
        save_file({"w": torch.arange(6.0)}, root / "w.safetensors")  # Rust
        torch.save(torch.arange(6.0), root / "w.pt")  # C++
        np.save(root / "w.npy", np.arange(6.0))  # C
        (root / "folder").mkdir()
        os.replace(root / "w.npy", root / "folder" / "v.npy")
        with (root / "old").open("a") as file:
            file.write("34")
            file.flush()
            os.fsync(file.fileno())
            file.truncate(1)
        files.sync(root)
        shutil.rmtree(root / "folder")
    disk, flushed = Disk(), list[int]()
    for event in read_events(tmp_path / "log"):
        disk.apply(event)
        if isinstance(event, Flush):
            flushed.append(event.node)
    assert disk.tree() == {path.name: path.read_bytes() for path in root.iterdir()}
    assert disk.tree()["old"] == b"1"
    assert flushed[-2:] == [disk.names[0]["old"], 0]


def recorded(body: Callable[[Path], None], folder: Path) -> list[Event]:
    recorder = Recorder(folder, folder.parent / "log")
    with recorder.recording():
        body(folder)
    return read_events(folder.parent / "log")


def test_a_folder_is_replaced_by_a_whole_one(tmp_path: Path) -> None:
    """Also with folders inside it. At any time it is the old one, the new one, or absent."""

    def replace(root: Path) -> None:
        with files.new_folder(root / "export") as temporary:
            (temporary / "a").write_text("new")
            (temporary / "inside").mkdir()
            (temporary / "inside" / "b").write_text("new")

    (tmp_path / "disk" / "export" / "inside").mkdir(parents=True)
    (tmp_path / "disk" / "export" / "inside" / "b").write_text("old")
    events = recorded(replace, tmp_path / "disk")
    old = {"export/inside": None, "export/inside/b": b"old"}
    new = {"export/a": b"new", "export/inside": None, "export/inside/b": b"new"}
    found = [state.tree for state in crash_states(events)]
    assert len(found) > 20
    for tree in found:
        assert {path: data for path, data in tree.items() if path.startswith("export/")} in (old, new, {})
    assert {**new, "export": None} in found


@pytest.fixture(scope="module")
def run_events(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    return record(Ours(), tmp_path_factory.mktemp("run"))


def test_a_run_leaves_what_it_has_reported(run_events: list[Event], tmp_path: Path) -> None:
    cuts, _ = judge(Ours(), run_events, tmp_path, every=8)
    assert cuts.faults == []
    assert cuts.states > 70
    assert cuts.outcomes["whole"] > 40


@pytest.mark.parametrize("forgotten", by_default(("rename",), ("rename", "file", "folder")))
def test_a_missing_flush_is_found(forgotten: str, run_events: list[Event], tmp_path: Path) -> None:
    """The opposite: a run that does not wait for the disk loses or damages what it has reported."""
    disk, kept = Disk(), []
    for event in run_events:
        disk.apply(event)
        names = {node: name for entries in disk.names.values() for name, node in entries.items()}
        if isinstance(event, Flush) and event.node:
            name = names.get(event.node, "")
            kind = "rename" if name == "checkpoints" else "folder" if name.endswith(".tmp") else "file"
            if kind == forgotten and (kind != "file" or name.endswith(".safetensors")):
                continue
        kept.append(event)
    assert len(kept) < len(run_events)
    cuts, _ = judge(Ours(), kept, tmp_path, every=12)
    assert cuts.faults


@pytest.mark.longer
@pytest.mark.parametrize("library", OUR_RUNS, ids=lambda library: library.before or library.flags or "first")
def test_every_state_of_a_run_can_be_continued(library: Ours, tmp_path: Path) -> None:
    """A run is continued from one state of each kind, and ends like the uninterrupted run."""
    events = record(library, tmp_path / "whole")
    cuts, kinds = judge(library, events, tmp_path)
    continue_each(library, kinds, tmp_path / "whole" / "disk" / RUN, tmp_path, cuts)
    assert cuts.faults == []
    assert cuts.continued == len(kinds) > 10


def _train_recorded(workers: Any, folder: str, flags: str) -> None:
    recorder = Recorder(Path(folder, "disk"), Path(folder, "recording"))
    with recorder.recording(), mock.patch("rapidformer_templates.system.launch.is_worker", return_value=False):
        Ours(flags=flags)._fit(Path(folder, "disk", RUN), recorder)
        workers.barrier()
        recorder.report(EXPORTED, STEPS)


@pytest.mark.longer
@pytest.mark.distributed
@pytest.mark.parametrize("flags", ["", "--fsdp-memory-optimization", "--fsdp-memory-optimization --async-save"])
def test_two_workers_leave_what_they_have_reported(flags: str, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    run_in_workers(2, _train_recorded, str(tmp_path), flags)
    cuts, _ = judge(Ours(), read_events(tmp_path / "recording"), tmp_path)
    assert cuts.faults == []
    assert cuts.outcomes["whole"] > 300


CALLS = "fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat"
PROGRAM = """
import sys
from pathlib import Path
from benchmarks.powercut import Ours, record
record(Ours(), Path(sys.argv[1]))
"""


def described(events: list[Event], root: Path) -> list[str]:
    """Describe flushes and changes of names with paths. Creations and sizes are left out."""
    disk, calls = Disk(), []
    for event in events:
        paths = {0: str(root)}
        for _ in range(6):  # folders may be nested that deep
            for folder, names in disk.names.items():
                paths |= {node: f"{paths[folder]}/{name}" for name, node in names.items() if folder in paths}
        match event:
            case Flush(node):
                calls.append(f"flush {paths[node]}")
            case Unlink(folder, name):
                calls.append(f"remove {paths[folder]}/{name}")
            case Rename(folder, name, new_folder, new_name):
                calls.append(f"rename {paths[folder]}/{name} {paths[new_folder]}/{new_name}")
            case Link(folder, name, _, True):
                calls.append(f"mkdir {paths[folder]}/{name}")
        disk.apply(event)
    return calls


def traced(log: Path, root: Path) -> list[str]:
    """Describe the calls that strace saw, except the renames by safetensors from a temporary name."""
    calls = []
    for line in log.read_text().splitlines():
        found = re.match(r"\d+ +(\w+)\((.*)(?:\) += 0| <unfinished \.\.\.>)$", line)
        if not found or not re.search(f"{root}[/>]", line) or re.search(r"/\.tmp\w{6}\b", line):
            continue
        name, arguments = found.groups()
        paths = [a or b for a, b in re.findall(r'<([^>]*)>|"([^"]*)"', arguments)]
        if name.endswith("at"):  # of a folder, and a name in it
            paths = [os.path.join(*paths[:2])]
        word = {"fsync": "flush", "fdatasync": "flush", "mkdirat": "mkdir"}.get(name, name)
        word = "remove" if word in ("unlink", "unlinkat", "rmdir") else word
        calls.append(" ".join([word, *paths]))
    return calls


@pytest.mark.longer
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_strace_sees_the_same_calls(tmp_path: Path) -> None:
    words = ["strace", "-f", "--seccomp-bpf", "-y", "-e", f"trace={CALLS}", "-o", str(tmp_path / "strace")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    subprocess.run([*words, sys.executable, "-c", PROGRAM, str(tmp_path / "run")], env=environment, check=True)
    root = tmp_path / "run" / "disk"
    calls = described(read_events(tmp_path / "run" / "recording")[1:], root)
    assert calls == traced(tmp_path / "strace", root)
    assert len(calls) > 80
