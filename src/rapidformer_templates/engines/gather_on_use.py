"""See which operations use the parameters of a model that is built in shares, and gather these parameters first.

Operations are seen below autograd, by ``TorchDispatchMode``, so a backward gathers what it reads as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rapidformer_templates.engines.construction import ModelUnderConstruction
from rapidformer_templates.models.weight_files import tensors_read_by, tensors_read_one_by_one
from rapidformer_templates.system.process_state import freed_memory_given_back
from rapidformer_templates.system.tensor_files import parameters_seen_by

_aten = torch.ops.aten
OVERWRITES = frozenset({
    _aten.zero_, _aten.fill_, _aten.copy_, _aten.normal_, _aten.uniform_, _aten.random_, _aten.bernoulli_,
    _aten.exponential_,
})  # fmt: skip
"""Operations that write all of their first argument without reading it."""

_Tensor: Any = torch.Tensor
DIRECT_ACCESS = frozenset({
    _Tensor.numpy, _Tensor.__array__, _Tensor.tolist, _Tensor.data_ptr, _Tensor.untyped_storage, _Tensor.__deepcopy__,
    _Tensor.__reduce_ex__,
})  # fmt: skip
"""Methods that reach the memory of a tensor without an operation."""


@contextmanager
def divided_construction(model: ModelUnderConstruction) -> Iterator[None]:
    """Divide the parameters of all modules that are built or changed inside this context."""

    def add(parameter: nn.Parameter) -> None:
        if not model.is_paused:
            with model.paused(), torch.no_grad():
                model.add(parameter)

    with (
        freed_memory_given_back(),
        tensors_read_one_by_one(),
        tensors_read_by(model.from_file),
        parameters_seen_by(add),
        _DirectAccess(model),
        _Operations(model),
    ):
        yield


class _Operations(TorchDispatchMode):
    """Gathers what an operation reads or writes."""

    def __init__(self, model: ModelUnderConstruction) -> None:
        super().__init__()
        self.model = model

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, model = kwargs or {}, self.model
        if model.is_paused:
            return func(*args, **kwargs)
        tensors = _tensors_in((*args, *kwargs.values()))
        if not any(map(model.find, tensors)):
            with torch._C.DisableTorchFunction():  # the modes for functions have already seen the call
                return func(*args, **kwargs)
        with model.paused():
            divided = self._without_exchange(func, args, kwargs)
            if divided is not None:
                return divided
            aliases = [returned.alias_info for returned in func._schema.returns]
            if aliases and all(alias is not None and not alias.is_write for alias in aliases):  # it only returns views
                return self._view(func, args, kwargs, tensors)
            if func.overloadpacket in OVERWRITES and model.overwrite(args[0]):
                model.use(tensors)  # the source of a copy
            else:
                model.use(tensors, written=list(_written(func, args, kwargs)))
            return func(*args, **kwargs)

    def _without_exchange(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """Return the divided result of an operation on shares or on files alone, or None for other operations."""
        if func is _aten._to_copy.default:
            dtype, device, layout = (kwargs.get(name) for name in ("dtype", "device", "layout"))
            stays = device in (None, torch.device("cpu")) and layout in (None, torch.strided)
            return self.model.cast(args[0], dtype) if stays and dtype is not None else None
        if func is _aten.copy_.default:
            return args[0] if self.model.copy(args[0], args[1]) else None
        if func in (_aten.cat.default, _aten.stack.default):
            tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
            shapes = [tensor.shape for tensor in tensors]
            if func is _aten.stack.default:
                dim %= len(shapes[0]) + 1
                shapes = [torch.Size((*shape[:dim], 1, *shape[dim:])) for shape in shapes]
            return self.model.join(tensors, shapes, dim % len(shapes[0]))
        return None

    def _view(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor]
    ) -> Any:
        """Make a view. It reads no values, but torch checks its bounds. Memory that nobody writes costs nothing."""
        divided = [storage for storage in self.model.storages_of(tensors) if not storage.is_whole]
        for storage in divided:
            storage.storage.resize_(storage.size)
        try:
            return func(*args, **kwargs)
        finally:
            for storage in divided:
                storage.storage.resize_(0)


class _DirectAccess(TorchFunctionMode):
    """Gathers a tensor whose memory is read without an operation."""

    def __init__(self, model: ModelUnderConstruction) -> None:
        super().__init__()
        self.model = model

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if func in DIRECT_ACCESS and not self.model.is_paused:
            with self.model.paused():
                tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
                self.model.use(tensors, written=tensors)  # it may be written as well
        return func(*args, **kwargs)


def _tensors_in(arguments: Iterable[object]) -> list[torch.Tensor]:
    """Return the tensors among the arguments of an operation. They are arguments or elements of lists."""
    tensors: list[torch.Tensor] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            tensors.append(argument)
        elif isinstance(argument, (list, tuple)):
            tensors += (element for element in argument if isinstance(element, torch.Tensor))
    return tensors


def _written(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[index] if index < len(args) else None)
            yield from _tensors_in([value])
