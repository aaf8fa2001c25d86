"""The classes with which switches and rules are declared. Does not import torch."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rapidformer_templates.planning.changes import Change
from rapidformer_templates.planning.config import RunConfig, fields_of, spelling
from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.planning.plan import Dimension, EngineOptions, Plan, Sizes

TEMPLATES = ("Trainer", "Pretrainer", "Finetuner")


class Precedence(enum.IntEnum):
    """The order in which switches are applied, lowest number first."""

    DATA = 0  # shapes the batches, before there is a model
    MIXTURE = 1  # replaces feed-forwards of the whole model, so that each stage draws the same experts as one process
    PARTITION = 2  # pipeline: cuts the model while its blocks are still plain modules
    STRUCTURE = 3  # adapters and frozen parameters: before anything wraps them
    HEAD = 4  # fused loss: the output layer, before its vocabulary is divided
    PRODUCT = 5  # fp8: the products of layers, before their matrices are divided
    TENSOR = 6  # tensor and sequence parallel: shard parameters inside each stage
    KERNEL = 7  # attention kernels and tf32: choose what the final modules call
    CONTEXT = 8  # context parallel: each block sees a part of the sequence, its attention the whole
    GRAPH = 9  # captures the modules in this state as graphs
    CHECKPOINT = 10  # activation checkpointing: around the blocks, inside the compiled region
    COMPILE = 11  # torch.compile: sees the checkpointed blocks
    KEEP = 12  # activation offload: around the blocks, which may be compiled or checkpointed
    PRECISION = 13  # the type in which the engine computes
    OPTIMIZER = 14  # the update rule that the engine will build
    SHARD = 15  # the engine: wraps or shards the result


class Resource(enum.Enum):
    """Resources that a switch claims. Two active switches that claim the same resource conflict."""

    PARAMETERS = "the partitioning of the parameters"
    GRADIENTS = "the partitioning of the gradients"
    OPTIMIZER_STATE = "the partitioning of the optimizer state"
    GRAPH = "the captured graph of the model"
    OFFLOAD = "the place that the optimizer state is offloaded to"


@dataclass(frozen=True)
class ModelFacts:
    """The type and sizes of the model, as far as its flags or its ``config.json`` contain them. None means unknown.

    A vision-language model has the type and sizes of its language part.
    """

    model_type: str | None = None
    num_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    num_experts: int | None = None


@dataclass(frozen=True)
class Request:
    """The input of a rule.

    Attributes:
        config: the flags with their origins.
        environment: template, workers, device, packages.
        active: the active switches by name.
        sizes: workers and batches as far as they can be computed. Sizes that do not divide are rounded down, and a rule
            reports it.
        model: sizes of the model.
        training: whether this run will train. A plan may leave open what training needs.
    """

    config: RunConfig
    environment: Environment
    active: Mapping[str, Switch]
    sizes: Sizes
    model: ModelFacts
    training: bool = False

    def asked(self, *names: str) -> tuple[str, ...]:
        """Return how the user gave the named fields: ``--tf32 (run.yaml:12)``."""
        words = []
        for name in names:
            value = self.config.get(name)
            shown = "" if isinstance(value, bool) else " none" if value is None else f" {value}"
            word = spelling(name).replace("--", "--no-", 1) if value is False else spelling(name)
            words.append(f"{word}{shown} ({self.config.origin(name)})")
        return tuple(words)

    def asked_for(self, *switches: str) -> tuple[str, ...]:
        """Return how the user turned on the named active switches."""
        names = (name for switch in switches for name in self.active[switch].on)
        return self.asked(*(n for n in names if self.config.get(n) is not False or self.config.origin(n) != "default"))

    def of_family(self, family: str) -> tuple[Switch, ...]:
        """Return the active switches of a family."""
        return tuple(switch for switch in self.active.values() if switch.family == family)


@dataclass(frozen=True)
class Finding:
    """One way in which a rule is broken.

    Attributes:
        message: what is wrong.
        asked: the values that clash, each with where it came from.
        switches: names of active switches. Removing one, or replacing it with another of its family, may fix the
            problem.
        changes: other changes that may fix it.
    """

    message: str
    asked: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A rule with its code, reason and source.

    Attributes:
        code: such as ``RF002``.
        title: the rule in one sentence.
        why: the fact behind it.
        source: letters of ``DOCUMENTS`` in the registry, such as ``[R]``, or the name of a package.
        check: returns a finding for each way in which the request breaks the rule.
        example: flags of ``rapidformer plan`` that break it, for ``rapidformer explain`` and for the rule's test.
        machine: facts of the :class:`Environment` for the example, if it is not one CPU worker without packages.
        training: whether the example trains.
        refuses: whether a finding refuses the request. If False, the plan only contains a note.
        concerns: the switch to which it belongs in plans and docs, if a newer switch declares it.
    """

    code: str
    title: str
    why: str
    source: str
    check: Callable[[Request], Sequence[Finding]]
    example: str
    machine: Mapping[str, Any] = field(default_factory=dict)
    training: bool = False
    refuses: bool = True
    concerns: str = ""


