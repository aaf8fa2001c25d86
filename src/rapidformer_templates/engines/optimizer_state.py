"""The state of an optimizer: its shards in a checkpoint, values of groups, its place on the host, averages of weights.

**Values that optimizers keep in their groups**, such as apex FusedAdam's count, Prodigy's distance or schedule-free's
sums, are those that differ from the groups as built. A checkpoint stores them under the name of each parameter of the
group (``weight/group.d``), so that every engine finds them, however it groups parameters. A count of steps is stored
under ``weight/step``, whether an optimizer keeps it in the group or per parameter. So a run can resume with either
kind.

**An exponential moving average of the weights** is part of the state and sharded like it. Each shard of a parameter is
averaged on its device right after each optimizer step, also if this step did not update the parameter. Any other layout
can load it from a checkpoint, like the moments. A skipped step changes nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rapidformer_templates.engines.parallel.buckets import update_chunks
from rapidformer_templates.engines.recipe import Differing, OptimizerSpec
from rapidformer_templates.engines.shards import Shard, StateReader, as_dtensor, local_part, whole_shard
from rapidformer_templates.errors import CheckpointError
from rapidformer_templates.planning.optimizers import updates_in_chunks
from rapidformer_templates.system import accelerator

PREFIX = "group."
COUNT = "step"
COUNTS_PER_PARAMETER = ("torch.", "deepspeed.", "rapidformer_templates.")
NOT_SAVED = frozenset({"params", "lr"})  # the schedule sets the rate

_initial_values: WeakKeyDictionary[Optimizer, list[dict[str, torch.Tensor]]] = WeakKeyDictionary()
_counts_in_groups: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()


def record_initial_values(optimizer: Optimizer) -> None:
    """Remember the groups as built, before the first step and before anything is loaded."""
    _initial_values[optimizer] = [_scalars_of(group) for group in optimizer.param_groups]


def group_entries(optimizer: Optimizer, index: int, state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return the values of a group to store with one of its parameters: those that differ from the group as built.

    Args:
        state: the optimizer state of the parameter.
    """
    initial, now = _initial_values[optimizer][index], _scalars_of(optimizer.param_groups[index])
    changed = {key: value for key, value in now.items() if key not in initial or not _equal(value, initial[key])}
    entries = {PREFIX + key: value for key, value in changed.items() if key != COUNT}
    if COUNT in changed and state and COUNT not in state:
        entries[COUNT] = changed[COUNT].to(torch.float32)  # like the counts of torch's optimizers
    return entries


