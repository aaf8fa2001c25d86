"""Power cuts: in each state that one may leave on the disk, a run finds what it has reported as saved."""

import contextlib
import os
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer_templates import Data, Trainer
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.run.checkpoint.format import Reader, newest_complete, step_of
from rapidformer_templates.run.folder import RunFolder, read_metrics
from rapidformer_templates.system import files
from rapidformer_templates.system.workers import Workers
from tests.support.dropout_runs import TIMES
from tests.support.power_cuts import (
    BEGIN,
    CrashState,
    Disk,
    Event,
    Flush,
    Link,
    Recorder,
    Rename,
    Report,
    Write,
    crash_states,
    read_events,
    reported,
    write_tree,
)  # fmt: skip
from tests.support.worker_pool import run_in_workers

STEPS, SAVE_EVERY, KEEP = 6, 2, 2
SAVED, EXPORTED = "saved", "exported"
ALONE = Workers(0, 0, 1, torch.device("cpu"))
RUN = "runs/mine"
"""The folder of the run. The program creates both folders."""


Tree = dict[str, bytes | None]


# The model of a disk.


def trees(events: list[Event]) -> list[Tree]:
    found: list[Tree] = []
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


def recorded(body: Callable[[Path], None], folder: Path) -> list[Event]:
    folder.mkdir(exist_ok=True)
    recorder = Recorder(folder, folder.parent / "log")
    with recorder.recording():
        body(folder)
    return read_events(folder.parent / "log")


def test_a_recording_has_what_native_code_writes(tmp_path: Path) -> None:
    def write(root: Path) -> None:
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

    root = tmp_path / "disk"
    root.mkdir()
    (root / "old").write_text("12")
    disk, flushed = Disk(), list[int]()
    for event in recorded(write, root):
        disk.apply(event)
        if isinstance(event, Flush):
            flushed.append(event.node)
    assert disk.tree() == {path.name: path.read_bytes() for path in root.iterdir()}
    assert disk.tree()["old"] == b"1"
    assert flushed[-2:] == [disk.names[0]["old"], 0]


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


# Runs.


def fit(folder: Path, flags: str = "", recorder: Recorder | None = None, die_in: int | None = None) -> None:
    """Train a small GPT with dropout, and report each checkpoint to the recorder."""

    class Job(Trainer):
        def build_data(self) -> Data:
            tokens = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(0))
            return Data(train=[{"input_ids": row, "labels": row} for row in tokens])

        def build_model(self) -> nn.Module:
            sizes: dict[str, Any] = {"vocab_size": 64, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
            return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))

        def on_step_end(self, step: int, result: object) -> None:
            if step == die_in:
                raise KeyboardInterrupt
            if recorder:
                recorder.look()

        def on_checkpoint(self, step: int, folder: Path) -> None:
            if recorder:
                recorder.report(SAVED, step)

    words = (
        f"--train-iters {STEPS} --micro-batch-size 4 --lr 1e-3 --log-interval 1 --keep-checkpoints {KEEP}"
        f" --save-interval {SAVE_EVERY} --device cpu --resume {flags} --save {folder}"
    )
    Job(words.split()).fit()


def record(folder: Path, flags: str = "", before: str = "") -> list[Event]:
    """Record a run in a new folder.

    Args:
        before: how the run finds its folder: "" (empty), "killed" (an earlier process was killed in its fifth step) or
            "complete" (everything was already done).
    """
    root = folder / "disk"
    root.mkdir(parents=True)
    recorder = Recorder(root, folder / "recording")
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    if before:
        with contextlib.suppress(KeyboardInterrupt):
            fit(root / RUN, flags, die_in=5 if before == "killed" else None)
    with recorder.recording():
        if before:
            recorder.report(SAVED, STEPS if before == "complete" else 4)
        fit(root / RUN, flags, recorder)
        recorder.report(EXPORTED, STEPS)
    events = read_events(folder / "recording")
    on_disk = {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in root.rglob("*")}
    assert disk_of(events).tree() == on_disk, "the recording is not complete"
    return events


def disk_of(events: Sequence[Event]) -> Disk:
    disk = Disk()
    for event in events:
        disk.apply(event)
    return disk


def below(tree: Tree, folder: str) -> Tree:
    prefix = f"{folder}/"
    return {path.removeprefix(prefix): data for path, data in tree.items() if path.startswith(prefix)}


def load_newest(folder: Path) -> Path | None:
    """Load the checkpoint that a resume would. None if there is none. Any exception ends the resumed run."""
    newest, passed_over = newest_complete(RunFolder(folder).checkpoints, ALONE)
    if newest is None:
        if passed_over:
            raise RapidformerError("; ".join(passed_over))
        return None
    reader = Reader(newest)
    for kind in ("weights", "optimizer"):
        for name, shape in reader.names(kind).items():
            reader.read(kind, name, (0,) * len(shape), shape)
    return newest.relative_to(folder)


@dataclass
class Judged:
    """The outcomes of resumes in all states.

    Attributes:
        outcomes: number of states by the step that is loaded.
        faults: descriptions of states in which something is wrong.
        kinds: one state of each kind to continue from.
    """

    outcomes: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    kinds: dict[str, CrashState] = field(default_factory=dict)


