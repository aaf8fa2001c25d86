"""The optimizers of ``--optimizer``, one record each.

The flag's values, the docs, the rules, the planner's bytes of state and the types that a DeepSpeed file may name are
derived from these records. Imports no torch, because plans use it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from rapidformer_templates.planning.optimizer_states import (
    BF16_MOMENTS,
    CODES_OF_4_BITS,
    CODES_OF_8_BITS,
    CODES_WITH_SHARED_TABLES,
    FACTORED,
    MATRIX_MOMENTUM,
    ONE_MOMENT,
    TWO_MOMENTS,
    UNCOUNTED_MOMENTS,
    ParameterShape,
    StateRule,
)


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
    """An optimizer of ``--optimizer``. No field has a default, so that a new optimizer answers every question.

    Another implementation of AdamW or LAMB states only what differs from the first one.

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


_OURS = "rapidformer_templates.switches.optimizer"

ADAM = OptimizerClass(
    path="torch.optim.Adam", rule="Adam", elementwise=True, per_parameter=True, state=TWO_MOMENTS, l2=None
)
FUSED_ADAM = replace(ADAM, path="torch.optim.Adam (fused)")
ADAMW = replace(ADAM, path="torch.optim.AdamW", rule="AdamW", l2=ADAM)
FUSED_ADAMW = replace(ADAMW, path="torch.optim.AdamW (fused)", l2=FUSED_ADAM)
APEX_ADAM = OptimizerClass(
    path="apex.optimizers.FusedAdam",
    rule="AdamW",
    elementwise=True,
    per_parameter=False,
    state=UNCOUNTED_MOMENTS,
    l2="adam_w_mode",
)
CPU_ADAM = replace(APEX_ADAM, path="deepspeed.ops.adam.DeepSpeedCPUAdam", l2="adamw_mode")
"""Updates AdamW's offloaded state under ZeRO."""

APEX_LAMB = OptimizerClass(
    path="apex.optimizers.FusedLAMB",
    rule="Lamb",
    elementwise=False,
    per_parameter=False,
    state=UNCOUNTED_MOMENTS,
    l2=None,
)
LAMB = replace(APEX_LAMB, path=f"{_OURS}.updates.Lamb", per_parameter=True, state=TWO_MOMENTS)

APEX = OptimizerPackage(
    "apex",
    "Nvidia apex from its source (github.com/NVIDIA/apex; the package 'apex' in the public index is something else)",
    needs_cuda=True,
)
BITSANDBYTES = OptimizerPackage("bitsandbytes", "pip install 'rapidformer_templates[bitsandbytes]'", cpu_since=(0, 50))
TORCHAO = OptimizerPackage("torchao", "pip install 'rapidformer_templates[torchao]'")

BETAS = (0.9, 0.999)
# OSS, pipeline stages and the distributed optimizer keep each parameter whole.
DIVIDES_PARAMETERS = frozenset({"fsdp", "zero-1", "zero-2", "zero-3", "tensor-parallel"})

_ADAMW = OptimizerFacts(
    name="adamw",
    implementation=FUSED_ADAMW,
    fallback=None,
    package=None,
    betas=BETAS,
    epsilon=1e-8,
    cpu_form=True,
    not_under=frozenset(),
    groups=None,
    deepspeed_types=("Adam", "AdamW"),
)
_OTHER_ADAMW = replace(_ADAMW, deepspeed_types=())
_LAMB = OptimizerFacts(
    name="lamb",
    implementation=LAMB,
    fallback=None,
    package=None,
    betas=BETAS,
    epsilon=1e-6,
    cpu_form=False,
    not_under=DIVIDES_PARAMETERS,
    groups=None,
    deepspeed_types=("Lamb",),
)
_BITSANDBYTES_8BIT = OptimizerClass(
    path=f"{_OURS}.bitsandbytes_adamw.BitsAndBytesAdamW8bit",
    rule="BitsAndBytesAdamW8bit",
    elementwise=False,
    per_parameter=False,
    state=CODES_WITH_SHARED_TABLES,
    l2=None,
)
_TORCHAO = f"{_OURS}.torchao_adamw.TorchAOAdamW"
_TORCHAO_8BIT = replace(_BITSANDBYTES_8BIT, path=f"{_TORCHAO}8bit", rule="TorchAOAdamW8bit", state=CODES_OF_8_BITS)
_TORCHAO_4BIT = replace(_TORCHAO_8BIT, path=f"{_TORCHAO}4bit", rule="TorchAOAdamW4bit", state=CODES_OF_4_BITS)
_ANYPRECISION = replace(
    ADAMW, path=f"{_OURS}.updates.AnyPrecisionAdamW", rule="AnyPrecisionAdamW", state=BF16_MOMENTS, l2=None
)

