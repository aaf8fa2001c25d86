"""Finds the parameters that the losses of a step use, and handles the backward for those that they do not use.

Workers with different batches may use different parameters (a head per task, a branch for some samples). The step
still equals that of a single process under two conditions. Each gradient exchange must contain every parameter, with
zeros from workers that did not use it. And parameters that no worker used must be left out of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.system.workers import Workers


def with_unused_parameters(
    loss: torch.Tensor, parameters: Sequence[torch.Tensor], then: Callable[[], None]
) -> torch.Tensor:
    """Return ``loss``, with a graph whose backward reaches all parameters. Unused ones still receive no gradient.

    Hooks on a parameter's graph node (not on its gradient) then run for all parameters.

    Args:
        then: called at the end of the backward, before other callbacks that are queued for its end.
    """
    passed: torch.Tensor = _ComeBy.apply(loss, then, *parameters)
    return passed


def reached_parameters(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the parameters that a backward from ``loss`` reaches. It takes about a microsecond per operation."""
    reached: list[torch.Tensor] = []
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            reached.append(variable)
        waiting.extend(following for following, _ in node.next_functions)
    return reached


class _ComeBy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, then: Callable[[], None], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.then, ctx.count = then, len(parameters)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        Variable._execution_engine.queue_callback(ctx.then)
        return (gradients[0], None, *[None] * ctx.count)


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
        self._on_gradient_ready: set[int] = set()
        self._done = 0

    def take(self, index: int) -> None:
        """Record that a gradient has arrived."""
        self._on_gradient_ready.add(index)
        while self._done < len(self._sequence) and self._sequence[self._done] in self._on_gradient_ready:
            self._next()

    def finish(self) -> None:
        """End the backward. No more gradients will arrive."""
        while self._done < len(self._sequence):
            self._next()

    def _next(self) -> None:
        index = self._sequence[self._done]
        self._done += 1
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
        self._learned: list[tuple[str, bool]] | None = None
        self._taken: list[tuple[str, bool]] = []
        self._followed = False
        for name, module in modules.items():
            module.register_forward_pre_hook(lambda *_, name=name: self._come(name, False), prepend=True)
            module.register_forward_hook(lambda *args, name=name: self._watch(name, args[-1]), prepend=True)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Context for the forward and backward of a micro batch.

        Raises:
            RapidformerError: it skipped a module. The error names the parameters.
        """
        self._followed, self._taken = True, []
        try:
            yield
        finally:
            self._followed = False
        if self._learned is None:
            self._compare(None)
            self._learned = self._taken
        elif len(self._taken) < len(self._learned):
            raise self._left(self._learned[len(self._taken)][0])

    def _come(self, name: str, backward: bool) -> None:
        if not self._followed:
            return
        index, here = len(self._taken), (name, backward)
        self._taken.append(here)
        if self._learned is None:
            self._compare(here)
        elif self._learned[index : index + 1] != [here]:
            raise self._left(self._learned[index][0] if index < len(self._learned) else name)

    def _watch(self, name: str, output: Any) -> None:
        """Detect that the backward reaches a module, at the first gradient of its outputs."""
        if not self._followed:
            return
        waiting = True

        def see(gradient: Any) -> None:
            nonlocal waiting
            if waiting and self._followed:
                waiting = False
                self._come(name, True)

        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        for leaf in leaves:
            leaf.register_hook(see)

    def forward_done(self, missing: Sequence[str] | None = None) -> None:
        """Check for skipped modules between forward and backward of the first micro batch.

        Args:
            missing: names of trained parameters that the loss does not use, if this is known more precisely than from
                the modules that were called.
        """
        if self._learned is not None:
            return
        self._compare(None)
        if missing is None:
            left = [name for name in self._parameters if (name, False) not in self._taken]
            missing = [parameter for name in left for parameter in self._parameters[name]]
        for rank, names in enumerate(self._workers.gather(list(missing))):
            if names:
                raise self._refusal(names, f" (worker {rank})")

    @property
    def is_known(self) -> bool:
        """Whether the first micro batch has defined the sequence."""
        return self._learned is not None

    def _compare(self, here: tuple[str, bool] | None) -> None:
        """Check that all workers are at the same module. None is the end of a forward or a backward."""
        if self._workers.agree(0 if here is None else 1 + 2 * self._indices[here[0]] + here[1]):
            return
        indices = self._workers.gather(here)
        # The worker that is ahead has skipped the module of the other, which is the earlier one in a forward.
        earliest = min((there for there in indices if there), key=lambda there: self._indices[there[0]])
        ahead = next(rank for rank, there in enumerate(indices) if there != earliest)
        raise self._left(earliest[0], f" (worker {ahead})")

    def _left(self, name: str, who: str = "") -> RapidformerError:
        return self._refusal(self._parameters[name] or [name], who)

    def _refusal(self, names: Sequence[str], who: str = "") -> RapidformerError:
        return RapidformerError(
            f"a micro batch does not use all parameters: {', '.join(names[:6])}{who}",
            where=f"{self._where}, which gathers them on all workers at the same time",
            hint="let every batch use the whole model, or partition its states with SDP, ZeRO-1 or ZeRO-2",
        )
