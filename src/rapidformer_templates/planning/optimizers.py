"""The optimizers: their classes, their requirements and their fallbacks. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rapidformer_templates.planning.changes import drop, replace
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.deepspeed_file.recipe import decays_in_the_gradient
from rapidformer_templates.planning.switch import Finding, Request, Resource


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts about an optimizer, for the rules and the plan.

    Attributes:
        implementation: the class, as the plan shows it.
        state_bytes: bytes of state per parameter, for large matrices in fp32.
        package: optional package that it needs.
        install: how to install the package.
        needs_cuda: whether it runs only on a GPU.
        cpu_since: the first version of the package that runs on a CPU, if older ones do not.
        fallback: the class that makes the same update if the package or a GPU is missing.
        cpu_form: whether an offloaded state can be updated on the CPU.
        not_under: switches whose shards it cannot update. Under 3D parallelism, ZeRO works like the distributed
            optimizer, and divided experts like shards of tensor parallelism.
        groups: ``module:function`` that groups the parameters of the built model, if not by weight decay alone.
        has_betas: whether it takes Adam's decays and epsilon, as ``betas`` and ``eps``.
    """

    implementation: str
    state_bytes: float
    package: str | None = None
    install: str | None = None
    needs_cuda: bool = False
    cpu_since: tuple[int, int] | None = None
    fallback: str | None = None
    cpu_form: bool = True
    not_under: frozenset[str] = frozenset()
    groups: str | None = None
    has_betas: bool = True


APEX = "Nvidia apex from its source (github.com/NVIDIA/apex; the package 'apex' in the public index is something else)"
FUSED_ADAMW = "torch.optim.AdamW (fused)"
CPU_ADAM = "deepspeed.ops.adam.DeepSpeedCPUAdam"
LAMB = "rapidformer_templates.switches.optimizer.lamb.Lamb"
TORCHAO = "pip install 'rapidformer_templates[torchao]'"
# OSS, pipeline stages and the distributed optimizer keep each parameter whole.
DIVIDES_PARAMETERS = frozenset({"fsdp", "zero-1", "zero-2", "zero-3", "tensor-parallel"})

OPTIMIZERS: dict[str, OptimizerFacts] = {
    "adamw": OptimizerFacts(FUSED_ADAMW, 8),
    "apex_adam": OptimizerFacts("apex.optimizers.FusedAdam", 8, fallback=FUSED_ADAMW),
    "apex_lamb": OptimizerFacts(
        "apex.optimizers.FusedLAMB",
        8,
        fallback=LAMB,
        cpu_form=False,
        # Its kernel clips by a norm over all gradients that it gets.
        not_under=DIVIDES_PARAMETERS | {"distributed-optimizer"},
    ),
    "adamw_torch": OptimizerFacts("torch.optim.AdamW", 8),
    "adamw_torch_fused": OptimizerFacts(FUSED_ADAMW, 8),
    "adamw_apex_fused": OptimizerFacts(
        "apex.optimizers.FusedAdam",
        8,
        "apex",
        APEX,
        needs_cuda=True,
        cpu_form=False,
        not_under=frozenset({"fsdp", "expert-parallel"}),
    ),
    # It keeps means of rows and columns: nearly nothing for a matrix, 4 bytes per element of a vector. It writes in
    # place into the norms of a DTensor, which torch does not allow.
    "adafactor": OptimizerFacts(
        "torch.optim.Adafactor", 0.01, not_under=DIVIDES_PARAMETERS | {"expert-parallel"}, has_betas=False
    ),
    "adamw_bnb_8bit": OptimizerFacts(
        "rapidformer_templates.switches.optimizer.bitsandbytes_adamw.BitsAndBytesAdamW8bit",
        2.03,
        "bitsandbytes",
        "pip install 'rapidformer_templates[bitsandbytes]'",
        cpu_since=(0, 50),
        not_under=DIVIDES_PARAMETERS,
    ),
    "adamw_torch_8bit": OptimizerFacts(
        "rapidformer_templates.switches.optimizer.torchao_adamw.TorchAOAdamW8bit",
        2.03,
        "torchao",
        TORCHAO,
        not_under=DIVIDES_PARAMETERS,
    ),
    "adamw_torch_4bit": OptimizerFacts(
        "rapidformer_templates.switches.optimizer.torchao_adamw.TorchAOAdamW4bit",
        1.06,
        "torchao",
        TORCHAO,
        not_under=DIVIDES_PARAMETERS,
    ),
    "adamw_anyprecision": OptimizerFacts("rapidformer_templates.switches.optimizer.anyprecision.AnyPrecisionAdamW", 4),
    "lamb": OptimizerFacts(LAMB, 8, cpu_form=False, not_under=DIVIDES_PARAMETERS),
    "muon": OptimizerFacts(
        "rapidformer_templates.switches.optimizer.muon.Muon",
        4,
        not_under=DIVIDES_PARAMETERS,
        groups="rapidformer_templates.switches.optimizer.muon:groups_of",
    ),
}

ADAM_FLAGS = ("adam_beta1", "adam_beta2", "adam_epsilon")
DEFAULT_BETAS = (0.9, 0.999)
"""The defaults of every optimizer that has betas."""
TORCH_ADAM = {FUSED_ADAMW: "torch.optim.Adam (fused)", "torch.optim.AdamW": "torch.optim.Adam"}
"""Adam classes with the weight decay in the gradient, for implementations whose class is AdamW."""
ADAM_W_MODE = {CPU_ADAM: "adamw_mode", "apex.optimizers.FusedAdam": "adam_w_mode"}
"""The option that selects AdamW in the other implementations."""

