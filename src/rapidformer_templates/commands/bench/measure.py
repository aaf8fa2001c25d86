"""Measure the speed and memory of each solution in a table and of its peers.

Every solution trains the same model on the same random tokens, in separate worker processes. A solution and its peers
make their steps in turns, and every repeat runs all solutions, so that a busy moment affects all of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from rapidformer_templates.commands.bench.output import Advance, progress, put_out
from rapidformer_templates.commands.bench.report import Report, draw, notes, table
from rapidformer_templates.commands.bench.runs import WARMUP, run_together
from rapidformer_templates.commands.bench.tables import TABLES, BenchScale, Solution, Table
from rapidformer_templates.commands.bench.worker import BenchJob, RandomTokens, build_model
from rapidformer_templates.errors import ConfigError, RapidformerError
from rapidformer_templates.planning.deepspeed_file.settings import bucket_sizes
from rapidformer_templates.planning.environment import detect_gpu, kind_of
from rapidformer_templates.planning.optimizer_states import ParameterShape
from rapidformer_templates.switches.auto_strategy.state_bytes import ON_HOST, PLAIN
from rapidformer_templates.switches.zero import compiled_parts as deepspeed_parts

SAME_LOSS = {"fp32": 1e-3, "mixed": 2e-2}
"""Largest relative difference between the losses of the last step, by precision."""


def facts_of(scale: BenchScale) -> list[ParameterShape]:
    """Return the facts of all parameters of a scale's model, without allocating their data."""
    import torch

    from rapidformer_templates.engines.parallel.compute_dtype import parameters_with_masters

    with torch.device("meta"):
        model = build_model(scale)
    with_masters = parameters_with_masters(model)
    return [
        ParameterShape(tuple(p.shape), decays=p.ndim >= 2, has_master=id(p) in with_masters) for p in model.parameters()
    ]


def flops_of(job: BenchJob) -> float:
    """Return the model FLOPs per sample of a job's model."""
    from rapidformer_templates.commands.bench.flops import training_flops

    sample = {name: tensor[None] for name, tensor in RandomTokens(job)[0].items()}
    return float(training_flops(lambda: build_model(job.sizes), sample))


@dataclass(frozen=True)
class MeasureRequest:
    """A request to measure a table.

    Attributes:
        table, scale: the table, and a key of its scales.
        workers: number of worker processes.
        device: ``cpu``, or torch's name of the accelerator.
        chosen: keys of the table's solutions.
        repeats: runs of each solution.
        turns: measured turns per run.
        steps: optimizer steps per turn.
        everything: also measure solutions that are known to be slow on the device.
        peers: also measure the peers.
        disk: folder for offloading to NVMe. The default is a temporary folder.
    """

    table: Table
    scale: str
    workers: int
    device: str
    chosen: list[str]
    repeats: int
    turns: int
    steps: int = 1
    everything: bool = False
    peers: bool = True
    disk: Path | None = None

    def job(self, name: str, peer: str | None, folder: Path, number: int) -> BenchJob:
        return BenchJob(
            table=self.table.name,
            solution=name,
            peer=peer,
            scale=self.scale,
            workers=self.workers,
            turns=self.turns + WARMUP,
            steps=self.steps,
            device=self.device,
            precision=precision_of(self.table.solutions[name], self.device),
            address=str(folder / f"{number}.sock"),
            nvme=str(folder / "nvme"),
        )


