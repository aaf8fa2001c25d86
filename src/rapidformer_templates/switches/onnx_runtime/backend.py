"""A backend of torch.compile that runs forward and backward in ONNX Runtime."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_module_simplified
from torch.nn.attention import SDPBackend, sdpa_kernel

from rapidformer_templates.switches.onnx_runtime.export import GraphInput, decompositions, export
from rapidformer_templates.switches.onnx_runtime.partition import partition, take_out_dropout
from rapidformer_templates.switches.onnx_runtime.session import Graph, GraphResult


class OnnxBackend:
    """Makes ONNX graphs from torch.compile's graphs. Modules of one class share a backend and so their graphs.

    Attributes:
        name: name of the class, for errors and the receipt.
        device: the device that the model will use.
        graphs: graphs made so far.
        began, seconds: when the first graph was requested, and the total time for tracing and making graphs.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.graphs: list[Graph] = []
        self.began, self.seconds = 0.0, 0.0

    def __call__(self, module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        """Trace ``module`` and make a graph of its forward and, if gradients are needed, of its backward.

        Raises:
            ModelError: an operator has no ONNX, or ONNX Runtime cannot run it.
        """
        began = time.perf_counter()
        self.began = self.began or began
        try:
            return self._trace(module, inputs)
        finally:
            self.seconds += time.perf_counter() - began

    def _trace(self, module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        # Attention as products and a softmax: torch's fused kernels have no ONNX. Both graphs are made at once,
        # so a backward that cannot be exported is found before anything has run.
        with sdpa_kernel(SDPBackend.MATH), functorch_config.patch(force_non_lazy_backward_lowering=True):
            return aot_module_simplified(
                module,
                inputs,
                fw_compiler=lambda traced, _: self._make(traced, "forward"),
                bw_compiler=lambda traced, _: self._make(traced, "backward"),
                inference_compiler=lambda traced, _: self._make(traced, "evaluation"),
                partition_fn=partition,
                decompositions=decompositions(),
            )

    def _make(self, traced: fx.GraphModule, part: str) -> Callable[[list[GraphInput]], list[GraphResult]]:
        take_out_dropout(traced)
        name = f"{self.name} {part}"
        graph = Graph(export(traced, name), name, self.device)
        self.graphs.append(graph)

        def run(inputs: list[GraphInput]) -> list[GraphResult]:
            values = list(inputs)
            inputs.clear()  # "boxed": what the forward saved is freed as soon as the backward has read it
            return graph(values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run
