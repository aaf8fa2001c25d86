"""Receipts: what the active switches did, measured on the running model and never copied from flags."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from rapidformer_templates.attention.count import count_kernels
from rapidformer_templates.compiling.blocks import Compiled
from rapidformer_templates.data.loader import MicroBatch, to_device
from rapidformer_templates.engines.auxiliary import receipts_of
from rapidformer_templates.engines.base import Engine
from rapidformer_templates.engines.state import bytes_held, local_part
from rapidformer_templates.engines.transforms import Checkpointed
from rapidformer_templates.fused_loss.logits import head_of
from rapidformer_templates.fused_loss.watch import WidestRows
from rapidformer_templates.layout import find_layout, shape_of
from rapidformer_templates.onnx_graphs.capture import captured, receipt
from rapidformer_templates.parallel import tensor_parallel


def _types(tensors: Sequence[torch.Tensor]) -> list[str]:
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that are called and call none; of one that runs as a graph, the parts are not called."""
    children = list(module.children())
    if not children or captured(module):
        yield module
    for child in children if not captured(module) else ():
        yield from _leaves(child)


HELD = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes", "bucket_bytes")


class Receipts:
    """Watches the first step of a run and measures the engine after it."""

    def __init__(self, engine: Engine, wanted: Sequence[str]) -> None:
        """``wanted``: names of the measurements that the active switches ask for."""
        self.engine = engine
        self.wanted = frozenset(wanted)
        self._activations: set[str] = set()
        self._early: dict[str, Any] = {}
        self._shapes: set[tuple[int, ...]] = set()
        self._tokens = [0, 0]

    def count(self, microbatches: Sequence[MicroBatch]) -> None:
        """Note the shapes and the padding of a step's batches; called in every step."""
        if "fill" in self.wanted:
            self._shapes |= {microbatch.shape for microbatch in microbatches}
            self._tokens[0] += sum(microbatch.tokens for microbatch in microbatches if not microbatch.idle)
            self._tokens[1] += sum(microbatch.padded_tokens for microbatch in microbatches)

    def _padding(self) -> dict[str, Any]:
        """What :meth:`count` saw on all ranks: ``batch_shapes`` as (rows, tokens), ``fill`` and what it is made of."""
        workers = self.engine.workers
        useful, padded = workers.sum(*self._tokens)
        shapes = sorted(set().union(*workers.gather(self._shapes)))
        return {
            "batch_shapes": [list(shape) for shape in shapes],
            "useful_tokens": int(useful),
            "padded_tokens": int(padded),
            "fill": round(useful / max(padded, 1), 6),
        }

    @contextmanager
    def watch(self, microbatches: Sequence[MicroBatch]) -> Iterator[None]:
        """Around the first step: what its forward puts out, and what it keeps for the backward."""
        if "saved_tensor_bytes" in self.wanted:
            self._early |= self._saved_tensors(microbatches[0])
        if "logits_rows" in self.wanted:
            self._early |= self._logits(microbatches[0])
        compiled = "compile" in self.wanted
        if compiled:
            # Hooks inside of the blocks would become part of their graphs, which are compiled again without them.
            with self._watched_leaves(), torch.compiler.set_stance("force_eager"), torch.no_grad():
                self._forward(microbatches[0])
        before = self.engine.micro_steps
        self.engine.before_update = self._measure_gradients
        try:
            with ExitStack() as stack:
                if not compiled:
                    stack.enter_context(self._watched_leaves())
                if "attention_kernels" in self.wanted:
                    self._early["attention_kernels"] = stack.enter_context(count_kernels())
                yield
        finally:
            self.engine.before_update = None
        self._early["micro_steps"] = self.engine.micro_steps - before

    @contextmanager
    def _watched_leaves(self) -> Iterator[None]:
        """Note the types that modules put out: leaves, since sums between them (a residual stream) keep the wider."""
        hooks = [leaf.register_forward_hook(self._see_output) for leaf in _leaves(self.engine.model)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _forward(self, microbatch: MicroBatch) -> None:
        """A forward that leaves no trace."""
        batch = to_device(microbatch.batch, self.engine.workers.device)
        with self.engine.measuring() as model:
            self.engine.compute_loss(model, batch)

    def _measure_gradients(self) -> None:
        held = bytes_held(self.engine.held())
        self._early["gradient_bytes"] = held["gradients"]
        if "buckets" in held:
            self._early["bucket_bytes"] = held["buckets"]

    def _see_output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._activations |= set(_types([t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]))

    def _saved_tensors(self, microbatch: MicroBatch) -> dict[str, int]:
        """Bytes kept for the backward of one micro batch, with checkpointing and without."""
        blocks = [block.forward for block in find_layout(self.engine.model).blocks.values()]
        inner = [forward.forward if isinstance(forward, Compiled) else forward for forward in blocks]
        checkpointed = [forward for forward in inner if isinstance(forward, Checkpointed)]
        with_it = self._kept_by_forward(microbatch)
        for forward in checkpointed:
            forward.enabled = False
        try:
            # Not compiled: a graph for the sake of a measurement would cost more than it tells.
            with torch.compiler.set_stance("force_eager"):
                without = self._kept_by_forward(microbatch)
        finally:
            for forward in checkpointed:
                forward.enabled = True
        return {"saved_tensor_bytes": with_it, "saved_tensor_bytes_without": without}

    def _kept_by_forward(self, microbatch: MicroBatch) -> int:
        engine = self.engine
        weights = {StorageWeakRef(local_part(p).untyped_storage()).cdata for p in engine.model.parameters()}
        kept: dict[int, tuple[StorageWeakRef, int]] = {}

        def pack(tensor: torch.Tensor) -> None:
            """Count and let go: nothing is ever computed from this graph, so its memory is not needed."""
            storage = local_part(tensor).untyped_storage()
            reference = StorageWeakRef(storage)  # holds the identity, which is not given to another, but no data
            if reference.cdata not in weights:
                kept[reference.cdata] = (reference, storage.nbytes())

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: nothing):
            self._forward(microbatch)
        return sum(size for _, size in kept.values())

    def _logits(self, microbatch: MicroBatch) -> dict[str, Any]:
        """Rows of logits that a forward has in memory at a time, and how many there are without fusing."""
        engine = self.engine
        head = head_of(engine.model)
        assert head is not None
        with WidestRows(head.out_features) as seen:
            self._forward(microbatch)
        return {
            "logits_rows": seen.rows,
            "logits_rows_without": head.rows,
            "fused_loss_kernel": sorted(head.used),
        }

    def measured(self) -> dict[str, Any]:
        """All that was wanted, after the first step."""
        engine, rule = self.engine, self.engine.update_rule
        parameters = list(engine.model.parameters())
        tensors = engine.held()
        held = bytes_held(tensors)
        measures: dict[str, Callable[[], Any]] = {
            "parameter_dtypes": lambda: _types(parameters),
            "activation_dtypes": lambda: sorted(self._activations),
            "parameter_bytes": lambda: held["parameters"],
            "parameter_bytes_whole": lambda: sum(math.prod(shape_of(p)) * p.element_size() for p in parameters),
            "optimizer_state_bytes": lambda: held["optimizer"],
            "optimizer_state_device": lambda: sorted({tensor.device.type for tensor in tensors["optimizer"]}),
            "optimizer_class": lambda: f"{rule.__module__}.{rule.__qualname__}",
            "onnx_runtime": lambda: receipt(engine.model),
            "matmul_precision": torch.get_float32_matmul_precision,
            "compile": lambda: vars(engine.model)["compile_report"].measured(),
        }
        always = {"parameter_bytes", "optimizer_state_bytes", "parameter_dtypes", "activation_dtypes"}
        measures |= tensor_parallel.measures(engine.model)
        values = {name: measure() for name, measure in measures.items() if name in self.wanted | always}
        return values | self._early | dict(self.engine.receipts)

    def measured_by_rank(self) -> dict[str, Any]:
        """:meth:`measured`, and the bytes that each rank holds; every rank must call it."""
        values = self.measured()
        mine = {name: values[name] for name in HELD if name in values}
        padding = self._padding() if "fill" in self.wanted else {}
        values |= receipts_of(self.engine.model, self.engine.workers)
        return values | padding | {"held_bytes_by_rank": self.engine.workers.gather(mine)}
