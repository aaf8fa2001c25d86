"""``benchmarks planner``: memory that the planner predicts, compared with the memory that real steps take.

Each layout trains a few steps with the product's own engine in worker processes. The bytes of the states must match the
prediction exactly. The peak of live storages is compared with the prediction, and with the estimates that DeepSpeed and
Megatron publish for such layouts.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Group

from benchmarks import planner_others, planner_worker
from benchmarks.contest import Advance, Answer, Columns, Flag, Row, asks, progress, table
from benchmarks.planner_worker import MODELS, TRAINING, Job
from benchmarks.tables import TABLES, Solution
from benchmarks.workers import run_in_workers
from rapidformer_templates.commands.plan import plan_request
from rapidformer_templates.planning.environment import detect
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.run.planned_model import EngineMemory, engine_memory
from rapidformer_templates.switches.auto_strategy.layouts import Layout, MemoryOptions, layout_of, memory_options_of
from rapidformer_templates.switches.auto_strategy.memory import predict, states_by_worker
from rapidformer_templates.switches.auto_strategy.model_shapes import ModelShapes
from rapidformer_templates.switches.auto_strategy.results import ALLOWANCE, Memory
from rapidformer_templates.switches.auto_strategy.state_bytes import StateBytes
from rapidformer_templates.trainer import Trainer

if TYPE_CHECKING:
    from rapidformer_templates.switches.auto_strategy.model_of_flags import Subject

LORA = "--lora-rank 8"
FUSED = "--fused-linear-cross-entropy"
EXPERTS = "--num-experts 4"

GOAL_MEDIAN, GOAL_WORST = 0.005, 0.05
"""Goals: relative errors of the peak."""


OFFLOAD = "--offload-activations"
SUMS = "--grad-accum-dtype bf16"


@dataclass(frozen=True)
class Case:
    """A layout of a model.

    Attributes:
        model: A key of ``MODELS``.
        adapters: Flags of adapters or of the fused loss, which change the model. Empty if there are none.
        offload: Whether activations go to the host.
        narrow_sums: Whether gradients are accumulated in 16 bits, too.
    """

    model: str
    layout: Layout
    precision: str = "fp32"
    adapters: str = ""
    offload: bool = False
    narrow_sums: bool = False

    @property
    def flags(self) -> list[str]:
        narrow = [] if self.precision == "fp32" else ["--mixed-precision", self.precision]
        offload = [OFFLOAD] if self.offload else []
        sums = SUMS.split() if self.narrow_sums else []
        return [*self.layout.flags(), *narrow, *sums, *self.adapters.split(), *offload]

    def setting(self, shapes: ModelShapes) -> MemoryOptions:
        """Return the memory settings in the plan of these flags that are not part of the layout."""
        words = [word for word in self.flags if word != OFFLOAD]  # a CPU refuses this flag
        config = REGISTRY.merge_files(parse(words, REGISTRY.options()))
        place = detect("Trainer", "benchmark", device="cpu", world_size=self.layout.world)
        return replace(memory_options_of(resolve(config, place), shapes.width), offloads_activations=self.offload)

    def on_fake_tensors(self) -> EngineMemory | None:
        """Run the engine of these flags on tensors without data. None for the layouts that cannot.

        DeepSpeed's engine reads values, and a CPU refuses to offload activations.
        """
        if self.offload:
            return None
        template = Trainer([*TRAINING, *self.flags])
        place = detect("Trainer", "benchmark", device="cpu", world_size=self.layout.world)
        plan = resolve(template.config, place)
        return None if plan.engine.endswith("DeepSpeedEngine") else engine_memory(template, plan, MODELS[self.model])

    @property
    def name(self) -> str:
        layout = self.layout
        sizes = f"{layout.tensor}·{layout.pipeline}·{layout.data}"
        ways = [f"context {layout.context}"] if layout.context > 1 else []
        ways += [f"virtual {layout.virtual}"] if layout.virtual > 1 else []
        ways += [f"experts / {layout.experts}"] if layout.experts > 1 else []
        ways += [layout.partitioned] if layout.partitioning != "none" else []
        ways += {"none": [], "full": ["recompute"], "selective": ["selective"]}[layout.recompute]
        ways += ["sequence"] if layout.sequence_parallel else []
        ways += [self.precision] if self.precision != "fp32" else []
        ways += ["sums"] if self.narrow_sums else []
        ways += [f"stages {','.join(map(str, layout.stages))}"] if layout.stages else []
        adapters = (
            self.adapters.replace("--lora-rank", "rank").replace(EXPERTS, "experts").replace("--quantize-base ", "")
        )
        ways += [adapters.replace(FUSED, "fused")] if adapters else []
        return f"{sizes}  {layout.micro_batch}×{layout.accumulation}  {' '.join(ways)}".rstrip()


PUBLISHED_LAYOUTS = tuple(
    Layout(tensor, pipeline, 4 // (tensor * pipeline), accumulation=tensor * pipeline)
    for tensor, pipeline in ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2))
)
"""Layouts of the published 3D table: 4 workers, micro batch 1, global batch 4."""

CASES = (
    Case("gpt2", Layout(micro_batch=4)),
    Case("gpt2", Layout(micro_batch=2, accumulation=4)),
    Case("gpt2", Layout(micro_batch=8, recompute="full")),
    Case("gpt2", Layout(micro_batch=8, recompute="selective")),
    Case("llama", Layout(micro_batch=2), "bf16"),
    Case("llama", Layout(micro_batch=2, recompute="selective"), "bf16"),
    Case("llama", Layout(micro_batch=1, accumulation=2, recompute="full"), "bf16"),
    Case("bert", Layout(micro_batch=8)),
    Case("bert", Layout(micro_batch=4), "bf16"),
    Case("gpt2", Layout(data=2, micro_batch=4)),
    Case("llama", Layout(data=2, micro_batch=2, accumulation=2)),
    Case("bert", Layout(data=2, micro_batch=4, recompute="full"), "bf16"),
    Case("gpt2", Layout(data=2, micro_batch=4, partitioning="fsdp")),
    Case("llama", Layout(data=2, micro_batch=2, accumulation=2, partitioning="fsdp"), "bf16"),
    Case("llama", Layout(data=2, micro_batch=2, partitioning="zero-1")),
    Case("llama", Layout(data=2, micro_batch=2, accumulation=2, partitioning="zero-2")),
    Case("bert", Layout(data=2, micro_batch=4, partitioning="zero-3")),
    Case("gpt2", Layout(data=2, micro_batch=2, accumulation=2, partitioning="zero-3")),
    Case("llama", Layout(data=2, micro_batch=2, partitioning="zero-3"), "bf16"),
    Case("gpt", Layout(data=4, partitioning="zero-3"), "bf16"),
    Case("gpt2", Layout(tensor=2, micro_batch=4)),
    Case("gpt2", Layout(tensor=4, micro_batch=4)),
    Case("llama", Layout(tensor=2, sequence_parallel=True, micro_batch=4)),
    Case("bert", Layout(tensor=2, micro_batch=8, recompute="full")),
    Case("bert", Layout(tensor=2, micro_batch=8, recompute="selective")),
    Case("gpt2", Layout(pipeline=2, micro_batch=2, accumulation=4)),
    Case("llama", Layout(micro_batch=2, accumulation=4)),
    Case("llama", Layout(pipeline=2, micro_batch=2, accumulation=4)),
    Case("llama", Layout(pipeline=4, micro_batch=2, accumulation=4)),
    Case("llama", Layout(pipeline=2, micro_batch=2, accumulation=4, recompute="full")),
    Case("llama", Layout(pipeline=2, micro_batch=2, accumulation=4, recompute="full"), "bf16"),
    Case("llama", Layout(pipeline=2, micro_batch=2, accumulation=4, recompute="selective"), "bf16"),
    Case("bert", Layout(pipeline=2, micro_batch=4, accumulation=2), "bf16"),
    *(
        Case("llama", Layout(pipeline=stages, micro_batch=2, accumulation=8, recompute=how), precision)
        for stages in (1, 2, 4)
        for precision, how in (("fp32", "none"), ("bf16", "none"), ("bf16", "full"))
    ),
    *(Case("llama", Layout(pipeline=stages, micro_batch=2, accumulation=8), "bf16", FUSED) for stages in (1, 2, 4)),
    Case("llama", Layout(pipeline=4, micro_batch=2, accumulation=8, stages=(1, 2, 3, 2)), "bf16"),
    Case("llama", Layout(pipeline=2, micro_batch=2, accumulation=4, virtual=2)),
    Case("llama", Layout(pipeline=2, micro_batch=2, accumulation=8, virtual=4, recompute="full"), "bf16"),
    Case("llama", Layout(pipeline=4, micro_batch=2, accumulation=8, virtual=2), "bf16"),
    Case("gpt2", Layout(pipeline=2, micro_batch=2, accumulation=4, virtual=3)),
    Case("bert", Layout(pipeline=2, data=2, micro_batch=2, accumulation=4, virtual=2, partitioning="zero-2"), "bf16"),
    Case("gpt2", Layout(pipeline=2, data=2, micro_batch=2, accumulation=4, virtual=3, partitioning="zero-1")),
    Case("llama", Layout(data=2, micro_batch=2, partitioning="fsdp", recompute="selective"), "bf16"),
    Case("llama", Layout(data=4, micro_batch=2, partitioning="fsdp", recompute="full")),
    Case("gpt2", Layout(data=4, micro_batch=4, partitioning="fsdp", shard_size=2)),
    Case("llama", Layout(data=4, micro_batch=2, accumulation=2, partitioning="fsdp", shard_size=2), "bf16"),
    Case("llama", Layout(tensor=2, pipeline=2, micro_batch=2, accumulation=4)),
    Case("gpt2", Layout(tensor=2, data=2, micro_batch=4, partitioning="zero-1")),
    Case("bert", Layout(pipeline=2, data=2, micro_batch=4, accumulation=2, partitioning="zero-2")),
    Case("llama", Layout(context=2, micro_batch=2)),
    Case("llama", Layout(context=2, micro_batch=2, recompute="full"), "bf16"),
    Case("gpt2", Layout(context=2, micro_batch=4, accumulation=2, partitioning="zero-2")),
    Case("bert", Layout(context=4, micro_batch=4, partitioning="distributed-optimizer"), "bf16"),
    Case("llama", Layout(tensor=2, context=2, sequence_parallel=True, micro_batch=2)),
    Case("llama", Layout(pipeline=2, context=2, micro_batch=2, accumulation=4)),
    Case("llama", Layout(context=4, micro_batch=2)),
    Case("gpt2", Layout(context=2, data=2, micro_batch=2, partitioning="fsdp")),
    Case("llama", Layout(context=4, micro_batch=2, partitioning="fsdp", recompute="full"), "bf16"),
    Case("llama", Layout(context=2, micro_batch=2, partitioning="zero-1")),
    Case("bert", Layout(data=2, context=2, micro_batch=4, partitioning="zero-2")),
    Case("llama", Layout(context=4, micro_batch=2, partitioning="zero-2"), "bf16"),
    Case("llama", Layout(micro_batch=2), adapters=EXPERTS),
    Case("llama", Layout(data=2, micro_batch=2, partitioning="distributed-optimizer"), "bf16", EXPERTS),
    Case("gpt2", Layout(data=2, micro_batch=2, accumulation=2, partitioning="zero-2"), adapters=EXPERTS),
    Case("llama", Layout(tensor=2, micro_batch=2, sequence_parallel=True), adapters=EXPERTS),
    Case("llama", Layout(pipeline=2, micro_batch=2, accumulation=4, recompute="full"), "bf16", EXPERTS),
    Case("llama", Layout(context=2, micro_batch=2), adapters=EXPERTS),
    Case("llama", Layout(pipeline=2, context=2, micro_batch=2, accumulation=4, virtual=2), adapters=EXPERTS),
    Case("gpt2", Layout(tensor=2, context=2, micro_batch=2, partitioning="zero-2"), adapters=EXPERTS),
    Case("llama", Layout(data=2, micro_batch=2, experts=2), adapters=EXPERTS),
    Case("gpt2", Layout(data=2, micro_batch=2, accumulation=2, experts=2, partitioning="zero-2"), adapters=EXPERTS),
    Case("llama", Layout(data=4, experts=2, partitioning="distributed-optimizer"), "bf16", EXPERTS),
    Case("llama", Layout(tensor=2, data=2, micro_batch=2, experts=2, sequence_parallel=True), adapters=EXPERTS),
    Case("llama", Layout(pipeline=2, data=2, micro_batch=2, accumulation=4, experts=2), adapters=EXPERTS),
    Case("llama", Layout(data=4, experts=2, partitioning="fsdp"), adapters=EXPERTS),
    Case("gpt2", Layout(data=4, experts=4, partitioning="fsdp", shard_size=2), adapters=EXPERTS),
    Case("llama", Layout(data=2, context=2, experts=2, partitioning="fsdp"), "bf16", EXPERTS),
    Case("llama", Layout(data=2, context=2, experts=4), adapters=EXPERTS),
    Case("llama", Layout(micro_batch=2), adapters=LORA),
    Case("llama", Layout(micro_batch=4, recompute="full"), "bf16", LORA),
    Case("llama", Layout(micro_batch=2), "bf16", f"{LORA} --quantize-base int8"),
    Case("llama", Layout(micro_batch=4, recompute="full"), "bf16", f"{LORA} --quantize-base int4"),
    Case("bert", Layout(data=2, micro_batch=4), adapters=f"{LORA} --quantize-base int4"),
    *(Case("gpt", layout, "bf16", narrow_sums=sums) for sums in (False, True) for layout in PUBLISHED_LAYOUTS),
    Case("gpt", Layout(data=2, partitioning="distributed-optimizer"), "bf16", narrow_sums=True),
    Case("gpt2", Layout(data=2, micro_batch=2, partitioning="distributed-optimizer"), "bf16"),
    Case("llama", Layout(data=2, micro_batch=2, accumulation=2, partitioning="distributed-optimizer"), "bf16"),
    Case("llama", Layout(data=2, micro_batch=2, accumulation=2, partitioning="distributed-optimizer")),
    Case("llama", Layout(tensor=2, data=2, micro_batch=2, accumulation=2, partitioning="zero-2"), "bf16"),
    Case("bert", Layout(pipeline=2, data=2, micro_batch=4, accumulation=2, partitioning="zero-1"), "bf16"),
    Case("bert", Layout(pipeline=2, data=2, micro_batch=4, accumulation=2, partitioning="zero-2"), "bf16"),
)
"""Three models, 1, 2 and 4 workers, every engine, adapters, and frozen weights in 8 and 4 bits."""


@dataclass(frozen=True)
class Result:
    """Predicted and measured bytes of a case.

    Attributes:
        predicted: Prediction for the worker that needs most.
        engine: Memory of the engine itself on tensors without data. None if it cannot run on them.
        held: States of each rank: as predicted, and as reported by the receipts.
        measured: The highest of the workers' usual peaks of live storages.
        highest: The highest peak of any step of any worker.
        allocator: Peak in the record of torch's allocator. None with several workers.
        resident_mb: Memory of the largest process in MB.
        host: Bytes of activations on the host at a time, on the worker that has most there.
        others: Estimates of other tools.
    """

    case: Case
    predicted: Memory
    engine: EngineMemory | None
    held: list[tuple[StateBytes, StateBytes]]
    measured: int
    highest: int
    allocator: int | None
    resident_mb: float
    others: dict[str, float]
    host: int = 0

    @property
    def error(self) -> float:
        """Relative error of the predicted peak. A positive value is an overestimate."""
        return self.predicted.total / self.measured - 1

    @property
    def engine_error(self) -> float | None:
        """The same for the peak of the engine itself on tensors without data."""
        return self.engine.peak / self.measured - 1 if self.engine else None

    @property
    def exact(self) -> bool:
        """Whether the states match the prediction on every rank, to the byte."""
        return all(predicted == measured for predicted, measured in self.held)

    @property
    def would_fit(self) -> bool:
        """Whether a device could hold the highest peak if the plan says that the layout fits."""
        return self.predicted.total * (1 + ALLOWANCE) >= self.highest

    def to_json(self) -> Row:
        states = self.predicted.parameters + self.predicted.optimizer  # the rest of the peak is beside_states
        return {
            "model": self.case.model,
            "layout": self.case.name,
            "flags": self.case.flags,
            "workers": self.case.layout.world,
            "states_predicted": [vars(predicted) for predicted, _ in self.held],
            "states_measured": [vars(measured) for _, measured in self.held],
            "states_exact": self.exact,
            "peak_predicted": vars(self.predicted) | {"total": self.predicted.total},
            "peak_of_engine": self.engine and self.engine.peak,
            "peak_measured": self.measured,
            "peak_highest": self.highest,
            "peak_of_allocator": self.allocator,
            "resident_mb": self.resident_mb,
            "beside_states": {"predicted": self.predicted.total - states, "measured": self.measured - states},
            "error": self.error,
            "engine_error": self.engine_error,
            "others": self.others,
        }


def measure(cases: Sequence[Case], advance: Advance = lambda text: None) -> list[Result]:
    """Run the cases. All cases with the same number of workers run in one group of processes."""
    results = []
    for world in sorted({case.layout.world for case in cases}):
        group = [case for case in cases if case.layout.world == world]
        told = run_in_group([(case.model, case.flags) for case in group], world)
        results += [_result(case, ranks) for case, ranks in zip(group, told, strict=True)]
        advance(f"{world} workers")
    return results


def run_in_group(jobs: Sequence[Job], world: int, measure: Callable[..., Any] = planner_worker.measure) -> Any:
    """Run jobs one after another in one group of ``world`` processes. Returns the measurements of all ranks by job.

    Args:
        jobs: A model and the flags of its run for each job.
        measure: Trains a job in a worker, and returns its measurements.
    """
    return list(zip(*run_in_workers(planner_worker.run_jobs, measure, jobs, workers=world), strict=True))


def _result(case: Case, told: Sequence[dict[str, Any]]) -> Result:
    sizes = MODELS[case.model]
    shapes = sizes.shapes(case.adapters)
    setting = case.setting(shapes)
    kinds = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes")
    measured = [StateBytes(*(rank["held"][kind] for kind in kinds)) for rank in told]
    recorded = [statistics.median(rank["allocator_peaks"]) for rank in told if rank["allocator_peaks"]]
    return Result(
        case,
        predict(shapes, case.layout, setting),
        case.on_fake_tensors(),
        list(zip(states_by_worker(shapes, case.layout, setting), measured, strict=True)),
        measured=int(max(statistics.median(rank["peaks"]) for rank in told)),
        highest=max(max(rank["peaks"]) for rank in told),
        allocator=int(max(recorded)) if recorded else None,
        resident_mb=max(rank["resident_mb"] for rank in told),
        others=planner_others.estimates(shapes, case.layout, sizes.width, sizes.heads),
        host=max(rank["host"] for rank in told),
    )


COLUMNS: Columns = {
    "model": "{model}",
    "layout": "{layout}",
    "states": lambda row: "exact" if row["states_exact"] else "differ",
    "predicted": lambda row: f"{row['peak_predicted']['total'] / 1e6:.2f}",
    "measured": lambda row: f"{row['peak_measured'] / 1e6:.2f}",
    "error": "{error:+.1%}",
    "engine": lambda row: "–" if row["engine_error"] is None else f"{row['engine_error']:+.1%}",
    "beside states": lambda row: " / ".join(f"{value / 1e6:.2f}" for value in row["beside_states"].values()),
    "allocator": lambda row: f"{row['peak_of_allocator'] / 1e6:.2f}" if row["peak_of_allocator"] else "–",
    "DeepSpeed": lambda row: _other(row, "deepspeed"),
    "Megatron": lambda row: _other(row, "megatron"),
    "resident": "{resident_mb:.0f}",
}


def _other(row: Row, name: str) -> str:
    estimate = row["others"].get(name)
    return "–" if estimate is None else f"{estimate / 1e6:.1f} ({estimate / row['peak_measured'] - 1:+.0%})"


def notes(results: Sequence[Result]) -> list[str]:
    """Compare the errors with their goals."""
    errors = [abs(result.error) for result in results]
    median, worst = statistics.median(errors), max(errors)
    inexact = [f"{result.case.model} {result.case.name}" for result in results if not result.exact]
    beyond = [f"{result.case.model} {result.case.name}" for result in results if not result.would_fit]
    return [
        f"states: {len(results) - len(inexact)} of {len(results)} layouts exact" + _named(inexact),
        f"peak: median error {median:.1%} (goal {GOAL_MEDIAN:.1%}), worst {worst:.1%} (goal {GOAL_WORST:.0%})",
        _errors_of_engines(results),
        f"layouts that do not fit although the plan says so, with its allowance of {ALLOWANCE:.0%}: {len(beyond)}"
        + _named(beyond),
        "DeepSpeed: its estimators of model states, for ZeRO. Megatron: sbh(34 + 5as/h) per block in 16 bits, and 16 "
        "bytes per parameter (Korthikanti et al., 2022). Neither counts memory outside of the blocks",
    ]


def _errors_of_engines(results: Sequence[Result]) -> str:
    errors = [abs(result.engine_error) for result in results if result.engine_error is not None]
    return (
        f"the engine itself on tensors without data: {len(errors)} of {len(results)} layouts, "
        f"median error {statistics.median(errors):.1%}, worst {max(errors):.1%}"
    )


def _named(names: list[str]) -> str:
    return f" ({'; '.join(names)})" if names else ""


PUBLISHED = (
    "--model-type gpt2 --num-layers 24 --hidden-size 2048 --num-attention-heads 32 --seq-length 1024 "
    "--max-position-embeddings 1024 --device cuda --world-size 4 --mixed-precision fp16 --micro-batch-size 1 "
    "--global-batch-size 4"
)
"""Flags of the model in the published tables: 1.3 B parameters on 4 devices of 32 GB."""


def ways_to_keep(solution: Solution) -> dict[str, str]:
    """Return the ways to keep the weights in a row of the 3D table, each with its flags."""
    ways = {"16-bit weights": "", "16-bit weights and sums": SUMS, "fp32 weights": "--keep-fp32-parameters"}
    if solution.divides < 4:
        ways["16-bit weights, distributed optimizer"] = "--use-distributed-optimizer"
    if "--tensor-model-parallel-size" in solution.flags:
        ways["fp32 weights, sequence parallel"] = "--keep-fp32-parameters --sequence-parallel"
    return ways


RECOMPUTATION = {"none": "", "selective": "--recompute-granularity selective", "full": "--checkpoint-activations"}


def published() -> list[Row]:
    """Return predicted MB for the rows of the published tables, by what is recomputed."""
    from rapidformer_templates.switches.auto_strategy.model_of_flags import Subject

    subject = Subject(plan_request(PUBLISHED.split())[0], gpu=True)
    rows = []
    for name, solution in TABLES["parallel"].solutions.items():
        rows += [_predicted(subject, f"{name}: {way}", solution, w) for way, w in ways_to_keep(solution).items()]
    with_numbers = {name: s for name, s in TABLES["partitioning"].solutions.items() if not isinstance(s.published, str)}
    return rows + [_predicted(subject, name, solution) for name, solution in with_numbers.items()]


def _predicted(subject: Subject, name: str, solution: Solution, way: str = "") -> Row:
    flags = [*PUBLISHED.split(), *solution.flags.split(), *way.split()]
    needed = {}
    for how, words in RECOMPUTATION.items():
        config, place, _ = plan_request([*flags, *words.split()])
        plan = resolve(config, place)
        needed[how] = predict(subject.shapes, layout_of(plan), memory_options_of(plan, subject.shapes.width))
    states = needed["none"].parameters + needed["none"].gradients + needed["none"].optimizer
    published_mb = int(solution.published[1])
    fitting = [how for how, memory in needed.items() if memory.total <= published_mb * 1e6]
    return {
        "row": name,
        "parameters": subject.facts.parameters,
        "states_mb": states / 1e6,
        **{f"{how}_mb": memory.total / 1e6 for how, memory in needed.items()},
        "published_mb": published_mb,
        "at_or_below_with": fitting[0] if fitting else None,
    }


PUBLISHED_COLUMNS: Columns = {
    "row": "{row}",
    **{name: f"{{{name}_mb:,.0f}}" for name in ("states", *RECOMPUTATION, "published")},
    "at or below with": lambda row: row["at_or_below_with"] or "–",
}


@asks(Flag("workers", 4, "maximum number of worker processes"))
def answer(options: argparse.Namespace) -> Answer:
    cases = [case for case in CASES if case.layout.world <= options.workers]
    with progress("planner", len({case.layout.world for case in cases})) as advance:
        results = measure(cases, advance)
    rows, reference = [result.to_json() for result in results], published()
    measured = "memory per worker, MB, predicted and measured (tensor·pipeline·data, micro × accumulation)"
    paper = "GPT of 1.3 B parameters on 4 devices of 32 GB, micro batch 1, global batch 4, fp16: MB per worker"
    return Answer(
        {"rows": rows, "published": reference},
        Group(table(measured, rows, COLUMNS, left=2), table(paper, reference, PUBLISHED_COLUMNS)),
        notes(results),
        partial(_draw, results),
        status=0 if all(result.exact and result.would_fit for result in results) else 1,
    )


def _draw(results: Sequence[Result], axes: Any) -> None:
    """Plot predicted against measured memory. On the line they are equal."""
    for model in MODELS:
        mine = [result for result in results if result.case.model == model]
        axes.scatter([r.measured / 1e6 for r in mine], [r.predicted.total / 1e6 for r in mine], label=model, s=18)
    ends = [0, max(result.measured for result in results) * 1.05 / 1e6]
    axes.plot(ends, ends, color="lightgrey", zorder=0)
    axes.set_xlabel("measured peak of live storages, MB per worker")
    axes.set_ylabel("predicted, MB")
    axes.legend()
