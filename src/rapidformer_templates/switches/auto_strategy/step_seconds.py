"""The seconds of a step: computation by kind, waiting, each exchange, and the update. Imports no torch.

A matrix product takes as long as its tiles need on the multiprocessors of the device, or its operands on their way to
memory. Each operation between two products reads and writes its own operands. If a compiler fuses them, or a device
file has their rate, they move the operands of the products a few times through memory. Kernels wait if the host starts
them too late. An exchange has a delay per worker, and a size divided by the slowest link on its way. It is hidden by
computation at the same time, but it also slows that computation down.

The constants marked as fitted come from published measurements: see ``benchmarks/published_runs.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache

from rapidformer_templates.planning.plan import shards_of_experts
from rapidformer_templates.switches.auto_strategy.device_file import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    SEND,
)
from rapidformer_templates.switches.auto_strategy.layouts import Layout, MemoryOptions
from rapidformer_templates.switches.auto_strategy.timing import GB, MEMORY_PASSES, Hardware
from rapidformer_templates.switches.auto_strategy.trace import Product, Trace

TILES = ((256, 128, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.55))
"""Tiles that a multiprocessor computes at a time: rows, columns, and their speed compared with the largest tile.

Small tiles fill the last wave of multiprocessors better, but read their operands more often. Libraries choose the
fastest one.
"""

ALIGNED = 8
"""Elements of 16 bits in 16 bytes. A batched product whose rows are not multiples of it does not use tensor cores.

Measured by the authors of BLOOM: heads of 108 elements took a step from 121 to 163 s.
"""

GRADIENT_TRAFFIC = 10
"""Bytes that adding a gradient to its sum moves in each micro batch: 16 bits are read, 32 bits read and written."""

UPDATE_TRAFFIC = 36
"""Bytes per parameter that an update of Adam moves.

