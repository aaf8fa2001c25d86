"""Differentiable collectives between the workers of a tensor-parallel or a context-parallel group.

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

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx

from rapidformer_templates.engines.recomputation import matmuls_are_saved
from rapidformer_templates.system import workers


@dataclass(frozen=True)
class Peers:
    """The workers that share one stage of one replica.

    Attributes:
        group: their process group.
        size: the number of workers.
        rank: the rank of this worker in the group.
    """

    group: dist.ProcessGroup
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

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the maximum over the workers. ``tensor`` is overwritten with it."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def gather(self, shard: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        """Gather the shares of all workers to the whole tensor, which has ``length`` along ``dim``."""
        step = -(-length // self.size)
        shard = _padded(shard, dim, step).movedim(dim, 0).contiguous()
        whole = shard.new_empty(step * self.size, *shard.shape[1:])
        workers.all_gather(whole, shard, group=self.group)
        return whole[:length].movedim(0, dim).contiguous()

    def reduce_scatter(self, partial: torch.Tensor, dim: int, step: int) -> torch.Tensor:
        """Reduce-scatter: return this worker's share of the sum, padded with zeros to the length ``step``."""
        kind = partial.dtype
        if partial.is_cpu and kind in (torch.float16, torch.bfloat16):
            partial = partial.float()  # gloo reduce-scatters 32 and 64 bits only
        partial = _padded(partial, dim, step * self.size).movedim(dim, 0).contiguous()
        share = partial.new_empty(step, *partial.shape[1:])
        workers.reduce_scatter(share, partial, group=self.group)
        return share.to(kind).movedim(0, dim).contiguous()

    def scatter(self, whole: torch.Tensor, dim: int, step: int | None = None) -> torch.Tensor:
        """Return this worker's share of a whole tensor, padded with zeros to the length ``step`` if that is given."""
        begin, end = self.share(whole.shape[dim])
        share = whole.narrow(dim, begin, end - begin)
        return (share if step is None else _padded(share, dim, step)).contiguous()


