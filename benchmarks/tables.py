"""The published tables (``partitioning``, ``mixed-precision``, ``parallel``, ``graph``) and ``mfu``.

All solutions of a table train the same model on the same random tokens, in separate worker processes. On a CPU, a
solution and its peers take turns, so that a busy moment affects all of them. On a GPU each runs alone: memory is
scarce. The published figures are from 4 GPUs of 32 GB.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from benchmarks.contest import (
    Advance,
    Answer,
    Columns,
    Contest,
    Flag,
    Row,
    asks,
    bars,
    in_short,
    progress,
    table,
    verdict,
)
from benchmarks.loops import HAND_WRITTEN, HF_TRAINER, TORCHTITAN, Job, train
from benchmarks.workers import Loop
from rapidformer_templates.commands.bench.cli import spread
from rapidformer_templates.commands.bench.models import (
    SCALES,
    BenchModel,
    MatrixProduct,
    cpu_is_fast_at_bf16,
    fast_precision,
    training_flops,
)
from rapidformer_templates.errors import ConfigError, RapidformerError
from rapidformer_templates.planning.environment import kind_of
from rapidformer_templates.switches.zero import compiled_parts as deepspeed_parts
from rapidformer_templates.system import accelerator

WARMUP = 2
"""First turns that do not count, because of allocations, receipts and rebuilt buckets."""

SAME_LOSS = {"fp32": 1e-3, "mixed": 2e-2}
"""Largest relative difference between the losses of the last step, by precision."""

OURS = "rapidformer_templates"
GOAL = 1.0
"""Goal for the ratio of this library's samples/s to a peer's."""


@dataclass(frozen=True)
class Solution:
    """A row of a table.

    Attributes:
        flags: Flags that turn the solution on.
        peers: Names in ``LOOPS`` of peers that offer the same.
        published: Samples/s and peak MB on 4 GPUs of 32 GB, or the reason why there are none.
        precision: ``fp32``, ``mixed`` (a 16-bit type), ``best`` (a 16-bit type if the device is fast at it) or
            ``published`` (mixed on a GPU, as in the published tables, and fp32 on a CPU).
        divides: Number of workers that one copy of the model needs.
    """

    flags: str = ""
    peers: tuple[str, ...] = ()
    published: tuple[float, int] | str = "not published"
    precision: str = "published"
    divides: int = 1

    @property
    def package(self) -> str | None:
        """The package that must be installed, or None."""
        return "deepspeed" if "--zero" in self.flags else "fairscale" if "--oss" in self.flags else None

    @property
    def offload(self) -> Any:
        return "nvme" if "nvme" in self.flags else "cpu" if "--cpu-offload" in self.flags else None


@dataclass(frozen=True)
class Published:
    """A table.

    Attributes:
        title: The subject of the table.
        models: The model by scale. ``paper`` is the published one, ``tiny`` is for trying out the command.
        workers: Worker processes by scale.
        global_batch: Samples per step by scale. Without it, each copy takes ``accumulation`` micro batches.
        together: Whether all solutions take turns, and are compared with the first one.
        utilisation: Goals for the model FLOPs utilisation by device, in a table that shows it.
    """

    title: str
    solutions: Mapping[str, Solution]
    models: Mapping[str, BenchModel]
    workers: Mapping[str, int]
    global_batch: Mapping[str, int]
    accumulation: int = 1
    together: bool = False
    utilisation: Mapping[str, float] | None = None


def _by_scale(small: int, paper: int) -> dict[str, int]:
    return {"tiny": small, "small": small, "paper": paper}


def _layout(tensor: int, pipeline: int, published: tuple[float, int]) -> Solution:
    sizes = {"--tensor-model-parallel-size": tensor, "--pipeline-model-parallel-size": pipeline}
    flags = " ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
    return Solution(flags, published=published, divides=tensor * pipeline)


ZERO = "--zero-{}-memory-optimization"
GPT = {"paper": replace(SCALES["paper"], micro_batch=1)}
"""The published GPT: 1,313,722,368 parameters with GPT-2's vocabulary of 50,257, padded to a multiple of 128."""

