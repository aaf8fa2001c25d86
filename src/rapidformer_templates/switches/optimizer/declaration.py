"""The optimizers: what each is, what it needs, and what stands for it where that is absent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rapidformer_templates.planning.changes import replace
from rapidformer_templates.planning.deepspeed_file.recipe import decays_in_the_gradient, file_options
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.switch import (
    Example,
    Finding,
    Measured,
    Prediction,
    Request,
    Resource,
    Rule,
    Stage,
    Switch,
)


@dataclass(frozen=True)
class OptimizerFlags:
    """Acceleration"""

    optimizer: Literal[
        "apex_adam",
        "apex_lamb",
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_apex_fused",
        "adafactor",
        "adamw_bnb_8bit",
        "adamw_torch_8bit",
        "adamw_torch_4bit",
        "adamw_anyprecision",
        "lamb",
        "muon",
    ] = flag("apex_adam", "update rule and its implementation")


@dataclass(frozen=True)
class OptimizerFacts:
    """What the rules and the plan know of an optimizer.

    Attributes:
        implementation: the class, as the plan shows it.
        state_bytes: bytes of state a parameter, of large matrices in fp32.
        package: optional package that it needs.
        install: what to install for it.
        needs_cuda: whether it runs on a GPU only.
        cpu_since: the first version of the package that runs on a CPU, if not all do.
        stand_in: the class that makes the same update where package or GPU are absent.
        cpu_form: whether an offloaded state can be updated on the CPU.
        not_under: partitioning switches whose shards it cannot update.
    """

    implementation: str
    state_bytes: float
    package: str | None = None
    install: str | None = None
    needs_cuda: bool = False
    cpu_since: tuple[int, int] | None = None
    stand_in: str | None = None
    cpu_form: bool = True
    not_under: frozenset[str] = frozenset()


APEX = "Nvidia apex from its source (github.com/NVIDIA/apex; the package 'apex' in the public index is something else)"
FUSED_ADAMW = "torch.optim.AdamW (fused)"
CPU_ADAM = "deepspeed.ops.adam.DeepSpeedCPUAdam"
LAMB = "rapidformer_templates.switches.optimizer.lamb.Lamb"
TORCHAO = "pip install torchao"
# OSS and pipeline stages keep each one whole.
CUTS_PARAMETERS = frozenset({"fsdp", "zero-1", "zero-2", "zero-3", "distributed-optimizer", "tensor-parallel"})

OPTIMIZERS: dict[str, OptimizerFacts] = {
    "apex_adam": OptimizerFacts("apex.optimizers.FusedAdam", 8, stand_in=FUSED_ADAMW),
    "apex_lamb": OptimizerFacts(
        "apex.optimizers.FusedLAMB", 8, stand_in=LAMB, cpu_form=False, not_under=CUTS_PARAMETERS
    ),
    "adamw_torch": OptimizerFacts("torch.optim.AdamW", 8),
    "adamw_torch_fused": OptimizerFacts(FUSED_ADAMW, 8),
    "adamw_apex_fused": OptimizerFacts(
        "apex.optimizers.FusedAdam", 8, "apex", APEX, needs_cuda=True, cpu_form=False, not_under=frozenset({"fsdp"})
    ),
    # It keeps means of rows and columns: nearly nothing for a matrix, 4 bytes for each element of a vector.
    "adafactor": OptimizerFacts("torch.optim.Adafactor", 0.01, not_under=CUTS_PARAMETERS),
    "adamw_bnb_8bit": OptimizerFacts(
        "rapidformer_templates.switches.optimizer.bitsandbytes_adamw.BitsAndBytesAdamW8bit",
        2.03,
        "bitsandbytes",
        "pip install bitsandbytes",
        cpu_since=(0, 50),
        not_under=CUTS_PARAMETERS,
    ),
    "adamw_torch_8bit": OptimizerFacts(
        "rapidformer_templates.switches.optimizer.torchao_adamw.TorchAOAdamW8bit",
        2.03,
        "torchao",
        TORCHAO,
        not_under=CUTS_PARAMETERS,
    ),
    "adamw_torch_4bit": OptimizerFacts(
        "rapidformer_templates.switches.optimizer.torchao_adamw.TorchAOAdamW4bit",
        1.06,
        "torchao",
        TORCHAO,
        not_under=CUTS_PARAMETERS,
    ),
    "adamw_anyprecision": OptimizerFacts("rapidformer_templates.switches.optimizer.anyprecision.AnyPrecisionAdamW", 4),
    "lamb": OptimizerFacts(LAMB, 8, cpu_form=False, not_under=CUTS_PARAMETERS),
    "muon": OptimizerFacts("rapidformer_templates.switches.optimizer.muon.Muon", 4, not_under=CUTS_PARAMETERS),
}

TORCH_ADAM = {FUSED_ADAMW: "torch.optim.Adam (fused)", "torch.optim.AdamW": "torch.optim.Adam"}
"""Adam with the weight decay in the gradient, for those whose class is AdamW."""
ADAM_W_MODE = {CPU_ADAM: "adamw_mode", "apex.optimizers.FusedAdam": "adam_w_mode"}
"""The option by which the others choose."""

ADAMS = tuple(OPTIMIZERS[name] for name in ("apex_adam", "adamw_torch", "adamw_torch_fused"))
"""Those whose update is AdamW's on any device."""


