"""Differentiable collectives between the workers of a context-parallel group.

Each worker of a group starts its backward from its share of the same loss, so the objective is a sum over the workers.
Every collective here has the derivative of this sum: the backward of an all-reduce is an all-reduce of the gradients.
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
    """All-reduce: sum a tensor over the workers."""
    result: torch.Tensor = _Sum.apply(x, peers)
    return result


def trade(x: torch.Tensor, peers: Peers, *, given: int, taken: int) -> torch.Tensor:
    """All-to-all: turn a tensor that is divided along ``taken`` into one that is divided along ``given``.

    Args:
        x: this worker's share. Its length along ``given`` must be a multiple of the number of workers.
        peers: the workers that have the other shares.
        given: the dimension that is whole before.
        taken: the dimension that is whole after.
    """
    result: torch.Tensor = _Trade.apply(x, peers, given, taken)
    return result
