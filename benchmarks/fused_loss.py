"""``bench fused-loss``: peak of memory and time of a step with and without the logits of all tokens.

One process trains two copies of a small GPT-2 with its whole vocabulary, in turns and each round in
another order. The peak is that of the tensors alive, taken in steps of their own because watching
takes time, and that of the process as the system counts it.
"""

from __future__ import annotations

import argparse
import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer_templates.commands.bench.output import Advance, progress, put_out
from rapidformer_templates.switches.fused_loss.memory import saved_bytes
from rapidformer_templates.switches.fused_loss.transform import fuse_loss
from rapidformer_templates.system.host_memory import give_freed_memory_back

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEED, WARMUP = 0, 1
PLAIN, FUSED = "whole logits", "fused"


@dataclass(frozen=True)
class Row:
    """One way to take the loss.

    Attributes:
        name: of the way.
        peak_mb: of the tensors alive in a step, in MB (10^6 bytes); on a GPU of its allocator.
        rss_mb: by how much the process grew in a step at most; None where the system does not say.
        step_ms: median of the turns.
        loss: of the last step.
    """

    name: str
    peak_mb: float
    rss_mb: float | None
    step_ms: float
    loss: float


class LivePeak(TorchDispatchMode):
    """The most bytes that tensors made inside it held at a time.

    Attributes:
        now, peak: bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if _is_tensor(leaf) and leaf.untyped_storage().data_ptr() not in known:
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, size)

    def _gone(self, size: int) -> None:
        self.now -= size


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


class Contender:
    """A model whose loss is taken in one way."""

    def __init__(self, name: str, sizes: dict[str, Any], rows: int, half: bool, device: torch.device) -> None:
        torch.manual_seed(SEED)
        given: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model: Any = GPT2LMHeadModel(GPT2Config(**given, **sizes, bos_token_id=0, eos_token_id=0))
        model.loss_type = "ForCausalLM"  # or transformers warns that it guesses so
        model.to(device).train()
        building: Any = SimpleNamespace(workers=SimpleNamespace(device=device))
        self.name = name
        self.model = fuse_loss(model, building) if name == FUSED else model
        self.half = half
        self.device = device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randint(0, sizes["vocab_size"], (rows, sizes["n_positions"]), device=device)
        self.times: list[float] = []
        self.loss = 0.0

    def step(self) -> None:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.half):
            loss = self.model(input_ids=self.batch, labels=self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = float(loss.detach())

    def timed(self) -> None:
        began = time.perf_counter()
        self.step()
        self.times.append(time.perf_counter() - began)

    def peak(self) -> tuple[int, int | None]:
        """(peak of the tensors made in a step, growth of the process) in bytes."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.step()
            return torch.cuda.max_memory_allocated() - before, None
        with LivePeak() as seen:
            self.step()
        return seen.peak, _growth(self.step)


def _growth(body: Callable[[], None]) -> int | None:
    """By how many bytes the resident memory of this process was larger at most than before; Linux alone tells."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak so far is the present size
        before = _status("VmRSS")
        body()
        return _status("VmHWM") - before
    except OSError:
        return None


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure(
    sizes: dict[str, Any],
    rows: int,
    rounds: int,
    half: bool,
    device: torch.device,
    advance: Advance = lambda text: None,
) -> list[Row]:
    """Both ways, in turns.

    Args:
        sizes: of the model: ``vocab_size``, ``n_positions``, ``n_embd``, ``n_layer``, ``n_head``.
        rows: samples of a batch, each of ``n_positions`` tokens.
        rounds: timed steps of each way.
        half: bf16 autocast.
        device: where.
        advance: told of each round.
    """
    contenders = [Contender(name, sizes, rows, half, device) for name in (PLAIN, FUSED)]
    for contender in contenders:
        for _ in range(WARMUP):
            contender.step()
    peaks = [contender.peak() for contender in contenders]
    for number in range(rounds):
        for contender in contenders if number % 2 else reversed(contenders):
            contender.timed()
        advance(f"round {number + 1}")
    return [
        Row(
            contender.name,
            round(live / 1e6, 1),
            None if grown is None else round(grown / 1e6, 1),
            round(statistics.median(contender.times) * 1000, 2),
            contender.loss,
        )
        for contender, (live, grown) in zip(contenders, peaks, strict=True)
    ]


def main(options: argparse.Namespace) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        give_freed_memory_back()  # else the process keeps what the other way has freed
    sizes = {"vocab_size": options.vocabulary, "n_positions": options.length, "n_embd": options.hidden}
    sizes |= {"n_layer": options.layers, "n_head": max(1, options.hidden // 64)}
    with progress("fused-loss", options.rounds) as advance:
        rows = measure(sizes, options.rows, options.rounds, options.bf16, device, advance)
    tokens = options.rows * options.length
    predicted = saved_bytes(tokens, options.vocabulary, half=options.bf16, device=device.type)
    result = {"sizes": sizes, "tokens": tokens, "bf16": options.bf16, "device": device.type}
    result["predicted_saving_mb"] = round(predicted / 1e6, 1)
    notes = _notes(rows, predicted)
    table = _table(rows, f"{tokens:,} tokens, {options.vocabulary:,} words, hidden {options.hidden}")
    put_out(options, "fused-loss", {**result, "ways": [asdict(row) for row in rows]}, table, notes, _draw(rows))
    return 0


def _notes(rows: list[Row], predicted: int) -> list[str]:
    plain, fused = rows
    return [
        f"peak of tensors: {fused.peak_mb / plain.peak_mb:.2f} × (the planner expects {predicted / 1e6:,.0f} MB less)",
        f"time of a step: {fused.step_ms / plain.step_ms:.2f} ×",
        f"loss: {fused.loss:.6f} and {plain.loss:.6f}",
    ]


def _table(rows: list[Row], title: str) -> Table:
    table = Table(title=f"fused loss: {title}")
    table.add_column("loss")
    for heading in ("peak of tensors, MB", "process, MB", "step, ms"):
        table.add_column(heading, justify="right")
    for row in rows:
        grown = "" if row.rss_mb is None else f"{row.rss_mb:,.0f}"
        table.add_row(row.name, f"{row.peak_mb:,.0f}", grown, f"{row.step_ms:,.0f}")
    return table


def _draw(rows: list[Row]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        bars = axes.barh([row.name for row in rows], [row.peak_mb for row in rows])
        axes.bar_label(bars, [f" {row.step_ms:,.0f} ms a step" for row in rows])
        axes.set_xlabel("peak of tensors alive in a step, MB")
        axes.margins(x=0.3)

    return draw
