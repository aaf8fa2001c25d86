"""Receipt of what ran in ONNX Runtime, and for how long."""

from __future__ import annotations

import time
from collections import Counter

from torch import nn

from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.receipt import Receipt
from rapidformer_templates.switches.onnx_runtime.transform import captured


class OnnxGraphs(Receipt):
    """Reports ``onnx_runtime``. See :func:`graphs_of`."""

    def after_step(self, engine: Engine) -> dict[str, object]:
        return {"onnx_runtime": graphs_of(engine.model)}

    def hides_parts(self, module: nn.Module) -> bool:
        return captured(module) is not None


def seconds_in_graphs(model: nn.Module) -> float:
    """Return the total time spent in the graphs of a model so far."""
    backends = {id(part.backend): part.backend for module in model.modules() if (part := captured(module))}
    return sum(graph.seconds for backend in backends.values() for graph in backend.graphs)


def graphs_of(model: nn.Module) -> dict[str, object]:
    """Return the providers, graphs with their nodes, and shares of parameters and time in ONNX Runtime.

    ``share_of_time`` is the time spent in graphs, divided by the time since the first graph was requested, without the
    time for making graphs.
    """
    captured_parts = [(module, part) for module in model.modules() if (part := captured(module))]
    backends = list({id(part.backend): part.backend for _, part in captured_parts}.values())
    graphs = [graph for backend in backends for graph in backend.graphs]
    inside = {id(p): p.numel() for module, _ in captured_parts for p in module.parameters()}
    whole = {id(p): p.numel() for p in model.parameters()}
    since = min((backend.began for backend in backends if backend.began), default=0.0)
    training = time.perf_counter() - since - sum(backend.seconds for backend in backends)
    return {
        "providers": sorted({graph.provider for graph in graphs}),
        "modules": dict(Counter(part.backend.name for _, part in captured_parts)),
        "share_of_parameters": round(sum(inside.values()) / max(1, sum(whole.values())), 4),
        "share_of_time": round(seconds_in_graphs(model) / training, 4),
        "seconds_to_make": round(sum(backend.seconds for backend in backends), 2),
        "graphs": [graph.summary() for graph in graphs],
    }
