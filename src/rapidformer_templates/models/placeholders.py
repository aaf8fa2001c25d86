"""Placeholders for modules that another pipeline stage has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from rapidformer_templates.errors import ModelError


@dataclass(frozen=True)
class OutputShape:
    """How the output shape of a module follows from its input shape, if there is a simple rule.

    Attributes:
        kind: ``same`` shape, ``last`` dimension replaced, one dimension ``appended``, or None if unknown.
        width: size of the last dimension.
        dtype: dtype of the output.
    """

    kind: str | None = None
    width: int = 0
    dtype: torch.dtype | None = None

    @classmethod
    def like(cls, args: Sequence[object], output: object) -> OutputShape:
        """Derive the rule from an observed call."""
        if not (args and isinstance(args[0], torch.Tensor) and isinstance(output, torch.Tensor)):
            return cls()
        input_shape, output_shape = tuple(args[0].shape), tuple(output.shape)
        if args[0].is_floating_point() and input_shape == output_shape:
            return cls("same", output_shape[-1] if output_shape else 0, output.dtype)
        if args[0].is_floating_point() and input_shape[:-1] == output_shape[:-1]:
            return cls("last", output_shape[-1], output.dtype)
        if input_shape == output_shape[:-1]:
            return cls("appended", output_shape[-1], output.dtype)
        return cls()

    def output(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the shape of the module's output. Its values do not matter."""
        if self.kind == "same":
            return like
        shape = like.shape if self.kind == "appended" else like.shape[:-1]
        return like.new_zeros((*shape, self.width), dtype=self.dtype)


class AbsentAttribute(ModelError, AttributeError):
    """A forward reads an attribute of a module that another pipeline stage has. ``hasattr`` is false for it."""


class Placeholder(nn.Module):
    """Base of the modules that replace one of another pipeline stage."""

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        """Look up a parameter, buffer or submodule.

        Raises:
            AbsentAttribute: there is none of this name.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AbsentAttribute(
                f"the model's forward reads {name!r} of a module that another pipeline stage has",
                hint="train this model without pipeline parallelism",
            ) from None


class AbsentModule(Placeholder):
    """Placeholder for a module outside of the blocks. Its output values are never used, only their shape."""

    def __init__(self, absent: OutputShape | None) -> None:
        super().__init__()
        self._absent = absent

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        assert self._absent is not None, "a module after the blocks runs on the last stage alone"
        return self._absent.output(x)


class SkippedBlock(Placeholder):
    """Placeholder for a block of another stage. It returns its input.

    Args:
        form: number of entries in the tuple that a block returns. None for a tensor.
        block: the real block. Its plain attributes are copied, because a model may read them.
    """

    def __init__(self, form: int | None, block: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(facts_of(block))
        self._form = form

    def forward(self, *args: object, **kwargs: object) -> object:
        hidden = args[0] if args else kwargs["hidden_states"]
        return hidden if self._form is None else (hidden, *[None] * (self._form - 1))


def facts_of(block: nn.Module) -> dict[str, str | int | float | None]:
    """Return the plain attributes of a module and of its class, such as the attention type of a block."""
    classes = [kind for kind in reversed(type(block).__mro__) if kind not in nn.Module.__mro__]
    attributes = {name: value for place in (*classes, block) for name, value in vars(place).items()}
    public = {name: value for name, value in attributes.items() if not name.startswith("_") and name != "training"}
    return {name: value for name, value in public.items() if value is None or isinstance(value, (str, int, float))}


def put(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Replace a module and return the previous one."""
    parent, _, key = name.rpartition(".")
    holder = model.get_submodule(parent)
    before = holder._modules[key]
    assert before is not None
    holder._modules[key] = module
    return before


@contextmanager
def replaced(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Replace modules inside the context."""
    before = {name: put(model, name, module) for name, module in modules.items()}
    try:
        yield
    finally:
        for name, module in before.items():
            put(model, name, module)
