"""The optimizer switch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rapidformer_templates.planning.changes import replace
from rapidformer_templates.planning.environment import version_of
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.optimizers import CPU_ADAM, OPTIMIZERS
from rapidformer_templates.planning.plan import PARALLEL_ENGINE
from rapidformer_templates.planning.request import fallback_reason, on_host_by_deepspeed, optimizer_facts
from rapidformer_templates.planning.switch import (
    Finding,
    Measured,
    Precedence,
    Prediction,
    Request,
    Resource,
    RuleList,
    Switch,
)


@dataclass(frozen=True)
class OptimizerFlags:
    """Acceleration"""

    optimizer: str = flag(
        "adamw",
        "update rule and its implementation",
        choices=tuple(OPTIMIZERS),
        other="a script may return any optimizer of torch from build_optimizer()",
        aliases={"optimizers": None},
    )


def _notes(request: Request) -> Sequence[str]:
    facts, why = optimizer_facts(request), fallback_reason(request)
    if on_host_by_deepspeed(request):
        return (f"{facts.name}: its state is offloaded, and {CPU_ADAM.path} updates it on the host",)
    return (f"{facts.name}: {why}; {facts.fallback.path} is used instead",) if facts.fallback and why else ()


def _refuse(request: Request, message: str, *switches: str) -> Finding:
    """Refuse the chosen optimizer and suggest the default, which runs everywhere."""
    flags = (*request.asked("optimizer"), *request.asked_for(*switches))
    return Finding(message, flags, switches=switches, changes=(replace({"optimizer": "adamw"}),))


RULES = RuleList()


@RULES.add("RF022", "[S, bitsandbytes, apex]", "--optimizer adamw_bnb_8bit", packages={"bitsandbytes": "0.45"})
def _needs_gpu(request: Request) -> Iterator[Finding]:
    """Apex's own classes, and bitsandbytes before 0.50, need a GPU.

    Why: their kernels are written in CUDA and have no CPU implementation.
    """
    facts, environment = optimizer_facts(request), request.environment
    package = facts.package
    if package is None:
        return
    if package.needs_cuda and environment.device != "cuda":
        yield _refuse(request, f"{facts.name} needs a GPU, and this run is on a CPU")
    on_cpu = environment.device != "cuda" or request.of_family("offload")
    version = environment.packages.get(package.name)
    if on_cpu and not package.needs_cuda and package.cpu_since and version and version_of(version) < package.cpu_since:
        needed = f"{package.name} {'.'.join(map(str, package.cpu_since))}"
        yield _refuse(request, f"{facts.name} on a CPU needs {needed} or newer, and {version} is installed")


@RULES.add(
    "RF025", "[torch, apex, bitsandbytes, torchao]", "--optimizer adafactor --fsdp-memory-optimization --world-size 2"
)
def _works_on_shards(request: Request) -> Iterator[Finding]:
    """LAMB, Adafactor, Muon, states of 8 and 4 bits and apex's kernels cannot update parts of parameters.

    Why: the update needs norms, row means, blocks or products of the whole parameter, or takes plain tensors only.
    """
    facts = optimizer_facts(request)
    for switch in request.active:
        if _sharding(request, switch) in facts.not_under:
            yield _refuse(request, f"{facts.name} cannot update the shards of {switch}", switch)


def _sharding(request: Request, switch: str) -> str:
    """Return the name of the switch that shards the states.

    The engine of 3D layouts has its own ZeRO, which can divide single parameters. An optimizer sees divided experts as
    whole DTensors, unless that engine trains them. Then it gets parts.
    """
    engine, claims = request.active[switch].engine, request.active[switch].claims
    if switch == "sharding-strategy" and Resource.PARAMETERS in claims:
        return "fsdp"
    if switch == "expert-parallel":
        return "tensor-parallel" if engine == PARALLEL_ENGINE else switch
    return "distributed-optimizer" if switch.startswith("zero-") and engine is None else switch


def _acted(measured: Measured) -> str | None:
    """Check that the class in the plan makes the updates, unless the user's recipe names another one."""
    words, used = measured.plan.optimizer_implementation.split(), str(measured["optimizer_class"])
    same = used.rpartition(".")[2] == words[0].rpartition(".")[2]
    fused = "(fused)" not in words or any(measured.all("optimizer_is_fused"))
    if "build_optimizer" in measured.own_hooks or (same and fused):
        return None
    return f"updates by {' '.join(words)} were expected; {used}{'' if fused else ', not fused,'} makes them"


SWITCHES = (
    Switch(
        name="optimizer",
        summary="Update rule and its implementation; fused if there is a fused one.",
        source="[R, S]",
        precedence=Precedence.OPTIMIZER,
        options=OptimizerFlags,
        active=lambda options, sizes: True,  # every run has an optimizer, and the plan shows its class
        on={"optimizer": "lamb"},
        predicts=Prediction({"optimizer": "by the shapes of the parameters, as each optimizer keeps its state"}),
        notes=_notes,
        receipt=("optimizer_class", "optimizer_is_fused", "optimizer_state_bytes"),
        acted=_acted,
        changes_result=True,
        rules=tuple(RULES),
    ),
)
