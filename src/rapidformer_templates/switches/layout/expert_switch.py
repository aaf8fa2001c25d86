"""The expert-parallel switch: each worker of a group has a share of the experts, and tokens travel to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rapidformer_templates.errors import counted
from rapidformer_templates.planning import checks
from rapidformer_templates.planning.changes import drop, replace
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.plan import PARALLEL_ENGINE, Dimension
from rapidformer_templates.planning.switch import (
    Finding,
    Measured,
    Precedence,
    Prediction,
    Request,
    RuleList,
    Switch,
    always,
)
from rapidformer_templates.switches.mixture_of_experts.declaration import UNDIVIDED, has_experts_to_use


@dataclass(frozen=True)
class ExpertParallelFlags:
    """Acceleration"""

    expert_parallel: bool = flag(
        False, "divide the experts over all workers that have copies of the rest (all-to-all of tokens)"
    )
    expert_model_parallel_size: int | None = flag(
        None,
        "divide the experts inside groups of N workers that have copies of the rest, with a copy in each group",
        metavar="N",
        minimum=1,
    )


SIZE = "expert_model_parallel_size"


def _group(request: Request) -> int:
    """Return the number of workers that the experts are divided over, out of those with copies of everything else."""
    return int(request.config.get(SIZE) or request.sizes.copies)


def _group_text(request: Request) -> str:
    sizes = request.sizes
    context = f"context size {sizes.context} × " if sizes.context > 1 else ""
    return f"{context}data-parallel size {sizes.data}"


RULES = RuleList()


@RULES.add("RF020", "[deepspeed]", "--num-experts 3 --expert-parallel --world-size 2")
def _experts_divide(request: Request) -> Iterator[Finding]:
    """The number of experts is a multiple of the workers that they are divided over.

    Why: each worker holds the same number of experts.
    """
    experts, group = request.config.get("num_experts") or request.model.num_experts, _group(request)
    if experts is not None and experts % group:
        above = -(-experts // group) * group
        message = f"{experts} experts cannot be divided evenly over {group} workers"
        flags = (*request.asked("num_experts", "expert_parallel", SIZE), _group_text(request))
        changes = tuple(replace({"num_experts": n}) for n in (above, above - group) if n)
        yield Finding(message, flags, ("expert-parallel",), changes)


@RULES.add("RF277", "[M]", "--num-experts 6 --expert-model-parallel-size 3 --world-size 4")
def _groups_fit(request: Request) -> Iterator[Finding]:
    """--expert-model-parallel-size divides the workers that have copies of everything else: data × context.

    Why: every group of them has one copy of the experts, and all groups are equal; --expert-parallel is one group of
    all of them.
    """
    size, workers = request.config.get(SIZE), request.sizes.copies
    if size is not None and request.config.get("expert_parallel") and size != workers:
        message = f"--expert-parallel divides over all {workers} workers, not over {size}"
        yield from checks.clash(request, checks.Given("expert_parallel"), checks.Given(SIZE), message=message)
    elif size is not None and workers % size:
        message = f"{counted(workers, 'worker')} cannot be divided into groups of {size}"
        changes = (*checks.nearest_divisor(SIZE, min(size, workers), lambda n: workers % n == 0), drop({SIZE: None}))
        yield Finding(message, (*request.asked(SIZE), _group_text(request)), ("expert-parallel",), changes)


@RULES.add(
    "RF074", "[fairscale, deepspeed]", "--num-experts 4 --expert-parallel --zero-3-memory-optimization --world-size 2"
)
def _partitions_copies(request: Request) -> list[Finding]:
    """Divided experts can be combined only with partitioning of a parameter's states among the workers that have copies
    of it: FSDP, ZeRO-1, ZeRO-2 and the distributed optimizer, also with CPU offload.

    Why: an expert is on fewer workers than everything else, but fairscale has one process group for all parameters, and
    DeepSpeed refuses its own experts under ZeRO-3.
    """

    def ignores_copies(switch: Switch) -> bool:
        return switch.family in (checks.PARTITIONING, "offload") and not switch.divides_copies

    return checks.clash(request, "expert-parallel", ignores_copies, message=checks.TOGETHER_REVERSED)


def _dimensions(request: Request) -> Sequence[Dimension]:
    size, workers, neighbours = _group(request), request.sizes.copies, request.sizes.tensor
    copies = (Dimension("expert copies", "gradients of an expert", workers // size, size * neighbours),)
    experts = Dimension("experts", "tokens, to their experts and back", size, neighbours)
    return (experts, *(copies if workers > size else ()))


def _acted(measured: Measured) -> str | None:
    if measured.plan.engine_options.experts_over == 1 or any(measured.all("divided_over_experts")):
        return None
    return "experts divided over the workers were expected; every worker has all of them"


EXPERT_PARALLEL = Switch(
    name="expert-parallel",
    summary="Each worker of a group holds a share of the experts; tokens travel to them.",
    source="[S]",
    no_second_forward="adds losses over all tokens of a forward",
    precedence=Precedence.SHARD,
    options=ExpertParallelFlags,
    active=lambda options, sizes: options.expert_parallel or (options.expert_model_parallel_size or 1) > 1,
    on={"expert_parallel": True, "num_experts": 8},
    off=UNDIVIDED,
    dimensions=_dimensions,
    engine_options=lambda request, options: dataclasses.replace(options, experts_over=_group(request)),
    predicts=Prediction(
        dict.fromkeys(("parameters", "gradients", "optimizer"), "a share of the experts")
        | {"time": "tokens to the experts and back, each over the same distance"},
        always(activations="as if as many tokens arrived as left: the gate decides how many do"),
    ),
    notes=checks.idle_without_copies("expert-parallel: one worker, so there is nothing to divide"),
    transform="rapidformer_templates.switches.layout.experts:divide_experts",
    engine="rapidformer_templates.switches.layout.experts:ExpertParallelEngine",
    builds_in_shares=True,
    copies_differ=True,
    in_layout=lambda switch: dataclasses.replace(switch, engine=PARALLEL_ENGINE, master_weights=True),
    receipt=("parameter_bytes", "parameter_bytes_whole", "optimizer_state_bytes"),
    acted=_acted,
    rules=(has_experts_to_use, *RULES),
)
