"""The devices that a plan is for, and the seconds of a step on them: computation, bubble and communication.

Each value of a device is measured, given, or marked as assumed. Assumptions of the prediction: Matrix products run at
the sustained rate of the device. Everything else runs at the rate of its memory. Shards are equal, and so are stages
unless their blocks are counted. A worker either computes or waits for its peers. Only gradients, and the exchanges of
FSDP and ZeRO-3, overlap with the computation of their micro batch. Imports no torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.environment import DEVICE_KINDS, DEVICE_MEMORY, Environment
from rapidformer_templates.switches.auto_strategy.layouts import Layout, MemoryOptions
from rapidformer_templates.switches.auto_strategy.trace import Trace

GB = 10**9


@dataclass(frozen=True)
class Assumed:
    """Values assumed for a device if nothing else is known.

    Attributes:
        tflops: 10^12 operations per second in matrix products, as reached in training, by precision.
        memory_bandwidth: GB/s between the device and its memory.
        intra_node, inter_node: GB/s that a worker sends to others in its node, and to other nodes.
        host_link: GB/s between the device and the memory of its host, in one direction.
        context_gb: memory of a process before it has a model: contexts, libraries, buffers of collectives.
    """

    tflops: Mapping[str, float]
    memory_bandwidth: float
    intra_node: float
    inter_node: float
    host_link: float
    context_gb: float


ASSUMED = {
    # An A100: 45 % of 312 TFLOP/s in 16 bits and 80 % of 19.5 in fp32; 80 % of 2 TB/s; NVLink 3; 200 Gbit/s per GPU;
    # two thirds of the 32 GB/s of PCIe 4 with 16 lanes.
    "cuda": Assumed({"fp32": 15.6, "bf16": 140.0, "fp16": 140.0}, 1600.0, 200.0, 20.0, 21.3, 1.5),
    # One core of a server; workers share its memory.
    "cpu": Assumed({"fp32": 0.05, "bf16": 0.015, "fp16": 0.015}, 8.0, 2.0, 1.0, 8.0, 0.8),
}

GIVEN = {
    "memory_gb": DEVICE_MEMORY,
    "tflops": "DEVICE_TFLOPS",
    "memory_bandwidth": "DEVICE_BANDWIDTH_GBS",
    "intra_node": "INTRA_NODE_GBS",
    "inter_node": "INTER_NODE_GBS",
    "host_link": "HOST_LINK_GBS",
}
"""Environment variables for values that are otherwise measured or assumed."""


@dataclass(frozen=True)
class Hardware:
    """One worker's device and its connections.

    Attributes:
        device: ``cpu``, or torch's name of the accelerator.
        precision: precision that ``tflops`` applies to.
        memory_gb: device memory that this worker may use, 10^9 bytes.
        tflops: 10^12 operations per second in matrix products, sustained.
        memory_bandwidth, intra_node, inter_node, host_link: GB/s.
        context_gb: see :class:`Assumed`.
        sources: where each value is from.
        host_gb: host memory of a node. None if it is unknown, and then not checked.
    """

    device: str
    precision: str
    memory_gb: float
    tflops: float
    memory_bandwidth: float
    intra_node: float
    inter_node: float
    host_link: float
    context_gb: float
    sources: Mapping[str, str]
    host_gb: float | None = None

    def lines(self, *, offloads: bool = False) -> list[str]:
        """Return the assumptions as lines for people.

        Args:
            offloads: whether activations go to the host.
        """
        host = [f"{self.host_link:g} GB/s to the host and back ({self.sources['host_link']})"] if offloads else []
        of_node = "host memory of a node unknown and not checked (--host-memory-gb N checks it)"
        if self.host_gb is not None:
            of_node = f"host memory {self.host_gb:g} GB per node ({self.sources['host_gb']})"
        named = [f"GPUs ({self.sources['device']})"] if "device" in self.sources else []
        return [
            *named,
            f"device memory {self.memory_gb:g} GB per worker ({self.sources['memory_gb']}), "
            f"{self.context_gb:g} GB of it for contexts and libraries",
            of_node,
            f"{self.tflops:g} TFLOP/s of {self.precision} products ({self.sources['tflops']}), "
            f"{self.memory_bandwidth:g} GB/s to memory ({self.sources['memory_bandwidth']})",
            f"{self.intra_node:g} GB/s per worker inside a node ({self.sources['intra_node']}), "
            f"{self.inter_node:g} GB/s between nodes ({self.sources['inter_node']})",
            *host,
        ]


TENSOR_SHARE, FP32_SHARE, MEMORY_SHARE, LINK_SHARE = 0.45, 0.8, 0.8, 2 / 3
"""Share of a data sheet's peak that training reaches: 16-bit products, fp32 products, memory, links in a node."""


