"""The part of each sequence that a worker has, from the first block of a model to the layers after its last block."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from rapidformer_templates.switches.context_parallel.divided_rows import DividedRows
from rapidformer_templates.switches.context_parallel.token_intervals import TokenIntervals
from rapidformer_templates.switches.tensor_parallel.collectives import Peers, gather
from rapidformer_templates.switches.tensor_parallel.random_streams import Streams
from rapidformer_templates.switches.tensor_parallel.sequence import DIM, SequenceShards

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
        sliced = {
            name: tree_map_only(torch.Tensor, partial(self._slice_once, dim=dim, length=length), arguments[name])
            for name, dim in POSITIONS.items()
            if name in arguments
        }
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
        return whole.index_select(DIM, torch.tensor(intervals.positions, device=whole.device))

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
            missing = intervals.step - (end - begin)
            part = tensor.narrow(dim, begin, end - begin)
            parts.append(functional.pad(part, (0, 0) * (tensor.ndim - 1 - dim) + (0, missing)) if missing else part)
        # A single sample would keep the stride of the whole, and torch would compile the first block separately for it.
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)
