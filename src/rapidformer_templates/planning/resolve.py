"""Turns what the user asked for into a plan, or into every reason why not. Does not import torch."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Sequence

from rapidformer_templates.errors import Diagnostic, Refused, Suggestion
from rapidformer_templates.planning.changes import REPLACE, WITHOUT, Change, drop, spell
from rapidformer_templates.planning.checks import PARTITIONING
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.deepspeed_file.settings import file_schedule
from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.planning.plan import (
    FSDP_ENGINE,
    PARALLEL_ENGINE,
    PIPELINE_FSDP_ENGINE,
    EngineOptions,
    Plan,
    PlannedValue,
    groups_of,
)
from rapidformer_templates.planning.registry import REGISTRY, Registry, in_words
from rapidformer_templates.planning.request import (
    build_request,
    check_whole_weights,
    engine_owner,
    micro_follows,
    optimizer_class,
    optimizer_options,
    precision,
    wide_weights,
)
from rapidformer_templates.planning.switch import Request, Resource, Switch

SINGLE_ENGINE = "rapidformer_templates.engines.local:SingleEngine"
DDP_ENGINE = "rapidformer_templates.engines.local:DDPEngine"


def resolve(
    config: RunConfig, environment: Environment, registry: Registry = REGISTRY, *, training: bool = False
) -> Plan:
    """Decide what a run will do, before any worker starts.

    Args:
        config: what the user asked for.
        environment: template, workers, devices and packages.
        registry: the switches and rules to apply.
        training: whether the run is about to train. A plan may leave open what training needs: the learning rate, its
            length, a GPU that this machine does not have.

    Raises:
        Refused: contains a :class:`Diagnostic` for each broken rule.
        ModelError: the model folder's ``config.json`` cannot be read, or it has adapters and gets others.
    """
    request = build_request(registry.complete(config), environment, registry.switches, training=training)
    if any(switch.keeps_base for switch in request.active.values()):
        check_whole_weights(config.model)
    refusals = registry.refusals(request)
    if refusals:
        works = tuple(to_suggestion(path, request) for path in nearest(request, registry))
        diagnostics = [
            Diagnostic(rule.code, finding.message, rule.why, in_words(rule.source), finding.asked, works)
            for rule, finding in refusals
        ]
        raise Refused(diagnostics)
    return plan_of(request, registry)


def plan_of(request: Request, registry: Registry) -> Plan:
    """Return the plan of a request that breaks no rule."""
    config, environment = request.config, request.environment
    options = EngineOptions()
    for switch in request.active.values():
        options = switch.engine_options(request, options)
    values: dict[str, PlannedValue] = {
        spelling(f.name): {"value": config.get(f.name), "origin": config.origin(f.name)}
        for f in config.fields()
        if f.name in config.origins
    }
    values["template"] = {"value": environment.template, "origin": environment.template_origin}
    return Plan(
        template=environment.template or "none",
        switches=tuple(request.active),
        sizes=request.sizes,
        engine=_engine(request, options),
        builds_in_shares=any(switch.builds_in_shares for switch in request.active.values()),
        engine_options=options,
        device=environment.device,
        precision=precision(config, environment),
        optimizer=config.get("optimizer"),
        optimizer_implementation=optimizer_class(request).path,
        optimizer_options=optimizer_options(request),
        schedule=file_schedule(request),
        notes=_notes(request, registry),
        values=values,
        rules=tuple(rule.code for rule in registry.consulted(request)),
        groups=groups_of(request.sizes, [d for switch in request.active.values() for d in switch.dimensions(request)]),
    )


def _engine(request: Request, options: EngineOptions) -> str:
    """Return the engine that owns the optimizer step."""
    owner = engine_owner(request)
    if options.shard_over_data == "parameters":
        return PIPELINE_FSDP_ENGINE if request.sizes.pipeline > 1 else FSDP_ENGINE
    if owner is not None:
        return str(owner.engine)
    narrow = precision(request.config, request.environment) != "fp32" and wide_weights(request) is None
    if narrow or request.sizes.context > 1:
        return PARALLEL_ENGINE  # it has fp32 masters, and sums gradients over the workers that share a sequence
    return DDP_ENGINE if request.sizes.data > 1 else SINGLE_ENGINE


def _notes(request: Request, registry: Registry) -> tuple[str, ...]:
    notes = [*request.environment.notes, *request.config.replaced, *request.config.chosen]
    notes += [note for switch in request.active.values() for note in switch.notes(request)]
    noting = [rule for rule in registry.consulted(request) if not rule.refuses]
    notes += [finding.message for rule in noting for finding in rule.check(request)]
    micro = request.sizes.micro_batch
    if micro > 1 and micro_follows(request.config):
        sizes = f"--global-batch-size {request.sizes.global_batch} / {request.sizes.data} data-parallel"
        why = "this loop gives none" if request.config.own_loop else "a run by --epochs does not accumulate (RF006)"
        notes.append(f"micro batch {micro}: {sizes}, because {why}")
    if micro > 8 and micro % 8:
        notes.append(f"micro batch {micro}: multiples of 8 suit the matrix units better ({in_words('[S]')})")
    if not request.environment.has_device:
        what = "GPU" if request.environment.device == "cuda" else request.environment.device
        later = "what depends on its kind is checked again when training starts"
        notes.append(f"no {what} is visible here: {later}")
    return tuple(notes)


def choose_template(config: RunConfig, registry: Registry = REGISTRY) -> tuple[str, str]:
    """Return the template of a black-box run and the reason: ``--template``, or the switches, or the task.

    Returns:
        The name and where it comes from, such as ``command line`` or ``task pretraining``.
    """
    if config.launch.template:
        return config.launch.template, config.origin("template")
    task = config.training.task
    usual = "Pretrainer" if task == "pretraining" else "Finetuner"
    request = build_request(registry.complete(config), Environment(), registry.switches)
    needing = [
        switch.name
        for switch in request.active.values()
        if "Trainer" in switch.templates and usual not in switch.templates
    ]
    if needing:
        return "Trainer", f"chosen for {', '.join(needing)}"
    return usual, f"chosen for task {task}" if task else "chosen because no task is given"


def with_template_defaults(config: RunConfig, template: str) -> RunConfig:
    """Return the configuration with the template's own default: the task of a ``Pretrainer`` is pretraining.

    The task decides the defaults of fine-tuning, so they are the same in every template.
    """
    is_open = template == "Pretrainer" and "task" not in config.origins
    return config.replace(template, task="pretraining") if is_open else config


Path = tuple[Change, ...]

# Maximum number of combinations to try before the search removes everything that clashes. A typical search tries fewer
# than thirty, at about 0.1 ms each.
MAX_LOOKS = 120

STATES = {
    Resource.OPTIMIZER_STATE: "optimizer state",
    Resource.GRADIENTS: "gradients",
    Resource.PARAMETERS: "parameters",
}
SAME = {1: "state", 2: "two states", 3: "three states"}


def nearest(request: Request, registry: Registry) -> list[Path]:
    """Return up to three sets of changes after which no rule refuses the request, nearest first.

    Every solution must fix all findings. So the search branches on only one finding of a state: the one with the fewest
    possible changes. Each returned set has been checked against all rules.
    """
    frontier: list[tuple[float, int, Path]] = [(0.0, 0, ())]
    tie_breaker = itertools.count(1)
    visited: set[frozenset[tuple[str, object]]] = set()
    paths: list[Path] = []
    nearest_cost = 0.0
    for _ in range(MAX_LOOKS):
        if not frontier or len(paths) == 3:
            break
        cost, _, path = heapq.heappop(frontier)
        if paths and cost >= nearest_cost + REPLACE:
            break  # too far away to be helpful
        choices = _ways_out(apply(request, path, registry), registry)
        if choices is None:
            if not any(_is_nearer(other, path) for other in paths):
                nearest_cost = nearest_cost if paths else cost
                paths.append(path)
            continue
        for change in choices:
            longer = (*path, change)
            state = frozenset(_values(longer).items())
            if not _overlap(path, change) and state not in visited:
                visited.add(state)
                heapq.heappush(frontier, (cost + change.cost, next(tie_breaker), longer))
    if paths:
        return paths
    # The last resort: fix each finding with its most expensive change, which removes something.
    last: Path = ()
    while choices := _ways_out(apply(request, last, registry), registry):
        fresh = [change for change in choices if not _overlap(last, change)]
        last = (*last, (fresh or choices)[-1])
    return [last]


def apply(request: Request, changes: Iterable[Change], registry: Registry) -> Request:
    """Return the request after the changes."""
    values: dict[str, object] = {}
    environment = request.environment
    for change in changes:
        values.update(change.values)
        if change.template:
            environment = dataclasses.replace(environment, template=change.template)
        if change.values.get("device") == "cpu":
            environment = dataclasses.replace(environment, device="cpu", compute_capability=None)
    config = request.config.replace("suggestion", **values)
    return build_request(config, environment, registry.switches, training=request.training, model=request.model)


def to_suggestion(path: Sequence[Change], request: Request) -> Suggestion:
    """Format the changes as text. A whole command comes first, and removed flags come last, if they were given."""
    parts = [change.describe.partition(WITHOUT) for change in path]
    given, values = request.config.origins, [pair for change in path for pair in change.values.items()]
    absent = {spelling(name) for name, value in values if name not in given and request.config.get(name) == value}
    removals = " ".join(flag for _, _, off in parts for flag in off.split() if flag not in absent)
    additions = sorted((on.strip() for on, _, _ in parts if on), key=lambda on: on.startswith("--"))
    notes = dict.fromkeys(change.note for change in path if change.note)
    return Suggestion(" ".join([*additions, WITHOUT + removals] if removals else additions), "; ".join(notes))


def _ways_out(request: Request, registry: Registry) -> list[Change] | None:
    """Return the changes that may fix one finding of the request, or None if there is no finding."""
    options = []
    for _, finding in registry.refusals(request):
        changes = list(finding.changes)
        for name in finding.switches:
            switch = request.active[name]
            # Another one of its family can replace it, unless two of them are active already.
            if switch.family and len(request.of_family(switch.family)) == 1:
                family = [other for other in registry.switches if other.family == switch.family]
                changes += [_exchange(switch, other) for other in family if other != switch]
            changes.append(drop({name: off for name, off in switch.off.items() if request.config.get(name) != off}))
        options.append(sorted(changes, key=lambda change: change.cost))
    return min(options, key=len) if options else None


def _exchange(switch: Switch, other: Switch) -> Change:
    difference = len(switch.claims ^ other.claims)
    note = f"in place of {switch.name}"
    if switch.family == PARTITIONING:
        states = [word for resource, word in STATES.items() if resource in other.claims]
        note = f"shards {', '.join(states)}" if difference else f"shards the same {SAME[len(states)]}"
    return Change(spell(other.on), REPLACE + difference / 10, {**switch.off, **other.on}, note=note)


def _values(path: Sequence[Change]) -> dict[str, object]:
    """Return the fields that the changes set, including the template."""
    values: dict[str, object] = {}
    for change in path:
        values.update(change.values)
        if change.template:
            values["template"] = change.template
    return values


def _is_nearer(changes: Sequence[Change], path: Sequence[Change]) -> bool:
    """Return whether ``path``, which costs at least as much, only extends ``changes`` or removes the same switches."""
    new_values, path_values = _values(changes), _values(path)
    given_up, its_given_up = (
        {name for name, value in values.items() if not value} for values in (new_values, path_values)
    )
    return new_values.items() <= path_values.items() or bool(given_up and given_up == its_given_up)


def _overlap(path: Sequence[Change], change: Change) -> bool:
    """Return whether the change touches a field that the path has already changed. Undoing it would lead to cycles."""
    return not _values(path).keys().isdisjoint(_values((change,)))