def find_hardware(environment: Environment, precision: str, host_memory_gb: float | None = None) -> Hardware:
    """Return the devices of this machine, or those that ``--device-kind`` or the variables in ``GIVEN`` describe.

    Args:
        host_memory_gb: host memory of a node. None measures it if the plan is for this machine.

    Raises:
        ConfigError: a variable is not a positive number, or the memory is unknown.
    """
    assumed = ASSUMED["cpu" if environment.device == "cpu" else "cuda"]
    values: dict[str, float] = {
        "tflops": assumed.tflops[precision],
        "memory_bandwidth": assumed.memory_bandwidth,
        "intra_node": assumed.intra_node,
        "inter_node": assumed.inter_node,
        "host_link": assumed.host_link,
    }
    sources = dict.fromkeys(values, "assumed")
    if environment.device_origin:
        sources["device"] = environment.device_origin
    if environment.device_kind:
        kind = DEVICE_KINDS[environment.device_kind]
        peak: float = getattr(kind, f"{precision}_tflops")
        sustained = {
            "memory_gb": kind.memory_gb,
            "tflops": round(peak * (FP32_SHARE if peak == kind.fp32_tflops else TENSOR_SHARE), 1),
            "memory_bandwidth": round(kind.memory_bandwidth * MEMORY_SHARE, 1),
            "intra_node": round(kind.link * LINK_SHARE, 1),
            "host_link": round(kind.host_link * LINK_SHARE, 1),
        }
        values |= sustained
        sources |= dict.fromkeys(sustained, kind.source)
    for name, variable in GIVEN.items():
        if variable in os.environ:
            values[name], sources[name] = _positive(variable), variable
    if "memory_gb" not in values:
        values["memory_gb"], sources["memory_gb"] = _measured_gb(environment), "measured"
    sources["host_gb"] = "--host-memory-gb"
    if host_memory_gb is None and sources["memory_gb"] == "measured":
        host_memory_gb, sources["host_gb"] = round(_host_bytes() / GB, 1), "measured"
    return Hardware(
        environment.device,
        precision,
        **values,
        context_gb=assumed.context_gb,
        sources=sources,
        host_gb=host_memory_gb,
    )


def _positive(variable: str) -> float:
    text = os.environ[variable]
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ConfigError(f"{variable} must be a positive number, not '{text}'", where="environment")
    return value


def _measured_gb(environment: Environment) -> float:
    """Memory of the smallest visible GPU, or a worker's share of the memory of this machine or container, in GB."""
    if environment.device == "cpu":
        return round(_host_bytes() / GB / environment.local_world_size, 1)
    sizes: list[float] = []
    if query := shutil.which("nvidia-smi"):
        command = [query, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]  # in MiB
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        sizes = [float(line) for line in answer.stdout.split() if line.replace(".", "").isdecimal()]
    if not sizes:
        raise ConfigError(
            "no GPU is visible here, so its memory is not known",
            where="--auto-strategy",
            hint="rapidformer plan --auto-strategy --device-kind a100-80gb …, or DEVICE_MEMORY_GB=80, says how much",
        )
    return round(min(sizes) * 2**20 / GB, 1)


def _host_bytes() -> int:
    """Memory of this machine or container."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return memory if text == "max" else min(memory, int(text))


ADAM_TRAFFIC = 28
"""Bytes per parameter that an fp32 update moves.

