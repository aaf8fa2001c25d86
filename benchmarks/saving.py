"""``bench saving``: how fast a state is durably on the disk, beside the disk itself and other ways to save.

The state is that of a BERT in training: weights and both moments of AdamW, fp32. All write the same tensors to
the same folder, and all flush files and folder to the disk. They take turns, so that a busy moment of the
machine or of the disk hits all of them.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from transformers import BertConfig, BertModel

from rapidformer_templates.commands.bench.output import Advance, progress, put_out, spread
from rapidformer_templates.engines.contract import Piece
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.run.checkpoint import check as checkpoint_check
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.checkpoint.async_save import AsyncSaver
from rapidformer_templates.run.checkpoint.tensor_file import host_memory
from rapidformer_templates.system.files import sync, unbuffered, write_at
from rapidformer_templates.system.workers import Workers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DISK = "write + fsync"
OURS = "rapidformer_templates"
OURS_ASYNC = "rapidformer_templates --async-save"
PAST_CACHE = "write past the page cache + fsync"
SPEED_GOAL, STALL_GOAL = 0.85, 1.2


class State:
    """Weights and AdamW's moments of a BERT; a checkpoint takes it for an engine.

    Attributes:
        tensors: by kind and name.
        bytes: of all tensors.
        flat: these bytes in one piece, and up to the end of the last page.
        spare: as much memory again, in use already.
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

    def pieces(self, kind: str) -> Iterator[Piece]:
        for name, tensor in self.tensors[kind].items():
            yield Piece(name, tensor, tuple(tensor.shape), (0,) * tensor.ndim)

    def state(self) -> dict[str, Any]:
        return {"optimizer": "AdamW"}


def bert(gigabytes: float) -> nn.Module:
    """A BERT of which weights and two moments take about so much, in fp32; from 0.6 on it is as wide as BERT-base."""
    width, vocabulary = (768, 30522) if gigabytes >= 0.6 else (64, 1000)
    block = 12 * width * width
    layers = max(round((gigabytes * 1e9 / 12 - vocabulary * width) / block), 1)
    return BertModel(
        BertConfig(
            hidden_size=width,
            vocab_size=vocabulary,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            intermediate_size=4 * width,
        )
    )


@dataclass
class Row:
    """A way to save.

    Attributes:
        seconds: until all was on the disk, by repeat.
    """

    name: str
    seconds: list[float] = field(default_factory=list)

    def speeds(self, size: int) -> list[float]:
        """GB/s by repeat."""
        return [size / 1e9 / seconds for seconds in self.seconds]


@dataclass
class Stalls:
    """Seconds that a step waits for a save in the background, and that the same bytes take from memory to memory."""

    first: float = 0.0
    steps: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [step / copy for step, copy in zip(self.steps, self.copies, strict=True)]


def measure_saving(
    gigabytes: float, repeats: int, folder: Path, advance: Advance = lambda text: None
) -> tuple[int, list[Row], Stalls]:
    """Save in every way, ``repeats`` times in changing order; (bytes of the state, rows, stalls).

    Args:
        gigabytes: size of the state, about.
        folder: on the disk in question; nothing is left in it.
        advance: told of each save.

    Raises:
        RapidformerError: what was written is not whole.
    """
    state, stalls, shuffle = State(gigabytes), Stalls(), random.Random(0)
    with closing(AsyncSaver(folder / OURS_ASYNC, _alone(), keep=1)) as saver:
        ways: dict[str, Callable[[Path], None]] = {
            DISK: lambda path: _write(path, state),
            PAST_CACHE: lambda path: _write_unbuffered(path, state),
            OURS: lambda path: _save(path, state),
            OURS_ASYNC: lambda path: _save_async(path, state, saver, stalls),
            "torch.save": lambda path: _torch_save(path, state),
            "torch.distributed.checkpoint": lambda path: _distributed_checkpoint(path, state),
            "safetensors": lambda path: _safetensors(path, state),
        }
        rows = {name: Row(name) for name in ways}
        _timed(folder / OURS_ASYNC, ways[OURS_ASYNC], state)  # gets the memory of its copies
        stalls.first = stalls.steps.pop()
        for _ in range(repeats):
            for name in shuffle.sample(list(ways), len(ways)):
                if name == OURS_ASYNC:
                    stalls.copies.append(_copy_seconds(state))
                rows[name].seconds.append(_timed(folder / name, ways[name], state))
                advance(name)
    return state.bytes, list(rows.values()), stalls


def _timed(path: Path, way: Callable[[Path], None], state: State) -> float:
    """Seconds of a save, the flush of its folder included; what was written is checked and deleted afterwards."""
    path.mkdir(parents=True)
    os.sync()
    began = time.perf_counter()
    way(path)
    sync(path)
    seconds = time.perf_counter() - began
    for whole in checkpoint.candidates(path):
        problem = checkpoint_check.problem_of(whole)
        if problem:
            raise RapidformerError(f"{path.name} wrote a checkpoint that is not whole: {problem}")
    written = sum(file.stat().st_size for file in path.rglob("*"))
    if written < state.bytes:
        raise RapidformerError(f"{path.name} wrote {written} of {state.bytes} bytes: that is not the same work")
    shutil.rmtree(path)
    return seconds


