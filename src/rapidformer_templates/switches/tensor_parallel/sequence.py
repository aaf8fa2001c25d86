"""Sequence parallelism: between divided regions, each worker has a part of the sequence (Korthikanti et al., 2022).

Norms, dropout and residual sums inside the blocks run on this part. It is gathered where a divided region begins. Where
the region ends, its partial results are reduce-scattered. This moves as many bytes as the all-reduce of plain tensor
parallelism. Outside the blocks, each worker has the whole sequence.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rapidformer_templates.models.blocks import BlockArguments, BlockOutput
from rapidformer_templates.switches.tensor_parallel.collectives import Peers, gather, scatter
from rapidformer_templates.switches.tensor_parallel.random_streams import Streams

DIM = 1
"""The dimension of the sequence: hidden states are (samples, tokens, features)."""


class SequenceShards:
    """Tracks the sequence that is currently divided, if there is one.

    Attributes:
        comes_first: whether it divides the sequence before other hooks that divide it.
        key: the argument that passes the whole length to a block. Recomputed blocks get it, too.
        length: number of tokens of the whole sequence inside a block. None elsewhere.
        shard_sizes: (tokens on this worker, tokens in total) of the latest sequence.
    """

    key = "_sequence_length"
    comes_first = False

    def __init__(self, peers: Peers, streams: Streams) -> None:
        self.peers = peers
        self.streams = streams
        self.length: int | None = None
        self.shard_sizes: tuple[int, int] | None = None

    def divide(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this worker's part of whole hidden states. All parts have the same length."""
        return scatter(hidden, self.peers, DIM, even=True)

    def arguments(self, arguments: dict[str, object], length: int) -> dict[str, object]:
        """Return the keyword arguments of a block that runs on a part of the sequence."""
        return {**arguments, self.key: length}

    def unite(self, shard: torch.Tensor, length: int, *, ends: bool) -> torch.Tensor:
        """Return the whole hidden states after the last block of a list. ``ends`` marks the last list."""
        return self.gather(shard, length)

    def gather(self, shard: torch.Tensor, length: int) -> torch.Tensor:
        """Gather the parts of all workers to whole hidden states."""
        return gather(shard, self.peers, DIM, length, partial=False)

    def install(self, model: nn.Module, lists: Sequence[Sequence[nn.Module]]) -> None:
        """Divide the sequence from the first block of each list to its last.

        Args:
            model: returns whole hidden states, also the recorded ones of its blocks.
            lists: the blocks in the order in which they run.
        """
        for blocks in lists:
            run = _BlockListRun(self, ends=blocks is lists[-1])
            for block in blocks:
                before = run.divide if block is blocks[0] else run.pass_length
                block.register_forward_pre_hook(before, with_kwargs=True, prepend=self.comes_first)
                block.forward = _OnShard(block.forward, self)
            blocks[-1].register_forward_hook(run.unite)
        model.register_forward_hook(self._unite_recorded)

    def _unite_recorded(self, model: nn.Module, inputs: object, output: Any) -> None:
        """Gather the hidden states of blocks that transformers recorded. The last one is already whole."""
        for name in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
            recorded = getattr(output, name, None)
            if isinstance(recorded, tuple) and len(recorded) > 1:
                length = recorded[-1].shape[DIM]
                output[name] = (
                    *(x if x is None else self.gather(x, length) for x in recorded[:-1]),
                    recorded[-1],
                )


class _BlockListRun:
    """One run through a list of blocks. It divides the sequence before the first and gathers it after the last."""

    def __init__(self, shards: SequenceShards, *, ends: bool) -> None:
        self.shards = shards
        self.ends = ends
        self.length = 0

    def divide(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockArguments:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.length = hidden.shape[DIM]
        shard = self.shards.divide(hidden)
        self.shards.shard_sizes = (shard.shape[DIM], self.length)
        kwargs = self.shards.arguments(kwargs, self.length)
        return ((shard, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": shard})

    def pass_length(self, block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> BlockArguments:
        return args, self.shards.arguments(kwargs, self.length)

    def unite(self, block: nn.Module, inputs: object, output: BlockOutput) -> BlockOutput:
        hidden = output[0] if isinstance(output, tuple) else output
        whole = self.shards.unite(hidden, self.length, ends=self.ends)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole


class _OnShard:
    """The forward of a block whose input is a part of the sequence."""

    def __init__(self, forward: Callable[..., object], shards: SequenceShards) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self.shards = shards

    def __call__(self, *args: object, **kwargs: Any) -> object:
        self.shards.length = kwargs.pop(self.shards.key)
        self.shards.streams.enter_local_rng()  # each part of the sequence has different masks
        try:
            return self.forward(*args, **kwargs)
        finally:
            self.shards.length = None
            self.shards.streams.leave_local_rng()


class OnWholeSequence:
    """The forward of a module inside a block that must see all tokens, such as a router of experts."""

    def __init__(self, forward: Callable[..., BlockOutput], shards: SequenceShards) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self.shards = shards
        self.first = first_argument(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> BlockOutput:
        shards, length = self.shards, self.shards.length
        if length is None:
            return self.forward(*args, **kwargs)
        hidden = args[0] if args else kwargs.pop(self.first)
        whole = gather(hidden, shards.peers, DIM, length, partial=False)
        shards.length = None
        shards.streams.leave_local_rng()
        try:
            output = self.forward(whole, *args[1:], **kwargs)
        finally:
            shards.length = length
            shards.streams.enter_local_rng()
        if isinstance(output, tuple):
            return (scatter(output[0], shards.peers, DIM, even=True), *output[1:])
        return scatter(output, shards.peers, DIM, even=True)


def first_argument(forward: Callable[..., object]) -> str:
    """Return the name of the first argument of a module's forward."""
    return next(iter(inspect.signature(forward).parameters), "")