It reads weight, gradient and moments, and writes weight and moments.
"""

OVERLAP = 0.7
"""Share of the computation that an exchange can overlap with. The first and last parts have nothing to overlap with."""

BACKWARD_SHARE = 2 / 3
"""Share of the backward in the computation of a micro batch."""


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
    """Seconds of an optimizer step.

    Attributes:
        compute: matrix products and memory traffic of all micro batches of a worker, including recomputation.
        bubble: time spent waiting for other stages.
        tensor, pipeline, data: exposed communication in each direction of the layout.
        update: the optimizer's update.
        offload: exposed copies of activations to the host and back.
        experts: transfer of tokens to divided experts and back.
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
    layout: Layout,
    setting: MemoryOptions,
    trace: Trace,
    facts: CommunicationSizes,
    hardware: Hardware,
    local_world: int,
) -> Timing:
    """Predict the seconds of a step of a layout.

    Args:
        trace: a micro batch through one worker's share of all blocks.
        local_world: workers of a node. Tensor groups are closest together, then replicas, then stages.
    """
    share = layout.tensor * layout.pipeline
    width = 4 if hardware.precision == "fp32" else 2
    computed = trace.flops / (hardware.tflops * 1e12) + trace.traffic / (hardware.memory_bandwidth * GB)
    largest = layout.largest_share
    computed *= largest  # the other stages wait for the largest one
    near, far = hardware.intra_node * GB, hardware.inter_node * GB
    hidden_bytes = layout.micro_batch * facts.tokens * facts.hidden * width / layout.context

    # Per block, two sums over the tensor group in the forward, two in the backward. Recomputation adds the forward's.
    exchanges = (4 if layout.recompute == "none" else 6) * facts.blocks * largest
    ring = 2 * (layout.tensor - 1) / layout.tensor
    tensor = exchanges * ring * hidden_bytes / (near if layout.tensor <= local_world else far)
    # Queries, keys, values and the output of a block go to the other workers, and again in the backward.
    sent = (layout.context - 1) / layout.context * hidden_bytes / layout.tensor
    bandwidth = near if layout.tensor * layout.context <= local_world else far
    tensor += 2 * exchanges * sent / bandwidth

    # A token goes to the experts that it visits and returns. Its gradients do the same.
    trips = (4 if layout.recompute == "none" else 6) * facts.visits * largest
    away = (layout.experts - 1) / layout.experts * hidden_bytes
    experts = trips * away / (near if layout.tensor * layout.experts <= local_world else far)

    neighbours = near if layout.world <= local_world else far
    transfer = 2 * layout.virtual * hidden_bytes / neighbours if layout.pipeline > 1 else 0.0

    turn = computed + tensor + experts + transfer
    waiting = (layout.pipeline - 1) * turn / layout.virtual
    sharers = layout.tensor * layout.shares  # workers that share one copy of the states
    in_a_node = sharers <= local_world and (layout.copies == 1 or local_world % sharers == 0)
    inside = near if in_a_node else far
    between = near if layout.world <= local_world else far
    sums, gathered, overlapping = _data_seconds(layout, setting, facts, width, inside, between)
    hidden = OVERLAP * overlapping * computed
    replicas = layout.shares if layout.partitioning != "none" else 1
    traffic = ADAM_TRAFFIC + (2 if setting.masters else 0)  # plus the 16-bit weight
    local_parameters = facts.parameters - facts.experts + facts.experts / layout.experts
    update = traffic * local_parameters / share / replicas / (hardware.memory_bandwidth * GB)
    copied = trace.sent / layout.pipeline / (hardware.host_link * GB)
    return Timing(
        compute=layout.accumulation * computed,
        bubble=waiting,
        tensor=layout.accumulation * tensor,
        pipeline=layout.accumulation * transfer,
        data=max(0.0, sums - hidden) + gathered,
        experts=layout.accumulation * experts,
        update=update,
        offload=layout.accumulation * exposed_copies(copied, computed),
    )


def exposed_copies(copied: float, computed: float) -> float:
    """Return the seconds that a micro batch waits for its activations.

    They go to the host during the forward, and back during the backward.

    Args:
        copied: seconds of the copies in one direction.
        computed: seconds of the micro batch's computation.
    """
    return sum(max(0.0, copied - share * computed) for share in (1 - BACKWARD_SHARE, BACKWARD_SHARE))


def _data_seconds(
    layout: Layout, setting: MemoryOptions, facts: CommunicationSizes, width: int, inside: float, between: float
) -> tuple[float, float, float]:
    """Seconds that replicas exchange in a step, without any overlap: during forward and backward, and after the update.

    The third number says how many micro batches compute while the first exchange runs.
    Source: Rajbhandari et al., 2020, section 7.

    Args:
        inside: bytes per second that a worker sends to the workers with which it shares a copy of the states.
        between: bytes per second that it sends to workers with the same share of other copies.
    """
    if layout.replicas == 1:
        return 0.0, 0.0, 0.0
    parameters = facts.parameters / (layout.tensor * layout.pipeline)
    # Elements that a worker sends in a sum. It has only some of the divided experts, and fewer peers for them.
    expert_copies = layout.shares / layout.experts
    of_experts = (expert_copies - 1) / expert_copies * facts.experts / layout.experts if expert_copies > 1 else 0.0
    of_all = (layout.shares - 1) / layout.shares * (facts.parameters - facts.experts)
    ring = (of_all + of_experts) / (layout.tensor * layout.pipeline) / inside
    by_parallel_engine = setting.by_parallel_engine(layout)
    gradient, weight = (setting.masters.reduce, width) if setting.masters else (4, 4)
    match layout.partitioning:
        case "none":
            return 2 * ring * gradient, 0.0, BACKWARD_SHARE  # that of the last micro batch
        case "zero-1" | "distributed-optimizer" | "oss-sdp":
            # The two halves of an all-reduce: shares of gradients, then of weights.
            # DeepSpeed's exchange begins after the last backward.
            is_late = layout.partitioning == "zero-1" and not by_parallel_engine
            return ring * gradient, ring * weight, 0.0 if is_late else BACKWARD_SHARE
        case "oss":
            # An all-reduce of gradients, and the weights from their owners.
            return 2 * ring * gradient, ring * weight, BACKWARD_SHARE
        case "zero-2":
            # Gradients go to their owner in each micro batch. Weights come back once.
            sent = gradient if by_parallel_engine else width
            gathered = ring * (weight if by_parallel_engine else width)
            return layout.accumulation * ring * sent, gathered, layout.accumulation * BACKWARD_SHARE
        case _:
            # Weights for each forward and backward. FSDP sums gradients once, ZeRO-3 in each micro batch.
            sums = 1 if layout.partitioning == "fsdp" else layout.accumulation
            copies = (layout.copies - 1) / layout.copies * parameters / layout.shares / between
            return (2 * layout.accumulation * width + sums * 4) * ring + 2 * sums * 4 * copies, 0.0, layout.accumulation
