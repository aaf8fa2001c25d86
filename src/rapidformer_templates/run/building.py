"""Builds the data and the engine of a run or a session. The active switches transform the model in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD
from transformers import PreTrainedModel

from rapidformer_templates.data.loader import load, to_device
from rapidformer_templates.data.order import BatchRequest, Stream
from rapidformer_templates.data.text.bad_lines import add_by_reason, describe_skipped
from rapidformer_templates.data.types import Endless, SampleSet, checked_data
from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.engines.backwards import until_first_backward
from rapidformer_templates.engines.construction import ModelUnderConstruction
from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.current_batch import add_noise
from rapidformer_templates.engines.forwards import preserve_state
from rapidformer_templates.engines.loss import notes_about
from rapidformer_templates.engines.recipe import FirstUses, OptimizerSpec, depths_of, undecayed
from rapidformer_templates.errors import ConfigError, DataError, ModelError
from rapidformer_templates.models.adapters import new_modules_of
from rapidformer_templates.models.architectures import choose_frequencies, notes_about_frequencies
from rapidformer_templates.models.blocks import norms_with_statistics
from rapidformer_templates.models.label_use import in_evaluation, label_use
from rapidformer_templates.models.model_files import check_not_quantized, quantized_error
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.optimizers import OPTIMIZERS
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.registry import REGISTRY, load_object
from rapidformer_templates.planning.switch import FREED_MEMORY
from rapidformer_templates.run.hooks import checked_model, checked_optimizer
from rapidformer_templates.run.out_of_memory import explained_while_building
from rapidformer_templates.run.reference import allow_trial, provide_reference
from rapidformer_templates.run.run import Run
from rapidformer_templates.run.step_errors import IndexLimits
from rapidformer_templates.system import process_state
from rapidformer_templates.system.terminal import say
from rapidformer_templates.system.workers import set_group_timeouts

NO_UPDATES = OptimizerSpec(SGD, {"lr": 0.0})
"""The recipe of a run that does not train."""


def choose_allocation(plan: Plan) -> None:
    """Keep the host memory that CPU training frees for the next step, unless a switch requests otherwise."""
    if plan.device != "cpu":
        return
    ways = {REGISTRY[name].freed_memory for name in plan.switches} | {"kept"}
    match next(way for way in FREED_MEMORY if way in ways):
        case "kept":
            process_state.keep_freed_memory()
        case "given back":
            process_state.give_freed_memory_back()


def prepare_switches(config: RunConfig, plan: Plan) -> None:
    """Let the active switches prepare what they need, before a worker starts."""
    for switch in (REGISTRY[name] for name in plan.switches):
        if switch.prepare:
            load_object(switch.prepare)(config, plan)


def build_data(run: Run) -> SampleSet | Endless:
    """Build the data of the run, and return the training samples."""
    run.data = data = checked_data(run.hooks.build_data())
    run.task = task = run.hooks.task if run.hooks.uses_task else None
    if task and task.bad.skipped:
        say(run.workers, describe_skipped(add_by_reason({}, task.bad.skipped)), loud=True)
    for note in task.notes if task else []:
        say(run.workers, f"note       {note}")
    samples = data.train
    if isinstance(samples, Endless) and data.valid is None:
        say(run.workers, "note       a stream is not divided: without a validation part the run is not evaluated")
    if samples is None or (not isinstance(samples, Endless) and len(samples) == 0):
        raise DataError("the training data set is empty", where="build_data()", hint="it must have at least one sample")
    if run.config.data.evaluate_test and not data.test:
        hint = "return Data(…, test=samples), or leave the flag out"
        raise DataError("there is no test part", where="--evaluate-test", hint=hint)
    return samples


def build_engine(run: Run, build_reference: Callable[[], nn.Module] | None = None) -> None:
    """Build the model, apply the active switches in the order of their stages, and set up the engine.

    Args:
        build_reference: builds the reference model for preferences, if it is not the initial model.
    """
    engine: Engine = load_object(run.plan.engine)(run.plan, run.workers, clip_grad=run.config.training.clip_grad)

    def frozen_reference() -> nn.Module:
        with engine.construction() as construction:
            if build_reference:
                return engine.frozen(build_reference())
            return engine.frozen(_transformed(run, _build_model(run, construction), construction).model)

    with process_state.measured_peak(run.workers.device) as run.setup_peak:
        _set_up(run, engine)
        provide_reference(run, frozen_reference)
    if timeout := run.config.launch.worker_timeout:
        set_group_timeouts(30 * timeout)  # the watch ends a run that hangs, because it can name the worker


def _set_up(run: Run, engine: Engine) -> None:
    plan, training, workers = run.plan, run.config.training, run.workers
    with engine.construction() as construction:
        # 1. The model as the user builds it, and what must be known about it before it is transformed.
        run.built = model = _build_model(run, construction)
        if run.has_values:
            run.index_limits = IndexLimits.of(model, own_loss=run.overrides("compute_loss"))
        turn_off_cache(model)
        _try_labels(run, model)
        if run.task:
            run.task.check_model(model)
            new = new_modules_of(model)  # a task with labels begins with a new head anyway
            if new and run.task.auto_class.endswith(("MaskedLM", "PreTraining")):
                say(workers, f"note       the folder lacks {', '.join(new)}: they begin with random values")
        groups = OPTIMIZERS[plan.optimizer].groups
        run.parameter_groups = load_object(groups)(model) if groups else undecayed
        if training.layerwise_lr_decay is not None and run.trains:
            uses = FirstUses(model)
            if run.data.train is not None:  # the order in which the loss of a sample uses the parameters
                gradients_off = until_first_backward(model.parameters)
                with torch.no_grad(), in_evaluation(model), allow_trial(run.task), uses, gradients_off:
                    _loss_of_one(run, model)
            run.depths = depths_of(model, None if run.data.train is None else uses.names)

        # 2. The transforms of the switches.
        assembly = _transformed(run, model, construction)
        numbers = _notes_about_numbers(assembly.model, plan) if run.trains else ()
        for note in (*notes_about(assembly.model), *notes_about_frequencies(assembly.model), *numbers):
            say(workers, f"note       {note}")
        if training.neftune_alpha:
            add_noise(assembly.model, training.neftune_alpha, training.seed)

        # 3. The engine. It wraps or shards the model, and then builds the optimizer.
        run.built = assembly.model
        recipe = checked_optimizer(run.hooks.build_optimizer()) if run.trains else NO_UPDATES
        run.peak_lr = float(recipe.kwargs.get("lr", 0.0))
        engine.setup(assembly, recipe, run.hooks.compute_loss)
        if training.ema_decay is not None and run.trains:
            engine.keep_average(training.ema_decay)
        run.engine = engine


def _notes_about_numbers(model: nn.Module, plan: Plan) -> Iterator[str]:
    """Yield notes about batch norms, and about trained 16-bit parameters that the engine gives no fp32 masters.

    Only DeepSpeed in 16 bits has masters for them. The other engines have masters for fp32 parameters.
    """
    if norms_with_statistics(model):
        what = "a batch norm computes with one micro batch of one worker"
        yield f"{what}, so the loss depends on the micro batch size and on the number of workers"
    types = sorted(
        {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad and p.itemsize == 2}
    )
    if types and not (plan.engine_options.deepspeed and plan.precision != "fp32"):
        yield (
            f"build_model() returns trained parameters in {' and '.join(types)}, which lose small updates by rounding; "
            "load them in fp32, and compute in 16 bits with --mixed-precision"
        )


def _build_model(run: Run, construction: ModelUnderConstruction | None) -> nn.Module:
    """Build the untrained model. Each call gives the same weights."""
    process_state.seed_all(run.config.training.seed)
    is_own = run.overrides("build_model")
    if not is_own and not (run.task and run.task.is_trained):
        check_not_quantized(run.config)
    with explained_while_building(run.plan, run.workers.rank, is_divided=construction is not None):
        model = checked_model(run.hooks.build_model())
    for module in model.modules() if is_own else ():
        if isinstance(module, PreTrainedModel) and getattr(module, "is_quantized", False):
            method = module.config.quantization_config.quant_method.value
            raise quantized_error(f"the weights of {type(module).__name__}", method, where="build_model()")
    check_memory(model)
    choose_frequencies(model, run.config.model.seq_length)
    return model


def check_memory(model: nn.Module) -> None:
    """Check that no trained parameter shares memory with another parameter or a buffer.

    In one process on a CPU, an update of one would change the other. torch separates them when it moves the model, and
    so does each engine that shards or flattens parameters.

    Raises:
        ModelError: two of them overlap.
    """
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not is_lazy(tensor) and tensor.layout == torch.strided and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))
    for sharing in by_storage.values():
        for (one, first), (other, second) in combinations(sharing, 2):
            if (first.requires_grad or second.requires_grad) and _overlap(first, second):
                tie = "assign one parameter to both modules, as in b.weight = a.weight"
                copy = "register a copy, or compute it from the parameter in each forward"
                hint = tie if isinstance(second, nn.Parameter) else copy
                what = "two tensors on one memory, which moving or sharding the model separates"
                raise ModelError(f"{one} and {other} are {what}", where="build_model()", hint=hint)


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors on one storage have an element in common."""
    both = (first, second)
    reaches = [sum((size - 1) * step for size, step in zip(one.shape, one.stride(), strict=True)) for one in both]
    ends = [one.storage_offset() + 1 + reach for one, reach in zip(both, reaches, strict=True)]
    if ends[0] <= second.storage_offset() or ends[1] <= first.storage_offset():
        return False
    if first.itemsize != second.itemsize or (first.is_contiguous() and second.is_contiguous()):
        return True
    elements = torch.arange(int(max(ends)))  # the columns of a matrix lie between one another, and do not overlap
    used = [elements.as_strided(one.shape, one.stride(), one.storage_offset()) for one in both]
    return bool(torch.isin(*used).any())


