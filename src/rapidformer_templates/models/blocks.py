"""The blocks of a model, which of them a worker has, and placeholders for those of other pipeline stages.

Also the width of a model, and the full shapes and canonical names of its parameters, for all engines and switches.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rapidformer_templates.errors import ModelError

_WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_SHAPE = "_shape_of_numbers"

BlockArguments = tuple[tuple[object, ...], dict[str, object]]
"""The positional and keyword arguments of a block."""

BlockOutput = torch.Tensor | tuple[torch.Tensor, *tuple[object, ...]]
"""The output of a block: hidden states, or a tuple that begins with them."""


HIDDEN = "hidden_states"
"""The name of a block's input if transformers does not pass it as the first positional argument."""


def hidden_of(args: tuple[object, ...], kwargs: dict[str, object]) -> torch.Tensor:
    """Return the hidden state among a block's arguments."""
    hidden = args[0] if args else kwargs.get(HIDDEN)
    if not isinstance(hidden, torch.Tensor):
        message = "a block's first argument is not the hidden state"
        raise ModelError(message, hint="call the blocks with a tensor as first argument")
    return hidden


def with_hidden(args: tuple[object, ...], kwargs: dict[str, object], hidden: torch.Tensor) -> BlockArguments:
    """Return the arguments with another hidden state."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, HIDDEN: hidden})


def in_form(hidden: torch.Tensor, form: int | None) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
    """Return the output of a block that only passes on ``hidden``."""
    return hidden if form is None else (hidden, *[None] * (form - 1))


def canonical_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add.

    >>> canonical_name("module.h.0._checkpoint_wrapped_module.attn.weight")
    'h.0.attn.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the full shape, also for parameters that ZeRO-3 has partitioned or that are quantized."""
    return tuple(getattr(tensor, _SHAPE if is_quantized(tensor) else "ds_shape", tensor.shape))


def note_shape(codes: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Record the shape of the numbers that a tensor of quantized codes represents."""
    setattr(codes, _SHAPE, shape)


def is_quantized(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds quantized codes: bytes that represent numbers with fewer bits."""
    return hasattr(tensor, _SHAPE)


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of the full parameter, also if ZeRO-3 has partitioned it."""
    return math.prod(getattr(tensor, "ds_shape", tensor.shape)) * tensor.element_size()


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of ``model`` by name, in order.

    A transformers model names the classes that must not be split (``_no_split_modules``). Otherwise the blocks are the
    longest ``ModuleList`` or ``Sequential`` of modules of one class.
    """
    named = set(getattr(model, "_no_split_modules", None) or ())
    # FSDP puts its name in front of a class.
    named |= {f"FSDP{kind}" for kind in named}
    blocks = {name: module for name, module in model.named_modules() if type(module).__name__ in named}
    # An embedding may also be listed as unsplittable. Only blocks have a number as their name in a list.
    blocks = {name: module for name, module in blocks.items() if name.rsplit(".", 1)[-1].isdecimal()}
    if blocks:
        return blocks
    longest: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = {f"{name}.{key}" if name else key: child for key, child in module.named_children()}
        same_kind = len({type(child) for child in children.values()}) == 1
        has_parameters = all(next(child.parameters(), None) is not None for child in children.values())
        if same_kind and has_parameters and len(children) > max(1, len(longest)):
            longest = children
    return longest


def norms_with_statistics(model: nn.Module) -> list[nn.Module]:
    """Return the layers with running statistics of the batches, such as batch norms."""
    return [module for module in model.modules() if getattr(module, "track_running_stats", False)]


def tables_of(model: nn.Module) -> frozenset[str]:
    """Return names of parameters that are read by row or column: embeddings, and the head that scores the tokens."""
    get_head: object = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) or module is head]
    ids = {id(parameter) for table in tables for parameter in table.parameters(recurse=False)}
    return frozenset(canonical_name(name) for name, parameter in model.named_parameters() if id(parameter) in ids)


