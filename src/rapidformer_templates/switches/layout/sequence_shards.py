"""The part of each sequence that a worker has, and the random numbers that it draws there.

Under sequence parallelism (Korthikanti et al., 2022), each worker has a part between divided regions. Norms, dropout
and residual sums inside the blocks run on this part. It is gathered where a divided region begins. Where the region
ends, its partial results are reduce-scattered. This moves as many bytes as the all-reduce of plain tensor parallelism.
Outside the blocks, each worker has the whole sequence.

Under context parallelism, each worker has a part from the first block of a model to the layers after its last block.

All workers of a group draw from equal generators. So everything that each of them computes whole, such as residual
dropout, gets the same mask. Inside a divided region, each worker draws from a separate generator. Its seed is a number
that all of them draw when the region begins. So nothing has to be kept between regions: a checkpoint of the equal
generators is enough to resume. A block that is recomputed from the state of the generator before it draws the same
masks again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map_only

from rapidformer_templates.engines.collectives import Peers, gather, padded, scatter
from rapidformer_templates.models.blocks import BlockArguments, BlockOutput, WrappedForward, hidden_of, with_hidden
from rapidformer_templates.switches.layout.divided_tensors import DividedRows
from rapidformer_templates.system import accelerator

OUTSIDE = "random numbers of divided layers come from a stream of this worker's own, which no graph can change to"
"""The reason for a graph break where random numbers are drawn."""


def draws_random_numbers(model: nn.Module) -> bool:
    """Return whether a forward in training may draw: a dropout layer, or a rate above zero in the configuration."""
    if any(isinstance(module, _DropoutNd) and module.p > 0 for module in model.modules()):
        return True
    settings: object = getattr(model, "config", None)
    values = settings.to_dict() if hasattr(settings, "to_dict") else {}
    # The dropout of a summary is a layer.
    rates = [name for name in values if ("drop" in name and not name.startswith("summary_")) or "jitter" in name]
    return any(isinstance(values[name], float) and values[name] > 0 for name in rates)


class Streams:
    """Switches torch's generators between the stream that a group shares and one for this worker alone."""

    def __init__(self, rank: int, *, active: bool) -> None:
        """``rank`` is the rank in the group. If ``active`` is False, nothing is drawn and switching costs nothing."""
        self.rank = rank
        self.active = active
        self._shared: tuple[torch.Tensor, tuple[torch.device, torch.Tensor] | None] | None = None

    def enter_local_rng(self) -> None:
        """Switch to this worker's separate stream.

        It may be called again without :meth:`leave_local_rng`. A forward that is recomputed for the backward pass stops
        as soon as it has computed everything needed, and torch then restores its generators.
        """
        if self.active:
            self._switch_to_local()

    @torch.compiler.disable(reason=OUTSIDE)
    def _switch_to_local(self) -> None:
        seed = int(torch.randint(2**32 - 2**16, ()))  # the same on all workers
        device = accelerator.in_use()
        self._shared = (torch.get_rng_state(), (device, accelerator.random_state(device)) if device else None)
        torch.manual_seed(seed + self.rank)

    @property
    def is_local(self) -> bool:
        """Whether this worker currently draws from its separate stream."""
        return self._shared is not None

    def reset(self) -> None:
        """Use the current generators as the shared stream, even if an interrupted forward has not rejoined it."""
        self._shared = None

    def leave_local_rng(self) -> None:
        """Return to the shared stream, in the state where :meth:`enter_local_rng` left it."""
        if self.active:
            self._switch_to_shared()

    @torch.compiler.disable(reason=OUTSIDE)
    def _switch_to_shared(self) -> None:
        if self._shared is None:
            return
        host, device = self._shared
        self._shared = None
        torch.set_rng_state(host)
        if device is not None:
            accelerator.set_random_state(*device)