_RECORDS = (
    _ADAMW,
    replace(_OTHER_ADAMW, name="apex_adam", implementation=APEX_ADAM, fallback=FUSED_ADAMW),
    replace(
        _LAMB,
        name="apex_lamb",
        implementation=APEX_LAMB,
        fallback=LAMB,
        # Its kernel clips by a norm over all gradients that it gets.
        not_under=DIVIDES_PARAMETERS | {"distributed-optimizer"},
        deepspeed_types=(),
    ),
    replace(_OTHER_ADAMW, name="adamw_torch", implementation=ADAMW),
    replace(_OTHER_ADAMW, name="adamw_torch_fused"),
    replace(
        _OTHER_ADAMW,
        name="adamw_apex_fused",
        implementation=APEX_ADAM,
        package=APEX,
        cpu_form=False,
        not_under=frozenset({"fsdp", "expert-parallel"}),
    ),
    OptimizerFacts(
        name="adafactor",
        implementation=OptimizerClass(
            path="torch.optim.Adafactor",
            rule="Adafactor",
            elementwise=False,
            per_parameter=True,
            state=FACTORED,
            l2=None,
        ),
        fallback=None,
        package=None,
        betas=None,
        epsilon=None,
        cpu_form=True,
        # It writes in place into the norms of a DTensor, which torch does not allow.
        not_under=DIVIDES_PARAMETERS | {"expert-parallel"},
        groups=None,
        deepspeed_types=("Adafactor",),
    ),
    replace(
        _OTHER_ADAMW,
        name="adamw_bnb_8bit",
        implementation=_BITSANDBYTES_8BIT,
        package=BITSANDBYTES,
        not_under=DIVIDES_PARAMETERS,
    ),
    replace(
        _OTHER_ADAMW,
        name="adamw_torch_8bit",
        implementation=_TORCHAO_8BIT,
        package=TORCHAO,
        not_under=DIVIDES_PARAMETERS,
    ),
    replace(
        _OTHER_ADAMW,
        name="adamw_torch_4bit",
        implementation=_TORCHAO_4BIT,
        package=TORCHAO,
        not_under=DIVIDES_PARAMETERS,
    ),
    replace(_OTHER_ADAMW, name="adamw_anyprecision", implementation=_ANYPRECISION),
    _LAMB,
    OptimizerFacts(
        name="muon",
        implementation=OptimizerClass(
            path=f"{_OURS}.updates.Muon",
            rule="Muon",
            elementwise=False,
            per_parameter=True,
            state=MATRIX_MOMENTUM,
            l2=None,
        ),
        fallback=None,
        package=None,
        betas=BETAS,
        epsilon=1e-8,
        cpu_form=True,
        not_under=DIVIDES_PARAMETERS,
        groups=f"{_OURS}.updates:groups_of",
        deepspeed_types=("Muon",),
    ),
    OptimizerFacts(
        name="lion",
        implementation=OptimizerClass(
            path=f"{_OURS}.updates.Lion",
            rule="Lion",
            elementwise=True,
            per_parameter=True,
            state=ONE_MOMENT,
            l2=None,
        ),
        fallback=None,
        package=None,
        betas=(0.9, 0.99),
        epsilon=None,
        cpu_form=True,
        not_under=frozenset(),
        groups=None,
        deepspeed_types=("Lion",),
    ),
)

OPTIMIZERS: Mapping[str, OptimizerFacts] = {record.name: record for record in _RECORDS}
"""The optimizers by the value of ``--optimizer``."""


def defaults_of(option: Callable[[OptimizerFacts], float | None]) -> str:
    """Return the defaults of an option as text: the most common one, then the others with the names of optimizers."""
    names: dict[str, list[str]] = {}
    for record in _RECORDS:
        if (default := option(record)) is not None:
            names.setdefault(f"{default:g}".replace("e-0", "e-"), []).append(record.name)
    (common, _), *others = sorted(names.items(), key=lambda item: -len(item[1]))
    return "; ".join([common, *(f"{default} for {' and '.join(users)}" for default, users in others)])


DEEPSPEED_TYPES = {
    kind: record.name
    for record in sorted(_RECORDS, key=lambda record: record.betas is None)
    for kind in record.deepspeed_types
}
"""The optimizer types that a DeepSpeed file may name, each with the value of ``--optimizer``.

Types that take the file's betas come first.
"""

OPTIMIZER_PACKAGES = {record.package.name: record.package for record in _RECORDS if record.package}
"""The packages of optimizers by name."""


def _classes() -> Iterable[OptimizerClass]:
    """Yield every class that a run can choose: of a record, its fallback and their forms with L2."""
    yield CPU_ADAM
    for record in OPTIMIZERS.values():
        for kind in (record.implementation, record.fallback):
            if kind is not None:
                yield kind
                if isinstance(kind.l2, OptimizerClass):
                    yield kind.l2


CLASSES: Mapping[str, OptimizerClass] = {kind.path: kind for kind in _classes()}
"""The classes by their path in a plan."""

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
