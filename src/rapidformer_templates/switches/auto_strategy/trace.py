"""One micro batch of a model on fake tensors: which bytes live when, and what is computed. Nothing is calculated.

The forward and backward of the real model run under torch's ``FakeTensorMode``: every tensor has its
shape and its storage's size, and no data. So dropout masks, attention kernels, copies by autocast,
recomputation and the gradient of the logits are seen where they arise, and nothing is assumed of them.

Equal blocks cost the same, so a model of three blocks of each kind is traced, and :meth:`Trace.deepened`
repeats the middle one: exact, because the blocks differ in nothing but their place.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from rapidformer_templates.engines.pieces import local_part
from rapidformer_templates.models.blocks import find_blocks
from rapidformer_templates.switches.auto_strategy.answers import ASKS, answer
from rapidformer_templates.switches.auto_strategy.live_storages import LiveStorages
from rapidformer_templates.switches.checkpoint_activations.transform import Checkpointed
from rapidformer_templates.switches.fused_loss.memory import CHUNK_BYTES
from rapidformer_templates.switches.offload_activations.host import Wait
from rapidformer_templates.switches.offload_activations.offloader import Counts, Offloader
from rapidformer_templates.switches.offload_activations.transform import offload_blocks

TRACED_BLOCKS = 3
"""Blocks of each stack in a model that is traced: a first one, one that is repeated, and a last one."""

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Phase:
    """A part of the step, such as the forward of one block.

    Attributes:
        name: ``begin``, a block's ``forward``, ``head``; then back: ``turn``, ``reduce`` (from the first
            gradient that is finished), a block's ``backward``, ``end``.
        stack: which list of blocks the block stands in, and its place there; None outside of blocks.
        peak: most bytes alive in it besides the model's states, gradients that are finished among them.
        peak_without_gradients: the same without those.
        peak_beside_earlier: the same without those that were finished when it began.
        end: bytes alive when it ends, without finished gradients.
        flops: operations of the matrix products in it.
        traffic: bytes that its other operations read and write.
        after_first_gradient: whether a parameter has its gradient when the phase begins.
        finished: bytes of the gradients that are finished when it ends.
        kept: bytes made in it that are alive when the backward begins.
        casts: of these, autocast's copies of weights.
        sent: bytes of earlier blocks that go to the host in it.
        blocks: like ones that it stands for.
        kept_by_each: bytes that each of them keeps for its backward.
    """

    name: str
    stack: tuple[str, int] | None
    peak: int
    peak_without_gradients: int
    peak_beside_earlier: int
    end: int
    flops: int
    traffic: int
    after_first_gradient: bool = False
    finished: int = 0
    kept: int = 0
    casts: int = 0
    sent: int = 0
    blocks: int = 1
    kept_by_each: int = 0


@dataclass(frozen=True)
class Trace:
    """The phases of one micro batch, in their order.

    Attributes:
        hidden: bytes of what a block passes on.
        kept_output: bytes of what the last block passes on that are alive when the backward begins.
    """

    phases: tuple[Phase, ...]
    hidden: int = 0
    kept_output: int = 0

    @property
    def peak(self) -> int:
        """Most bytes alive at a time, gradients as they are finished among them."""
        return max(phase.peak for phase in self.phases)

    @property
    def peak_without_gradients(self) -> int:
        """The same where finished gradients lie elsewhere: in buckets, in shards, or there already."""
        return max(phase.peak_without_gradients for phase in self.phases)

    @property
    def flops(self) -> int:
        return sum(phase.flops for phase in self.phases)

    @property
    def traffic(self) -> int:
        return sum(phase.traffic for phase in self.phases)

    @property
    def kept(self) -> int:
        """Bytes that the forward leaves for the backward, up to the last block."""
        return sum(phase.kept for phase in self._up_to_last_block)

    @property
    def casts(self) -> int:
        """Of these, autocast's copies of weights."""
        return sum(phase.casts for phase in self._up_to_last_block)

    @property
    def _up_to_last_block(self) -> Sequence[Phase]:
        forwards = [i for i, phase in enumerate(self.phases) if phase.name == "forward"]
        return self.phases[: forwards[-1] + 1] if forwards else ()

    @property
    def sent(self) -> int:
        """Bytes that go to the host: what all blocks but the last one keep."""
        return sum(phase.sent for phase in self.phases)

    @property
    def kept_by_last(self) -> int:
        """Bytes that the last block keeps on the device, and that would go to the host if another forward came."""
        forwards = [phase for phase in self.phases if phase.name == "forward"]
        return max(forwards[-1].kept - forwards[-2].kept, 0) if len(forwards) > 1 else 0

    def at(self, micro_batch: int, other: Trace, traced: tuple[int, int]) -> Trace:
        """The trace of another micro batch, from this one and another's: every amount is affine in the samples.

        Args:
            traced: samples of this trace and of ``other``.
        """
        first, second = traced

        def between(one: object, other: object, names: Sequence[str]) -> dict[str, Any]:
            pairs = {name: (getattr(one, name), getattr(other, name)) for name in names}
            return {name: a + (b - a) * (micro_batch - first) // (second - first) for name, (a, b) in pairs.items()}

        peaks = ("peak", "peak_without_gradients", "peak_beside_earlier")
        amounts = (*peaks, "end", "flops", "traffic", "kept", "casts", "sent")
        phases = [replace(a, **between(a, b, amounts)) for a, b in zip(self.phases, other.phases, strict=True)]
        return replace(self, phases=tuple(phases), **between(self, other, ("hidden", "kept_output")))

    def deepened(self, depths: Mapping[str, int], gradients: Mapping[str, int]) -> Trace:
        """This trace with more blocks: as many in each stack as ``depths`` says.

        The missing blocks are like the middle one of the three that were traced. From their forward to
        their backward they hold what a block keeps for its backward, and after that their finished
        gradients.

        Args:
            gradients: bytes of the gradients of a block, by stack.
        """
        phases = self.phases
        for stack, depth in depths.items():
            phases = _deepened(phases, stack, depth, gradients[stack])
        return replace(self, phases=phases)


def _deepened(phases: tuple[Phase, ...], stack: str, depth: int, gradients: int) -> tuple[Phase, ...]:
    forward = [i for i, p in enumerate(phases) if p.name == "forward" and p.stack and p.stack[0] == stack]
    backward = [i for i, p in enumerate(phases) if p.name == "backward" and p.stack and p.stack[0] == stack]
    missing = depth - len(forward)
    if missing == 0 or len(forward) < TRACED_BLOCKS:
        return phases
    first, middle, last = forward
    turn = next(i for i, phase in enumerate(phases) if phase.name == "turn")
    # Autocast's copies of weights live until the forward ends, also where nobody keeps them for the backward.
    in_forward = missing * (phases[middle].end - phases[first].end)
    in_backward = missing * phases[middle].kept
    gradients *= missing
    deeper = []
    for i, phase in enumerate(phases):
        kept = in_forward if i < turn else in_backward
        alive = kept if last <= i <= backward[0] else 0
        finished = gradients if i > backward[1] else 0
        times = 1
        if i in (middle, backward[1]):  # it stands for itself and for those that are missing
            alive, times = kept, 1 + missing
            finished = max(gradients - kept, 0) if i == backward[1] and missing > 0 else 0
        deeper.append(
            replace(
                phase,
                peak=phase.peak + alive + finished,
                peak_without_gradients=phase.peak_without_gradients + alive,
                peak_beside_earlier=phase.peak_beside_earlier + alive,
                end=phase.end + (alive if i < backward[0] else 0),
                finished=phase.finished + (gradients if i >= backward[1] else 0),
                flops=phase.flops * times,
                traffic=phase.traffic * times,
                kept=phase.kept * times,
                casts=phase.casts * times,
                sent=phase.sent * (1 + missing if i == last else 1),  # a block's goes in the forward of the next one
                blocks=times,
                kept_by_each=phases[middle].kept,
            )
        )
    return tuple(deeper)


def _bytes_of(values: Any) -> int:
    """Bytes of a tensor, or of those in a tuple or list."""
    if isinstance(values, torch.Tensor):
        return values.nbytes
    return sum(_bytes_of(value) for value in values) if isinstance(values, (tuple, list)) else 0


_CAST = torch.ops.aten._to_copy.default


class _Watch(LiveStorages):
    """Live storages, operations and finished gradients, phase by phase."""

    def __init__(self, model: nn.Module, *, dense: bool, sum_type: torch.dtype | None) -> None:
        self.phases: list[Phase] = []
        self._made_in: dict[int, int] = {}
        self._casts: set[int] = set()
        super().__init__([*model.parameters(), *model.buffers()])
        self._known = frozenset(self._sizes)
        self.finished = self._finished_before = 0
        self.hidden = self.kept_output = 0
        self._output: int | None = None
        self.counts = Counts()
        self._sent = 0
        self._dense = dense
        self._sum_type = sum_type
        self._sums: list[torch.Tensor] = []
        self._phase: tuple[str, tuple[str, int] | None] = ("begin", None)
        self._without = 0
        self._flops = self._traffic = 0
        self._has_gradient = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ASKS:
            result = answer(func, args, dense=self._dense)
            if not isinstance(result, torch.Tensor):
                return result
        else:
            result = func(*args, **kwargs)
        if type(result) is FakeTensor:
            self.see(result)
        else:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.see(leaf)
        if func is _CAST and id(args[0].untyped_storage()) in self._known:
            self._casts.add(id(result.untyped_storage()))
        without = self.live - self.finished
        if without > self._without:
            self._without = without
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self._flops += count(*args, **kwargs, out_val=result)
        elif not func.is_view:
            self._traffic += _bytes_of(args) + _bytes_of(result)
        return result

    def enter(self, name: str, stack: tuple[str, int] | None = None) -> None:
        """End the phase that is on, and begin another."""
        now = self.live - self.finished
        without = max(self._without, now)
        amounts = (self.peak, without, self.peak - self._finished_before, now, self._flops, self._traffic)
        begun, sent = self._has_gradient, self.counts.sent - self._sent
        self._sent = self.counts.sent
        self.phases.append(Phase(*self._phase, *amounts, after_first_gradient=begun, finished=self.finished, sent=sent))
        self._has_gradient = self.finished > 0 or name == "reduce"
        self._phase = (name, stack)
        self._finished_before = self.finished
        self.restart()
        self._without = now
        self._flops = self._traffic = 0

    def turn(self) -> None:
        """End the forward: what is alive now is kept for the backward."""
        kept, casts = Counter[int](), Counter[int]()
        for key, phase in self._made_in.items():
            kept[phase] += self._sizes[key]
            casts[phase] += self._sizes[key] if key in self._casts else 0
        self.enter("turn")
        self.phases = [replace(phase, kept=kept[i], casts=casts[i]) for i, phase in enumerate(self.phases)]
        self.kept_output = self._sizes.get(self._output, 0) if self._output is not None else 0

    def passes_on(self, hidden: torch.Tensor) -> None:
        """What a block puts out."""
        hidden = local_part(hidden)
        self.hidden, self._output = hidden.nbytes, id(hidden.untyped_storage())

    def _watch(self, storage: torch.UntypedStorage, size: int) -> None:
        super()._watch(storage, size)
        self._made_in[id(storage)] = len(self.phases)

    def _forget(self, key: int) -> None:
        super()._forget(key)
        del self._made_in[key]
        if key == self._output:  # another storage may get its number
            self._output = None
        self._casts.discard(key)

    def finish(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if not self.finished:
            self.enter("reduce")
        gradient = local_part(parameter.grad)
        if self._sum_type is None or gradient.dtype == torch.float32:
            self.finished += gradient.untyped_storage().nbytes()
            return
        self.finished += gradient.numel() * self._sum_type.itemsize
        self._sums.append(gradient.to(self._sum_type))
        parameter.grad = None


class _NoMemory:
    """A host whose memory does not count."""

    def send(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], Wait]:
        return [(tensor.shape, tensor.dtype) for tensor in tensors], lambda: None

    def fetch(self, copies: Sequence[Any]) -> tuple[list[torch.Tensor], Wait]:
        return [torch.empty(shape, dtype=dtype) for shape, dtype in copies], lambda: None


class OnGpu(TorchFunctionMode):
    """What a GPU does otherwise than a CPU, where this torch may know no GPU.

    Attention is always one of the fused kernels, also with dropout and with masks; and autocast
    computes more functions in fp32.
    """

    IN_FP32 = frozenset(
        {"layer_norm", "softmax", "log_softmax", "pow", "exp", "rsqrt", "cumsum", "sum", "prod", "norm"}
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is nn.functional.scaled_dot_product_attention:
            kwargs["dropout_p"] = 0.0  # its mask is drawn again in the backward, and never stored
        elif torch.is_autocast_enabled("cpu") and getattr(func, "__name__", "").strip("_") in self.IN_FP32:
            args = tuple(_to_fp32(arg) for arg in args)
        return func(*args, **kwargs)


def _on_gpu(forward: Any) -> Callable[..., Any]:
    """A forward that is computed again in the backward, where modes of functions are off."""

    def on_gpu(*args: Any, **kwargs: Any) -> Any:
        with OnGpu():
            return forward(*args, **kwargs)

    return on_gpu


def _to_fp32(value: Any) -> Any:
    narrow = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if narrow else value


def trace(
    model: nn.Module,
    batch: Batch,
    *,
    compute_type: torch.dtype | None = None,
    sum_type: torch.dtype | None = None,
    recompute: str = "none",
    offload: bool = False,
    gpu: bool = False,
    compute_loss: Callable[[nn.Module, Batch], torch.Tensor] | None = None,
) -> Trace:
    """Follow one micro batch through a model of fake tensors, from its inputs to its gradients.

    Args:
        model: on fake tensors, as :func:`fake.fake_tensors` makes them.
        batch: fake tensors, shapes as in training.
        compute_type: of autocast; None computes in the type of the parameters.
        sum_type: what gradients of 16 bits are added up in as they come; None leaves them as they are.
        recompute: one of ``layouts.RECOMPUTED``, a block at a time.
        offload: whether what the blocks keep goes to the host.
        gpu: whether the run is for a GPU.
        compute_loss: by default the loss that the model puts out.
    """
    padded = "attention_mask" in batch
    with contextlib.ExitStack() as stack:
        watch = _Watch(model, dense=not padded, sum_type=sum_type)
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
            stack.enter_context(OnGpu())
            stack.enter_context(patch.dict(CHUNK_BYTES, cpu=CHUNK_BYTES["accelerator"]))
        stack.enter_context(watch)
        with torch.autocast("cpu", dtype=compute_type or torch.bfloat16, enabled=compute_type is not None):
            loss = compute_loss(model, batch) if compute_loss else model(**batch).loss
            weighted = loss * 2.0  # as an engine does
        del loss
        watch.turn()
        weighted.backward()
        watch.enter("done")
    for parameter in model.parameters():
        parameter.grad = None
    return Trace(tuple(watch.phases), watch.hidden, watch.kept_output)


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """transformers cannot see that fake tokens are no padding, and would warn of it."""
    logger = logging.getLogger("transformers.modeling_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _watch_blocks(model: nn.Module, watch: _Watch, stack: contextlib.ExitStack, *, recompute: str, gpu: bool) -> None:
    """Hooks that begin the phases; and, if asked, recomputation; the blocks' forwards are put back at the end."""
    positions = stacks_of(model)
    final = {name: number for name, number in positions.values()}  # noqa: C416 - the last place of each stack
    for name, position in positions.items():
        block = model.get_submodule(name)
        stack.callback(_restore_forward, block, vars(block).get("forward"))  # tensor parallelism may have put one there
        if recompute != "none":
            forward = _on_gpu(block.forward) if gpu else block.forward
            block.forward = Checkpointed(forward, selective=recompute == "selective")

        def enter(module: nn.Module, args: Any, *, position: tuple[str, int] = position) -> None:
            watch.enter("forward", position)

        def after(module: nn.Module, args: Any, output: Any, *, position: tuple[str, int] = position) -> None:
            if position[1] == final[position[0]]:
                watch.enter("head")
            hidden = next(t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad)
            watch.passes_on(hidden)
            hidden.register_hook(lambda gradient: watch.enter("backward", position))

        stack.callback(block.register_forward_pre_hook(enter).remove)
        stack.callback(block.register_forward_hook(after).remove)
        if position[1] == 0:
            stack.callback(block.register_forward_pre_hook(_at_input(watch), with_kwargs=True).remove)


def _restore_forward(block: nn.Module, before: Any) -> None:
    if before is None:
        vars(block).pop("forward", None)
    else:
        block.forward = before


def _at_input(watch: _Watch) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
        if inputs:
            inputs[0].register_hook(lambda gradient: watch.enter("end"))

    return hook


def stacks_of(model: nn.Module) -> dict[str, tuple[str, int]]:
    """For each block by name, the stack (the list that it stands in) and its place there from 0."""
    positions: dict[str, tuple[str, int]] = {}
    counts: dict[str, int] = {}
    for name in find_blocks(model):
        stack = name.rpartition(".")[0]
        positions[name] = (stack, counts.get(stack, 0))
        counts[stack] = counts.get(stack, 0) + 1
    return positions


def gradient_bytes(model: nn.Module, sum_type: torch.dtype | None = None) -> dict[str, int]:
    """Bytes of the gradients of a block, by stack; ``sum_type`` as in :func:`trace`."""
    sizes: dict[str, int] = {}
    for name, (stack, _) in stacks_of(model).items():
        trained = [p for p in model.get_submodule(name).parameters() if p.requires_grad]
        sizes[stack] = sum(local_part(p).numel() * _width_of_gradient(p, sum_type) for p in trained)
    return sizes


def _width_of_gradient(parameter: nn.Parameter, sum_type: torch.dtype | None) -> int:
    if sum_type is None or parameter.dtype == torch.float32:
        return parameter.itemsize
    return sum_type.itemsize
