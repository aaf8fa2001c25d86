"""The attention function that a transformers model calls under ``--use-flash-attn``, and the receipt of its kernels.

Each kernel has a name in transformers' registry of attention functions, with an attention function and a mask
function. transformers asks the mask function what the attention may see, and passes the answer to the attention
function. The mask is None, a matrix, or, in packed rows, the borders of the documents.

In packed rows, each document is computed separately, so no matrix of tokens × tokens masks the others. A batch of them
is one sequence of tokens, row after row. ``borders`` are the positions in it where documents begin, and its end.
Variable-length kernels call this ``cu_seqlens``. On a GPU, the flash kernels take the borders directly. On a CPU, the
flash kernel is called once per document. Either way, the cost grows with the squares of the documents' lengths, not of
the rows'.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import profile
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.engines.contract import Engine, Receipt
from rapidformer_templates.errors import ModelError

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
        return _on_cpu(query, key, value, borders, scale)[0]
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
    output, log_sums = _results_like(query)
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
def _results_like(query: torch.Tensor, *others: object) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, tokens, size = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(rows, tokens, heads, size), query.new_zeros(rows, heads, tokens, dtype=wide)


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


def _save_for_backward(
    ctx: Any,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float],
    output: tuple[torch.Tensor, torch.Tensor],
) -> None:
    query, key, value, borders, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, borders)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: torch.Tensor, _: object) -> tuple[torch.Tensor | None, ...]:
    return (*_backward_on_cpu(gradient, *ctx.saved_tensors, ctx.scale), None, None)


_on_cpu.register_autograd(_backward, setup_context=_save_for_backward)


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


# transformers treats any name that contains "flash" as a built-in implementation.
NAMES = {"flash": "rapidformer_torch", "efficient": "rapidformer_efficient", "flash_attn": "rapidformer_package"}
"""Name in transformers' registry for each kernel that the plan may choose (``engine_options``)."""

ANY = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def use_flash_attention(assembly: Assembly, building: Building[object]) -> None:
    """Make the model call the kernel that the plan names.

    Raises:
        ModelError: its attention cannot be chosen, or needs something that the kernel lacks.
    """
    model, kernel = assembly.model, building.plan.engine_options.attention_kernel
    assert kernel is not None
    check_attention(model, building.plan.device)
    assert isinstance(model, PreTrainedModel)
    model.set_attn_implementation(NAMES[kernel])


def check_attention(model: nn.Module, device: str) -> None:
    """Check that a model's attention can use a flash kernel.

    Raises:
        ModelError: it cannot. The error names the model.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise _refusal(name, "it is not a model of transformers: only their attention can be chosen from outside")
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    fixed = [type(part).__name__ for part in parts if not (part._supports_sdpa and part._can_set_attn_implementation())]
    if fixed:
        raise _refusal(name, f"the attention of {fixed[0]} cannot go through torch's scaled_dot_product_attention")
    settings = model.config.to_dict()
    dropping = [key for key, value in settings.items() if "att" in key and "drop" in key and value]
    if dropping and device == "cpu":
        message = f"the flash kernel of a CPU has no dropout, and {dropping[0]} is {settings[dropping[0]]:g}"
        raise _refusal(name, message, "--dropout 0, or ")


def _refusal(where: str, why: str, instead: str = "") -> ModelError:
    return ModelError(f"flash attention cannot act: {why}", where=where, hint=f"{instead}leave out --use-flash-attn")


def attention_mask(
    batch_size: int, q_length: int, kv_length: int, *, packs: bool = True, **asked: Any
) -> torch.Tensor | None:
    """Return what the attention may see: None, a matrix (rows, 1, tokens, tokens), or borders of packed documents.

    The parameters are those of transformers' ``sdpa_mask``, which makes everything except the borders.

    Args:
        packs: whether the kernel supports borders.
    """
    is_special = any(asked.get(name) is not None for name in ("attention_mask", "local_size"))
    is_special |= any(asked.get(n) for n in ("use_vmap", "q_offset", "kv_offset", "allow_is_bidirectional_skip"))
    is_special |= asked.get("allow_is_causal_skip", True)
    if packs and q_length == kv_length and q_length > 1 and not is_special:
        # Documents are packed if each token sees the one before it or begins a document, and none sees the next.
        rows = torch.arange(batch_size, device=asked.get("device", "cpu"))[:, None]
        positions = torch.arange(q_length, device=rows.device)[None]
        sees = partial(asked.get("mask_function", causal_mask_function), rows, 0)
        if not sees(positions[:, :-1], positions[:, 1:]).any():
            return borders_of(sees(positions, (positions - 1).clamp(min=0)).expand(batch_size, -1).clone())
    return sdpa_mask(batch_size, q_length, kv_length, **asked)


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    kernel: str,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with one kernel. transformers calls this function.

    Args:
        module: the attention layer.
        query: shape (rows, heads, tokens, head size). ``key`` and ``value`` may have fewer heads.
        attention_mask: result of :func:`attention_mask`.
        dropout: dropout rate of the attention weights.
        scaling: factor of the scores. The default is one over the root of the head size.
        kernel: ``flash``, ``efficient`` or ``flash_attn``.

    Returns:
        Output of shape (rows, tokens, heads, head size), and None for the weights, which no kernel returns.

    Raises:
        ModelError: the kernel cannot compute this.
    """
    if attention_mask is not None and attention_mask.ndim == 1:
        more = {"scale": query.shape[-1] ** -0.5 if scaling is None else scaling, "dropout": dropout}
        return packed_attention(query, key, value, attention_mask, **more, package=kernel == "flash_attn"), None
    position_bias = others.get("position_bias")
    # The package supports no mask, only 16 bits, and as many queries as keys (not so in generation).
    fits = value.dtype in (torch.float16, torch.bfloat16) and query.shape[2] == key.shape[2]
    if kernel == "flash_attn" and attention_mask is None and position_bias is None and fits:
        from flash_attn import flash_attn_func

        causal = others.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        tensors = [tensor.to(value.dtype).transpose(1, 2) for tensor in (query, key, value)]
        return flash_attn_func(*tensors, dropout_p=dropout, softmax_scale=scaling, causal=causal), None
    backends = ANY
    if torch.is_grad_enabled():  # in evaluation, other kernels are allowed as a fallback
        efficient = query.device.type != "cpu" and not (attention_mask is None and kernel == "flash")
        backends = [SDPBackend.EFFICIENT_ATTENTION if efficient else SDPBackend.FLASH_ATTENTION]
        _check_call(module, query, value, attention_mask, dropout, position_bias, efficient=efficient)
    with sdpa_kernel(backends):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )


def _check_call(
    module: nn.Module,
    query: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    position_bias: torch.Tensor | None,
    *,
    efficient: bool,
) -> None:
    """Check what the configuration does not show. ``efficient``: whether the memory-efficient kernel computes this."""
    name, size, width = type(module).__name__, value.shape[-1], value.element_size()
    if query.shape[-1] != size:
        raise _refusal(name, f"the heads of query and value differ: {query.shape[-1]}, {size}")
    step = 16 // width  # this kernel reads rows of a multiple of 16 bytes (``check_head_dim_size_mem_efficient``)
    if efficient and size % step:
        why = f"batches with a mask take the memory-efficient kernel, whose heads are a multiple of {step} values"
        raise _refusal(name, f"{why} in {width * 8} bits, but these have {size}")
    if query.device.type != "cpu":
        return
    if dropout:
        raise _refusal(name, "the flash kernel of a CPU has no dropout", "--dropout 0, or ")
    if any(tensor is not None and tensor.requires_grad for tensor in (mask, position_bias)):
        raise _refusal(name, "the flash kernel of a CPU cannot train a bias of the scores")


for _kernel, _name in NAMES.items():
    AttentionInterface.register(_name, partial(attention, kernel=_kernel))
    # The memory-efficient kernel does not support borders.
    AttentionMaskInterface.register(_name, partial(attention_mask, packs=_kernel != "efficient"))


KERNEL = re.compile(r"_scaled_dot_product_\w+|_?flash_attn\w*_(forward|backward)|_flash_attention_(forward|backward)")
"""Names of torch's and ``flash_attn``'s operators that compute attention."""


def attention_functions(model: nn.Module) -> list[str]:
    """Return the attention functions that the parts of a model call, by their names in transformers' registry."""
    configs = (getattr(part, "config", None) for part in model.modules())
    return sorted({name for config in configs if (name := getattr(config, "_attn_implementation", None))})


@contextmanager
def count_kernels() -> Iterator[dict[str, int]]:
    """Yield a dict. On exit, it contains the number of calls of each attention operator in this process."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it writes two lines per block to standard error
    counts: dict[str, int] = {}
    with profile(use_kineto=False) as events:
        yield counts
    assert events.kineto_results is not None
    for event in events.kineto_results.events():  # ``key_averages`` would build a tree of all of them
        name = event.name().rpartition("::")[2]
        if KERNEL.fullmatch(name):
            counts[name] = counts.get(name, 0) + 1


class AttentionKernels(Receipt):
    """Reports ``attention_kernels`` (calls of each in the first step) and ``attention_functions`` (their callers)."""

    def __init__(self) -> None:
        self._kernels: dict[str, int] = {}

    @contextmanager
    def around_step(self) -> Iterator[None]:
        with count_kernels() as self._kernels:
            yield

    def after_step(self, engine: Engine) -> dict[str, object]:
        return {"attention_kernels": self._kernels, "attention_functions": attention_functions(engine.model)}
