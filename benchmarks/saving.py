"""``benchmarks saving``: how fast a state is durably on the disk, compared with the disk itself and other savers.

The state belongs to a BERT in training: fp32 weights and both moments of AdamW. All savers write the same tensors to
the same folder, and all flush files and folder to the disk. They take turns, so that a busy moment of the machine or
of the disk hits all of them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from transformers import BertConfig, BertModel

from benchmarks.contest import Advance, Answer, Contest, Flag, asks, bars, mean_sd, progress, table, verdict
from rapidformer_templates.commands.bench.cli import spread
from rapidformer_templates.engines.shards import Shard, ShardKind, whole_shard
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.checkpoint.async_save import AsyncSaver
from rapidformer_templates.run.checkpoint.tensor_file import host_memory
from rapidformer_templates.system.files import sync, unbuffered, write_at
from rapidformer_templates.system.workers import Workers

DISK = "write + fsync"
OURS = "rapidformer_templates"
OURS_ASYNC = "rapidformer_templates --async-save"
PAST_CACHE = "write past the page cache + fsync"
SPEED_GOAL, STALL_GOAL = 0.85, 1.2
ALONE = Workers(0, 0, 1, torch.device("cpu"))


class State:
    """Weights and AdamW moments of a BERT, with the interface of an engine that a checkpoint needs.

    Attributes:
        tensors: Tensors by kind and name.
        bytes: Bytes of all tensors.
        flat: The same bytes as one contiguous tensor, padded to the end of the last page.
        spare: A tensor of the same size whose memory has already been touched.
    """

    def __init__(self, gigabytes: float) -> None:
        self.model = bert(gigabytes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.tensors = {
            "weights": {name: parameter.detach() for name, parameter in self.model.named_parameters()},
            "optimizer": {
                f"{name}/{key}": value
                for name, parameter in self.model.named_parameters()
                for key, value in self.optimizer.state[parameter].items()
            },
        }
        every = [tensor for kind in self.tensors.values() for tensor in kind.values()]
        self.bytes = sum(tensor.nbytes for tensor in every)
        self.flat, self.spare = (host_memory(self.bytes, pinned=False).zero_() for _ in range(2))
        self.flat[: self.bytes] = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in every])

    def shards(self, kind: ShardKind) -> Iterator[Shard]:
        for name, tensor in self.tensors[kind].items():
            yield whole_shard(name, tensor)

    def state(self) -> dict[str, Any]:
        return {"optimizer": "AdamW"}


def bert(gigabytes: float) -> nn.Module:
    """Build a BERT whose fp32 weights and two moments take about this size. From 0.6 GB it is as wide as BERT-base."""
    width, vocabulary = (768, 30522) if gigabytes >= 0.6 else (64, 1000)
    block = 12 * width * width
    layers = max(round((gigabytes * 1e9 / 12 - vocabulary * width) / block), 1)
    sizes: dict[str, Any] = {"hidden_size": width, "vocab_size": vocabulary, "num_hidden_layers": layers}
    return BertModel(BertConfig(**sizes, num_attention_heads=width // 64, intermediate_size=4 * width))


class Stalls:
    """Timings of background saves: how long a step waits for a save, and how long a memory copy of its bytes takes.

    Attributes:
        first: Seconds of the first save in the process, which also allocates memory.
    """

    def __init__(self, state: State, saver: AsyncSaver) -> None:
        self.state, self.saver = state, saver
        self.first = 0.0
        self.steps: list[float] = []
        self.copies: list[float] = []

    def save(self, path: Path) -> None:
        began = time.perf_counter()
        self.saver.start(1, self.state, {}, None)
        self.steps.append(time.perf_counter() - began)
        self.saver.wait()

    def copy(self) -> None:
        began = time.perf_counter()
        self.state.spare.copy_(self.state.flat)
        self.copies.append(time.perf_counter() - began)

    def ratios(self) -> list[float]:
        return [step / copy for step, copy in zip(self.steps, self.copies, strict=True)]


def measure_saving(
    gigabytes: float, repeats: int, folder: Path, advance: Advance = lambda text: None
) -> tuple[Contest, Stalls]:
    """Save in every way, ``repeats`` times, and empty the folder again. The contest's work is the state's bytes."""
    state = State(gigabytes)
    with closing(AsyncSaver(folder / OURS_ASYNC, ALONE, keep=1)) as saver:
        stalls = Stalls(state, saver)
        ways: dict[str, Callable[[Path], None]] = {
            DISK: partial(_write, state),
            PAST_CACHE: partial(_write_unbuffered, state),
            OURS: partial(_save, state),
            OURS_ASYNC: stalls.save,
            "torch.save": partial(_torch_save, state),
            "torch.distributed.checkpoint": partial(_distributed_checkpoint, state),
            "safetensors": partial(_safetensors, state),
        }
        _timed(folder / OURS_ASYNC, stalls.save, state)  # allocates the memory of its copies
        stalls.first = stalls.steps.pop()

        def turn(name: str) -> float:
            if name == OURS_ASYNC:
                stalls.copy()
            seconds = _timed(folder / name, ways[name], state)
            advance(name)
            return seconds

        contest = Contest({name: partial(turn, name) for name in ways}, work=state.bytes)
        contest.run(repeats)
    return contest, stalls


def _timed(path: Path, way: Callable[[Path], None], state: State) -> float:
    """Return the seconds of a save, including the flush of its folder. Then check and delete the written files."""
    path.mkdir(parents=True)
    os.sync()
    began = time.perf_counter()
    way(path)
    sync(path)
    seconds = time.perf_counter() - began
    for whole in checkpoint.candidates(path):
        problem = checkpoint.problem_of(whole)
        if problem:
            raise RapidformerError(f"{path.name} wrote an incomplete checkpoint: {problem}")
    written = sum(file.stat().st_size for file in path.rglob("*"))
    if written < state.bytes:
        raise RapidformerError(f"{path.name} wrote {written} of {state.bytes} bytes, so it does different work")
    shutil.rmtree(path)
    return seconds


def _write(state: State, path: Path) -> None:
    data = state.flat.numpy().data[: state.bytes]
    with (path / "file").open("wb", buffering=0) as file:
        while data:
            data = data[file.write(data) :]
        os.fsync(file.fileno())


def _write_unbuffered(state: State, path: Path) -> None:
    with unbuffered(path / "file") as descriptor:
        write_at(descriptor, state.flat.numpy().data, 0)


def _save(state: State, path: Path) -> None:
    checkpoint.save(path, 1, state, {}, ALONE)


def _torch_save(state: State, path: Path) -> None:
    torch.save({"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}, path / "state.pt")
    sync(path / "state.pt")


def _distributed_checkpoint(state: State, path: Path) -> None:
    """Save as in torch's tutorial. The writer flushes its files itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save_distributed(dict(state.tensors), storage_writer=FileSystemWriter(path, sync_files=True), no_dist=True)