class RuleList(list[Rule]):
    """The rules of a module, each written as its check."""

    def add(
        self, code: str, source: str, example: str, *, training: bool = False, refuses: bool = True, concerns: str = "",
        **machine: object,
    ) -> Callable[[Callable[[Request], Iterable[Finding]]], Rule]:  # fmt: skip
        """Add the rule whose check follows. The docstring of the check is the title and, after ``Why:``, the reason.

        The arguments are the fields of :class:`Rule`, with those of ``machine`` one by one.
        """

        def declare(check: Callable[[Request], Iterable[Finding]]) -> Rule:
            title, _, why = " ".join((check.__doc__ or "").split()).partition(" Why: ")
            fields = (machine, training, refuses, concerns)
            rule = Rule(code, title, why.removesuffix("."), source, lambda request: [*check(request)], example, *fields)
            self.append(rule)
            return rule

        return declare


FORECAST = ("parameters", "gradients", "optimizer", "activations", "time")
"""The quantities that the planner predicts: bytes per worker by kind, and the seconds of a step."""

Reasons = Mapping[str, str]
"""Some of the quantities in ``FORECAST``, each with a short explanation."""


def always(**reasons: str) -> Callable[[Request], Reasons]:
    """Make a ``Prediction.unknown`` that does not depend on the request."""
    return lambda request: reasons


@dataclass(frozen=True)
class Prediction:
    """How the planner handles a switch. Quantities in neither attribute are the same with and without the switch.

    Attributes:
        predicted: quantities that the switch changes and the planner predicts, each with a description of the change.
        unknown: quantities that are predicted as if the switch were off, each with the reason. The planner lists them.
        traced: whether its transform is applied to the model whose shapes are planned.
    """

    predicted: Reasons = field(default_factory=dict)
    unknown: Callable[[Request], Reasons] = lambda request: {}
    traced: bool = False


@dataclass(frozen=True)
class Measured:
    """The measurements of the first step of a run: the input of a switch's ``acted``.

    Attributes:
        plan: the plan of the run.
        config: the flags.
        ranks: the measurements of each worker by name. A measurement that a worker does not have is missing or None.
        own_hooks: names of the hooks that the user has defined.
    """

    plan: Plan
    config: RunConfig
    ranks: Sequence[Mapping[str, Any]]
    own_hooks: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> Any:
        """Return the measurement of the first worker that has it, or None."""
        return next(iter(self.all(name)), None)

    def all(self, name: str) -> list[Any]:
        """Return the measurement of every worker that has it, by rank."""
        return [values[name] for values in self.ranks if values.get(name) is not None]


def _first_flag_given(options: object, sizes: Sizes) -> bool:
    kind: type = type(options)
    first = fields_of(kind)[0]
    return bool(getattr(options, first.name) != first.default)


FreedMemory = Literal["given back", "as usual", "kept"]
FREED_MEMORY: tuple[FreedMemory, ...] = get_args(FreedMemory)


