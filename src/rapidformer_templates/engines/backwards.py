"""Parameters that the losses of a step do not use, and backwards that ``compute_loss`` runs itself.

Workers with different batches may use different parameters (a head per task, a branch for some samples). The step
still equals that of a single process under two conditions. Each gradient exchange must contain every parameter, with
zeros from workers that did not use it. And parameters that no worker used must be left out of the update.

An engine exchanges gradients in the backward that it runs. Another backward, for adversarial training, gradient
penalties or forces, can start an exchange too early, or get only this worker's part of a derivative. So an engine, or a
switch that changes the model, limits the derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, Node
from torch.utils._pytree import tree_leaves

from rapidformer_templates.engines.forwards import differentiable
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.system.replaced_functions import patch_function
from rapidformer_templates.system.workers import Workers

WHOLE_WEIGHTS = (
    "penalties on weights work with DDP, OSS, SDP, ZeRO-1, ZeRO-2, --use-distributed-optimizer and context parallelism"
)
"""Says where a loss may use parameters outside of the forward of their modules."""


def with_unused_parameters(
    loss: torch.Tensor, parameters: Sequence[torch.Tensor], then: Callable[[], None]
) -> torch.Tensor:
    """Return ``loss``, with a graph whose backward reaches all parameters. Unused ones still receive no gradient.

    Hooks on a parameter's graph node (not on its gradient) then run for all parameters.

    Args:
        then: called at the end of the backward, before other callbacks that are queued for its end.
    """

    def backward(gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        Variable._execution_engine.queue_callback(then)
        return (gradient, *[None] * len(parameters))

    return differentiable(lambda loss, *parameters: loss.view_as(loss), backward, loss, *parameters)


def reached_parameters(*roots: torch.Tensor | GradientEdge) -> list[torch.Tensor]:
    """Return the parameters that a backward from ``roots`` reaches. It takes about a microsecond per operation."""
    reached: list[torch.Tensor] = []
    visited: set[Node] = set()
    pending = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            reached.append(variable)
        pending.extend(following for following, _ in node.next_functions)
    return reached


class GradientSequence:
    """Passes gradients on in the same order on all workers, each as soon as all earlier ones have arrived.

    A backward produces them in the order of its graph. If they were collected and sent in that order, workers with
    different graphs would sum gradients of different parameters, or deadlock.

    Args:
        parameters: number of parameters, in the order of the model. A backward reaches them in about the reverse order.
        send: receives the index of a parameter once its gradient has arrived, or at the end if it has none.
    """

    def __init__(self, parameters: int, send: Callable[[int], None]) -> None:
        self._sequence = range(parameters - 1, -1, -1)
        self._send = send
        self.begin()

    def begin(self) -> None:
        """Start a backward."""
        self._ready: set[int] = set()
        self._passed = 0

    def add(self, index: int) -> None:
        """Record that a gradient has arrived."""
        self._ready.add(index)
        while self._passed < len(self._sequence) and self._sequence[self._passed] in self._ready:
            self._next()

    def finish(self) -> None:
        """End the backward. No more gradients will arrive."""
        while self._passed < len(self._sequence):
            self._next()

    def _next(self) -> None:
        index = self._sequence[self._passed]
        self._passed += 1
        self._send(index)


class ForwardSequenceCheck:
    """The sequence of modules that a micro batch uses and whose parameters the workers gather together.

    If a worker skips a module, it gathers the next one while the others wait for this one, and computes with wrong
    values. So the first micro batch must use all modules, forward and backward. The workers compare it module by module
    before anything is gathered. Later micro batches must follow the same sequence.

    Args:
        modules: modules by name.
        parameters: names of the trained parameters of each module.
        where: the component that gathers them, for the error message.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], parameters: Mapping[str, Sequence[str]], workers: Workers, where: str
    ) -> None:
        self._parameters, self._workers, self._where = parameters, workers, where
        self._indices = {name: index for index, name in enumerate(modules)}
        self._expected: list[tuple[str, bool]] | None = None
        self._visited: list[tuple[str, bool]] = []
        self._is_active = False
        for name, module in modules.items():
            module.register_forward_pre_hook(lambda *_, name=name: self._visit(name, False), prepend=True)
            module.register_forward_hook(lambda *args, name=name: self._watch_backward(name, args[-1]), prepend=True)

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Context for the forward and backward of a micro batch.

        Raises:
            RapidformerError: it skipped a module. The error names the parameters.
        """
        self._is_active, self._visited = True, []
        try:
            yield
        finally:
            self._is_active = False
        if self._expected is None:
            self._compare(None)
            self._expected = self._visited
        elif len(self._visited) < len(self._expected):
            name = self._expected[len(self._visited)][0]
            raise self._error("does not use all parameters", self._parameters[name] or [name])

    def _visit(self, name: str, backward: bool) -> None:
        if not self._is_active:
            return
        index, position = len(self._visited), (name, backward)
        self._visited.append(position)
        if self._expected is None:
            self._compare(position)
        elif self._expected[index : index + 1] != [position]:
            raise self._sequence_error(self._expected[index][0] if index < len(self._expected) else name)

    def _watch_backward(self, name: str, output: object) -> None:
        """Detect that the backward reaches a module, at the first gradient of its outputs."""
        if not self._is_active:
            return
        is_first = True

        def visit_once(gradient: object) -> None:
            nonlocal is_first
            if is_first and self._is_active:
                is_first = False
                self._visit(name, True)

        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        for leaf in leaves:
            leaf.register_hook(visit_once)

    def forward_done(self, missing: Sequence[str] | None = None) -> None:
        """Check for skipped modules between forward and backward of the first micro batch.

        Args:
            missing: names of trained parameters that the loss does not use, if this is known more precisely than from
                the modules that were called.
        """
        if self._expected is not None:
            return
        self._compare(None)
        if missing is None:
            skipped = [name for name in self._parameters if (name, False) not in self._visited]
            missing = [parameter for name in skipped for parameter in self._parameters[name]]
        for rank, names in enumerate(self._workers.gather(list(missing))):
            if names:
                raise self._error("does not use all parameters", names, f" (worker {rank})")

    @property
    def is_known(self) -> bool:
        """Whether the first micro batch has defined the sequence."""
        return self._expected is not None

    def _compare(self, position: tuple[str, bool] | None) -> None:
        """Check that all workers are at the same module. None is the end of a forward or a backward."""
        if self._workers.agree(0 if position is None else 1 + 2 * self._indices[position[0]] + position[1]):
            return
        indices = self._workers.gather(position)
        # The worker that is ahead has skipped the module of the other, which is the earlier one in a forward.
        earliest = min((other for other in indices if other), key=lambda other: self._indices[other[0]])
        ahead = next(rank for rank, other in enumerate(indices) if other != earliest)
        raise self._sequence_error(earliest[0], f" (worker {ahead})")

    def _sequence_error(self, name: str, who: str = "") -> RapidformerError:
        """Return the error for a micro batch that does not use a module yet, or not at all."""
        return self._error("does not use these parameters when others do", self._parameters[name] or [name], who)

    def _error(self, what: str, names: Sequence[str], who: str = "") -> RapidformerError:
        return RapidformerError(
            f"a micro batch {what}: {', '.join(names[:6])}{who}",
            where=f"{self._where}, which gathers them on all workers at the same time",
            hint="let every batch use the whole model in the same order, or partition its states with SDP, ZeRO-1 or "
            "ZeRO-2",
        )


def sum_with_unused(
    total: torch.Tensor, unused: Sequence[int], parameters: int, workers: Workers, *, on_host: bool
) -> tuple[torch.Tensor, list[int]]:
    """Sum a scalar over the workers, and find the parameters without a gradient on all of them, in the same exchange.

    Args:
        unused: indices of the parameters without a gradient on this worker.
        parameters: number of parameters.
        on_host: whether to count between hosts, so that no host waits for its device.
    """
    if workers.world == 1 and not unused:
        return total, []
    if on_host:
        any_unused = workers.sum(len(unused))[0] > 0
        total = workers.sum_tensor(total)
    else:
        both = workers.sum_tensor(torch.stack([total, torch.full_like(total, len(unused))]))
        total, any_unused = both[0], bool(both[1])
    if not any_unused:
        return total, []
    indices = set(unused)
    counts = workers.sum(*(float(index in indices) for index in range(parameters)))
    return total, [index for index, count in enumerate(counts) if count == workers.world]


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
            message = f"the loss takes {what} through the model, which is not possible with {limit.reason}"
            raise RapidformerError(message, where=WHERE, hint=WORKS[needed])

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
    original: Callable[..., object], roots: Sequence[Any], *args: Any, accumulate_grad: bool, **named: object
) -> object:
    _gradients, _retain_graph, create_graph, inputs, *_ = args
    if checking := _CHECK.get():
        parameters, check = checking
        model = set(map(id, parameters()))
        # Otherwise, it is the backward of another model. Without a graph, it is unknown.
        if not torch.is_grad_enabled() or not model.isdisjoint(map(id, reached_parameters(*roots))):
            check(model, inputs, create_graph, accumulate_grad)
    return original(roots, *args, accumulate_grad=accumulate_grad, **named)