TABLES = {
    "partitioning": Published(
        "ways to divide the model's state",
        {
            "none": Solution("", ("accelerate DDP",), "out of memory", precision="fp32"),
            "mixed": Solution("", (), (9.57, 25_061), precision="mixed"),
            "oss": Solution("--oss-memory-optimization", (), (6.02, 22_077)),
            "oss-sdp": Solution("--oss-sdp-memory-optimization", (), (7.01, 17_113)),
            "fsdp": Solution("--fsdp-memory-optimization", ("accelerate FSDP", "torch fully_shard"), "N/A"),
            "zero-1": Solution(ZERO.format(1), ("accelerate ZeRO-1",), (12.88, 15_709)),
            "zero-2": Solution(ZERO.format(2), ("accelerate ZeRO-2",), (10.27, 15_693)),
            "zero-3": Solution(ZERO.format(3), ("accelerate ZeRO-3",), "N/A"),
            "zero-2-offload": Solution(f"{ZERO.format(2)} --cpu-offload"),
            "zero-3-offload": Solution(f"{ZERO.format(3)} --cpu-offload"),
            "zero-3-nvme": Solution(f"{ZERO.format(3)} --nvme-path {{folder}}"),
        },
        GPT | {"tiny": BenchModel("gpt", 2, 32, 2, 128, 16), "small": BenchModel("gpt", 8, 640, 10, 16_000, 128)},
        workers=_by_scale(2, 4),
        global_batch={"paper": 4},
        accumulation=2,
    ),
    "parallel": Published(
        "tensor and pipeline parallel layouts",
        {
            "tp 1 × pp 1": _layout(1, 1, (9.63, 25_061)),
            "tp 2 × pp 1": _layout(2, 1, (7.59, 11_300)),
            "tp 4 × pp 1": _layout(4, 1, (6.16, 5_673)),
            "tp 1 × pp 2": _layout(1, 2, (8.46, 12_375)),
            "tp 1 × pp 4": _layout(1, 4, (8.03, 8_141)),
            "tp 2 × pp 2": _layout(2, 2, (7.37, 6_211)),
        },
        GPT | {"tiny": BenchModel("gpt", 4, 32, 4, 128, 16), "small": BenchModel("gpt", 8, 640, 20, 16_000, 128)},
        workers=_by_scale(4, 4),
        global_batch=_by_scale(4, 4),
    ),
    "two-levels": Published(
        "parameters sharded inside tensor-parallel groups",
        {
            "tp 2 × shards": Solution(
                "--tensor-model-parallel-size 2 --use-distributed-optimizer "
                "--data-parallel-sharding-strategy optim_grads_params",
                ("torch parallelize_module + fully_shard",),
                divides=2,
            ),
            "tp 2 × optimizer": Solution("--tensor-model-parallel-size 2 --use-distributed-optimizer", divides=2),
            "tp 2 × copies": Solution("--tensor-model-parallel-size 2", divides=2),
        },
        {
            "tiny": BenchModel("llama", 2, 32, 2, 128, 16),
            "small": BenchModel("llama", 6, 512, 8, 8_192, 128),
            "paper": BenchModel("llama", 16, 4096, 32, 32_000, 2048),
        },
        workers=_by_scale(4, 8),
        global_batch=_by_scale(4, 16),
    ),
    "mixed-precision": Published(
        "fp32 and a 16-bit type",
        {
            "fp32": Solution("", (HF_TRAINER,), (103.07, 17_025), "fp32"),
            "mixed": Solution("", (HF_TRAINER,), (178.15, 12_698), "mixed"),
        },
        {
            "tiny": BenchModel("bert", 2, 32, 2, 128, 16, 4),
            "small": BenchModel("bert", 4, 512, 8, 8_192, 128, 8),
            "paper": BenchModel("bert", 12, 768, 12, 30_522, 512, 16),
        },
        workers=_by_scale(1, 1),
        global_batch={"paper": 64},
    ),
    "graph": Published(
        "fine-tuning through graphs",
        {
            "fp32": Solution("", (), (479.15, 2_112), "fp32"),
            "mixed": Solution("", (), (589.66, 2_127), "mixed"),
            "ORT": Solution("--onnx-runtime-training", (), (554.24, 2_430), "fp32"),
            "ORT + mixed": Solution("--onnx-runtime-training", (), (614.70, 2_289), "mixed"),
            "inductor": Solution("--torch-compile", precision="fp32"),
        },
        {
            "tiny": BenchModel("classifier", 2, 32, 2, 128, 16, 4),
            "small": BenchModel("classifier", 12, 768, 12, 30_522, 128, 8),
            "paper": BenchModel("classifier", 12, 768, 12, 30_522, 512, 16),
        },
        workers=_by_scale(1, 1),
        global_batch={},
        together=True,
    ),
    "mfu": Published(
        "model FLOPs utilisation",
        {
            "eager": Solution("", (HAND_WRITTEN, HF_TRAINER), precision="best"),
            "compiled": Solution(
                "--torch-compile",
                (f"{HAND_WRITTEN} compiled", f"{HF_TRAINER} compiled", TORCHTITAN),
                precision="best",
            ),
        },
        SCALES,
        workers=dict.fromkeys(SCALES, 1),
        global_batch={},
        utilisation={"cpu": 0.70, "cuda": 0.45},
    ),
}


