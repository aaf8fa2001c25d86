"""A backend of torch.compile that runs forward and backward in ONNX Runtime, and the graphs that it runs."""

from __future__ import annotations

import operator
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from onnxruntime import IOBinding, OrtValue
from onnxruntime.capi import _pybind_state
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import default_partition
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy

from rapidformer_templates.errors import ModelError
from rapidformer_templates.switches.onnx_runtime import export as onnx_export
from rapidformer_templates.switches.onnx_runtime.export import Exported, GraphInput

aten = torch.ops.aten

GraphResult = GraphInput | None

onnxruntime.set_default_logger_severity(3)  # errors only; the optimiser warns about each constant that it leaves


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
                    decompositions=onnx_export.decompositions(),
                )
        finally:
            self.seconds += time.perf_counter() - began

    def _make(self, traced: fx.GraphModule, part: str) -> Callable[[list[GraphInput]], list[GraphResult]]:
        onnx_export.take_out_dropout(traced)
        name = f"{self.name} {part}"
        graph = Graph(onnx_export.export(traced, name), name, self.device)
        self.graphs.append(graph)

        def run(inputs: list[GraphInput]) -> list[GraphResult]:
            values = list(inputs)
            inputs.clear()  # "boxed": what the forward saved is freed as soon as the backward has read it
            return graph(values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def partition(
    joint: fx.GraphModule, inputs: Sequence[object], *, num_fwd_outputs: int, **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Apply AOTAutograd's default partition after :func:`take_out_dropout`. Views are recomputed, not saved."""
    onnx_export.take_out_dropout(joint)
    for node in joint.graph.nodes:
        if node.op == "call_function" and _is_view(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = 0
    return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)


def _is_view(node: fx.Node) -> bool:
    """Whether a node is free in torch, but a copy as an output of an ONNX graph."""
    if node.target is operator.getitem:
        return _is_view(node.args[0]) if isinstance(node.args[0], fx.Node) else False
    return node.target is aten._unsafe_view.default or getattr(node.target, "is_view", False)


class Graph:
    """A graph that ONNX Runtime has optimised and runs. Call it with the inputs that AOTAutograd passes.

    Inputs and outputs use DLPack. ONNX Runtime reads torch's memory and writes into tensors that
    torch has allocated. Only an input that is not contiguous is copied.

    Attributes:
        name: a name such as ``BertLayer forward``.
        provider: the execution provider, such as ``CPUExecutionProvider``.
        nodes_exported: nodes of the exported graph.
        operators: number of uses of each operator in the optimised graph.
        runs: number of runs.
        seconds: time spent in it, without drawing dropout.
        copies: inputs that had to be copied.
    """

    def __init__(self, exported: Exported, name: str, device: torch.device) -> None:
        """Optimise the graph and open a session for it.

        Raises:
            ModelError: ONNX Runtime has no kernel for an operator of it.
        """
        self.name = name
        self.nodes_exported = exported.nodes
        self.runs, self.seconds, self.copies = 0, 0.0, 0
        self._exported = exported
        self._device = device
        self._constants = {k: _share(v.to(device).contiguous()) for k, v in exported.constants.items()}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._session, self.operators = _open(exported.model, name, device, self._stream)
        self.provider: str = self._session.get_providers()[0]

    def __call__(self, inputs: list[GraphInput]) -> list[GraphResult]:
        exported = self._exported
        binding = self._session.io_binding()

        def empty(value: onnx_export.Value) -> torch.Tensor:
            return torch.empty(value.shape(inputs), dtype=value.dtype, device=self._device)

        noise = {value.name: onnx_export.dropout_noise(empty(value), rate) for value, rate in exported.noise}
        fed = {name: self._tensor(inputs[position]) for position, name in exported.inputs}
        computed = {value.name: empty(value) for value in exported.outputs}
        began = time.perf_counter()
        for name, tensor in (fed | noise).items():
            binding.bind_ortvalue_input(name, _share(tensor))
        for name, constant in self._constants.items():
            binding.bind_ortvalue_input(name, constant)
        for name, tensor in computed.items():
            binding.bind_ortvalue_output(name, _share(tensor))
        self._run(binding)
        self.seconds += time.perf_counter() - began
        self.runs += 1
        everything, results = computed | noise, list[GraphResult]()
        for result in exported.results:
            if isinstance(result, str):
                results.append(everything[result])
            elif isinstance(result, int):
                results.append(inputs[result])
            else:
                results.append(None if result is None else result(inputs)[0])
        return results

    def _run(self, binding: IOBinding) -> None:
        if self._stream is None:
            self._session.run_with_iobinding(binding)
            return
        # ONNX Runtime does not accept the default stream, so it has a separate one, synchronized with torch's.
        options = onnxruntime.RunOptions()
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        torchs = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(torchs)
        self._session.run_with_iobinding(binding, options)
        torchs.wait_stream(self._stream)

    def _tensor(self, value: GraphInput) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            return torch.tensor(value)
        if value.is_contiguous():
            return value.detach()
        self.copies += 1
        return value.detach().contiguous()

    def summary(self) -> dict[str, object]:
        """Return the entry for the receipt."""
        return {
            "name": self.name,
            "nodes_exported": self.nodes_exported,
            "nodes": sum(self.operators.values()),
            "operators": dict(self.operators.most_common()),
            "runs": self.runs,
            "milliseconds": round(1000 * self.seconds / max(1, self.runs), 3),
            "copies": self.copies,
        }


def _share(tensor: torch.Tensor) -> OrtValue:
    """Return the tensor as an OrtValue in the same memory. DLPack in ONNX Runtime passes booleans only as bytes."""
    if tensor.dtype is torch.bool:
        return OrtValue(_pybind_state.OrtValue.from_dlpack(tensor.view(torch.uint8).__dlpack__(), True))
    return OrtValue.from_dlpack(tensor)


def _open(
    model: bytes, name: str, device: torch.device, stream: torch.cuda.Stream | None
) -> tuple[onnxruntime.InferenceSession, Counter[str]]:
    """Return the optimised graph, and the number of uses of each operator in it."""
    providers: list[str | tuple[str, dict[str, str]]] = [_provider(device)]
    if stream is not None:
        provider_options = {
            "device_id": str(device.index or 0),
            "user_compute_stream": str(stream.cuda_stream),
            "use_tf32": str(int(torch.get_float32_matmul_precision() != "highest")),
        }
        providers = [(_provider(device), provider_options), "CPUExecutionProvider"]  # sizes are computed on the host
    with tempfile.TemporaryDirectory() as folder:
        optimised = Path(folder) / "optimised.onnx"
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.optimized_model_filepath = str(optimised)
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            session = onnxruntime.InferenceSession(model, options, providers=providers)
        except Exception as error:
            raise ModelError(f"{name} cannot run in ONNX Runtime: {error}", hint=onnx_export.ADVICE) from error
        return session, Counter(node.op_type for node in onnx.load(optimised).graph.node)


def check_provider(device: torch.device) -> None:
    """Check that ONNX Runtime can compute on a device.

    Raises:
        ModelError: this build of ONNX Runtime does not compute on ``device``.
    """
    provider, available = _provider(device), onnxruntime.get_available_providers()
    if provider not in available:
        message = f"this ONNX Runtime has no {provider}, only {', '.join(available)}"
        hint = "pip uninstall onnxruntime; pip install onnxruntime-gpu"
        raise ModelError(message, where=f"onnxruntime {onnxruntime.__version__}", hint=hint)


def _provider(device: torch.device) -> str:
    return "CUDAExecutionProvider" if device.type == "cuda" else "CPUExecutionProvider"