def split_keys(optimizer: Optimizer, keys: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split checkpoint keys into (those of a parameter, those of its group)."""
    per_parameter: list[str] = []
    shared: list[str] = []
    for key in keys:
        in_group = key.startswith(PREFIX) or (key == COUNT and counts_in_groups(optimizer))
        (shared if in_group else per_parameter).append(key)
    return per_parameter, shared


def read_group(optimizer: Optimizer, index: int, names: Sequence[str], reader: StateReader) -> dict[str, object]:
    """Read the values of a group from a checkpoint, in the form of the group.

    Args:
        names: the parameters of the group on this rank.

    Raises:
        CheckpointError: the parameters of the group have different values.
    """
    saved = reader.names("optimizer")
    keys = {key for name, _, key in (entry.rpartition("/") for entry in saved) if name in set(names)}
    group, scalars = optimizer.param_groups[index], {}
    for key in sorted(split_keys(optimizer, sorted(keys))[1]):
        holders = [name for name in names if f"{name}/{key}" in saved]
        hint = "this optimizer has one for many parameters; continue with the one that it was saved by"
        scalars[key.removeprefix(PREFIX)] = read_shared_value(reader, key, holders, hint)
    return _in_group_form(group, scalars)


def read_shared_value(reader: StateReader, key: str, names: Sequence[str], hint: str) -> torch.Tensor:
    """Read a number that a checkpoint has for each of these parameters, and an optimizer once for all of them.

    Raises:
        CheckpointError: they have different ones. ``hint`` says what to do.
    """
    values = {name: reader.read("optimizer", f"{name}/{key}", (), ()) for name in names}
    if len({float(value) for value in values.values()}) > 1:
        some = ", ".join(f"{name} {float(value):g}" for name, value in list(values.items())[:4])
        raise CheckpointError(f"the parameters differ in {key.removeprefix(PREFIX)}: {some}", hint=hint)
    return next(iter(values.values()))


def counts_in_groups(optimizer: Optimizer) -> bool:
    """Whether an optimizer counts steps in its groups, and not per parameter.

    The optimizers of torch, DeepSpeed and this library count per parameter. For others, a trial step of a copy on a
    dummy parameter with a zero gradient decides.
    """
    if type(optimizer).__module__.startswith(COUNTS_PER_PARAMETER):
        inner = getattr(optimizer, "inner", None)  # offloaded to the host
        return isinstance(inner, Optimizer) and counts_in_groups(inner)
    if optimizer in _counts_in_groups:
        return _counts_in_groups[optimizer]
    device = next((p.device for g in optimizer.param_groups for p in g["params"]), torch.device("cpu"))
    parameter = torch.nn.Parameter(torch.zeros(2, 2, device=device))
    parameter.grad = torch.zeros_like(parameter)
    probe = object.__new__(type(optimizer))
    probe.__dict__.update(optimizer.__dict__)
    probe.param_groups = [{**_copy_of(optimizer.param_groups[0]), "params": [parameter]}]
    probe.state = defaultdict(dict)
    probe.step()
    _counts_in_groups[optimizer] = COUNT in probe.param_groups[0] and COUNT not in probe.state[parameter]
    return _counts_in_groups[optimizer]


def step_once(zero: Any) -> None:
    """Advance the groups of an optimizer once per step of ZeRO-3, which updates one sub-group of parameters at a time.

    DeepSpeed calls the optimizer for each sub-group with all groups, only one of which has parameters.

    Args:
        zero: DeepSpeed's stage 3 optimizer, which wraps ours.
    """
    groups = zero.optimizer.param_groups
    if type(zero.optimizer).__module__.startswith(COUNTS_PER_PARAMETER):
        return
    update = zero._optimizer_step
    first_values: dict[int, dict[str, object]] = {}

    def update_one(sub_group: int) -> None:
        own_group = zero.sub_group_to_group_id[sub_group]
        if sub_group == 0:
            first_values.clear()
        if own_group in first_values:  # another part of the group was already updated in this step
            _replace_values(groups[own_group], first_values[own_group])
        before = {index: _copy_of(group) for index, group in enumerate(groups)}
        first_values.setdefault(own_group, before[own_group])
        update(sub_group)
        for index, group in enumerate(groups):
            if index != own_group:
                _replace_values(group, before[index])

    zero._optimizer_step = update_one


def _copy_of(group: Mapping[str, object]) -> dict[str, object]:
    values = _options(group).items()
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values}


def _replace_values(group: dict[str, object], values: Mapping[str, object]) -> None:
    parameters = group["params"]
    group.clear()
    group.update(_copy_of(values), params=parameters)


def check_count(optimizer: Optimizer, name: str, keys: Sequence[str]) -> None:
    """Check that a checkpoint has the step count that Adam needs in addition to its moments.

    Raises:
        CheckpointError: it was saved before counts of groups were stored.
    """
    if "exp_avg_sq" in keys and COUNT not in keys and not counts_in_groups(optimizer):
        hint = "continue with the optimizer that saved it, or take only the weights with --load … --weights-only"
        raise CheckpointError(f"the checkpoint has no count of steps for {name}", hint=hint)


def _scalars_of(group: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return the numbers and flags of a group as scalar tensors. Items of a list have their index as suffix."""
    scalars: dict[str, torch.Tensor] = {}
    for key, value in group.items():
        if key in NOT_SAVED:
            continue
        parts: list[tuple[str, object]] = [(key, value)]
        if isinstance(value, (tuple, list)) and all(isinstance(part, (bool, int, float)) for part in value):
            parts = [(f"{key}.{i}", part) for i, part in enumerate(value)]
        for name, part in parts:
            if isinstance(part, torch.Tensor) and part.numel() == 1:
                scalars[name] = part.detach().reshape(()).clone()
            elif isinstance(part, (bool, int, float)):
                scalars[name] = torch.tensor(part, dtype=torch.float64 if isinstance(part, float) else None)
    return scalars


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = one.item(), other.item()
    return first == second or (isinstance(first, float) and math.isnan(first) and math.isnan(second))


def _in_group_form(group: Mapping[str, object], scalars: Mapping[str, torch.Tensor]) -> dict[str, object]:
    """Convert scalars of a checkpoint to the form in the group: a number, a tensor, or an item of a list."""
    values: dict[str, Any] = {}
    for name, scalar in scalars.items():
        key, _, index = name.rpartition(".")
        if key and isinstance(items := group.get(key), (tuple, list)):
            parts = list(values.get(key, items))
            parts[int(index)] = scalar.item()
            values[key] = type(items)(parts)
        elif isinstance(current := group.get(name), torch.Tensor):
            values[name] = scalar.to(current).reshape(current.shape)
        elif name == COUNT:
            values[name] = int(scalar)
        else:
            plain = scalar.dtype in (torch.float64, torch.int64, torch.bool)
            values[name] = scalar.item() if plain else scalar.clone()
    return values


def is_in_host_memory(device: torch.device) -> bool:
    """Whether parameters and optimizer state are in host memory without offload."""
    return device.type == "cpu"


CHUNK_ELEMENTS = 2**25
"""Elements that are updated at a time on the host: 128 MB in fp32."""


class HostOptimizer(Optimizer):
    """Updates copies of the parameters in host memory, where all of its state is.

    A step copies the gradients to the host, updates there and copies the new weights back. If the optimizer allows it,
    this is done in chunks: while one is updated, the next gradients and the last weights are copied. Copies have the
    type of their parameters, so that an update is the same as on the device. For other code this is an optimizer of the
    device's parameters: its groups and state refer to them.

    Host memory per trained parameter: its weight, its gradient and the optimizer state, 16 bytes for AdamW in fp32.
    Weights and gradients are in page-locked memory, because a GPU copies only from and to such memory.

    Attributes:
        inner: the optimizer that the recipe builds, over the copies.
    """

    def __init__(
        self, recipe: OptimizerSpec, parameters: Sequence[tuple[str, nn.Parameter]], differing: Differing
    ) -> None:
        self._copies = {parameter: nn.Parameter(_on_host(parameter)) for _, parameter in parameters}
        self._gradients = {parameter: _on_host(parameter) for _, parameter in parameters}
        # In-place modification counts of the parameters (from autograd) when their copies were last equal. Empty at
        # first: DDP may broadcast the weights of rank 0 later, and the first step makes the copies anyway.
        self._versions: dict[nn.Parameter, int] = {}
        self.inner = recipe.build([(name, self._copies[parameter]) for name, parameter in parameters], differing)
        of_copy = {copy: parameter for parameter, copy in self._copies.items()}
        groups = [{**group, "params": [of_copy[c] for c in group["params"]]} for group in self.inner.param_groups]
        super().__init__(groups, self.inner.defaults)
        ordered = [parameter for group in self.param_groups for parameter in group["params"]]
        kind = type(self.inner)
        in_chunks = updates_in_chunks(f"{kind.__module__}.{kind.__qualname__}")
        sizes = [parameter.numel() for parameter in ordered]
        places = update_chunks(sizes, CHUNK_ELEMENTS) if in_chunks else [range(len(ordered))]
        self._chunks = [[ordered[place] for place in of_chunk] for of_chunk in places]
        device = ordered[0].device
        self._side = None if is_in_host_memory(device) else accelerator.side_stream(device)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        assert closure is None, "engines do not call a closure"
        for inner, group in zip(self.inner.param_groups, self.param_groups, strict=True):
            inner.update(_options(group))
        if self._side is not None:
            self._side.wait_stream(torch.accelerator.current_stream(self._side.device))
        copied = [self._copy_to_host(parameters) for parameters in self._chunks]
        for parameters, event in zip(self._chunks, copied, strict=True):
            if event is not None:
                event.synchronize()
            with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
            for parameter in with_gradient:
                self._copies[parameter].grad = self._gradients[parameter]
            if with_gradient:
                self.inner.step()
            for parameter in with_gradient:
                # The next step writes to the copy only after it has waited for the device.
                parameter.copy_(self._copies[parameter], non_blocking=True)
                self._copies[parameter].grad = None
            self._versions.update((parameter, parameter._version) for parameter in parameters)
        self._expose_state()

    def _copy_to_host(self, parameters: Sequence[nn.Parameter]) -> torch.Event | None:
        """Begin to copy gradients, and weights that were changed. Return when that ends, or None if it has ended."""
        with self._side or nullcontext():
            for parameter in parameters:
                if self._versions.get(parameter) != parameter._version:  # something else has changed it: a checkpoint
                    self._copies[parameter].copy_(parameter, non_blocking=True)
                if parameter.grad is not None:
                    self._gradients[parameter].copy_(parameter.grad, non_blocking=True)
            device = parameters[0].device
            return None if is_in_host_memory(device) else accelerator.recorded_event(device, self._side)

    def _expose_state(self) -> None:
        """Make the state in host memory accessible under the device's parameters."""
        for inner, group in zip(self.inner.param_groups, self.param_groups, strict=True):
            group.update(_options(inner))  # some optimizers keep a count or an estimate in their groups
        for parameter, copy in self._copies.items():
            if copy in self.inner.state:
                self.state[parameter] = self.inner.state[copy]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state into the host optimizer, whose parameters have the same order."""
        self.inner.load_state_dict(state_dict)
        self.state.clear()
        self._expose_state()


def _on_host(like: torch.Tensor) -> torch.Tensor:
    """Allocate host memory for a tensor, page-locked if the tensor is on another device."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=not is_in_host_memory(like.device))


def _options(group: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in group.items() if name != "params"}


def plain_tensors(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name suffix, tensor). A quantized tensor is split into its codes, scales and tables."""
    if isinstance(tensor, DTensor) or not is_traceable_wrapper_subclass(tensor):
        yield "", tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield f".{part}", getattr(tensor, part)


def state_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return all tensors in an optimizer's state."""
    values = (value for entry in optimizer.state.values() for value in entry.values())
    return [part for value in values if isinstance(value, torch.Tensor) for _, part in plain_tensors(value)]


Updated = Mapping[torch.Tensor, Shard]
"""The shard of each tensor that an optimizer updates."""


def optimizer_shards(updated: Updated, optimizer: Optimizer) -> Iterator[Shard]:
    """Yield the shards of an optimizer's state. Each is named ``parameter/key``."""
    states: dict[int, dict[str, object]] = {}  # with the values of the group
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            state = dict(optimizer.state.get(parameter, {}))
            states[id(parameter)] = state | group_entries(optimizer, index, state)
    for parameter, shard in updated.items():
        for key, value in sorted(states.get(id(parameter), {}).items()):
            if value is None:
                continue
            for suffix, tensor in plain_tensors(torch.as_tensor(value)):
                name, local = f"{shard.name}/{key}{suffix}", local_part(tensor)
                if tensor.shape == parameter.shape and local.shape == shard.values.shape:
                    yield replace(shard, name=name, values=local)
                elif shard.index.has_first_element:  # a count, or a factor of the whole tensor
                    yield whole_shard(name, tensor, shard.copies, counts=shard.counts)


def load_optimizer(updated: Updated, optimizer: Optimizer, reader: StateReader) -> None:
    """Load the state of an optimizer from a checkpoint. Each worker reads only its own part."""
    saved: dict[str, dict[str, tuple[int, ...]]] = {}
    for entry, shape in reader.names("optimizer").items():
        name, _, key = entry.rpartition("/")
        saved.setdefault(name, {})[key] = shape
    state: dict[int, dict[str, torch.Tensor]] = {}
    flattened = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(flattened):
        shard = updated.get(parameter)
        if shard is None:
            continue
        shapes = saved.get(shard.name, {})
        keys, _ = split_keys(optimizer, list(shapes))
        check_count(optimizer, shard.name, list(shapes))
        if keys:
            state[index] = {key: _read_entry(parameter, shard, key, shapes[key], reader) for key in keys}
    groups = optimizer.state_dict()["param_groups"]
    for number, group in enumerate(optimizer.param_groups):
        names = [updated[parameter].name for parameter in group["params"] if parameter in updated]
        groups[number] |= read_group(optimizer, number, list(dict.fromkeys(names)), reader)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _read_entry(
    parameter: torch.Tensor, shard: Shard, key: str, shape: tuple[int, ...], reader: StateReader
) -> torch.Tensor:
    """Read an entry of optimizer state, sharded like its parameter. Counts and factors stay whole."""
    read = partial(reader.read, "optimizer", f"{shard.name}/{key}")
    if shape != shard.shape:
        return read((0,) * len(shape), shape)
    values = shard.read_like(read)
    if not isinstance(parameter, DTensor):
        return values
    return as_dtensor(values.to(parameter.device), parameter.device_mesh, parameter.placements, parameter)


AVERAGE = "weight_average"
"""Key of the average in the optimizer state of a parameter."""


class WeightAverage:
    """Averages the weights after each step: ``decay`` times the average plus the rest of the new weight.

    The average starts with the weight after the first step, like ``torch.optim.swa_utils.AveragedModel`` with
    ``get_ema_multi_avg_fn``. A step may call the optimizer several times, each time for some parameters. So the engine
    reports the end of a step, and only then the parameters are averaged that this step did not update.

    Args:
        optimizer: the optimizer that keeps the averages in its state.
        decay: fraction of the average that remains after a step.
    """

    def __init__(self, optimizer: Optimizer, decay: float) -> None:
        self._optimizer = optimizer.inner if isinstance(optimizer, HostOptimizer) else optimizer
        self._decay = decay
        self._is_first_step: bool | None = None
        self._updated: set[torch.Tensor] = set()
        self._before_first_update: dict[torch.Tensor, torch.Tensor] = {}
        self._optimizer.register_step_pre_hook(self._before_call)
        self._optimizer.register_step_post_hook(self._after_call)

    def _before_call(self, optimizer: Optimizer, *unused: object) -> None:
        """Keep the weights of parameters that a later step than the first updates for the first time."""
        if self._is_first_step is None:
            self._is_first_step = not any(AVERAGE in state for state in optimizer.state.values())
        if not self._is_first_step:
            for parameter in _parameters_with_gradient(optimizer):
                if AVERAGE not in optimizer.state.get(parameter, {}):
                    self._before_first_update[parameter] = parameter.detach().clone()

    @torch.no_grad()
    def _after_call(self, optimizer: Optimizer, *unused: object) -> None:
        skipped = getattr(optimizer, "found_inf", None)  # flag of a fused update, not read by the host
        for parameter in _parameters_with_gradient(optimizer):
            state = optimizer.state[parameter]
            if parameter in self._before_first_update:
                state[AVERAGE] = self._before_first_update.pop(parameter)
            self._average(parameter, state, skipped)
            self._updated.add(parameter)

    @torch.no_grad()
    def end_step(self, skipped: bool | torch.Tensor) -> None:
        """Average the parameters that this step did not update.

        A parameter that no step has updated yet has no state. It equals its average.

        Args:
            skipped: whether the update was skipped (fp16). A tensor is not read by the host.
        """
        if skipped is True:
            return
        for parameter in (p for group in self._optimizer.param_groups for p in group["params"]):
            state = self._optimizer.state.get(parameter)
            if state and parameter not in self._updated:
                self._average(parameter, state, skipped if isinstance(skipped, torch.Tensor) else None)
        self._updated.clear()
        self._is_first_step = False

    def _average(self, parameter: torch.Tensor, state: dict[str, torch.Tensor], skipped: torch.Tensor | None) -> None:
        if AVERAGE not in state:
            state[AVERAGE] = parameter.detach().clone()
            return
        average, new = local_part(state[AVERAGE]), local_part(parameter)
        share = 1 - self._decay
        average.lerp_(new, share if skipped is None else share * (1 - skipped.to(average.dtype)))


def _parameters_with_gradient(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def average_of(name: str) -> str:
    """Return the optimizer entry of a checkpoint that holds the average of a parameter."""
    return f"{name}/{AVERAGE}"


def has_averages(reader: StateReader) -> bool:
    """Whether a checkpoint has averages of the weights."""
    return any(name.endswith(f"/{AVERAGE}") for name in reader.names("optimizer"))


class WithoutAverages:
    """A checkpoint reader that hides the averages, for a run without them. A stale average would be wrong later.

    Args:
        reader: reader of the checkpoint.
    """

    def __init__(self, reader: StateReader) -> None:
        self._reader = reader
        self.read = reader.read

    def names(self, kind: str) -> dict[str, tuple[int, ...]]:
        """Return names and shapes, see :class:`StateReader`."""
        named = self._reader.names(kind).items()
        return {name: shape for name, shape in named if kind != "optimizer" or not name.endswith(f"/{AVERAGE}")}


@torch.no_grad()
def exchange_with_average(values: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    """Swap the values with their average. A second call swaps them back."""
    if AVERAGE in state:
        weight, average = local_part(values.detach()), local_part(state[AVERAGE])
        old_weight = weight.clone()
        weight.copy_(average)
        average.copy_(old_weight)
