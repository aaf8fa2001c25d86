"""A worker's part of a weight, of its gradient or of its optimizer state, in one form for all engines.

A :class:`Shard` knows its place in the whole tensor. So every layout can read the checkpoints of every other one, and a
worker reads only its own part. The place and the copies of a shard also decide which worker writes a value to a
checkpoint, which one counts it in a norm, and which one sends it to a worker that gathers whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import chain
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.nn.utils import get_total_norm

from rapidformer_templates.engines.assembly import Assembly
from rapidformer_templates.engines.boxes import SHARDS, Index, divided_over
from rapidformer_templates.errors import CheckpointError, RapidformerError
from rapidformer_templates.models.blocks import canonical_name, shape_of
from rapidformer_templates.system.workers import Workers, broadcast

ShardKind = Literal["weights", "optimizer", "gradients"]

ReadBox = Callable[[Sequence[int], Sequence[int]], torch.Tensor]
"""Reads the box at an offset (first argument) with a shape (second argument) from a whole tensor."""

COPIES = "copies"
"""The mesh dimension along which a tensor is replicated."""


@dataclass(frozen=True)
class Copies:
    """The workers that hold the same part of a parameter, from the view of one of them.

    The copies of an expert are a subset of the copies of other parameters. The size distinguishes the sets of a worker.

    Attributes:
        size: number of workers.
        rank: index of this worker among them.
        group: their process group. None is the group of all workers.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = field(default=None, compare=False)


NO_COPIES = Copies()
"""For tensors that only one worker has."""


def copies_of(tensor: torch.Tensor, workers: Workers) -> Copies:
    """Return the workers with the same values as this one, from the tensor's mesh or else the workers' mesh."""
    mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
    names = mesh.mesh_dim_names or () if mesh is not None else ()
    if mesh is None or COPIES not in names:
        if mesh is not None and (SHARDS in names or mesh.size() == workers.world):
            return NO_COPIES  # every worker has another part
        mesh = workers.mesh
    if mesh is None:
        return Copies(workers.copies, workers.copy_rank)
    group = mesh.get_group(COPIES)
    return Copies(group.size(), group.rank(), group)


@dataclass(frozen=True)
class Shard:
    """This worker's part of a tensor.

    Attributes:
        name: canonical name of the parameter or buffer in the whole model, or ``parameter/key`` for optimizer state.
        shape: shape of the whole tensor.
        index: which values of the whole tensor these are.
        values: the values on this worker. A change to a weight's values changes the weight.
        copies: the workers of all replicas that have the same values.
        counts: whether this worker is the first of the workers in its replica that have the same values.
    """

    name: str
    shape: tuple[int, ...]
    index: Index
    values: torch.Tensor
    copies: Copies = NO_COPIES
    counts: bool = True

    @property
    def counts_once(self) -> bool:
        """Whether this worker is the first of all workers with the same values. It is true on exactly one of them."""
        return self.counts and self.copies.rank == 0

    def without_values(self) -> Shard:
        """Return a shard to keep: a view would keep the memory of a parameter that is moved to a bucket later."""
        return replace(self, values=torch.empty_like(self.values, device="meta"))

    def parts(self) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield (offset in the whole tensor, values) of each box. The values are views."""
        return self.index.parts(self.values)

    def fill(self, read: ReadBox) -> None:
        """Set the values to those of a whole tensor, of which only the boxes of this shard are read."""
        for offset, part in self.parts():
            if part.numel():
                part.copy_(read(offset, part.shape))

    def read_like(self, read: ReadBox) -> torch.Tensor:
        """Read the same part of another tensor of this shape, in the type that it is stored in."""
        place = torch.empty(self.values.shape, device="meta")
        boxes = [(offset, part.shape) for offset, part in self.index.parts(place) if part.numel()]
        stored = [read(offset, shape) for offset, shape in boxes]
        target = torch.empty(self.values.shape, dtype=stored[0].dtype if stored else self.values.dtype)
        for (_, part), values in zip(self.index.parts(target), stored, strict=False):
            part.copy_(values)
        return target


def whole_shard(name: str, tensor: torch.Tensor, copies: Copies = NO_COPIES, *, counts: bool = True) -> Shard:
    """Return the shard of a tensor that this worker has whole."""
    return Shard(name, tuple(tensor.shape), Index.whole(tensor.shape), tensor, copies, counts)


class StateReader(Protocol):
    """Reads boxes of the tensors in a checkpoint."""

    def names(self, kind: str) -> Mapping[str, tuple[int, ...]]:
        """Return names and full shapes of all tensors of a kind, ``weights`` or ``optimizer``."""

    def read(self, kind: str, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Read the box of ``shape`` at ``offset`` from a tensor."""


