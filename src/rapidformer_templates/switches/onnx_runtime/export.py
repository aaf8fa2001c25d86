"""Convert a graph of aten operators to ONNX with torch's exporter, and with translations that it lacks.

At each call, ``torch.onnx.export`` traces and decomposes a model and fills its table of operators again. Here,
AOTAutograd has already traced and decomposed the graph, so this module uses the exporter's inner functions.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from onnxscript import opset20
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymIntArgument,
    TensorArgument,
)
from torch.onnx import ONNXProgram
from torch.onnx._internal.exporter import _core, _decomp, _fx_passes, _registration
from torch.onnx.errors import OnnxExporterError
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

from rapidformer_templates.errors import ModelError

if TYPE_CHECKING:
    from sympy import Expr

aten = torch.ops.aten
op: Any = opset20  # its inputs may be numbers and lists, which its types do not show

ADVICE = "leave --onnx-runtime-training out, or write that part of the model with other operators"

OPSET = 20
"""The first opset with GELU as one operator."""

Operand = Any
"""A value of the ONNX graph. The exporter reads these annotations, and any narrower type would be a constraint."""

# ONNX for aten operators that torch's exporter lacks or splits into many small nodes. ONNX Runtime runs each
# element-wise node as a separate pass over memory, so the formulas below need few passes. Layer normalisation, softmax
# and GELU are single nodes in the forward.


def gelu(x: Operand, approximate: str = "none") -> Operand:
    """Return a single node. The exporter's version has five."""
    return op.Gelu(x, approximate=approximate)


def gelu_backward(grad: Operand, x: Operand, approximate: str = "none") -> Operand:
    """Return ``grad · d gelu(x)/dx`` for ``gelu(x) = x Φ(x)`` or its tanh approximation."""
    if approximate == "tanh":
        # gelu(x) = ½ x (1 + tanh u), u = a (x + b x³): its slope is ½ (1 + tanh u + x (1 − tanh² u) u').
        a, b = math.sqrt(2.0 / math.pi), 0.044715
        square = op.Mul(x, x)
        tanh = op.Tanh(op.Mul(x, op.Add(op.Mul(square, a * b), a)))
        slope = op.Add(op.Mul(square, 3.0 * a * b), a)
        rise = op.Mul(op.Mul(x, slope), op.Sub(1.0, op.Mul(tanh, tanh)))
        return op.Mul(grad, op.Mul(op.Add(op.Add(tanh, rise), 1.0), 0.5))
    # With t = x/√2: Φ(x) + x φ(x) = ½ (1 + erf t + 2/√π · t exp(−t²)).
    t = op.Mul(x, math.sqrt(0.5))
    bell = op.Exp(op.Sub(math.log(2.0 / math.sqrt(math.pi)), op.Mul(t, t)))
    twice = op.Add(op.Add(op.Erf(t), op.Mul(t, bell)), 1.0)
    return op.Mul(op.Mul(grad, 0.5), twice)


def layer_norm_backward(
    grad: Operand,
    x: Operand,
    normalized_shape: Sequence[int],
    mean: Operand,
    rstd: Operand,
    weight: Operand,
    bias: Operand,
    output_mask: Sequence[bool],
) -> tuple[Operand, Operand, Operand]:
    """Return the gradients of layer normalisation by input, weight and bias. Gradients not requested are placeholders.

    With x̂ = (x − mean) · rstd and g = grad · weight, dx = rstd (g − mean(g) − x̂ mean(g x̂)).
    """
    inner = list(range(-len(normalized_shape), 0))
    outer = list(range(len(x.shape) - len(normalized_shape)))
    normal = op.Mul(op.Sub(x, mean), rstd)
    along = op.Mul(grad, normal)
    of_input, of_weight, of_bias = (op.Identity(mean) for _ in range(3))  # the exporter needs a value for each
    if output_mask[0]:
        scaled, scaled_along = (grad, along) if weight is None else (op.Mul(grad, weight), op.Mul(along, weight))
        level, tilt = op.ReduceMean(scaled, inner), op.ReduceMean(scaled_along, inner)
        of_input = op.Mul(op.Sub(scaled, op.Add(op.Mul(normal, tilt), level)), rstd)
    if output_mask[1]:
        of_weight = op.ReduceSum(along, outer, keepdims=0)
    if output_mask[2]:
        of_bias = op.ReduceSum(grad, outer, keepdims=0)
    return of_input, of_weight, of_bias


