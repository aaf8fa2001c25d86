"""Safetensors files that we write, read with safetensors itself."""

from __future__ import annotations

import errno
import os
import resource
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from rapidformer_templates.run.checkpoint import tensor_file
from rapidformer_templates.system.files import PAGE, crc32, unbuffered, write_at

pytestmark = pytest.mark.durable

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
@settings(max_examples=40, deadline=None)
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
