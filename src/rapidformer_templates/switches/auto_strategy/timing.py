"""How long a step takes: computation, waiting in the pipeline, and communication, from counted work and stated rates.

What is assumed: matrix products run at the sustained rate of the device and everything else at the rate of its
memory; shards are equal, and so are stages whose blocks nobody has counted; a worker computes or waits for its peers,
but gradients, and what FSDP and ZeRO-3 exchange, hide behind the computation of the micro batch that they belong to.
"""

from __future__ import annotations

from dataclasses import dataclass

from rapidformer_templates.switches.auto_strategy.hardware import GB, Hardware
from rapidformer_templates.switches.auto_strategy.layouts import Layout
from rapidformer_templates.switches.auto_strategy.setting import Setting
from rapidformer_templates.switches.auto_strategy.trace import Trace

ADAM_TRAFFIC = 28
"""Bytes that an fp32 update reads and writes a parameter: weight, gradient and moments; weight and moments."""

OVERLAP = 0.7
"""Share of the computation that an exchange can hide behind: what comes first and last has nothing to hide behind."""

BACKWARD_SHARE = 2 / 3
"""Of the computation of a micro batch: its backward pass."""


@dataclass(frozen=True)
class Facts:
    """Sizes of a model that communication depends on.

    Attributes:
        parameters: elements.
        blocks: number of blocks.
        hidden: width of the hidden state.
        tokens: of a sample.
        experts: of the parameters, elements of experts.
        visits: experts that a token visits, in all blocks together.
    """

    parameters: int
    blocks: int
    hidden: int
    tokens: int
    experts: int = 0
    visits: int = 0


@dataclass(frozen=True)
class Timing:
    """Seconds of an optimizer step.

    Attributes:
        compute: matrix products and memory traffic of all micro batches of a worker, recomputation included.
        bubble: waiting for other stages.
        tensor, pipeline, data: communication in each direction of the layout, as far as nothing hides it.
        update: of the optimizer.
        offload: copies of activations to the host and back, as far as the computation does not hide them.
        experts: the way of tokens to divided experts and back.
    """

    compute: float
    bubble: float
    tensor: float
    pipeline: float
    data: float
    update: float
    offload: float = 0.0
    experts: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.bubble + self.communication + self.update + self.offload

    @property
    def communication(self) -> float:
        return self.tensor + self.pipeline + self.data + self.experts


def predict_seconds(
    layout: Layout, setting: Setting, trace: Trace, facts: Facts, hardware: Hardware, local_world: int
) -> Timing:
    """Seconds of a step of a layout.

    Args:
        trace: a micro batch through one worker's share of all blocks.
        local_world: workers of a node; tensor groups lie closest together, then replicas, then stages.
    """
    share = layout.tensor * layout.pipeline
    width = 4 if hardware.precision == "fp32" else 2
    computed = trace.flops / (hardware.tflops * 1e12) + trace.traffic / (hardware.memory_bandwidth * GB)
    largest = layout.largest_share
    computed *= largest  # the others wait for the largest stage
    near, far = hardware.intra_node * GB, hardware.inter_node * GB
    hidden_bytes = layout.micro_batch * facts.tokens * facts.hidden * width / layout.context

    # Two sums over the tensor group a block in the forward, two in the backward; recomputation repeats the forward's.
    exchanges = (4 if layout.recompute == "none" else 6) * facts.blocks * largest
    ring = 2 * (layout.tensor - 1) / layout.tensor
    tensor = exchanges * ring * hidden_bytes / (near if layout.tensor <= local_world else far)
    # Queries, keys, values and the output of a block go to the others, once more in the backward.
    sent = (layout.context - 1) / layout.context * hidden_bytes / layout.tensor
    beside = near if layout.tensor * layout.context <= local_world else far
    tensor += 2 * exchanges * sent / beside

    # A token goes to the experts that it visits and comes back, and so do their gradients.
    trips = (4 if layout.recompute == "none" else 6) * facts.visits * largest
    away = (layout.experts - 1) / layout.experts * hidden_bytes
    experts = trips * away / (near if layout.tensor * layout.experts <= local_world else far)

    neighbours = near if layout.world <= local_world else far
    transfer = 2 * layout.virtual * hidden_bytes / neighbours if layout.pipeline > 1 else 0.0

    turn = computed + tensor + experts + transfer
    waiting = (layout.pipeline - 1) * turn / layout.virtual
    inside = near if _in_a_node(layout, local_world) else far
    between = near if layout.world <= local_world else far
    sums, gathered = _data_seconds(layout, setting, facts, width, inside, between)
    hidden = OVERLAP * _hides(layout, setting) * computed
    replicas = layout.shares if layout.partitioning != "none" else 1
    traffic = ADAM_TRAFFIC + (2 if setting.narrow else 0)  # and the weight of 16 bits
    here = facts.parameters - facts.experts + facts.experts / layout.experts
    update = traffic * here / share / replicas / (hardware.memory_bandwidth * GB)
    return Timing(
        compute=layout.accumulation * computed,
        bubble=waiting,
        tensor=layout.accumulation * tensor,
        pipeline=layout.accumulation * transfer,
        data=max(0.0, sums - hidden) + gathered,
        experts=layout.accumulation * experts,
        update=update,
        offload=layout.accumulation
        * _exposed_copies(trace.sent / layout.pipeline / (hardware.host_link * GB), computed),
    )


