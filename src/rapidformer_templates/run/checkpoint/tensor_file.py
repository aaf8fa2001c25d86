"""Writes safetensors files fast and durably: writes bypass the page cache, and the CRC-32 is computed on the way.

The format has eight bytes with the length of the header, the header, and the tensors one after another. The header is
JSON with type, shape and position of each tensor, padded with spaces to a multiple of eight. Tensors are sorted by
the size of their elements, so that each is aligned for its type.

:func:`write` needs a few blocks of memory in addition to the tensors, which may be on any device.
:func:`copy_to_memory` builds the file in memory. :func:`write_copy` can then write it while the tensors change.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from rapidformer_templates.system import accelerator
from rapidformer_templates.system.files import PAGE, Seal, unbuffered, write_at

BLOCK = 16 << 20  # bytes per write
IN_FLIGHT = 3  # number of blocks that are written concurrently
COPY = 8 << 20  # bytes that a thread copies at a time
COPY_THREADS = 4  # number of threads: more do not make memory faster
NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
"""Names of the types in the format."""


def write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> Seal:
    """Write a file and flush it to disk.

    Raises:
        OSError: it cannot be written.
        ValueError: the format does not support a type.
    """
    sources, size = _sources(tensors, metadata)
    return _write_blocks(path, size, _blocks(sources))


@dataclass(frozen=True)
class Copy:
    """A file in memory.

    Attributes:
        memory: host memory, a multiple of :data:`PAGE` bytes.
        size: size of the file in bytes.
    """

    memory: torch.Tensor
    size: int


def copy_to_memory(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None, memory: torch.Tensor | None = None
) -> Copy:
    """Build the file in memory.

    Copies from a GPU to pinned memory are asynchronous. Synchronize before anything changes the tensors or reads the
    copy.

    Args:
        memory: memory of an earlier copy. It is used again if it is large enough.

    Raises:
        OSError, MemoryError: there is not enough memory.
        ValueError: the format does not support a type.
    """
    sources, size = _sources(tensors, metadata)
    if memory is None or len(memory) < size:
        memory = host_memory(size, pinned=any(accelerator.is_asynchronous(source.device) for source in sources))

    def copy_batch(batch: Batch) -> None:
        for target, source in batch:
            np.copyto(target, source)  # releases Python's lock

    # Not torch's threads: they wait for each other after each tensor, for a long time if other jobs use the cores.
    with ThreadPoolExecutor(min(torch.get_num_threads(), COPY_THREADS)) as pool:
        deque(pool.map(copy_batch, _batches(memory, sources)), maxlen=0)
    return Copy(memory, size)


Bytes = npt.NDArray[np.uint8]
Batch = list[tuple[Bytes, Bytes]]


def _batches(memory: torch.Tensor, sources: list[torch.Tensor]) -> Iterator[Batch]:
    """Yield (target, source) pairs for host copies, one batch per thread. Copies from a GPU are started here."""
    batch: Batch = []
    whole, offset, size = memory.numpy(), 0, 0
    for source in sources:
        begin, offset = offset, offset + len(source)
        if source.device.type != "cpu":
            memory[begin:offset].copy_(source, non_blocking=True)
            continue
        target, values = whole[begin:offset], source.numpy()
        for at in range(0, len(values), COPY):
            part = values[at : at + COPY]
            batch.append((target[at : at + COPY], part))
            size += len(part)
            if size >= COPY:
                yield batch
                batch, size = [], 0
    yield batch


def write_copy(path: Path, copy: Copy) -> Seal:
    """Write the result of :func:`copy_to_memory`, and flush it to disk. It uses no torch, and may run in a thread.

    Raises:
        OSError: it cannot be written.
    """
    view = copy.memory.numpy().data
    blocks = (view[offset : offset + BLOCK] for offset in range(0, copy.size, BLOCK))
    return _write_blocks(path, copy.size, blocks)


def _sources(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> tuple[list[torch.Tensor], int]:
    """Return (the bytes of the header and of each tensor in the order of the file, size of the file in bytes)."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    by_itemsize = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    end = 0
    for name, tensor in by_itemsize:
        if tensor.dtype not in NAMES:
            raise ValueError(f"{name} is {tensor.dtype}, which safetensors cannot hold")
        begin, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = bytearray(len(text).to_bytes(8, "little") + text)
    octets = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for _, tensor in by_itemsize]
    return [torch.frombuffer(start, dtype=torch.uint8), *octets], len(start) + end


def host_memory(size: int, *, pinned: bool) -> torch.Tensor:
    """Allocate page-aligned memory, which writes that bypass the page cache need."""
    size = max(-(-size // PAGE), 1) * PAGE
    if pinned:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:  # raised by CUDA
            raise MemoryError(f"({size / 1e6:.0f} MB of page-locked memory: {error})") from error
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):
        pages.madvise(mmap.MADV_DONTFORK)  # loader processes would keep it, and need a second copy
    return torch.frombuffer(pages, dtype=torch.uint8)


def _blocks(sources: list[torch.Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of the file in full blocks. A block stays valid until IN_FLIGHT more were requested."""
    memory = [host_memory(BLOCK, pinned=False) for _ in range(IN_FLIGHT)]
    number, filled = 0, 0
    for source in sources:
        fill_level = 0
        while fill_level < len(source):
            count = min(len(source) - fill_level, BLOCK - filled)
            _copy(memory[number][filled : filled + count], source[fill_level : fill_level + count])
            fill_level, filled = fill_level + count, filled + count
            if filled == BLOCK:
                yield memory[number].numpy().data
                number, filled = (number + 1) % IN_FLIGHT, 0
    if filled:
        yield memory[number].numpy().data


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if source.device.type == "cpu":
        np.copyto(target.numpy(), source.numpy())  # single-threaded: the other cores write and compute the CRC
    else:
        target.copy_(source)


def _write_blocks(path: Path, size: int, blocks: Iterator[memoryview]) -> Seal:
    """Write the blocks, truncate and flush the file. A block must stay valid until IN_FLIGHT later ones arrive.

    Only the pages that the file needs are written of the last block, so that a small file needs little free space.
    """
    crc, offset = 0, 0
    pending: deque[Future[None]] = deque()
    with unbuffered(path) as descriptor, ThreadPoolExecutor(IN_FLIGHT) as pool:
        for block in blocks:
            pages = -(-(size - offset) // PAGE) * PAGE
            pending.append(pool.submit(write_at, descriptor, block[:pages], offset))
            # Runs during the write: neither the CRC nor a write holds Python's lock.
            crc = zlib.crc32(block[: size - offset], crc)
            offset += len(block)
            if len(pending) == IN_FLIGHT:
                pending.popleft().result()
        for written in pending:
            written.result()
        os.truncate(descriptor, size)
    return {"bytes": size, "crc32": crc}