def measure(request: MeasureRequest, advance: Advance = lambda text: None) -> Report:
    """Run the solutions and their peers, and call ``advance`` after each solution of each repeat.

    Raises:
        RapidformerError: a part of DeepSpeed cannot be built.
    """
    solutions, device = request.table.solutions, request.device
    sizes = request.table.scales[request.scale]
    report = Report(request.table, request.scale, request.workers, device, facts_of(sizes))
    report.precision = {name: precision_of(solution, device) for name, solution in solutions.items()}
    for name in request.chosen:
        why = _absence_reason(request, name)
        if why:
            report.absent[name] = why
    able = [name for name in request.chosen if name not in report.absent]
    kept_whole = bucket_sizes(sizes.hidden)["stage3_param_persistence_threshold"]
    for name in able:
        formula = solutions[name].formula
        if formula:
            width = 4 if report.precision[name] == "fp32" else 2
            how = replace(ON_HOST if solutions[name].offload else PLAIN, kept_whole=kept_whole)
            report.expected[name] = formula(report.parameters, request.workers, width, how)
    if able:
        example = request.job(able[0], None, Path(), 0)
        report.flops, report.global_batch = flops_of(example), example.global_batch
    if any(solutions[name].package == "deepspeed" for name in able):
        deepspeed_parts.export(device)
        needed = {part for name in able for part in deepspeed_parts.needed_parts(solutions[name].offload)}
        deepspeed_parts.build(sorted(needed), device)
    for repeat in range(request.repeats):
        for name in (name for name in able if name not in report.absent):
            with tempfile.TemporaryDirectory(prefix="rf-", dir=request.disk) as folder:
                _run_with_peers(request, report, name, Path(folder), repeat)
            advance(f"{name}, repeat {repeat + 1}")
    _check_losses(report)
    return report


def precision_of(solution: Solution, device: str) -> str:
    """Return the precision in which a solution computes on a device."""
    fast_on_cpu = solution.precision == "best" and cpu_is_fast_at_bf16()
    if solution.precision == "fp32" or (device == "cpu" and solution.precision != "mixed" and not fast_on_cpu):
        return "fp32"
    capability = detect_gpu() if device == "cuda" else None
    return "fp16" if capability and capability < (8, 0) else "bf16"


@cache
def cpu_is_fast_at_bf16() -> bool:
    """Whether this CPU has instructions for bf16 products: AVX512-BF16 or AMX of x86."""
    import torch

    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


@cache
def _matrix_product(device: str, precision: str) -> Callable[[], float]:
    from rapidformer_templates.commands.bench.flops import MatrixProduct

    return MatrixProduct(device, precision).rate