def _write(path: Path, state: State) -> None:
    data = state.flat.numpy().data[: state.bytes]
    with (path / "file").open("wb", buffering=0) as file:
        while data:
            data = data[file.write(data) :]
        os.fsync(file.fileno())


def _write_unbuffered(path: Path, state: State) -> None:
    with unbuffered(path / "file") as descriptor:
        write_at(descriptor, state.flat.numpy().data, 0)


def _save(path: Path, state: State) -> None:
    checkpoint.save(path, 1, state, {}, _alone())


def _copy_seconds(state: State) -> float:
    began = time.perf_counter()
    state.spare.copy_(state.flat)
    return time.perf_counter() - began


def _save_async(path: Path, state: State, saver: AsyncSaver, stalls: Stalls) -> None:
    began = time.perf_counter()
    saver.start(1, state, {}, None)
    stalls.steps.append(time.perf_counter() - began)
    saver.wait()


def _torch_save(path: Path, state: State) -> None:
    torch.save({"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}, path / "state.pt")
    sync(path / "state.pt")


def _distributed_checkpoint(path: Path, state: State) -> None:
    """As its tutorial does; it flushes its files by itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save_distributed(dict(state.tensors), storage_writer=FileSystemWriter(path, sync_files=True), no_dist=True)


def _safetensors(path: Path, state: State) -> None:
    for kind, tensors in state.tensors.items():
        save_file(tensors, path / f"{kind}.safetensors")
        sync(path / f"{kind}.safetensors")


def _alone() -> Workers:
    return Workers(0, 0, 1, torch.device("cpu"))


def main(options: argparse.Namespace) -> int:
    """Measure, print and write; the exit status."""
    with ExitStack() as stack:
        where = options.folder
        if where:
            where.mkdir(parents=True, exist_ok=True)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rapidformer-saving-", dir=where)))
        advance = stack.enter_context(progress("saves", options.repeats * 7))
        size, rows, stalls = measure_saving(options.gigabytes, options.repeats, folder, advance)
    result = {
        "bytes": size,
        "seconds": {row.name: row.seconds for row in rows},
        "ratios": {row.name: ratios(rows, row.name) for row in rows},
        "stall_seconds": stalls.steps,
        "stall_seconds_first": stalls.first,
        "copy_seconds": stalls.copies,
    }
    put_out(options, "saving", result, _table(size, rows), _notes(rows, stalls), lambda axes: _draw(axes, size, rows))
    return 0


def ratios(rows: list[Row], name: str) -> list[float]:
    """A way's speed over that of the disk, repeat by repeat."""
    seconds = {row.name: row.seconds for row in rows}
    return [disk / own for disk, own in zip(seconds[DISK], seconds[name], strict=True)]


def _table(size: int, rows: list[Row]) -> Table:
    table = Table(title=f"{size / 1e9:.2f} GB on the disk, mean ± standard deviation")
    table.add_column("how")
    for heading in ("GB/s", "least", "most", "over the disk's own"):
        table.add_column(heading, justify="right")
    for row in rows:
        speeds, own = row.speeds(size), ratios(rows, row.name)
        table.add_row(
            row.name,
            f"{statistics.mean(speeds):.2f} ± {spread(speeds):.2f}",
            f"{min(speeds):.2f}",
            f"{max(speeds):.2f}",
            f"{statistics.mean(own):.2f} ± {spread(own):.2f}",
        )
    return table


def _notes(rows: list[Row], stalls: Stalls) -> list[str]:
    speed, stall = statistics.median(ratios(rows, OURS)), statistics.median(stalls.ratios)
    return [
        f"{speed:.2f} × the disk's own write + fsync (median); goal {SPEED_GOAL} ×: {_verdict(speed >= SPEED_GOAL)}",
        f"--async-save: a step waits {statistics.median(stalls.steps) * 1000:.0f} ms, {stall:.2f} ± "
        f"{spread(stalls.ratios):.2f} × a copy of the same bytes (median); goal {STALL_GOAL} ×: "
        f"{_verdict(stall <= STALL_GOAL)}",
        f"  the first save of a process has to get its memory: {stalls.first * 1000:.0f} ms",
    ]


def _verdict(reached: bool) -> str:
    return "reached" if reached else "missed"


def _draw(axes: Axes, size: int, rows: list[Row]) -> None:
    speeds = [row.speeds(size) for row in rows]
    colours = ["tab:orange" if row.name in (OURS, OURS_ASYNC) else "tab:blue" for row in rows]
    means = [statistics.mean(values) for values in speeds]
    axes.barh([row.name for row in rows], means, xerr=[spread(values) for values in speeds], color=colours)
    axes.set_xlabel("GB/s, durable")
    axes.invert_yaxis()
