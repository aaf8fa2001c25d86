"""Offload: optimizer state, and with ZeRO-3 also parameters, in host memory or on a local disk (ZeRO-Infinity)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rapidformer_templates.planning import checks
from rapidformer_templates.planning.changes import add
from rapidformer_templates.planning.checks import OFFLOAD_RULES, Given
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.optimizers import CPU_ADAM
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
class CpuOffloadFlags:
    """Acceleration"""

    cpu_offload: bool = flag(False, "optimizer state (with ZeRO-3 also parameters) in host memory", choice="offload")


@dataclass(frozen=True)
class NvmeOffloadFlags:
    """Acceleration"""

    nvme_path: str | None = flag(
        None, "ZeRO-Infinity: optimizer state and parameters on this disk", metavar="DIR", choice="offload"
    )


CPU_RULES, NVME_RULES = RuleList(), RuleList()


@CPU_RULES.add("RF005", "[R]", "--cpu-offload --fsdp-memory-optimization --world-size 2")
def _only_with_zero(request: Request) -> list[Finding]:
    """CPU offload can be combined with one kind of partitioning: ZeRO.

    Why: OSS, SDP, FSDP and the distributed optimizer keep their shards where the parameters are.
    """
    return checks.clash(request, "cpu-offload", checks.partitions_without_zero)


def _notes(request: Request) -> Sequence[str]:
    by_deepspeed = any(
        switch.name.startswith("zero-") and switch.engine for switch in request.of_family(checks.PARTITIONING)
    )
    if request.environment.device != "cpu" or by_deepspeed:
        return ()
    return ("cpu-offload: this run is on a CPU, so the optimizer state is in host memory already: nothing to move",)


def _cpu_acted(measured: Measured) -> str | None:
    """Check the device of the optimizer state and, with DeepSpeed's CPU Adam, the class of the optimizer."""
    devices = {device for of_worker in measured.all("optimizer_state_device") for device in of_worker}
    rule = "optimizer_class"
    if devices - {"cpu"}:
        return f"optimizer state in host memory was expected; it is on {checks.shown(sorted(devices))}"
    if measured.plan.optimizer_implementation == CPU_ADAM.path and CPU_ADAM.name not in str(measured[rule]):
        return f"updates by {CPU_ADAM.path} were expected; {measured[rule]} makes them"
    return None


@NVME_RULES.add("RF011", "[D]", "--nvme-path /local_nvme --zero-2-memory-optimization --world-size 2")
def _needs_zero_3(request: Request) -> list[Finding]:
    """NVMe offload needs ZeRO-3.

    Why: DeepSpeed swaps to disk only what ZeRO-3 has partitioned.
    """
    return checks.needs(request, "nvme-offload", "zero-3", add({"zero_3_memory_optimization": True}))


@NVME_RULES.add(
    "RF115", "[deepspeed]", "--ema-decay 0.999 --nvme-path /local_nvme --zero-3-memory-optimization --world-size 2"
)
def _moves_moments_alone(request: Request) -> list[Finding]:
    """An average of the weights is kept in memory.

    Why: DeepSpeed swaps only the moments of a part from the disk and back.
    """
    message = "the average of the weights is stored next to the optimizer's moments, and {1} moves only those"
    return checks.clash(request, Given("ema_decay"), "nvme-offload", message=message)


SWAPPED = 2**20
"""DeepSpeed swaps a worker's share of a parameter group if it has at least this many bytes.

Smaller ones stay in memory.
"""


def _nvme_acted(measured: Measured) -> str | None:
    share = 4 * (measured["trained_elements"] or 0) / measured.plan.sizes.data
    # There may be two groups, one with nearly all elements.
    if share < 2 * SWAPPED or any(measured.all("swapped_bytes")):
        return None
    return f"optimizer state in files below {measured.config.get('nvme_path')} was expected; there is none"


SWITCHES = (
    Switch(
        name="cpu-offload",
        master_weights=False,
        divides_copies=True,
        summary="Optimizer state in host memory; with ZeRO-3 also parameters.",
        source="[R, D]",
        precedence=Precedence.SHARD,
        options=CpuOffloadFlags,
        predicts=Prediction(
            {
                "parameters": "with ZeRO-3, in host memory",
                "gradients": "with ZeRO, in host memory, in fp32 as the update needs them",
                "optimizer": "in host memory",
            },
            always(time="the seconds do not include the update on the host or the transfers there and back"),
        ),
        family="offload",
        freed_memory="given back",
        claims=frozenset({Resource.OFFLOAD}),
        notes=_notes,
        engine_options=lambda request, options: replace(options, offload="cpu"),
        receipt=("optimizer_state_bytes", "optimizer_state_device", "optimizer_class"),
        acted=_cpu_acted,
        rules=(*CPU_RULES, *OFFLOAD_RULES),
    ),
    Switch(
        name="nvme-offload",
        summary="Optimizer state and parameters on a local disk (ZeRO-Infinity).",
        source="[D]",
        no_second_model="keeps parameters in the files of one model",
        precedence=Precedence.SHARD,
        options=NvmeOffloadFlags,
        on={"nvme_path": "/local_nvme"},
        predicts=Prediction(
            {
                "parameters": "in host memory on their way to the disk",
                "gradients": "those of small sub-groups, the rest on the disk",
                "optimizer": "that of small sub-groups, the rest on the disk",
            },
            always(time="the seconds do not include the transfers to the disk and back"),
        ),
        family="offload",
        freed_memory="given back",
        claims=frozenset({Resource.OFFLOAD}),
        engine_options=lambda request, options: replace(options, offload="nvme"),
        receipt=("optimizer_state_bytes", "optimizer_class", "swapped_bytes"),
        acted=_nvme_acted,
        rules=(*NVME_RULES, *OFFLOAD_RULES),
    ),
)
