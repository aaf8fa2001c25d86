"""Workers: this process among its peers. The only place that opens and closes the process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from rapidformer_templates.errors import WorkerFailed
from rapidformer_templates.planning.plan import Sizes
from rapidformer_templates.system import accelerator
from rapidformer_templates.system.gloo_threads import let_go_at_exit
from rapidformer_templates.system.processes import end_with_launcher

# Newer names first: the older ones warn where both are there.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""From (whole, share): fills the whole tensor with the shares of all workers of a group."""
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""From (share, partial): fills the share of this worker with the sum of all workers' partial tensors."""


@dataclass(frozen=True)
class Workers:
    """One process's view of all the workers.

    Attributes:
        rank: of this process, from 0.
        local_rank: on this node.
        world: number of workers.
        device: where this process computes.
        tensor: workers that share the matrices of each block.
        pipeline: stages that the blocks are cut into.
        mesh: the groups of workers, with the dimensions ``pipeline``, ``copies`` (data × context) and ``tensor``; None
            where each worker has the whole model and whole sequences.
        context: workers that share each sequence; each has all weights of its stage.
    """

    rank: int
    local_rank: int
    world: int
    device: torch.device
    tensor: int = 1
    pipeline: int = 1
    mesh: DeviceMesh | None = None
    context: int = 1

    # Ranks that exchange most lie closest: tensor fastest, then context, then data, then pipeline [M].

    @property
    def data(self) -> int:
        """Replicas of the model, each of ``tensor × context × pipeline`` workers."""
        return self.world // (self.tensor * self.context * self.pipeline)

    @property
    def copies(self) -> int:
        """Workers that have the same parameters: those of one place in all replicas, and in a context group."""
        return self.data * self.context

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor

    @property
    def data_rank(self) -> int:
        """The replica that this worker is of; its workers are given the same samples."""
        return self.rank // (self.tensor * self.context) % self.data

    @property
    def context_rank(self) -> int:
        """The stretch of each sequence that this worker has."""
        return self.rank // self.tensor % self.context

    @property
    def copy_rank(self) -> int:
        """This worker's place among those with the same parameters."""
        return self.rank // self.tensor % self.copies

    @property
    def pipeline_rank(self) -> int:
        return self.rank // (self.tensor * self.copies)

    @property
    def stream(self) -> int:
        """Of random numbers: one for each stage of each replica, whose other workers draw alike."""
        return self.rank // (self.tensor * self.context)

    @property
    def dimensions(self) -> list[int]:
        """[stages, replicas, workers that share matrices], and those that share sequences, if there are any."""
        return [self.pipeline, self.data, self.tensor, *([self.context] if self.context > 1 else [])]

    @property
    def ends_pipeline(self) -> bool:
        """Whether this worker has the last stage, with the model's output and the loss."""
        return self.pipeline_rank == self.pipeline - 1

    @property
    def speaks(self) -> bool:
        """Whether this worker is the one that counts for its replica."""
        return self.ends_pipeline and self.tensor_rank == 0 and self.context_rank == 0

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run folder and talks to people."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """The sums of ``values`` over the workers, on the host, without touching the device."""
        if self.world == 1:
            return list(values)
        totals = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(totals)
        return totals.tolist()

    def agree(self, number: int) -> bool:
        """Whether all workers have the same number, which is below 2^20."""
        total, squares = self.sum(number, number**2)
        return squares * self.world == total**2  # as the variance is zero; exact in fp64

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the workers, on its device, without waiting for it there."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every worker, by rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()


@contextmanager
def join(device_type: str, sizes: Sizes | None = None) -> Iterator[Workers]:
    """Join the other workers that torchrun or our launcher started; alone, there is nobody to join.

    Args:
        device_type: ``cpu``, or what torch calls the accelerator.
        sizes: how the workers divide; None for copies of the whole model.

    Raises:
        WorkerFailed: the meeting point cannot be reached or its port is taken.
    """
    sizes = sizes or Sizes()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = accelerator.device_of(device_type, local_rank)
    accelerator.make_current(device)
    # torchrun with one worker also sets RANK; without it there is no meeting point to join.
    is_first = not dist.is_initialized()  # or whoever has opened the group closes it
    in_group = "RANK" in os.environ and is_first
    end_with_launcher()
    if in_group:
        _open_group(device)
    try:
        mesh = _mesh(device, sizes)
        yield Workers(rank, local_rank, world, device, sizes.tensor, sizes.pipeline, mesh, sizes.context)
    finally:
        if is_first and dist.is_initialized():  # engines that cannot do without open one alone
            _close_group()


def _mesh(device: torch.device, sizes: Sizes) -> DeviceMesh | None:
    if sizes.divides == 1:
        return None
    shape = (sizes.pipeline, sizes.copies, sizes.tensor)
    return init_device_mesh(device.type, shape, mesh_dim_names=("pipeline", "copies", "tensor"))


PATIENCE = timedelta(minutes=30)
"""How long workers wait for each other."""

OPENED_AT_ONCE = ("cuda", "xpu")
"""Kinds whose backend connects when it is told its device, and not at the first exchange."""


def _open_group(device: torch.device) -> None:
    let_go_at_exit()
    named = device if device.type in OPENED_AT_ONCE else None
    try:
        store, rank, world = next(rendezvous("env://", timeout=PATIENCE))
        # That of torchrun outlives a group: the next one must not meet what the last one wrote there.
        turn = store.add(f"rapidformer/groups/{rank}", 1)
        store = torch._C._distributed_c10d.PrefixStore(f"rapidformer/{turn}", store)
        backend = accelerator.backend_of(device)
        dist.init_process_group(backend, None, PATIENCE, world, rank, store, device_id=named)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise WorkerFailed(
            f"the workers cannot meet at {address}: {str(error).splitlines()[0]}",
            hint="a port in use or a firewall: choose another --master-port, or leave it out for a free one",
        ) from error


_closing: list[Callable[[], None]] = []
"""What closes the group in the place of torch."""


def close_group_by(close: Callable[[], None]) -> None:
    """Have a library close the process group that keeps parts of it: the next group would meet them."""
    _closing[:] = [close]


def _close_group() -> None:
    close = _closing.pop() if _closing else dist.destroy_process_group
    close()


def open_group_alone(device: torch.device) -> None:
    """A process group of one for engines that cannot do without; where there is a group, nothing happens."""
    if not dist.is_initialized():
        let_go_at_exit()
        backend = accelerator.backend_of(device).rpartition(":")[2]
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
