"""Trace one micro batch of a model on fake tensors: which bytes are alive when, and how much is computed.

The forward and backward of the real model run under torch's ``FakeTensorMode``. Every tensor has its
shape and the size of its storage, but no data. So dropout masks, attention kernels, autocast copies,
recomputation and the gradient of the logits are recorded where they arise. None of them is an assumption.

Equal blocks cost the same, so a model with three blocks in each stack is traced, and :meth:`Trace.with_depths`
repeats the middle one. This is exact, because the blocks differ only in their position.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from rapidformer_templates.engines.forwards import Checkpointed
from rapidformer_templates.engines.shards import local_part
from rapidformer_templates.models.blocks import find_blocks
from rapidformer_templates.switches.auto_strategy.fake_kernels import run
from rapidformer_templates.switches.auto_strategy.stand_ins import DATA_DEPENDENT_OPS, GROUPED_PRODUCT, answer
from rapidformer_templates.switches.auto_strategy.trace import Phase, PhaseSegment, Product, Trace
from rapidformer_templates.switches.fused_loss.transform import CHUNK_BYTES
from rapidformer_templates.switches.offload_activations.transform import Counts, Offloader, Wait, offload_blocks

Batch = Mapping[str, torch.Tensor]
MeanLoss = Callable[[nn.Module, Batch], torch.Tensor]


def loss_of_model(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss that a model of transformers computes itself."""
    loss: torch.Tensor = model(**batch).loss
    return loss


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of live storages that are created inside it, with real or fake tensors.

    Views share a storage, which counts once. Memory that a kernel allocates for itself and frees before it
    returns is not in a tensor and does not count.

    Attributes:
        live: current bytes.
        peak: highest value of ``live`` since the last :meth:`reset_peak`.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        """``known``: tensors that existed before and do not count."""
        super().__init__()
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in known:
            self._watch(local_part(tensor).untyped_storage(), 0)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.track(leaf)
        return result

    def track(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor if it is new. Tensors on the meta device have no memory."""
        if tensor.device.type == "meta":
            return
        storage = local_part(tensor).untyped_storage()
        if id(storage) not in self._sizes:
            self._watch(storage, storage.nbytes())
            self.peak = max(self.peak, self.live)

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are live now."""
        self.peak = self.live

    @contextlib.contextmanager
    def following_resizes(self) -> Iterator[None]:
        """Count the new size of each storage that is resized. FSDP frees and allocates memory in this way."""
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            key = id(storage)
            if key in self._sizes:
                self.live += storage.nbytes() - self._sizes[key]
                self._sizes[key] = storage.nbytes()
                self.peak = max(self.peak, self.live)
            return result

        with patch.object(torch.UntypedStorage, "resize_", resize_and_count):
            yield

    def _watch(self, storage: torch.UntypedStorage, size: int) -> None:
        key = id(storage)
        self._sizes[key] = size
        self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
        self.live += size

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        del self._references[key]


def product_of(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, object], result: Any, weights: Container[int]
) -> Product | None:
    """Return the sizes of a matrix product or of an attention kernel, or None for another operation.

    Args:
        weights: ids of the storages of weights.
    """
    name = func.name()
    output: torch.Tensor = result[0] if isinstance(result, (tuple, list)) else result
    if "_attention" in name:
        is_backward = "backward" in name
        query, key = args[1:3] if is_backward else args[:2]
        batch, heads, queries, inner = query.shape
        products = batch * heads
        # Two products in the forward, five in the backward, which computes the scores again.
        flops = (10 if is_backward else 4) * products * queries * key.shape[-2] * inner
        flops //= 2 if any(arg is True for arg in args) else 1  # is_causal
        moved = (4 if is_backward else 2) * (query.nbytes + key.nbytes)
        return Product(products, queries, inner, key.shape[-2], query.element_size(), moved, flops, is_attention=True)
    count = flop_registry.get(func._overloadpacket)
    is_grouped = func is GROUPED_PRODUCT
    if count is None and not is_grouped:
        return None
    operands = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.ndim > 1][-2:]
    inputs = [operand for operand in operands if id(operand.untyped_storage()) not in weights]
    is_weight_gradient = len(inputs) == 2 and output.ndim == (3 if is_grouped else 2)
    moved = sum(tensor.nbytes for tensor in inputs) + (0 if is_weight_gradient else output.nbytes)
    rows, columns = output.shape[-2:]
    batch = output.numel() // (rows * columns)
    if count:
        flops = count(*args, **kwargs, out_val=result)
    else:  # each row belongs to one group: a row of the output, or of a product inside a group
        flops = 2 * operands[0].numel() * operands[1].shape[-1]
        batch = args[2].shape[0]
        rows = rows if is_weight_gradient else rows // batch
    inner = flops // max(2 * batch * rows * columns, 1)
    return Product(batch, rows, inner, columns, output.element_size(), moved, flops)


