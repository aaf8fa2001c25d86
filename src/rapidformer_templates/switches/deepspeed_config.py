"""A DeepSpeed file of the user's own, with ``"auto"`` values filled from the flags."""

from __future__ import annotations

from dataclasses import dataclass

from rapidformer_templates import deepspeed_file
from rapidformer_templates.flags import flag
from rapidformer_templates.switches._changes import add
from rapidformer_templates.switches._checks import PARTITIONING, needs_template
from rapidformer_templates.switches._switch import Example, Finding, Request, Rule, Stage, Switch
from rapidformer_templates.switches.zero import DEEPSPEED


@dataclass(frozen=True)
class DeepSpeedConfigFlags:
    """Acceleration"""

    deepspeed_config: str | None = flag(
        None, "DeepSpeed file (or its JSON); its 'auto' values come from the flags", metavar="FILE"
    )


def _pipeline_inside_deepspeed(request: Request) -> list[Finding]:
    zero = [switch.name for switch in request.of_family(PARTITIONING) if switch.name in ("zero-2", "zero-3")]
    if not zero or "pipeline-parallel" not in request.active:
        return []
    clash = ("deepspeed-config", "pipeline-parallel", *zero)
    message = f"{zero[0]} does not work with a pipeline that DeepSpeed runs"
    return [Finding(message, request.asked_for(*clash), switches=clash)]


def _needs_deepspeed_engine(request: Request) -> list[Finding]:
    others = [switch.name for switch in request.of_family(PARTITIONING) if not switch.name.startswith("zero-")]
    return [
        *needs_template("deepspeed-config")(request),
        *(
            Finding(
                f"deepspeed-config does not work together with {name}",
                request.asked_for("deepspeed-config", name),
                switches=("deepspeed-config", name),
            )
            for name in others
        ),
    ]


def _needs_a_stage(request: Request) -> list[Finding]:
    if any(name.startswith("zero-") for name in request.active):
        return []
    message = "deepspeed-config needs a ZeRO stage, in the file or as a flag"
    asked, levels = request.asked_for("deepspeed-config"), (2, 1, 3)
    changes = tuple(add({f"zero_{level}_memory_optimization": True}) for level in levels)
    return [Finding(message, asked, switches=("deepspeed-config",), changes=changes)]


def _agrees(request: Request) -> list[Finding]:
    return [
        Finding(message, request.asked_for("deepspeed-config"), switches=("deepspeed-config",))
        for message, _ in deepspeed_file.contradictions(request)
    ]


SWITCH = Switch(
    name="deepspeed-config",
    summary="Your own DeepSpeed file.",
    source="[D]",
    stage=Stage.SHARD,
    options=DeepSpeedConfigFlags,
    active=lambda options, sizes: options.deepspeed_config is not None,
    on={"deepspeed_config": "ds.json"},
    off={"deepspeed_config": None},
    templates=("Trainer",),
    needs_package=DEEPSPEED["needs_package"],
    install=DEEPSPEED["install"],
    receipt=("optimizer_state_bytes",),
    rules=(
        Rule(
            "RF021",
            "ZeRO-2 and ZeRO-3 do not work with a pipeline inside DeepSpeed.",
            "DeepSpeed's pipeline accumulates whole gradients, which ZeRO-2 and ZeRO-3 partition",
            "[deepspeed]",
            _pipeline_inside_deepspeed,
            Example(
                "--deepspeed-config ds.json --zero-2-memory-optimization "
                " --pipeline-model-parallel-size 2 --world-size 2"
            ),
        ),
        Rule(
            "RF028",
            "A DeepSpeed file needs the Trainer template and no other partitioning than ZeRO.",
            "DeepSpeed owns the optimizer step, and two engines cannot own it",
            "[D]",
            _needs_deepspeed_engine,
            Example("--deepspeed-config ds.json --fsdp-memory-optimization --world-size 2"),
        ),
        Rule(
            "RF037",
            "A DeepSpeed file names a ZeRO stage, or a flag does.",
            "without a stage DeepSpeed partitions nothing",
            "[D]",
            _needs_a_stage,
            Example("--deepspeed-config ds.json"),
        ),
        Rule(
            "RF036",
            "A DeepSpeed file and the flags say the same.",
            "of two values one would be ignored in silence",
            "[D]",
            _agrees,
            Example(
                '--deepspeed-config \'{"zero_optimization": {"stage": 3}}\' '
                "--zero-2-memory-optimization --world-size 2",
                machine={"packages": {"deepspeed": "0.19"}},
            ),
        ),
    ),
)
