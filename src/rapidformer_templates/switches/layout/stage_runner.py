"""How a hidden state enters and leaves the blocks of a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from rapidformer_templates.engines.assembly import Assembly
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.models.blocks import (
    BlockArguments,
    BlockOutput,
    SkippedBlock,
    hidden_of,
    replaced,
    with_hidden,
)
from rapidformer_templates.switches.layout.tracing import (
    called_twice_error,
    not_called_error,
)

Result = TypeVar("Result")


class LeaveStage(BaseException):
    """Ends a model's forward after the last block of a stage.

    It is not an error, so ``except Exception`` ignores it.
    """

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__("the forward continues in the next stage")
        self.hidden = hidden


class StageRunner:
    """Runs the user's loss function through one local part of the model at a time.

    The first block of the part gets the hidden state of the previous stage. After the last block, the forward ends,
    unless the part has the end of the model: then the model's head and the loss follow. The model's own code recomputes
    everything around the blocks (masks, position tables) on each stage.

    Args:
        assembly: a model that ``cut_into_stages`` has cut.
        begins: whether the first local part has the beginning of the model.
        ends: whether the last local part has the end of the model.
    """

    def __init__(self, assembly: Assembly, *, begins: bool, ends: bool) -> None:
        model, placement = assembly.model, assembly.placement
        assert placement.parts is not None, "the model was not cut"
        self.model, self.parts, self._ends = model, placement.parts, ends
        self._begins, self._stands_in = begins, False
        self._blocks = placement.blocks
        self._skipped = {name: SkippedBlock(placement.form, block) for name, block in self._blocks.items()}
        self._first: nn.Module | None = None
        self._last: nn.Module | None = None
        self._hidden: torch.Tensor | None = None
        self._entered = 0
        self._missing = placement.blocks_in_all - len(self.parts[-1])
        if len(self.parts) > 1:
            _capture_outputs(model)  # while the model still has all blocks
        for block in self._blocks.values():
            block.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
            block.register_forward_hook(self._leave_stage)
        if ends:
            model.register_forward_hook(self._fill)

    def run(self, part: int, hidden: torch.Tensor | None, body: Callable[[], Result]) -> Result | torch.Tensor:
        """Return what ``body`` returns, or the hidden state with which it leaves the part.

        Args:
            part: index of the local part, from 0.
            hidden: the output of the previous stage. None at the beginning of the model.
            body: calls the model once.

        Raises:
            RapidformerError: the body did not call the model, or called it twice.
        """
        with self._open(part, hidden):
            try:
                result = body()
            except LeaveStage as leaving:
                return leaving.hidden
            if not self._entered or self._last is not None:
                raise not_called_error()
            return result

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Run a forward through all local blocks inside the context, with zeros in place of another stage's output."""
        self._stands_in = not self._begins and torch.is_grad_enabled()
        with self._open(None, None):
            try:
                yield
            except LeaveStage:
                return
            finally:
                self._stands_in = False

    @contextmanager
    def _open(self, part: int | None, hidden: torch.Tensor | None) -> Iterator[None]:
        blocks = self._blocks if part is None else self.parts[part]
        chosen = list(blocks.values())
        others = {name: module for name, module in self._skipped.items() if name not in blocks}
        self._first, self._hidden, self._entered = chosen[0], hidden, 0
        at_end = self._ends and part in (None, len(self.parts) - 1)
        self._last = None if at_end else chosen[-1]
        try:
            with replaced(self.model, others) if others else nullcontext():
                yield
        finally:
            self._first = self._last = self._hidden = None

    def _enter(self, block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> BlockArguments | None:
        if block is not self._first:
            return None
        self._entered += 1
        if self._entered > 1:
            raise called_twice_error()
        hidden_state = hidden_of(args, kwargs)
        if self._hidden is None:
            # Like the real output of another stage, its replacement requires a gradient, so that a graph is built for
            # both.
            return with_hidden(args, kwargs, hidden_state.detach().requires_grad_()) if self._stands_in else None
        if hidden_state.shape != self._hidden.shape:
            raise RapidformerError(
                f"a hidden state of shape {tuple(self._hidden.shape)} arrived, but the batch makes "
                f"{tuple(hidden_state.shape)}",
                where="compute_loss(model, batch)",
                hint="the hook must give every stage the same inputs: draw no random numbers before the model",
            )
        return with_hidden(args, kwargs, self._hidden)

    def _leave_stage(self, block: nn.Module, args: object, output: BlockOutput) -> None:
        if block is self._last:
            raise LeaveStage(output[0] if isinstance(output, tuple) else output)

    def _fill(self, model: nn.Module, args: object, output: Any) -> object:
        """Put hidden states and attentions at their places in the whole model. The entries of other stages are None."""
        for name in ("hidden_states", "attentions"):
            states = getattr(output, name, None)
            if self._first is not None and isinstance(states, tuple) and states:
                output[name] = (None,) * self._missing + states
        return output


def _capture_outputs(model: nn.Module) -> None:
    """Let transformers install its hooks for hidden states now. Later, it would miss the hidden blocks."""
    try:
        from transformers import PreTrainedModel
        from transformers.utils.output_capturing import maybe_install_capturing_hooks
    except ImportError:  # these versions collect hidden states in the model's own forward
        return
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            maybe_install_capturing_hooks(module)
