"""Memory of a worker: the model's states by the rules of the engine, plus the phases of a micro batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

from rapidformer_templates.planning.optimizer_states import FP32
from rapidformer_templates.planning.plan import shards_of_experts
from rapidformer_templates.switches.auto_strategy import state_bytes
from rapidformer_templates.switches.auto_strategy.layouts import Layout, MemoryOptions
from rapidformer_templates.switches.auto_strategy.model_shapes import ModelShapes, Variant
from rapidformer_templates.switches.auto_strategy.results import Memory
from rapidformer_templates.switches.auto_strategy.stage_memory import (
    MemorySnapshot,
    Stage,
    kind_of_stage,
    peak_stage_candidates,
)
from rapidformer_templates.switches.auto_strategy.state_bytes import Formula, StateBytes
from rapidformer_templates.switches.auto_strategy.trace import Phase

FORMULAS: dict[str, dict[str, Formula]] = {
    "": {
        "none": state_bytes.replicated,
        "oss": state_bytes.owned,
        "oss-sdp": state_bytes.owned_with_gradients,
        "zero-1": state_bytes.divided_groups,
        "zero-2": state_bytes.divided_groups,
        "zero-3": state_bytes.each_divided,
        "fsdp": state_bytes.divided_in_rows,
    },
    "cpu": {
        "none": state_bytes.replicated_on_host,
        "zero-1": state_bytes.divided_groups_on_host,
        "zero-2": state_bytes.divided_groups_on_host,
        "zero-3": state_bytes.each_divided_on_host,
    },
    "nvme": {"zero-3": state_bytes.each_divided_on_disk},
}
"""Bytes of the states that each engine holds between two steps, by where the optimizer's state is offloaded."""


PLAIN = MemoryOptions()


def predict(model: ModelShapes, layout: Layout, setting: MemoryOptions = PLAIN, *, exact: bool = True) -> Memory:
    """Predict the memory of the worker that needs most.

    Args:
        exact: see :meth:`ModelShapes.trace`.
    """
    memory = _in_bf16(model, layout, setting, exact=exact)
    if not setting.fp8:
        return memory
    casts = model.trace(variant_of(layout, setting), exact=exact).fp8_casts(fuses=setting.fuses)
    return replace(memory, buffers=memory.buffers + casts)


def _in_bf16(model: ModelShapes, layout: Layout, setting: MemoryOptions, *, exact: bool) -> Memory:
    """Predict the memory without the casts of fp8."""
    variant = variant_of(layout, setting)
    if setting.by_parallel_engine(layout):
        stages = peak_stage_candidates(model, layout, setting)
        memories = (of_stage(stage, variant, layout.accumulation, exact=exact) for stage in stages)
        return max(memories, key=lambda memory: memory.total)
    states = largest_states(model, layout.of_states, setting)
    trace = model.trace(variant, exact=exact)
    on_device = states.on_gpu if setting.gpu else states
    if layout.as_fsdp:
        moments = [*Sharded(model, layout, setting, _width(layout, setting), trace.phases).moments()]
    else:
        moments = [moment for phase in trace.phases for moment in _beside(model, layout, setting, on_device, phase)]
    # ZeRO-1 and -2 flatten the gradients of their share once more for the update, in fp32.
    flat = on_device.optimizer // 3 if layout.partitioning in ("zero-1", "zero-2") else 0
    moments.append(MemorySnapshot(0, on_device.gradients, flat))
    return _memory(model, states, moments, trace.sent, gpu=setting.gpu)


def states_by_worker(
    model: ModelShapes, layout: Layout, setting: MemoryOptions = PLAIN, *, largest: bool = False
) -> list[StateBytes]:
    """Return the states of every worker, by rank. Tensor-parallel peers are adjacent, then replicas, then stages.

    Args:
        largest: leave out workers of which it is known that another one has more.
    """
    if setting.by_parallel_engine(layout):
        return [
            kind_of_stage(layout)(model, layout, stage, setting, peer).states(replica)
            for stage in range(layout.pipeline)
            for replica in range(layout.replicas)
            for peer in range(layout.tensor)
        ]
    formula = FORMULAS[setting.offload]["fsdp" if layout.as_fsdp else layout.partitioning]
    ranks = 1 if largest else None
    if layout.experts > 1 and layout.as_fsdp:
        shards = shards_of_experts(layout.replicas, layout.shares, layout.experts)
        formula = partial(state_bytes.divided_in_rows_beside_experts, over=layout.experts, shards=shards, ranks=ranks)
    elif layout.as_fsdp:
        formula = partial(state_bytes.divided_in_rows, ranks=ranks)
    elif layout.experts > 1:
        formula = partial(state_bytes.divided_experts, over=layout.experts)
    width = 2 if variant_of(layout, setting).weights == "narrow" and not layout.as_fsdp else FP32
    trained, frozen = (
        formula(parameters, layout.shares, width, setting.how)
        for parameters in (list(model.parameters.values()), model.frozen_of(model.all_parameters.values()))
    )
    return [states.with_frozen(others) for states, others in zip(trained, frozen, strict=True)] * layout.copies


