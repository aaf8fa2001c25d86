"""Convert weights and optimizer state of a 3D layout to and from checkpoint pieces."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rapidformer_templates.engines import flat_runs as flat
from rapidformer_templates.engines import group_values
from rapidformer_templates.engines.contract import Piece, StateReader
from rapidformer_templates.engines.parallel.boxes import Box, divided_over, local_boxes, whole_shape
from rapidformer_templates.engines.parallel.copies import NO_COPIES, Copies, copies_of
from rapidformer_templates.engines.parallel.replicas import UpdateShard
from rapidformer_templates.engines.pieces import check_optimizer, check_weights, local_part, named_tensors
from rapidformer_templates.models.placement import placement_of
from rapidformer_templates.system.workers import Workers


@dataclass(frozen=True)
class LocalTensor:
    """A parameter or buffer of this worker, in terms of the whole model.

    Attributes:
        tensor: the tensor of the model.
        counts: whether this worker writes the values. Only one of the workers with the same values in a replica does.
        copies: the workers of all replicas that have them.
    """

    tensor: torch.Tensor
    counts: bool
    copies: Copies = NO_COPIES

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return whole_shape(self.tensor)

    @property
    def boxes(self) -> list[Box]:
        """Boxes of the whole tensor on this worker."""
        return local_boxes(self.tensor)

    @property
    def local(self) -> torch.Tensor:
        """Values on this worker."""
        return local_part(self.tensor).detach()


def model_tensors(model: nn.Module, workers: Workers) -> dict[str, LocalTensor]:
    """Return the parameters and persistent buffers of this worker, by their names in the whole model."""
    placement = placement_of(model)
    entries = {}
    for name, tensor in named_tensors(model).items():
        whole = placement.whole_name(name)
        first = placement.stages.get(whole, (workers.pipeline_rank,))[0]
        counts = first == workers.pipeline_rank and (divided_over(tensor, "tensor") > 1 or workers.tensor_rank == 0)
        entries[whole] = LocalTensor(tensor, counts, copies_of(tensor, workers))
    return entries


def pieces(
    entries: Mapping[str, LocalTensor],
    units: Sequence[UpdateShard],
    optimizer: torch.optim.Optimizer,
    kind: str,
    *,
    with_masters: Collection[str] = (),
) -> Iterator[Piece]:
    """Yield the pieces of ``weights`` or ``optimizer`` that this rank writes.

    Tensors with copies are distributed by size among the workers that have them. A run of a parameter is written by the
    worker that updates it. The weight of a 16-bit parameter is its master.
    """
    loads: dict[Copies, list[int]] = {}
    owned = set()
    for name, entry in entries.items():
        so_far = loads.setdefault(entry.copies, [0] * entry.copies.size)
        owner = so_far.index(min(so_far))
        so_far[owner] += entry.local.numel()
        if entry.counts and owner == entry.copies.rank:
            owned.add(name)
    written = [unit for unit in units if (entries[unit.of.name].counts if unit.is_run else unit.of.name in owned)]
    if kind == "weights":
        for name, entry in entries.items():
            if name in owned and name not in with_masters:
                yield from _run_pieces(name, entry, 0, entry.local.reshape(-1))
        for unit in (unit for unit in written if unit.of.compute_dtype):
            yield from _run_pieces(unit.of.name, entries[unit.of.name], unit.start, unit.values.detach().reshape(-1))
        return
    states = group_values.values_by_parameter(optimizer)
    for unit in written:
        yield from _state_pieces(entries[unit.of.name], unit, states.get(id(unit.values), {}))


def _state_pieces(entry: LocalTensor, unit: UpdateShard, state: Mapping[str, Any]) -> Iterator[Piece]:
    for key, value in sorted(state.items()):
        if value is None:
            continue
        name, tensor = f"{unit.of.name}/{key}", torch.as_tensor(value)
        if tensor.shape == unit.values.shape:
            yield from _run_pieces(name, entry, unit.start, tensor.reshape(-1))
        elif unit.start == 0 and all(box.offset == (0,) * len(box.offset) for box in entry.boxes[:1]):
            yield Piece(
                name, tensor, tuple(tensor.shape), (0,) * tensor.ndim
            )  # a count, or a factor of the whole tensor


def _run_pieces(name: str, entry: LocalTensor, start: int, values: torch.Tensor) -> Iterator[Piece]:
    """Yield a run of the flattened local part from ``start`` as boxes of the whole tensor."""
    shape, done = tuple(entry.local.shape), 0
    for offset, size in flat.boxes(shape, start, values.numel()):
        count = math.prod(size)
        part = values[done : done + count].view(size)
        for whole, inside in _in_whole(offset, size, entry.boxes):
            yield Piece(name, part[inside].contiguous(), entry.shape, whole)
        done += count


def _read_run(reader: StateReader, kind: str, name: str, entry: LocalTensor, start: int, target: torch.Tensor) -> None:
    """Fill ``target`` (1-D) with a run of the flattened local part."""
    shape, done = tuple(entry.local.shape), 0
    for offset, size in flat.boxes(shape, start, target.numel()):
        count = math.prod(size)
        part = torch.empty(size, dtype=target.dtype)
        for whole, inside in _in_whole(offset, size, entry.boxes):
            part[inside] = reader.read(kind, name, whole, part[inside].shape).to(target.dtype)
        target[done : done + count].copy_(part.reshape(-1))
        done += count


def _in_whole(
    offset: Sequence[int], size: Sequence[int], boxes: Sequence[Box]
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yield (offset in the whole tensor, slices of the box) for each part of a box of the local tensor."""
    for box in boxes:
        lows = [max(o, b.start) for o, b in zip(offset, box.local, strict=True)]
        highs = [min(o + s, b.stop) for o, s, b in zip(offset, size, box.local, strict=True)]
        if all(low < high for low, high in zip(lows, highs, strict=True)):
            whole = tuple(w + low - b.start for w, low, b in zip(box.offset, lows, box.local, strict=True))
            inside = tuple(slice(low - o, high - o) for low, high, o in zip(lows, highs, offset, strict=True))
            yield whole, inside


