"""Files with weights: tensors that workers read in parts, and models written in the format of transformers.

Transformers alone reads every tensor whole. Both formats store the elements of a tensor as consecutive bytes:
safetensors, and the archive that ``torch.save`` writes (``pytorch_model.bin``). The format that torch had before
version 1.6 is read as usual. A context variable holds the function that reads the tensors for ``from_pretrained``.
Without one, transformers reads files as it always does.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, TypedDict
from zipfile import is_zipfile

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel, modeling_utils
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rapidformer_templates.models.loading import mark_folder, quiet_transformers
from rapidformer_templates.system.files import write_json
from rapidformer_templates.system.replaced_functions import patch_function
from rapidformer_templates.system.tensor_files import TensorFiles

CHUNK = 4 << 20
"""Bytes that are read at a time if their type changes."""
SMALLEST = 4096
"""Bytes of the smallest tensor that is read in parts."""


class WeightFile(FileIO):
    """A file that stays open until nothing needs it, because it may be removed before it is read."""

    def __del__(self) -> None:
        self.close()


class FileRange(NamedTuple):
    """Consecutive bytes of a file."""

    file: WeightFile
    start: int
    size: int


@dataclass(frozen=True)
class FileTensor:
    """A tensor in weight files that has not been read.

    Attributes:
        shape: its shape.
        dtype: its type in the files.
        ranges: where its elements are, in the order of the flattened tensor.
    """

    shape: torch.Size
    dtype: torch.dtype
    ranges: tuple[FileRange, ...]

    def read_into(self, target: torch.Tensor, start: int) -> None:
        """Fill a one-dimensional tensor with the elements from ``start`` on. It may have another type."""
        if target.dtype != self.dtype:
            length = CHUNK // self.dtype.itemsize
            for position in range(0, len(target), length):
                chunk = target[position : position + length]
                values = torch.empty(len(chunk), dtype=self.dtype, device="cpu")
                self.read_into(values, start + position)
                chunk.copy_(values)
            return
        buffer, position = target.view(torch.uint8).numpy().data, 0
        for file, begin, size in _part(self.ranges, start * self.dtype.itemsize, len(buffer)):
            _read(file, begin, buffer[position : position + size])
            position += size


def join(tensors: Sequence[FileTensor], dim: int) -> FileTensor | None:
    """Return the tensor that ``torch.cat`` makes.

    Returns None for tensors of several types, and if the parts that follow each other are very small.

    Args:
        tensors: tensors whose shapes differ in ``dim`` alone.
        dim: a dimension, not negative.
    """
    before, after = tensors[0].shape[:dim], tensors[0].shape[dim + 1 :]
    rows, sizes = math.prod(before), [one.shape.numel() * one.dtype.itemsize for one in tensors]
    if len({one.dtype for one in tensors}) > 1 or min(sizes) < rows * SMALLEST:
        return None
    ranges = [
        part
        for row in range(rows)
        for one, size in zip(tensors, sizes, strict=True)
        for part in _part(one.ranges, row * (size // rows), size // rows)
    ]
    shape = torch.Size((*before, sum(one.shape[dim] for one in tensors), *after))
    return FileTensor(shape, tensors[0].dtype, tuple(ranges))


def _part(ranges: Sequence[FileRange], start: int, size: int) -> Iterator[FileRange]:
    """Yield the ranges of ``size`` bytes, from byte ``start`` of all ranges on."""
    for file, begin, length in ranges:
        left, right = max(start, 0), min(start + size, length)
        if left < right:
            yield FileRange(file, begin + left, right - left)
        start -= length


def _read(file: WeightFile, start: int, buffer: memoryview) -> None:
    file.seek(start)
    while buffer:  # the system may return less than is requested
        count = file.readinto(buffer)
        if not count:
            raise OSError(f"{file.name!s} ends inside a tensor")
        buffer = buffer[count:]


ReadTensor = Callable[[FileTensor], torch.Tensor | None]
_read_tensor: ContextVar[ReadTensor | None] = ContextVar("read_tensor", default=None)


@contextmanager
def tensors_read_by(read: ReadTensor) -> Iterator[None]:
    """Let a function read the tensors that ``from_pretrained`` loads from files inside this context.

    Args:
        read: returns a tensor of the shape and type that the tensor in the file has. If it returns None, the tensor is
            read as usual.
    """
    patch_function(modeling_utils, "safe_open", _open)
    patch_function(modeling_utils, "load_state_dict", _load)
    token = _read_tensor.set(read)
    try:
        yield
    finally:
        _read_tensor.reset(token)


@contextmanager
def tensors_read_one_by_one() -> Iterator[None]:
    """Let transformers read one tensor at a time inside this context. By default it reads several ahead, in threads."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def tensors_in(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of a safetensors file, as ``from_pretrained`` would read them."""
    with _open(safe_open, str(path), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is not a dictionary
            yield name, file.get_slice(name)[...]


def _open(original: Callable[..., safe_open], path: str, *args: object, **kwargs: object) -> safe_open | _OpenFile:
    read = _read_tensor.get()
    if read is None:
        return original(path, *args, **kwargs)
    if "backend" in kwargs:  # mapped files count as memory of the process, although others share their pages
        kwargs["backend"] = "pread"
    return _OpenFile(path, original(path, *args, **kwargs), read)  # safetensors checks the file


def _load(
    original: Callable[..., dict[str, torch.Tensor]], path: str, *args: object, **kwargs: object
) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, as ``from_pretrained`` loads ``pytorch_model.bin``."""
    tensors, read = original(path, *args, **kwargs), _read_tensor.get()  # torch checks the file and maps it
    if read is None or not is_zipfile(path):
        return tensors
    with FakeTensorMode():
        places = torch.load(path, weights_only=True)
    file = WeightFile(path)
    for name, tensor in tensors.items():
        begin = places[name].untyped_storage()._checkpoint_offset
        if type(tensor) is torch.Tensor and tensor.is_contiguous() and tensor.nbytes >= SMALLEST and begin is not None:
            begin += tensor.storage_offset() * tensor.itemsize
            where = FileRange(file, begin, tensor.nbytes)
            divided = read(FileTensor(tensor.shape, tensor.dtype, (where,)))
            tensors[name] = tensor if divided is None else divided
    return tensors


class _Entry(TypedDict):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


class _OpenFile:
    """A file that transformers has opened with ``safe_open``."""

    def __init__(self, path: str, opened: safe_open, read: ReadTensor) -> None:
        self._file, self._opened, self._read = WeightFile(path), opened, read
        size = int.from_bytes(self._file.read(8), "little")
        self._header: dict[str, _Entry] = json.loads(self._file.read(size))
        self._begin = 8 + size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def __enter__(self) -> _OpenFile:
        self._opened.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.__exit__(*error)

    def get_slice(self, name: str) -> Any:
        """Return an object that reads the tensor when it is indexed with ``...``, as transformers does."""
        original = self._opened.get_slice(name)
        entry = self._header[name]
        (begin, end), shape = entry["data_offsets"], torch.Size(entry["shape"])
        dtype = modeling_utils.str_to_torch_dtype.get(entry["dtype"])
        if dtype is None or shape.numel() * dtype.itemsize != end - begin or end - begin < SMALLEST:
            return original
        where = FileRange(self._file, self._begin + begin, end - begin)
        return _Slice(original, FileTensor(shape, dtype, (where,)), self._read)


class _Slice:
    """A tensor in a file, as ``get_slice`` of safetensors returns it."""

    def __init__(self, original: Any, tensor: FileTensor, read: ReadTensor) -> None:
        self._original, self._tensor, self._read = original, tensor, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __getitem__(self, index: object) -> torch.Tensor:
        tensor = self._read(self._tensor) if index is Ellipsis else None
        return self._original[index] if tensor is None else tensor


SHARD_BYTES = 5 * 10**9
"""Maximum bytes of a file with weights. A larger tensor has a file to itself."""


def save_model(
    model: PreTrainedModel, folder: Path, files: TensorFiles, weights: dict[str, torch.Tensor] | None = None
) -> None:
    """Write weights and configuration as ``from_pretrained`` reads them.

    Args:
        files: take the tensors that transformers computes to undo its changes of a format, such as stacked experts.
        weights: weights by name. They replace the model's own.
    """
    with quiet_transformers(), files.results_stored():
        model.save_pretrained(folder, state_dict=weights, max_shard_size=SHARD_BYTES)
    mark_folder(folder)


def save_weights(weights: Mapping[str, torch.Tensor], folder: Path, metadata: dict[str, str] | None = None) -> None:
    """Write the weights of a model that is not from transformers, under the same file names."""
    split = split_torch_state_dict_into_shards(
        dict(weights),
        filename_pattern=SAFE_WEIGHTS_NAME.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=SHARD_BYTES,
    )
    for file, names in split.filename_to_tensors.items():
        save_file({name: weights[name] for name in names}, folder / file, metadata=metadata)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / SAFE_WEIGHTS_INDEX_NAME, index)