_CAST = torch.ops.aten._to_copy.default

READS_FEW = ("embedding", "gather", "index", "index_select", "nll_loss_forward")
"""Operations that read as many elements of their input as their output has."""

ALLOCATES = ("detach", "empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view")
"""Operations that read and write nothing."""


def traffic_of(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, object], result: object) -> int:
    """Return the bytes that an operation other than a product reads from memory and writes to it."""
    if func.namespace == "prim":  # a question of autograd
        return 0
    name = func.name().partition("::")[2].partition(".")[0]
    if name in ALLOCATES:
        return 0
    written = sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
    if name in READS_FEW:
        return 2 * written
    # An expanded tensor has more elements than its memory.
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return written + sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in inputs)


class _TraceWatch(LiveStorages):
    """Records live storages, operations and finished gradients of each phase."""

    def __init__(self, model: nn.Module, *, dense: bool, sum_type: torch.dtype | None) -> None:
        self.phases: list[Phase] = []
        self._made_in: dict[int, int] = {}
        self._casts: set[int] = set()
        super().__init__([*model.parameters(), *model.buffers()])
        self._known = frozenset(self._sizes)
        self._weights = set(self._sizes)  # and autocast copies of weights
        self.finished = self._finished_before = 0
        self.hidden = self.kept_output = 0
        self._output: int | None = None
        self.counts = Counts()
        self._sent = 0
        self._dense = dense
        self._sum_type = sum_type
        self._sums: list[torch.Tensor] = []
        self._phase: tuple[str, tuple[str, int] | None] = ("begin", None)
        self._segments: list[PhaseSegment] = []
        self._begin = self._peak_without = self._finished_at_begin = 0
        self._products: list[Product] = []
        self._launches = self._traffic = 0
        self._has_gradient = False

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        result: object
        if func in DATA_DEPENDENT_OPS:
            result = answer(func, args, dense=self._dense)
            if not isinstance(result, torch.Tensor):
                return result
        else:
            result = run(func, args, kwargs)
        if type(result) is FakeTensor:
            self.track(result)
        else:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.track(leaf)
        if func is _CAST and id(args[0].untyped_storage()) in self._known:
            assert isinstance(result, torch.Tensor)
            self._casts.add(id(result.untyped_storage()))
            self._weights.add(id(result.untyped_storage()))
        without = self.live - self.finished
        if without > self._peak_without:
            self._peak_without = without
        if product := product_of(func, args, kwargs, result, self._weights):
            self._products.append(product)
        elif not func.is_view:
            self._launches += 1
            self._traffic += traffic_of(func, args, kwargs, result)
        return result

    def enter(self, name: str, stack: tuple[str, int] | None = None) -> None:
        """End the current phase and begin another."""
        self._begin_segment()
        sizes = (self.peak - self._finished_before, self._begin)
        begun, sent = self._has_gradient, self.counts.sent - self._sent
        self._sent = self.counts.sent
        phase = Phase(*self._phase, *sizes, after_first_gradient=begun, finished=self.finished, sent=sent)
        segments, products = tuple(self._segments), tuple(self._products)
        phase = replace(phase, segments=segments, products=products, launches=self._launches, traffic=self._traffic)
        self.phases.append(phase)
        self._has_gradient = self.finished > 0 or name == "reduce"
        self._phase = (name, stack)
        self._finished_before = self.finished
        self.reset_peak()
        self._segments, self._products, self._launches, self._traffic = [], [], 0, 0

    def _begin_segment(self) -> None:
        """End the current segment and begin another."""
        self._segments.append(PhaseSegment(self._begin, self._peak_without, self._finished_at_begin))
        self._begin = self._peak_without = self.live - self.finished
        self._finished_at_begin = self.finished

    def turn(self) -> None:
        """End the forward. Everything alive now is kept for the backward."""
        saved, casts = Counter[int](), Counter[int]()
        for key, phase in self._made_in.items():
            saved[phase] += self._sizes[key]
            casts[phase] += self._sizes[key] if key in self._casts else 0
        self.enter("turn")
        self.phases = [replace(phase, saved=saved[i], casts=casts[i]) for i, phase in enumerate(self.phases)]
        self.kept_output = self._sizes.get(self._output, 0) if self._output is not None else 0

    def passes_on(self, hidden: torch.Tensor) -> None:
        """Record the output of a block."""
        hidden = local_part(hidden)
        self.hidden, self._output = hidden.nbytes, id(hidden.untyped_storage())

    def _watch(self, storage: torch.UntypedStorage, size: int) -> None:
        super()._watch(storage, size)
        self._made_in[id(storage)] = len(self.phases)

    def _forget(self, key: int) -> None:
        super()._forget(key)
        del self._made_in[key]
        if key == self._output:  # another storage may get its id
            self._output = None
        self._casts.discard(key)
        self._weights.discard(key)

    def finish(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if not self.finished:
            self.enter("reduce")
        gradient = local_part(parameter.grad)
        if self._sum_type is None or gradient.dtype == torch.float32:
            self.finished += gradient.untyped_storage().nbytes()
        else:
            self.finished += gradient.numel() * self._sum_type.itemsize
            self._sums.append(gradient.to(self._sum_type))
            parameter.grad = None
        self._begin_segment()


class _NoMemory:
    """An offloading host that stores nothing, so that its memory does not count."""

    def send(self, tensors: Sequence[torch.Tensor]) -> tuple[list[tuple[torch.Size, torch.dtype]], Wait]:
        return [(tensor.shape, tensor.dtype) for tensor in tensors], lambda: None

    def fetch(self, copies: Sequence[tuple[torch.Size, torch.dtype]]) -> tuple[list[torch.Tensor], Wait]:
        return [torch.empty(shape, dtype=dtype) for shape, dtype in copies], lambda: None


class OnGpu(TorchFunctionMode):
    """Makes a trace on a CPU behave like a GPU, even if this torch build does not support GPUs.

    Attention always uses one of the fused kernels, also with dropout and with masks. Autocast
    computes more functions in fp32.
    """

    IN_FP32 = frozenset(
        {"layer_norm", "softmax", "log_softmax", "pow", "exp", "rsqrt", "cumsum", "sum", "prod", "norm"}
    )

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        if func is nn.functional.scaled_dot_product_attention:
            kwargs["dropout_p"] = 0.0  # the mask is drawn again in the backward and never stored
        elif torch.is_autocast_enabled("cpu") and getattr(func, "__name__", "").strip("_") in self.IN_FP32:
            narrow = (torch.bfloat16, torch.float16)
            args = [arg.float() if isinstance(arg, torch.Tensor) and arg.dtype in narrow else arg for arg in args]
        return func(*args, **kwargs)


@contextlib.contextmanager
def gpu_kernels() -> Iterator[None]:
    """Use the kernels and the sizes of chunks of a GPU inside the context."""
    with OnGpu(), patch.dict(CHUNK_BYTES, cpu=CHUNK_BYTES["accelerator"]):
        yield


def with_gpu_kernels(forward: Callable[..., object]) -> Callable[..., object]:
    """Run a forward under :class:`OnGpu`. Its recomputation in the backward has no function modes."""

    def on_gpu(*args: object, **kwargs: object) -> object:
        with OnGpu():
            return forward(*args, **kwargs)

    return on_gpu


def trace(
    model: nn.Module,
    batch: Batch,
    *,
    compute_type: torch.dtype | None = None,
    sum_type: torch.dtype | None = None,
    recompute: str = "none",
    offload: bool = False,
    gpu: bool = False,
    compute_loss: MeanLoss = loss_of_model,
) -> Trace:
    """Trace one micro batch through a model of fake tensors, from its inputs to its gradients.

    Args:
        model: a model of fake tensors, as :func:`fake_tensors.fake_tensors` makes them.
        batch: fake tensors with the shapes of training.
        compute_type: type of autocast. None computes in the type of the parameters.
        sum_type: type in which 16-bit gradients are accumulated as they arrive. None leaves them unchanged.
        recompute: one of ``layouts.RECOMPUTED``, applied to each block.
        offload: whether activations that the blocks keep go to the host.
        gpu: whether the run is for a GPU.
        compute_loss: computes the loss.
    """
    padded = isinstance(batch, Mapping) and "attention_mask" in batch
    with contextlib.ExitStack() as stack:
        watch = _TraceWatch(model, dense=not padded, sum_type=sum_type)
        _watch_blocks(model, watch, stack, recompute=recompute, gpu=gpu)
        if offload:
            offloader = Offloader(_NoMemory(), torch.device("cpu"))
            watch.counts = offloader.counts
            offload_blocks([model.get_submodule(name) for name in stacks_of(model)], offloader)
        for parameter in model.parameters():
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(watch.finish).remove)
        stack.enter_context(without_warnings())
        if gpu:
            stack.enter_context(gpu_kernels())
        stack.enter_context(watch)
        with torch.autocast("cpu", dtype=compute_type or torch.bfloat16, enabled=compute_type is not None):
            loss = compute_loss(model, batch)
            weighted = loss * 2.0  # engines weight the loss, too
        del loss
        watch.turn()
        weighted.backward()
        watch.enter("done")
    for parameter in model.parameters():
        parameter.grad = None
    return Trace(tuple(watch.phases), watch.hidden, watch.kept_output)


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Silence a warning of transformers, which cannot see that fake tokens are not padding."""
    logger = logging.getLogger("transformers.modeling_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _watch_blocks(
    model: nn.Module, watch: _TraceWatch, stack: contextlib.ExitStack, *, recompute: str, gpu: bool
) -> None:
    """Register hooks that begin phases, and wrap blocks for recomputation. ``stack`` restores the blocks at its end."""

    def end_at_input(block: nn.Module, args: object, kwargs: object) -> None:
        """Begin the last phase when the gradient of the first block's input is finished."""
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
        if inputs:
            inputs[0].register_hook(lambda gradient: watch.enter("end"))

    positions = stacks_of(model)
    final = {name: number for name, number in positions.values()}  # noqa: C416 - the last place of each stack
    for name, position in positions.items():
        block = model.get_submodule(name)
        if "forward" in vars(block):  # tensor parallelism has set one
            stack.callback(setattr, block, "forward", block.forward)
        else:
            stack.callback(vars(block).pop, "forward", None)
        if recompute != "none":
            forward = with_gpu_kernels(block.forward) if gpu else block.forward
            block.forward = Checkpointed(forward, selective=recompute == "selective", flag="--checkpoint-activations")

        def enter(module: nn.Module, args: object, *, position: tuple[str, int] = position) -> None:
            watch.enter("forward", position)

        def after(module: nn.Module, args: object, output: object, *, position: tuple[str, int] = position) -> None:
            if position[1] == final[position[0]]:
                watch.enter("head")
            hidden = next(t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad)
            watch.passes_on(hidden)
            hidden.register_hook(lambda gradient: watch.enter("backward", position))

        stack.callback(block.register_forward_pre_hook(enter).remove)
        stack.callback(block.register_forward_hook(after).remove)
        if position[1] == 0:
            stack.callback(block.register_forward_pre_hook(end_at_input, with_kwargs=True).remove)


