"""Boxes of tensors: any layout can read what another one wrote. Also, folders that do not count as checkpoints."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import weakref
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from rapidformer_templates.engines.boxes import Index
from rapidformer_templates.engines.shards import Shard, whole_shard
from rapidformer_templates.errors import CheckpointError
from rapidformer_templates.models.blocks import canonical_name, find_blocks
from rapidformer_templates.run.checkpoint import check as checkpoint_check
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.checkpoint import tensor_file
from rapidformer_templates.run.checkpoint.async_save import AsyncSaver
from rapidformer_templates.system import files
from rapidformer_templates.system.workers import Workers
from tests.support.crash_points import each_crash
from tests.support.selection import by_default
from tests.support.worker_pool import alone

pytestmark = pytest.mark.durable


class Shelf:
    """A stand-in for an engine that holds some boxes."""

    def __init__(self, boxes: list[Shard]) -> None:
        self.boxes = boxes

    def shards(self, kind: str) -> Iterator[Shard]:
        return iter(self.boxes if kind == "weights" else [])

    def state(self) -> dict[str, Any]:
        return {"optimizer": "None"}


def cut(tensor: torch.Tensor, cuts: list[int]) -> list[Shard]:
    """Split the rows of a tensor into shards."""
    edges = [0, *sorted(set(cuts)), len(tensor)]
    return [
        Shard("w", tuple(tensor.shape), Index.whole(tensor.shape).run(a * tensor[0].numel()), tensor[a:b])
        for a, b in itertools.pairwise(edges)
        if b > a
    ]


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 6), max_size=3),
    box=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_box_can_be_read_from_any_shards(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], cuts: list[int], box: st.DataObject
) -> None:
    """Each shard is written as if by a separate rank."""
    folder = tmp_path_factory.mktemp("boxes")
    tensor = torch.from_numpy(np.random.default_rng(0).normal(size=shape))
    boxes: list[list[Any]] = []
    for rank, shard in enumerate(cut(tensor, [c for c in cuts if c < shape[0]])):
        ((begin, values),) = shard.parts()
        save_file({"w": values.contiguous()}, folder / f"{rank}.safetensors")
        boxes.append([f"{rank}.safetensors", "w", list(begin)])
    reader = object.__new__(checkpoint.Reader)
    reader.folder, reader._open = folder, {}
    reader.index = {"weights": {"w": {"shape": shape, "boxes": boxes}}}
    offset = [box.draw(st.integers(0, n - 1)) for n in shape]
    size = [box.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)]
    expected = tensor[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]
    assert torch.equal(reader.read("weights", "w", offset, size), expected)


def saved(folder: Path, step: int = 3) -> Path:
    return checkpoint.save(folder, step, Shelf([whole_shard("w", torch.arange(6.0))]), {"samples": 4}, alone())


def test_what_is_written_is_whole_and_named(tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert checkpoint_check.problem_of(path) is None
    assert (tmp_path / "latest").read_text() == "step-3\n"
    assert not list(tmp_path.glob("*.tmp"))
    reader = checkpoint.Reader(path)
    assert reader.state["samples"] == 4
    assert torch.equal(reader.read("weights", "w", (2,), (3,)), torch.tensor([2.0, 3.0, 4.0]))


@pytest.mark.parametrize("limit", [1, 100, 10**9])
def test_files_are_bounded_and_read_as_one(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "PART_BYTES", limit)
    tensor = torch.arange(60.0).reshape(20, 3)
    boxes = [whole_shard("alone", torch.arange(5)), *cut(tensor, [3, 4, 11])]
    path = checkpoint.save(tmp_path, 1, Shelf(boxes), {}, alone())
    parts = sorted(path.glob("weights-*"))
    assert len(parts) == {1: 5, 100: 3, 10**9: 1}[limit]
    reader = checkpoint.Reader(path)
    assert torch.equal(reader.read("weights", "w", (2, 1), (17, 2)), tensor[2:19, 1:])
    assert torch.equal(reader.read("weights", "alone", (0,), (5,)), torch.arange(5))
    assert [file.name for file in path.glob("optimizer-*")] == ["optimizer-00000-00000.safetensors"]


@pytest.mark.slow
def test_a_part_goes_from_memory_before_the_next_is_brought(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An engine may load its shards from elsewhere, and more of them than fit into memory."""
    monkeypatch.setattr(checkpoint, "PART_BYTES", 8000)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    class Lazy(Shelf):
        def shards(self, kind: str) -> Iterator[Shard]:
            nonlocal most
            for number in range(40):
                tensor = torch.zeros(500)
                alive.add(tensor)
                most = max(most, len(alive))
                yield whole_shard(f"w{number}", tensor)
                del tensor

    checkpoint.save(tmp_path, 1, Lazy([]), {}, alone())
    assert 4 <= most <= 6  # a part of four, the one that did not fit, and the last requested one


