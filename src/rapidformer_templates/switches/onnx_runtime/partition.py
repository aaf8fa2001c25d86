"""The joint forward and backward graph of AOTAutograd: its dropouts, and what the forward saves for the backward."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import default_partition
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten

VIEWS = frozenset(
    {
        aten._unsafe_view.default,
        aten.alias.default,
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
        operator.getitem,
    }
)
"""Views are free in torch but copies as outputs of an ONNX graph. The backward recomputes them from their sources."""


def dropout_noise(like: torch.Tensor, rate: float) -> torch.Tensor:
    """Return 1/(1 − rate) with probability 1 − rate, else 0, drawn in the same way as eager dropout on a CPU."""
    noise = torch.empty_like(like).bernoulli_(1.0 - rate)
    return noise.div_(1.0 - rate) if rate < 1.0 else noise


def partition(
    joint: fx.GraphModule, inputs: Sequence[object], *, num_fwd_outputs: int, **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Apply AOTAutograd's default partition after :func:`take_out_dropout`. Views are recomputed, not saved."""
    take_out_dropout(joint)
    for node in joint.graph.nodes:
        if node.op == "call_function" and _is_view(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = 0
    return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_view(node.args[0]) if isinstance(node.args[0], fx.Node) else False
    return node.target in VIEWS


def take_out_idle_expansions(graph: fx.Graph) -> None:
    """Remove expansions to the tensor's own shape. In ONNX they are copies if the shape is known only at run time."""
    for node in graph.find_nodes(op="call_function", target=aten.expand.default):
        source = node.args[0]
        if tuple(map(str, source.meta["val"].shape)) == tuple(map(str, node.meta["val"].shape)):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


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
                _use_noise_for_mask(graph, item, noise)
            graph.erase_node(item)
        graph.erase_node(node)
    module.recompile()


def _use_noise_for_mask(graph: fx.Graph, mask: fx.Node, noise: fx.Node) -> None:
    for user in list(mask.users):
        if user.target is aten.native_dropout_backward.default:
            user.target, user.args = aten.mul.Tensor, (user.args[0], noise)
    if mask.users:
        with graph.inserting_after(noise):
            is_kept = graph.call_function(aten.ne.Scalar, (noise, 0))
        is_kept.meta = dict(mask.meta)
        mask.replace_all_uses_with(is_kept)
