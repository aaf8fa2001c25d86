"""Files and boxes of tensors: any layout can read what another one wrote. Also, folders that are no checkpoints."""

import errno
import itertools
import json
import os
import resource
import shutil
import weakref
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from rapidformer_templates.engines.boxes import Index
from rapidformer_templates.engines.shards import Shard, whole_shard
from rapidformer_templates.errors import CheckpointError
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.checkpoint import tensor_file
from rapidformer_templates.run.checkpoint.async_save import AsyncSaver
from rapidformer_templates.system import files
from rapidformer_templates.system.files import PAGE, crc32, unbuffered, write_at
from tests.support.crash_points import each_crash
from tests.support.messages import Says
from tests.support.selection import by_default
from tests.support.shelf import Shelf
from tests.support.worker_pool import alone

pytestmark = pytest.mark.durable


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
    older=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_any_box_of_any_shards(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], cuts: list[int], box: st.DataObject, older: bool
) -> None:
    """Each shard is written as if by a separate rank. Only files with a part of the box are opened.

    An ``older`` index does not have the shapes.
    """
    folder = tmp_path_factory.mktemp("boxes")
    tensor = torch.from_numpy(np.random.default_rng(0).normal(size=shape))
    boxes: list[list[Any]] = []
    for rank, shard in enumerate(cut(tensor, [c for c in cuts if c < shape[0]])):
        ((begin, values),) = shard.parts()
        save_file({"w": values.contiguous()}, folder / f"{rank}.safetensors")
        boxes.append([f"{rank}.safetensors", "w", list(begin), *([] if older else [list(values.shape)])])
    reader = object.__new__(checkpoint.Reader)
    reader.folder, reader._open = folder, {}
    reader.index = {"weights": {"w": {"shape": shape, "boxes": boxes}}}
    offset = [box.draw(st.integers(0, n - 1)) for n in shape]
    size = [box.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)]
    expected = tensor[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]
    assert torch.equal(reader.read("weights", "w", offset, size), expected)
    if not older:
        of_file = {file: {*range(begin[0], begin[0] + rows[0])} for file, _, begin, rows in boxes}
        wanted = {*range(offset[0], offset[0] + size[0])}
        assert set(reader._open) == {file for file, rows in of_file.items() if rows & wanted}