def _absence_reason(request: MeasureRequest, name: str) -> str | None:
    solution, device = request.table.solutions[name], request.device
    sizes = request.table.scales[request.scale]
    if solution.package and importlib.util.find_spec(solution.package) is None:
        return f"{solution.package} is not installed"
    if device == "cpu" and not request.everything:
        if solution.precision == "mixed" and not cpu_is_fast_at_bf16():
            return "this CPU has no instructions for bf16 (--all runs it anyway)"
        if "--torch-compile" in solution.flags:
            return "compiling takes longer than it saves on a CPU (--all runs it anyway)"
    if request.workers % solution.divides:
        return f"one copy of the model needs {solution.divides} workers, but there are {request.workers}"
    samples = sizes.micro_batch * (request.workers // solution.divides)
    if sizes.global_batch % samples:
        return f"{sizes.global_batch} samples per step cannot be divided by {samples}"
    for part in deepspeed_parts.needed_parts(solution.offload):
        if problem := deepspeed_parts.problems(part, device):
            return f"DeepSpeed's {part}: {problem}"
    return None


def _run_with_peers(request: MeasureRequest, report: Report, name: str, folder: Path, repeat: int) -> None:
    """Run a solution and its peers, and add the runs to the report.

    On a CPU all run at the same time and take turns. On a GPU each runs alone, because memory is scarce.
    """
    others = [peer for peer in request.table.solutions[name].peers if request.peers and peer not in report.absent]
    jobs = [request.job(name, peer, folder, number) for number, peer in enumerate([None, *others])]
    for group in [jobs] if request.device == "cpu" else [[job] for job in jobs]:
        runs, reasons = run_together(group, repeat, _matrix_product(report.device, group[0].precision))
        for contender, run in runs.items():
            report.runs.setdefault(contender, []).append(run)
        for contender, why in reasons.items():
            report.absent[contender] = why
            report.runs.pop(contender, None)
            if contender in report.of.solutions and why != "out of memory":
                report.failed.append(contender)


def _check_losses(report: Report) -> None:
    """Exclude runs with a different loss and report them. They do different work, so their speed means nothing."""
    solutions = report.of.solutions
    for kind, allowed in SAME_LOSS.items():
        losses = {
            name: run.figures[0]["loss"]
            for name, runs in report.runs.items()
            for run in runs[-1:]
            if (kind == "fp32") == (report.precision[report.of.solution_of(name)] == "fp32")
        }
        middle = statistics.median(losses.values()) if losses else 0.0
        for name, loss in losses.items():
            if abs(loss - middle) > allowed * middle:
                report.absent[name] = (
                    f"its loss is {loss:.4f}, and that of the others {middle:.4f}: it does different work"
                )
                report.runs.pop(name)
                report.failed += [name] if name in solutions else []


def main(options: argparse.Namespace) -> int:
    """Measure, print and write the result. Return 1 if a solution of this library failed, else 0."""
    chosen_table = TABLES[options.table]
    if options.scale not in chosen_table.scales:
        raise ConfigError(
            f"{chosen_table.name} has no scale {options.scale}",
            where="--scale",
            hint=f"there are: {', '.join(chosen_table.scales)}",
        )
    scale = chosen_table.scales[options.scale]
    workers = options.workers or scale.workers
    device = _device(options, scale, workers)
    chosen = _chosen(options.solutions, chosen_table)
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    request = MeasureRequest(
        table=chosen_table,
        scale=options.scale,
        workers=workers,
        device=device,
        chosen=chosen,
        repeats=options.repeats,
        turns=options.steps,
        steps=options.steps_a_turn or (1 if device == "cpu" else 10),
        everything=options.all,
        peers=options.peers,
        disk=options.folder,
    )
    with progress(chosen_table.name, options.repeats * len(chosen)) as advance:
        report = measure(request, advance)
    name = chosen_table.name
    put_out(options, name, report.to_json(), table(report), notes(report), lambda axes: draw(axes, report))
    return 1 if report.failed else 0


def _chosen(text: str | None, of: Table) -> list[str]:
    """Return the requested solutions in the table's order. Some have a comma in their name.

    Raises:
        ConfigError: a solution does not exist.
    """
    if not text:
        return list(of.solutions)
    longest_first = "|".join(sorted(map(re.escape, of.solutions), key=len, reverse=True))
    named = re.compile(rf"\s*({longest_first})\s*(?:,|$)")
    names, at = set[str](), 0
    while at < len(text):
        if (match := named.match(text, at)) is None:
            unknown = text[at:].partition(",")[0].strip()
            raise ConfigError(
                f"there is no solution {unknown}", where="--solutions", hint=f"there are: {'; '.join(of.solutions)}"
            )
        names.add(match[1])
        at = match.end()
    return [name for name in of.solutions if name in names]


def _device(options: argparse.Namespace, scale: BenchScale, workers: int) -> str:
    """Return the device of the workers. Each worker needs its own accelerator, or all share the CPU.

    Raises:
        ConfigError: there is no device of this name.
        RapidformerError: the scale or the options need more devices than there are.
    """
    kind, count = kind_of(options.device), 0
    if kind != "cpu":
        import torch

        from rapidformer_templates.system import accelerator

        count = torch.accelerator.device_count() if accelerator.is_available(kind) else 0
    gpus = count if kind == "cuda" else 0
    needed = scale.cuda_workers
    if needed and (gpus < needed or workers != needed):
        raise RapidformerError(
            f"--scale {options.scale} is the published table: {needed} workers with a GPU each; "
            f"there are {gpus} GPUs, and {workers} workers were asked for",
            where=f"bench {options.table}",
            hint="--scale small runs on any machine",
        )
    if kind == "cpu" or count >= workers:
        return kind
    if options.device == "auto":
        return "cpu"
    what = "a GPU" if kind == "cuda" else f"a device {kind}"
    raise RapidformerError(f"{workers} workers need {what} each, but there are {count}", where=f"--device {kind}")