ADAMS = tuple(OPTIMIZERS[name] for name in ("adamw", "apex_adam", "adamw_torch"))
"""Optimizers that make AdamW's update on any device."""


PER_PARAMETER = (
    LAMB,
    OPTIMIZERS["adamw_anyprecision"].implementation,
    OPTIMIZERS["muon"].implementation,
)
"""This library's optimizers that accept the gradients of some parameters before those of others."""


def updates_in_chunks(kind: str) -> bool:
    """Return whether an optimizer accepts the gradients of some parameters before those of others.

    This requires that an update depends on no other parameter, and that a step skips parameters without a gradient.
    Other optimizers get all gradients at once. For example, apex's and Prodigy count or estimate something for a whole
    group.

    Args:
        kind: its class, as a plan or Python names it.
    """
    path = kind.partition(" ")[0]
    module, _, name = path.rpartition(".")
    of_torch = module == "torch.optim" or module.startswith("torch.optim.")
    return (of_torch and name != "LBFGS") or path in PER_PARAMETER


ELEMENTWISE = {
    *(("torch", name) for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam")),
    *(("torch", name) for name in ("RMSprop", "Rprop", "SGD")),
    ("apex", "FusedAdam"),
    ("deepspeed", "DeepSpeedCPUAdam"),
    ("rapidformer_templates", "AnyPrecisionAdamW"),
}
"""(package, class) of optimizers that update each element only from its own gradient and state."""


def updates_elementwise(kind: str) -> bool:
    """Return whether an optimizer accepts ranges of parameters: no element's update depends on another element.

    Other optimizers get whole parameters: those with LAMB's norms, Adafactor's means, Muon's products or blocks of
    quantized states, and unknown ones.

    Args:
        kind: its class, as a plan or Python names it.
    """
    path = kind.partition(" ")[0]
    return (path.partition(".")[0], path.rpartition(".")[2]) in ELEMENTWISE


def implementation(request: Request) -> str:
    """Return the class that makes the updates in this run. For apex's classes it may be the fallback."""
    facts = OPTIMIZERS[request.config.get("optimizer")]
    if on_host_by_deepspeed(request):
        return CPU_ADAM
    chosen = facts.fallback if facts.fallback and fallback_reason(request) else facts.implementation
    return TORCH_ADAM.get(chosen, chosen) if decays_in_the_gradient(request) else chosen


def optimizer_options(request: Request) -> dict[str, Any]:
    """Return the options of that class other than learning rate and weight decay.

    Options not listed keep its defaults.
    """
    training = request.config.training
    options: dict[str, Any] = {}
    if training.adam_beta1 is not None or training.adam_beta2 is not None:
        betas = zip((training.adam_beta1, training.adam_beta2), DEFAULT_BETAS, strict=True)
        options["betas"] = tuple(default if beta is None else beta for beta, default in betas)
    if training.adam_epsilon is not None:
        options["eps"] = training.adam_epsilon
    switch = ADAM_W_MODE.get(implementation(request))
    return options | {switch: False} if switch and decays_in_the_gradient(request) else options


def on_host_by_deepspeed(request: Request) -> bool:
    """Return whether DeepSpeed updates an offloaded Adam state, for which it has a vectorized class."""
    adam = OPTIMIZERS[request.config.get("optimizer")]
    by_deepspeed = any(name.startswith("zero-") and switch.engine for name, switch in request.active.items())
    return by_deepspeed and bool(request.of_family("offload")) and adam in ADAMS


def fallback_reason(request: Request) -> str | None:
    """Return why apex's class cannot be used in this run, or None if it can."""
    if "apex" not in request.environment.packages:
        return "Nvidia apex is not installed"
    if request.environment.device != "cuda":
        return "Nvidia apex runs on a GPU only"
    if request.of_family("offload"):
        return "Nvidia apex cannot update a state in host memory"
    if any(Resource.PARAMETERS in switch.claims for switch in request.active.values()):
        return "Nvidia apex does not accept sharded parameters"
    return None


def refusal(request: Request, message: str, *switches: str) -> Finding:
    """Refuse the chosen optimizer and suggest the default, which runs everywhere."""
    flags = (*request.asked("optimizer"), *request.asked_for(*switches))
    return Finding(message, flags, switches=switches, changes=(replace({"optimizer": "adamw"}),))


def has_no_betas(request: Request) -> list[Finding]:
    """Refuse Adam's decays and epsilon for an optimizer that does not have them."""
    name = request.config.get("optimizer")
    fields = [field for field in ADAM_FLAGS if request.config.get(field) is not None]
    if OPTIMIZERS[name].has_betas or not fields:
        return []
    message = f"{name} has no {' and no '.join(map(spelling, fields))}"
    changes = (replace({"optimizer": "adamw"}), drop(dict.fromkeys(fields)))
    return [Finding(message, request.asked("optimizer", *fields), changes=changes)]


def betas_reach_one(request: Request) -> list[Finding]:
    """Refuse a decay of 1, with which a moment would ignore all gradients."""
    return [
        Finding(
            f"{spelling(name)} must be below 1, not {value:g}",
            request.asked(name),
            changes=(replace({name: default}), drop({name: None})),
        )
        for name, default in zip(ADAM_FLAGS, DEFAULT_BETAS, strict=False)
        if (value := request.config.get(name)) is not None and not value < 1
    ]


def missing_package(request: Request) -> list[Finding]:
    """Refuse the chosen optimizer if its package is not installed."""
    name = request.config.get("optimizer")
    facts = OPTIMIZERS[name]
    if facts.package is None or facts.package in request.environment.packages:
        return []
    return [refusal(request, f"{name} needs {facts.package}, which is not installed: {facts.install}")]