def turn_off_cache(model: nn.Module) -> None:
    """Turn off the key-value cache of generation. It wastes memory, and is wrong if a block is recomputed."""
    for module in model.modules():  # the user's own module may contain a transformers model
        settings = getattr(module, "config", None)
        if settings is not None and hasattr(settings, "use_cache"):
            settings.use_cache = False


def _transformed(run: Run, model: nn.Module, construction: ModelUnderConstruction | None) -> Assembly:
    """Apply the active switches to the model, in the order of their stages."""
    assembly = Assembly(model)
    for switch in (REGISTRY[name] for name in run.plan.switches):
        if switch.transform:
            options = run.config.switches[switch.name]
            try_loss = partial(_loss_of_one, run)
            building = Building(options, run.plan, run.workers, try_loss, run.has_values, construction)
            with allow_trial(run.task):
                load_object(switch.transform)(assembly, building)
    return assembly


def _try_labels(run: Run, model: nn.Module) -> None:
    """Find out how the model uses labels. This determines the count of targets and the task's loss."""
    use = label_use(model)
    run.labels_are_shifted = use.shifts
    if use.untried:
        note = f"{use.model} could not be tried ({use.untried}): judging by its name, it shifts labels"
        say(run.workers, f"note       {note}")
    if use.sees_padding and run.has_values:
        note = f"{use.model} computes with the padding of a row, so its loss depends on --micro-batch-size"
        say(run.workers, f"note       {note}")
    if not run.task:
        return
    run.task.label_use = use
    shifts = run.task.use_labels(use)
    if not run.overrides("compute_loss"):
        run.labels_are_shifted = shifts
    elif shifts and not use.shifts:
        note = f"{use.model} does not shift labels, nor does this task here: your compute_loss must"
        say(run.workers, f"note       {note}")


def _loss_of_one(run: Run, model: nn.Module) -> Any:
    """Compute the user's loss of the first sample."""
    if run.data.train is None:
        message = "a switch of this session must see the loss of one sample before the first step"
        hint = "give compose() a batch of one sample: example=batch"
        raise ConfigError(message, where=" → ".join(run.plan.switches), hint=hint)
    request = BatchRequest([0], (run.config.training.seed, Stream.TRIAL), [0])
    (microbatch,) = load(run.data.train, run.data, [request], workers=0, pin_memory=False)
    run.index_limits.check(microbatch, "training samples")
    run.built = model
    batch = to_device(microbatch.batch, next(model.parameters()).device)
    with preserve_state(model):
        return run.hooks.compute_loss(model, batch)
