"""Remembered results of operations on fake tensors equal the results of torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from rapidformer_templates.switches.auto_strategy import fake_kernels, tracing
from rapidformer_templates.switches.auto_strategy.model_shapes import Variant
from rapidformer_templates.switches.auto_strategy.stand_ins import fake_tensors
from tests.support.model_shapes import shapes

aten = torch.ops.aten
OPERATIONS = {
    "a view": (aten.view.default, lambda x: ([x, [2, 12]], {})),
    "a part": (aten.slice.Tensor, lambda x: ([x, 0, 1, 3], {})),
    "a part of a part": (aten.slice.Tensor, lambda x: ([x[1:], 0, 1, 3], {})),
    "a part of another part": (aten.slice.Tensor, lambda x: ([x[:3], 0, 1, 3], {})),
    "a transposed copy": (aten.clone.default, lambda x: ([x.t()], {})),
    "a copy of the same shape": (aten.clone.default, lambda x: ([x.view(6, 4)], {})),
    "a view that is none": (aten._unsafe_view.default, lambda x: ([x, [24]], {})),
    "several parts": (aten.split.Tensor, lambda x: ([x, 2], {})),
    "two results": (aten.max.dim, lambda x: ([x, 0], {})),
    "a transposed result": (aten.add.Tensor, lambda x: ([x.t(), x.t()], {})),
    "a broadcast operand": (aten.mul.Tensor, lambda x: ([x.expand(3, 4, 6), x], {})),
    "another type": (aten._to_copy.default, lambda x: ([x], {"dtype": torch.bfloat16})),
    "a list": (aten.cat.default, lambda x: ([[x, x, x]], {})),
    "a whole number": (aten.mul.Scalar, lambda x: ([x.int(), 2], {})),
    "the same number with a point": (aten.mul.Scalar, lambda x: ([x.int(), 2.0], {})),
    "in place": (aten.add_.Tensor, lambda x: ([x, x], {})),
    "into a given tensor": (aten.mul.out, lambda x: ([x, x], {"out": x.clone()})),
}


def _facts(results: object, inputs: list[object]) -> list[object]:
    """Return the form of each result, and which of the inputs has its storage."""
    return [
        (
            result.dtype,
            result.shape,
            result.stride(),
            result.storage_offset(),
            result.device,
            result.untyped_storage().nbytes(),
            [isinstance(x, torch.Tensor) and x.untyped_storage() is result.untyped_storage() for x in inputs],
            [x is result for x in inputs],
        )
        for result in (results if isinstance(results, (tuple, list)) else [results])
        if isinstance(result, FakeTensor)
    ]


@pytest.mark.parametrize(("func", "arguments"), OPERATIONS.values(), ids=OPERATIONS)
def test_a_remembered_result_is_that_of_torch(
    func: torch._ops.OpOverload, arguments: Callable[[torch.Tensor], tuple[list[object], dict[str, object]]]
) -> None:
    with fake_tensors():
        args, kwargs = arguments(torch.empty(4, 6))
        expected = func(*args, **kwargs)
        first, again = (fake_kernels.run(func, args, kwargs) for _ in range(2))
    assert _facts(first, args) == _facts(again, args) == _facts(expected, args)
    assert type(again) is type(expected)


@pytest.mark.parametrize(
    "variant",
    [Variant(2, precision="bf16", weights="masters"), Variant(4, "selective", tensor=2, sequence_parallel=True)],
    ids=["masters", "tensor parallel"],
)
def test_a_trace_does_not_depend_on_what_is_remembered(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes("llama")._trace([variant])
    (remembered := shapes("llama"))._trace([variant])
    with monkeypatch.context() as patch:
        patch.setattr(tracing, "run", lambda func, args, kwargs: func(*args, **kwargs))
        (plain := shapes("llama"))._trace([variant])
    assert remembered._traces == plain._traces