def saved(folder: Path, step: int = 3, weights: torch.Tensor | None = None) -> Path:
    boxes = None if weights is None else [whole_shard("w", weights)]
    return checkpoint.save(folder, step, Shelf(boxes), {"samples": 4}, alone())


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
def test_a_full_disk_still_takes_all_shards(background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may gather them from other ranks, which wait for this one."""
    brought: list[str] = []

    class Gathering(Shelf):
        def shards(self, kind: str) -> Iterator[Shard]:
            for piece in cut(torch.arange(6.0), [2, 4]):
                yield piece
                brought.append(kind)

    monkeypatch.setattr(checkpoint, "PART_BYTES", 1)
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(tensor_file, "copy_to_memory" if background else "write", full)
    saver = AsyncSaver(tmp_path, alone(), keep=1)
    shelf = Gathering([])
    save = partial(checkpoint.save, tmp_path, 1, shelf, {}, alone())
    with pytest.raises(CheckpointError, match="the disk is full"):
        (partial(saver.start, 1, shelf, {}, None) if background else save)()
    assert brought == ["weights"] * 3 + ["optimizer"] * 3
    saver.close()


def test_a_type_that_safetensors_does_not_know_is_an_error(tmp_path: Path, says: Says) -> None:
    with says(ValueError):
        saved(tmp_path, weights=torch.zeros(2, dtype=torch.complex128))
    assert list(tmp_path.iterdir()) == []


FAILURES = ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EIO", "ENOENT", "ESTALE", "EBUSY", "memory")


@pytest.mark.parametrize("failure", FAILURES)
def test_what_fails_a_save_is_told_with_what_to_do(failure: str, tmp_path: Path, says: Says) -> None:
    saved(tmp_path, 3)
    number = getattr(errno, failure, 0)
    error = OSError(number, os.strerror(number)) if number else MemoryError()
    with mock.patch.object(tensor_file, "write", side_effect=error), says(CheckpointError):
        saved(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-3"]


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


def test_a_part_that_nobody_wrote_is_an_error(tmp_path: Path, says: Says) -> None:
    half = Shelf([Shard("w", (6,), Index.whole((6,)).run(0), torch.arange(3.0))])
    path = checkpoint.save(tmp_path, 1, half, {}, alone())
    with says(CheckpointError):
        checkpoint.Reader(path).read("weights", "w", (0,), (6,))


def changed(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def described(path: Path, content: str) -> None:
    """Write another index with the checksum that the manifest lists, so that the check reads it."""
    (path / "index.json").write_text(content)
    seal = {"bytes": len(content), "crc32": zlib.crc32(content.encode())}
    changed(path / "manifest.json", lambda manifest: manifest["files"].update({"index.json": seal}))


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DEEP, OPTIMIZER = "[" * 100_000, "optimizer-00000-00000.safetensors"
LISTED = {"../latest": {"bytes": 7, "crc32": 0}}
DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped byte": lambda path: flipped(path / OPTIMIZER),
    "cut file": lambda path: (path / "state.json").write_text("{"),
    "no optimizer": lambda path: (path / OPTIMIZER).unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "forgotten": lambda path: changed(path / "manifest.json", lambda manifest: manifest["files"].pop(OPTIMIZER)),
    "outside": lambda path: changed(path / "manifest.json", lambda manifest: manifest["files"].update(LISTED)),
    "deep manifest": lambda path: (path / "manifest.json").write_text(DEEP),
    "no name": lambda path: (path / "manifest.json").write_text(
        '{"format": 2, "files": {"a\\u0000": {"bytes": 7, "crc32": 0}}}'
    ),
    "deep index": lambda path: described(path, DEEP),
    "no file": lambda path: described(path, '{"weights": {"w": {"boxes": [[1]]}}, "optimizer": {}}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damage_is_a_problem(damage: str, tmp_path: Path, says: Says) -> None:
    path = saved(tmp_path)
    DAMAGES[damage](path)
    says.text(str(checkpoint.problem_of(path)).partition(" while decoding")[0])
    assert checkpoint.problem_on_all_ranks(path, alone()) == checkpoint.problem_of(path)


def test_an_index_that_points_out_of_the_folder_is_refused(tmp_path: Path, says: Says) -> None:
    reader = checkpoint.Reader(saved(tmp_path))
    reader.index["weights"]["w"]["boxes"][0][0] = "../../elsewhere.safetensors"
    with says(CheckpointError):
        reader.read("weights", "w", (0,), (6,))


@pytest.mark.slow
def test_older_ones_go_only_when_the_newest_is_whole(tmp_path: Path, says: Says) -> None:
    """A later one stays: a resume has skipped it, perhaps because of a disk error that has since been fixed."""

    def steps() -> list[str]:
        return [path.name for path in checkpoint.candidates(tmp_path)]

    for step in (9, 1, 2, 3, 4):
        saved(tmp_path, step)
    (tmp_path / "step-4" / "index.json").write_text("{}")
    says.text(str(checkpoint.delete_older(tmp_path / "step-4", 1, None, alone())))
    assert steps() == ["step-9", "step-4", "step-3", "step-2", "step-1"]
    saved(tmp_path, 5)
    assert checkpoint.delete_older(tmp_path / "step-5", 2, protected=1, workers=alone()) is None
    assert steps() == ["step-9", "step-5", "step-4", "step-1"]


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_an_old_one_that_cannot_be_deleted(
    background: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, 1)
    gone = shutil.rmtree
    refuse = mock.Mock(side_effect=lambda path, ignore_errors=False: None if ignore_errors else gone("/nowhere"))
    with mock.patch.object(checkpoint.shutil, "rmtree", refuse):
        if background:
            saver = AsyncSaver(tmp_path, alone(), keep=1)
            saver.start(2, Shelf([]), {}, None)
            assert saver.wait() == tmp_path / "step-2"
            saver.close()
        told = capsys.readouterr().err if background else checkpoint.delete_older(saved(tmp_path, 2), 1, None, alone())
    assert "step-1 could not be deleted: a folder does not exist" in str(told)
    assert [path.name for path in checkpoint.candidates(tmp_path)] == ["step-2"]
    saved(tmp_path, 3)
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("world", [2, 7])
def test_each_file_is_read_by_one_rank(world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = saved(tmp_path), checkpoint.crc32
    read: list[str] = []
    monkeypatch.setattr(checkpoint, "crc32", lambda file: read.append(file.name) or real(file))
    assert [checkpoint.problem_of(path, rank, world) for rank in range(world)] == [None] * world
    assert sorted(read) == sorted(file.name for file in path.iterdir() if file.name != "manifest.json")
    checkpoint.Reader(path).read("weights", "w", (0,), (6,))
    assert len(read) == len(set(read)), "a reader reads what it was asked for alone"


def test_a_file_that_fails_after_the_check_is_named(tmp_path: Path, says: Says) -> None:
    path = saved(tmp_path)
    reader = checkpoint.Reader(path)
    (path / "weights-00000-00000.safetensors").write_bytes(b"\xff" * 40)
    with says(CheckpointError):
        reader.read("weights", "w", (0,), (6,))
    (path / "state.json").unlink()
    with says(CheckpointError):
        checkpoint.Reader(path)


@pytest.mark.slow
@pytest.mark.parametrize("again", by_default([True], [False, True]), ids=["new step", "step of a damaged one"])
def test_a_death_at_any_moment_of_a_save(again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies during a save, while a damaged checkpoint is replaced, or while older ones are deleted."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # power is not cut here
    monkeypatch.setattr(files, "DIRECT", 0)
    start, step = tmp_path / "start", 3
    for earlier in (1, 2, 3) if again else (1, 2):
        saved(start, earlier)
    if again:
        (start / "step-3" / "state.json").unlink()

    def save(root: Path) -> None:
        checkpoint.delete_older(saved(root, step), 1, None, alone())

    seen = set()
    for root in each_crash(lambda number: Path(shutil.copytree(start, tmp_path / str(number))), save):
        found, passed_over = checkpoint.newest_complete(root, alone())
        assert found in (root / "step-2", root / "step-3")
        assert passed_over in ([], ["step-3: state.json is missing"])
        latest = root / (root / "latest").read_text().strip()
        assert latest.is_dir() or again
        seen.add((found.name, len(list(root.glob("step-?")))))
        save(root)
        assert sorted(path.name for path in root.iterdir()) == ["latest", "step-3"]
    assert {("step-2", 3 if again else 2), ("step-3", 3), ("step-3", 2), ("step-3", 1)} <= seen


TENSORS: dict[str, torch.Tensor] = {
    **{
        f"{dtype}": torch.randint(0, 2, (3, 5), generator=torch.Generator().manual_seed(0)).to(dtype)
        for dtype in tensor_file.NAMES
    },
    "of no dimension": torch.tensor(2.5),
    "empty": torch.zeros(0),
    "empty rows": torch.zeros(3, 0, dtype=torch.bfloat16),
    "transposed": torch.arange(12.0).reshape(3, 4).T,
    "strided": torch.arange(20)[::3],
    "gradient": torch.ones(3, requires_grad=True),
    'name \N{SNOWMAN} "quoted"': torch.ones(1, dtype=torch.float16),
}


def write_in_two_ways(folder: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Path:
    """Check that both ways of writing give the same file and its seal. Return the file."""
    paths = folder / "one.safetensors", folder / "other.safetensors"
    seals = [
        tensor_file.write(paths[0], tensors, metadata),
        tensor_file.write_copy(paths[1], tensor_file.copy_to_memory(tensors, metadata)),
    ]
    content = paths[0].read_bytes()
    assert content == paths[1].read_bytes()
    assert seals == [{"bytes": len(content), "crc32": zlib.crc32(content)}] * 2
    assert crc32(paths[0]) == zlib.crc32(content)
    return paths[0]


def assert_holds(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            found, wanted = file.get_tensor(name), tensor.detach().contiguous()
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            assert found.reshape(-1).view(torch.uint8).equal(wanted.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("threads", [1, 2])
def test_every_type_and_shape_comes_back(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert_holds(write_in_two_ways(tmp_path, {}), {})
    path = write_in_two_ways(tmp_path, TENSORS, {"key": "text"})
    assert_holds(path, TENSORS)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"key": "text"}


@pytest.mark.slow
@given(lengths=st.lists(st.integers(0, 3 * PAGE), max_size=6))
@settings(max_examples=20, deadline=None)
def test_blocks_end_anywhere(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> None:
    kinds = (torch.uint8, torch.int16)
    tensors = {f"{i}": torch.randint(0, 256, (length,)).to(kinds[i % 2]) for i, length in enumerate(lengths)}
    with mock.patch.object(tensor_file, "BLOCK", PAGE):
        assert_holds(write_in_two_ways(tmp_path_factory.mktemp("blocks"), tensors), tensors)


def test_a_small_file_needs_little_free_space(tmp_path: Path) -> None:
    tensors = {"x": torch.arange(PAGE, dtype=torch.float32)}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    memory = tensor_file.host_memory(64 * PAGE, pinned=False)  # of an earlier, larger copy
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 * PAGE, before[1]))
    try:
        tensor_file.write(tmp_path / "x", tensors)
        tensor_file.write_copy(tmp_path / "y", tensor_file.copy_to_memory(tensors, None, memory))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_holds(tmp_path / "x", tensors)
    assert_holds(tmp_path / "y", tensors)


def test_writes_that_are_cut_short_or_refused_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a page cannot bypass the page cache, or the file system has larger pages."""
    pwrite, calls = os.pwrite, []

    def short(descriptor: int, data: memoryview, place: int) -> int:
        calls.append(len(data))
        if len(calls) == 2:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(descriptor, data[:1000] if len(calls) == 3 else data, place)

    monkeypatch.setattr(os, "pwrite", short)
    monkeypatch.setattr(tensor_file, "BLOCK", 4 * PAGE)
    tensors = {"x": torch.arange(10 * PAGE)}
    tensor_file.write(tmp_path / "x", tensors)
    assert_holds(tmp_path / "x", tensors)


def test_a_file_system_that_knows_only_its_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def without_direct(path: Any, flags: int, *mode: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", without_direct)
    with unbuffered(tmp_path / "x") as descriptor:
        write_at(descriptor, memoryview(b"not a page"), 0)
    assert (tmp_path / "x").read_bytes() == b"not a page"