def _exposed_copies(copied: float, computed: float) -> float:
    """Seconds that a micro batch waits for its activations on their way out in the forward, and back in the backward.

    Args:
        copied: seconds of the copies of one direction.
        computed: of the micro batch's computation.
    """
    return sum(max(0.0, copied - share * computed) for share in (1 - BACKWARD_SHARE, BACKWARD_SHARE))


def _in_a_node(layout: Layout, local_world: int) -> bool:
    """Whether the workers that share one copy of the states, or sum its gradients, lie in one node."""
    neighbours = layout.tensor * layout.shares
    return neighbours <= local_world and (layout.copies == 1 or local_world % neighbours == 0)


def _data_seconds(
    layout: Layout, setting: Setting, facts: Facts, width: int, inside: float, between: float
) -> tuple[float, float]:
    """What the replicas exchange in a step beside a backward or forward, and after the update (Rajbhandari et al.,
    2020, section 7), if nothing hides it.

    Args:
        inside: bytes a second that a worker sends to those with whom it shares a copy of the states.
        between: to those that have the same share of other copies.
    """
    if layout.replicas == 1:
        return 0.0, 0.0
    parameters = facts.parameters / (layout.tensor * layout.pipeline)
    ring = _in_ring(layout, facts) / inside
    by_parallel_engine = setting.by_parallel_engine(layout)
    gradient, weight = (setting.narrow.reduce, width) if setting.narrow else (4, 4)
    match layout.partitioning:
        case "none":
            return 2 * ring * gradient, 0.0
        case "zero-1" | "distributed-optimizer" | "oss-sdp":
            return ring * gradient, ring * weight  # the two halves of a sum: shares of gradients, then of weights
        case "oss":
            return 2 * ring * gradient, ring * weight  # a sum of gradients, and the weights from their owners
        case "zero-2":
            # In each micro batch the gradients go to their owner, and once the weights come back.
            sent = gradient if by_parallel_engine else width
            return layout.accumulation * ring * sent, ring * (weight if by_parallel_engine else width)
        case _:
            # Weights for each forward and backward; FSDP sums gradients once, ZeRO-3 in each micro batch.
            sums = 1 if layout.partitioning == "fsdp" else layout.accumulation
            copies = (layout.copies - 1) / layout.copies * parameters / layout.shares / between
            return (2 * layout.accumulation * width + sums * 4) * ring + 2 * sums * 4 * copies, 0.0


def _in_ring(layout: Layout, facts: Facts) -> float:
    """Elements that a worker sends in a sum over its replicas; of divided experts it has some, as fewer others have."""
    copies = layout.shares / layout.experts
    of_experts = (copies - 1) / copies * facts.experts / layout.experts if copies > 1 else 0.0
    of_all = (layout.shares - 1) / layout.shares * (facts.parameters - facts.experts)
    return (of_all + of_experts) / (layout.tensor * layout.pipeline)


def _hides(layout: Layout, setting: Setting) -> float:
    """Micro batches behind whose computation the exchange hides."""
    if layout.partitioning == "zero-1" and not setting.by_parallel_engine(layout):
        return 0.0  # DeepSpeed's exchange begins when the last backward has ended
    if layout.partitioning in ("none", "oss", "oss-sdp", "zero-1", "distributed-optimizer"):
        return BACKWARD_SHARE  # of the last one
    return layout.accumulation * (1.0 if layout.partitioning in ("fsdp", "zero-3") else BACKWARD_SHARE)
