"""Memory of a worker: the model's states by the rules of the engine, and the phases of a micro batch beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rapidformer_templates.planner.layouts import Layout
from rapidformer_templates.planner.model_shapes import ModelShapes, Variant
from rapidformer_templates.planner.stage_memory import Moment, Stage, telling_stages
from rapidformer_templates.planner.states import (
    FP32,
    KEPT_WHOLE,
    Facts,
    Formula,
    Held,
    cut_each,
    cut_groups,
    cut_in_rows,
    replicated,
)
from rapidformer_templates.planner.trace import Phase, Trace

FORMULAS: dict[str, Formula] = {
    "none": replicated,
    "zero-1": cut_groups,
    "zero-2": cut_groups,
    "zero-3": cut_each,
    "fsdp": cut_in_rows,
}
"""What each engine holds of the states between two steps."""

REDUCE_BUCKET = 20_000_000
"""Elements of the buffer in which ZeRO gathers gradients (``reduce_bucket_size`` of the plan)."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker when most are alive.

    Attributes:
        parameters, gradients, optimizer: the states; gradients as they are when the update begins.
        buffers: what an engine holds beside them: buckets, whole parameters of blocks that are at work.
        activations: everything else that is alive then. Where the peak is before the gradients are
            there, their memory is used for activations, and only the rest counts here.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.activations


def predict(model: ModelShapes, layout: Layout, precision: str = "fp32", *, exact: bool = True) -> Memory:
    """The memory of the worker that needs most.

    Args:
        precision: ``fp32``, ``bf16`` or ``fp16``: what the products are computed in.
        exact: see :meth:`ModelShapes.trace`.
    """
    variant = variant_of(layout, precision)
    if layout.tensor * layout.pipeline > 1:
        stages = telling_stages(model, layout)
        return max((_of_stage(model, stage, variant, exact=exact) for stage in stages), key=lambda memory: memory.total)
    narrow = variant.narrow_parameters
    width = 2 if narrow and layout.partitioning != "fsdp" else FP32
    facts = list(model.parameters.values())
    held = max(held_by_rank(facts, layout, width), key=lambda h: h.parameters + h.gradients + h.optimizer)
    return _worst(model, layout, held, model.trace(variant, exact=exact), 2 if narrow else FP32)


def held_by_worker(model: ModelShapes, layout: Layout, precision: str = "fp32") -> list[Held]:
    """The states of every worker, by rank: tensor-parallel peers lie closest, then replicas, then stages."""
    if layout.tensor * layout.pipeline == 1:
        width = 2 if variant_of(layout, precision).narrow_parameters and layout.partitioning != "fsdp" else FP32
        return held_by_rank(list(model.parameters.values()), layout, width)
    return [
        Stage(model, layout, stage).held(replica)
        for stage in range(layout.pipeline)
        for replica in range(layout.data)
        for _ in range(layout.tensor)
    ]


def states_alone(model: ModelShapes, layout: Layout, precision: str) -> Memory:
    """The states of the worker that holds most, without anything beside them: a lower bound that costs nothing."""
    if layout.tensor * layout.pipeline > 1:
        held = [stage.held() for stage in telling_stages(model, layout)]
    else:
        width = 2 if variant_of(layout, precision).narrow_parameters and layout.partitioning != "fsdp" else FP32
        held = held_by_rank(list(model.parameters.values()), layout, width)
    most = max(held, key=lambda h: h.parameters + h.gradients + h.optimizer)
    return Memory(most.parameters, most.gradients, most.optimizer, 0, 0)


def _of_stage(model: ModelShapes, stage: Stage, variant: Variant, *, exact: bool) -> Memory:
    held = stage.held()  # of the first replica, whose shares have no padding
    return _memory(model, held, stage.moments(variant, exact=exact))


def variant_of(layout: Layout, precision: str) -> Variant:
    """What a micro batch of this layout's activations depends on."""
    # DeepSpeed converts the model, and FSDP gathers its parameters in the type that is computed in.
    narrow = precision != "fp32" and layout.partitioning != "none" and layout.tensor * layout.pipeline == 1
    shared = layout.tensor, layout.sequence_parallel
    return Variant(layout.micro_batch, layout.recompute, precision, narrow, *shared)


