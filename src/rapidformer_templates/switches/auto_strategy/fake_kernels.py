"""Run operations on fake tensors, and remember the form of each result.

An equal operation later needs no kernel. torch has such a cache, too, but making its keys takes most of a trace's time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

_DEVICE = torch.ops.prim.device.default


class _Form(NamedTuple):
    """Everything that one result of an operation has.

    Attributes:
        shares: index of the input whose storage it shares. None: it has a new storage.
    """

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    device: torch.device
    shares: int | None


_FORMS: dict[Hashable, list[_Form]] = {}
"""The results of an operation, by the operation and the forms of its arguments."""


def run(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, object]) -> object:
    """Return the result of ``func(*args, **kwargs)``. Some arguments are fake tensors."""
    if func is _DEVICE and type(args[0]) is FakeTensor:  # autograd asks for it twice per operation
        device: torch.device = args[0].fake_device
        return device
    inputs = list(_tensors(args))
    if not inputs or not all(map(_is_plain, inputs)) or func.namespace != "aten" or func._schema.is_mutable:
        return func(*args, **kwargs)
    key = (func, _key_of(args), _key_of(tuple(kwargs.items())))
    if forms := _FORMS.get(key):
        copies = _make(forms, inputs)
        return tuple(copies) if len(copies) > 1 else copies[0]
    result = func(*args, **kwargs)
    results = result if isinstance(result, tuple) and len(result) > 1 else (result,)
    if all(map(_is_plain, results)):
        _remember(key, results, inputs)
    return result


def _is_plain(value: Any) -> bool:
    return type(value) is FakeTensor and value.constant is None and value.layout is torch.strided


def _tensors(values: Sequence[Any]) -> Iterator[Any]:
    """Yield all tensors of an operation's positional arguments."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _key_of(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.storage_offset()
    if isinstance(value, (list, tuple)):
        return tuple([_key_of(each) for each in value])
    return type(value), value  # 1, 1.0 and True are equal, but their results are not


def _make(forms: Sequence[_Form], inputs: Sequence[FakeTensor]) -> list[FakeTensor]:
    mode = inputs[0].fake_mode
    storages = [None if form.shares is None else inputs[form.shares].untyped_storage() for form in forms]
    with in_kernel_invocation_manager(mode):
        tensors = [
            torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")
            if storage is None
            else torch.empty(0, dtype=form.dtype, device="meta").set_(storage, form.offset, form.shape, form.stride)
            for form, storage in zip(forms, storages, strict=True)
        ]
    return [FakeTensor(mode, tensor, form.device) for tensor, form in zip(tensors, forms, strict=True)]


def _remember(key: Hashable, results: Sequence[FakeTensor], inputs: Sequence[FakeTensor]) -> None:
    """Remember results that :func:`_make` reproduces."""
    storages = [tensor.untyped_storage() for tensor in inputs]
    forms = []
    for result in results:
        shares = next((number for number, other in enumerate(storages) if other is result.untyped_storage()), None)
        sizes = (result.dtype, result.shape, result.stride(), int(result.storage_offset()))
        forms.append(_Form(*sizes, result.fake_device, shares))
    copies = _make(forms, inputs)
    if all(_facts_of(one) == _facts_of(other) for one, other in zip(copies, results, strict=True)):
        _FORMS[key] = forms


def _facts_of(tensor: FakeTensor) -> tuple[object, ...]:
    return tensor.untyped_storage().nbytes(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()
