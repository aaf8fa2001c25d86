"""Attention over whole sequences that are divided over workers: with all-to-all over the heads, or in a ring.

All-to-all is DeepSpeed-Ulysses (Jacobs et al., 2023). Each worker sends the queries, keys and values of some heads to
each other worker, and receives the whole sequence for its own heads. Afterwards, the results are sent back. So the
attention itself is the model's, with its kernel and its mask of the whole sequence.

Ring attention (Liu et al., 2023): the keys and values of each part pass through all workers. Each worker adds up the
results of its queries, with the logarithms of the sums of weights. A part consists of two intervals, one from each end
of the sequence. So, under a causal mask, all workers have the same amount of work (Brandon et al., 2023).

Ring attention uses torch's flash kernels, whose results for some keys are merged by the logarithms of the sums (Dao,
2023). With a mask that is not causal, in 32 bits on a GPU, and on other devices, it uses plain operations on a range of
queries at a time. For the backward, it saves only the queries, keys, values and output of this part, and the logarithms
of the sums. The backward passes keys and values around the ring again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rapidformer_templates.engines.collectives import Peers, all_to_all, padded
from rapidformer_templates.errors import ModelError
from rapidformer_templates.switches.layout.sequence_shards import ContextSequenceShards, TokenIntervals

SUFFIX = "_over_context"
OTHER_WAYS = "divide the model instead, with --tensor-model-parallel-size or --pipeline-model-parallel-size"

HEADS, TOKENS = 1, 2
"""Dimensions of queries, keys and values: (samples, heads, tokens, size of a head)."""

AT_ONCE = 2**24
"""Maximum number of scores of one head in a ring that are in memory at a time."""

_numbers = itertools.count()


def attend_over_context(model: PreTrainedModel, shards: ContextSequenceShards) -> None:
    """Let the attention of the blocks see whole sequences."""
    inner = _attention_name(model)
    name = f"{inner}{SUFFIX}_{next(_numbers)}"  # another model of this process has other shards
    AttentionInterface.register(name, partial(attention, shards=shards, inner=inner))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[inner])
    model.set_attn_implementation(name)


def _attention_name(model: PreTrainedModel) -> str:
    """Return transformers' name of the attention to divide."""
    name: str = model.config._attn_implementation.partition(SUFFIX)[0]
    return "sdpa" if name == "eager" else name  # the same result, but eager attention also returns its weights