def precision_of(solution: Solution, device: str) -> str:
    """Return the precision in which a solution computes on a device."""
    if solution.precision == "fp32" or (solution.precision == "published" and device == "cpu"):
        return "fp32"
    return "bf16" if solution.precision == "mixed" and device == "cpu" else fast_precision(device)


def job_of(of: Published, scale: str, name: str, device: str, workers: int, steps: int, folder: str = "") -> Job:
    """Return the job of a solution, for this library and its peers."""
    solution, model = of.solutions[name], of.models[scale]
    copies = workers // solution.divides
    whole = of.global_batch.get(scale)
    accumulation = whole // (copies * model.micro_batch) if whole and copies else of.accumulation
    flags = tuple(word.format(folder=folder) for word in solution.flags.split())
    return Job(model, steps, flags, workers, copies, accumulation, device, precision_of(solution, device))


def why_absent(of: Published, name: str, job: Job, *, everything: bool) -> str | None:
    """Return the reason why a solution is not measured, or None."""
    solution, whole = of.solutions[name], job.copies * job.model.micro_batch
    if solution.package and importlib.util.find_spec(solution.package) is None:
        return f"{solution.package} is not installed"
    if job.device == "cpu" and not everything:
        if job.precision != "fp32" and not cpu_is_fast_at_bf16():
            return "this CPU has no instructions for bf16 (--all runs it anyway)"
        if "--torch-compile" in job.flags:
            return "compiling takes longer than it saves on a CPU (--all runs it anyway)"
    if job.workers % solution.divides:
        return f"one copy of the model needs {solution.divides} workers, but there are {job.workers}"
    if job.accumulation < 1 or (job.workers > 1 and job.accumulation * whole != job.global_batch):
        return f"the samples of a step cannot be divided by {whole}"
    for part in deepspeed_parts.needed_parts(solution.offload):
        if problem := deepspeed_parts.problems(part, job.device):
            return f"DeepSpeed's {part}: {problem}"
    return None


@cache
def _product(device: str, precision: str) -> MatrixProduct:
    return MatrixProduct(device, precision)


