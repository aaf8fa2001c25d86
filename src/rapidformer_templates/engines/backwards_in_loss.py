"""Backwards that ``compute_loss`` runs itself, for adversarial training, gradient penalties or forces.

An engine exchanges gradients in the backward that it runs. Another backward can start an exchange too early, or get
only this worker's part of a derivative. So an engine, or a switch that changes the model, limits the derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from rapidformer_templates.engines.unused_parameters import reached_parameters
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.system.replaced_functions import patch_function

Parameters = Callable[[], Iterable[torch.Tensor]]
"""Returns the parameters of a model as the graph of a forward has them."""

Check = Callable[[set[int], Sequence[torch.Tensor], bool, bool], None]
"""Sees a backward through the model before it starts.

It gets the ids of the model's parameters, the inputs of the backward (empty for all leaves), ``create_graph``, and
whether gradients are added to ``.grad``.
"""


class Derivatives(NamedTuple):
    """How many derivatives through its model a loss may take, one of another, and what limits them.

    Attributes:
        order: 0, 1 or 2.
        reason: the flag of the switch.
    """

    order: int
    reason: str


UNLIMITED = Derivatives(2, "")

WHERE = "compute_loss(model, batch)"
WORKS = {
    1: "it works in one process and with DDP, OSS, SDP, FSDP, tensor parallelism and --use-distributed-optimizer",
    2: "it works in one process and with DDP, OSS, SDP and --use-distributed-optimizer",
}

_CHECK: ContextVar[tuple[Parameters, Check] | None] = ContextVar("what sees a backward in a loss", default=None)


class _FirstBackward(Exception):
    """Ends a forward that is only observed."""


@contextmanager
def checked_backwards(parameters: Parameters, limit: Derivatives) -> Iterator[None]:
    """Context for a loss. It refuses a backward through the model that would be wrong, before it starts.

    Raises:
        RapidformerError: a backward needs more derivatives, or adds to the gradients of the model.
    """

    def check(model: set[int], inputs: Sequence[torch.Tensor], create_graph: bool, accumulates: bool) -> None:
        if accumulates and (not inputs or not model.isdisjoint(map(id, inputs))):
            raise RapidformerError(
                "a backward in the loss adds to the gradients of the model, which the engine computes",
                where=WHERE,
                hint="return the loss, or pass it to step.backward(loss) in your own loop; for other derivatives, "
                "use torch.autograd.grad(loss, inputs)",
            )
        needed = 2 if create_graph else 1
        if needed > limit.order:
            what = "a second derivative (create_graph=True)" if create_graph and limit.order else "a derivative"
            raise RapidformerError(
                f"the loss takes {what} through the model, which is not possible with {limit.reason}",
                where=WHERE,
                hint=WORKS[needed],
            )

    with _checking(parameters, check):
        yield


@contextmanager
def until_first_backward(parameters: Parameters) -> Iterator[None]:
    """Context for a loss that is only observed. It ends at the first backward through the model."""

    def stop(*backward: object) -> None:
        raise _FirstBackward

    with _checking(parameters, stop):
        try:
            yield
        except _FirstBackward:
            return


def in_loss() -> bool:
    """Whether a loss is being computed. A backward that runs now may not be the last one through its graph."""
    return _CHECK.get() is not None


@contextmanager
def _checking(parameters: Parameters, check: Check) -> Iterator[None]:
    patch_function(torch.autograd, "_engine_run_backward", _run_checked)
    _CHECK.set((parameters, check))
    try:
        yield
    finally:
        _CHECK.set(None)  # two sessions may leave their contexts in any order


def _run_checked(
    original: Callable[..., object],
    roots: Sequence[Any],
    gradients: object,
    retain_graph: object,
    create_graph: bool,
    inputs: Sequence[torch.Tensor],
    *others: object,
    accumulate_grad: bool,
    **named: object,
) -> object:
    if checking := _CHECK.get():
        parameters, check = checking
        model = set(map(id, parameters()))
        # Otherwise, it is the backward of another model. Without a graph, it is unknown.
        if not torch.is_grad_enabled() or not model.isdisjoint(map(id, reached_parameters(*roots))):
            check(model, inputs, create_graph, accumulate_grad)
    return original(
        roots, gradients, retain_graph, create_graph, inputs, *others, accumulate_grad=accumulate_grad, **named
    )
