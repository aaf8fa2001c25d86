"""Forwards without side effects on the model or on the random state of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

from rapidformer_templates.system import accelerator
from rapidformer_templates.system.process_state import capture, restore

_BACKWARD_MAY_FOLLOW = ContextVar("a forward leaves a trace", default=True)


def backward_may_follow() -> bool:
    """Whether a backward may follow the current forward."""
    return _BACKWARD_MAY_FOLLOW.get()


@contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of ``model`` on exit. Batch norm, for example, changes its statistics in each forward."""
    indices = [(module, name) for module in model.modules() for name in module._buffers]
    before = [module._buffers[name] for module, name in indices]
    values = [None if buffer is None else buffer.detach().clone() for buffer in before]
    try:
        yield
    finally:
        for (module, name), buffer, value in zip(indices, before, values, strict=True):
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.data.copy_(value)  # bypasses autograd: a backward that does not read it may still follow


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
    """Context for forwards that must not affect training. It restores the mode and the random state."""
    random_state, training = capture(), model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        restore(*random_state)
