"""Attention in packed rows. Each document is computed separately, so no matrix of tokens × tokens masks the others.

A batch of packed rows is one sequence of tokens, row after row. ``borders`` are the positions in it where
documents begin, and its end. Variable-length kernels call this ``cu_seqlens``. On a GPU, the
flash kernels take the borders directly. On a CPU, the flash kernel is called once per document. Either
way, the cost grows with the squares of the documents' lengths, not of the rows'.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch.autograd.function import FunctionCtx

aten = torch.ops.aten


def borders_of(follows: torch.Tensor) -> torch.Tensor:
    """Return the positions where the documents of a batch begin, and its end.

    Args:
        follows: whether a token sees the one before it in its row, shape (rows, tokens).

    Returns:
        int32 of shape (documents + 1,), rising from 0 to rows × tokens.
    """
    begins = ~follows
    begins[:, 0] = True
    starts = begins.flatten().nonzero()[:, 0]
    return torch.cat([starts, starts.new_tensor([follows.numel()])]).int()


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
    package: bool = False,
) -> torch.Tensor:
    """Causal attention in which each token sees only its own document.

    Args:
        query: shape (rows, heads, tokens, head size).
        key: like ``query``. Its number of heads may be a divisor of the query's (grouped queries).
        value: like ``key``.
        borders: result of :func:`borders_of`.
        scale: factor of the scores.
        dropout: dropout rate of the attention weights. The CPU kernel has no dropout.
        package: whether to call the package ``flash_attn`` instead of torch's flash kernel. GPU only.

    Returns:
        Shape (rows, tokens, heads, head size), in the type of ``value``.
    """
    # Rotary positions leave queries and keys in fp32 when autocast computes values in 16 bits.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if value.device.type == "cpu" and not package:
        output: torch.Tensor = _on_cpu(query, key, value, borders, scale)[0]
        return output
    rows, heads, tokens, size = query.shape
    flat = [part.transpose(1, 2).reshape(rows * tokens, part.shape[1], size) for part in (query, key, value)]
    lengths = (borders, borders, tokens, tokens)
    if package:
        from flash_attn import flash_attn_varlen_func

        output = flash_attn_varlen_func(*flat, *lengths, dropout_p=dropout, softmax_scale=scale, causal=True)
    else:
        # The operator under torch.nn.attention.varlen, which has no dropout and whose signature differs by version.
        output = aten._flash_attention_forward(*flat, *lengths, dropout, True, False, scale=scale)[0]
    return output.view(rows, tokens, heads, size)


# One operator, so that a compiler need not trace a loop whose length differs between batches.


@torch.library.custom_op("rapidformer::packed_attention_for_cpu", mutates_args=())
def _on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, borders: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (rows, tokens, heads, size) and the log of each token's weight sum (rows, heads, tokens)."""
    output, log_sums = _like_output(query), _like_log_sums(query).zero_()
    # The output of a document with one token, such as padding at the end of a row, is its value.
    groups = query.shape[1] // value.shape[1]
    output.copy_(value.repeat_interleave(groups, dim=1).transpose(1, 2))
    for document in _documents(borders, query.shape[2]):
        parts = [_slice(tensor, document) for tensor in (query, key, value)]
        part, sums = aten._scaled_dot_product_flash_attention_for_cpu(*parts, 0.0, True, scale=scale)
        _slice(output.transpose(1, 2), document).copy_(part)
        _slice(log_sums, document).copy_(sums)
    return output, log_sums


@_on_cpu.register_fake
def _(query: torch.Tensor, *others: object) -> tuple[torch.Tensor, torch.Tensor]:
    return _like_output(query), _like_log_sums(query)


@torch.library.custom_op("rapidformer::packed_attention_for_cpu_backward", mutates_args=())
def _backward_on_cpu(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor,
    borders: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value."""
    gradient, output = gradient.transpose(1, 2), output.transpose(1, 2)
    of_query, of_key = torch.zeros_like(query), torch.zeros_like(key)
    # for documents with one token; the others are set below
    of_value = gradient.unflatten(1, (value.shape[1], -1)).sum(2)
    for document in _documents(borders, query.shape[2]):
        parts = [_slice(tensor, document) for tensor in (gradient, query, key, value, output, log_sums)]
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(*parts, 0.0, True, scale=scale)
        for whole, part in zip((of_query, of_key, of_value), gradients, strict=True):
            _slice(whole, document).copy_(part)
    return of_query, of_key, of_value


@_backward_on_cpu.register_fake
def _(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), value.new_empty(value.shape)


class _PackedContext(FunctionCtx):
    scale: float
    saved_tensors: tuple[torch.Tensor, ...]


def _save_for_backward(
    ctx: _PackedContext,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float],
    output: tuple[torch.Tensor, torch.Tensor],
) -> None:
    query, key, value, borders, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, borders)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: _PackedContext, gradient: torch.Tensor, _: object) -> tuple[torch.Tensor | None, ...]:
    return (*_backward_on_cpu(gradient, *ctx.saved_tensors, ctx.scale), None, None)


_on_cpu.register_autograd(_backward, setup_context=_save_for_backward)


def _like_output(query: torch.Tensor) -> torch.Tensor:
    rows, heads, tokens, size = query.shape
    return query.new_empty(rows, tokens, heads, size)


def _like_log_sums(query: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(query.shape[:3], dtype=wide)


def _documents(borders: torch.Tensor, tokens: int) -> Iterator[tuple[int, int, int]]:
    """Yield (row, first token, end) of each document with more than one token."""
    for start, end in pairwise(borders.tolist()):
        if end - start > 1:
            row = start // tokens
            yield row, start - row * tokens, end - row * tokens


def _slice(tensor: torch.Tensor, document: tuple[int, int, int]) -> torch.Tensor:
    """Return a view of a document's part of a tensor of shape (rows, heads, tokens, …)."""
    row, start, end = document
    return tensor[row : row + 1, :, start:end]
