"""Convert weights and optimizer state of a module, plain or sharded by DTensor, to and from checkpoint pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rapidformer_templates.engines import group_values
from rapidformer_templates.engines.contract import Piece, StateReader
from rapidformer_templates.errors import CheckpointError
from rapidformer_templates.models.adapters import frozen_base_of
from rapidformer_templates.models.blocks import canonical_name
from rapidformer_templates.system.workers import Workers


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by canonical name. Tied ones appear once, under their first name.

    For a model with adapters, the frozen base is left out.
    """
    base = frozen_base_of(model)
    left_out = base.names if base else frozenset()
    named = ((canonical_name(name), parameter) for name, parameter in model.named_parameters())
    tensors: dict[str, torch.Tensor] = {name: parameter for name, parameter in named if name not in left_out}
    persistent = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            tensors[canonical_name(name)] = buffer
    return tensors


def pieces(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str, workers: Workers) -> Iterator[Piece]:
    """Yield the pieces of ``weights`` or ``optimizer`` that this rank writes.

    The ranks that hold the shards of a tensor write them. If there are several copies, one of them is written. The
    copies, and tensors that every rank holds whole, are distributed by size, so that all ranks write at once.
    """
    for name, tensor, owner in _tensors(model, optimizer, kind, workers.world):
        if isinstance(tensor, DTensor):
            shape, offset = box_of(tensor)
            if all(shape) and _same_replica(tensor, owner):
                yield Piece(name, tensor.to_local(), tuple(tensor.shape), offset)
        elif owner == workers.rank:
            yield Piece(name, tensor, tuple(tensor.shape), (0,) * tensor.ndim)


def _same_replica(tensor: DTensor, owner: int) -> bool:
    """Whether this rank holds a part of the same copy of a tensor as another rank."""
    mesh = tensor.device_mesh
    own_coordinate, its_coordinate = mesh.get_coordinate(), (mesh.mesh == owner).nonzero()[0].tolist()
    assert own_coordinate is not None
    sides = zip(tensor.placements, own_coordinate, its_coordinate, strict=True)
    return all(own == its for placement, own, its in sides if placement.is_replicate())


def _tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, kind: str, world: int
) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Yield (name, tensor, rank that writes it if every rank has the whole tensor)."""
    loads = [0] * world
    states = group_values.values_by_parameter(optimizer) if kind == "optimizer" else {}
    for name, parameter in named_tensors(model).items():
        owner = loads.index(min(loads))
        loads[owner] += parameter.numel()
        if kind == "weights":
            yield name, parameter.detach(), owner
            continue
        for key, value in sorted(states.get(id(parameter), {}).items()):
            if value is not None:
                for part, tensor in plain_tensors(torch.as_tensor(value)):
                    yield f"{name}/{key}{part}", tensor, owner


def plain_tensors(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name suffix, tensor). A quantized tensor is split into its codes, scales and tables."""
    if isinstance(tensor, DTensor) or not is_traceable_wrapper_subclass(tensor):
        yield "", tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield f".{part}", getattr(tensor, part)


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all tensors in an optimizer's state."""
    values = (value for entry in optimizer.state.values() for value in entry.values())
    return [part for value in values if isinstance(value, torch.Tensor) for _, part in plain_tensors(value)]


def box_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (shape, offset) of this rank's part of a tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), (0,) * tensor.ndim
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, reader: StateReader, *, optimizer_state: bool) -> None:
    """Load the local part of a model and, if requested, of its optimizer from a checkpoint."""
    tensors = named_tensors(model)
    check_weights({name: tuple(tensor.shape) for name, tensor in tensors.items()}, reader.names("weights"))
    if optimizer_state:
        _load_optimizer(tensors, optimizer, reader)
    for name, tensor in tensors.items():
        shape, offset = box_of(tensor)
        if all(shape):
            local_part(tensor).detach().copy_(reader.read("weights", name, offset, shape))