@lru_cache(maxsize=4096)  # layouts that differ in their batches have equal states
def largest_states(model: ModelShapes, of_states: Layout, setting: MemoryOptions) -> StateBytes:
    """Return the states of the worker that has the most. Pass ``layout.of_states``, so that equal ones are found."""
    return max(states_by_worker(model, of_states, setting, largest=True), key=lambda states: states.total)


def states_alone(model: ModelShapes, layout: Layout, setting: MemoryOptions) -> Memory:
    """Return only the states of the worker that holds most of them. It is a lower bound that costs nothing."""
    if setting.by_parallel_engine(layout):
        stages = peak_stage_candidates(model, layout, setting)
        most = max((stage.least_states for stage in stages), key=lambda states: states.total)
    else:
        most = largest_states(model, layout.of_states, setting)
    on_device = most.on_gpu if setting.gpu else most
    return Memory(on_device.parameters, on_device.gradients, on_device.optimizer, 0, 0)


def of_stage(stage: Stage, variant: Variant, accumulation: int, *, exact: bool) -> Memory:
    """Return the memory of a stage's worker in a step with ``accumulation`` micro batches."""
    parts = stage.parts(variant, exact=exact)
    moments, sent = stage.moments(parts, accumulation), stage.sent(parts, accumulation)
    return _memory(stage.model, stage.states(), moments, sent, gpu=stage.setting.gpu)


NARROWING = ("zero-1", "zero-2", "zero-3")
"""Partitionings with parameters in the compute type. FSDP gathers them in that type."""


def variant_of(layout: Layout, setting: MemoryOptions) -> Variant:
    """Return the fields that the activations of a micro batch of this layout depend on."""
    shared = layout.tensor, layout.sequence_parallel
    variant = Variant(
        layout.micro_batch,
        layout.recompute,
        setting.precision,
        "fp32",
        *shared,
        offload=setting.offloads_activations,
        context=layout.context,
        context_kind=setting.context_kind,
    )
    if setting.masters is not None:
        return replace(variant, weights="masters", sums=setting.masters.accumulate)
    by_deepspeed = layout.partitioning in NARROWING and not setting.by_parallel_engine(layout)
    narrows = layout.as_fsdp or layout.shards_stages or by_deepspeed
    if setting.precision != "fp32" and narrows:
        return replace(variant, weights="narrow")
    return variant


def _memory(
    model: ModelShapes, states: StateBytes, moments: Sequence[MemorySnapshot], sent: int, *, gpu: bool
) -> Memory:
    """Report the moment with the highest total, in the parts that people know.

    Args:
        sent: bytes of the activations that the blocks keep in host memory.
    """
    on_device, on_host = (states.on_gpu, states.beside_gpu) if gpu else (states, 0)
    worst = max(moments, key=lambda moment: moment.total)
    activations = worst.total - worst.buffers - on_device.gradients
    buffers = worst.buffers + model.buffer_bytes + min(activations, 0)
    return Memory(
        on_device.parameters, on_device.gradients, on_device.optimizer, buffers, max(activations, 0), on_host + sent
    )


def _width(layout: Layout, setting: MemoryOptions) -> int:
    """Bytes per element of the parameters that the model computes with."""
    return 2 if variant_of(layout, setting).weights == "narrow" else FP32


def _beside(
    model: ModelShapes, layout: Layout, setting: MemoryOptions, states: StateBytes, phase: Phase
) -> list[MemorySnapshot]:
    """Memory in a phase beyond parameters and optimizer state, in the first micro batch and in later ones."""
    width = _width(layout, setting)
    whole = width * sum(p.count for p in model.parameters.values())
    later = layout.accumulation > 1
    finished_bytes = phase.peak - phase.peak_without_gradients
    alone = phase.peak_without_gradients
    bucket = setting.bucket * width
    match layout.partitioning:
        case "none" | "oss" if layout.replicas > 1:
            absent = 0  # DDP's buckets hold all gradients from the beginning, except those of divided experts
            if layout.experts > 1 and not later:
                experts = (facts for facts in model.parameters.values() if facts.is_expert)
                absent = width * sum(facts.among(layout.experts).count for facts in experts)
                absent = absent * (whole - finished_bytes) // whole
            return [MemorySnapshot(alone, states.gradients - absent, 0)]
        case "none" | "oss" | "oss-sdp":
            return [MemorySnapshot(alone, finished_bytes, 0)] + ([MemorySnapshot(alone, whole, 0)] if later else [])
        case "zero-1" if later:
            # Accumulated gradients are whole and separate from new ones. The bucket exists from the first one on.
            return [MemorySnapshot(phase.peak, whole, bucket)]
        case "zero-1" | "zero-2":
            begun = phase.after_first_gradient
            if later:  # ZeRO-2 has shares: of earlier micro batches, and from the first gradient on those of this one
                return [MemorySnapshot(alone, (1 + begun) * states.gradients, bucket if begun else 0)]
            return [MemorySnapshot(phase.peak if begun else alone, 0, bucket if begun else 0)]
        case "zero-3":
            # Whole parameters: all of them, up to 10^9 elements.
            everything = model.all_parameters.values()
            gathered = sum(p.bytes_in(width) for p in everything if (p.code_bytes or p.count) > setting.how.kept_whole)
            return [MemorySnapshot(alone, states.gradients, bucket + gathered)]
    raise KeyError(layout.partitioning)


