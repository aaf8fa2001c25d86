"""Values that optimizers keep in their groups: apex FusedAdam's count, Prodigy's distance, schedule-free's sums.

These are the values that differ from the groups as built. A checkpoint stores them under the name of each parameter of
the group (``weight/group.d``), so that every engine finds them, however it groups parameters. A count of steps is
stored under ``weight/step``, whether an optimizer keeps it in the group or per parameter. So a run can resume with
either kind.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from rapidformer_templates.engines.shards import StateReader
from rapidformer_templates.errors import CheckpointError

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
    """Return the values of a group to store with one of its parameters.

    Args:
        state: the optimizer state of the parameter.
    """
    return _prefixed(_changed(optimizer, index), state)


def values_by_parameter(optimizer: Optimizer) -> dict[int, dict[str, object]]:
    """Return for each parameter, by its ``id``, its state and the values of its group."""
    by_index: dict[int, dict[str, object]] = {}
    for index, group in enumerate(optimizer.param_groups):
        changed = _changed(optimizer, index)
        for parameter in group["params"]:
            state = dict(optimizer.state.get(parameter, {}))
            by_index[id(parameter)] = state | _prefixed(changed, state)
    return by_index


def _changed(optimizer: Optimizer, index: int) -> dict[str, torch.Tensor]:
    initial, now = _initial_values[optimizer][index], _scalars_of(optimizer.param_groups[index])
    return {key: value for key, value in now.items() if key not in initial or not _equal(value, initial[key])}


def _prefixed(changed: Mapping[str, torch.Tensor], state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    prefixed = {PREFIX + key: value for key, value in changed.items() if key != COUNT}
    if COUNT in changed and state and COUNT not in state:
        prefixed[COUNT] = changed[COUNT].to(torch.float32)  # like the counts of torch's optimizers
    return prefixed


def split(optimizer: Optimizer, keys: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split checkpoint keys into (those of a parameter, those of its group)."""
    per_parameter: list[str] = []
    shared: list[str] = []
    for key in keys:
        in_group = key.startswith(PREFIX) or (key == COUNT and counts_in_groups(optimizer))
        (shared if in_group else per_parameter).append(key)
    return per_parameter, shared


def read(optimizer: Optimizer, index: int, names: Sequence[str], reader: StateReader) -> dict[str, object]:
    """Read the values of a group from a checkpoint, in the form of the group.

    Args:
        names: the parameters of the group on this rank.

    Raises:
        CheckpointError: the parameters of the group have different values.
    """
    saved = reader.names("optimizer")
    keys = {key for name, _, key in (entry.rpartition("/") for entry in saved) if name in set(names)}
    group, scalars = optimizer.param_groups[index], {}
    for key in sorted(split(optimizer, sorted(keys))[1]):
        values = {n: reader.read("optimizer", f"{n}/{key}", (), ()) for n in names if f"{n}/{key}" in saved}
        if len({float(value) for value in values.values()}) > 1:
            some = ", ".join(f"{name} {float(value):g}" for name, value in list(values.items())[:4])
            raise CheckpointError(
                f"the parameters differ in {key.removeprefix(PREFIX)}: {some}",
                hint="this optimizer has one for many parameters; continue with the one that it was saved by",
            )
        scalars[key.removeprefix(PREFIX)] = next(iter(values.values()))
    return _in_group_form(group, scalars)


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
    options = {key: value for key, value in group.items() if key != "params"}
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()}


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
        raise CheckpointError(
            f"the checkpoint has no count of steps for {name}",
            hint="continue with the optimizer that saved it, or take only the weights with --load … --weights-only",
        )


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
