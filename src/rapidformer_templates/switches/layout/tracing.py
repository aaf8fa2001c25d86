"""Trace how a model's forward uses its blocks: what runs before them, after them, and around them.

The user's loss is computed once, for one sample, with every block except the first left out. So the result is valid for
any model and any hook, and costs little compared with a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from rapidformer_templates.engines.backwards import Derivatives, checked_backwards, reached_parameters
from rapidformer_templates.errors import ModelError, RapidformerError
from rapidformer_templates.models.blocks import (
    HIDDEN,
    BlockArguments,
    OutputShape,
    Placeholder,
    facts_of,
    hidden_of,
    in_form,
    replaced,
    with_hidden,
)

BEFORE, WITHIN, AFTER = "before", "within", "after"
NO_DERIVATIVES = Derivatives(0, "--pipeline-model-parallel-size")  # a stage has its part of the graph


@dataclass
class Flow:
    """The result of tracing one forward.

    Attributes:
        called: the phases in which each module outside of the blocks was called, by name. Only modules that directly
            have parameters are listed. Modules that were never called or that contain the blocks are not listed.
        absent: a replacement for each such module, for stages where only the shape of its output matters.
        side_inputs: ids of the parameters that affect a block other than through its hidden state.
        beyond: ids of the parameters outside of the blocks that the loss reaches other than through the blocks.
        form: number of entries in the tuple that a block returns. None if it returns a tensor.
    """

    called: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    absent: dict[str, OutputShape] = field(default_factory=dict)
    side_inputs: set[int] = field(default_factory=set)
    beyond: set[int] = field(default_factory=set)
    form: int | None = None


def trace(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    compute_loss: Callable[[nn.Module], torch.Tensor | tuple[torch.Tensor, object]],
) -> Flow:
    """Run ``compute_loss(model)`` once and record how it uses the blocks.

    Raises:
        ModelError: the model cannot be cut between its blocks. They do not run once each in their order, something is
            computed between them, or the loss uses their side outputs.
        RapidformerError: the hook calls the model more than once, or not at all.
    """
    recorder = _FlowRecorder(blocks)
    frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]
    inside = {id(module) for block in blocks.values() for module in block.modules()}
    around = holders(model, blocks)
    with ExitStack() as stack, torch.enable_grad():
        stack.enter_context(torch.random.fork_rng())
        for name, module in model.named_modules():
            is_outside = id(module) not in inside and name not in around
            if is_outside and next(module.parameters(recurse=False), None) is not None:
                stack.callback(module.register_forward_hook(recorder.outside(name)).remove)
        (_, first), *others = blocks.items()
        stack.callback(first.register_forward_pre_hook(recorder.enter, with_kwargs=True, prepend=True).remove)
        # Before transformers' own hooks, which may read the hidden states that the loss receives.
        stack.callback(first.register_forward_hook(recorder.leave_first, prepend=True).remove)
        stack.callback(model.register_forward_hook(recorder.fill).remove)
        marks = [module for module in model.modules() if not getattr(module, _MARK, False)]
        stack.callback(_remove_new_hooks, {m: list(m._forward_hooks) for m in model.modules()}, marks)
        stack.enter_context(replaced(model, {name: _SkippedForward(recorder, name, block) for name, block in others}))
        for parameter in frozen:  # so that the graph shows where they are used
            stack.callback(parameter.requires_grad_(True).requires_grad_, False)
        with checked_backwards(model.parameters, NO_DERIVATIVES):
            loss = compute_loss(model)
    recorder.check_complete()
    of_loss = set(map(id, reached_parameters(loss[0] if isinstance(loss, tuple) else loss)))
    of_blocks = {id(p): name for name, block in blocks.items() for p in block.parameters()}
    if used := of_loss & of_blocks.keys():
        raise ModelError(
            f"the loss uses more of a block than the hidden state that it passes on ({of_blocks[min(used)]})",
            where=type(model).__name__,
            hint="under a pipeline the last stage has its own blocks only: leave such a term out (a penalty on "
            "weights, the balancing loss of experts, attention weights), or --pipeline-model-parallel-size",
        )
    recorder.flow.beyond = of_loss
    return recorder.flow


def _remove_new_hooks(before: Mapping[nn.Module, Sequence[int]], marks: Sequence[nn.Module]) -> None:
    """Remove the hooks that transformers has installed because hidden states were requested for the first time."""
    for module, old_hooks in before.items():
        for key in [key for key in module._forward_hooks if key not in old_hooks]:
            del module._forward_hooks[key]
    for module in marks:
        if getattr(module, _MARK, False):
            setattr(module, _MARK, False)


_MARK = "_output_capturing_hooks_installed"


def holders(model: nn.Module, blocks: Mapping[str, nn.Module]) -> set[str]:
    """Return the names of the modules that contain the blocks."""
    parts = [name.split(".") for name in blocks]
    return {".".join(name[:depth]) for name in parts for depth in range(len(name))}


class _FlowRecorder:
    """Records one forward."""

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self.flow = Flow()
        self.names = list(blocks)
        self.called_blocks = 0  # number of blocks that have been called
        self.hidden: torch.Tensor | None = None  # the output of the last called block
        self.side_outputs: list[torch.Tensor] = []  # the side outputs of the first block

    @property
    def phase(self) -> str:
        return BEFORE if self.called_blocks == 0 else AFTER if self.called_blocks == len(self.names) else WITHIN

    def outside(self, name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            self.flow.called[name].add(self.phase)
            shape = OutputShape.like(args, output)
            if name in self.flow.absent and self.flow.absent[name] != shape:
                shape = OutputShape()
            self.flow.absent[name] = shape

        return record

    def enter(self, block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> BlockArguments:
        if self.called_blocks:
            raise called_twice_error()
        self.called_blocks = 1
        self._record_side_inputs(args[1:], kwargs)
        # Detach it, so that the loss shows only what bypasses the blocks.
        return with_hidden(args, kwargs, hidden_of(args, kwargs).detach().requires_grad_())

    def leave_first(self, block: nn.Module, args: object, output: object) -> object:
        entries = output if isinstance(output, tuple) else (output,)
        if not isinstance(entries[0], torch.Tensor):
            message = f"{type(block).__name__} does not return the hidden state first"
            hint = "a pipeline sends one tensor from block to block: let the block return it, or a tuple with it"
            raise ModelError(message, where=self.names[0], hint=hint)
        self.flow.form = len(output) if isinstance(output, tuple) else None
        self.hidden = entries[0].detach().requires_grad_()
        self.side_outputs = [leaf for leaf in tree_leaves(entries[1:]) if isinstance(leaf, torch.Tensor)]
        return (self.hidden, *entries[1:]) if isinstance(output, tuple) else self.hidden

    def skip(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        is_next = self.called_blocks < len(self.names) and self.names[self.called_blocks] == name
        if is_next and hidden_of(args, kwargs) is self.hidden:
            self.called_blocks += 1
            self._record_side_inputs(args[1:], kwargs)
            return in_form(self.hidden, self.flow.form)
        if self.called_blocks == len(self.names):
            raise called_twice_error()
        raise ModelError(
            f"the model does not hand the hidden state straight from {self.names[self.called_blocks - 1]} to {name}",
            where=name,
            hint="a pipeline can only be cut where one block's output is the next one's input, and encoder-decoder "
            "models have two runs of blocks: leave --pipeline-model-parallel-size out",
        )

    def fill(self, model: nn.Module, args: object, output: Any) -> object:
        """Return as many hidden states to the hook as the whole model has."""
        for name, extra in (("hidden_states", 1), ("attentions", 0)):
            states = getattr(output, name, None)
            if isinstance(states, tuple) and states:
                output[name] = (states[0],) * (len(self.names) + extra - len(states)) + states
        return output

    def _record_side_inputs(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        for leaf in tree_leaves((args, {k: v for k, v in kwargs.items() if k != HIDDEN})):
            if any(leaf is output for output in self.side_outputs):
                message = "the first block makes more than the hidden state for the other blocks"
                hint = "a pipeline sends one tensor from block to block: leave --pipeline-model-parallel-size out"
                raise ModelError(message, where=self.names[0], hint=hint)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                self.flow.side_inputs |= set(map(id, reached_parameters(leaf)))

    def check_complete(self) -> None:
        if self.called_blocks == 0:
            raise not_called_error()
        if self.called_blocks < len(self.names):
            message = f"the forward uses {self.called_blocks} of {len(self.names)} blocks"
            raise ModelError(message, where=self.names[self.called_blocks])


class _SkippedForward(Placeholder):
    """Replaces a block while the forward is traced."""

    def __init__(self, recorder: _FlowRecorder, name: str, block: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(facts_of(block))
        self._skip, self._name_in_model = recorder.skip, name

    def forward(self, *args: object, **kwargs: object) -> object:
        return self._skip(self._name_in_model, args, kwargs)


def not_called_error() -> RapidformerError:
    """Return the error for a hook that does not call the model."""
    message = "compute_loss did not call the model"
    hint = "a pipeline needs the hook to call the model exactly once"
    return RapidformerError(message, where="compute_loss(model, batch)", hint=hint)


def called_twice_error() -> RapidformerError:
    """Return the error for a hook that calls the model again."""
    return RapidformerError(
        "compute_loss called the model twice, or the model called its blocks twice",
        where="compute_loss(model, batch)",
        hint="under a pipeline the model runs once per micro batch: put both inputs into one batch, or leave "
        "--pipeline-model-parallel-size out",
    )