def check_weights(shapes: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the model's tensors with those of a checkpoint.

    Raises:
        CheckpointError: names or shapes differ.
    """
    problems = [f"missing in the checkpoint: {name}" for name in shapes if name not in saved]
    problems += [f"not in the model: {name}" for name in saved if name not in shapes]
    problems += [
        f"{name} is {shape} in the model and {saved[name]} in the checkpoint"
        for name, shape in shapes.items()
        if name in saved and shape != saved[name]
    ]
    if problems:
        shown = "; ".join(problems[:6]) + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")
        raise CheckpointError(
            f"the checkpoint does not fit the model: {shown}", hint="start from the model that was saved"
        )


def check_optimizer(trained: set[str], saved: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a checkpoint has optimizer state only for trained parameters.

    Raises:
        CheckpointError: it has state of another parameter.
    """
    unknown = {entry.rpartition("/")[0] for entry in saved} - trained
    if unknown:
        raise CheckpointError(
            f"the checkpoint has optimizer state of parameters that are not trained here: "
            f"{', '.join(sorted(unknown)[:6])}",
            hint="train the same parameters, or take only the weights with --weights-only",
        )


def _load_optimizer(tensors: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer, reader: StateReader) -> None:
    saved: dict[str, dict[str, tuple[int, ...]]] = {}
    for entry, shape in reader.names("optimizer").items():
        name, _, key = entry.rpartition("/")
        saved.setdefault(name, {})[key] = shape
    names = {id(tensor): name for name, tensor in tensors.items()}
    flattened = [p for group in optimizer.param_groups for p in group["params"]]
    # Not those of ``flattened``: if state is sharded by whole parameters, this rank has only some of them.
    check_optimizer({name for name, tensor in tensors.items() if tensor.requires_grad}, reader.names("optimizer"))
    state: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(flattened):
        name = names[id(parameter)]
        shapes = saved.get(name, {})
        keys, _ = group_values.split(optimizer, list(shapes))
        group_values.check_count(optimizer, name, list(shapes))
        if keys:
            state[index] = {key: _read_like(parameter, reader, f"{name}/{key}", shapes[key]) for key in keys}
    groups = optimizer.state_dict()["param_groups"]
    for number, group in enumerate(optimizer.param_groups):
        group_names = [names[id(parameter)] for parameter in group["params"]]
        groups[number] |= group_values.read(optimizer, number, group_names, reader)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _read_like(parameter: torch.Tensor, reader: StateReader, entry: str, whole: tuple[int, ...]) -> torch.Tensor:
    """Read an entry of optimizer state, sharded like its parameter. Scalars and factors stay whole."""
    if whole != tuple(parameter.shape) or not isinstance(parameter, DTensor):
        return reader.read("optimizer", entry, (0,) * len(whole), whole)
    shape, offset = box_of(parameter)
    local = reader.read("optimizer", entry, offset, shape) if all(shape) else torch.empty(shape, dtype=parameter.dtype)
    return DTensor.from_local(
        local.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def full_weights(model: nn.Module, workers: Workers) -> dict[str, torch.Tensor] | None:
    """Return the full weights on the host of rank 0, gathered one tensor at a time. None on other ranks."""
    weights = {}
    for name, tensor in named_tensors(model).items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if workers.is_main:
            weights[name] = whole.detach().cpu()
    return weights if workers.is_main else None


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors that one operation may process together: by device mesh, or without a mesh."""
    together: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for tensor in tensors:
        together.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(together.values())


def storage_elements(tensors: Sequence[torch.Tensor]) -> int:
    """Count the elements in the storages of these tensors on this rank. A shared storage counts once."""
    storages = {part.untyped_storage().data_ptr(): part for part in map(local_part, tensors)}
    return sum(part.untyped_storage().nbytes() // part.element_size() for part in storages.values())


def bytes_by_kind(tensors_by_kind: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, int]:
    """Return bytes of the storages on this rank, by kind. A shared storage counts once, for its first kind."""
    pointers: set[int] = set()
    sizes = dict.fromkeys(tensors_by_kind, 0)
    for kind, tensors in tensors_by_kind.items():
        for tensor in tensors:
            storage = local_part(tensor).untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in pointers:
                pointers.add(storage.data_ptr())
                sizes[kind] += storage.nbytes()
    return sizes