def stacks_of(model: nn.Module) -> dict[str, tuple[str, int]]:
    """Return for each block its stack (the list that contains it) and its index there, from 0."""
    positions: dict[str, tuple[str, int]] = {}
    counts: dict[str, int] = {}
    for name in find_blocks(model):
        stack = name.rpartition(".")[0]
        positions[name] = (stack, counts.get(stack, 0))
        counts[stack] = counts.get(stack, 0) + 1
    return positions


def gradient_bytes(model: nn.Module, sum_type: torch.dtype | None = None) -> dict[str, int]:
    """Return the bytes of the gradients of a block, by stack. ``sum_type`` means the same as in :func:`trace`."""
    sizes: dict[str, int] = {}
    for name, (stack, _) in stacks_of(model).items():
        trained = [p for p in model.get_submodule(name).parameters() if p.requires_grad]
        types = [p.dtype if sum_type is None or p.dtype == torch.float32 else sum_type for p in trained]
        sizes[stack] = sum(local_part(p).numel() * dtype.itemsize for p, dtype in zip(trained, types, strict=True))
    return sizes


T = TypeVar("T")


def in_forks(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Run tasks in forked processes, one per available core, and return their results in any order.

    A process runs several tasks, because the first one fills torch's caches for the others. A task sees everything in
    this process's memory, and its changes are lost. The result of a task that fails is left out, and its error is not
    raised here: code that needs the result meets the error again. The list is empty if there is only one task or core,
    or if forking is unsafe (macOS) or impossible.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    if min(len(tasks), cores) < 2:
        return []
    context = multiprocessing.get_context("fork")
    gc.freeze()  # otherwise, garbage collection would write to all shared memory and so copy it
    under_way = {}
    for first in range(min(len(tasks), cores)):
        own_end, child_end = context.Pipe(duplex=False)
        process = context.Process(target=_tell, args=(tasks[first::cores], child_end), daemon=True)
        process.start()
        child_end.close()
        under_way[own_end] = process
    returned: list[T] = []
    while under_way:
        for pipe in wait(list(under_way)):
            assert isinstance(pipe, Connection)
            try:
                returned.append(pipe.recv())
            except EOFError:
                under_way.pop(pipe).join()
    return returned


def _tell(tasks: Sequence[Callable[[], object]], pipe: Connection) -> None:
    for task in tasks:
        with contextlib.suppress(Exception):
            pipe.send(task())
    pipe.close()
