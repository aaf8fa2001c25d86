"""Exchanges between the workers of a context group that autograd knows the reverse of.

Each worker of a group goes back from its share of one and the same loss, so the objective is a sum over the workers,
and every exchange here has the derivative that this sum has: of a sum, the sum of the gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rapidformer_templates.switches.tensor_parallel.collectives import Peers


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, peers: Peers) -> torch.Tensor:
        ctx.peers = peers
        return peers.sum(x.detach().clone())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.peers.sum(gradient.clone(memory_format=torch.contiguous_format)), None


class _Trade(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, peers: Peers, given: int, taken: int) -> torch.Tensor:
        ctx.peers, ctx.given, ctx.taken = peers, given, taken
        return _trade(x, peers, given, taken)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _trade(gradient, ctx.peers, ctx.taken, ctx.given), None, None, None


def _trade(x: torch.Tensor, peers: Peers, given: int, taken: int) -> torch.Tensor:
    parts = torch.stack(x.chunk(peers.size, given))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=peers.group)
    return torch.cat(received.unbind(), taken)


def total(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """The sum of a tensor over the workers, which each of them has then."""
    result: torch.Tensor = _Sum.apply(x, peers)
    return result


def trade(x: torch.Tensor, peers: Peers, *, given: int, taken: int) -> torch.Tensor:
    """All to all: a tensor that is divided along ``taken`` is divided along ``given`` afterwards.

    Args:
        x: this worker's share; its length along ``given`` is a multiple of the workers'.
        peers: the workers that have the others.
        given: dimension that is whole before.
        taken: dimension that is whole after.
    """
    result: torch.Tensor = _Trade.apply(x, peers, given, taken)
    return result
