"""Differentiable collectives: of activations in a tensor-parallel or context-parallel group, of rows over replicas.

A tensor is *whole* if each worker has the same values. It is *divided* if each worker has a share of a dimension. It is
*partial* if the real values are the sum over the workers.

In a tensor-parallel group, all workers compute the same loss. Gradients of whole tensors are whole, with one exception
that is marked: a tensor that enters a divided layer gets a partial gradient from it.

In a context-parallel group, each worker starts its backward from its share of the same loss, so the objective is a sum
over the workers. :func:`all_reduce_both_ways` and :func:`all_to_all` have the derivative of this sum: the backward of
an all-reduce is an all-reduce of the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rapidformer_templates.engines.current_batch import note_gathered
from rapidformer_templates.engines.forwards import differentiable, matmuls_are_saved
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.system import workers as processes
from rapidformer_templates.system.workers import Workers


@dataclass(frozen=True)
class Peers:
    """The workers that share one stage of one replica.

    Attributes:
        group: their process group. None is the group of all workers.
        size: the number of workers.
        rank: the rank of this worker in the group.
    """

    group: dist.ProcessGroup | None
    size: int
    rank: int

    def share(self, length: int) -> tuple[int, int]:
        """Return (begin, end) of this worker's share of ``length``.

        Like in ``torch.chunk``, the last shares may be smaller.
        """
        step = -(-length // self.size)
        return min(self.rank * step, length), min((self.rank + 1) * step, length)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the workers. A contiguous ``tensor`` is overwritten with the result."""
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def sum_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the workers, and leave ``tensor`` unchanged, because autograd's other nodes may hold it."""
        return self.sum(tensor.detach().clone(memory_format=torch.contiguous_format))

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the maximum over the workers. ``tensor`` is overwritten with it."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def gather(self, shard: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        """Gather the shares of all workers to the whole tensor, which has ``length`` along ``dim``."""
        step = -(-length // self.size)
        shard = padded(shard, dim, step).movedim(dim, 0).contiguous()
        whole = shard.new_empty(step * self.size, *shard.shape[1:])
        processes.all_gather(whole, shard, group=self.group)
        return whole[:length].movedim(0, dim).contiguous()

    def reduce_scatter(self, partial: torch.Tensor, dim: int, step: int) -> torch.Tensor:
        """Reduce-scatter: return this worker's share of the sum, padded with zeros to the length ``step``."""
        kind = partial.dtype
        if partial.is_cpu and kind in (torch.float16, torch.bfloat16):
            partial = partial.float()  # gloo reduce-scatters 32 and 64 bits only
        partial = padded(partial, dim, step * self.size).movedim(dim, 0).contiguous()
        share = partial.new_empty(step, *partial.shape[1:])
        processes.reduce_scatter(share, partial, group=self.group)
        return share.to(kind).movedim(0, dim).contiguous()

    def scatter(self, whole: torch.Tensor, dim: int, step: int | None = None) -> torch.Tensor:
        """Return this worker's share of a whole tensor, padded with zeros to the length ``step`` if that is given."""
        begin, end = self.share(whole.shape[dim])
        share = whole.narrow(dim, begin, end - begin)
        return (share if step is None else padded(share, dim, step)).contiguous()

    def all_to_all(self, x: torch.Tensor, split_dim: int, concat_dim: int) -> torch.Tensor:
        """Send each worker its part of ``x`` along ``split_dim``, and join the received ones along ``concat_dim``."""
        parts = torch.stack(x.chunk(self.size, split_dim))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.group)
        return torch.cat(received.unbind(), concat_dim)