def implementation(request: Request) -> str:
    """The class that makes the updates in this run: for apex's, the stand-in where they cannot act."""
    facts = OPTIMIZERS[request.config.get("optimizer")]
    if _on_host_by_deepspeed(request):
        return CPU_ADAM
    chosen = facts.stand_in if facts.stand_in and _why_stand_in(request) else facts.implementation
    return TORCH_ADAM.get(chosen, chosen) if decays_in_the_gradient(request) else chosen


def optimizer_options(request: Request) -> dict[str, Any]:
    """The options of that class beside the learning rate and the weight decay: those of a DeepSpeed file."""
    options = file_options(request)
    switch = ADAM_W_MODE.get(implementation(request))
    return options | {switch: False} if switch and decays_in_the_gradient(request) else options


def _on_host_by_deepspeed(request: Request) -> bool:
    """Whether DeepSpeed updates an offloaded Adam state, for which it has a vectorized class."""
    adam = OPTIMIZERS[request.config.get("optimizer")]
    by_deepspeed = any(name.startswith("zero-") and switch.engine for name, switch in request.active.items())
    return by_deepspeed and bool(request.of_family("offload")) and adam in ADAMS


def _why_stand_in(request: Request) -> str | None:
    if "apex" not in request.environment.packages:
        return "Nvidia apex is not installed"
    if request.environment.device != "cuda":
        return "Nvidia apex runs on a GPU only"
    if request.of_family("offload"):
        return "Nvidia apex cannot update a state in host memory"
    if any(Resource.PARAMETERS in switch.claims for switch in request.active.values()):
        return "Nvidia apex takes no sharded parameters"
    return None


def _notes(request: Request) -> Sequence[str]:
    name = request.config.get("optimizer")
    if _on_host_by_deepspeed(request):
        return (f"{name}: its state is offloaded, and {CPU_ADAM} updates it on the host",)
    stand_in, why = OPTIMIZERS[name].stand_in, _why_stand_in(request)
    return (f"{name}: {why}; {stand_in} takes its place",) if stand_in and why else ()


def _refusal(request: Request, message: str, *switches: str) -> Finding:
    """A finding against the chosen optimizer; the default one runs everywhere."""
    asked = (*request.asked("optimizer"), *request.asked_for(*switches))
    return Finding(message, asked, switches=switches, changes=(replace({"optimizer": "apex_adam"}),))


def _needs_gpu(request: Request) -> list[Finding]:
    name = request.config.get("optimizer")
    facts, environment = OPTIMIZERS[name], request.environment
    if facts.needs_cuda and environment.device != "cuda":
        return [_refusal(request, f"{name} needs a GPU, and this run is on a CPU")]
    if environment.device == "cuda" and not request.of_family("offload"):
        return []
    version = environment.packages.get(facts.package or "")
    if facts.cpu_since is None or version is None or _numbers(version) >= facts.cpu_since:
        return []
    since = ".".join(map(str, facts.cpu_since))
    return [_refusal(request, f"{name} on a CPU needs {facts.package} {since} or newer, and {version} is installed")]


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _works_on_shards(request: Request) -> list[Finding]:
    name = request.config.get("optimizer")
    clash = [switch for switch in request.active if switch in OPTIMIZERS[name].not_under]
    return [_refusal(request, f"{name} cannot update the shards of {switch}", switch) for switch in clash]


def missing_package(request: Request) -> list[Finding]:
    """The chosen optimizer's package, if it is not installed."""
    name = request.config.get("optimizer")
    facts = OPTIMIZERS[name]
    if facts.package is None or facts.package in request.environment.packages:
        return []
    return [_refusal(request, f"{name} needs {facts.package}, which is not installed: {facts.install}")]


def _acted(measured: Measured) -> str | None:
    """The class that the plan names makes the updates, unless the user's own recipe names another."""
    words, used = measured.plan.optimizer_implementation.split(), str(measured["optimizer_class"])
    same = used.rpartition(".")[2] == words[0].rpartition(".")[2]
    fused = "(fused)" not in words or any(measured.all("optimizer_is_fused"))
    if "build_optimizer" in measured.own_hooks or (same and fused):
        return None
    return f"updates by {' '.join(words)} were expected; {used}{'' if fused else ', not fused,'} makes them"


SWITCH = Switch(
    name="optimizer",
    summary="Update rule and its implementation; fused where there is a fused one.",
    source="[R, S]",
    stage=Stage.OPTIMIZER,
    options=OptimizerFlags,
    active=lambda options, sizes: True,  # every run has one, and the plan shows which class it is
    on={"optimizer": "lamb"},
    off={"optimizer": "apex_adam"},
    predicts=Prediction({"optimizer": "by the shapes of the parameters, as each optimizer keeps its state"}),
    notes=_notes,
    receipt=("optimizer_class", "optimizer_is_fused", "optimizer_state_bytes"),
    acted=_acted,
    changes_result=True,
    rules=(
        Rule(
            "RF022",
            "Apex's own classes, and bitsandbytes before 0.50, need a GPU.",
            "their kernels are written in CUDA and have no CPU form",
            "[S, bitsandbytes, apex]",
            _needs_gpu,
            Example("--optimizer adamw_bnb_8bit", machine={"packages": {"bitsandbytes": "0.45"}}),
        ),
        Rule(
            "RF025",
            "LAMB, Adafactor, Muon, states of 8 and 4 bits and apex's kernels cannot update shards of parameters.",
            "the update needs norms, row means, blocks or products of the whole parameter, or takes plain tensors only",
            "[torch, apex, bitsandbytes, torchao]",
            _works_on_shards,
            Example("--optimizer adafactor --fsdp-memory-optimization --world-size 2"),
        ),
    ),
)