def safe_softmax(x: Operand, dim: int, dtype: int = -1) -> Operand:
    """Softmax in which a row of only −∞ (every key is masked) becomes zero instead of 0/0."""
    probabilities = op.Softmax(x, axis=dim)
    return op.Where(op.IsNaN(probabilities), 0.0, probabilities)


def softmax_backward(grad: Operand, output: Operand, dim: int, input_dtype: int) -> Operand:
    """Return ``y g − y Σ y g``."""
    share = op.Mul(grad, output)
    return op.Sub(share, op.Mul(output, op.ReduceSum(share, [dim])))


def split(x: Operand, size: int, dim: int = 0) -> Sequence[Operand]:
    """Split into pieces of ``size`` along ``dim``. The last may be smaller."""
    length = x.shape[dim]
    return split_with_sizes(x, [min(size, length - start) for start in range(0, length, size)], dim)


def split_with_sizes(x: Operand, sizes: Sequence[int], dim: int = 0) -> Sequence[Operand]:
    """Split into pieces of ``sizes`` along ``dim``.

    The exporter's version makes a sequence and copies each piece from it.
    """
    if len(set(sizes)) == 1 and len(sizes) > 1:
        return op.Split(x, axis=dim, num_outputs=len(sizes))
    return [op.Slice(x, [start], [end], [dim]) for start, end in pairwise(accumulate(sizes, initial=0))]


TRANSLATIONS: Mapping[OpOverload, Callable[..., Operand]] = {
    aten.gelu.default: gelu,
    aten.gelu_backward.default: gelu_backward,
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten._safe_softmax.default: safe_softmax,
    aten._softmax_backward_data.default: softmax_backward,
    aten.split.Tensor: split,
    aten.split_with_sizes.default: split_with_sizes,
}
"""ONNX functions by aten operator, in addition to those of torch's exporter."""


# Operators that are written in another way before the export.


def dropout_noise(like: torch.Tensor, rate: float) -> torch.Tensor:
    """Return 1/(1 − rate) with probability 1 − rate, else 0, drawn in the same way as eager dropout on a CPU."""
    noise = torch.empty_like(like).bernoulli_(1.0 - rate)
    return noise.div_(1.0 - rate) if rate < 1.0 else noise


def take_out_dropout(module: fx.GraphModule) -> None:
    """Write each dropout as a product with :func:`dropout_noise`, and its backward likewise.

    The noise depends only on the shape of its input, so torch's generator can draw it before the graph runs.
    """
    graph = module.graph
    for node in list(graph.find_nodes(op="call_function", target=aten.native_dropout.default)):
        value, rate = node.args[:2]
        with graph.inserting_before(node):
            noise = graph.call_function(dropout_noise, (value, rate))
            product = graph.call_function(aten.mul.Tensor, (value, noise))
        noise.meta = {**node.meta, "val": torch.empty_like(value.meta["val"])}
        product.meta = {**node.meta, "val": torch.empty_like(value.meta["val"])}
        for item in list(node.users):
            if item.args[1] == 0:
                item.replace_all_uses_with(product)
            else:
                for user in list(item.users):
                    if user.target is aten.native_dropout_backward.default:
                        user.target, user.args = aten.mul.Tensor, (user.args[0], noise)
                if item.users:
                    with graph.inserting_after(noise):
                        is_kept = graph.call_function(aten.ne.Scalar, (noise, 0))
                    is_kept.meta = dict(item.meta)
                    item.replace_all_uses_with(is_kept)
            graph.erase_node(item)
        graph.erase_node(node)
    module.recompile()