def padded(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Return a tensor with zeros up to ``length`` along ``dim``. It is not copied if it has this length."""
    missing = length - tensor.shape[dim]
    return nn.functional.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, missing)) if missing else tensor


class _CopyAllToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, peers: Peers, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.peers = peers
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        present = [gradient for gradient in gradients if gradient is not None]
        sums: Iterator[torch.Tensor] = iter(())
        if present:
            total = ctx.peers.sum(torch.cat([gradient.flatten() for gradient in present]))
            parts = total.split([gradient.numel() for gradient in present])
            sums = iter([part.view_as(gradient) for part, gradient in zip(parts, present, strict=True)])
        return None, *(None if gradient is None else next(sums) for gradient in gradients)


def copy_to_region(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Pass a whole tensor into divided layers. The backward pass sums the partial gradients that come from them."""
    return differentiable(lambda x: x.view_as(x), peers.sum_copy, x)


def copy_all_to_region(tensors: Sequence[torch.Tensor], peers: Peers) -> tuple[torch.Tensor, ...]:
    """Do the same as :func:`copy_to_region` for several tensors of one type, with a single all-reduce."""
    return _CopyAllToRegion.apply(peers, *tensors)


def all_reduce(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """All-reduce a partial tensor to the whole one.

    The result overwrites ``x``, unless a backward reads ``x`` again.
    """
    return differentiable(
        lambda x: peers.sum(x.detach().clone() if matmuls_are_saved() else x.detach()), lambda gradient: gradient, x
    )


def gather(x: torch.Tensor, peers: Peers, dim: int, length: int, *, partial: bool) -> torch.Tensor:
    """Gather a tensor that is divided along ``dim``.

    Args:
        x: this worker's share.
        peers: the workers that have the other shares.
        dim: the divided dimension. Negative values count from the end.
        length: the length of the whole tensor. Anything beyond it in the shares is padding.
        partial: whether the result goes into divided layers, so that its gradient is partial.
    """
    dim, step = dim % x.ndim, x.shape[dim]
    share_of = peers.reduce_scatter if partial else peers.scatter
    return differentiable(lambda x: peers.gather(x, dim, length), lambda gradient: share_of(gradient, dim, step), x)


def reduce_scatter(x: torch.Tensor, peers: Peers, dim: int) -> torch.Tensor:
    """Reduce-scatter a partial tensor along ``dim``. All shares have the same length."""
    length = x.shape[dim]
    step = -(-length // peers.size)
    return differentiable(
        lambda x: peers.reduce_scatter(x, dim, step), lambda gradient: peers.gather(gradient, dim, length), x
    )


def scatter(x: torch.Tensor, peers: Peers, dim: int, *, even: bool) -> torch.Tensor:
    """Return this worker's share of a whole tensor along ``dim``.

    ``even`` pads it to the length of the longest share.
    """
    dim, length = dim % x.ndim, x.shape[dim]
    step = -(-length // peers.size) if even else None
    return differentiable(
        lambda x: peers.scatter(x, dim, step), lambda gradient: peers.gather(gradient, dim, length), x
    )


def all_reduce_both_ways(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """All-reduce: sum a tensor over the workers."""
    return differentiable(peers.sum_copy, peers.sum_copy, x)


def all_to_all(x: torch.Tensor, peers: Peers, *, split_dim: int, concat_dim: int) -> torch.Tensor:
    """All-to-all: change the dimension along which a tensor is divided from ``concat_dim`` to ``split_dim``.

    Args:
        x: this worker's share. Its length along ``split_dim`` must be a multiple of the number of workers.
        peers: the workers that have the other shares.
        split_dim: the dimension that is whole before.
        concat_dim: the dimension that is whole after.
    """
    return differentiable(
        lambda x: peers.all_to_all(x, split_dim, concat_dim),
        lambda gradient: peers.all_to_all(gradient, concat_dim, split_dim),
        x,
    )


def gather_rows(rows: torch.Tensor, workers: Workers) -> torch.Tensor:
    """Return the rows of the current micro batch of each replica, those of this worker first.

    A loss that compares samples with each other, such as a contrastive one, needs them. The step adds the losses of all
    replicas. So the gradient of a row is the sum of its gradients on all of them, which the backward brings back to the
    replica that the row comes from. The rows of an idle micro batch are left out.

    Args:
        rows: (any number of rows, …). All other dimensions are the same on all workers.

    Raises:
        RapidformerError: workers share each sequence. Each would then count the rows of its peers.
    """
    if workers.copies == 1:
        return rows
    if workers.context > 1:
        what = "rows of workers that share each sequence cannot be gathered"
        hint = "leave out --context-parallel-size, or compare the samples of one worker only"
        raise RapidformerError(what, where="gather()", hint=hint)
    peers = Peers(workers.copies_group, workers.copies, workers.copy_rank)
    numbers = torch.zeros(peers.size, dtype=torch.int64)  # of rows of each replica, on the host. Negative if it is idle
    own_number = torch.tensor([len(rows) if note_gathered() else -len(rows)])
    processes.all_gather(numbers, own_number, group=peers.group)
    step = int(numbers.abs().max())
    whole = gather(padded(rows, 0, step), peers, 0, step * peers.size, partial=True)
    # An empty part, too, belongs to the graph: the backward of every worker must take part in the exchange.
    others = [whole[rank * step :][: max(int(numbers[rank]), 0)] for rank in range(peers.size) if rank != peers.rank]
    return torch.cat([rows, *others])