@pytest.mark.parametrize("background", [False, True])
def test_an_engine_brings_all_its_shards_although_the_disk_is_full(
    background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may gather them from other ranks, which wait for this one."""
    brought: list[str] = []

    class Gathering(Shelf):
        def shards(self, kind: str) -> Iterator[Shard]:
            for piece in cut(torch.arange(6.0), [2, 4]):
                yield piece
                brought.append(kind)

    def full(*unused: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "PART_BYTES", 1)
    monkeypatch.setattr(tensor_file, "copy_to_memory" if background else "write", full)
    saver = AsyncSaver(tmp_path, alone(), keep=1)
    shelf = Gathering([])
    save = partial(checkpoint.save, tmp_path, 1, shelf, {}, alone())
    with pytest.raises(CheckpointError, match="the disk is full"):
        (partial(saver.start, 1, shelf, {}, None) if background else save)()
    assert brought == ["weights"] * 3 + ["optimizer"] * 3
    saver.close()


def test_a_part_that_the_manifest_does_not_list_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "PART_BYTES", 1)
    path = checkpoint.save(tmp_path, 1, Shelf(cut(torch.arange(6.0), [3])), {}, alone())
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"]["weights-00000-00001.safetensors"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint_check.problem_of(path) == "the manifest does not list weights-00000-00001.safetensors"


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "step-2.tmp").mkdir()
    (tmp_path / "step-2.tmp" / "weights-00000-00000.safetensors").write_bytes(b"half")
    saved(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-3"]


def test_a_type_that_safetensors_does_not_know_is_an_error(tmp_path: Path) -> None:
    strange = Shelf([whole_shard("w", torch.zeros(2, dtype=torch.complex128))])
    with pytest.raises(ValueError, match=r"w is torch\.complex128, which safetensors cannot hold"):
        checkpoint.save(tmp_path, 1, strange, {}, alone())
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_of_an_engine_is_shown_as_one(tmp_path: Path) -> None:
    """It is not reported as a full disk."""

    class Mistaken(Shelf):
        def shards(self, kind: str) -> Iterator[Shard]:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        checkpoint.save(tmp_path, 1, Mistaken([]), {}, alone())
    saver = AsyncSaver(tmp_path, alone(), keep=1)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        saver.start(1, Mistaken([]), {}, None)
    saver.close()
    assert list(tmp_path.iterdir()) == []


FAILURES = {
    "full": (OSError(errno.ENOSPC, "No space left on device"), "the disk is full", "free some space"),
    "quota": (OSError(errno.EDQUOT, "Quota exceeded"), "the quota of this disk is used up", "free some space"),
    "read-only": (OSError(errno.EROFS, "Read-only"), "the file system is read-only", "mount it for writing"),
    "permission": (
        OSError(errno.EACCES, "denied"),
        "this process is not allowed to write there",
        "change the permissions",
    ),
    "disk": (OSError(errno.EIO, "I/O error"), "the disk reports an error", r"check the disk \(dmesg says more\)"),
    "gone": (OSError(errno.ENOENT, "No such file"), "a folder does not exist", "check that its file system is mounted"),
    "stale": (OSError(errno.ESTALE, "Stale"), "the network file system has lost the folder", "mount it again"),
    "memory": (MemoryError(), "there is not enough memory", "leave more memory free"),
    "strange": (OSError(errno.EBUSY, "busy"), r"it failed \(\[Errno 16\] busy\)", "fix what the system reports"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_what_fails_a_save_is_told_with_what_to_do(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, what, to_do = FAILURES[failure]

    def fail(*unused: Any) -> Any:
        raise error

    saved(tmp_path, 3)
    monkeypatch.setattr(tensor_file, "write", fail)
    with pytest.raises(CheckpointError, match=f"step 4 could not be written: {what}") as caught:
        saved(tmp_path, 4)
    assert re.fullmatch(f"{to_do} and continue with --resume from step-3", str(caught.value.hint))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-3"]


def test_a_failure_without_words_fails_the_other_ranks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the view of the second worker when the first one fails."""
    attempt = checkpoint.Attempt(tmp_path, 1, {}, {}, alone())
    monkeypatch.setattr(Workers, "gather", lambda self, value: [checkpoint._describe_failure(MemoryError()), value])
    with pytest.raises(CheckpointError, match="there is not enough memory"):
        attempt.run_together(lambda: None)


def test_a_save_in_the_background_keeps_the_moment_of_its_start(tmp_path: Path) -> None:
    """The next save reuses its memory."""
    weight = torch.arange(6.0)
    saver = AsyncSaver(tmp_path, alone(), keep=1)
    shelf = Shelf([whole_shard("w", weight)])
    for step in (1, 2):
        saver.start(step, shelf, {"samples": step}, None)
        memory = {name: copy.data_ptr() for name, copy in saver._memory.items()}
        weight += 10
        assert saver.pending
        path = saver.wait()
        assert path == tmp_path / f"step-{step}"
        reader = checkpoint.Reader(path)
        assert reader.state["samples"] == step
        assert torch.equal(reader.read("weights", "w", (0,), (6,)), torch.arange(6.0) + 10 * (step - 1))
        assert saver.wait() is None
    assert memory == {name: copy.data_ptr() for name, copy in saver._memory.items()}
    assert checkpoint.candidates(tmp_path) == [tmp_path / "step-2"]
    saver.close()


def test_a_background_save_without_memory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(size: int, *, pinned: bool) -> torch.Tensor:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(tensor_file, "host_memory", none_left)
    saver = AsyncSaver(tmp_path, alone(), keep=1)
    with pytest.raises(CheckpointError, match=r"step 1 could not be written: .*Cannot allocate memory"):
        saver.start(1, Shelf([whole_shard("w", torch.zeros(2))]), {}, None)
    assert not saver.pending
    assert list(tmp_path.iterdir()) == []
    saver.close()


def test_a_part_that_nobody_wrote_is_an_error(tmp_path: Path) -> None:
    half = Shelf([Shard("w", (6,), Index.whole((6,)).run(0), torch.arange(3.0))])
    path = checkpoint.save(tmp_path, 1, half, {}, alone())
    with pytest.raises(CheckpointError, match="parts of w are missing"):
        checkpoint.Reader(path).read("weights", "w", (0,), (6,))


def test_a_path_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../latest"] = {"bytes": 7, "crc32": 0}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint_check.problem_of(path) == "../latest is outside the folder"
    assert checkpoint_check.problem_on_all_ranks(path, alone()) == "../latest is outside the folder"


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("manifest.json", "[" * 100_000, "manifest.json cannot be read (maximum recursion depth exceeded"),
        (
            "manifest.json",
            '{"format": 2, "files": {"a\\u0000": {"bytes": 7, "crc32": 0}}}',
            "'a\\x00' is not",
        ),
        ("index.json", "[" * 100_000, "index.json or state.json cannot be read (maximum recursion depth exceeded"),
        ("index.json", '{"weights": {"w": {"boxes": [[1]]}}, "optimizer": {}}', "the manifest does not list 1"),
    ],
)
def test_a_damaged_description_is_a_problem(tmp_path: Path, file: str, content: str, problem: str) -> None:
    """An index with another form has the checksum that the manifest lists, so that the check reads it."""
    path = saved(tmp_path)
    (path / file).write_text(content)
    manifest = json.loads((path / "manifest.json").read_text()) if file == "index.json" else None
    if manifest:
        manifest["files"][file] = {"bytes": len(content), "crc32": zlib.crc32(content.encode())}
        (path / "manifest.json").write_text(json.dumps(manifest))
    assert str(checkpoint_check.problem_of(path)).startswith(problem)


