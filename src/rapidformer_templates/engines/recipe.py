"""Optimizers as recipes, parameter groups by name, rates by layer, and learning-rate schedules.

Rates by layer decay towards the input: layers closer to it learn slower (Howard and Ruder, 2018; ELECTRA).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from rapidformer_templates.errors import ConfigError, ModelError, RapidformerError
from rapidformer_templates.models.blocks import canonical_name, find_blocks
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.deepspeed_file.file import AUTO, whole
from rapidformer_templates.planning.flags import TrainingFlags
from rapidformer_templates.planning.optimizers import RULES
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.schedules import STYLES, FileSchedule, warmup_steps

COUNTED_FROM_ONE = ("cosine_warmup_with_min_lr",)
"""Schedules that reach their end in the last step of the decay, not after it."""

Schedule = Callable[[int], float]
"""Returns the learning rate of a step (from 0) as a fraction of the peak."""

GroupOptions = Callable[[str, nn.Parameter], Mapping[str, object]]
"""Returns the options in which a parameter, given by its canonical name, differs from the rest."""


Differing = Mapping[str, Mapping[str, object]]
"""The options of each parameter by its name, other than those of the optimizer."""

UNDECAYED = re.compile(r"(^|[._])bias|(layernorm|rmsnorm|(^|[._])norm)\.\w+$")
"""Names of biases and of parameters of norms, in lower case. Some have several dimensions, as the biases of experts."""


def undecayed(name: str, parameter: nn.Parameter) -> Mapping[str, object]:
    """Disable weight decay for biases, norms, and all other parameters with fewer than two dimensions."""
    return {"weight_decay": 0.0} if parameter.ndim < 2 or UNDECAYED.search(name.lower()) else {}


@dataclass(frozen=True)
class OptimizerSpec:
    """A recipe for an optimizer. Engines shard parameters first, and then build the optimizer.

    Attributes:
        cls: an optimizer class that takes parameter groups.
        kwargs: its options, including ``lr`` (the peak).
        options: returns the options in which a parameter differs. Parameters with equal options share a group.
    """

    cls: Callable[..., Optimizer]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: GroupOptions = undecayed

    def build(self, parameters: Iterable[tuple[str, nn.Parameter]], differing: Differing) -> Optimizer:
        """Build the optimizer for the parameters as the engine has changed them.

        Args:
            parameters: canonical names and parameters that are trained.
            differing: result of :meth:`differences` before the parameters were sharded.

        Raises:
            RapidformerError: a fused optimizer gets complex parameters.
        """
        groups: dict[tuple[bool, tuple[tuple[str, object], ...]], list[nn.Parameter]] = {}
        for name, parameter in parameters:
            # torch updates many parameters at once, but not sharded and plain ones together.
            if parameter.is_complex() and self.kwargs.get("fused"):
                message = f"{name} has complex numbers, which fused optimizers do not update"
                hint = "return OptimizerSpec(torch.optim.AdamW, {…}) without fused=True"
                raise RapidformerError(message, where="build_optimizer()", hint=hint)
            key = isinstance(parameter, DTensor), tuple(sorted(differing[name].items()))
            groups.setdefault(key, []).append(parameter)
        of_groups = [{"params": members, **dict(options)} for (_, options), members in groups.items()]
        return self.cls(of_groups, **self.kwargs)

    def differences(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Mapping[str, object]]:
        """Return the options of each parameter. Call this while the parameters have their whole shapes."""
        return {name: self.options(name, parameter) for name, parameter in parameters}


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the trained parameters of a model with their canonical names."""
    return [(canonical_name(name), p) for name, p in model.named_parameters() if p.requires_grad]


def name_of_rule(optimizer: type[Optimizer]) -> str:
    """Return the name of an update rule, regardless of implementation. A run may resume with another implementation."""
    return RULES.get(optimizer.__name__, optimizer.__name__)


def default_optimizer(plan: Plan, training: TrainingFlags, options: GroupOptions = undecayed) -> OptimizerSpec:
    """Return the recipe of the planned optimizer, with the learning rate and decay of the flags.

    Args:
        options: returns the options in which a parameter differs from the rest.

    Raises:
        ConfigError: no learning rate was given.
    """
    if training.lr is None:
        message = "--lr is missing"
        raise ConfigError(message, hint="fine-tuning usually starts at 2e-5 to 5e-5, pretraining at 1e-4 to 6e-4")
    path, _, variant = plan.optimizer_implementation.partition(" ")
    module, _, name = path.rpartition(".")
    kwargs: dict[str, Any] = {"lr": training.lr, "weight_decay": training.weight_decay, **plan.optimizer_options}
    if variant == "(fused)":
        kwargs["fused"] = True
    return OptimizerSpec(getattr(import_module(module), name), kwargs, options)


