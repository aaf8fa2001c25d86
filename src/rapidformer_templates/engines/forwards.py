"""Operations with a given backward, forwards that the backward recomputes, and forwards without side effects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import Cache

from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.blocks import WrappedForward, in_eval_mode
from rapidformer_templates.system import accelerator
from rapidformer_templates.system.process_state import capture, restore
from rapidformer_templates.system.workers import unexpanded

_aten = torch.ops.aten
PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten._grouped_mm.default, _aten.convolution.default})
"""Products with weights. Attention's products of two activations are batched ones or a fused kernel."""

ContextFunction = Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[object]]]
"""Makes the contexts of a forward and of its recomputation, for torch's ``checkpoint``."""

_KEEP_PRODUCTS = {"context_fn": functools.partial(create_selective_checkpoint_contexts, list(PRODUCTS))}


class _Operation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Callable[..., object], backward: Callable[..., object], *inputs: object) -> object:
        ctx.gradients_of = backward
        return forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[object, ...]:
        of_inputs = ctx.gradients_of(*gradients)
        return None, None, *(of_inputs if isinstance(of_inputs, tuple) else (of_inputs,))


def differentiable(forward: Callable[..., torch.Tensor], backward: Callable[..., Any], *inputs: Any) -> torch.Tensor:
    """Return ``forward(*inputs)``. The gradients of the inputs are ``backward`` of the gradient of the result."""
    return _Operation.apply(forward, backward, *inputs)


class Checkpointed(WrappedForward):
    """A forward that computes its activations twice. Set ``enabled`` to False to measure without recomputation.

    Args:
        selective: whether to save products with weights and recompute everything else.
        norms: batch norms inside it, which must count a batch only once.
        flag: the flag that errors name.
    """

    def __init__(
        self,
        forward: Callable[..., object],
        *,
        selective: bool = False,
        norms: Sequence[nn.Module] = (),
        flag: str | None = None,
    ) -> None:
        super().__init__(forward)
        self.norms = norms
        self.flag = flag
        self.enabled = True
        self.keeps: dict[str, Any] = _KEEP_PRODUCTS if selective else {}  # arguments of torch's ``checkpoint``

    def __call__(self, *args: object, **kwargs: Any) -> object:
        if not self.enabled or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            message = "a block gets a cache of keys and values, which a second forward would extend again"
            hint = "set use_cache to False in the model's config, or leave the flag out"
            raise ModelError(message, where=self.flag, hint=hint)
        forward = _counting_once(self.forward, self.norms) if self.norms else self.forward
        output: object = checkpoint(forward, *args, use_reentrant=False, **self.keeps, **kwargs)
        if not torch.compiler.is_compiling():
            torch.clear_autocast_cache()  # the backward casts the weights again, and nobody else keeps these copies
        return output


def _counting_once(forward: Callable[..., object], norms: Sequence[nn.Module]) -> Callable[..., object]:
    """Return a forward whose recomputation does not update the statistics of batch norms: it sees the same batch.

    Copies replace the statistics meanwhile. Copying them back would be an operation that the first forward lacks.
    """
    copies = [(norm, name, buffer.clone()) for norm in norms for name, buffer in norm.named_buffers(recurse=False)]
    is_first = True

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal is_first
        if is_first:
            is_first = False
            return forward(*args, **kwargs)
        statistics = [(norm, name, getattr(norm, name)) for norm, name, _ in copies]
        try:
            for norm, name, copy in copies:
                setattr(norm, name, copy)
            return forward(*args, **kwargs)
        finally:
            for norm, name, buffer in statistics:
                setattr(norm, name, buffer)

    return counted


def checkpointed_forward(block: nn.Module) -> Checkpointed | None:
    """Return the checkpointed forward of a block, also inside other switches' wrappers, or None."""
    forward: object = block.forward
    while not isinstance(forward, Checkpointed) and hasattr(forward, "forward"):
        forward = forward.forward
    return forward if isinstance(forward, Checkpointed) else None


class SavesMatmuls:
    """Marks a dispatch mode that saves matmul outputs of a forward for its backward."""


_SAVING_MODES: tuple[type, ...] = (SavesMatmuls, *(type(mode) for mode in create_selective_checkpoint_contexts([])))


def matmuls_are_saved() -> bool:
    """Whether the output that a layer has just computed must not be modified, because it is saved for the backward.

    A compiled graph manages memory itself. Code that cannot be compiled runs inside the same dispatch modes of torch.
    """
    if torch.compiler.is_compiling():
        return True
    return any(isinstance(mode, _SAVING_MODES) for mode in _get_current_dispatch_mode_stack())


_BACKWARD_MAY_FOLLOW = ContextVar("a forward leaves a trace", default=True)


def backward_may_follow() -> bool:
    """Whether a backward may follow the current forward."""
    return _BACKWARD_MAY_FOLLOW.get()


@contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of ``model`` on exit. Batch norm, for example, changes its statistics in each forward."""
    indices = [(module, name) for module in model.modules() for name in module._buffers]
    before = [module._buffers[name] for module, name in indices]
    values = [None if buffer is None else unexpanded(buffer.detach()).clone() for buffer in before]
    try:
        yield
    finally:
        for (module, name), buffer, value in zip(indices, before, values, strict=True):
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                # bypasses autograd: a backward that does not read it may still follow
                unexpanded(buffer.data).copy_(value)


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Context for a forward without side effects: random state and buffers are unchanged."""
    before = _BACKWARD_MAY_FOLLOW.set(False)
    try:
        with accelerator.without_random_trace(model.parameters()), restored_buffers(model):
            yield
    finally:
        _BACKWARD_MAY_FOLLOW.reset(before)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context for forwards that must not affect training. It restores the modes and the random state."""
    random_state = capture()
    try:
        with in_eval_mode(model):
            yield
    finally:
        restore(*random_state)
