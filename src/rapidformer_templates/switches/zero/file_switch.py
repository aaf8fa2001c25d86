"""The deepspeed-config switch: your DeepSpeed file. Flags fill its ``"auto"`` values, and its values are checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from rapidformer_templates.planning.checks import PARTITIONING, needs_template, partitions_without_zero, refuse_pair
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
    Example,
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
    "ZeRO-2 and ZeRO-3 do not work with a pipeline inside DeepSpeed.",
    "DeepSpeed's pipeline accumulates whole gradients, which ZeRO-2 and ZeRO-3 partition",
    "[deepspeed]",
    Example("--deepspeed-config ds.json --zero-2-memory-optimization  --pipeline-model-parallel-size 2 --world-size 2"),
    refusal="ZeRO-2 or ZeRO-3 with a pipeline and a DeepSpeed file.",
)
def _pipeline_inside_deepspeed(request: Request) -> list[Finding]:
    zero = [switch.name for switch in request.of_family(PARTITIONING) if switch.name in ("zero-2", "zero-3")]
    if not zero or "pipeline-parallel" not in request.active:
        return []
    clash = ("deepspeed-config", "pipeline-parallel", *zero)
    message = f"{zero[0]} does not work with a pipeline that DeepSpeed runs"
    return [Finding(message, request.asked_for(*clash), switches=clash)]


_NEEDS_TRAINER = needs_template("deepspeed-config")
_OTHER_ENGINES = refuse_pair("deepspeed-config", partitions_without_zero)


@RULES.add(
    "RF028",
    "A DeepSpeed file needs the Trainer template, and ZeRO is the only partitioning that it can be combined with.",
    "DeepSpeed owns the optimizer step, and two engines cannot own it",
    "[D]",
    Example("--deepspeed-config ds.json --fsdp-memory-optimization --world-size 2"),
    refusal="A DeepSpeed file in another template than Trainer, or next to a partitioning other than ZeRO.",
)
def _needs_deepspeed_engine(request: Request) -> list[Finding]:
    return [*_NEEDS_TRAINER(request), *_OTHER_ENGINES(request)]


@RULES.add(
    "RF037",
    "A DeepSpeed file names a ZeRO stage, or a flag does.",
    "without a stage DeepSpeed partitions nothing",
    "[D]",
    Example("--deepspeed-config ds.json"),
    refusal="A DeepSpeed file without a ZeRO stage, if no flag sets one either.",
)
def _needs_a_zero_stage(request: Request) -> list[Finding]:
    if any(name.startswith("zero-") for name in request.active):
        return []
    message = "deepspeed-config needs a ZeRO stage, in the file or as a flag"
    flags, levels = request.asked_for("deepspeed-config"), (2, 1, 3)
    changes = tuple(add({f"zero_{level}_memory_optimization": True}) for level in levels)
    return [Finding(message, flags, switches=("deepspeed-config",), changes=changes)]


@RULES.add(
    "RF036",
    "A DeepSpeed file and the flags agree.",
    "one of two values would be silently ignored",
    "[D]",
    Example(
        '--deepspeed-config \'{"zero_optimization": {"stage": 3}}\' --zero-2-memory-optimization --world-size 2',
        machine={"packages": {"deepspeed": "0.19"}},
    ),
    refusal="A value in a DeepSpeed file that contradicts a flag.",
)
def _agrees(request: Request) -> list[Finding]:
    return [
        Finding(message, request.asked_for("deepspeed-config"), switches=("deepspeed-config",))
        for message in contradictions(request)
    ]


@RULES.add(
    "RF102",
    "DeepSpeed or this library acts on every key of a DeepSpeed file, and accepts its value.",
    "a key that nothing reads would be silently ignored, and a wrong value fails in a worker",
    "[D, deepspeed]",
    Example(
        '--deepspeed-config \'{"zero_optimization": {"stage": 2}, "gradient_cliping": 1.0}\' '
        "--zero-2-memory-optimization --world-size 2",
        machine={"packages": {"deepspeed": "0.19"}},
    ),
    refusal="A key of a DeepSpeed file that would have no effect, or a value that DeepSpeed does not accept.",
)
def _act(request: Request) -> list[Finding]:
    file, flags = file_of(request), request.asked_for("deepspeed-config")
    problems = (*unknown_keys(file), *idle_keys(file), *deepspeed_problems(file.content))
    return [
        Finding(message, (*flags, f"{path} ({file.where(path)})"), switches=("deepspeed-config",))
        for path, message in problems
    ]


@RULES.add(
    "RF104",
    "Under 3D parallelism a DeepSpeed file contains only what flags can set.",
    "the library's own sharding replaces DeepSpeed there",
    "[M]",
    Example(
        '--deepspeed-config \'{"zero_optimization": {"stage": 1}, "wall_clock_breakdown": true}\' '
        "--zero-1-memory-optimization --pipeline-model-parallel-size 2 --world-size 2",
    ),
    refusal="Keys that only DeepSpeed knows, in a file for a run with 3D parallelism.",
)
def _deepspeed_is_there(request: Request) -> list[Finding]:
    taken_over = any(name in request.active and not request.active[name].engine for name in ("zero-1", "zero-2"))
    unsupported = keys_without_flag(request)
    if not unsupported or (request.sizes.divides == 1 and not taken_over):
        return []
    dividing = ("tensor-parallel", "pipeline-parallel", "expert-parallel")
    clash = ("deepspeed-config", *(name for name in dividing if name in request.active))
    where = "under 3D parallelism" if request.sizes.divides > 1 else "with divided experts"
    message = f"DeepSpeed does not run {where}, and only it knows {', '.join(unsupported)}"
    return [Finding(message, request.asked_for(*clash), switches=clash)]


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
