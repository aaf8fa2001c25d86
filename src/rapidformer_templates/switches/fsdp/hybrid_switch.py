"""Hybrid sharding: FSDP inside groups of workers. Each group has a copy of the model's states."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.plan import Dimension, EngineOptions
from rapidformer_templates.planning.switch import (
    Example,
    Finding,
    Measured,
    Precedence,
    Prediction,
    Request,
    Rule,
    Switch,
    drop,
    replace,
)
from rapidformer_templates.switches.fsdp.expert_shards import shards_of_experts

SIZE = "fsdp_shard_size"


@dataclass(frozen=True)
class HybridShardingFlags:
    """Acceleration"""

    fsdp_shard_size: int | None = flag(
        None,
        "FSDP: shard inside groups of N workers, with a copy in each group (default: one group of all workers)",
        metavar="N",
        minimum=1,
        only_with=("fsdp_memory_optimization", True),
    )


def shares(measured: Measured) -> int:
    """Return the number of workers that FSDP shards a copy of the states over."""
    return int(measured.config.get(SIZE) or measured.plan.sizes.copies)


def _groups_fit(request: Request) -> list[Finding]:
    size, workers = request.config.get(SIZE), request.sizes.copies
    if size > 1 and workers % size == 0:
        return []
    nearest = next((n for n in range(min(size, workers), 1, -1) if workers % n == 0), None)
    every = f"{workers} worker{'s' if workers > 1 else ''}"
    message = f"{every} cannot be divided into groups of {size}" if size > 1 else "a group of one worker shards nothing"
    return [
        Finding(
            message,
            (*request.asked(SIZE), f"{every} in all"),
            changes=(
                *((replace({SIZE: nearest}),) if nearest else ()),
                drop({SIZE: None}, "one group of all workers"),
            ),
        )
    ]


def _dimensions(request: Request) -> Sequence[Dimension]:
    size, workers = request.config.get(SIZE), request.sizes.copies
    return (
        Dimension("shards", "parameters and gradients", size),
        Dimension("copies", "gradients of a shard", workers // size, size),
    )


def _notes(request: Request) -> Sequence[str]:
    size, sizes = request.config.get(SIZE), request.sizes
    if size == sizes.copies:
        return (f"hybrid-sharding: one group of all {size} workers, as without --fsdp-shard-size",)
    if sizes.local_world % size:
        nodes = f"nodes of {sizes.local_world} worker{'s' if sizes.local_world > 1 else ''}"
        return (f"hybrid-sharding: groups of {size} span {nodes}, where gathering parameters is slow",)
    return ()


def _options(request: Request, options: EngineOptions) -> EngineOptions:
    sharding = dataclasses.replace(options.parameter_sharding, shard_size=request.config.get(SIZE))
    return dataclasses.replace(options, parameter_sharding=sharding)


def _acted(measured: Measured) -> str | None:
    """Check that there are as many copies of each parameter as planned, and that they are equal bit for bit."""
    size, data = shares(measured), measured.plan.sizes.copies
    updated, whole = sum(measured.all("updated_elements")), sum(measured.all("trained_elements")) // data
    over, experts = measured.plan.engine_options.experts_over, measured["divided_over_experts"] or 0
    of_experts = data // over // shards_of_experts(data, size, over)
    if not updated or updated != (whole - experts) * (data // size) + experts * of_experts:
        copies = f"the workers have {updated:,} elements together, {whole:,} of the model are trained"
        return f"{data // size} copies of shares for {size} workers were expected; {copies}"
    if measured["copies_equal"] is not True:
        return f"{data // size} equal copies were expected; after an update they differ"
    return None


HYBRID_SHARDING = Switch(
    name="hybrid-sharding",
    summary="Shard inside groups of N workers, and sum gradients between the groups' copies (torch fully_shard).",
    source="[torch]",
    precedence=Precedence.SHARD,
    options=HybridShardingFlags,
    on={"fsdp_memory_optimization": True, SIZE: 2},
    off={SIZE: None},
    active=lambda options, sizes: options.fsdp_shard_size is not None,
    predicts=Prediction(
        dict.fromkeys(("parameters", "gradients", "optimizer"), "a share of each parameter for each worker of a group")
        | {
            "activations": "whole parameters of the blocks at work, as without it",
            "time": "what is gathered and summed inside a group, and summed between the copies",
        }
    ),
    notes=_notes,
    dimensions=_dimensions,
    engine_options=_options,
    receipt=("copies", "copies_equal", "parameter_bytes", "parameter_bytes_whole"),
    receipt_hooks="rapidformer_templates.switches.fsdp.receipt:ShardCopies",
    acted=_acted,
    rules=(
        Rule(
            "RF225",
            "--fsdp-shard-size is above one and divides the workers.",
            "every group shares one copy of the states, and all groups are equal; if each worker had its own copy, "
            "it would be plain data parallelism",
            "[torch]",
            _groups_fit,
            Example("--fsdp-memory-optimization --fsdp-shard-size 3 --world-size 4"),
            refusal="A size of FSDP groups that is one or does not divide the workers.",
        ),
    ),
)