@dataclass(frozen=True)
class Sharded:
    """A micro batch of a model whose states FSDP shards.

    Attributes:
        width: bytes per element of the whole parameters, and of their gradients as the backward produces them.
    """

    model: ModelShapes
    layout: Layout
    setting: MemoryOptions
    width: int
    phases: Sequence[Phase]

    def moments(self) -> Iterator[MemorySnapshot]:
        """Yield the candidates for the peak. With accumulation, they come from the last micro batch."""
        # Before they are copied out of their buffer. gloo copies the buffer once more.
        yield MemorySnapshot(
            0, self._gradients(0, 0), (2 if self.setting.gpu else 3) * self.model.outside_blocks(self.width)
        )
        # Bytes of a block's gradients in the type of the sum. They are sent while the next block computes.
        run = self.model.most_in_a_block(self.model.parameters, self.layout.experts, FP32)
        before = 0
        for number, phase in enumerate(self.phases):
            gathered = self._gathered(number)
            # The gradients of the root that are finished before those of the last block belong to the head.
            outside = min(before, self.phases[self._backwards[0] - 1].finished if self._backwards else 0)
            of_blocks = before - outside
            leaving = run if of_blocks else 0
            yield MemorySnapshot(phase.peak_beside_earlier, self._gradients(outside, of_blocks), gathered + leaving)
            if phase.name == "backward" and phase.blocks > 1:  # the last of the blocks that the phase represents
                others = phase.blocks - 1
                alive = phase.peak_beside_earlier - others * phase.kept_by_each
                earlier = of_blocks + (phase.finished - before) * others // phase.blocks
                yield MemorySnapshot(alive, self._gradients(outside, earlier), gathered + run)
            if phase.name == "backward":
                # Its gradients are in their buffer, which gloo copies once more. Its parameters have been freed.
                finished = self._gradients(outside, phase.finished - outside)
                yield MemorySnapshot(phase.end, finished, gathered - self._block + 2 * run)
            before = phase.finished
        # While the root's gradients are sent, FSDP's loop over the gradients still holds the last one.
        of_root = [facts.count for name, facts in self.model.parameters.items() if not self.model.block_of(name)]
        width = FP32 if self._keeps_whole else self.width
        leaving = 2 * FP32 * sum(of_root) + width * sum(of_root[-1:])
        yield MemorySnapshot(self.phases[-1].end, self._to_fp32(before) // self.layout.shares, leaving)

    def _gathered(self, number: int) -> int:
        """Bytes of whole parameters in a phase: of the root, of the active block, and of the block that arrives."""
        if not self.setting.reshards:
            everything = self.model.all_parameters.values()
            return sum(p.among(self.layout.experts).bytes_in(self.width) for p in everything)
        blocks = {"forward": 2, "end": 0}.get(self.phases[number].name, 1)
        if self._backwards and self._backwards[0] <= number < self._backwards[-1]:  # after the last one, none arrives
            blocks = 2
        return self.model.outside_blocks(self.width) + blocks * self._block

    def _gradients(self, outside: int, of_blocks: int) -> int:
        """Bytes of gradients, from the finished ones of root and blocks: whole gradients, and shards of the others."""
        of_blocks = self._to_fp32(of_blocks)
        shards = of_blocks // self.layout.shares
        if self.layout.accumulation == 1:
            return outside + shards
        # Gradients of earlier micro batches are kept in the type of the sum, as shards or whole.
        whole = FP32 * sum(p.among(self.layout.experts).count for p in self.model.parameters.values())
        if not self._keeps_whole:
            return outside + whole // self.layout.shares
        return max(whole - of_blocks, 0) + shards

    @property
    def _keeps_whole(self) -> bool:
        return self.layout.accumulation > 1 and not self.setting.reduces_each

    def _to_fp32(self, gradients: int) -> int:
        return gradients * FP32 // self.width

    @cached_property
    def _block(self) -> int:
        """Bytes of a block's whole parameters."""
        if not self.setting.reshards:
            return 0
        return self.model.most_in_a_block(self.model.all_parameters, self.layout.experts, self.width)

    @cached_property
    def _backwards(self) -> list[int]:
        """Indices of the backwards of blocks."""
        return [number for number, phase in enumerate(self.phases) if phase.name == "backward"]
