"""Modules that stand where another pipeline stage has the real one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Absent:
    """How the output of a module follows from the shape of its input, if it does so simply.

    Attributes:
        kind: ``same`` shape, ``last`` dimension replaced, one ``appended``, or None where nobody knows.
        width: of the last dimension.
        dtype: of the output.
    """

    kind: str | None = None
    width: int = 0
    dtype: torch.dtype | None = None

    @classmethod
    def like(cls, args: Any, output: Any) -> Absent:
        """What a call has shown."""
        if not (args and isinstance(args[0], torch.Tensor) and isinstance(output, torch.Tensor)):
            return cls()
        given, made = tuple(args[0].shape), tuple(output.shape)
        if args[0].is_floating_point() and given == made:
            return cls("same", made[-1] if made else 0, output.dtype)
        if args[0].is_floating_point() and given[:-1] == made[:-1]:
            return cls("last", made[-1], output.dtype)
        if given == made[:-1]:
            return cls("appended", made[-1], output.dtype)
        return cls()

    def output(self, given: torch.Tensor) -> torch.Tensor:
        """Zeros of the shape that the module would put out."""
        if self.kind == "same":
            return given
        shape = given.shape if self.kind == "appended" else given.shape[:-1]
        return given.new_zeros((*shape, self.width), dtype=self.dtype)


class Elsewhere(nn.Module):
    """Stands for a module outside of the blocks; its output is never used, but its shape is."""

    def __init__(self, absent: Absent | None) -> None:
        super().__init__()
        self._absent = absent

    def forward(self, given: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert self._absent is not None, "a module after the blocks runs on the last stage alone"
        return self._absent.output(given)


class SkippedBlock(nn.Module):
    """Stands for a block of another stage: passes its input on.

    Args:
        form: entries of the tuple that a block returns; None for a tensor.
        block: the real one, whose plain attributes a model may read; it is not kept.
    """

    def __init__(self, form: int | None, block: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(facts_of(block))
        self._form = form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return hidden if self._form is None else (hidden, *[None] * (self._form - 1))


def facts_of(block: nn.Module) -> dict[str, Any]:
    """The plain attributes of a module, such as the kind of attention of a block."""
    public = {name: value for name, value in vars(block).items() if not name.startswith("_") and name != "training"}
    return {name: value for name, value in public.items() if value is None or isinstance(value, (str, int, float))}


def put(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Put a module in another one's place; what stood there."""
    parent, _, key = name.rpartition(".")
    holder = model.get_submodule(parent)
    before = holder._modules[key]
    assert before is not None
    holder._modules[key] = module
    return before


@contextmanager
def replaced(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Modules in the place of others, for a while."""
    before = {name: put(model, name, module) for name, module in modules.items()}
    try:
        yield
    finally:
        for name, module in before.items():
            put(model, name, module)