def measure(of: Published, jobs: Mapping[str, Job], options: argparse.Namespace, advance: Advance) -> list[Row]:
    """Train all solutions and their peers. A row has the reason if a solution or a peer could not run."""
    first = next(iter(jobs))
    if of.together:
        return _take_turns(of, {name: (name, OURS, job) for name, job in jobs.items()}, first, options, advance)
    rows: list[Row] = []
    for name, job in jobs.items():
        peers = of.solutions[name].peers if options.peers else ()
        mixed = " mixed" if of.solutions[name].precision == "mixed" else ""
        group = {name: (name, OURS, job), **{f"{peer}{mixed}": (name, peer, job) for peer in peers}}
        for part in [group] if job.device == "cpu" else [{key: entry} for key, entry in group.items()]:
            rows += _take_turns(of, part, name, options, advance)
    speeds = {row["name"]: row["samples_per_second"] for row in rows if "loss" in row}
    for row in (row for row in rows if "loss" in row and "ratio" not in row and row["solution"] in speeds):
        row |= {"ratio": speeds[row["solution"]] / row["samples_per_second"], "ratio_sd": 0.0}  # not in turns
    return rows


def _take_turns(
    of: Published,
    group: Mapping[str, tuple[str, str, Job]],
    over: str,
    options: argparse.Namespace,
    advance: Advance,
) -> list[Row]:
    """Train contenders in turns.

    Args:
        group: Solution, loop and job by name.
        over: The one that the others are compared with.
    """
    rows: dict[str, Row] = {
        name: {"name": name, "solution": solution, "ours": loop == OURS, "precision": job.precision}
        for name, (solution, loop, job) in group.items()
    }
    job = next(iter(group.values()))[2]
    rates: dict[str, list[float]] = {name: [] for name in group}
    with ExitStack() as stack:
        loops = {
            name: stack.enter_context(closing(Loop(train, loop, own, workers=own.workers)))
            for name, (_, loop, own) in group.items()
        }

        def turn(name: str) -> float:
            product = _product(job.device, job.precision) if of.utilisation else None
            before = product.rate() if product else 0.0
            seconds = loops[name].advance(options.steps)
            rates[name].append((before + product.rate()) / 2 if product else 0.0)
            return seconds

        for name in list(loops):
            try:
                for steps in (1, *[options.steps] * WARMUP):  # the first turn is the setup
                    loops[name].advance(steps)
            except RapidformerError as error:
                rows[name]["absent"] = error.message
                loops.pop(name).close()
        contest = Contest({name: partial(turn, name) for name in loops}, work=job.global_batch * options.steps)
        contest.run(options.rounds)
        for name, loop in loops.items():
            workers = loop.finish()
            rows[name] |= {
                "loss": loop.loss,
                "samples_per_second": contest.rate(name),
                "samples_per_second_sd": spread(contest.rates(name)),
                "seconds": contest.seconds[name],
                **{key: max(worker[key] for worker in workers) for key in ("peak_mb", "before_mb", "setup_mb")},
                "held": workers[0].get("held"),
                "utilisation": _utilisation(of, job, contest, name, rates[name]),
            }
            if over in loops:
                ratios = contest.ratios(name, over) if of.together else contest.ratios(over, name)
                rows[name] |= {"ratio": statistics.median(ratios), "ratio_sd": spread(ratios)}
            advance(name)
    return list(rows.values())


def _utilisation(of: Published, job: Job, contest: Contest, name: str, rates: Sequence[float]) -> float | None:
    """Return the median over the turns of the model FLOP/s, relative to the matrix products around the turn."""
    if not of.utilisation:
        return None
    flops = training_flops(job.model.build, job.model.batch(1)) * contest.work
    return statistics.median(flops / s / rate for s, rate in zip(contest.seconds[name], rates, strict=True))