def _safetensors(state: State, path: Path) -> None:
    for kind, tensors in state.tensors.items():
        save_file(tensors, path / f"{kind}.safetensors")
        sync(path / f"{kind}.safetensors")


@asks(
    Flag("gigabytes", 1.3, "size of the state"),
    Flag("repeats", 8, "saves per way"),
    Flag("folder", None, "folder on the disk to measure (default: temporary files)"),
)
def answer(options: argparse.Namespace) -> Answer:
    with ExitStack() as stack:
        if options.folder:
            options.folder.mkdir(parents=True, exist_ok=True)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rapidformer-saving-", dir=options.folder))
        advance = stack.enter_context(progress("saves", options.repeats * 7))
        contest, stalls = measure_saving(options.gigabytes, options.repeats, Path(folder), advance)
    ratios = {name: contest.ratios(name, DISK) for name in contest.ways}
    speeds = {name: [rate / 1e9 for rate in contest.rates(name)] for name in contest.ways}
    columns: dict[str, Callable[[str], str]] = {
        "how": str,
        "GB/s": lambda name: mean_sd(speeds[name]),
        "lowest": lambda name: f"{min(speeds[name]):.2f}",
        "highest": lambda name: f"{max(speeds[name]):.2f}",
        "over the disk's own": lambda name: mean_sd(ratios[name]),
    }
    return Answer(
        {
            "bytes": contest.work,
            "seconds": contest.seconds,
            "ratios": ratios,
            "stall_seconds": stalls.steps,
            "stall_seconds_first": stalls.first,
            "copy_seconds": stalls.copies,
        },
        table(f"{contest.work / 1e9:.2f} GB on the disk, mean ± standard deviation", contest.ways, columns),
        _goals(statistics.median(ratios[OURS]), stalls),
        bars("GB/s, durable", speeds, ours=(OURS, OURS_ASYNC)),
    )


def _goals(speed: float, stalls: Stalls) -> list[str]:
    ratios = stalls.ratios()
    stall = statistics.median(ratios)
    return [
        f"{speed:.2f} × the disk's own write + fsync (median); goal {SPEED_GOAL} ×: {verdict(speed >= SPEED_GOAL)}",
        f"--async-save: a step waits {statistics.median(stalls.steps) * 1000:.0f} ms, {stall:.2f} ± "
        f"{spread(ratios):.2f} × a copy of the same bytes (median); goal {STALL_GOAL} ×: "
        f"{verdict(stall <= STALL_GOAL)}",
        f"  the first save of a process also allocates memory: {stalls.first * 1000:.0f} ms",
    ]