def take_out_idle_expansions(graph: fx.Graph) -> None:
    """Remove expansions to the tensor's own shape. In ONNX they are copies if the shape is known only at run time."""
    for node in graph.find_nodes(op="call_function", target=aten.expand.default):
        source = node.args[0]
        if tuple(map(str, source.meta["val"].shape)) == tuple(map(str, node.meta["val"].shape)):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


# The export.

GraphInput = torch.Tensor | int
"""An input of a graph. Sizes of graphs with dynamic shapes are numbers."""

Sizes = Callable[[Sequence[GraphInput]], list[int]]
"""Maps the values of a graph's inputs to a shape, or to a list with one number."""


@dataclass(frozen=True)
class Value:
    """An input or output tensor of the ONNX graph.

    Attributes:
        name: its name in the ONNX graph.
        dtype: type of its elements.
        shape: computes its shape from the values of the inputs.
    """

    name: str
    dtype: torch.dtype
    shape: Sizes


@dataclass(frozen=True)
class Exported:
    """A graph as ONNX, and how to call it.

    Attributes:
        model: the serialized ONNX model.
        nodes: its number of nodes.
        inputs: (position among the graph's inputs, name in the ONNX graph) of each input that it uses.
        noise: noise to draw before each run, as (tensor, rate).
        constants: tensors of the graph itself, passed like inputs.
        outputs: tensors that it computes.
        results: each result of the graph: a position among its inputs, the name of a tensor, a number
            computed from the inputs, or None.
    """

    model: bytes
    nodes: int
    inputs: tuple[tuple[int, str], ...]
    noise: tuple[tuple[Value, float], ...]
    constants: Mapping[str, torch.Tensor]
    outputs: tuple[Value, ...]
    results: tuple[int | str | Sizes | None, ...]


@cache
def _registry() -> _registration.ONNXRegistry:
    for module in (_registration, _core):  # they warn about each missing package and name
        logging.getLogger(module.__name__).setLevel(logging.ERROR)
    registry = _registration.ONNXRegistry.from_torchlib(OPSET)
    for target, function in TRANSLATIONS.items():
        registry.register_op(target, function)
    return registry


@cache
def decompositions() -> dict[Any, Callable[..., object]]:
    """Return decompositions of operators that ONNX lacks into operators that it has."""
    registry = _registry()
    supported = set(_decomp.get_onnx_implemented_overloads(registry))
    supported |= {aten.native_dropout.default, aten.native_dropout_backward.default}  # removed beforehand
    return _decomp.create_onnx_friendly_decomposition_table(supported)


