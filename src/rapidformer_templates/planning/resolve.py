"""Turns what the user asked for into a plan, or into every reason why not. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping

from rapidformer_templates.errors import Diagnostic, Refused
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.deepspeed_file.flags import file_schedule
from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.planning.optimizer_choice import implementation, optimizer_options
from rapidformer_templates.planning.plan import PARALLEL_ENGINE, EngineOptions, Plan, groups_of
from rapidformer_templates.planning.registry import REGISTRY, Registry
from rapidformer_templates.planning.request import build_request, engine_owner, micro_follows, precision, wide_weights
from rapidformer_templates.planning.sources import in_words
from rapidformer_templates.planning.suggest import nearest, to_suggestion
from rapidformer_templates.planning.switch import Request

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
        ModelError: the model folder's ``config.json`` cannot be read.
    """
    request = build_request(registry.complete(config), environment, registry.switches, training=training)
    refusals = registry.refusals(request)
    if refusals:
        works = tuple(to_suggestion(path) for path in nearest(request, registry))
        raise Refused(
            [
                Diagnostic(rule.code, finding.message, rule.why, in_words(rule.source), finding.asked, works)
                for rule, finding in refusals
            ]
        )
    return plan_of(request, registry)


def plan_of(request: Request, registry: Registry) -> Plan:
    """Return the plan of a request that breaks no rule."""
    options = EngineOptions()
    for switch in request.active.values():
        options = switch.engine_options(request, options)
    return Plan(
        template=request.environment.template or "none",
        switches=tuple(request.active),
        sizes=request.sizes,
        engine=_engine(request),
        engine_options=options,
        device=request.environment.device,
        precision=precision(request.config, request.environment),
        optimizer=request.config.get("optimizer"),
        optimizer_implementation=implementation(request).path,
        optimizer_options=optimizer_options(request),
        schedule=file_schedule(request),
        notes=_notes(request, registry),
        values=_values(request),
        rules=tuple(rule.code for rule in registry.consulted(request)),
        groups=groups_of(request.sizes, [d for switch in request.active.values() for d in switch.dimensions(request)]),
    )


def _engine(request: Request) -> str:
    """Return the engine that owns the optimizer step."""
    owner = engine_owner(request)
    if owner is not None:
        return str(owner.engine)
    narrow = precision(request.config, request.environment) != "fp32" and wide_weights(request) is None
    if narrow or request.sizes.context > 1:
        return PARALLEL_ENGINE  # it has fp32 masters, and sums gradients over the workers that share a sequence
    return DDP_ENGINE if request.sizes.data > 1 else SINGLE_ENGINE


def _notes(request: Request, registry: Registry) -> tuple[str, ...]:
    notes = [*request.config.replaced, *request.config.chosen]
    notes += [note for switch in request.active.values() for note in switch.notes(request)]
    notes += [finding.message for finding in registry.noted(request)]
    micro = request.sizes.micro_batch
    if micro > 1 and micro_follows(request.config):
        sizes = f"--global-batch-size {request.sizes.global_batch} / {request.sizes.data} data-parallel"
        notes.append(f"micro batch {micro}: {sizes}, because a run by --epochs does not accumulate (RF006)")
    if micro > 8 and micro % 8:
        notes.append(f"micro batch {micro}: multiples of 8 suit the matrix units better ({in_words('[S]')})")
    if not request.environment.has_device:
        what = "GPU" if request.environment.device == "cuda" else request.environment.device
        later = "what depends on its kind is checked again when training starts"
        notes.append(f"no {what} is visible here: {later}")
    return tuple(notes)


def _values(request: Request) -> Mapping[str, Mapping[str, object]]:
    """Return each flag that was given, and the template, with its value and where it came from."""
    config, environment = request.config, request.environment
    values = {
        spelling(f.name): {"value": config.get(f.name), "origin": config.origin(f.name)}
        for f in config.fields()
        if f.name in config.origins
    }
    return {**values, "template": {"value": environment.template, "origin": environment.template_origin}}


TEMPLATE_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "Trainer": {},
    "Pretrainer": {"task": "pretraining"},
    "Finetuner": {},  # the task decides the defaults of fine-tuning, so they are the same in every template
}
"""Flags that a template sets if nothing else does, by the template's name."""


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
    """Return the configuration with the template's defaults for flags without a value."""
    preferred = {name: value for name, value in TEMPLATE_DEFAULTS[template].items() if name not in config.origins}
    return config.replace(template, **preferred) if preferred else config