def exclude_other_losses(rows: list[Row]) -> None:
    """Exclude runs with a different loss. They do different work, so their speed means nothing."""
    for kind, allowed in SAME_LOSS.items():
        some = [row for row in rows if "loss" in row and (row["precision"] == "fp32") == (kind == "fp32")]
        middle = statistics.median(row["loss"] for row in some) if some else 0.0
        for row in some:
            if abs(row["loss"] - middle) > allowed * middle:
                row["absent"] = f"its loss is {row['loss']:.4f}, and that of the others {middle:.4f}: different work"


def _device(asked: str, scale: str, workers: int) -> str:
    """Return the device of the workers. Each worker needs its own accelerator, or all share the CPU."""
    kind = kind_of(asked)
    count = torch.accelerator.device_count() if kind != "cpu" and accelerator.is_available(kind) else 0
    if scale == "paper" and workers > 1 and (kind != "cuda" or count < workers):
        raise RapidformerError(
            f"--scale paper is the published table: {workers} workers with a GPU each, but there are {count} GPUs",
            hint="--scale small runs on any machine",
        )
    if kind == "cpu" or count >= workers:
        return kind
    if asked == "auto":
        return "cpu"
    raise RapidformerError(f"{workers} workers need a device {kind} each, but there are {count}", where="--device")


def _chosen(of: Published, words: str) -> list[str]:
    names = [word.strip() for word in words.split(",")] if words else list(of.solutions)
    if unknown := [name for name in names if name not in of.solutions]:
        hint = f"there are: {', '.join(of.solutions)}"
        raise ConfigError(f"there is no solution {unknown[0]}", where="--solutions", hint=hint)
    return names


@asks(
    Flag("scale", "small", "small: any machine; paper: the published model; tiny: to try the command", kind=str),
    Flag("workers", 0, "worker processes; 0 depends on the scale", kind=int),
    Flag("rounds", 6, "measured turns per solution"),
    Flag("steps", 0, "optimizer steps per turn; 0 is 1, and 10 on an accelerator", kind=int),
    Flag("solutions", "", "solutions to measure, separated by commas; all without it", kind=str),
    Flag("all", False, "also measure what is slow on this device"),
    Flag("device", "auto", "auto, cpu, or what torch calls the accelerator", kind=str),
    Flag("peers", True, "also measure other libraries"),
    Flag("folder", None, "folder on the disk to offload to (default: a temporary folder)"),
)
def answer(options: argparse.Namespace) -> Answer:
    """Measure a table. The status is 1 if a solution of this library failed."""
    of, scale = TABLES[options.question], options.scale
    if scale not in of.models:
        hint = f"there are: {', '.join(of.models)}"
        raise ConfigError(f"{options.question} has no scale {scale}", where="--scale", hint=hint)
    model, workers = of.models[scale], options.workers or of.workers[scale]
    device = _device(options.device, scale, workers)
    options.steps = options.steps or (1 if device == "cpu" else 10)
    total = options.steps * (WARMUP + options.rounds) + 2  # one more than is run, so that no loop ends early
    with (
        tempfile.TemporaryDirectory(prefix="rf-", dir=options.folder) as folder,
        progress(options.question, len(of.solutions)) as advance,
    ):
        chosen = _chosen(of, options.solutions)
        jobs = {name: job_of(of, scale, name, device, workers, total, folder) for name in chosen}
        absent = {name: why_absent(of, name, job, everything=options.all) for name, job in jobs.items()}
        jobs = {name: job for name, job in jobs.items() if absent[name] is None}
        _build_parts(of, jobs, device)
        rows = measure(of, jobs, options, advance) if jobs else []
    exclude_other_losses(rows)
    failed = [row["name"] for row in rows if "absent" in row and row["ours"] and "memory" not in row["absent"]]
    reasons = {name: why for name, why in absent.items() if why} | {
        r["name"]: r["absent"] for r in rows if "absent" in r
    }
    rows = [row for row in rows if "absent" not in row]
    figures = {"scale": scale, "workers": workers, "device": device, "solutions": rows, "absent": reasons}
    figures |= {"published": {name: own.published for name, own in of.solutions.items()}, "failed": failed}
    sizes = f"{model.kind}, {model.layers} layers, hidden {model.hidden}, {model.tokens} tokens"
    batch = f"{max([job.global_batch for job in jobs.values()], default=0)} samples per step"
    speeds = bars(
        "samples per second (orange: this library)",
        {row["name"]: row["samples_per_second"] for row in rows},
        ours=[row["name"] for row in rows if row["ours"]],
        errors=[row["samples_per_second_sd"] for row in rows],
        texts=[f"{row['peak_mb']:,.0f} MB" for row in rows],
    )
    columns = _columns(of, sum(p.numel() for p in _parameters(model)))
    shown = table(f"{of.title}: {sizes}, {batch}, {workers} × {device}", rows, columns)
    return Answer(figures, shown, notes(of, rows, reasons, device), speeds if rows else None, int(bool(failed)))