def held_by_rank(parameters: list[Facts], layout: Layout, width: int) -> list[Held]:
    """The states of each replica's worker."""
    return FORMULAS[layout.partitioning](parameters, layout.data, width)


def _worst(model: ModelShapes, layout: Layout, held: Held, trace: Trace, width: int) -> Memory:
    moments = [moment for phase in trace.phases for moment in _beside(model, layout, held, phase, width)]
    return _memory(model, held, [*moments, _update(layout, held)])


def _memory(model: ModelShapes, held: Held, moments: Sequence[Moment]) -> Memory:
    """The worst of the moments, in the parts that people know."""
    worst = max(moments, key=lambda moment: moment.total)
    activations = worst.total - worst.buffers - held.gradients
    buffers = worst.buffers + model.buffer_bytes
    return Memory(held.parameters, held.gradients, held.optimizer, buffers + min(activations, 0), max(activations, 0))


def _beside(model: ModelShapes, layout: Layout, held: Held, phase: Phase, width: int) -> list[Moment]:
    """What may lie beside parameters and optimizer state in a phase, in the first micro batch and in later ones."""
    whole = width * sum(p.count for p in model.parameters.values())
    later = layout.accumulation > 1
    apart = phase.peak - phase.peak_without_gradients
    alone = phase.peak_without_gradients
    match layout.partitioning:
        case "none" if layout.data == 1:
            return [Moment(alone, apart, 0)] + ([Moment(alone, whole, 0)] if later else [])
        case "none":
            # DDP's buckets are the gradients; those of micro batches that are not sent yet lie beside them.
            return [Moment(alone, held.gradients, whole if later else 0)]
        case "zero-1" if later:
            # Gradients are added up whole, apart from those that come, and the bucket is there from the first one on.
            return [Moment(alone, whole, REDUCE_BUCKET * width + (whole if phase.after_first_gradient else 0))]
        case "zero-1" | "zero-2":
            # From the first gradient on: the bucket, and the parameters' gradients until they are given up.
            begun = phase.after_first_gradient
            bucket = REDUCE_BUCKET * width + whole if begun else 0
            added_up = held.gradients if layout.partitioning == "zero-2" and later else 0
            return [Moment(phase.peak if begun and not later else alone, 2 * added_up, bucket)]
        case "zero-3":
            return [Moment(alone, held.gradients, REDUCE_BUCKET * width + _gathered_by_zero(model, width))]
        case "fsdp":
            # Until they are summed, gradients of earlier micro batches lie whole in the type of the sum.
            gradients = FP32 // width * whole if later else apart // layout.data
            return [Moment(alone, gradients, _gathered_by_fsdp(model, phase, width))]
    raise KeyError(layout.partitioning)


def _update(layout: Layout, held: Held) -> Moment:
    """While the update runs: ZeRO-1 and -2 flatten the gradients of their share once more, in fp32."""
    flat = held.optimizer // 3 if layout.partitioning in ("zero-1", "zero-2") else 0
    return Moment(0, held.gradients, flat)


def _gathered_by_zero(model: ModelShapes, width: int) -> int:
    """Whole parameters that ZeRO-3 holds: all of them, until there are 10^9 elements, and what they arrive in."""
    return 2 * width * sum(p.count for p in model.parameters.values() if p.count >= KEPT_WHOLE)


def _gathered_by_fsdp(model: ModelShapes, phase: Phase, width: int) -> int:
    """Whole parameters that FSDP holds: of the root, of the block at work, and of the next one on its way."""
    block = width * model.largest_block
    root = width * model.outside_blocks
    if phase.name in ("begin", "end"):
        return root + (block if phase.name == "begin" else 0)
    if phase.name == "backward":
        # The block's gradient, and its copy in the order in which it is sent.
        arriving = block if width < FP32 else 0  # parameters of a narrow type are copied once more
        return root + 2 * block + arriving + 2 * FP32 * model.largest_block
    return root + 2 * block