def test_an_index_that_points_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    reader = checkpoint.Reader(path)
    reader.index["weights"]["w"]["boxes"][0][0] = "../../elsewhere.safetensors"
    with pytest.raises(CheckpointError, match="not a file of the checkpoint"):
        reader.read("weights", "w", (0,), (6,))


def test_newest_whole_one_is_found_and_others_are_named(tmp_path: Path) -> None:
    for step in (3, 20, 100):
        saved(tmp_path, step)
    (tmp_path / "step-100" / "state.json").unlink()
    (tmp_path / "step-200.tmp").mkdir()
    found, passed_over = checkpoint_check.newest_complete(tmp_path, alone())
    assert found == tmp_path / "step-20"
    assert passed_over == ["step-100: state.json is missing"]


@pytest.mark.slow
def test_older_ones_go_only_when_the_newest_is_whole(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        saved(tmp_path, step)
    size = (tmp_path / "step-4" / "index.json").stat().st_size
    (tmp_path / "step-4" / "index.json").write_text("{}")
    told = checkpoint_check.delete_older(tmp_path / "step-4", 1, None, alone())
    assert told == (
        f"step-4 was written, but cannot be read back (index.json has 2 bytes instead of {size}): "
        "older checkpoints are kept"
    )
    assert [path.name for path in checkpoint.candidates(tmp_path)] == ["step-4", "step-3", "step-2", "step-1"]
    saved(tmp_path, 5)
    assert checkpoint_check.delete_older(tmp_path / "step-5", 2, protected=1, workers=alone()) is None
    assert [path.name for path in checkpoint.candidates(tmp_path)] == ["step-5", "step-4", "step-1"]


@pytest.mark.slow
def test_what_is_older_than_a_save_goes_and_what_is_later_stays(tmp_path: Path) -> None:
    """The resume skipped the later one, perhaps because of a disk error that has since been fixed."""
    for step in (9, 3, 6):
        saved(tmp_path, step)
    checkpoint_check.delete_older(tmp_path / "step-6", 1, None, alone())
    assert [path.name for path in checkpoint.candidates(tmp_path)] == ["step-9", "step-6"]


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_an_old_checkpoint_that_cannot_be_deleted_fails_no_save(
    background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, 1)

    def busy(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(checkpoint_check.shutil, "rmtree", busy)
    if background:
        saver = AsyncSaver(tmp_path, alone(), keep=1)
        saver.start(2, Shelf([]), {}, None)
        assert saver.wait() == tmp_path / "step-2"
        saver.close()
        told = capsys.readouterr().err
    else:
        told = str(checkpoint_check.delete_older(saved(tmp_path, 2), 1, None, alone()))
    assert "step-1 could not be deleted: it failed ([Errno 16] Device or resource busy)" in told
    assert [path.name for path in checkpoint.candidates(tmp_path)] == ["step-2"]
    monkeypatch.undo()
    saved(tmp_path, 3)
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_each_file_is_read_by_one_rank(world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = saved(tmp_path), checkpoint_check.crc32
    read: list[str] = []
    monkeypatch.setattr(checkpoint_check, "crc32", lambda file: read.append(file.name) or real(file))
    assert [checkpoint_check.problem_of(path, rank, world) for rank in range(world)] == [None] * world
    assert sorted(read) == sorted(file.name for file in path.iterdir() if file.name != "manifest.json")
    checkpoint.Reader(path).read("weights", "w", (0,), (6,))
    assert len(read) == len(set(read)), "a reader reads what it was asked for alone"


def test_a_file_that_fails_after_the_check_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path)
    reader = checkpoint.Reader(path)
    (path / "weights-00000-00000.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(CheckpointError, match=r"weights-00000-00000\.safetensors cannot be read") as caught:
        reader.read("weights", "w", (0,), (6,))
    assert caught.value.where == str(path)
    (path / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"index.json or state.json cannot be read"):
        checkpoint.Reader(path)


@pytest.mark.slow
@pytest.mark.parametrize("again", by_default([True], [False, True]), ids=["new step", "step of a damaged one"])
def test_a_death_at_any_moment_leaves_a_whole_checkpoint(
    again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies during a save, while a damaged checkpoint is replaced, or while older ones are deleted."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # power is not cut here
    monkeypatch.setattr(files, "DIRECT", 0)
    start, step = tmp_path / "start", 3
    for earlier in (1, 2, 3) if again else (1, 2):
        saved(start, earlier)
    if again:
        (start / "step-3" / "state.json").unlink()

    def save(root: Path) -> None:
        checkpoint_check.delete_older(saved(root, step), 1, None, alone())

    seen = set()
    for root in each_crash(lambda number: Path(shutil.copytree(start, tmp_path / str(number))), save):
        found, passed_over = checkpoint_check.newest_complete(root, alone())
        assert found in (root / "step-2", root / "step-3")
        assert passed_over in ([], ["step-3: state.json is missing"])
        latest = root / (root / "latest").read_text().strip()
        assert latest.is_dir() or again
        seen.add((found.name, len(list(root.glob("step-?")))))
        save(root)
        assert sorted(path.name for path in root.iterdir()) == ["latest", "step-3"]
    assert {("step-2", 3 if again else 2), ("step-3", 3), ("step-3", 2), ("step-3", 1)} <= seen


def test_canonical_names_have_nothing_of_the_wrappers() -> None:
    assert canonical_name("module._orig_mod.h.0._checkpoint_wrapped_module.attn.weight") == "h.0.attn.weight"


def test_blocks_are_found_without_a_list_of_names() -> None:
    model = torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(5, 4),
            "layers": torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3)),
            "heads": torch.nn.ModuleList([torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)]),
        }
    )
    assert list(find_blocks(model)) == ["layers.0", "layers.1", "layers.2"]