def check_attention(model: PreTrainedModel) -> None:
    """Check that the attention of a model can be divided.

    Raises:
        ModelError: the implementation of the attention cannot be replaced.
    """
    name = _attention_name(model)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    fixed = [type(part).__name__ for part in parts if not (part._supports_sdpa and part._can_set_attn_implementation())]
    if fixed or "flash" in name or name not in ALL_ATTENTION_FUNCTIONS or name not in ALL_MASK_ATTENTION_FUNCTIONS:
        message = f"the attention of {fixed[0] if fixed else type(model).__name__} cannot be divided"
        hint = OTHER_WAYS if fixed else "build the model with sdpa attention (attn_implementation)"
        raise ModelError(message, where="--context-parallel-size", hint=hint)


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    shards: ContextSequenceShards,
    inner: str,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention with transformers' signature.

    Args:
        module: the attention layer.
        query: queries of this worker's part of the sequence, shape (samples, heads, tokens, size of a head). ``key``
            and ``value`` may have fewer heads.
        attention_mask: mask of whole sequences.
        shards: the shards of the model's sequences.
        inner: transformers' name of the attention to divide.

    Returns:
        (output of shape (samples, tokens, heads, size of a head), the attention's other output).

    Raises:
        ModelError: the number of heads is not divisible, or keys and queries are not of the same tokens.
    """
    within = ALL_ATTENTION_FUNCTIONS[inner]
    if shards.length is None:
        return within(module, query, key, value, attention_mask, *args, **kwargs)
    if key.shape[TOKENS] != query.shape[TOKENS]:
        message = "attention gets keys of other tokens than its own part of the sequence, as from a cache of keys"
        raise ModelError(message, where="--context-parallel-size", hint="generate with use_cache=False")
    shards.attended = True
    if shards.kind == "ring":
        return _attend_in_ring(module, shards, query, key, value, attention_mask, *args, **kwargs), None
    peers, length = shards.peers, shards.length
    repeats = repeats_of(query.shape[HEADS], key.shape[HEADS], peers.size)
    if not repeats:
        message = f"{query.shape[HEADS]} attention heads of a worker cannot be divided among {peers.size}"
        hint = "use a ring, or a size that divides the heads"
        raise ModelError(message, where="--context-parallel-kind all-to-all", hint=hint)
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, HEADS) for x in (key, value))
    whole = [all_to_all(x, peers, split_dim=HEADS, concat_dim=TOKENS)[:, :, :length] for x in (query, key, value)]
    output, others = within(_RepeatedHeads(module, repeats), *whole, attention_mask, *args, **kwargs)
    output = padded(output, 1, query.shape[TOKENS] * peers.size)
    return all_to_all(output, peers, split_dim=1, concat_dim=2), others


def _attend_in_ring(
    module: nn.Module,
    shards: ContextSequenceShards,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> torch.Tensor:
    """Return the output for this worker's part of the sequence, of shape (samples, tokens, heads, size of a head)."""
    unsupported = sorted(name for name in NOT_IN_A_RING if others.get(name) is not None)
    if dropout:
        unsupported.append(f"dropout {dropout:g}")
    if mask is not None and mask.ndim != 4:
        unsupported.append("borders of packed documents")
    if unsupported:
        message = f"{type(module).__name__} asks for {', '.join(unsupported)}, which ring attention does not support"
        hint = "use all-to-all, with a size that divides the heads; for dropout, --dropout 0"
        raise ModelError(message, where="--context-parallel-kind ring", hint=hint)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    assert shards.length is not None
    visible = AttentionMask(
        shards.intervals(shards.length),
        mask,
        causal=causal and mask is None,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
    )
    return ring_attention(query, key, value, visible, shards.peers).transpose(1, 2)


NOT_IN_A_RING = ("position_bias", "softcap", "s_aux")
"""Arguments of the attention in some models that a ring does not support."""


def repeats_of(heads: int, key_heads: int, workers: int) -> int:
    """Return how often to repeat each key head so that all workers get the same number.

    0 if the heads do not divide.
    """
    if heads % workers:
        return 0
    times = range(1, heads // key_heads + 1)
    return next((n for n in times if key_heads * n % workers == 0 and heads % (key_heads * n) == 0), 0)


class _RepeatedHeads:
    """An attention layer with repeated key heads."""

    def __init__(self, module: nn.Module, repeats: int) -> None:
        self._module = module
        groups: int | None = getattr(module, "num_key_value_groups", None)
        if groups is not None:
            self.num_key_value_groups = groups // repeats

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


@dataclass(frozen=True)
class AttentionMask:
    """The keys that queries may attend to.

    Attributes:
        intervals: the intervals of the sequence.
        mask: (samples or 1, heads or 1, tokens, tokens) of whole sequences. Booleans, or numbers that are added to the
            scores. None masks nothing.
        causal: whether tokens cannot attend to later tokens.
        scale: factor of the scores.
    """

    intervals: TokenIntervals
    mask: torch.Tensor | None
    causal: bool
    scale: float

    def between(self, rows: tuple[int, int], columns: tuple[int, int], value: torch.Tensor) -> torch.Tensor | None:
        """Return the mask between two ranges of tokens, for these values. None if nothing is masked."""
        if self.mask is not None:
            part = self.mask[..., slice(*rows), slice(*columns)]
            return part.unsqueeze(2) if part.shape[1] == 1 else _by_keys(part, value)
        if not self.causal or columns[1] <= rows[0] + 1:
            return None
        row, column = (torch.arange(*bounds, device=value.device) for bounds in (rows, columns))
        return row[:, None] >= column[None]


@torch.compiler.disable(reason="what goes round in a ring is on its way while scores are computed")
def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: AttentionMask, peers: Peers
) -> torch.Tensor:
    """Compute attention of the queries on this worker over whole sequences.

    Args:
        query: shape (samples, heads, tokens, size of a head). ``key`` and ``value`` may have fewer heads.

    Returns:
        Shape (samples, heads, tokens, size of a head).
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # rotary positions leave queries and keys in fp32
        query, key, value = (part.to(torch.get_autocast_dtype(kind)) for part in (query, key, value))
    return _Ring.apply(query, key, value, attention_mask, peers)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: AttentionMask,
        peers: Peers,
    ) -> torch.Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        output = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=wide)
        sums = query.new_full(query.shape[:-1], -torch.inf, dtype=wide)
        with torch.autocast(query.device.type, enabled=False):
            for source, (keys, values) in _rotate(peers, (key, value)):
                for block in _blocks(query, value, attention_mask, peers.rank, source):
                    mine, theirs = block.queries, block.keys
                    inputs = query[:, :, mine], keys[:, :, theirs], values[:, :, theirs]
                    of_block, logarithms = block.kernel.attend(*inputs)
                    before = sums[:, :, mine]
                    together = torch.logaddexp(before, logarithms)
                    finite = together.masked_fill(together == -torch.inf, 0.0)  # rows that attend to nothing yet
                    earlier, share = ((part - finite).exp().unsqueeze(-1) for part in (before, logarithms))
                    output[:, :, mine] = output[:, :, mine] * earlier + of_block * share
                    sums[:, :, mine] = together
        ctx.attention_mask, ctx.peers = attention_mask, peers
        result = output.to(value.dtype)
        ctx.save_for_backward(query, key, value, result, sums)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        query, key, value, output, sums = ctx.saved_tensors
        attention_mask, peers, wide = ctx.attention_mask, ctx.peers, sums.dtype
        sums = sums.masked_fill(sums == -torch.inf, torch.inf)  # rows that attend to nothing have no gradient
        of_query = torch.zeros_like(query, dtype=wide)
        travelling = (key, value, torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide))
        with torch.autocast(query.device.type, enabled=False):
            for source, (keys, values, of_keys, of_values) in _rotate(peers, travelling):
                for block in _blocks(query, value, attention_mask, peers.rank, source):
                    mine, theirs = block.queries, block.keys
                    inputs = query[:, :, mine], keys[:, :, theirs], values[:, :, theirs]
                    results = (each[:, :, mine] for each in (gradient, output, sums))
                    found = block.kernel.gradients(*results, *inputs)
                    of_query[:, :, mine] += found[0]
                    of_keys[:, :, theirs] += found[1]
                    of_values[:, :, theirs] += found[2]
        of_key, of_value = travelling[2].to(key.dtype), travelling[3].to(value.dtype)
        return of_query.to(query.dtype), of_key, of_value, None, None


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Gradients of queries, keys and values."""


@dataclass(frozen=True)
class _Scores:
    """Attention by plain operations, which keep all scores of a block: on any device and with any mask."""

    scale: float
    mask: torch.Tensor | None

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of the queries for these keys alone, and the logarithms of its sums of weights."""
        scores = self._scores(query, key)
        logarithms = scores.logsumexp(-1)
        finite = logarithms.masked_fill(logarithms == -torch.inf, 0.0)
        weights = (scores - finite.unsqueeze(-1)).exp().to(value.dtype)
        return (weights @ value[:, :, None]).flatten(1, 2), logarithms.flatten(1, 2)

    def gradients(
        self, gradient: torch.Tensor, output: torch.Tensor, sums: torch.Tensor, *inputs: torch.Tensor
    ) -> Gradients:
        """Return the gradients of queries, keys and values.

        Args:
            gradient: gradient of ``output``, the result of the queries for all keys.
            sums: logarithms of the sums of weights over all keys.
            inputs: queries, keys and values.
        """
        query, key, value = inputs
        outgoing = _by_keys(gradient, key)
        inner = (outgoing.to(sums.dtype) * _by_keys(output, key)).sum(-1, keepdim=True)
        weights = (self._scores(query, key) - _by_keys(sums, key).unsqueeze(-1)).exp()
        slope = (outgoing @ value[:, :, None].mT).to(sums.dtype) - inner
        slope = (weights * slope * self.scale).to(key.dtype)
        of_key = (slope.mT @ _by_keys(query, key)).sum(2)
        of_value = (weights.to(value.dtype).mT @ outgoing).sum(2)
        return (slope @ key[:, :, None]).flatten(1, 2), of_key, of_value

    def _scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return scores of shape (samples, key heads, query heads per key head, queries, keys)."""
        # Compute in 32 bits, as a fused kernel accumulates. 16-bit scores would be less exact.
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = _by_keys(query, key).to(wide) @ key[:, :, None].to(wide).mT * self.scale
        if self.mask is None:
            return scores
        if self.mask.dtype == torch.bool:
            return scores.masked_fill(~self.mask, -torch.inf)
        return scores + self.mask


@dataclass(frozen=True)
class _FlashKernel:
    """Attention by torch's flash kernels, which keep no scores: without a mask, or causal. See :class:`_Scores`."""

    scale: float
    causal: bool

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        is_on_host = query.device.type == "cpu"
        forward = torch.ops.aten._scaled_dot_product_flash_attention
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu if is_on_host else forward
        output, logarithms, *_ = forward(*_repeated(query, key, value), 0.0, self.causal, scale=self.scale)
        return output, logarithms

    def gradients(
        self, gradient: torch.Tensor, output: torch.Tensor, sums: torch.Tensor, *inputs: torch.Tensor
    ) -> Gradients:
        query, key, value = inputs
        arguments = [gradient.contiguous(), *_repeated(query, key, value), output.contiguous(), sums.contiguous()]
        if query.device.type == "cpu":
            backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            found = backward(*arguments, 0.0, self.causal, scale=self.scale)
        else:
            backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
            ends = None, None, query.shape[TOKENS], key.shape[TOKENS]  # all sequences have these lengths
            no_seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # there is no dropout
            found = backward(*arguments, *ends, 0.0, self.causal, no_seed, no_seed, scale=self.scale)
        of_query, *others = found
        of_key, of_value = (_by_keys(each, key).sum(2) for each in others)
        return of_query, of_key, of_value


class _Ranges(NamedTuple):
    """A range of this worker's queries, a range of keys of a worker that they attend to, and how to compute it."""

    queries: slice
    keys: slice
    kernel: _Scores | _FlashKernel


def _repeated(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Gradients:
    """Return queries, keys and values with one key head for each query head."""
    repeats = query.shape[HEADS] // key.shape[HEADS]
    return query.contiguous(), key.repeat_interleave(repeats, HEADS), value.repeat_interleave(repeats, HEADS)


def _by_keys(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Divide the heads: (samples, key heads, query heads per key head, tokens, …)."""
    return x.unflatten(HEADS, (key.shape[HEADS], -1))


def _has_flash_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch has a flash kernel for these tensors: on a CPU, or on this GPU of Nvidia for this type and size."""
    if value.shape[-1] != query.shape[-1]:
        return False
    if query.device.type != "cuda" or torch.version.hip:
        return query.device.type == "cpu"
    return can_use_flash_attention(SDPAParams(query, query, query, None, 0.0, False, False))


def _blocks(
    query: torch.Tensor, value: torch.Tensor, attention_mask: AttentionMask, rank: int, source: int
) -> Iterator[_Ranges]:
    """Yield blocks of this worker's queries and the source worker's keys. Plain ones have a range of the queries."""
    causal, scale = attention_mask.causal, attention_mask.scale
    is_fused = attention_mask.mask is None and _has_flash_kernel(query, value)
    for query_offset, (begin, end) in attention_mask.intervals.of(rank):
        for key_offset, (first, last) in attention_mask.intervals.of(source):
            if begin == end or first == last or (causal and first >= end):
                continue  # nothing, or all of these keys are after all of these queries
            keys = slice(key_offset, key_offset + last - first)
            if is_fused:  # intervals are equal, or one is before the other
                queries = slice(query_offset, query_offset + end - begin)
                yield _Ranges(queries, keys, _FlashKernel(scale, causal and first == begin))
                continue
            step = max(1, AT_ONCE // (last - first))
            for low in range(begin, end, step):
                high = min(low + step, end)
                if causal and first >= high:
                    continue
                mask = attention_mask.between((low, high), (first, last), value)
                queries = slice(query_offset + low - begin, query_offset + high - begin)
                yield _Ranges(queries, keys, _Scores(scale, mask))


def _rotate(peers: Peers, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, Sequence[torch.Tensor]]]:
    """Pass tensors around the ring. Yield (owner, its tensors), starting with this worker's own.

    The tensors after the first two travel with them, collect sums and return to their owner.
    """
    current = [tensor.contiguous() for tensor in tensors]
    for step in range(peers.size):
        is_last = step == peers.size - 1
        forwarded = [] if is_last else [_send_to_next(peers, tensor) for tensor in current[:2]]
        yield (peers.rank - step) % peers.size, current
        returned = [_send_to_next(peers, tensor) for tensor in current[2:]]
        current = [*(current[:2] if is_last else [wait() for wait in forwarded]), *(wait() for wait in returned)]
    for tensor, collected in zip(tensors[2:], current[2:], strict=True):
        tensor.copy_(collected)


def _send_to_next(peers: Peers, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start to send a tensor to the next worker. Return a function that waits for that of the previous worker."""
    incoming, after, before = torch.empty_like(tensor), (peers.rank + 1) % peers.size, (peers.rank - 1) % peers.size
    operations = [(dist.isend, tensor, after), (dist.irecv, incoming, before)]
    works = dist.batch_isend_irecv(
        [dist.P2POp(operation, of, group=peers.group, group_peer=peer) for operation, of, peer in operations]
    )

    def wait(sent: torch.Tensor = tensor) -> torch.Tensor:  # what is sent must stay alive until then
        for work in works:
            work.wait()
        return incoming

    return wait
