"""The optimizers of ``--optimizer``, one record of ``optimizers.toml`` each.

The flag's values, the docs, the rules, the planner's bytes of state and the types that a DeepSpeed file may name are
derived from these records. Imports no torch, because plans use it, too.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapidformer_templates.planning import optimizer_states
from rapidformer_templates.planning.optimizer_states import ParameterShape, StateRule


@dataclass(frozen=True, kw_only=True)
class OptimizerClass:
    """A class that makes updates.

    Attributes:
        path: its import path, as a plan shows it. ``(fused)`` after it is the form with torch's fused kernel.
        rule: name of its update rule in checkpoints. Classes with the same rule can load the state of one another.
        elementwise: whether it updates each element only from its own gradient and state. Then it accepts ranges of
            parameters. LAMB's norms, Adafactor's means, Muon's products and blocks of quantized states need whole ones.
        per_parameter: whether it accepts the gradients of some parameters before those of others. This requires that an
            update depends on no other parameter, and that a step skips parameters without a gradient. For example,
            apex's and Prodigy count or estimate something for a whole group.
        state: the bytes of its state.
        l2: how the weight decay moves into the gradient (L2): another class, or the option that is False then. None if
            that is not possible.
    """

    path: str
    rule: str
    elementwise: bool
    per_parameter: bool
    state: StateRule
    l2: OptimizerClass | str | None

    @property
    def name(self) -> str:
        """The name of the class, without its module."""
        return self.path.partition(" ")[0].rpartition(".")[2]


@dataclass(frozen=True)
class OptimizerPackage:
    """An optional package with optimizers.

    Attributes:
        name: the name under which it is imported.
        install: how to install it.
        needs_cuda: whether its optimizers run only on a GPU.
        cpu_since: the first version that runs on a CPU, if older ones do not.
    """

    name: str
    install: str
    needs_cuda: bool = False
    cpu_since: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """An optimizer of ``--optimizer``.

    Fields that may be None can be left out of the file. The others have no default, so that a new optimizer answers
    every question. Another implementation of AdamW or LAMB states only what differs from the first one.

    Attributes:
        name: the value of the flag.
        implementation: the class that makes its updates.
        fallback: the class that makes the same update if NVIDIA apex or a GPU is missing.
        package: the optional package that it needs.
        betas: the defaults of its two decays, which it takes as ``betas``. None if it has none.
        epsilon: the default of what it adds to the root of the second moment, which it takes as ``eps``. None if it has
            none.
        cpu_form: whether an offloaded state can be updated on the CPU.
        not_under: switches whose shards it cannot update. Under 3D parallelism, ZeRO works like the distributed
            optimizer, and divided experts like shards of tensor parallelism.
        groups: ``module:function`` that groups the parameters of the built model, if not by weight decay alone.
        deepspeed_types: the types of optimizer in a DeepSpeed file that make the same update.
    """

    name: str
    implementation: OptimizerClass
    fallback: OptimizerClass | None
    package: OptimizerPackage | None
    betas: tuple[float, float] | None
    epsilon: float | None
    cpu_form: bool
    not_under: frozenset[str]
    groups: str | None
    deepspeed_types: tuple[str, ...]

    @property
    def needs_package(self) -> str | None:
        """The name of the optional package that it needs."""
        return self.package.name if self.package else None

    @property
    def needs_cuda(self) -> bool:
        """Whether it runs only on a GPU."""
        return self.package is not None and self.package.needs_cuda

    @property
    def state_bytes(self) -> float:
        """Bytes of state per parameter, for large matrices in fp32."""
        matrix = ParameterShape((1024, 1024), decays=True)
        return round(self.implementation.state.bytes_of([matrix]) / matrix.count, 2)


BETAS = (0.9, 0.999)
# OSS, pipeline stages and the distributed optimizer keep each parameter whole.
DIVIDES_PARAMETERS = frozenset({"fsdp", "zero-1", "zero-2", "zero-3", "tensor-parallel"})

_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("optimizers.toml").read_text(encoding="utf-8"))


def _tuples(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}


OPTIMIZER_PACKAGES = {name: OptimizerPackage(name, **_tuples(facts)) for name, facts in _TABLE["packages"].items()}
"""The packages of optimizers by name."""


CLASSES: dict[str, OptimizerClass] = {}
"""Every class that a run can choose, by its path in a plan: of a record, its fallback and their forms with L2."""

for _path, _facts in _TABLE["classes"].items():
    _l2, _state = _facts.get("l2"), getattr(optimizer_states, _facts["state"])
    CLASSES[_path] = OptimizerClass(path=_path, **_facts | {"state": _state, "l2": CLASSES.get(_l2, _l2)})

ADAMW, FUSED_ADAMW = CLASSES["torch.optim.AdamW"], CLASSES["torch.optim.AdamW (fused)"]
CPU_ADAM = CLASSES["deepspeed.ops.adam.DeepSpeedCPUAdam"]


def _record(name: str, like: str = "", **facts: Any) -> OptimizerFacts:
    optional: dict[str, Any] = dict.fromkeys(("fallback", "package", "betas", "epsilon", "groups"))
    facts = _tuples(optional | _TABLE["optimizers"].get(like, {}) | facts)
    not_under = frozenset(facts["not_under"])
    return OptimizerFacts(
        **facts
        | {
            "name": name,
            "implementation": CLASSES[facts["implementation"]],
            "fallback": CLASSES.get(facts["fallback"]),
            "package": OPTIMIZER_PACKAGES.get(facts["package"]),
            "not_under": not_under - {"DIVIDED"} | (DIVIDES_PARAMETERS if "DIVIDED" in not_under else set()),
        }
    )


OPTIMIZERS = {name: _record(name, **facts) for name, facts in _TABLE["optimizers"].items()}
"""The optimizers by the value of ``--optimizer``."""


def defaults_of(option: Callable[[OptimizerFacts], float | None]) -> str:
    """Return the defaults of an option as text: the most common one, then the others with the names of optimizers."""
    names: dict[str, list[str]] = {}
    for record in OPTIMIZERS.values():
        if (default := option(record)) is not None:
            names.setdefault(f"{default:g}".replace("e-0", "e-"), []).append(record.name)
    (common, _), *others = sorted(names.items(), key=lambda item: -len(item[1]))
    return "; ".join([common, *(f"{default} for {' and '.join(users)}" for default, users in others)])


DEEPSPEED_TYPES = {
    kind: record.name
    for record in sorted(OPTIMIZERS.values(), key=lambda record: record.betas is None)
    for kind in record.deepspeed_types
}
"""The optimizer types that a DeepSpeed file may name, each with the value of ``--optimizer``.