class FirstUses(TorchFunctionMode):
    """Records inside the context in which order a forward first computes with the parameters of a model.

    Attributes:
        names: canonical names of the parameters that were used.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names: list[str] = []
        self._unused = {id(parameter): canonical_name(name) for name, parameter in model.named_parameters()}

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if func.__name__ not in ("__get__", "dim", "size"):  # reading a type or a shape does not count
            for leaf in tree_leaves((args, kwargs)):
                name = self._unused.pop(id(leaf), None)
                if name is not None:
                    self.names.append(name)
        return func(*args, **(kwargs or {}))


def depths_of(model: nn.Module, uses: Sequence[str] | None = None) -> dict[str, int]:
    """Return the depth of parameters below the end of their stack: by name, and for blocks by its beginning.

    The last block has depth 1. Parameters that are used before the first block (embeddings) are one deeper than that
    block. Parameters that follow the blocks have depth 0. An encoder and a decoder are two stacks. Empty for a model
    without repeated blocks.

    Args:
        uses: canonical names in the order in which a forward uses them. The default is the order of declaration.
    """
    stacks: dict[str, list[str]] = {}
    for block in (canonical_name(name) for name in find_blocks(model)):
        stacks.setdefault(block.rpartition(".")[0], []).append(f"{block}.")
    depths = {block: len(stack) - i for stack in stacks.values() for i, block in enumerate(stack)}
    names = [canonical_name(name) for name, _ in model.named_parameters()]
    positions = {name: position for position, name in enumerate(names if uses is None else uses)}
    starts = {
        name: min((p for other, p in positions.items() if other.startswith(tuple(stack))), default=0)
        for name, stack in stacks.items()
    }
    outside = [name for name in names if not name.startswith(tuple(depths))] if stacks else []
    for name in outside:
        # The stacks whose names share most parents with the parameter: those of its half in an encoder-decoder.
        parents = name.split(".")
        shared = {}
        for stack in stacks:
            pairs = zip(parents, stack.split("."), strict=False)
            shared[stack] = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        near = [stack for stack, count in shared.items() if count == max(shared.values())]
        is_before = name in positions and positions[name] < min(starts[stack] for stack in near)
        depths[name] = 1 + max(len(stacks[stack]) for stack in near) if is_before else 0
    return depths


def depth_of(name: str, depths: Mapping[str, int]) -> int:
    """Return the depth of a parameter by its canonical name.

    A parameter that a switch has added, such as an adapter, has the depth of its layer.
    """
    if name in depths:
        return depths[name]
    for beginning, depth in depths.items():
        if beginning.endswith(".") and name.startswith(beginning):
            return depth
    layers = {layer_name.rpartition(".")[0]: depth for layer_name, depth in depths.items()}
    parts = name.split(".")
    outer = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
    return next((layers[layer] for layer in outer if layer in layers), 0)


def layerwise(depths: Mapping[str, int], decay: float, peak: float, options: GroupOptions) -> GroupOptions:
    """Add a learning rate for each layer to ``options``.

    Args:
        depths: result of :func:`depths_of` for the model as it was built.
        decay: factor of the learning rate from a layer to the one below it.
        peak: learning rate of the parameters after the blocks.

    Raises:
        ModelError: the model has no repeated blocks.
    """
    if not depths:
        hint = "keep them in a torch.nn.ModuleList, or give the options of groups in build_optimizer()"
        raise ModelError("the model has no blocks that follow each other", where="--layerwise-lr-decay", hint=hint)

    def with_rates(name: str, parameter: nn.Parameter) -> Mapping[str, object]:
        depth = depth_of(name, depths)
        return {**options(name, parameter), **({"lr": peak * decay**depth} if depth else {})}

    return with_rates


def schedule(
    training: TrainingFlags, total_steps: int, parameters: FileSchedule | None = None, *, global_batch: int = 1
) -> Schedule:
    """Return a schedule: warmup, then linear or cosine decay to ``--min-lr``, a constant rate, or a transformers one.

    With the first three, step ``s`` of ``w`` warmup steps uses ``(s + 1) / w`` of the peak, so that no step is wasted
    at a rate of zero. The decay ends at ``--lr-decay-iters`` (by default the last step).

    Args:
        parameters: type and parameters of a DeepSpeed schedule that replaces it.
        global_batch: samples per step, which convert a warmup in samples to steps.

    Raises:
        ConfigError: the warmup is longer than the decay or the run.
    """
    style = training.lr_decay_style
    decay_steps = training.lr_decay_iters or total_steps
    warmup, by = warmup_steps(training, global_batch, decay_steps)
    assert warmup is not None
    if parameters is not None:
        peak = training.lr or 0.0
        rate = deepspeed_rates(parameters, lr=peak, warmup=warmup, total=decay_steps)
        return lambda step: rate(step) / peak if peak else 0.0
    for steps, what in ((decay_steps, "decay"), (total_steps, "run")):
        if warmup > steps:
            message = f"a warmup of {warmup} steps is longer than the {what} of {steps} steps"
            raise ConfigError(message, where=spelling(by))
    if STYLES[style].of_transformers:
        return _schedule_of_transformers(training, warmup, decay_steps)
    floor = training.min_lr / training.lr if training.lr else 0.0
    shape = {
        "linear": lambda progress: 1.0 - progress,
        "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
        "constant": lambda progress: 1.0,
    }[style]

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, decay_steps - warmup))
        return floor + (1.0 - floor) * shape(progress)

    return factor


def deepspeed_rates(schedule: FileSchedule, *, lr: float, warmup: int, total: int) -> Schedule:
    """Return the learning rate of each update (from 0) by DeepSpeed's own class.

    DeepSpeed sets the first rate when it builds a schedule, and advances it after each update. So update ``s`` has the
    rate of iteration ``s - 1``.

    Args:
        schedule: a schedule without mistakes.
        lr: the peak if it is ``"auto"`` or left to the optimizer.
        warmup, total: the numbers of steps that replace ``"auto"``. Other ``"auto"`` values are DeepSpeed's defaults.
    """
    logging.disable(logging.WARNING)  # messages during the import, and before the first step, do not matter to a run
    try:
        schedules = import_module("deepspeed.runtime.lr_schedules")
        optimizer = SGD([nn.Parameter(torch.empty(0))], lr=lr)
        steps = {"warmup_num_steps": max(1, warmup), "total_num_steps": total}
        automatic: dict[str, float] = {"warmup_max_lr": lr, "cycle_max_lr": lr, **steps}
        filled = {name: automatic.get(name) if value == AUTO else value for name, value in schedule["params"].items()}
        options = {name: whole(value) for name, value in filled.items() if value is not None}
        running = getattr(schedules, schedule["type"])(optimizer, **options)
    finally:
        logging.disable(logging.NOTSET)
    first = float(optimizer.param_groups[0]["lr"])

    def rate(update: int) -> float:
        if update:
            running.step(update - 1)
        return float(optimizer.param_groups[0]["lr"]) if update else first

    return rate


def _schedule_of_transformers(training: TrainingFlags, warmup: int, decay_steps: int) -> Schedule:
    """Return a schedule from transformers' ``get_scheduler``. After the decay the rate stays constant.

    Args:
        warmup: number of warmup steps.
        decay_steps: number of steps of warmup and decay together.

    Raises:
        ConfigError: the warmup leaves no step for the decay, or fewer than its last part needs.
    """
    from transformers import get_scheduler

    name, style = training.lr_decay_style, STYLES[training.lr_decay_style]
    floor = training.min_lr / training.lr if training.lr else 0.0
    options_by_name: dict[str, dict[str, Any]] = {
        "cosine_with_restarts": {"num_cycles": training.lr_num_cycles},
        "polynomial": {"lr_end": training.min_lr, "power": training.lr_power},
        "cosine_with_min_lr": {"min_lr_rate": floor},
        "cosine_warmup_with_min_lr": {"min_lr_rate": floor},
        "warmup_stable_decay": {
            "num_decay_steps": training.lr_wsd_decay_iters or math.ceil(decay_steps / 10),
            "decay_type": training.lr_wsd_decay_style,
            "min_lr_ratio": floor,
        },
    }
    options = options_by_name.get(name, {})
    last = options.get("num_decay_steps", 1)
    if style.decays and warmup + last > decay_steps:
        message = f"a warmup of {warmup} steps leaves {decay_steps - warmup} to decay in, and {name} needs {last}"
        where = spelling("lr_wsd_decay_iters" if training.lr_wsd_decay_iters else "lr_decay_style")
        raise ConfigError(message, where=where)
    # transformers reads only the peak from the optimizer.
    optimizer = SGD([nn.Parameter(torch.empty(0))], lr=training.lr or 1.0)
    scheduler: Any = get_scheduler(name, optimizer, warmup, decay_steps, scheduler_specific_kwargs=options)
    share: Schedule = scheduler.lr_lambdas[0]
    end = decay_steps - (name in COUNTED_FROM_ONE)
    return (lambda step: share(min(step, end))) if style.decays else share