def load(
    entries: Mapping[str, LocalTensor],
    units: Sequence[UpdateShard],
    optimizer: torch.optim.Optimizer,
    reader: StateReader,
    workers: Workers,
    *,
    optimizer_state: bool,
) -> None:
    """Load the local part of the model and, if requested, of the optimizer. Call it on every rank."""
    local_names = ({name: entry.shape for name, entry in entries.items()}, {unit.of.name for unit in units})
    shapes: dict[str, tuple[int, ...]] = {}
    trained: set[str] = set()
    for rank_names in workers.gather(local_names):
        shapes |= rank_names[0]
        trained |= rank_names[1]
    check_weights(shapes, reader.names("weights"))
    if optimizer_state:
        check_optimizer(trained, reader.names("optimizer"))
        _load_optimizer(entries, units, optimizer, reader)
    for name, entry in entries.items():
        values = torch.empty(entry.local.numel(), dtype=entry.local.dtype)
        _read_run(reader, "weights", name, entry, 0, values)
        entry.local.copy_(values.view(entry.local.shape))
    for unit in (unit for unit in units if unit.of.compute_dtype):
        master = unit.values.detach().view(-1)
        _read_run(reader, "weights", unit.of.name, entries[unit.of.name], unit.start, master)


def _load_optimizer(
    entries: Mapping[str, LocalTensor],
    units: Sequence[UpdateShard],
    optimizer: torch.optim.Optimizer,
    reader: StateReader,
) -> None:
    saved: dict[str, dict[str, tuple[int, ...]]] = {}
    for entry, shape in reader.names("optimizer").items():
        name, _, key = entry.rpartition("/")
        saved.setdefault(name, {})[key] = shape
    by_values = {id(unit.values): unit for unit in units}
    state: dict[int, dict[str, Any]] = {}
    flattened = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in enumerate(flattened):
        unit = by_values.get(id(values))
        if unit is None or unit.of.name not in saved:
            continue
        shapes = saved[unit.of.name]
        keys, _ = group_values.split(optimizer, list(shapes))
        group_values.check_count(optimizer, unit.of.name, list(shapes))
        state[index] = {
            key: _read_state(reader, f"{unit.of.name}/{key}", shapes[key], entries[unit.of.name], unit) for key in keys
        }
    groups = optimizer.state_dict()["param_groups"]
    for number, group in enumerate(optimizer.param_groups):
        names = [by_values[id(values)].of.name for values in group["params"] if id(values) in by_values]
        groups[number] |= group_values.read(optimizer, number, list(dict.fromkeys(names)), reader)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _read_state(
    reader: StateReader, name: str, shape: tuple[int, ...], entry: LocalTensor, unit: UpdateShard
) -> torch.Tensor:
    """Read an entry of optimizer state: the run of this unit, or the whole entry if its shape differs (a count)."""
    if shape != entry.shape:
        return reader.read("optimizer", name, (0,) * len(shape), shape)
    values = torch.empty(unit.values.numel(), dtype=unit.values.dtype)
    _read_run(reader, "optimizer", name, entry, unit.start, values)
    return values.view(unit.values.shape)


def full_weights(
    entries: Mapping[str, LocalTensor], masters: Mapping[str, torch.Tensor], workers: Workers
) -> dict[str, torch.Tensor] | None:
    """Return the full weights on the host of rank 0, None on other ranks. Call it on every rank.

    Workers with the first copies send their weights to rank 0 one tensor at a time.

    Args:
        masters: values for the 16-bit parameters of a worker with their first copies.
    """
    first_copies = {name: entry for name, entry in entries.items() if entry.counts and entry.copies.rank == 0}
    values_of = {name: masters.get(name, entry.local) for name, entry in first_copies.items()}
    described = workers.gather(
        [
            (name, entry.shape, tuple(entry.local.shape), values_of[name].dtype, entry.boxes)
            for name, entry in first_copies.items()
        ]
    )
    if not workers.is_main:
        for values in values_of.values():
            dist.send(values.to(workers.device).contiguous(), dst=0)
        return None
    weights: dict[str, torch.Tensor] = {}
    for rank, tensors in enumerate(described):
        for name, shape, local_shape, dtype, boxes in tensors:
            if rank == 0:
                values = values_of[name]
            else:
                values = torch.empty(local_shape, dtype=dtype, device=workers.device)
                dist.recv(values, src=rank)
            whole = weights.setdefault(name, torch.empty(shape, dtype=dtype))
            for box in boxes:
                whole[box.whole] = values[box.local].cpu()
    return weights