Types that take the file's betas come first.
"""

RULES: Mapping[str, str] = {kind.name: kind.rule for kind in CLASSES.values()}
"""The update rules by the name of the class."""

_BY_NAME = {(kind.path.partition(".")[0], kind.name): kind for kind in CLASSES.values()}

ELEMENTWISE_OF_TORCH = frozenset(("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"))
"""Elementwise optimizers of torch that have no record. A script can build them."""


def known_class(path: str) -> OptimizerClass | None:
    """Return the class with an import path, or None if it has no record.

    Args:
        path: as a plan shows it, or as Python does. Python may show a longer path than the one by which it is imported.
    """
    return _BY_NAME.get((path.partition(".")[0], path.partition(" ")[0].rpartition(".")[2]))


def updates_in_chunks(path: str) -> bool:
    """Return whether an optimizer accepts the gradients of some parameters before those of others.

    Unknown ones get all gradients at once.

    Args:
        path: its class, as Python shows it.
    """
    known = known_class(path)
    if known is not None:
        return known.per_parameter
    module, _, name = path.rpartition(".")
    return (module == "torch.optim" or module.startswith("torch.optim.")) and name != "LBFGS"


def updates_elementwise(path: str) -> bool:
    """Return whether an optimizer accepts ranges of parameters: no element's update depends on another element.

    Unknown ones get whole parameters.

    Args:
        path: its class, as Python shows it.
    """
    known = known_class(path)
    if known is not None:
        return known.elementwise
    return path.partition(".")[0] == "torch" and path.rpartition(".")[2] in ELEMENTWISE_OF_TORCH