def judge(events: Sequence[Event], folder: Path, every: int = 1) -> Judged:
    """Look for a checkpoint in each state, or in each n-th: the newest that was reported, or a later one, is whole."""
    truth = [below(disk_of(events[: i + 1]).tree(), RUN) for i, e in enumerate(events) if isinstance(e, Report)]
    judged, known = Judged(), dict[object, tuple[Path | None, str]]()
    for number, state in enumerate(crash_states(events)):
        if number % every:
            continue
        tree = below(state.tree, RUN)
        checkpoints = {path: data for path, data in tree.items() if path.startswith("checkpoints")}
        signature = frozenset(checkpoints.items())
        if signature not in known:
            write_tree(checkpoints, folder / "state")
            with warnings.catch_warnings(action="ignore"):
                try:
                    known[signature] = load_newest(folder / "state"), ""
                except Exception as error:
                    known[signature] = None, f"{type(error).__name__}: {error}"
            shutil.rmtree(folder / "state")
        path, problem = known[signature]
        promised, loaded = reported(events[: state.events], SAVED), step_of(path) if path else 0
        parts = ([str(path)] if path else []) + [part for part in ("export", "model") if part in tree]
        damaged = [p for p in parts if not any(p in t and below(t, p) == below(tree, p) for t in truth)]
        if problem or loaded < promised or damaged:
            reason = problem or f"step {loaded} of {promised}, damaged: {damaged}"
            judged.faults.append(f"after event {state.events} ({events[state.events - 1]!r:.60}): {reason}")
        judged.outcomes[loaded] += 1
        judged.kinds.setdefault(kind_of(loaded, tree, truth), state)
    return judged


def kind_of(step: int, tree: Tree, truth: Sequence[Tree]) -> str:
    """Describe what a resumed run meets: its checkpoint, and which of the other files and folders are whole."""
    parts = [f"step {step}", *sorted(p for p, data in tree.items() if data is None and p.startswith("checkpoints/"))]
    for path, data in sorted(tree.items()):
        top = path.partition("/")[0]
        if path == "checkpoints/latest" or (top != "checkpoints" and "/" not in path):
            here = [whole for whole in truth if path in whole]
            same = any(whole[path] == data and below(tree, path) == below(whole, path) for whole in here)
            parts.append(path + ("" if same else f" of {len(data.splitlines())} lines" if data else " empty"))
    return ", ".join(parts)


def outcome(folder: Path) -> dict[str, object]:
    """Return everything that an uninterrupted run leaves, without timings."""
    root = RunFolder(folder)
    paths = [*root.checkpoints.glob(f"step-{STEPS}/*.safetensors"), *root.export.iterdir(), *root.model.iterdir()]
    lines = [{k: v for k, v in line.items() if k not in TIMES} for line in read_metrics(root.metrics)]
    summary = root.read_summary()
    whole = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    return {"metrics": lines, "summary": (summary["steps"], summary["metrics"]), **whole}


@pytest.fixture(scope="module")
def run_events(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Event]]:
    with mock.patch("rapidformer_templates.run.console.draw_curves"):
        yield record(tmp_path_factory.mktemp("run"))


def test_a_run_leaves_what_it_has_reported(run_events: list[Event], tmp_path: Path) -> None:
    judged = judge(run_events, tmp_path, every=16)
    assert judged.faults == []
    assert judged.outcomes.total() > 30
    assert sum(count for step, count in judged.outcomes.items() if step) > 20


@pytest.mark.longer
@pytest.mark.parametrize("forgotten", ["rename", "file", "folder"])
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
    assert judge(kept, tmp_path, every=12).faults


@pytest.mark.longer
@pytest.mark.parametrize("run", [("", ""), ("--async-save", ""), ("", "killed"), ("", "complete")], ids="-".join)
def test_every_state_of_a_run_can_be_continued(run: tuple[str, str], tmp_path: Path) -> None:
    """A run is continued from one state of each kind, and ends like the uninterrupted run, bit for bit."""
    events = record(tmp_path / "whole", *run)
    judged, expected = judge(events, tmp_path), outcome(tmp_path / "whole" / "disk" / RUN)
    assert judged.faults == []
    assert len(judged.kinds) > 10
    for kind, state in judged.kinds.items():
        folder = tmp_path / "state" / RUN
        write_tree(below(state.tree, RUN), folder)
        fit(folder, run[0])
        different = [name for name, value in outcome(folder).items() if expected.get(name) != value]
        assert different == [], kind
        shutil.rmtree(folder)


def _train_recorded(workers: Any, folder: str, flags: str) -> None:
    recorder = Recorder(Path(folder, "disk"), Path(folder, "recording"))
    with recorder.recording(), mock.patch("rapidformer_templates.system.launch.is_worker", return_value=False):
        fit(Path(folder, "disk", RUN), flags, recorder)
        workers.barrier()
        recorder.report(EXPORTED, STEPS)


@pytest.mark.longer
@pytest.mark.distributed
@pytest.mark.parametrize("flags", ["", "--fsdp-memory-optimization", "--fsdp-memory-optimization --async-save"])
def test_two_workers_leave_what_they_have_reported(flags: str, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    run_in_workers(2, _train_recorded, str(tmp_path), flags)
    judged = judge(read_events(tmp_path / "recording"), tmp_path)
    assert judged.faults == []
    assert sum(count for step, count in judged.outcomes.items() if step) > 300