def zero_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient of zeros. ``zeros_like`` does not know weights that were gathered in fp8."""
    if isinstance(parameter, DTensor):
        return torch.zeros_like(parameter)
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_dtensor(part: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], whole: torch.Tensor) -> DTensor:
    """Return this rank's part of a tensor as a DTensor with the shape and the strides of the whole one."""
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def named_tensors(assembly: Assembly) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by canonical name. Tied ones appear once, under their first name.

    For a model with adapters, the frozen base is left out.
    """
    model, left_out = assembly.model, assembly.base.names if assembly.base else frozenset[str]()
    named = ((canonical_name(name), parameter) for name, parameter in model.named_parameters())
    tensors: dict[str, torch.Tensor] = {name: parameter for name, parameter in named if name not in left_out}
    persistent = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            tensors[canonical_name(name)] = buffer
    return tensors


def shard_of(tensor: torch.Tensor, name: str, assembly: Assembly, workers: Workers) -> Shard:
    """Return this worker's shard of a tensor of a model.

    Args:
        name: canonical name in this worker's part of the model.
    """
    placement = assembly.placement
    whole = placement.whole_name(name)
    first_stage = placement.stages.get(whole, (workers.pipeline_rank,))[0]
    counts = first_stage == workers.pipeline_rank and (divided_over(tensor, "tensor") > 1 or workers.tensor_rank == 0)
    local = local_part(tensor).detach()
    return Shard(whole, shape_of(tensor), Index.of(tensor), local, copies_of(tensor, workers), counts)


def model_shards(assembly: Assembly, workers: Workers) -> dict[str, Shard]:
    """Return this worker's shards of all parameters and persistent buffers, by their names in the whole model."""
    shards = (shard_of(tensor, name, assembly, workers) for name, tensor in named_tensors(assembly).items())
    return {shard.name: shard for shard in shards}


def shards_to_write(shards: Iterable[Shard]) -> Iterator[Shard]:
    """Yield the shards that this worker writes to a checkpoint. Exactly one worker writes each value.

    Values with copies are distributed by size among the workers that have them, so that all workers write at once.
    """
    loads: dict[Copies, list[int]] = {}
    for shard in shards:
        so_far = loads.setdefault(shard.copies, [0] * shard.copies.size)
        writer = so_far.index(min(so_far))
        so_far[writer] += shard.values.numel()
        if shard.counts and writer == shard.copies.rank:
            yield shard


def check_names(assembly: Assembly, reader: StateReader, workers: Workers, *, optimizer: bool) -> None:
    """Compare the tensors of the whole model with those of a checkpoint. Call it on every rank.

    Args:
        optimizer: whether the optimizer state will be loaded, too.

    Raises:
        CheckpointError: names or shapes differ, or there is optimizer state of parameters that are not trained.
    """
    whole_name = assembly.placement.whole_name
    tensors = {whole_name(name): tensor for name, tensor in named_tensors(assembly).items()}
    shapes_here = {name: shape_of(tensor) for name, tensor in tensors.items()}
    trained_here = {name for name, tensor in tensors.items() if tensor.requires_grad}
    shapes: dict[str, tuple[int, ...]] = {}
    trained: set[str] = set()
    for shapes_of_rank, trained_of_rank in workers.gather((shapes_here, trained_here)):
        shapes |= shapes_of_rank
        trained |= trained_of_rank
    saved = reader.names("weights")
    other = [
        f"{name} is {shape} in the model and {saved[name]} in the checkpoint"
        for name, shape in shapes.items()
        if name in saved and shape != saved[name]
    ]
    problems = {
        "weights of this model are not in it": sorted(shapes.keys() - saved.keys()),
        "of its weights are not in this model": sorted(saved.keys() - shapes.keys()),
        "weights have another shape": other,
    }
    shown = [f"{len(names)} {what} ({names[0]})" for what, names in problems.items() if names]
    if shown:
        message = f"the checkpoint is of another model: {', '.join(shown)}"
        raise CheckpointError(message, hint="start from the model that was saved")
    if optimizer and (unknown := {entry.rpartition("/")[0] for entry in reader.names("optimizer")} - trained):
        some = ", ".join(sorted(unknown)[:6])
        message = f"the checkpoint has optimizer state of parameters that are not trained here: {some}"
        raise CheckpointError(message, hint="train the same parameters, or take only the weights with --weights-only")