def export(module: fx.GraphModule, name: str) -> Exported:
    """Export the graph of ``module`` to ONNX.

    Args:
        module: a graph of aten operators from AOTAutograd. It is not changed.
        name: its name in an error.

    Raises:
        ModelError: an operator has no ONNX. The error names it.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    module = fx.GraphModule(module, graph)
    take_out_idle_expansions(graph)
    placeholders = graph.find_nodes(op="placeholder")
    numbers = {node.meta["val"].node.expr: i for i, node in enumerate(placeholders) if _is_number(node)}
    symbols = {expression: i for expression, i in numbers.items() if expression.is_symbol}
    noise = [_replace_by_input(graph, node) for node in graph.find_nodes(op="call_function", target=dropout_noise)]
    constants = [_replace_by_input(graph, node) for node in graph.find_nodes(op="get_attr")]
    results = _results(graph, placeholders, symbols)
    computed = list(dict.fromkeys(r for r in results if isinstance(r, fx.Node)))
    graph.output_node().args = (tuple(computed),)
    graph.eliminate_dead_code()
    used = [(i, node.name) for i, node in enumerate(placeholders) if node.users]
    for node in placeholders:
        if not node.users:
            graph.erase_node(node)
    model = _to_onnx(module, name)
    return Exported(
        model=model.model_proto.SerializeToString(),
        nodes=len(list(model.model.graph)),
        inputs=tuple(used),
        noise=tuple((_value(node, symbols), rate) for node, (_, rate) in noise),
        constants={node.name: getattr(module, target) for node, (target,) in constants if node.users},
        outputs=tuple(_value(node, symbols) for node in computed),
        results=tuple(r.name if isinstance(r, fx.Node) else r for r in results),
    )


def _outputs(graph: fx.Graph) -> Sequence[fx.Node | None]:
    outputs: Any = graph.output_node().args[0]
    return tuple(outputs)


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], torch.SymInt)


def _replace_by_input(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, tuple[Any, ...]]:
    """Replace ``node`` by an input. Return the input and the arguments of the node."""
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        placeholder = graph.placeholder(node.name)
    placeholder.meta = dict(node.meta)
    made_of = (node.target,) if node.op == "get_attr" else node.args
    node.replace_all_uses_with(placeholder)
    graph.erase_node(node)
    return placeholder, made_of


def _results(
    graph: fx.Graph, placeholders: list[fx.Node], symbols: Mapping[Expr, int]
) -> list[int | fx.Node | Sizes | None]:
    positions = {node: i for i, node in enumerate(placeholders)}
    results: list[int | fx.Node | Sizes | None] = []
    for result in _outputs(graph):
        if result is not None and result in positions:
            results.append(positions[result])
        elif result is not None and _is_number(result):
            results.append(_sizes([result.meta["val"]], symbols))
        else:
            results.append(result)
    return results


def _value(node: fx.Node, symbols: Mapping[Expr, int]) -> Value:
    fake = node.meta["val"]
    return Value(node.name, fake.dtype, _sizes(fake.shape, symbols))


def _sizes(expressions: Sequence[int | torch.SymInt], symbols: Mapping[Expr, int]) -> Sizes:
    """Return a function that computes numbers with ``symbols`` from the inputs' values."""
    print_number = PythonPrinter().doprint
    numbers = [print_number(n.node.expr) if isinstance(n, torch.SymInt) else str(n) for n in expressions]
    compute: Callable[..., list[int]] = eval(f"lambda {', '.join(map(str, symbols))}: [{', '.join(numbers)}]")
    return lambda inputs: compute(*(inputs[position] for position in symbols.values()))


def _to_onnx(module: fx.GraphModule, name: str) -> ONNXProgram:
    registry = _registry()
    _fx_passes.insert_type_promotion_nodes(module)
    calls = [n for n in module.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    missing = [n for n in calls if not (_core._is_onnx_op(n.target) or registry.is_registered(n.target))]
    if missing:
        # Use the name by which the model called it before decomposition.
        operators = sorted({str(node.meta.get("original_aten") or node.target) for node in missing})
        places = [line.strip() for line in (missing[0].stack_trace or "").splitlines()]
        lines = [place for place in places if place.startswith("File ")]
        raise ModelError(
            f"{name} cannot run in ONNX Runtime: there is no ONNX for {', '.join(operators)}",
            where=lines[-1] if lines else None,  # the line of the model that the operator comes from
            hint=ADVICE,
        )
    # The form that the exporter expects. The graph has neither parameters nor buffers.
    inputs = [InputSpec(InputKind.USER_INPUT, _argument(n), None) for n in module.graph.find_nodes(op="placeholder")]
    outputs = [OutputSpec(OutputKind.USER_OUTPUT, _argument(n), None) for n in _outputs(module.graph) if n is not None]
    specs = pytree.tree_structure(((0,) * len(inputs), {})), pytree.tree_structure((0,) * len(outputs))
    called = ModuleCallSignature([], [], *specs)
    signature = ExportGraphSignature(inputs, outputs)
    program = ExportedProgram(module, module.graph, signature, {}, {}, [ModuleCallEntry("", called)])
    try:
        model = _core._exported_program_to_onnx_program(program, registry=registry)
    except OnnxExporterError as error:
        raise ModelError(f"{name} cannot run in ONNX Runtime: {error}", hint=ADVICE) from error
    model.model.opset_imports[""] = OPSET
    return model


def _argument(node: fx.Node) -> SymIntArgument | TensorArgument:
    return SymIntArgument(node.name) if _is_number(node) else TensorArgument(node.name)