def width_of(model: nn.Module) -> int:
    """Return the width of ``model`` from its configuration, or else from its matrices.

    A transformers configuration has it as ``hidden_size``, as the largest of ``hidden_sizes``, or in its
    ``text_config`` [D]. For another model each matrix adds its number of elements to the counts of both of its
    dimensions. The size with the highest count is the width. A tie goes to the smaller size. This works because each
    matrix of a transformer maps from or to the width. A model without a matrix has the width 1.
    """
    config = getattr(model, "config", None)
    for one in (config, getattr(config, "text_config", None)):
        sizes = [getattr(one, "hidden_size", None), *(getattr(one, "hidden_sizes", None) or ())]
        widths = [size for size in sizes if isinstance(size, int) and size > 0]
        if widths:
            return max(widths)
    elements: Counter[int] = Counter()
    for rows, columns in (shape for shape in map(shape_of, model.parameters()) if len(shape) == 2):
        for size in {rows, columns}:
            elements[size] += rows * columns
    return max(elements, key=lambda size: (elements[size], -size), default=1)


@dataclass(frozen=True)
class Placement:
    """The parts of a pipeline stage. An undivided model has all of them under their own names.

    Attributes:
        names: whole-model canonical names of tensors that have another name here. A tied parameter is saved under its
            first name, which may belong to a module of another stage.
        stages: for tensors with several copies, the pipeline ranks that have one, by whole-model name.
        chunks: the local part of the pipeline (from 0) whose backward gives a parameter its gradient, by whole-model
            name. Parameters that are not listed may get one from any part.
        parts: the local blocks by name, for each local part. None for an undivided model.
        blocks_in_all: number of blocks in the whole model.
        form: number of entries in the tuple that a block returns. None if it returns a tensor.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    chunks: Mapping[str, int] = field(default_factory=dict)
    parts: tuple[Mapping[str, nn.Module], ...] | None = None
    blocks_in_all: int = 0
    form: int | None = None

    def whole_name(self, name: str) -> str:
        """Return the canonical name in the whole model."""
        return self.names.get(name, name)

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """All local blocks of a pipeline stage, by name."""
        return {name: block for part in self.parts or () for name, block in part.items()}


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
            message = f"the model's forward reads {name!r} of a module that another pipeline stage has"
            raise AbsentAttribute(message, hint="train this model without pipeline parallelism") from None


class AbsentModule(Placeholder):
    """Placeholder for a module outside of the blocks. Its output values are never used, only their shape."""

    def __init__(self, absent: OutputShape | None) -> None:
        super().__init__()
        self._absent = absent

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        assert self._absent is not None, "a module after the blocks runs on the last stage alone"
        return self._absent.output(x)


class SkippedBlock(Placeholder):
    """Placeholder for a block of another stage, or for one that is not needed. It returns its input.

    Args:
        form: number of entries in the tuple that a block returns. None for a tensor.
        block: the real block. Its plain attributes are copied, because a model may read them.
    """

    def __init__(self, form: int | None, block: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(facts_of(block))
        self.form = form

    def forward(self, *args: object, **kwargs: object) -> object:
        return in_form(hidden_of(args, kwargs), self.form)


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


class WrappedForward:
    """Replaces the forward of a module, and calls it.

    Attributes:
        forward: the forward that it replaces, which may wrap another one.
    """

    __call__: Callable[..., Any]

    def __init__(self, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Use evaluation mode inside the context. Afterwards each module has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def replaced(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Replace modules inside the context."""
    before = {name: put(model, name, module) for name, module in modules.items()}
    try:
        yield
    finally:
        for name, module in before.items():
            put(model, name, module)


@contextmanager
def first_blocks_only(model: nn.Module) -> Iterator[None]:
    """Skip all blocks inside the context except the first two of each kind.

    A forward then shows how a model uses its inputs, and takes little time even if the model is large. It needs two
    blocks, because a token may reach an earlier one through a third token (the prompts of cpmant).
    """
    groups: dict[tuple[str, tuple[type, ...]], list[str]] = {}
    blocks = find_blocks(model)
    for name, block in blocks.items():
        kind = name.rpartition(".")[0], tuple(type(module) for module in block.modules())
        groups.setdefault(kind, []).append(name)
    with ExitStack() as stack:
        for first, _, *others in (names for names in groups.values() if len(names) > 2):
            skipped = {name: SkippedBlock(None, blocks[name]) for name in others}
            hook = blocks[first].register_forward_hook(functools.partial(_take_form, list(skipped.values())))
            stack.callback(hook.remove)
            stack.enter_context(replaced(model, skipped))
        yield


def _take_form(skipped: Sequence[SkippedBlock], block: nn.Module, args: object, output: object) -> None:
    for other in skipped:
        other.form = len(output) if isinstance(output, tuple) else None
