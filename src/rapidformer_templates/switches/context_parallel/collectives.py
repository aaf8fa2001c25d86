"""Differentiable collectives between the workers of a context-parallel group.

Each worker of a group starts its backward from its share of the same loss, so the objective is a sum over the workers.
Every collective here has the derivative of this sum: the backward of an all-reduce is an all-reduce of the gradients.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from rapidformer_templates.switches.tensor_parallel.collectives import Peers, PeersContext


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
