"""Tensors in temporary files: the same values, in memory that the system can take back."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rapidformer_templates.system import tensor_files
from rapidformer_templates.system.tensor_files import TensorFiles

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool)


def _tensors() -> list[torch.Tensor]:
    of_types = [torch.arange(6).reshape(2, 3).to(dtype) for dtype in TYPES]
    return [*of_types, torch.randn(5, 7).t(), torch.tensor(2.5), torch.empty(0, 3), torch.randn(3, 4)[:, 1:3]]


@pytest.mark.parametrize("file_bytes", [64, 1 << 26])
def test_stored_tensors_equal_the_originals(file_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "FIRST_FILE", file_bytes)
    originals = _tensors()
    with TensorFiles(tmp_path) as files:
        stored = [files.store(tensor) for tensor in originals]
        assert list(tmp_path.iterdir()) == []  # nothing remains if the process dies
    for tensor, original in zip(stored, originals, strict=True):
        assert tensor.dtype == original.dtype
        assert torch.equal(tensor, original)
        assert tensor.untyped_storage().nbytes() == original.numel() * original.element_size()


def test_a_stored_tensor_is_not_stored_again(tmp_path: Path) -> None:
    with TensorFiles(tmp_path) as files:
        stored = files.store(torch.randn(4, 4))
        assert files.store(stored) is stored
        view = stored[1:].t()
        assert files.store(view) is view
        other = files.store(stored.clone())
        stored.zero_()
        assert bool(other.any())


def test_parameters_are_stored_with_their_later_values(tmp_path: Path) -> None:
    with TensorFiles(tmp_path) as files:
        with files.parameters_stored():
            layer = nn.Linear(4, 3)
            layer.bias.data = torch.ones(3)
            layer.bias.data += 1
        for parameter in layer.parameters():
            values = parameter.data
            assert files.store(values) is values
        layer.bias.data = torch.zeros(3)
        assert files.store(layer.bias.data) is not layer.bias.data
    assert layer.weight.requires_grad


def test_results_of_functions_are_stored(tmp_path: Path) -> None:
    with TensorFiles(tmp_path) as files:
        stored = files.store(torch.arange(24.0).reshape(4, 6))
        with files.results_stored():
            left, right = (part.contiguous() for part in stored.chunk(2, dim=1))
        for part in (left, right):
            assert files.store(part) is part
        assert torch.equal(torch.cat([left, right], dim=1), stored)


def test_file_systems_without_shared_mappings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as network file systems that cannot write through a mapping."""
    real = mmap.mmap

    def private_only(descriptor: int, size: int, flags: int = mmap.MAP_SHARED) -> Any:
        if flags & mmap.MAP_SHARED:
            raise OSError(errno.ENODEV, "no such device")
        return real(descriptor, size, flags=flags)

    monkeypatch.setattr(mmap, "mmap", private_only)
    with TensorFiles(tmp_path) as files:
        for original in _tensors():
            assert torch.equal(files.store(original), original)
