"""FSDP: torch's ``fully_shard`` on each block, its options, groups of workers, and its use inside 3D layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rapidformer_templates.errors import counted
from rapidformer_templates.planning import checks
from rapidformer_templates.planning.changes import add, drop, replace
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.plan import Dimension, EngineOptions, shards_of_experts
from rapidformer_templates.planning.request import precision
from rapidformer_templates.planning.switch import (
    Finding,
    Measured,
    Precedence,
    Prediction,
    Request,
    Resource,
    RuleList,
    Switch,
    always,
)


@dataclass(frozen=True)
class FsdpFlags:
    """Acceleration"""

    fsdp_memory_optimization: bool = flag(
        False,
        "FSDP: shard optimizer state, gradients and parameters (torch fully_shard)",
        choice=checks.PARTITIONING,
        usual=True,
    )


@dataclass(frozen=True)
class FsdpOptionsFlags:
    """Acceleration"""

    fsdp_reshard_after_forward: bool = flag(
        True, "FSDP: free a block's whole parameters between forward and backward; keeping them is faster"
    )
    fsdp_reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = flag(
        None, "FSDP with mixed precision: type in which gradients are summed (default: fp32)"
    )
    fsdp_reduce_every_micro_batch: bool = flag(
        True,
        "FSDP with accumulation: sum gradients over the workers in each micro batch; summing once per step sends less, "
        "but keeps the gradients of the whole model on each worker",
    )


@dataclass(frozen=True)
class HybridShardingFlags:
    """Acceleration"""

    fsdp_shard_size: int | None = flag(
        None,
        "FSDP: shard inside groups of N workers, with a copy in each group (default: one group of all workers)",
        metavar="N",
        minimum=1,
    )


@dataclass(frozen=True)
class ShardingStrategyFlags:
    """Acceleration"""

    data_parallel_sharding_strategy: Literal["optim", "optim_grads", "optim_grads_params"] = flag(
        "optim",
        "what the distributed optimizer shards: optimizer state, gradients as well, or also parameters, which a block "
        "gathers when it needs them (as FSDP does it)",
        only_with=("use_distributed_optimizer", True),
    )


SIZE = "fsdp_shard_size"
STRATEGY, ALL = "data_parallel_sharding_strategy", "optim_grads_params"
SHARDED: dict[str, Literal["optimizer", "gradients", "parameters"]] = {
    "optim": "optimizer",
    "optim_grads": "gradients",
    ALL: "parameters",
}
OFF = {declared.name: declared.default for declared in dataclasses.fields(FsdpOptionsFlags)}


FSDP_OPTIONS_RULES = RuleList()
HYBRID_SHARDING_RULES = RuleList()


@FSDP_OPTIONS_RULES.add("RF035", "[torch]", "--no-fsdp-reshard-after-forward --world-size 2")
def _options_need_fsdp(request: Request) -> Iterator[Finding]:
    """FSDP's options need FSDP, also that of the strategy optim_grads_params; the type of its sums needs mixed
    precision, fp16 also the loss scale.

    Why: no other engine gathers parameters for a forward; without mixed precision gradients are fp32, and without a
    loss scale small ones vanish in fp16.
    """
    options = (
        checks.Given("fsdp_reshard_after_forward", (False,)),
        checks.Given("fsdp_reduce_dtype"),
        checks.Given("fsdp_reduce_every_micro_batch", (False,)),
    )
    way, message = add({"fsdp_memory_optimization": True}), "{} has no effect without --fsdp-memory-optimization"
    yield from checks.needs(request, options, _gathers, way, message=message)
    # 16-bit sums need 16-bit products, and fp16 sums need the loss scale of fp16.
    reduce_dtype, computed = request.config.get("fsdp_reduce_dtype"), precision(request.config, request.environment)
    if reduce_dtype is None or not any(map(_gathers, request.active.values())):
        return
    changes = (drop({"fsdp_reduce_dtype": None}),)
    flags = request.asked("fsdp_reduce_dtype", "mixed_precision")
    if computed == "fp32":
        message = "--fsdp-reduce-dtype has no effect without --mixed-precision"
        way = add({"mixed_precision": "fp16" if reduce_dtype == "fp16" else "bf16"})
        yield Finding(message, flags, changes=(way, *changes))
    elif (computed, reduce_dtype) == ("bf16", "fp16"):
        message = "--fsdp-reduce-dtype fp16 needs the loss scale of --mixed-precision fp16"
        way = replace({"fsdp_reduce_dtype": "bf16"}, "has the range of fp32")
        yield Finding(message, flags, changes=(way, *changes))


def reshards(request: Request) -> bool:
    """Return whether a block's whole parameters are freed between forward and backward.

    In a pipeline a stage has several micro batches under way, and gathers its parameters for all of them at once.
    """
    is_asked = "fsdp_reshard_after_forward" in request.config.origins
    return bool(request.config.get("fsdp_reshard_after_forward")) and (is_asked or request.sizes.pipeline == 1)


def _gathers(switch: Switch) -> bool:
    """Return whether an engine with ``fully_shard`` trains."""
    return switch.name in ("fsdp", "sharding-strategy") and Resource.PARAMETERS in switch.claims


def _options(request: Request, options: EngineOptions) -> EngineOptions:
    get = request.config.get
    asked = {"reduce_dtype": get("fsdp_reduce_dtype"), "reduce_every_micro_batch": get("fsdp_reduce_every_micro_batch")}
    return _with_sharding(options, reshard_after_forward=reshards(request), **asked)


def _with_sharding(options: EngineOptions, **fields: object) -> EngineOptions:
    """Return the options with other fields of ``parameter_sharding``."""
    sharding = dataclasses.replace(options.parameter_sharding, **fields)  # type: ignore[arg-type]
    return dataclasses.replace(options, parameter_sharding=sharding)


def _workers_of_a_copy(measured: Measured) -> int:
    """Return the number of workers that FSDP shards a copy of the states over."""
    return int(measured.config.get(SIZE) or measured.plan.sizes.copies)


_SHARES = checks.first_finding(
    checks.check_even_shards(
        among=_workers_of_a_copy, updated_elements="optimizer state", gradient_elements="gradients"
    ),
    checks.divides_parameters,
)


def _gradients_divided(measured: Measured) -> str | None:
    """Check what the workers keep of the gradients between micro batches."""
    whole = max(measured.all("whole_gradients_between"), default=0)
    expected = not measured.config.get("fsdp_reduce_every_micro_batch")
    if measured.plan.sizes.accumulation == 1 or measured.plan.sizes.copies == 1 or (whole > 0) == expected:
        return None
    what = "whole gradients" if expected else "only shards of gradients"
    return f"{what} between micro batches were expected; {whole:,} elements are whole"


def _options_acted(measured: Measured) -> str | None:
    requested, summed = measured.config.get("fsdp_reduce_dtype"), measured["gradients_summed_in"]
    if requested is not None and summed != [requested]:
        return f"gradients summed in {requested} were expected; they are summed in {checks.shown(summed)}"
    whole, sharding = measured["whole_in_backward"], measured.plan.engine_options.parameter_sharding
    if sharding.reshard_after_forward or measured.plan.sizes.copies == 1 or whole == 1:
        return None
    return f"whole parameters at the start of the backward were expected; {whole or 0:.0%} of them are whole"


@HYBRID_SHARDING_RULES.add("RF297", "[torch]", "--fsdp-shard-size 2 --world-size 4")
def _groups_shard_parameters(request: Request) -> list[Finding]:
    """--fsdp-shard-size needs FSDP, also that of the strategy optim_grads_params.

    Why: other engines do not shard parameters, or shard them over all workers.
    """
    return checks.needs(request, "hybrid-sharding", _gathers, add({"fsdp_memory_optimization": True}))


@HYBRID_SHARDING_RULES.add("RF225", "[torch]", "--fsdp-memory-optimization --fsdp-shard-size 3 --world-size 4")
def _groups_fit(request: Request) -> Iterator[Finding]:
    """--fsdp-shard-size is above one and divides the workers.

    Why: every group shares one copy of the states, and all groups are equal; if each worker had its own copy, it would
    be plain data parallelism.
    """
    size, workers = request.config.get(SIZE), request.sizes.copies
    if size == 1 or workers % size:
        every = counted(workers, "worker")
        uneven = f"{every} cannot be divided into groups of {size}"
        message = uneven if size > 1 else "a group of one worker shards nothing"
        nearest = checks.nearest_divisor(SIZE, min(size, workers), lambda n: workers % n == 0)
        changes = (*nearest, drop({SIZE: None}, "one group of all workers"))
        yield Finding(message, (*request.asked(SIZE), f"{every} in all"), changes=changes)


def _dimensions(request: Request) -> Sequence[Dimension]:
    size, workers, neighbours = request.config.get(SIZE), request.sizes.copies, request.sizes.tensor
    return (
        Dimension("shards", "parameters and gradients", size, neighbours),
        Dimension("copies", "gradients of a shard", workers // size, size * neighbours),
    )


def _group_notes(request: Request) -> Sequence[str]:
    size, sizes = request.config.get(SIZE), request.sizes
    if size == sizes.copies:
        return (f"hybrid-sharding: one group of all {size} workers, as without --fsdp-shard-size",)
    if sizes.local_world % (size * sizes.tensor):
        nodes = f"nodes of {sizes.local_world} worker{'s' if sizes.local_world > 1 else ''}"
        return (f"hybrid-sharding: groups of {size} span {nodes}, where gathering parameters is slow",)
    return ()


def _copies_acted(measured: Measured) -> str | None:
    """Check that there are as many copies of each parameter as planned, and that they are equal bit for bit."""
    size, data = _workers_of_a_copy(measured), measured.plan.sizes.copies
    updated, whole = sum(measured.all("updated_elements")), sum(measured.all("trained_elements")) // data
    over, experts = measured.plan.engine_options.experts_over, measured["trained_over_experts"] or 0
    of_experts = data // over // shards_of_experts(data, size, over)
    kept = int(measured["kept_whole"] or 0)
    divided = (whole - experts - kept) * (data // size) + experts * of_experts
    if not updated or updated != divided + kept * data:
        copies = f"the workers have {updated:,} elements together, {whole:,} of the model are trained"
        return f"{data // size} copies of shares for {size} workers were expected; {copies}"
    if measured["copies_equal"] is not True:
        return f"{data // size} equal copies were expected; after an update they differ"
    return None


def _strategy(request: Request, options: EngineOptions) -> EngineOptions:
    sharded = SHARDED[request.config.get(STRATEGY)]
    if sharded == "parameters":
        options = _with_sharding(options, reshard_after_forward=reshards(request))
    return dataclasses.replace(options, shard_over_data=sharded)


def _strategy_notes(request: Request) -> Sequence[str]:
    if request.config.get(STRATEGY) != ALL or request.sizes.pipeline == 1 or reshards(request):
        return ()
    gathers = "a stage gathers its parameters once per step; --fsdp-reshard-after-forward frees them in between"
    return (f"sharding-strategy: {gathers}",)


def _strategy_acted(measured: Measured) -> str | None:
    checked = [checks.check_even_shards(among=_workers_of_a_copy, gradient_elements="gradients")]
    if measured.config.get(STRATEGY) == ALL:
        checked += [checks.check_even_shards(among=_workers_of_a_copy, held_elements="parameters")]
    return checks.first_finding(*checked)(measured)


def _variant(switch: Switch, options: ShardingStrategyFlags) -> Switch:
    """Return the switch that shards what the strategy names."""
    if options.data_parallel_sharding_strategy != ALL:
        return switch
    return dataclasses.replace(
        switch,
        claims=switch.claims | {Resource.PARAMETERS},
        master_weights=False,  # the fp32 shards are gathered in the compute type
        builds_in_shares=True,
        freed_memory="given back",
    )


SWITCHES = (
    Switch(
        name="fsdp",
        summary="Shard parameters, gradients and optimizer state, a block at a time (torch fully_shard).",
        source="[R]",
        precedence=Precedence.SHARD,
        options=FsdpFlags,
        predicts=Prediction(
            dict.fromkeys(("parameters", "gradients", "optimizer"), "a share of each parameter")
            | {"activations": "and the whole parameters of the blocks at work", "time": "what is gathered and summed"}
        ),
        family=checks.PARTITIONING,
        claims=frozenset({Resource.OPTIMIZER_STATE, Resource.GRADIENTS, Resource.PARAMETERS}),
        divides_copies=True,
        notes=checks.idle_without_copies("fsdp: one worker, so there is nothing to shard"),
        engine="rapidformer_templates.switches.fsdp.engine:FSDPEngine",
        freed_memory="given back",
        builds_in_shares=True,
        receipt=("parameter_bytes", "parameter_bytes_whole", "optimizer_state_bytes", "whole_gradients_between"),
        acted=checks.first_finding(_SHARES, _gradients_divided),
    ),
    Switch(
        name="fsdp-options",
        summary="Whether FSDP keeps parameters whole between forward and backward, and when and in which type it sums "
        "gradients.",
        source="[torch]",
        precedence=Precedence.SHARD,
        options=FsdpOptionsFlags,
        active=lambda options, sizes: any(getattr(options, name) != off for name, off in OFF.items()),
        on={"fsdp_reshard_after_forward": False},
        off=OFF,
        predicts=Prediction(
            {
                "activations": "without resharding, all whole parameters in addition; with one sum per step, all whole "
                "gradients",
            },
            always(time="gathering once or twice and the type of the sums make no difference"),
        ),
        engine_options=_options,
        receipt=("parameter_bytes_in_backward", "whole_in_backward", "gradients_summed_in"),
        acted=_options_acted,
        rules=tuple(FSDP_OPTIONS_RULES),
    ),
    Switch(
        name="hybrid-sharding",
        summary="Shard inside groups of N workers, and sum gradients between the groups' copies (torch fully_shard).",
        source="[torch]",
        precedence=Precedence.SHARD,
        options=HybridShardingFlags,
        on={"fsdp_memory_optimization": True, SIZE: 2},
        off={SIZE: None},
        active=lambda options, sizes: options.fsdp_shard_size is not None,
        predicts=Prediction(
            dict.fromkeys(
                ("parameters", "gradients", "optimizer"), "a share of each parameter for each worker of a group"
            )
            | {
                "activations": "whole parameters of the blocks at work, as without it",
                "time": "what is gathered and summed inside a group, and summed between the copies",
            }
        ),
        notes=_group_notes,
        dimensions=_dimensions,
        engine_options=lambda request, options: _with_sharding(options, shard_size=request.config.get(SIZE)),
        receipt=("copies", "copies_equal", "parameter_bytes", "parameter_bytes_whole"),
        receipt_hooks="rapidformer_templates.switches.fsdp.engine:ShardCopies",
        acted=_copies_acted,
        rules=tuple(HYBRID_SHARDING_RULES),
    ),
    Switch(
        name="sharding-strategy",
        summary="Let the distributed optimizer shard gradients and parameters, too (torch fully_shard).",
        source="[M, torch]",
        precedence=Precedence.SHARD,
        options=ShardingStrategyFlags,
        on={"use_distributed_optimizer": True, STRATEGY: ALL},
        off={STRATEGY: "optim"},
        active=lambda options, sizes: options.data_parallel_sharding_strategy != "optim",
        predicts=Prediction(
            dict.fromkeys(("parameters", "gradients"), "a share of each worker's part")
            | {"activations": "and the whole parts of the blocks at work", "time": "what is gathered and summed"}
        ),
        claims=frozenset({Resource.GRADIENTS}),
        templates=("Trainer",),
        notes=_strategy_notes,
        variant=_variant,
        engine_options=_strategy,
        receipt=("parameter_bytes", "parameter_bytes_whole", "gradient_bytes"),
        acted=_strategy_acted,
    ),
)