def _padded(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    missing = length - tensor.shape[dim]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


class PeersContext(FunctionCtx):
    """Values that the forward of a collective saves for its backward."""

    peers: Peers


class _GatherContext(PeersContext):
    dim: int
    shard_length: int
    partial: bool


class _ScatterContext(PeersContext):
    dim: int
    length: int


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: PeersContext, x: torch.Tensor, peers: Peers) -> torch.Tensor:
        ctx.peers = peers
        return x.view_as(x)

    @staticmethod
    def backward(ctx: PeersContext, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Other nodes may hold this gradient, so it is not summed in place.
        return ctx.peers.sum(gradient.clone(memory_format=torch.contiguous_format)), None


class _CopyAllToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: PeersContext, peers: Peers, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.peers = peers
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: PeersContext, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        present = [gradient for gradient in gradients if gradient is not None]
        sums: Iterator[torch.Tensor] = iter(())
        if present:
            total = ctx.peers.sum(torch.cat([gradient.flatten() for gradient in present]))
            parts = total.split([gradient.numel() for gradient in present])
            sums = iter([part.view_as(gradient) for part, gradient in zip(parts, present, strict=True)])
        return None, *(None if gradient is None else next(sums) for gradient in gradients)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: PeersContext, x: torch.Tensor, peers: Peers) -> torch.Tensor:
        return peers.sum(x.detach().clone() if matmuls_are_saved() else x.detach())

    @staticmethod
    def backward(ctx: PeersContext, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _GatherContext, x: torch.Tensor, peers: Peers, dim: int, length: int, partial: bool
    ) -> torch.Tensor:
        ctx.peers, ctx.dim, ctx.partial = peers, dim, partial
        ctx.shard_length = x.shape[dim]
        return peers.gather(x, dim, length)

    @staticmethod
    def backward(ctx: _GatherContext, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        if ctx.partial:
            share = ctx.peers.reduce_scatter(gradient, ctx.dim, ctx.shard_length)
        else:
            share = ctx.peers.scatter(gradient, ctx.dim, ctx.shard_length)
        return share, None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _ScatterContext, x: torch.Tensor, peers: Peers, dim: int) -> torch.Tensor:
        ctx.peers, ctx.dim, ctx.length = peers, dim, x.shape[dim]
        return peers.reduce_scatter(x, dim, -(-x.shape[dim] // peers.size))

    @staticmethod
    def backward(ctx: _ScatterContext, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.peers.gather(gradient, ctx.dim, ctx.length), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _ScatterContext, x: torch.Tensor, peers: Peers, dim: int, even: bool) -> torch.Tensor:
        ctx.peers, ctx.dim, ctx.length = peers, dim, x.shape[dim]
        return peers.scatter(x, dim, -(-x.shape[dim] // peers.size) if even else None)

    @staticmethod
    def backward(ctx: _ScatterContext, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.peers.gather(gradient, ctx.dim, ctx.length), None, None, None


def copy_to_region(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Pass a whole tensor into divided layers. The backward pass sums the partial gradients that come from them."""
    result: torch.Tensor = _CopyToRegion.apply(x, peers)
    return result


def copy_all_to_region(tensors: Sequence[torch.Tensor], peers: Peers) -> tuple[torch.Tensor, ...]:
    """Do the same as :func:`copy_to_region` for several tensors of one type, with a single all-reduce."""
    results: tuple[torch.Tensor, ...] = _CopyAllToRegion.apply(peers, *tensors)
    return results


def all_reduce(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """All-reduce a partial tensor to the whole one.

    The result overwrites ``x``, unless a backward reads ``x`` again.
    """
    result: torch.Tensor = _AllReduce.apply(x, peers)
    return result


def gather(x: torch.Tensor, peers: Peers, dim: int, length: int, *, partial: bool) -> torch.Tensor:
    """Gather a tensor that is divided along ``dim``.

    Args:
        x: this worker's share.
        peers: the workers that have the other shares.
        dim: the divided dimension. Negative values count from the end.
        length: the length of the whole tensor. Anything beyond it in the shares is padding.
        partial: whether the result goes into divided layers, so that its gradient is partial.
    """
    result: torch.Tensor = _AllGather.apply(x, peers, dim % x.ndim, length, partial)
    return result


def reduce_scatter(x: torch.Tensor, peers: Peers, dim: int) -> torch.Tensor:
    """Reduce-scatter a partial tensor along ``dim``. All shares have the same length."""
    result: torch.Tensor = _ReduceScatter.apply(x, peers, dim)
    return result


def scatter(x: torch.Tensor, peers: Peers, dim: int, *, even: bool) -> torch.Tensor:
    """Return this worker's share of a whole tensor along ``dim``.

    ``even`` pads it to the length of the longest share.
    """
    result: torch.Tensor = _Scatter.apply(x, peers, dim % x.ndim, even)
    return result


class _AllToAllContext(PeersContext):
    split_dim: int
    concat_dim: int


class _AllReduceBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: PeersContext, x: torch.Tensor, peers: Peers) -> torch.Tensor:
        ctx.peers = peers
        return peers.sum(x.detach().clone())

    @staticmethod
    def backward(ctx: PeersContext, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.peers.sum(gradient.clone(memory_format=torch.contiguous_format)), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _AllToAllContext, x: torch.Tensor, peers: Peers, split_dim: int, concat_dim: int) -> torch.Tensor:
        ctx.peers, ctx.split_dim, ctx.concat_dim = peers, split_dim, concat_dim
        return _exchange_parts(x, peers, split_dim, concat_dim)

    @staticmethod
    def backward(ctx: _AllToAllContext, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange_parts(gradient, ctx.peers, ctx.concat_dim, ctx.split_dim), None, None, None


def _exchange_parts(x: torch.Tensor, peers: Peers, split_dim: int, concat_dim: int) -> torch.Tensor:
    parts = torch.stack(x.chunk(peers.size, split_dim))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=peers.group)
    return torch.cat(received.unbind(), concat_dim)


def all_reduce_both_ways(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """All-reduce: sum a tensor over the workers."""
    result: torch.Tensor = _AllReduceBothWays.apply(x, peers)
    return result


def all_to_all(x: torch.Tensor, peers: Peers, *, split_dim: int, concat_dim: int) -> torch.Tensor:
    """All-to-all: change the dimension along which a tensor is divided from ``concat_dim`` to ``split_dim``.

    Args:
        x: this worker's share. Its length along ``split_dim`` must be a multiple of the number of workers.
        peers: the workers that have the other shares.
        split_dim: the dimension that is whole before.
        concat_dim: the dimension that is whole after.
    """
    result: torch.Tensor = _AllToAll.apply(x, peers, split_dim, concat_dim)
    return result
