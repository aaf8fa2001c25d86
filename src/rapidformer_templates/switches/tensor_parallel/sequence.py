"""Sequence parallelism: between divided regions each worker has a stretch of the sequence (Korthikanti et al., 2022).

Norms, dropout and residual sums inside the blocks run on the stretch. It is gathered where a divided region begins,
and the region's partial results are summed and scattered at once where it ends, which moves as many bytes as the
sum of plain tensor parallelism. What lies outside the blocks has the whole sequence.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rapidformer_templates.switches.tensor_parallel.collectives import Peers, gather, own_share
from rapidformer_templates.switches.tensor_parallel.random_streams import Streams

DIM = 1
"""Of the sequence: hidden states are (samples, tokens, features)."""


class SequenceShards:
    """Which sequence is divided at the moment, if any.

    Attributes:
        comes_first: whether it divides before what else divides the sequence.
        key: tells a block the whole length; it travels as an argument, so that a block that is computed again has it.
        length: tokens of the whole sequence inside a block, None elsewhere.
        held: (tokens on this worker, tokens in all) of the latest sequence.
    """

    key = "_sequence_length"
    comes_first = False

    def __init__(self, peers: Peers, streams: Streams) -> None:
        self.peers = peers
        self.streams = streams
        self.length: int | None = None
        self.held: tuple[int, int] | None = None

    def divide(self, hidden: torch.Tensor) -> torch.Tensor:
        """This worker's stretch of whole hidden states; all stretches have one length."""
        return own_share(hidden, self.peers, DIM, even=True)

    def arguments(self, arguments: dict[str, Any], length: int) -> dict[str, Any]:
        """What a block is given beside hidden states, for a stretch."""
        return {**arguments, self.key: length}

    def unite(self, stretch: torch.Tensor, length: int, *, ends: bool) -> torch.Tensor:
        """The whole hidden states of what the last block of a list has put out; ``ends``: of the last list."""
        return self.gather(stretch, length)

    def gather(self, stretch: torch.Tensor, length: int) -> torch.Tensor:
        """Whole hidden states of stretches."""
        return gather(stretch, self.peers, DIM, length, partial=False)

    def install(self, model: nn.Module, lists: Sequence[Sequence[nn.Module]]) -> None:
        """Divide the sequence from the first block of each list to its last.

        Args:
            model: gives back whole hidden states, those of its blocks among them.
            lists: the blocks in the order in which they run.
        """
        for blocks in lists:
            passage = _Passage(self, ends=blocks is lists[-1])
            for block in blocks:
                before = passage.divide if block is blocks[0] else passage.hand_over
                block.register_forward_pre_hook(before, with_kwargs=True, prepend=self.comes_first)
                block.forward = _OnShard(block.forward, self)
            blocks[-1].register_forward_hook(passage.unite)
        model.register_forward_hook(self._unite_recorded)

    def _unite_recorded(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """Gather the hidden states of blocks that transformers recorded; the last of them is whole already."""
        for name in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
            recorded = getattr(output, name, None)
            if isinstance(recorded, tuple) and len(recorded) > 1:
                length = recorded[-1].shape[DIM]
                output[name] = (
                    *(x if x is None else self.gather(x, length) for x in recorded[:-1]),
                    recorded[-1],
                )


class _Passage:
    """One run through a list of blocks: what is divided before the first is united after the last."""

    def __init__(self, shards: SequenceShards, *, ends: bool) -> None:
        self.shards = shards
        self.ends = ends
        self.length = 0

    def divide(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.length = hidden.shape[DIM]
        shard = self.shards.divide(hidden)
        self.shards.held = (shard.shape[DIM], self.length)
        kwargs = self.shards.arguments(kwargs, self.length)
        return ((shard, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": shard})

    def hand_over(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return args, self.shards.arguments(kwargs, self.length)

    def unite(self, block: nn.Module, inputs: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        whole = self.shards.unite(hidden, self.length, ends=self.ends)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole


class _OnShard:
    """The forward of a block that is given a stretch of the sequence."""

    def __init__(self, forward: Callable[..., Any], shards: SequenceShards) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self.shards = shards

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.shards.length = kwargs.pop(self.shards.key)
        self.shards.streams.diverge()  # each stretch has masks of its own
        try:
            return self.forward(*args, **kwargs)
        finally:
            self.shards.length = None
            self.shards.streams.rejoin()


class OnWholeSequence:
    """The forward of a module inside a block that must see all tokens, a router of experts for instance."""

    def __init__(self, forward: Callable[..., Any], shards: SequenceShards) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self.shards = shards
        self.first = first_argument(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shards, length = self.shards, self.shards.length
        if length is None:
            return self.forward(*args, **kwargs)
        hidden = args[0] if args else kwargs.pop(self.first)
        whole = gather(hidden, shards.peers, DIM, length, partial=False)
        shards.length = None
        shards.streams.rejoin()
        try:
            output = self.forward(whole, *args[1:], **kwargs)
        finally:
            shards.length = length
            shards.streams.diverge()
        if isinstance(output, tuple):
            return (own_share(output[0], shards.peers, DIM, even=True), *output[1:])
        return own_share(output, shards.peers, DIM, even=True)


def first_argument(forward: Callable[..., Any]) -> str:
    """The name of the first argument of a module's forward."""
    return next(iter(inspect.signature(forward).parameters), "")
