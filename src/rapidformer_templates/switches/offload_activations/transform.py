"""Keeps the activations of blocks in host memory: which ones go there, when they go, and when they return.

The unit is a block's forward. The activations that it keeps are sent while the next block computes. Their device copies
are freed when that block is done. So the activations of the last block, whose backward follows at once, never leave.
When the backward of a block begins, the activations of the block before it are fetched. Two blocks' activations are on
the device at a time.

The host is page-locked memory. Streams copy to and from it during computation. A receipt has the bytes sent.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from rapidformer_templates.engines import forwards
from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.engines.contract import Engine, Receipt
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.blocks import HIDDEN
from rapidformer_templates.system import accelerator

MIN_BYTES = 32 * 1024
"""Smaller storages stay on the device.

Starting a copy takes longer than the copy itself, and there is little to gain.
"""

Wait = Callable[[], None]
"""Makes later work on the device wait for a copy. The host does not wait."""


class Host(Protocol):
    """Where kept tensors go."""

    def send(self, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[object], Wait]:
        """Start to copy device tensors. Return the copies, and the wait that must precede freeing the tensors."""

    def fetch(self, copies: Sequence[Any]) -> tuple[list[torch.Tensor], Wait]:
        """Start to copy tensors back. Return device tensors, and the wait that must precede reading or freeing them."""


class PinnedMemory:
    """Page-locked host memory for an accelerator.

    Each direction has a separate stream. A copy starts when the device has finished all work queued before it, and
    overlaps with work queued after it. The compute stream allocates and frees device memory. It must wait for a
    copy before it frees memory that the copy reads or writes.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.Stream(device), torch.Stream(device)

    def send(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Wait]:
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        return copies, self._copy(self._out, copies, tensors)

    def fetch(self, copies: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Wait]:
        tensors = [torch.empty(copy.shape, dtype=copy.dtype, device=self._device) for copy in copies]
        return tensors, self._copy(self._back, tensors, copies)

    def _copy(self, stream: torch.Stream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Wait:
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            copied = accelerator.recorded_event(self._device, stream)
        return lambda: torch.accelerator.current_stream(self._device).wait_event(copied)


class Counts:
    """Bytes over all micro batches so far.

    Attributes:
        sent: sent to the host.
        late: fetched only when their backward began, so that the device waited for the whole copy.
        offloaded: in host memory now.
        most_offloaded: highest value of ``offloaded``.
    """

    def __init__(self) -> None:
        self.sent = self.late = self.offloaded = self.most_offloaded = 0

    def send(self, size: int) -> None:
        """Count bytes that are sent to the host."""
        self.sent += size
        self.offloaded += size
        self.most_offloaded = max(self.most_offloaded, self.offloaded)


class SavedStorage:
    """A storage that a forward keeps for its backward. It lives as long as autograd's saved tensors that use it.

    Attributes:
        block: class name of the block that keeps it.
        values: the whole storage on the device as a flat tensor, or None while it is away.
        version: autograd's count of its in-place changes, at the time when it was kept.
        copy: its copy in host memory. None before it has been sent.
        size: bytes.
    """

    __slots__ = ("__weakref__", "block", "copy", "counts", "size", "values", "version")

    def __init__(self, tensor: torch.Tensor, block: str, counts: Counts) -> None:
        self.copy: object = None
        self.block, self.counts = block, counts
        self.size = tensor.untyped_storage().nbytes()
        rows = (tensor.untyped_storage().nbytes() // tensor.element_size(),)
        self.values: torch.Tensor | None = tensor.detach().as_strided(rows, (1,), 0)
        self.version = tensor._version

    def free_device_copy(self) -> None:
        """Free the memory on the device once the host has a copy.

        Raises:
            ModelError: the values have changed since. Autograd cannot detect this, because it does not hold the tensor.
        """
        if self.values is not None and self.values._version != self.version:
            message = "a tensor that is kept for the backward is changed in place"
            hint = "compute that out of place: without the switch the backward would refuse it, too"
            raise ModelError(message, where=f"{self.block} with --offload-activations", hint=hint)
        self.values = None

    def __del__(self) -> None:
        if self.copy is not None:
            self.counts.offloaded -= self.size


class SavedTensor(NamedTuple):
    """The object that autograd holds in place of a tensor."""

    call: BlockCall
    storage: SavedStorage
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class BlockCall:
    """A forward of a block. It has weak references to what it keeps, because :class:`SavedTensor` holds both.

    Attributes:
        number: index of the block among the blocks on this worker.
        block: class name of the block.
        forward: the calls in the same forward of the model, or of a part of it.
        storages: kept storages by storage key and type.
        has_begun: whether its backward has begun.
    """

    def __init__(self, number: int, block: str, forward: list[BlockCall]) -> None:
        self.number, self.block, self.forward = number, block, forward
        self.storages: dict[tuple[int, torch.dtype], weakref.ref[SavedStorage]] = {}
        self.has_begun = False

    def alive(self) -> list[SavedStorage]:
        """Storages that its backward still needs."""
        return [storage for storage in (reference() for reference in self.storages.values()) if storage is not None]


def _last(calls: Sequence[BlockCall]) -> BlockCall | None:
    """Return the last of these calls that keeps something. Its backward is the next to run."""
    return next((call for call in reversed(calls) if call.alive()), None)


def _is_waiting(forward: Sequence[BlockCall]) -> bool:
    """Whether the backward of a forward has yet to run."""
    return not any(call.has_begun for call in forward) and _last(forward) is not None


class _Transfer(NamedTuple):
    """Device tensors that a copy reads or writes.

    Their memory must not be reused before the copy has been waited for.
    """

    call: BlockCall
    values: list[torch.Tensor]
    wait: Wait


class Offloader:
    """Moves the activations that the blocks of a model keep.

    Args:
        host: where activations go.
        device: where they are computed.

    Attributes:
        counts: bytes moved.
    """

    def __init__(self, host: Host, device: torch.device) -> None:
        self.counts = Counts()
        self._host, self._device = host, device
        self._forwards: list[list[BlockCall]] = []
        self._running: BlockCall | None = None  # the call whose forward runs
        self._on_device: Storages = {}  # its tensors that stay on the device
        self._last: BlockCall | None = None  # the call whose forward has ended and whose activations have not been sent
        self._outgoing: _Transfer | None = None
        self._incoming: list[_Transfer] = []

    @contextmanager
    def around(
        self, number: int, block: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Iterator[None]:
        """Wrap a forward with gradients of the block with this number."""
        if self._running is not None:  # a nested block is a part of the outer one
            yield
            return
        self._send_last()
        hidden = args[0] if args else kwargs.get(HIDDEN)
        begins = isinstance(hidden, torch.Tensor) and hidden.is_leaf and hidden.requires_grad  # from another stage
        if begins or not self._forwards or self._forwards[-1][-1].number >= number:
            self._forwards = [*filter(_is_waiting, self._forwards), []]
            # Free activations that were fetched for a backward that will not run.
            for call in {transfer.call for transfer in self._incoming if not transfer.call.alive()}:
                self._finish_fetch(call)
        self._running = call = BlockCall(number, type(block).__name__, self._forwards[-1])
        call.forward.append(call)
        # On the device anyway: the block's weights, and tensors that it shares with other blocks.
        arguments = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        shared = [*(leaf for leaf in arguments if leaf is not hidden), *block.parameters(), *block.buffers()]
        storages = [StorageWeakRef(t.untyped_storage()) for t in shared if not is_traceable_wrapper_subclass(t)]
        self._on_device = {int(storage.cdata): storage for storage in storages}
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self._running, self._on_device = None, {}
        self._free_device_copies(but=call)
        self._last = call

    @torch.no_grad()
    def pack(self, tensor: torch.Tensor) -> torch.Tensor | SavedTensor:
        """Return the object that autograd holds for a tensor: the tensor itself, or a handle to restore it."""
        call = self._running
        is_plain = tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
        is_here = tensor.device.type == self._device.type and not is_traceable_wrapper_subclass(tensor)
        if call is None or not (is_plain and is_here) or tensor.untyped_storage().nbytes() < MIN_BYTES:
            return tensor
        if _is_weight(tensor) or _storage_key(tensor) in self._on_device:
            return tensor
        key = _storage_key(tensor), tensor.dtype
        # This block or the one before it may have kept the storage already. It is used if it is still on the device.
        calls = [call, self._outgoing.call] if self._outgoing else [call]
        known = [reference() for each in calls if (reference := each.storages.get(key))]
        storage = next((saved for saved in known if saved is not None and saved.values is not None), None)
        if storage is None:
            storage = SavedStorage(tensor, call.block, self.counts)
        call.storages[key] = weakref.ref(storage)
        return SavedTensor(call, storage, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    @torch.no_grad()
    def unpack(self, saved: torch.Tensor | SavedTensor) -> torch.Tensor:
        """Return the tensor in device memory."""
        if isinstance(saved, torch.Tensor):
            return saved
        if not saved.call.has_begun:
            self._begin_backward(saved.call)
        if saved.storage.values is None:  # the block's own forward has already differentiated a part of it
            self._start_fetch(saved.call, late=True)
            self._finish_fetch(saved.call)
        assert saved.storage.values is not None
        return saved.storage.values.as_strided(saved.size, saved.stride, saved.offset)

    def _begin_backward(self, call: BlockCall) -> None:
        call.has_begun = True
        if self._last is call:
            self._last = None  # it stays on the device
        self._free_device_copies(but=call)
        following = _last(call.forward[: call.forward.index(call)])
        if following is None:
            # Guess the call whose backward is next. A pipeline takes the oldest micro batch, part by part.
            pending, part = filter(_is_waiting, self._forwards), call.forward[-1].number
            following = _last(min(pending, key=lambda forward: forward[-1].number != part, default=[]))
        if self._last is not None and self._last is not following and self._last.forward is not call.forward:
            self._send_last()  # it belongs to another micro batch, which will wait longer
        self._start_fetch(call, late=True)
        self._finish_fetch(call)
        if following is not None:
            self._start_fetch(following)

    def _send_last(self) -> None:
        call, self._last = self._last, None
        if call is None or not call.alive():
            return
        self._free_device_copies()
        sent = [storage for storage in call.alive() if storage.copy is None]
        values = [storage.values for storage in sent if storage.values is not None]
        copies, wait = self._host.send(values)
        for storage, copy in zip(sent, copies, strict=True):
            storage.copy = copy
            self.counts.send(storage.size)
        self._outgoing = _Transfer(call, values, wait)

    def _free_device_copies(self, but: BlockCall | None = None) -> None:
        """Free device tensors that have been copied to the host, unless another call still uses them."""
        outgoing, self._outgoing = self._outgoing, None
        if outgoing is None:
            return
        outgoing.wait()
        needed = but.alive() if but else []
        for storage in outgoing.call.alive():
            if storage not in needed:
                storage.free_device_copy()

    def _start_fetch(self, call: BlockCall, *, late: bool = False) -> None:
        """Start to fetch the activations of a call that are away."""
        offloaded = [storage for storage in call.alive() if storage.values is None]
        if not offloaded:
            return
        values, wait = self._host.fetch([storage.copy for storage in offloaded])
        for storage, back in zip(offloaded, values, strict=True):
            storage.values, storage.version = back, back._version
            self.counts.late += storage.size if late else 0
        self._incoming.append(_Transfer(call, values, wait))

    def _finish_fetch(self, call: BlockCall) -> None:
        for transfer in [transfer for transfer in self._incoming if transfer.call is call]:
            transfer.wait()
            self._incoming.remove(transfer)


def _storage_key(tensor: torch.Tensor) -> int:
    """Return a key that differs between all storages that are alive at the same time."""
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)


Storages = dict[int, StorageWeakRef]
"""Storages by key. The reference keeps a key reserved: ZeRO-3's empty weights would otherwise give it up."""


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether this is a weight, a view of one, a weight in another type, or a leaf that somebody else holds."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad):
        return True
    node = base.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    return isinstance(getattr(node.next_functions[0][0], "variable", None), nn.Parameter)


def offload_activations(assembly: Assembly, building: Building[object]) -> None:
    """Keep the activations that blocks save for their backward in host memory.

    Raises:
        ModelError: the model has no repeated blocks.
    """
    blocks = list(assembly.require_blocks("activation offloading", "--offload-activations").values())
    offloader = Offloader(PinnedMemory(building.workers.device), building.workers.device)
    offload_blocks(blocks, offloader)
    assembly.record(offloader)


def offload_blocks(blocks: list[nn.Module], offloader: Offloader) -> None:
    """Replace each block's ``forward`` on the instance. Its parameters keep their names, and hooks stay outside."""

    def contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """Return the modes of a forward and of its recomputation, which offload the products that it saves.

        torch holds them where autograd's hooks do not see them.
        """
        products: deque[torch.Tensor | SavedTensor] = deque()
        return _SaveProducts(offloader, products), _ReturnProducts(offloader, products)

    for number, block in enumerate(blocks):
        if isinstance(block.forward, forwards.Checkpointed) and block.forward.keeps:
            block.forward.keeps = {"context_fn": contexts}
        block.forward = Offloaded(block, number, offloader)


class Offloaded:
    """A block's forward that leaves no large activations on the device for its backward.

    Attributes:
        forward: the original forward.
    """

    def __init__(self, block: nn.Module, number: int, offloader: Offloader) -> None:
        functools.update_wrapper(self, block.forward)
        self.forward: Callable[..., object] = block.forward
        self._block, self._number, self._offloader = block, number, offloader

    def __call__(self, *args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled() or not forwards.backward_may_follow():
            return self.forward(*args, **kwargs)
        with self._offloader.around(self._number, self._block, args, kwargs):
            return self.forward(*args, **kwargs)


class _SaveProducts(TorchDispatchMode, forwards.SavesMatmuls):
    def __init__(self, offloader: Offloader, products: deque[torch.Tensor | SavedTensor]) -> None:
        super().__init__()
        self._offloader, self._products = offloader, products

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        # Without a backward the offloader sends nothing to the host, and the products of all blocks would stay here.
        if func in forwards.PRODUCTS and forwards.backward_may_follow():
            self._products.append(self._offloader.pack(result.detach()))
        return result


class _ReturnProducts(_SaveProducts):
    """Returns the saved outputs in the order in which they were computed. The recomputation has the same order."""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if func in forwards.PRODUCTS:
            return self._offloader.unpack(self._products.popleft())
        return func(*args, **(kwargs or {}))


class Offloading(Receipt):
    """Reports ``offloaded_bytes``, ``offloaded_bytes_at_a_time`` and ``late_bytes`` of this worker."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}

    def after_step(self, engine: Engine) -> dict[str, int]:
        offloader = engine.assembly.find(Offloader)
        if offloader is not None and not self._first:
            sent, most, late = offloader.counts.sent, offloader.counts.most_offloaded, offloader.counts.late
            self._first = {"offloaded_bytes": sent, "offloaded_bytes_at_a_time": most, "late_bytes": late}
        return self._first
