"""The vocabulary in which switches and rules are declared. Imports no torch."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rapidformer_templates.planning.config import RunConfig, fields_of, spelling
from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.planning.plan import Plan, Sizes
from rapidformer_templates.planning.worker_groups import Dimension

TEMPLATES = ("Trainer", "Pretrainer", "Finetuner")


class Precedence(enum.IntEnum):
    """When a switch is applied: before those of a higher number."""

    DATA = 0  # shapes the batches, before there is a model
    MIXTURE = 1  # replace feed-forwards of the whole model, so that each stage draws the experts that one process does
    PARTITION = 2  # pipeline: cut the model while its blocks are still plain modules
    STRUCTURE = 3  # adapters and frozen parameters: before anything wraps them
    HEAD = 4  # fused loss: the layer of the words, before they are divided
    TENSOR = 5  # tensor and sequence parallel: shard parameters inside each stage
    KERNEL = 6  # attention kernels and tf32: choose what the final modules call
    CONTEXT = 7  # context parallel: each block sees a stretch of the sequence, its attention the whole
    GRAPH = 8  # ONNX Runtime: captures the modules as they are now
    CHECKPOINT = 9  # activation checkpointing: around the blocks, inside the compiled region
    COMPILE = 10  # torch.compile: sees the checkpointed blocks
    KEEP = 11  # activation offload: around the blocks, whether they are compiled or checkpointed or neither
    PRECISION = 12  # the type that the engine computes in
    OPTIMIZER = 13  # the update rule that the engine will build
    SHARD = 14  # the engine: wraps or shards what the others left


class Resource(enum.Enum):
    """What a switch takes for itself. Two active switches that claim one resource conflict."""

    PARAMETERS = "the partitioning of the parameters"
    GRADIENTS = "the partitioning of the gradients"
    OPTIMIZER_STATE = "the partitioning of the optimizer state"
    GRAPH = "the captured graph of the model"
    OFFLOAD = "the place that the optimizer state is offloaded to"


@dataclass(frozen=True)
class ModelFacts:
    """Kind and sizes of the model as far as flags or its ``config.json`` tell; None is unknown."""

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
    """What a rule looks at.

    Attributes:
        config: the flags with their origins.
        environment: template, workers, device, packages.
        active: the active switches by name.
        sizes: workers and batches as far as they can be computed (a size that does not divide
            is left rounded down; the rule about it says so).
        model: sizes of the model.
        training: whether this run is to train; a plan may leave open what training must know.
    """

    config: RunConfig
    environment: Environment
    active: Mapping[str, Switch]
    sizes: Sizes
    model: ModelFacts
    training: bool = False

    def asked(self, *names: str) -> tuple[str, ...]:
        """How the named fields were asked for: ``--tf32 (run.yaml:12)``."""
        words = []
        for name in names:
            value = self.config.get(name)
            shown = "" if isinstance(value, bool) else " none" if value is None else f" {value}"
            word = spelling(name).replace("--", "--no-", 1) if value is False else spelling(name)
            words.append(f"{word}{shown} ({self.config.origin(name)})")
        return tuple(words)

    def asked_for(self, *switches: str) -> tuple[str, ...]:
        """How the named active switches were asked for."""
        return self.asked(*(name for switch in switches for name in self.active[switch].on))

    def asked_template(self) -> str:
        return f"template {self.environment.template or 'none'} ({self.environment.template_origin})"

    def of_family(self, family: str) -> tuple[Switch, ...]:
        """The active switches of a family."""
        return tuple(switch for switch in self.active.values() if switch.family == family)


@dataclass(frozen=True)
class Change:
    """One step of the search for a combination that works.

    Attributes:
        describe: what the user would change, such as ``--fsdp-memory-optimization``.
        cost: see the constants in ``changes.py``.
        values: fields to set.
        template: template to move to, if it changes.
        note: why it helps.
    """

    describe: str
    cost: float
    values: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Finding:
    """A rule that is broken.

    Attributes:
        message: what is wrong.
        asked: the values that clash, each with where it came from.
        switches: names of active switches; taking one out, or another of its family in its place, may mend it.
        changes: other changes that may mend it.
    """

    message: str
    asked: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Example:
    """A command that breaks a rule: for ``rapidformer explain`` and for the rule's own test.

    Attributes:
        flags: of ``rapidformer plan``.
        machine: facts of the :class:`Environment` that differ from one CPU worker without packages.
        training: whether it is a command that trains.
    """

    flags: str
    machine: Mapping[str, Any] = field(default_factory=dict)
    training: bool = False


@dataclass(frozen=True)
class Rule:
    """A rule with its code, reason and source.

    Attributes:
        code: such as ``RF002``.
        title: the rule in one sentence.
        why: the fact behind it.
        source: ``[R]``, ``[M]``, ``[S]``, ``[D]`` (see docs/switches.md) or the engine's own name.
        check: gives a finding for each way in which the request breaks the rule.
        example: a command that breaks it.
        refuses: False when a finding is only noted in the plan.
    """

    code: str
    title: str
    why: str
    source: str
    check: Callable[[Request], list[Finding]]
    example: Example
    refuses: bool = True


FORECAST = ("parameters", "gradients", "optimizer", "activations", "time")
"""What the planner predicts of a run: bytes of a worker by kind, and the seconds of a step."""

Reasons = Mapping[str, str]
"""Kinds of ``FORECAST``, each with a few words."""


def nothing(request: Request) -> Reasons:
    return {}


@dataclass(frozen=True)
class Prediction:
    """What the planner makes of a switch. A kind that stands in neither part is the same with it as without it.

    Attributes:
        predicted: kinds that the switch changes and that are predicted with it, each with what becomes of it.
        unknown: kinds that are predicted as if the switch were off, each with why: the planner says so by name.
        traced: whether its transform is applied to the model whose shapes are planned.
    """

    predicted: Reasons = field(default_factory=dict)
    unknown: Callable[[Request], Reasons] = nothing
    traced: bool = False


def always(**reasons: str) -> Callable[[Request], Reasons]:
    """Of a prediction: what is unknown whatever else is asked for."""
    return lambda request: reasons


@dataclass(frozen=True)
class Measured:
    """What the first step of a run has shown: what a switch's ``acted`` looks at.

    Attributes:
        plan: what the run was to do.
        config: the flags.
        ranks: the measurements of each worker by name; one that a worker does not have is missing or None.
        own_hooks: names of the hooks that are the user's own.
    """

    plan: Plan
    config: RunConfig
    ranks: Sequence[Mapping[str, Any]]
    own_hooks: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> Any:
        """The measurement of the first worker that has it; None if nobody has."""
        return next(iter(self.all(name)), None)

    def all(self, name: str) -> list[Any]:
        """The measurement of every worker that has it, by rank."""
        return [values[name] for values in self.ranks if values.get(name) is not None]


def _never(model: ModelFacts) -> bool:
    return False


def _first_flag_given(options: Any, sizes: Sizes) -> bool:
    kind: type = type(options)
    first = fields_of(kind)[0]
    return bool(getattr(options, first.name) != first.default)


def _no_notes(request: Request) -> Sequence[str]:
    return ()


def _no_options(request: Request) -> Mapping[str, Any]:
    return {}


def _no_dimensions(request: Request) -> Sequence[Dimension]:
    return ()


FreedMemory = Literal["given back", "as usual", "kept"]
FREED_MEMORY: tuple[FreedMemory, ...] = get_args(FreedMemory)


@dataclass(frozen=True)
class Switch:
    """One acceleration switch. A new switch is one new file in this folder.

    Attributes:
        name: as in the plan, such as ``zero-3``.
        summary: one line of what it does and through which package.
        source: where it is documented.
        precedence: when it is applied, among those that are on.
        options: dataclass of its flags; flags, help and docs are derived from it.
        predicts: what the planner makes of it.
        family: switches that can stand for one another, such as ``partitioning``.
        claims: resources that it takes for itself.
        templates: the templates that it works in.
        rules: the rules that it brings; they are consulted when it is active.
        notes: what the plan should say about it.
        needs_package: optional package that it needs.
        install: what to install for it, such as ``pip install rapidformer_templates[deepspeed]``.
        needs_cuda: whether it needs a GPU.
        sizes: the fields of ``Sizes`` that its flags set, each with the flag: by how many it divides the model.
        dimensions: groups of workers that it makes inside of those of ``sizes``, for the plan.
        adopt: adds what a file of its own says to the flags, before anything is planned.
        prepare: ``module:function`` that takes (flags, plan) before workers start: what only they could fail at later.
        order: ``module:function`` that makes the order of the training samples from (template, samples).
        engine: ``module:Class`` of the engine that it asks for; of several the first in the order of application.
        engine_options: what the engine must know of it: plain values, which the plan shows.
        transform: ``module:function`` that applies it to the built model.
        exported: module that marks and reads folders of models that it has changed so that ``from_pretrained`` cannot.
        receipt: names of the measurements in ``summary.json`` that show that it acted.
        receipt_hooks: ``module:Class`` of what measures those that are its own, an ``engines.receipt.Receipt``.
        acted: looks at the measurements of the first step: None, or, of a switch that did nothing, what should have
            been seen and was not. The run ends there.
        active: whether the options (or, for gradient accumulation, the sizes) turn it on; by default its first flag
            does, by another value than its default.
        on: field values that turn it on, for suggestions, tests and docs; by default the first flag alone.
        off: field values that turn it off, for suggestions; by default that flag's own.
        changes_result: whether it computes something else, and not only at another cost: a one-process run that is
            compared with has it, too.
        under_3d: what differs of it, by attribute, where the engine of 3D layouts trains: where tensor, context or
            pipeline parallelism divide a replica, or one switch makes copies differ and another divides them.
        copies_differ: whether fewer workers have copies of some parameters than of others.
        divides_copies: whether it shares out, or moves, the states of a parameter among those that have copies of it;
            other partitioning is over all data-parallel workers.
        implied: whether a model is such that the switch is on without any flag.
        keeps_base: whether the weights that a run begins with stay beside what is trained.
        narrow_weights: of an engine, whether it trains parameters of 16 bits with fp32 masters, which no engine of a
            switch does unless it says so; of any other switch, False if the parameters must stay fp32.
        no_second_forward: why a step must not have a forward of another model, or of two rows a sample; None if it may.
        no_second_model: why there is no place for a forward of a reference in a step; None if there is.
        freed_memory: what becomes of host memory that a training on a CPU frees. It is kept for the next step, which
            saves the page faults of half a step; unless the process would be larger for it, by holes between what is
            of many sizes. Of several switches the first of :data:`FREED_MEMORY` counts.
    """

    name: str
    summary: str
    source: str
    precedence: Precedence
    options: type
    predicts: Prediction
    acted: Callable[[Measured], str | None]
    active: Callable[[Any, Sizes], bool] = _first_flag_given
    on: Mapping[str, Any] = field(default_factory=dict)
    off: Mapping[str, Any] = field(default_factory=dict)
    family: str | None = None
    claims: frozenset[Resource] = frozenset()
    templates: tuple[str, ...] = TEMPLATES
    rules: tuple[Rule, ...] = ()
    notes: Callable[[Request], Sequence[str]] = _no_notes
    needs_package: str | None = None
    install: str | None = None
    needs_cuda: bool = False
    sizes: Mapping[str, str] = field(default_factory=dict)
    dimensions: Callable[[Request], Sequence[Dimension]] = _no_dimensions
    adopt: Callable[[RunConfig], RunConfig] | None = None
    prepare: str | None = None
    order: str | None = None
    engine: str | None = None
    engine_options: Callable[[Request], Mapping[str, Any]] = _no_options
    transform: str | None = None
    exported: str | None = None
    receipt: tuple[str, ...] = ()
    receipt_hooks: str | None = None
    changes_result: bool = False
    under_3d: Mapping[str, Any] = field(default_factory=dict)
    copies_differ: bool = False
    divides_copies: bool = False
    implied: Callable[[ModelFacts], bool] = _never
    keeps_base: bool = False
    narrow_weights: bool | None = None
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
        """Names of its flags' fields."""
        return tuple(f.name for f in dataclasses.fields(self.options))


def acting_together(switches: Iterable[Switch], sizes: Sizes) -> dict[str, Switch]:
    """Switches by name, each as it acts beside the others and with these sizes."""
    chosen = list(switches)
    apart = any(switch.copies_differ for switch in chosen) and any(switch.divides_copies for switch in chosen)
    if sizes.divides > 1 or apart:
        chosen = [dataclasses.replace(s, **s.under_3d) if s.under_3d else s for s in chosen]
    return {switch.name: switch for switch in chosen}