@dataclass(frozen=True)
class TokenIntervals:
    """A sequence divided into intervals of equal length. The last ones may be shorter.

    Each worker has one interval, or one from each end of the sequence.

    Attributes:
        length: number of tokens in the sequence.
        workers: number of workers that share it.
        folded: whether a worker has two intervals. With four workers, the first has intervals 0 and 7, the second 1 and
            6.
    """

    length: int
    workers: int
    folded: bool

    @property
    def step(self) -> int:
        """Number of tokens in an interval."""
        return -(-self.length // (self.workers * (2 if self.folded else 1)))

    @property
    def shard_length(self) -> int:
        """Number of tokens on each worker, with padding."""
        return self.step * (2 if self.folded else 1)

    def of(self, rank: int) -> list[tuple[int, tuple[int, int]]]:
        """Return the intervals of a worker: each offset in the worker's part, and (begin, end) in the sequence."""
        numbers, step = (rank, 2 * self.workers - 1 - rank) if self.folded else (rank,), self.step
        bounds = ((min(n * step, self.length), min((n + 1) * step, self.length)) for n in numbers)
        return [(place * step, bound) for place, bound in enumerate(bounds)]

    @property
    def positions(self) -> list[int]:
        """The index of each token in the concatenated parts of all workers."""
        positions = [0] * self.length
        for rank in range(self.workers):
            for place, (begin, end) in self.of(rank):
                first = rank * self.shard_length + place
                positions[begin:end] = range(first, first + end - begin)
        return positions


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
                output[name] = (*(x if x is None else self.gather(x, length) for x in recorded[:-1]), recorded[-1])


class _BlockListRun:
    """One run through a list of blocks. It divides the sequence before the first and gathers it after the last."""

    def __init__(self, shards: SequenceShards, *, ends: bool) -> None:
        self.shards = shards
        self.ends = ends
        self.length = 0

    def divide(self, block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> BlockArguments:
        hidden = hidden_of(args, kwargs)
        self.length = hidden.shape[DIM]
        shard = self.shards.divide(hidden)
        self.shards.shard_sizes = (shard.shape[DIM], self.length)
        return with_hidden(args, self.shards.arguments(kwargs, self.length), shard)

    def pass_length(self, block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> BlockArguments:
        return args, self.shards.arguments(kwargs, self.length)

    def unite(self, block: nn.Module, inputs: object, output: BlockOutput) -> BlockOutput:
        hidden = output[0] if isinstance(output, tuple) else output
        whole = self.shards.unite(hidden, self.length, ends=self.ends)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole


class _OnShard(WrappedForward):
    """The forward of a block whose input is a part of the sequence."""

    def __init__(self, forward: Callable[..., object], shards: SequenceShards) -> None:
        super().__init__(forward)
        self.shards = shards

    def __call__(self, *args: object, **kwargs: Any) -> object:
        self.shards.length = kwargs.pop(self.shards.key)
        self.shards.streams.enter_local_rng()  # each part of the sequence has different masks
        try:
            return self.forward(*args, **kwargs)
        finally:
            self.shards.length = None
            self.shards.streams.leave_local_rng()


class OnWholeSequence(WrappedForward):
    """The forward of a module inside a block that must see all tokens, such as a router of experts."""

    def __init__(self, forward: Callable[..., BlockOutput], shards: SequenceShards) -> None:
        super().__init__(forward)
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


POSITIONS = {"position_embeddings": -2, "position_ids": -1, "cache_position": -1}
"""Per-token arguments that models of transformers pass to their blocks, with the dimension of the tokens."""


class ContextSequenceShards(SequenceShards):
    """Divides sequences for context parallelism.

    A block runs entirely on a part, and only attention sees whole sequences.

    Attributes:
        kind: how attention sees whole sequences: ``all-to-all`` or ``ring``.
        attended: whether a call of attention was divided. It is not a count, because each value would recompile a
            graph.
    """

    key = "_context_length"
    comes_first = True

    def __init__(self, peers: Peers, streams: Streams, kind: str, *, ends: bool) -> None:
        """``ends`` is whether this worker has the layers after the last block."""
        super().__init__(peers, streams)
        self.kind = kind
        self.ends = ends
        self.attended = False
        self._sliced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def intervals(self, length: int) -> TokenIntervals:
        """Return which worker has which tokens. In a ring, each worker has tokens from both ends."""
        return TokenIntervals(length, self.peers.size, folded=self.kind == "ring")

    def divide(self, hidden: torch.Tensor) -> torch.Tensor:
        self._sliced.clear()
        return self.shard(hidden, DIM)

    def arguments(self, arguments: dict[str, object], length: int) -> dict[str, object]:
        sliced = {}
        for name, dim in POSITIONS.items():
            if name in arguments:
                shard = partial(self._slice_once, dim=dim, length=length)
                sliced[name] = tree_map_only(torch.Tensor, shard, arguments[name])
        return super().arguments({**arguments, **sliced}, length)

    def unite(self, shard: torch.Tensor, length: int, *, ends: bool) -> torch.Tensor:
        self._sliced.clear()
        if not (ends and self.ends and torch.is_grad_enabled()):
            return self.gather(shard, length)
        samples, _, features = shard.shape
        own_intervals = self.intervals(length).of(self.peers.rank)
        tokens = np.concatenate([np.arange(begin, end) for _, (begin, end) in own_intervals])
        places = (np.arange(samples)[:, None] * length + tokens).reshape(-1)
        rows = torch.cat([shard[:, place : place + end - begin] for place, (begin, end) in own_intervals], DIM)
        return DividedRows(rows.reshape(-1, features), (samples, length), places, self.peers)

    def gather(self, shard: torch.Tensor, length: int) -> torch.Tensor:
        intervals = self.intervals(length)
        if not intervals.folded:
            return gather(shard, self.peers, DIM, length, partial=True)
        whole = gather(shard, self.peers, DIM, intervals.shard_length * self.peers.size, partial=True)
        return whole.index_select(DIM, accelerator.sent(intervals.positions, whole.device))

    def _slice_once(self, tensor: torch.Tensor, *, dim: int, length: int) -> torch.Tensor:
        """Return this worker's part of a tensor that all blocks get. It is cut only once."""
        if tensor.ndim < -dim or tensor.shape[dim] != length:
            return tensor
        if id(tensor) not in self._sliced:
            self._sliced[id(tensor)] = tensor, self.shard(tensor, dim)
        return self._sliced[id(tensor)][1]

    def shard(self, tensor: torch.Tensor, dim: int = DIM) -> torch.Tensor:
        """Return this worker's intervals, padded with zeros.

        It is a copy, because a view would keep the whole tensor alive.
        """
        dim %= tensor.ndim
        intervals = self.intervals(tensor.shape[dim])
        parts = []
        for _, (begin, end) in intervals.of(self.peers.rank):
            parts.append(padded(tensor.narrow(dim, begin, end - begin), dim, intervals.step))
        # A single sample would keep the stride of the whole, and torch would compile the first block separately for it.
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)
