"""``bench partitioning``: what each way to divide the model's state costs in speed and saves in memory.

Every solution trains the same GPT on the same random tokens, in worker processes of its own. A solution and its
peers step in turns, and the solutions follow one another in each repeat, so that a busy moment hits all of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer_templates import deepspeed_parts
from rapidformer_templates.bench.output import Advance, progress, put_out, spread
from rapidformer_templates.bench.partitioning_runs import WARMUP, Run, run_together
from rapidformer_templates.bench.partitioning_show import draw, notes, table
from rapidformer_templates.bench.partitioning_solutions import SCALES, SOLUTIONS, Scale, Solution
from rapidformer_templates.bench.partitioning_worker import Job, build_model
from rapidformer_templates.environment import detect_gpu
from rapidformer_templates.errors import ConfigError, RapidformerError
from rapidformer_templates.planner.states import Facts, Held

if TYPE_CHECKING:
    from torch import nn

SAME_LOSS = {"fp32": 1e-3, "mixed": 2e-2}
"""How far the losses of the last step may be apart, as a share, by what was computed in."""


@dataclass
class Report:
    """What was measured.

    Attributes:
        scale, workers, device: of the runs.
        parameters: of the model.
        runs: by solution or peer, one of each repeat.
        absent: solutions and peers that could not run here, with the reason.
        failed: those of ours among them that should have run.
        expected: by solution, what each worker should hold.
    """

    scale: str
    workers: int
    device: str
    parameters: list[Facts]
    runs: dict[str, list[Run]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    expected: dict[str, list[Held]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(parameter.count for parameter in self.parameters)

    @property
    def global_batch(self) -> int:
        return self.workers * SCALES[self.scale].accumulation

    def rates(self, name: str) -> list[float]:
        """Samples/s of each step of all repeats."""
        return [self.global_batch / seconds for run in self.runs[name] for seconds in run.seconds]

    def samples_per_second(self, name: str) -> float:
        seconds = [step for run in self.runs[name] for step in run.seconds]
        return self.global_batch * len(seconds) / sum(seconds)

    def peak_mb(self, name: str) -> float:
        """The greatest of the workers and repeats."""
        return max(run.peak_mb for run in self.runs[name])

    def memory_mb(self, name: str, when: str) -> float:
        """The greatest likewise, ``before_mb`` or ``setup_mb``: see :class:`Run`."""
        return max(float(worker[when]) for run in self.runs[name] for worker in run.figures)

    def held(self, name: str) -> list[Held]:
        """What each worker holds, by the receipts of the first run."""
        ranks = self.runs[name][0].figures[0]["held"]
        kinds = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes")
        return [Held(*(int(rank[kind]) for kind in kinds)) for rank in ranks]

    def bucket_bytes(self, name: str) -> int:
        """Memory in which gradients wait to be sent."""
        return max(int(rank.get("bucket_bytes", 0)) for rank in self.runs[name][0].figures[0]["held"])

    def ratios(self, solution: str, peer: str) -> list[float]:
        """Our speed over a peer's: the median over the steps, which were made in turns, repeat by repeat."""
        return [
            statistics.median(b / a for a, b in zip(ours.seconds, theirs.seconds, strict=True))
            for ours, theirs in zip(self.runs[solution], self.runs[peer], strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "workers": self.workers,
            "device": self.device,
            "parameters": self.count,
            "global_batch": self.global_batch,
            "solutions": {name: self._row(name) for name in self.runs},
            "ratios": {
                peer: self.ratios(name, peer)
                for name, solution in SOLUTIONS.items()
                for peer in solution.peers
                if name in self.runs and peer in self.runs
            },
            "absent": self.absent,
            "failed": self.failed,
            "published": {name: solution.published for name, solution in SOLUTIONS.items()},
        }

    def _row(self, name: str) -> dict[str, Any]:
        row: dict[str, Any] = {
            "samples_per_second": self.samples_per_second(name),
            "samples_per_second_sd": spread(self.rates(name)),
            "peak_mb": self.peak_mb(name),
            "before_mb": self.memory_mb(name, "before_mb"),
            "setup_mb": self.memory_mb(name, "setup_mb"),
            "seconds": [run.seconds for run in self.runs[name]],
            "loss": [run.figures[0]["loss"] for run in self.runs[name]],
        }
        if name in SOLUTIONS:
            row["held"] = [vars(held) for held in self.held(name)]
            row["expected"] = [vars(held) for held in self.expected[name]]
            row["bucket_bytes"] = self.bucket_bytes(name)
        return row


def facts_of(scale: Scale) -> list[Facts]:
    """The parameters of a scale's model, without their data."""
    import torch

    with torch.device("meta"):
        model: nn.Module = build_model(scale)
    return [Facts(tuple(p.shape), decays=p.ndim >= 2) for p in model.parameters()]


def measure_partitioning(
    scale: str,
    workers: int,
    device: str,
    chosen: list[str],
    repeats: int,
    steps: int,
    *,
    everything: bool = False,
    peers: bool = True,
    disk: Path | None = None,
    advance: Advance = lambda text: None,
) -> Report:
    """Run the solutions and their peers.

    Args:
        device: ``cpu`` or ``cuda``.
        chosen: keys of ``SOLUTIONS``.
        steps: measured ones of each run.
        everything: also what the device is known to be slow at.
        disk: folder for what is offloaded to NVMe; by default a temporary one.
        advance: told of each heat that is done.

    Raises:
        RapidformerError: a part of DeepSpeed cannot be built.
    """
    report = Report(scale, workers, device, facts_of(SCALES[scale]))
    for name in chosen:
        why = _why_not(SOLUTIONS[name], name, device, everything)
        if why:
            report.absent[name] = why
    able = [name for name in chosen if name not in report.absent]
    for name in able:
        # The published rows below "mixed" stand on top of it: so do these, where the device is fast at it.
        width = 4 if _precision(name, device) == "fp32" else 2
        report.expected[name] = SOLUTIONS[name].formula(report.parameters, workers, width)
    _build_parts(able, device)
    for repeat in range(repeats):
        for name in (name for name in able if name not in report.absent):
            with tempfile.TemporaryDirectory(prefix="rf-", dir=disk) as folder:
                for jobs in _heats(report, name, steps + WARMUP, Path(folder), peers):
                    _add(report, jobs, repeat)
            advance(f"{name}, repeat {repeat + 1}")
    _check_losses(report)
    return report


def _precision(name: str, device: str) -> str:
    """What a solution computes in: as published, all but the first in the narrow type, where it is fast."""
    if name == "none" or (device == "cpu" and name != "mixed"):
        return "fp32"
    capability = detect_gpu() if device == "cuda" else None
    return "fp16" if capability and capability < (8, 0) else "bf16"


def _why_not(solution: Solution, name: str, device: str, everything: bool) -> str | None:
    if solution.package and importlib.util.find_spec(solution.package) is None:
        return f"{solution.package} is not installed"
    if name == "mixed" and device == "cpu" and not everything:
        return "a CPU has no fast narrow type (--all runs it all the same)"
    for part in deepspeed_parts.needed_parts(solution.offload):
        if problem := deepspeed_parts.problems(part, device):
            return f"DeepSpeed's {part}: {problem}"
    return None


def _build_parts(names: list[str], device: str) -> None:
    """What DeepSpeed compiles is compiled before anything is measured."""
    if any(SOLUTIONS[name].package == "deepspeed" for name in names):
        deepspeed_parts.export(device)
        needed = {part for name in names for part in deepspeed_parts.needed_parts(SOLUTIONS[name].offload)}
        deepspeed_parts.build(sorted(needed), device)


def _heats(report: Report, name: str, steps: int, folder: Path, peers: bool) -> Iterator[list[Job]]:
    """Jobs that take turns: a solution and its peers; on a GPU each alone, because the memory is what is short."""
    others = [peer for peer in SOLUTIONS[name].peers if peers and peer not in report.absent]
    jobs = [
        Job(
            solution=name,
            peer=peer,
            scale=report.scale,
            workers=report.workers,
            steps=steps,
            device=report.device,
            precision=_precision(name, report.device),
            address=str(folder / f"{i}.sock"),
            nvme=str(folder / "nvme"),
        )
        for i, peer in enumerate([None, *others])
    ]
    if report.device == "cpu":
        yield jobs
    else:
        yield from ([job] for job in jobs)


def _add(report: Report, jobs: list[Job], repeat: int) -> None:
    runs, reasons = run_together(jobs, repeat)
    for name, run in runs.items():
        report.runs.setdefault(name, []).append(run)
    for name, why in reasons.items():
        report.absent[name] = why
        report.runs.pop(name, None)
        if name in SOLUTIONS and why != "out of memory":
            report.failed.append(name)


def _check_losses(report: Report) -> None:
    """Who computes another loss does other work, and its speed means nothing: it is named and left out."""
    for kind, allowed in SAME_LOSS.items():
        losses = {
            name: run.figures[0]["loss"]
            for name, runs in report.runs.items()
            for run in runs[-1:]
            if (kind == "fp32") == (_precision(_solution_of(name), report.device) == "fp32")
        }
        middle = statistics.median(losses.values()) if losses else 0.0
        for name, loss in losses.items():
            if abs(loss - middle) > allowed * middle:
                report.absent[name] = f"its loss is {loss:.4f}, that of the others {middle:.4f}: it does other work"
                report.runs.pop(name)
                report.failed += [name] if name in SOLUTIONS else []


def _solution_of(name: str) -> str:
    """The solution that a peer stands beside."""
    return next((own for own, solution in SOLUTIONS.items() if name in solution.peers), name)


def main(options: argparse.Namespace) -> int:
    """Measure, print and write; the exit status: 1 if a solution of ours failed."""
    scale = SCALES[options.scale]
    workers = options.workers or scale.cuda_workers or 2
    device = _device(options.device, options.scale, workers)
    chosen = _chosen(options.solutions)
    with ExitStack() as stack:
        if options.folder:
            options.folder.mkdir(parents=True, exist_ok=True)
        advance = stack.enter_context(progress("partitioning", options.repeats * len(chosen)))
        report = measure_partitioning(
            options.scale,
            workers,
            device,
            chosen,
            options.repeats,
            options.steps,
            everything=options.all,
            peers=options.peers,
            disk=options.folder,
            advance=advance,
        )
    put_out(options, "partitioning", report.to_json(), table(report), notes(report), lambda axes: draw(axes, report))
    return 1 if report.failed else 0


def _chosen(text: str | None) -> list[str]:
    """The solutions that were asked for, in the table's order.

    Raises:
        ConfigError: one of them does not exist.
    """
    asked = [word.strip() for word in text.split(",")] if text else list(SOLUTIONS)
    unknown = [word for word in asked if word not in SOLUTIONS]
    if unknown:
        raise ConfigError(
            f"there is no solution {', '.join(unknown)}", where="--solutions", hint=f"there are: {', '.join(SOLUTIONS)}"
        )
    return [name for name in SOLUTIONS if name in asked]


def _device(asked: str, scale: str, workers: int) -> str:
    """Where the workers compute, each on a GPU of its own or all on the CPU.

    Raises:
        RapidformerError: the scale, or what was asked for, needs more GPUs than there are.
    """
    gpus = 0
    if asked != "cpu" and detect_gpu() is not None:
        import torch

        gpus = torch.cuda.device_count()
    needed = SCALES[scale].cuda_workers
    if needed and (gpus < needed or workers != needed):
        raise RapidformerError(
            f"--scale {scale} is the published table: {needed} workers with a GPU each; "
            f"there are {gpus} GPUs, and {workers} workers were asked for",
            where="bench partitioning",
            hint="--scale small runs on any machine",
        )
    if asked == "cuda" and gpus < workers:
        raise RapidformerError(f"{workers} workers need a GPU each, there are {gpus}", where="--device cuda")
    return "cuda" if gpus >= workers else "cpu"
