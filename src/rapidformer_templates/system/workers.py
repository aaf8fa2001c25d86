"""Workers: this process and its peers. Only this module opens and closes the process group."""

from __future__ import annotations

import os
import resource
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rapidformer_templates.errors import WorkerFailed
from rapidformer_templates.planning.environment import Launched, launched
from rapidformer_templates.planning.plan import Sizes
from rapidformer_templates.system import accelerator
from rapidformer_templates.system.launch import INTERFACE
from rapidformer_templates.system.phase_clock import PhaseClock
from rapidformer_templates.system.processes import end_with_launcher, has_met, joined, record_crashes, wait_at_exit
from rapidformer_templates.system.rendezvous import check_interface, open_store

# Newer names first: the older ones warn if both exist.
all_gather: Callable[..., dist.Work] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Takes (whole, share) and fills the whole tensor with the shards of all workers of a group."""
reduce_scatter: Callable[..., dist.Work] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Takes (share, partial) and fills this worker's shard with the sum of all workers' partial tensors."""

T = TypeVar("T")


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with the values of an expanded tensor once. Torch refuses to write to the tensor itself."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def broadcast(tensor: torch.Tensor, source: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Replace the values of a tensor by those of a worker. Call it on every worker of the group.

    The tensor may be transposed or expanded. NCCL refuses to exchange such tensors.

    Args:
        source: rank of that worker in the group.
        group: None for all workers.
    """
    tensor = unexpanded(tensor)
    values = tensor.contiguous()
    dist.broadcast(values, group=group, group_src=source)
    if values is not tensor:
        tensor.copy_(values)


@dataclass(frozen=True)
class Workers:
    """One process's view of all workers.

    Attributes:
        rank: rank of this process, from 0.
        local_rank: its rank on this node.
        world: number of workers.
        device: the device of this process.
        tensor: number of workers that share the matrices of each block.
        pipeline: number of stages that the blocks are divided into.
        mesh: the groups of workers, with the dimensions ``pipeline``, ``copies`` (data × context) and ``tensor``. None
            if each worker has the whole model and whole sequences.
        context: number of workers that share each sequence. Each has all weights of its stage.
        store: the key-value store in which the workers have met. None for a single process.
        clock: measures how long this process is busy and how long it waits for its peers.
    """

    rank: int
    local_rank: int
    world: int
    device: torch.device
    tensor: int = 1
    pipeline: int = 1
    mesh: DeviceMesh | None = None
    context: int = 1
    store: Store | None = None
    clock: PhaseClock = field(default_factory=PhaseClock, compare=False, repr=False)

    # Ranks that communicate most are closest: tensor varies fastest, then context, data and pipeline [M].

    @property
    def data(self) -> int:
        """Number of replicas of the model, each on ``tensor × context × pipeline`` workers."""
        return self.world // (self.tensor * self.context * self.pipeline)

    @property
    def copies(self) -> int:
        """Number of workers with the same parameters, over all replicas and inside a context group."""
        return self.data * self.context

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor

    @property
    def data_rank(self) -> int:
        """Index of this worker's replica. All workers of a replica get the same samples."""
        return self.rank // (self.tensor * self.context) % self.data

    @property
    def context_rank(self) -> int:
        """Index of this worker's part of each sequence."""
        return self.rank // self.tensor % self.context

    @property
    def copy_rank(self) -> int:
        """Rank among the workers with the same parameters."""
        return self.rank // self.tensor % self.copies

    @property
    def copies_group(self) -> dist.ProcessGroup | None:
        """The process group of the workers with the same parameters. None is the group of all workers."""
        return self.mesh.get_group("copies") if self.mesh is not None else None

    @property
    def pipeline_rank(self) -> int:
        return self.rank // (self.tensor * self.copies)

    @property
    def stream(self) -> int:
        """Id of the RNG stream. Each stage of each replica has one, which its tensor and context peers share."""
        return self.rank // (self.tensor * self.context)

    @property
    def dimensions(self) -> list[int]:
        """[pipeline stages, replicas, tensor-parallel workers], then context-parallel workers if there are several."""
        return [self.pipeline, self.data, self.tensor, *([self.context] if self.context > 1 else [])]

    @property
    def ends_pipeline(self) -> bool:
        """Whether this worker has the last stage, with the model's output and the loss."""
        return self.pipeline_rank == self.pipeline - 1

    @property
    def is_replica_leader(self) -> bool:
        """Whether this worker counts for its replica."""
        return self.ends_pipeline and self.tensor_rank == 0 and self.context_rank == 0

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run folder and prints."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Sum ``values`` over the workers, on the host, without using the device."""
        if self.world == 1:
            return list(values)
        totals = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(totals)
        return totals.tolist()

    def gather_numbers(self, *values: float) -> torch.Tensor:
        """Return a row of ``values`` from each worker (fp64), on the host, without using the device."""
        row = torch.tensor([values], dtype=torch.float64)
        rows = row.repeat(self.world, 1)
        if self.world > 1:
            all_gather(rows, row)
        return rows

    def agree(self, number: int) -> bool:
        """Return whether all workers have the same number, which must be below 2^20."""
        total, squares = self.sum(number, number**2)
        return squares * self.world == total**2  # the variance is zero, computed exactly in fp64

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the workers, on its device, without waiting for the result."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """Gather ``value`` from every worker, by rank."""
        if self.world == 1:
            return [value]
        values = [value] * self.world
        dist.all_gather_object(values, value)
        return values

    def gather_on_main(self, value: T) -> list[T]:
        """Gather ``value`` from every worker, by rank, on rank 0. The list of other workers is empty."""
        if self.world == 1:
            return [value]
        values = [value] * self.world if self.is_main else None
        dist.gather_object(value, values)
        return values or []

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def open_mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        """Divide all workers into groups along the dimensions of ``shape``. Call it on every worker."""
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    def open_groups(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """Open process groups that have no worker in common. Call it on every worker.

        Args:
            groups: the ranks of each group.

        Returns:
            The group of this worker. None if it is in none of them.
        """
        members = {rank for group in groups for rank in group}
        # A program that has joined the workers itself may not have bound them to their devices, which a split needs.
        world = dist.group.WORLD
        if self.device.type not in OPENED_AT_ONCE or world is None or world.bound_device_id is None:
            return dist.new_subgroups_by_enumeration([list(group) for group in groups])[0]
        # One call for all of them. Torch names a group after the number of groups of a worker, so all open one.
        alone = [[rank] for rank in range(self.world) if rank not in members]
        own = dist.split_group(split_ranks=[*map(list, groups), *alone])
        return own if self.rank in members else None


@contextmanager
def join(device_type: str, sizes: Sizes | None = None) -> Iterator[Workers]:
    """Join the other workers that torchrun or our launcher started. A single process has nothing to join.

    Args:
        device_type: ``cpu``, or torch's name of the accelerator.
        sizes: how the workers are divided. None for copies of the whole model.

    After an error in a group of several workers, the group stays open: closing it would wait for peers that are inside
    a collective (NCCL), and the error would never be reported. The next call closes it.

    Raises:
        ConfigError, WorkerFailed: see :func:`open_store` and :func:`accelerator.device_of`.
    """
    sizes = sizes or Sizes()
    place = launched() or Launched()
    device = accelerator.device_of(device_type, place.local_rank)
    if accelerator.is_asynchronous(device):
        torch.accelerator.set_device_index(device.index or 0)
    if _left_open.is_set():
        _left_open.clear()
        _close_group()
    # torchrun with one worker also sets RANK. Without it there is no rendezvous to join.
    is_first = not dist.is_initialized()  # otherwise the code that opened the group closes it
    in_group = launched() is not None and is_first
    end_with_launcher()
    record_crashes()
    _raise_file_limit()
    store = _open_group(device) if in_group else None
    try:
        mesh = _mesh(device, sizes)
        has_met.set()
        workers = Workers(
            place.rank, place.local_rank, place.world, device, sizes.tensor, sizes.pipeline, mesh, sizes.context, store
        )
        with joined(), workers.clock.counts_waits() if place.world > 1 else nullcontext():
            yield workers
    except BaseException:
        if is_first and place.world > 1:
            _left_open.set()
        elif is_first:
            _close_group()
        raise
    if is_first:
        _close_group()


MOST_FILES = 2**20
"""Linux's default for the largest limit of open files of a process."""


