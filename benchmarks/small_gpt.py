"""The effect of a switch on a small model that reads real text: memory, loss and time of each way to train it.

The text is the docstrings of Python's own library, as bytes. Each way trains a separate copy from the same start on the
same batches, through :func:`compose`. They take turns of a few steps, so that a busy moment of the machine hits all.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import io
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.contest import Advance, Answer, Columns, Contest, Flag, Row, asks, bars, progress, table
from benchmarks.models import gpt2, llama
from benchmarks.texts import docstrings, sources
from rapidformer_templates import compose
from rapidformer_templates.planning.environment import installed_packages
from rapidformer_templates.planning.optimizers import OPTIMIZERS
from rapidformer_templates.switches.auto_strategy.tracing import LiveStorages
from rapidformer_templates.switches.fp8.declaration import ADA
from rapidformer_templates.switches.fused_loss.transform import rows_at_once

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEED, LENGTH, ROWS, MICRO, TURN, HELD_OUT, LONGEST = 0, 128, 8, 4, 10, 64, 1024
"""Seed, tokens of a row, rows per step and per micro batch, steps per turn, held-out rows, bytes of a docstring."""

KINDS = {"weights": "parameter_bytes", "gradients": "gradient_bytes", "optimizer": "optimizer_state_bytes"}

Ways = Mapping[str, str]
"""Flags of each way."""

STEPS, LR = Flag("steps", 300, "of each way"), Flag("lr", 1e-3, "peak learning rate")
LAYERS, HIDDEN = Flag("layers", 4, "of the model"), Flag("hidden", 192, "width of the model")


def rows_of(text: bytes) -> torch.Tensor:
    """Return a text as rows of ``LENGTH`` bytes in a random order."""
    joined = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = joined[: len(joined) // LENGTH * LENGTH].view(-1, LENGTH)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED))]


def docstring_rows() -> torch.Tensor:
    pieces = docstrings(LONGEST)
    return rows_of(b"".join(bytes(pieces[i]["input_ids"].tolist()) for i in range(len(pieces))))


class Contender:
    """A model that is trained in one way.

    Args:
        rows: Rows of tokens. The first ones are held out.
        steps: Length of the run.

    Attributes:
        seconds: Seconds of each step: processor time on a CPU.
        skipped: Number of steps whose scaled gradient overflowed.
        loss: Loss of the last step.
    """

    def __init__(
        self, model: nn.Module, rows: torch.Tensor, steps: int, words: str, held_out: int | None = None
    ) -> None:
        own = f"--train-iters {steps} --lr-warmup-iters {max(1, steps // 10)} --micro-batch-size {MICRO}"
        own += f" --global-batch-size {ROWS} --optimizer {REFERENCE} --lr 1e-3 {words}"
        held_out = HELD_OUT if held_out is None else held_out
        with contextlib.redirect_stderr(io.StringIO()):
            self.session = compose(model, argv=own.split())
        self.held_out, self.text, self.steps = rows[:held_out], rows[held_out:], steps
        self.seconds: list[float] = []
        self.skipped, self.loss = 0, float("nan")
        self._clock = time.process_time if self.session.plan.device == "cpu" else time.perf_counter

    def turn(self, steps: int = TURN) -> None:
        for number in range(len(self.seconds), min(len(self.seconds) + steps, self.steps)):
            start = number * ROWS % max(1, len(self.text) - ROWS)
            batch = self.text[start : start + ROWS]
            began = self._clock()
            result = self.session.step([_batch(part) for part in batch.split(self.session.plan.sizes.micro_batch)])
            self.loss = float(result.loss)  # waits for the device
            self.seconds.append(self._clock() - began)
            self.skipped += bool(result.skipped)

    def peak(self) -> float:
        """Return the peak of the tensors that are made in a step, in MB."""
        if self.session.plan.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.turn(1)
            return (torch.cuda.max_memory_allocated() - before) / 1e6
        known = [tensor for kind in self.session._run.engine.local_tensors().values() for tensor in kind]
        with LiveStorages(known=[*known, self.text]) as seen:
            self.turn(1)
        return seen.peak / 1e6

    def row(self) -> Row:
        """Return the loss on held-out text in nats per token, the bytes by kind, and the time of a step."""
        summary = self.session.summary()
        (held, *_), count = summary["receipts"]["held_bytes_by_rank"], summary["parameters"]
        # The median: the first steps create the state, and a busy machine makes some steps slow.
        return {
            **{name: round(held[kind] / count, 4) for name, kind in KINDS.items()},
            "held_mb": sum(held[kind] for kind in KINDS.values()) / 1e6,
            "parameters": count,
            "trained": summary["trainable_parameters"],
            "loss": statistics.mean(self.session.evaluate(_batch(part)).loss for part in self.held_out.split(ROWS)),
            "skipped": self.skipped,
            "step_ms": statistics.median_high(self.seconds) * 1000,
            "load": summary["receipts"].get("expert_load"),
        }


def _build(kind: Callable[..., nn.Module], options: argparse.Namespace, words: int = 256) -> Callable[[], nn.Module]:
    return partial(kind, options.layers, options.hidden, max(1, options.hidden // 64), words, LENGTH)


def _batch(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": rows, "labels": rows}


def measure(
    build: Callable[[], nn.Module], rows: torch.Tensor, steps: int, ways: Ways, advance: Advance = lambda text: None
) -> list[Row]:
    """Train in each way, in turns. The others are compared with the first one."""
    contenders = {}
    for way, words in ways.items():
        torch.manual_seed(SEED)
        contenders[way] = Contender(build(), rows, steps, words)
    Contest({way: one.turn for way, one in contenders.items()}).run(-(-steps // TURN), advance=advance)
    found = [{"name": way, **one.row()} for way, one in contenders.items()]
    for row in found:
        row |= {f"{key}_ratio": row[key] / found[0][key] for key in ("loss", "step_ms")}
    return found


BYTES: Columns = {
    "weights B/param": "{weights:.2f}",
    "gradients": "{gradients:.2f}",
    "optimizer": "{optimizer:.2f}",
}
LOSS: Columns = {"held-out loss": "{loss:.4f}", "over the first": "{loss_ratio:.4f}"}
TIME: Columns = {"its time over the first": "{step_ms_ratio:.2f}"}


def _answer(options: argparse.Namespace, rows: list[Row], columns: Columns, notes: Sequence[str]) -> Answer:
    title = f"{options.question}: {options.steps} steps of a small model on real text"
    settings = {name: value for name, value in vars(options).items() if name not in ("json", "output", "question")}
    shown = table(title, rows, {"way": "{name}", **columns})
    return Answer({**settings, "ways": rows}, shown, list(notes), partial(_draw, rows))


def _draw(rows: Sequence[Row], axes: Axes) -> None:
    left = [0.0] * len(rows)
    for kind in KINDS:
        widths = [row[kind] for row in rows]
        axes.barh([row["name"] for row in rows], widths, left=left, label=kind)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("bytes per parameter")
    axes.legend()


def _goal(rows: Sequence[Row], largest: float, names: Sequence[str]) -> str:
    far = [row for row in rows if row["name"] in names and abs(row["loss_ratio"] - 1) > largest]
    missed = "missed by " + ", ".join("{name} {loss_ratio:.4f}".format_map(row) for row in far)
    return f"goal: loss within {largest:.1%} of {rows[0]['name']}: {missed if far else 'reached'}"


KEPT = "--keep-fp32-parameters"
PRECISIONS = {
    "fp32": "",
    "bf16 weights, fp32 masters": "--mixed-precision bf16",
    "bf16, gradients in bf16, too": "--mixed-precision bf16 --grad-accum-dtype bf16",
    "bf16, fp32 weights kept": f"--mixed-precision bf16 {KEPT}",
    "fp16 weights, fp32 masters": "--mixed-precision fp16",
    "fp16, fp32 weights kept": f"--mixed-precision fp16 {KEPT}",
}


@asks(STEPS, LR, LAYERS, HIDDEN, Flag("fp16", True, "also train in fp16, which is slow on most CPUs"))
def precision(options: argparse.Namespace) -> Answer:
    """Compare 16-bit weights with fp32 masters, with fp32 and with fp32 weights under autocast."""
    ways = {
        name: f"{words} --lr {options.lr}" for name, words in PRECISIONS.items() if options.fp16 or "fp16" not in name
    }
    with progress("precision", -(-options.steps // TURN)) as advance:
        rows = measure(_build(gpt2, options), docstring_rows(), options.steps, ways, advance)
    columns = {**BYTES, **LOSS, "skipped": "{skipped}", **TIME}
    return _answer(options, rows, columns, [_goal(rows, 0.005, list(ways))])


REFERENCE = "adamw_torch_fused"
CLOSE = ("adamw_bnb_8bit", "adamw_torch_8bit", "adamw_torch_4bit", "adamw_anyprecision")
"""Optimizers that compute AdamW's update with less state. They should reach the loss of AdamW."""
OTHERS = ("adafactor", "lamb", "muon")


