"""CPU offload: optimizer state, and with ZeRO-3 also parameters, in host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from rapidformer_templates.planning import checks
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


RULES = RuleList()


@RULES.add("RF005", "[R]", "--cpu-offload --fsdp-memory-optimization --world-size 2")
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


def _acted(measured: Measured) -> str | None:
    """Check the device of the optimizer state and, with DeepSpeed's CPU Adam, the class of the optimizer."""
    devices = {device for of_worker in measured.all("optimizer_state_device") for device in of_worker}
    rule = "optimizer_class"
    if devices - {"cpu"}:
        return f"optimizer state in host memory was expected; it is on {checks.shown(sorted(devices))}"
    if measured.plan.optimizer_implementation == CPU_ADAM.path and CPU_ADAM.name not in str(measured[rule]):
        return f"updates by {CPU_ADAM.path} were expected; {measured[rule]} makes them"
    return None


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
        engine_options=lambda request, options: dataclasses.replace(options, offload="cpu"),
        receipt=("optimizer_state_bytes", "optimizer_state_device", "optimizer_class"),
        acted=_acted,
        rules=(*RULES, *checks.OFFLOAD_RULES),
    ),
)
