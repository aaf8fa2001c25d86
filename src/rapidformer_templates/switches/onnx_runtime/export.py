"""Convert a graph of aten operators to ONNX with torch's exporter.

At each call, ``torch.onnx.export`` traces and decomposes a model and fills its table of operators again. Here,
AOTAutograd has already traced and decomposed the graph, so this module uses the exporter's inner functions.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
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
from rapidformer_templates.switches.onnx_runtime.operators import TRANSLATIONS
from rapidformer_templates.switches.onnx_runtime.partition import dropout_noise, take_out_idle_expansions

if TYPE_CHECKING:
    from sympy import Expr

aten = torch.ops.aten

ADVICE = "leave --onnx-runtime-training out, or write that part of the model with other operators"

OPSET = 20
"""The first opset with GELU as one operator."""

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
    try:
        model = _core._exported_program_to_onnx_program(_program(module), registry=registry)
    except OnnxExporterError as error:
        raise ModelError(f"{name} cannot run in ONNX Runtime: {error}", hint=ADVICE) from error
    model.model.opset_imports[""] = OPSET
    return model


def _program(module: fx.GraphModule) -> ExportedProgram:
    """Wrap the graph in the form that the exporter expects. It has neither parameters nor buffers."""
    inputs = [InputSpec(InputKind.USER_INPUT, _argument(n), None) for n in module.graph.find_nodes(op="placeholder")]
    outputs = [OutputSpec(OutputKind.USER_OUTPUT, _argument(n), None) for n in _outputs(module.graph) if n is not None]
    called = ModuleCallSignature(
        inputs=[],
        outputs=[],
        in_spec=pytree.tree_structure(((0,) * len(inputs), {})),
        out_spec=pytree.tree_structure((0,) * len(outputs)),
    )
    signature = ExportGraphSignature(inputs, outputs)
    return ExportedProgram(module, module.graph, signature, {}, {}, [ModuleCallEntry("", called)])


def _argument(node: fx.Node) -> SymIntArgument | TensorArgument:
    return SymIntArgument(node.name) if _is_number(node) else TensorArgument(node.name)