@dataclass(frozen=True)
class Switch:
    """One acceleration switch. To add a switch, add one file to the folder of switches.

    Attributes:
        name: its name in the plan, such as ``zero-3``.
        summary: one line about what it does and through which package.
        source: where it is documented.
        precedence: when it is applied, among the active switches.
        options: dataclass of its flags. Flags, help and docs are derived from it.
        predicts: how the planner handles it.
        family: name of a group of switches that can replace one another, such as ``partitioning``.
        claims: resources that it claims.
        templates: the templates in which it works.
        rules: its rules, which are checked if it is active.
        notes: returns its notes for the plan.
        needs_package: optional package that it needs.
        install: how to install the package, such as ``pip install rapidformer_templates[deepspeed]``.
        sizes: the fields of ``Sizes`` that its flags set, each with the flag. They are factors by which it divides the
            model.
        dimensions: groups of workers that it makes inside those of ``sizes``, for the plan.
        adopt: adds the values of the switch's own file to the flags, before anything is planned.
        prepare: ``module:function`` that is called with (flags, plan) before the workers start. It does what would
            otherwise fail only later, in the workers.
        order: ``module:function`` that makes the order of the training samples from (template, samples).
        engine: ``module:Class`` of the engine that it needs. If several switches have one, the first applied wins.
        builds_in_shares: whether each worker builds only a share of the model and its largest parameter, not all of it.
        engine_options: returns the options of the engine with those of this switch. The plan shows them.
        transform: ``module:function`` that applies it to the model, an ``engines.assembly.Transform``.
        exported: module that marks and reads folders of changed models that ``from_pretrained`` cannot read.
        receipt: names of the measurements in ``summary.json`` that show that it acted.
        receipt_hooks: ``module:Class`` of an ``engines.contract.Receipt`` that takes the measurements of this switch
            alone.
        acted: checks the measurements of the first step. It returns None, or, if the switch did nothing, a sentence
            about what was expected and what was measured. The run then ends.
        active: whether the options (or, for gradient accumulation, the sizes) turn it on. By default, it is on if its
            first flag differs from its default.
        on: field values that turn it on, for suggestions, tests and docs. By default, the first flag alone.
        off: field values that turn it off, for suggestions. By default, the default of the first flag.
        changes_result: whether it changes the result, and not only the cost. Then a one-process run for comparison
            needs it, too.
        variant: returns the switch as it acts with these options.
        in_layout: returns the switch as it acts if the engine of 3D layouts trains. It does if tensor, context or
            pipeline parallelism divide a replica, or if one switch makes copies differ and another divides them.
        copies_differ: whether some parameters have copies on fewer workers than others.
        divides_copies: whether it shards or moves the states of a parameter among the workers that have copies of it.
            Other partitioning is over all data-parallel workers.
        implied: whether a model turns the switch on without a flag.
        keeps_base: whether the initial weights of a run stay in the model next to the trained ones.
        master_weights: for a switch with an engine, whether the engine trains 16-bit parameters with fp32 masters. The
            default is that it does not. For other switches, False if the parameters must stay fp32.
        no_second_forward: why a step must not have a forward of another model, or two rows per sample. None if it may.
        no_second_model: why a step cannot contain a forward of a reference model. None if it can.
        freed_memory: what happens to host memory that training on a CPU frees. Keeping it for the next step saves the
            page faults of half a step. But with tensors of many sizes it fragments, and the process grows. If several
            switches set it, the first value in :data:`FREED_MEMORY` counts.
    """

    name: str
    summary: str
    source: str
    precedence: Precedence
    options: type
    predicts: Prediction
    acted: Callable[[Measured], str | None]
    active: Callable[[Any, Sizes], bool] = _first_flag_given
    on: Mapping[str, object] = field(default_factory=dict)
    off: Mapping[str, object] = field(default_factory=dict)
    family: str | None = None
    claims: frozenset[Resource] = frozenset()
    templates: tuple[str, ...] = TEMPLATES
    rules: tuple[Rule, ...] = ()
    notes: Callable[[Request], Sequence[str]] = lambda request: ()
    needs_package: str | None = None
    install: str | None = None
    sizes: Mapping[str, str] = field(default_factory=dict)
    dimensions: Callable[[Request], Sequence[Dimension]] = lambda request: ()
    adopt: Callable[[RunConfig], RunConfig] | None = None
    prepare: str | None = None
    order: str | None = None
    engine: str | None = None
    builds_in_shares: bool = False
    engine_options: Callable[[Request, EngineOptions], EngineOptions] = lambda request, options: options
    transform: str | None = None
    exported: str | None = None
    receipt: tuple[str, ...] = ()
    receipt_hooks: str | None = None
    changes_result: bool = False
    variant: Callable[[Switch, Any], Switch] = lambda switch, options: switch
    in_layout: Callable[[Switch], Switch] = lambda switch: switch
    copies_differ: bool = False
    divides_copies: bool = False
    implied: Callable[[ModelFacts], bool] = lambda model: False
    keeps_base: bool = False
    master_weights: bool | None = None
    no_second_forward: str | None = None
    no_second_model: str | None = None
    freed_memory: FreedMemory = "kept"

    def __post_init__(self) -> None:
        first = next(iter(dataclasses.fields(self.options)), None)
        if first is not None:
            object.__setattr__(self, "on", self.on or {first.name: True})
            object.__setattr__(self, "off", self.off or {first.name: first.default})

    @property
    def fields(self) -> tuple[str, ...]:
        """The field names of its flags."""
        return tuple(f.name for f in dataclasses.fields(self.options))