It reads the gradient for its norm. It reads weight, gradient and moments, writes weight, moments and the 16-bit weight,
and clears the gradient.
"""

CAST_TRAFFIC = 5
"""Bytes per element of an operand that fp8 moves: 16 bits are read for the scale and again for the cast, 8 written."""

INTERFERENCE = 0.8
"""Seconds by which a second of an exchange delays the computation that hides it: they share memory and
multiprocessors. Fitted."""

DELAY = 100e-6
"""Seconds before an exchange begins, and by which the slowest worker of a group is late. Fitted."""

HOP_IN_NODE, HOP_BETWEEN_NODES = 3.4e-6, 14e-6
"""Seconds until data arrives at the next worker of a ring, from the tuning tables of NCCL."""

BACKWARD_SHARE = 2 / 3
"""Share of the backward in the computation of a head, and of a micro batch without recomputation."""


@dataclass(frozen=True)
class CommunicationSizes:
    """Sizes of a model that communication depends on.

    Attributes:
        parameters: elements of all parameters.
        blocks: number of blocks.
        hidden: width of the hidden state.
        tokens: tokens per sample.
        experts: elements of the experts, which are part of ``parameters``.
        visits: experts that a token visits, summed over all blocks.
    """

    parameters: int
    blocks: int
    hidden: int
    tokens: int
    experts: int = 0
    visits: int = 0


@dataclass(frozen=True)
class Timing:
    """Seconds of an optimizer step on the worker that computes longest.

    Attributes:
        products, attention: matrix products and attention kernels of all micro batches, including recomputation.
        memory: other operations, which move activations and gradients through memory.
        launches: time in which the device waits for the host to start operations.
        bubble: time spent waiting for other stages.
        tensor, pipeline, data, experts: exposed exchanges in each direction of the layout. ``data`` includes the time
            that hidden exchanges take from the computation.
        hidden: exchanges of gradients and parameters that run during the computation. Not part of the total.
        update: the optimizer's update.
        offload: exposed copies of activations to the host and back.
    """

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    launches: float = 0.0
    bubble: float = 0.0
    tensor: float = 0.0
    pipeline: float = 0.0
    data: float = 0.0
    experts: float = 0.0
    update: float = 0.0
    offload: float = 0.0
    hidden: float = 0.0

    @property
    def compute(self) -> float:
        return self.products + self.attention + self.memory + self.launches

    @property
    def communication(self) -> float:
        return self.tensor + self.pipeline + self.data + self.experts

    @property
    def total(self) -> float:
        return self.compute + self.bubble + self.communication + self.update + self.offload

    def scaled(self, computation: float, exchanges: float) -> Timing:
        """Return these seconds times a factor of what is computed, and one of what is exchanged."""
        exchanged = ("tensor", "pipeline", "data", "experts", "hidden")
        return Timing(**{n: s * (exchanges if n in exchanged else computation) for n, s in vars(self).items()})


@dataclass(frozen=True)
class _Work:
    """Seconds of computation by kind, and the seconds in which the host starts it."""

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.attention + self.memory

    def plus(self, other: _Work, times: float = 1) -> _Work:
        names = [field.name for field in fields(self)]
        return _Work(*(getattr(self, name) + times * getattr(other, name) for name in names))


def fp8_seconds(product: Product, hardware: Hardware) -> float:
    """Return the seconds of one call of a matrix product in fp8, with the casts of its operands."""
    operands = sum(product.operands)
    computed = tile_flops(product, hardware.multiprocessors) / ((hardware.fp8_tflops or hardware.tflops) * 1e12)
    moved = operands + 2 * product.rows * product.columns
    bandwidth = hardware.memory_bandwidth * GB
    return max(computed, moved / bandwidth) + CAST_TRAFFIC * operands / bandwidth + hardware.kernel_seconds


def product_seconds(product: Product, hardware: Hardware) -> float:
    """Return the seconds of one call of a matrix product or of an attention kernel."""
    batch, rows, inner, columns = product.batch, product.rows, product.inner, product.columns
    if product.is_attention:
        computed = product.flops / (hardware.attention_tflops * 1e12)
        return max(computed, product.moved / (hardware.memory_bandwidth * GB)) + hardware.kernel_seconds
    operands = batch * (rows * inner + inner * columns + rows * columns) * product.width
    is_aligned = product.width > 2 or batch == 1 or (inner % ALIGNED == 0 and columns % ALIGNED == 0)
    rate = hardware.tflops if is_aligned else hardware.unaligned_tflops or hardware.tflops
    computed = tile_flops(product, hardware.multiprocessors) / (rate * 1e12)
    return max(computed, operands / (hardware.memory_bandwidth * GB)) + hardware.kernel_seconds


def tile_flops(product: Product, multiprocessors: int) -> float:
    """Return the operations for which a matrix product occupies the device: those of all waves of tiles.

    Args:
        multiprocessors: 0 if the device computes no tiles in waves.
    """
    batch, rows, columns = product.batch, product.rows, product.columns
    if not multiprocessors:
        return product.flops
    cells = min(
        math.ceil(batch * math.ceil(rows / a) * math.ceil(columns / b) / multiprocessors) * a * b / speed
        for height, width, speed in TILES
        for a, b in ((height, width), (width, height))
    )
    return product.flops * cells * multiprocessors / (batch * rows * columns)


@cache  # many layouts have the same trace
def _works(
    trace: Trace, hardware: Hardware, hidden: int, gathered: float, *, fuses: bool, fp8: bool
) -> dict[str, _Work]:
    """Return the work of a micro batch: in all blocks (forward, backward), before and after them, and in the head.

    Args:
        fuses, fp8: see :class:`MemoryOptions`.
        hidden: width of the hidden state.
        gathered: bytes of a hidden state that only products read or write, because the sequence is divided elsewhere.
    """
    parts = dict.fromkeys(("forward", "backward", "ends", "head"), _Work())
    by_operands = fuses or hardware.activation_bandwidth is not None
    bandwidth = hardware.activation_bandwidth or hardware.memory_bandwidth / MEMORY_PASSES
    for phase in trace.phases:
        part = {"begin": "ends", "end": "ends", "turn": "head", "reduce": "head"}.get(phase.name, phase.name)
        between = 0.0 if by_operands else phase.traffic / (hardware.memory_bandwidth * GB)
        work = _Work(memory=between, host=hardware.launch_seconds * phase.launches)
        for product in phase.products:
            is_fp8 = fp8 and phase.stack is not None and product.may_use_fp8
            seconds = (fp8_seconds if is_fp8 else product_seconds)(product, hardware)
            is_linear = product.batch == 1 and hidden in (product.rows, product.inner, product.columns)
            moved = by_operands * max(0.0, product.moved - gathered * is_linear) / (bandwidth * GB)
            kinds = (0.0, seconds) if product.is_attention else (seconds, 0.0)
            work = work.plus(_Work(*kinds, moved, hardware.launch_seconds), product.times)
        parts[part] = parts[part].plus(work)
    return parts


def exchange_seconds(size: float, workers: int, stride: int, local_world: int, hardware: Hardware, kind: str) -> float:
    """Return the seconds of an exchange. An all-reduce is a reduce-scatter and an all-gather.

    Inside a node, each worker receives everything. Between nodes, all workers of a node share what arrives there.

    Args:
        size: bytes of all shares together.
        workers: number of workers in the group.
        stride: distance between neighbours of the group. Workers of a node are numbered one after the other.
        kind: one of ``EXCHANGES``.
    """
    if workers == 1 or not size:
        return 0.0
    near = max(1, min(workers, local_world // stride))
    nodes = math.ceil(workers / near)
    halves = 2 if kind == ALL_REDUCE else 1
    if nodes == 1 and kind in hardware.exchanges:
        measured = hardware.exchanges[kind]
        return measured.seconds + halves * size * (workers - 1) / workers / (measured.gbs * GB)
    inside = size * (workers - 1) / workers / (hardware.intra_node * GB) if near > 1 else 0.0
    between = size * (nodes - 1) / nodes / (near * hardware.inter_node * GB)
    delay = DELAY + HOP_IN_NODE * (near - 1) * nodes + HOP_BETWEEN_NODES * (nodes - 1)
    return halves * (max(inside, between) + delay)


def predict_seconds(
    layout: Layout,
    setting: MemoryOptions,
    trace: Trace,
    facts: CommunicationSizes,
    hardware: Hardware,
    local_world: int,
    stages: Sequence[int] = (),
) -> Timing:
    """Predict the seconds of a step of a layout.

    Args:
        trace: a micro batch through one worker's share of all blocks.
        local_world: workers of a node. Tensor groups are closest together, then replicas, then stages.
        stages: blocks of each stage. Empty means that all stages are equal.
    """
    pipeline, accumulation, blocks = layout.pipeline, layout.accumulation, facts.blocks
    width = 4 if hardware.precision == "fp32" else 2
    per_parameter = 1 / (layout.tensor * hardware.memory_bandwidth * GB)
    hidden_bytes = layout.micro_batch * facts.tokens * facts.hidden * width / layout.context
    gathered = hidden_bytes * (1 - 1 / layout.tensor) if layout.sequence_parallel else 0.0
    works = _works(trace, hardware, facts.hidden, gathered, fuses=setting.fuses, fp8=setting.fp8)
    sums = GRADIENT_TRAFFIC * facts.parameters * per_parameter  # a worker has all experts in a trace
    block = _Work(memory=sums / blocks).plus(works["forward"], 1 / blocks).plus(works["backward"], 1 / blocks)
    shares = [sum(stages[rank::pipeline]) for rank in range(pipeline)] if stages else [blocks / pipeline] * pipeline
    workers = [_Work().plus(block, share) for share in shares]
    workers[0] = workers[0].plus(works["ends"])
    workers[-1] = workers[-1].plus(works["head"])
    largest = max(range(pipeline), key=lambda rank: workers[rank].total)
    work, share = workers[largest], shares[largest]

    tensor, experts = (share * each for each in _block_exchanges(layout, facts, hidden_bytes, hardware, local_world))
    sent = hidden_bytes / (layout.tensor if layout.sequence_parallel else 1)
    transfer = 2 * layout.virtual * _send_seconds(sent, layout.world > local_world, hardware) if pipeline > 1 else 0.0
    copied = exposed_copies(trace.sent / pipeline / (hardware.host_link * GB), work.total)
    starts = work.host if hardware.device == "cpu" else 0.0  # a GPU computes meanwhile
    turn = work.total + starts + tensor + experts + transfer
    mean = turn - work.total + sum(each.total for each in workers) / pipeline

    exposed, hidden = _data_seconds(layout, setting, facts, work, width, hardware, local_world)
    replicas = layout.shares if layout.partitioning != "none" else 1
    update_bandwidth = hardware.update_bandwidth or hardware.memory_bandwidth
    local_parameters = facts.parameters - facts.experts + facts.experts / layout.experts
    timing = Timing(
        products=accumulation * work.products,
        attention=accumulation * work.attention,
        memory=accumulation * work.memory,
        launches=accumulation * (starts or max(0.0, work.host - turn)),
        bubble=(pipeline - 1) * mean / layout.virtual,
        tensor=accumulation * tensor,
        pipeline=accumulation * transfer,
        data=exposed,
        experts=accumulation * experts,
        update=UPDATE_TRAFFIC * local_parameters / (pipeline * replicas * layout.tensor * update_bandwidth * GB),
        offload=accumulation * copied,
        hidden=hidden,
    )
    return timing.scaled(hardware.computation_factor, hardware.exchange_factor)


def _send_seconds(size: float, crosses_nodes: bool, hardware: Hardware) -> float:
    """Return the seconds in which a tensor reaches the next stage."""
    if not crosses_nodes and SEND in hardware.exchanges:
        measured = hardware.exchanges[SEND]
        return measured.seconds + size / (measured.gbs * GB)
    return size / ((hardware.inter_node if crosses_nodes else hardware.intra_node) * GB) + DELAY


def exposed_copies(copied: float, computed: float) -> float:
    """Return the seconds that a micro batch waits for its activations.

    They go to the host during the forward, and back during the backward.

    Args:
        copied: seconds of the copies in one direction.
        computed: seconds of the micro batch's computation.
    """
    return sum(max(0.0, copied - share * computed) for share in (1 - BACKWARD_SHARE, BACKWARD_SHARE))


def _block_exchanges(
    layout: Layout, facts: CommunicationSizes, hidden_bytes: float, hardware: Hardware, local_world: int
) -> tuple[float, float]:
    """Return the seconds in which a block of a micro batch exchanges activations, and tokens of experts."""
    # Two sums over the tensor group in the forward, two in the backward. Recomputation adds the forward's.
    sums = 4 if layout.recompute == "none" else 6
    tensor = sums * exchange_seconds(hidden_bytes, layout.tensor, 1, local_world, hardware, ALL_REDUCE)
    # Queries, keys, values and the output of a block go to the other workers, and again in the backward.
    if layout.context > 1:
        share = hidden_bytes / layout.tensor
        to_all = exchange_seconds(share, layout.context, layout.tensor, local_world, hardware, ALL_TO_ALL)
        tensor += 2 * sums * to_all
    # A token goes to the experts that it visits and returns. Its gradients do the same.
    away = (layout.experts - 1) / layout.experts * hidden_bytes
    link = hardware.intra_node if layout.tensor * layout.experts <= local_world else hardware.inter_node
    return tensor, sums * facts.visits / facts.blocks * away / (link * GB)


def _data_seconds(
    layout: Layout,
    setting: MemoryOptions,
    facts: CommunicationSizes,
    work: _Work,
    width: int,
    hardware: Hardware,
    local_world: int,
) -> tuple[float, float]:
    """Return the seconds by which exchanges between replicas extend a step, and the seconds of them that are hidden.

    Source of the amounts: Rajbhandari et al., 2020, section 7.

    Args:
        work: the computation of a micro batch.
    """
    if layout.replicas == 1:
        return 0.0, 0.0
    accumulation = layout.accumulation
    share = 1 / (layout.tensor * layout.pipeline)

    def exchange(bytes_each: float, kind: str, times: int = 1) -> float:
        """Return the seconds to exchange a worker's parameters in ``times`` parts."""
        dense = times * exchange_seconds(
            (facts.parameters - facts.experts) * share * bytes_each / times,
            layout.shares,
            layout.tensor,
            local_world,
            hardware,
            kind,
        )
        # A worker has only some of the divided experts, and fewer peers for them.
        expert_bytes = facts.experts * share / layout.experts * bytes_each
        stride = layout.tensor * layout.experts
        peers = shards_of_experts(layout.replicas, layout.shares, layout.experts)
        return dense + exchange_seconds(expert_bytes, peers, stride, local_world, hardware, kind)

    by_parallel_engine = setting.by_parallel_engine(layout)
    gradient, weight = (setting.masters.reduce, width) if setting.masters else (4, 4)
    late = 0.0
    forward, backward = (1 - BACKWARD_SHARE) * work.total, BACKWARD_SHARE * work.total
    match layout.partitioning:
        case "none":
            overlapping = [(exchange(gradient, ALL_REDUCE), backward, 1)]  # in the backward of the last micro batch
        case "zero-1" | "distributed-optimizer" | "oss-sdp":
            # The two halves of an all-reduce: shares of gradients, then of weights.
            # DeepSpeed's exchange begins after the last backward.
            is_late = layout.partitioning == "zero-1" and not by_parallel_engine
            overlapping = [(exchange(gradient, REDUCE_SCATTER), 0.0 if is_late else backward, 1)]
            late = exchange(weight, ALL_GATHER)
        case "oss":
            # An all-reduce of gradients, and the weights from their owners.
            overlapping, late = [(exchange(gradient, ALL_REDUCE), backward, 1)], exchange(weight, ALL_GATHER)
        case "zero-2":
            # Gradients go to their owner in each micro batch. Weights come back once.
            reduced = exchange(gradient if by_parallel_engine else width, REDUCE_SCATTER)
            overlapping = [(reduced, backward, accumulation)]
            late = exchange(weight if by_parallel_engine else width, ALL_GATHER)
        case _:
            # Weights for each forward and backward. Gradients in each micro batch, unless FSDP is to sum them once.
            units = facts.blocks + 1
            gathered = exchange(1 if setting.gathers_fp8 else width, ALL_GATHER, units)
            reduced = exchange(4, REDUCE_SCATTER, units)
            stride = layout.tensor * layout.shares
            shard = facts.parameters * share * 4 / layout.shares
            of_copies = exchange_seconds(shard, layout.copies, stride, local_world, hardware, ALL_REDUCE)
            sums_each = layout.partitioning == "zero-3" or setting.reduces_each
            again, times = (gathered, accumulation) if setting.reshards else (0.0, 1)  # else whole for the whole step
            overlapping = [
                (gathered, forward, times),
                (again + (reduced if sums_each else 0.0), backward, accumulation - 1),
                (again + reduced + of_copies, backward, 1),
            ]
            late = gathered / units  # nothing computes while the first unit is gathered
    hidden = sum(times * min(sent, computed) for sent, computed, times in overlapping)
    waiting = sum(times * max(0.0, sent - computed) for sent, computed, times in overlapping)
    return waiting + INTERFERENCE * hidden + late, hidden
