"""Builds the engine of a run or a session, with a model that is transformed by the active switches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rapidformer_templates.data.loader import load, to_device
from rapidformer_templates.data.order import BatchRequest
from rapidformer_templates.data.random_streams import Stream
from rapidformer_templates.engines.auxiliary_losses import notes_about
from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.embedding_noise import add_noise
from rapidformer_templates.engines.layerwise_rates import FirstUses, depths_of
from rapidformer_templates.engines.model_building import Building
from rapidformer_templates.engines.side_effects import preserve_state
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.models.blocks import find_blocks
from rapidformer_templates.models.label_use import can_be_tried, in_evaluation, label_use
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.registry import REGISTRY, load_object
from rapidformer_templates.planning.switch import FREED_MEMORY
from rapidformer_templates.run.console import say
from rapidformer_templates.run.hooks import checked_model, checked_optimizer
from rapidformer_templates.run.out_of_memory import explained_while_building
from rapidformer_templates.run.reference import allow_trial, provide_reference
from rapidformer_templates.system.host_memory import give_freed_memory_back, keep_freed_memory
from rapidformer_templates.system.random_state import seed_all
from rapidformer_templates.system.workers import Workers

if TYPE_CHECKING:
    from rapidformer_templates.run.template import Template


def choose_allocation(plan: Plan) -> None:
    """Keep the host memory that CPU training frees for the next step, unless a switch requests otherwise."""
    if plan.device != "cpu":
        return
    ways = {REGISTRY[name].freed_memory for name in plan.switches} | {"kept"}
    match next(way for way in FREED_MEMORY if way in ways):
        case "kept":
            keep_freed_memory()
        case "given back":
            give_freed_memory_back()


def prepare_switches(template: Template) -> None:
    """Let the active switches prepare what they need, before a worker starts."""
    for switch in (REGISTRY[name] for name in template.plan.switches):
        if switch.prepare:
            load_object(switch.prepare)(template.config, template.plan)


def build_engine(template: Template, workers: Workers, build: Callable[[], nn.Module] | None = None) -> Engine:
    """Build the model, apply the active switches in the order of their stages, and set up the engine.

    Args:
        build: builds the reference model for preferences, if it is not the initial model.
    """
    config, plan = template.config, template.plan
    engine: Engine = load_object(plan.engine)(plan, workers, clip_grad=config.training.clip_grad)
    model = _seeded_model(template, engine)
    template.model_was_built(model)
    tried = can_be_tried(model)
    if tried:
        _try_labels(template, model, workers)
    if template.uses_task:
        template.task.check_model(model)
    if config.training.layerwise_lr_decay is not None:
        template.depths_were_computed(depths_of(model, _parameters_by_use(template, model, engine)))
    model = _transformed(template, model, workers)
    for note in notes_about(model):
        say(workers, f"note       {note}")
    if config.training.neftune_alpha:
        add_noise(model, config.training.neftune_alpha, config.training.seed)
    recipe = checked_optimizer(template.build_optimizer())
    template.peak_lr = float(recipe.kwargs.get("lr", 0.0))
    engine.setup(model, recipe, template.compute_loss)
    if config.training.ema_decay is not None:
        engine.keep_average(config.training.ema_decay)
    template.engine, template.model = engine, engine.model
    again = build or (lambda: _transformed(template, _seeded_model(template, engine), workers))
    provide_reference(template, engine, again)
    if not tried:
        with engine.measuring() as whole:
            _try_labels(template, whole, workers)
    return engine


def _seeded_model(template: Template, engine: Engine) -> nn.Module:
    """Build the untrained model. Each call gives the same weights."""
    seed_all(template.config.training.seed)
    with explained_while_building(template.plan, engine.workers.rank), engine.build_context():
        return checked_model(template.build_model())


def _transformed(template: Template, model: nn.Module, workers: Workers) -> nn.Module:
    """Apply the active switches to the model, in the order of their stages."""
    config, plan = template.config, template.plan
    for switch in (REGISTRY[name] for name in plan.switches):
        if switch.transform:
            options = config.switches[switch.name]
            building = Building(find_blocks(model), options, plan, workers, partial(_loss_of_one, template))
            with allow_trial(template):
                model = load_object(switch.transform)(model, building)
            del building
    return model


def _parameters_by_use(template: Template, model: nn.Module, engine: Engine) -> list[str] | None:
    """Return the names of the parameters in the order in which the loss of a sample uses them. None without a sample.

    The model is not transformed yet. Under ZeRO-3 its parameters are gathered while they are used.
    """
    if template.data.train is None:
        return None
    uses = FirstUses(model)
    with engine.build_context(), torch.no_grad(), in_evaluation(model), allow_trial(template), uses:
        _loss_of_one(template, model)
    return uses.names


def _try_labels(template: Template, model: nn.Module, workers: Workers) -> None:
    """Find out how the model uses labels. This determines the count of targets and the task's loss."""
    for note in template.labels_were_tried(label_use(model)):
        say(workers, f"note       {note}")


def _loss_of_one(template: Template, model: nn.Module) -> Any:
    """Compute the user's loss of the first sample."""
    if template.data.train is None:
        raise ConfigError(
            "a switch of this session must see the loss of one sample before the first step",
            where=" → ".join(template.plan.switches),
            hint="give compose() a batch of one sample: example=batch",
        )
    request = BatchRequest([0], (template.config.training.seed, Stream.TRIAL), [0])
    (microbatch,) = load(template.data.train, template.data, [request], workers=0, pin_memory=False)
    template.index_limits.check(microbatch, "training samples")
    batch = to_device(microbatch.batch, next(model.parameters()).device)
    with preserve_state(model):
        return template.compute_loss(model, batch)
