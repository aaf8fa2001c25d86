"""Transform that selects the modules that run in ONNX Runtime, and the receipt of what ran there, and for how long.

This module does not import ONNX Runtime.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.engines.contract import Engine, Receipt
from rapidformer_templates.engines.forwards import Checkpointed
from rapidformer_templates.errors import ModelError, RapidformerError
from rapidformer_templates.models.divided_tensor import LossHead

if TYPE_CHECKING:
    from rapidformer_templates.switches.onnx_runtime.backend import OnnxBackend

ADVICE = "leave --onnx-runtime-training out, or write that part of the model in another way"

GRAPHS_OF_A_CLASS = 16
"""With and without gradients, with frozen and with trained parameters, each for one shape and for all other shapes."""


class Captured:
    """A module's forward that runs in ONNX Runtime, together with its backward.

    The ``forward`` is replaced on the instance: parameters keep their names, and the hooks of an
    engine stay outside of the graph.
    """

    def __init__(self, module: nn.Module, backend: OnnxBackend) -> None:
        forward = module.forward
        functools.update_wrapper(self, forward)
        self.backend = backend
        self._compiled = torch.compile(forward, backend=backend, fullgraph=True)

    def __call__(self, *args: object, **kwargs: object) -> object:
        try:
            return self._compiled(*args, **kwargs)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, RapidformerError):
                raise error.inner_exception from None
            raise self._refusal(f"{error.inner_exception}") from error
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise self._refusal(f"it was called in more than {GRAPHS_OF_A_CLASS} different ways") from error
        except torch._dynamo.exc.Unsupported as error:
            raise self._refusal(f"it is not one graph: {str(error).splitlines()[0]}") from error

    def _refusal(self, why: str) -> ModelError:
        return ModelError(f"{self.backend.name} cannot run in ONNX Runtime: {why}", hint=ADVICE)


def run_in_onnx_runtime(assembly: Assembly, building: Building[object]) -> None:
    """Capture the blocks, and all other modules that multiply matrices. Embeddings are not captured.

    Raises:
        ModelError: the model has no repeated blocks, or ONNX Runtime cannot compute on the device.
    """
    from rapidformer_templates.switches.onnx_runtime.backend import OnnxBackend, check_provider

    blocks = set(assembly.require_blocks("ONNX Runtime", "--onnx-runtime-training").values())
    check_provider(building.workers.device)
    torch._dynamo.reset()  # graphs of an earlier run in this process would count towards the limit
    torch._dynamo.config.recompile_limit = GRAPHS_OF_A_CLASS
    # DDP need not split blocks: they are small enough to send their gradients while others are computed.
    torch._dynamo.config.optimize_ddp = False
    backends: dict[type, OnnxBackend] = {}
    for module in _parts(assembly.model, blocks):
        kind = type(module)
        backend = backends.setdefault(kind, OnnxBackend(kind.__name__, building.workers.device))
        module.forward = Captured(module, backend)


def _parts(module: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the blocks, and the largest modules outside of them that multiply matrices.

    Modules that look something up, or that compute the loss in place of their product, cannot be in a graph.
    """
    if module in blocks:
        yield module
    elif not any(part in blocks or isinstance(part, (nn.Embedding, LossHead)) for part in module.modules()):
        if any(parameter.ndim > 1 for parameter in module.parameters()):
            yield module
    else:
        for child in module.children():
            yield from _parts(child, blocks)


def captured(module: nn.Module) -> Captured | None:
    """Return the captured forward of the module, or None if it does not run in ONNX Runtime."""
    forward = vars(module).get("forward")
    while isinstance(forward, Checkpointed):
        forward = forward.forward
    return forward if isinstance(forward, Captured) else None


class OnnxGraphs(Receipt):
    """Reports ``onnx_runtime``. See :func:`graphs_of`."""

    def after_step(self, engine: Engine) -> dict[str, object]:
        return {"onnx_runtime": graphs_of(engine.model)}

    def hides_parts(self, module: nn.Module) -> bool:
        return captured(module) is not None


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
        "share_of_time": round(sum(graph.seconds for graph in graphs) / training, 4),
        "seconds_to_make": round(sum(backend.seconds for backend in backends), 2),
        "graphs": [graph.summary() for graph in graphs],
    }