def available() -> tuple[list[str], list[str]]:
    """Return the optimizers that can run here, and lines about those that cannot."""
    packages = installed_packages()
    needed = {name: OPTIMIZERS[name].package for name in (REFERENCE, *CLOSE, *OTHERS)}
    missing = {name: package for name, package in needed.items() if package and package.name not in packages}
    names = [name for name in needed if name not in missing]
    return names, [f"{name} is absent: {package.install}" for name, package in missing.items()]


@asks(STEPS, LR, Flag("layers", 2, "of the model"), Flag("hidden", 128, "width of the model"))
def optimizers(options: argparse.Namespace) -> Answer:
    """Compare state, loss and time of each optimizer."""
    names, absent = available()
    ways = {name: f"--optimizer {name} --lr {options.lr}" for name in names}
    with progress("optimizers", -(-options.steps // TURN)) as advance:
        rows = measure(_build(gpt2, options), docstring_rows(), options.steps, ways, advance)
    for row in rows:
        row["of_a_matrix"] = OPTIMIZERS[row["name"]].state_bytes
    columns = {"state B/param": "{optimizer:.2f}", "of a matrix": "{of_a_matrix:g}", **LOSS, **TIME}
    return _answer(options, rows, columns, [_goal(rows, 0.01, CLOSE), *absent])


WHOLE = "the whole model"
LORA = "--lora-rank 16"
ADAPTERS = {
    WHOLE: "",
    "LoRA": LORA,
    "DoRA": f"{LORA} --lora-variant dora",
    **{f"QLoRA, {base}": f"{LORA} --quantize-base {base}" for base in ("int8", "int4", "nf4")},
}


@asks(STEPS, LR, LAYERS, HIDDEN)
def adapters(options: argparse.Namespace) -> Answer:
    """Compare adapters with training the whole model. A llama that has read docstrings continues with source code."""
    can = {"QLoRA, nf4": importlib.util.find_spec("bitsandbytes") is not None}
    absent = [f"{name} is absent: pip install bitsandbytes" for name, there in can.items() if not there]
    torch.manual_seed(SEED)
    base = _build(llama, options)()
    with progress("adapters", 1 + -(-options.steps // TURN)) as advance:
        Contender(base, docstring_rows(), options.steps, f"--lr {options.lr}").turn(options.steps)
        advance("a llama that has read docstrings")
        rates = {name: options.lr if name == WHOLE else 5 * options.lr for name in ADAPTERS}
        ways = {name: f"{words} --lr {rates[name]}" for name, words in ADAPTERS.items() if can.get(name, True)}
        text = rows_of(sources(200_000))
        rows = measure(partial(copy.deepcopy, base.cpu()), text, options.steps, ways, advance)
    columns = {"trained": "{trained:,}", **BYTES, "together MB": "{held_mb:.1f}", **LOSS, **TIME}
    return _answer(options, rows, columns, absent)


PLAIN, FUSED = "whole logits", "fused"


@asks(
    Flag("vocabulary", 50257, "words"),
    Flag("steps", 7, "timed steps per way"),
    Flag("layers", 2, "blocks"),
    Flag("hidden", 128, "hidden size, a multiple of 64"),
    Flag("bf16", False, "compute in bf16"),
)
def fused_loss(options: argparse.Namespace) -> Answer:
    """Compare the memory and the time of a step with and without the logits of all tokens."""
    draw = torch.Generator().manual_seed(SEED)
    rows = torch.randint(options.vocabulary, ((options.steps + 2) * ROWS, LENGTH), generator=draw)
    own = f"--micro-batch-size {ROWS} --lr 1e-4" + f" --mixed-precision bf16 {KEPT}" * options.bf16
    contenders = {}
    for name, words in ((PLAIN, ""), (FUSED, "--fused-linear-cross-entropy")):
        torch.manual_seed(SEED)
        model = _build(gpt2, options, options.vocabulary)()
        contenders[name] = Contender(model, rows, options.steps + 2, f"{own} {words}", held_out=0)
        contenders[name].turn(1)  # creates the state
    peaks = {name: one.peak() for name, one in contenders.items()}
    with progress("fused-loss", options.steps) as advance:
        contest = Contest({name: partial(one.turn, 1) for name, one in contenders.items()})
        contest.run(options.steps, advance=advance)
    found: list[Row] = [
        {"name": name, "peak_mb": peaks[name], "loss": one.loss}
        | {"step_ms": statistics.median(contest.seconds[name]) * 1000}
        for name, one in contenders.items()
    ]
    device, tokens = contenders[PLAIN].session.plan.device, ROWS * LENGTH
    # Without fusing, the loss keeps two fp32 numbers for each row and word, and a 16-bit one in half precision.
    freed = tokens - rows_at_once(tokens, options.vocabulary, device)
    predicted = max(0, freed * options.vocabulary * (10 if options.bf16 else 8)) / 1e6
    columns: Columns = {
        "loss": "{name}",
        "peak of tensors, MB": "{peak_mb:,.0f}",
        "step, ms": "{step_ms:,.0f}",
    }
    plain, fused = found
    return Answer(
        {"tokens": tokens, "device": device, "predicted_saving_mb": predicted, "ways": found},
        table(f"fused loss: {tokens:,} tokens, {options.vocabulary:,} words, hidden {options.hidden}", found, columns),
        [
            f"peak: {fused['peak_mb'] / plain['peak_mb']:.2f} ×; the planner expects {predicted:,.0f} MB less",
            f"time of a step: {fused['step_ms'] / plain['step_ms']:.2f} ×",
            f"loss: {fused['loss']:.6f} and {plain['loss']:.6f}",
        ],
        bars("peak of tensors alive in a step, MB", {row["name"]: row["peak_mb"] for row in found}, ours=[FUSED]),
    )


RECIPES = ("tensorwise", "rowwise")
LLAMAS: dict[str, dict[str, int]] = {
    "tiny": {"layers": 2, "hidden": 64, "heads": 2, "intermediate_size": 192},
    "1.5b": {"layers": 22, "hidden": 2048, "heads": 16, "num_key_value_heads": 8, "intermediate_size": 8192},
    "8b-blocks": {"layers": 8, "hidden": 4096, "heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336},
}
"""Sizes of Llamas whose speed is compared. The last one has a quarter of the blocks of a Llama with 8B parameters."""


@asks(
    *(STEPS, LR, LAYERS, HIDDEN),
    Flag("llama", "tiny", "whose speed is compared", choices=tuple(LLAMAS)),
    Flag("turns", 5, "timed steps of each way"),
    Flag("length", 4096, "tokens of a row in a timed step"),
)
def fp8(options: argparse.Namespace) -> Answer:
    """Compare fp8 with bf16: the loss on real text, and the speed of compiled blocks on rows of random tokens."""
    on_gpu = torch.cuda.is_available()
    emulated = "" if on_gpu and torch.cuda.get_device_capability() >= ADA else "--fp8-emulate"
    ways = {"bf16": ""} | {recipe: f"--fp8-recipe {recipe} {emulated}" for recipe in RECIPES}
    ways = {name: f"--mixed-precision bf16 --lr {options.lr} {words}" for name, words in ways.items()}
    with progress("fp8", -(-options.steps // TURN) + options.turns) as advance:
        rows = measure(_build(llama, options), docstring_rows(), options.steps, ways, advance)
        shape, tokens = LLAMAS[options.llama] | {"vocabulary": 32000}, ROWS * options.length
        draw = torch.Generator().manual_seed(SEED)
        text = torch.randint(shape["vocabulary"], (ROWS, options.length), generator=draw)
        backend = "inductor" if on_gpu else "aot_eager"
        timed = {}
        for name, words in ways.items():
            torch.manual_seed(SEED)
            model = llama(**shape, length=options.length)
            timed[name] = Contender(model, text, options.turns + 3, f"{words} --torch-compile {backend}", held_out=0)
            timed[name].turn(2)  # creates the state, and compiles
        peaks = {name: one.peak() for name, one in timed.items()}
        contest = Contest({name: partial(one.turn, 1) for name, one in timed.items()}, tokens)
        contest.run(options.turns, advance=advance)
    for row in rows:
        name = row["name"]
        row |= {"tokens_per_second": contest.rate(name), "speed": contest.ratio(name, "bf16"), "peak_mb": peaks[name]}
        row["products"] = timed[name].session.summary()["receipts"].get("fp8_products", {})
    columns: Columns = {
        **LOSS,
        f"tokens/s of {options.llama}": "{tokens_per_second:,.0f}",
        "over bf16": "{speed:.2f}",
        "peak of a step, MB": "{peak_mb:,.0f}",
        "fp8 products in its graphs": lambda row: ", ".join(map(str, row["products"].values())) or "none",
    }
    goals = [_goal(rows, 0.005, RECIPES)]
    if options.llama == "8b-blocks":
        goals.append(f"goal: 1.15 × bf16: {'reached' if max(row['speed'] for row in rows) >= 1.15 else 'missed'}")
    return _answer(options, rows, columns, goals)
