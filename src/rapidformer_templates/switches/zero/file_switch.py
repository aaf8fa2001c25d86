"""The deepspeed-config switch: your DeepSpeed file. Flags fill its ``"auto"`` values, and its values are checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from rapidformer_templates.planning.checks import clash, needs, needs_template, partitions_without_zero
from rapidformer_templates.planning.deepspeed_file.file import (
    file_of,
    idle_keys,
    read,
    section_at,
    unknown_keys,
)
from rapidformer_templates.planning.deepspeed_file.settings import (
    contradictions,
    deepspeed_settings,
    file_notes,
    keys_without_flag,
    merge_file,
)
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.switch import (
    FORECAST,
    Finding,
    Measured,
    Precedence,
    Prediction,
    Reasons,
    Request,
    RuleList,
    Switch,
    add,
)
from rapidformer_templates.switches.zero.compiled_parts import ENGINE, INSTALL
from rapidformer_templates.switches.zero.file_check import deepspeed_problems

DEEPSPEED = {"needs_package": "deepspeed", "install": INSTALL}


@dataclass(frozen=True)
class DeepSpeedConfigFlags:
    """Acceleration"""

    deepspeed_config: str | None = flag(
        None, "DeepSpeed file (or its JSON); its 'auto' values come from the flags", metavar="FILE"
    )


RULES = RuleList()


@RULES.add(
    "RF021",
    "[deepspeed]",
    "--deepspeed-config ds.json --zero-2-memory-optimization  --pipeline-model-parallel-size 2 --world-size 2",
)
def _pipeline_inside_deepspeed(request: Request) -> list[Finding]:
    """ZeRO-2 and ZeRO-3 do not work with a pipeline inside DeepSpeed.

    Why: DeepSpeed's pipeline accumulates whole gradients, which ZeRO-2 and ZeRO-3 partition.
    """
    partitioned, message = ("zero-2", "zero-3"), "{2} does not work with a pipeline that DeepSpeed runs"
    return clash(request, "deepspeed-config", "pipeline-parallel", partitioned, message=message)


@RULES.add("RF028", "[D]", "--deepspeed-config ds.json --fsdp-memory-optimization --world-size 2")
def _needs_deepspeed_engine(request: Request) -> Iterator[Finding]:
    """A DeepSpeed file needs the Trainer template, and ZeRO is the only partitioning that it can be combined with.

    Why: DeepSpeed owns the optimizer step, and two engines cannot own it.
    """
    yield from needs_template(request, "deepspeed-config")
    yield from clash(request, "deepspeed-config", partitions_without_zero)


@RULES.add("RF037", "[D]", "--deepspeed-config ds.json")
def _needs_a_zero_stage(request: Request) -> list[Finding]:
    """A DeepSpeed file names a ZeRO stage, or a flag does.

    Why: without a stage DeepSpeed partitions nothing.
    """
    stages = tuple(add({f"zero_{level}_memory_optimization": True}) for level in (2, 1, 3))
    message = "{} needs a ZeRO stage, in the file or as a flag"
    return needs(request, "deepspeed-config", lambda switch: switch.name.startswith("zero-"), *stages, message=message)


@RULES.add(
    "RF036",
    "[D]",
    '--deepspeed-config \'{"zero_optimization": {"stage": 3}}\' --zero-2-memory-optimization --world-size 2',
    packages={"deepspeed": "0.19"},
)
def _agrees(request: Request) -> Iterator[Finding]:
    """A DeepSpeed file and the flags agree.

    Why: one of two values would be silently ignored.
    """
    for message in contradictions(request):
        yield Finding(message, request.asked_for("deepspeed-config"), switches=("deepspeed-config",))


@RULES.add(
    "RF102",
    "[D, deepspeed]",
    '--deepspeed-config \'{"zero_optimization": {"stage": 2}, "gradient_cliping": 1.0}\' '
    "--zero-2-memory-optimization --world-size 2",
    packages={"deepspeed": "0.19"},
)
def _act(request: Request) -> Iterator[Finding]:
    """DeepSpeed or this library acts on every key of a DeepSpeed file, and accepts its value.

    Why: a key that nothing reads would be silently ignored, and a wrong value fails in a worker.
    """
    file, flags = file_of(request), request.asked_for("deepspeed-config")
    for path, message in (*unknown_keys(file), *idle_keys(file), *deepspeed_problems(file.content)):
        yield Finding(message, (*flags, f"{path} ({file.where(path)})"), switches=("deepspeed-config",))


@RULES.add(
    "RF104",
    "[M]",
    '--deepspeed-config \'{"zero_optimization": {"stage": 1}, "wall_clock_breakdown": true}\' '
    "--zero-1-memory-optimization --pipeline-model-parallel-size 2 --world-size 2",
)
def _deepspeed_is_there(request: Request) -> Iterator[Finding]:
    """Under 3D parallelism a DeepSpeed file contains only what flags can set.

    Why: the library's own sharding replaces DeepSpeed there.
    """
    taken_over = any(name in request.active and not request.active[name].engine for name in ("zero-1", "zero-2"))
    unsupported = keys_without_flag(request)
    if unsupported and (request.sizes.divides > 1 or taken_over):
        dividing = ("tensor-parallel", "pipeline-parallel", "expert-parallel")
        names = ("deepspeed-config", *(name for name in dividing if name in request.active))
        where = "under 3D parallelism" if request.sizes.divides > 1 else "with divided experts"
        message = f"DeepSpeed does not run {where}, and only it knows {', '.join(unsupported)}"
        yield Finding(message, request.asked_for(*names), switches=names)


def _notes(request: Request) -> Sequence[str]:
    unchecked = f"{file_of(request).name}: only DeepSpeed knows its inner keys, and it is not installed here"
    return (*file_notes(request), *([unchecked] if find_spec("deepspeed") is None else []))


PLANNED = {
    "stage", "contiguous_gradients", "reduce_bucket_size", "allgather_bucket_size", "sub_group_size",
    "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "offload_optimizer", "offload_param",
    "memory_efficient_linear", "override_module_apply",
}  # fmt: skip
"""Keys of ``zero_optimization`` that the planner supports, or that do not change the bytes it counts."""


def _unknown(request: Request) -> Reasons:
    others = sorted(set(section_at(deepspeed_settings(request, "fp32"), "zero_optimization")) - PLANNED)
    return dict.fromkeys(FORECAST, f"what {', '.join(others)} of the file changes") if others else {}


def _acted(measured: Measured) -> str | None:
    """Check that DeepSpeed runs with the ZeRO settings of the file, unless another engine replaces DeepSpeed."""
    section = section_at(read(measured.config.get("deepspeed_config")).content, "zero_optimization")
    runs_with = measured["zero_optimization"]
    if measured.plan.engine != ENGINE:
        return None
    if runs_with is None:
        return "a step by DeepSpeed was expected; something else made it"
    settings = {name: value for name, value in section.items() if isinstance(value, (bool, int, float))}
    # After reading it, DeepSpeed renames stage3_max_live_parameters to max_live_parameters.
    in_effect = {name: runs_with.get(name, runs_with.get(name.removeprefix("stage3_"))) for name in settings}
    differing = [name for name, value in settings.items() if in_effect[name] not in (value, None)]
    if not differing:
        return None
    name = differing[0]
    return f"zero_optimization.{name} = {settings[name]} was expected, as in the file; DeepSpeed has {in_effect[name]}"


DEEPSPEED_CONFIG = Switch(
    name="deepspeed-config",
    summary="Your own DeepSpeed file.",
    source="[D]",
    precedence=Precedence.SHARD,
    options=DeepSpeedConfigFlags,
    on={"deepspeed_config": "ds.json"},
    predicts=Prediction({"activations": "a bucket of the file's size"}, _unknown),
    templates=("Trainer",),
    adopt=merge_file,
    needs_package=DEEPSPEED["needs_package"],
    install=DEEPSPEED["install"],
    notes=_notes,
    receipt=("optimizer_state_bytes", "zero_optimization"),
    acted=_acted,
    rules=tuple(RULES),
)