def _raise_file_limit() -> None:
    """Raise the limit of open files to the largest that this user may have.

    The first worker keeps several connections to each other one, and gloo connects each worker with each other one. The
    usual limit of 1,024 ends at about 190 workers.
    """
    usual, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST_FILES if most == resource.RLIM_INFINITY else min(most, MOST_FILES)
    if usual != resource.RLIM_INFINITY and usual < limit:
        with suppress(ValueError, OSError):  # macOS has a smaller limit that it does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


_left_open = threading.Event()
"""Set if an error has left the group of several workers open."""


def _close_group() -> None:
    close = _closing.pop() if _closing else dist.destroy_process_group
    if dist.is_initialized():  # some engines open a group for a single process
        close()


def _mesh(device: torch.device, sizes: Sizes) -> DeviceMesh | None:
    if sizes.divides == 1:
        return None
    shape = (sizes.pipeline, sizes.copies, sizes.tensor)
    return init_device_mesh(device.type, shape, mesh_dim_names=("pipeline", "copies", "tensor"))


PATIENCE = timedelta(minutes=40)
"""How long workers wait for each other during the setup. If one does not respond, the run ends earlier."""

OPENED_AT_ONCE = ("cuda", "xpu")
"""Kinds of devices whose backend connects when it gets its device, not at the first collective."""


def _open_group(device: torch.device) -> Store:
    """Open the process group of all workers, and return the key-value store in which they have met."""
    wait_at_exit()
    named = device if device.type in OPENED_AT_ONCE else None
    backend, rank = accelerator.backend_of(device), int(os.environ["RANK"])
    check_interface()
    shared = open_store(PATIENCE)
    # A store outlives a group. The next group must not find the entries of the last one.
    turn = shared.add(f"rapidformer/groups/{rank}", 1)
    store = PrefixStore(f"rapidformer/{turn}", shared)
    try:
        dist.init_process_group(backend, None, PATIENCE, int(os.environ["WORLD_SIZE"]), rank, store, device_id=named)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise WorkerFailed(
            f"the workers cannot connect to each other: {str(error).splitlines()[0]}",
            hint=f"check firewalls, and the network interface in {INTERFACE}",
        ) from error
    return store


def set_group_timeouts(seconds: float) -> None:
    """Let the collectives of all process groups wait for so long, those that libraries have opened included."""
    with warnings.catch_warnings(action="ignore"):  # other backends than gloo and NCCL keep their time
        for group in list(dist.distributed_c10d._world.pg_map):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


_closing: list[Callable[[], None]] = []
"""Function that closes the group instead of torch."""


def close_group_by(close: Callable[[], None]) -> None:
    """Let a library that caches parts of the process group close it, so that the next group does not reuse them."""
    _closing[:] = [close]


def open_group_alone(device: torch.device) -> None:
    """Open a process group of one, for engines that need one. Does nothing if there is a group."""
    if not dist.is_initialized():
        wait_at_exit()
        backend = accelerator.backend_of(device).rpartition(":")[2]
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
