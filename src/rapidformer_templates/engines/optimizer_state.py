"""The state of an optimizer as shards, to and from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rapidformer_templates.engines import group_values
from rapidformer_templates.engines.shards import Shard, StateReader, local_part, whole_shard


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
    states = group_values.values_by_parameter(optimizer)
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
        keys, _ = group_values.split(optimizer, list(shapes))
        group_values.check_count(optimizer, shard.name, list(shapes))
        if keys:
            state[index] = {key: _read_entry(parameter, shard, key, shapes[key], reader) for key in keys}
    groups = optimizer.state_dict()["param_groups"]
    for number, group in enumerate(optimizer.param_groups):
        names = [updated[parameter].name for parameter in group["params"] if parameter in updated]
        groups[number] |= group_values.read(optimizer, number, list(dict.fromkeys(names)), reader)
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
    return DTensor.from_local(
        values.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