@torch.no_grad()
def load_weights(shards: Iterable[Shard], reader: StateReader) -> None:
    """Set the weights to those of a checkpoint. Each worker reads only its own part."""
    for shard in shards:
        shard.fill(partial(reader.read, "weights", shard.name))


def gather_whole(shards: Iterable[Shard], workers: Workers) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) on the host of rank 0. Other ranks yield nothing. Every rank must iterate to the end.

    One tensor is gathered at a time. Each worker sends the values that no worker before it has to rank 0. A tensor may
    be a weight itself.
    """
    own = {shard.name: shard for shard in shards if shard.counts_once}
    facts = {s.name: (s.shape, s.index, tuple(s.values.shape), s.values.dtype) for s in own.values()}
    described = workers.gather(facts)
    for name in dict.fromkeys(name for shards_of_rank in described for name in shards_of_rank):
        if not workers.is_main:
            if name in own:
                dist.send(own[name].values.to(workers.device).contiguous(), dst=0)
            continue
        whole: torch.Tensor | None = None
        for rank, shards_of_rank in enumerate(described):
            if name not in shards_of_rank:
                continue
            shape, index, local, dtype = shards_of_rank[name]
            if rank == 0:
                values = own[name].values
            else:
                values = torch.empty(local, dtype=dtype, device=workers.device)
                dist.recv(values, src=rank)
            if local == shape:
                whole = values.cpu()
                continue
            whole = torch.empty(shape, dtype=dtype) if whole is None else whole
            for offset, part in index.parts(values):
                whole[tuple(slice(o, o + size) for o, size in zip(offset, part.shape, strict=True))] = part.cpu()
        assert whole is not None
        yield name, whole


def global_norm(
    gradients: Sequence[tuple[Copies | None, torch.Tensor]], workers: Workers, *, in_fp64: bool
) -> torch.Tensor:
    """Return the norm of the gradients of all workers. Call it on every rank.

    Each value counts once. It is a single sum over all workers, so that all copies are clipped equally.

    Args:
        gradients: the gradients of this worker, each with its copies, or with None if another worker counts it.
        in_fp64: whether the norms of a worker's gradients are added in fp64. Otherwise torch adds them in their own
            type, as on a single worker, and the result has this type.
    """
    together: dict[Copies, list[torch.Tensor]] = {}
    for copies, gradient in gradients:
        if copies is not None:
            together.setdefault(copies, []).append(gradient)
    norms: list[torch.Tensor] = []
    if in_fp64:
        dtype = torch.float64
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for gradient in chain.from_iterable(together.values()):
            by_type.setdefault(gradient.dtype, []).append(gradient)
        for kind, values in by_type.items():
            norms += torch._foreach_norm(values, dtype=torch.promote_types(kind, torch.float32))
    else:
        dtype = reduce(torch.promote_types, {gradient.dtype.to_real() for _, gradient in gradients}, torch.bfloat16)
        norms = [get_total_norm(values) for values in together.values()]
    square = torch.zeros((), dtype=torch.float64, device=workers.device)
    if norms:
        square = torch.stack(norms).to(square).square().sum()
    return workers.sum_tensor(square).sqrt().to(dtype)


def send_first_values(model: nn.Module, workers: Workers) -> None:
    """Give all workers the first one's values, in place. DDP would copy 250 MB at a time.

    Raises:
        RapidformerError: the workers have built different models.
    """
    named = (*model.named_parameters(), *model.named_buffers())
    tensors = {name: tensor.detach() for name, tensor in named if not isinstance(tensor, DTensor)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for rank, others in enumerate(workers.gather(shapes)):
        if differing := sorted(dict(shapes.items() ^ others.items())):
            message = f"workers {workers.rank} and {rank} have built different models: {differing[0]}"
            raise RapidformerError(message, where="build_model()", hint="build the same layers on each worker")
    for tensor in tensors.values():
        broadcast(tensor)