def _build_parts(of: Published, jobs: Mapping[str, Job], device: str) -> None:
    """Build DeepSpeed's compiled parts before anything is measured."""
    zero = [of.solutions[name].offload for name in jobs if of.solutions[name].package == "deepspeed"]
    if zero:
        deepspeed_parts.export(device)
        needed = {part for offload in zero for part in deepspeed_parts.needed_parts(offload)}
        deepspeed_parts.build(sorted(needed), device)


def _parameters(model: BenchModel) -> Sequence[torch.nn.Parameter]:
    with torch.device("meta"):
        return list(model.build().parameters())


def _columns(of: Published, parameters: int) -> Columns:
    def published(which: int, form: str) -> Callable[[Row], str]:
        def cell(row: Row) -> str:
            values = of.solutions[row["solution"]].published if row["ours"] else ""
            return values * (which == 0) if isinstance(values, str) else f"{values[which]:{form}}"

        return cell

    def held(row: Row) -> str:
        kinds = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes")
        return (
            " / ".join(f"{max(w[kind] for w in row['held']) / parameters:.2f}" for kind in kinds) if row["held"] else ""
        )

    columns: dict[str, str | Callable[[Row], str]] = {
        "solution": "{name}",
        "precision": "{precision}",
        "samples/s": "{samples_per_second:.2f} ± {samples_per_second_sd:.2f}",
        "peak MB": "{peak_mb:,.0f}",
        "without model": "{before_mb:,.0f}",
        "held B/param": held,
    }
    if of.utilisation:
        columns["utilisation"] = "{utilisation:.3f}"
    if of.together:
        columns["over the first"] = lambda row: f"{row['ratio']:.3f} ×" if "ratio" in row else ""
    return columns | {"published": published(0, ".2f"), "published MB": published(1, ",")}


def notes(of: Published, rows: Sequence[Row], absent: Mapping[str, str], device: str) -> list[str]:
    """Return lines about the goals, and about absent solutions and peers."""
    lines, goal = [], (of.utilisation or {}).get(device)
    for row in rows:
        if not row["ours"] and "ratio" in row:
            ratio = f"{row['ratio']:.2f} ± {row['ratio_sd']:.2f} × {row['name']}"
            lines.append(f"{row['solution']}: {ratio}; goal {GOAL:.1f} ×: {verdict(row['ratio'] >= GOAL)}")
        if row["ours"] and goal:
            share = f"utilisation {row['utilisation']:.3f} of a matrix product in {row['precision']}"
            lines.append(f"{row['name']}: {share}; goal {goal:.2f}: {verdict(row['utilisation'] >= goal)}")
    lines += [f"{name} did not run: {in_short(why)}" for name, why in absent.items()]
    lines.append("held B/param: parameters / gradients / optimizer state on the worker that has most")
    if device == "cpu":
        lines.append("peak MB is resident memory, the interpreter and its libraries included ('without model')")
    return lines
