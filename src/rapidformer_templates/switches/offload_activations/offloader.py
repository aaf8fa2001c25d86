"""Decides which activations go to the host, when they go, and when they return.

The unit is a block's forward. The activations that it keeps are sent while the next block computes. Their device copies
are freed when that block is done. So the activations of the last block, whose backward follows at once, never leave.
When the backward of a block begins, the activations of the block before it are fetched. Two blocks' activations are on
the device at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from rapidformer_templates.errors import ModelError
from rapidformer_templates.switches.offload_activations.host import Host, Wait

LEAST_BYTES = 32 * 1024
"""Smaller storages stay on the device.

Starting a copy takes longer than the copy itself, and there is little to gain.
"""

HIDDEN = "hidden_states"
"""Name of the hidden state if transformers passes it to a block by name."""


class Counts:
    """Bytes over all micro batches so far.

    Attributes:
        sent: sent to the host.
        late: fetched only when their backward began, so that the device waited for the whole copy.
        away: in host memory now.
        most_away: highest value of ``away``.
    """

    def __init__(self) -> None:
        self.sent = self.late = self.away = self.most_away = 0

    def send(self, size: int) -> None:
        """Count bytes that are sent to the host."""
        self.sent += size
        self.away += size
        self.most_away = max(self.most_away, self.away)


class Kept:
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
        self.copy: Any = None
        self.block, self.counts = block, counts
        self.size = tensor.untyped_storage().nbytes()
        self.values: torch.Tensor | None = _row_of(tensor)
        self.version = tensor._version

    def let_go(self) -> None:
        """Free the memory on the device once the host has a copy.

        Raises:
            ModelError: the values have changed since. Autograd cannot detect this, because it does not hold the tensor.
        """
        if self.values is not None and self.values._version != self.version:
            raise ModelError(
                "a tensor that is kept for the backward is changed in place",
                where=f"{self.block} with --offload-activations",
                hint="compute that out of place: without the switch the backward would refuse it, too",
            )
        self.values = None

    def __del__(self) -> None:
        if self.copy is not None:
            self.counts.away -= self.size


class Saved(NamedTuple):
    """The object that autograd holds in place of a tensor."""

    call: Call
    kept: Kept
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Call:
    """A forward of a block. It has weak references to what it keeps, because :class:`Saved` holds both.

    Attributes:
        number: index of the block among the blocks on this worker.
        block: class name of the block.
        chain: the forward of the model.
        kept: kept storages by storage key and type.
        begun: whether its backward has begun.
    """

    def __init__(self, number: int, block: str, chain: Chain) -> None:
        self.number, self.block, self.chain = number, block, chain
        self.kept: dict[tuple[int, torch.dtype], weakref.ref[Kept]] = {}
        self.begun = False

    def alive(self) -> list[Kept]:
        """Storages that its backward still needs."""
        return [kept for kept in (reference() for reference in self.kept.values()) if kept is not None]

    def away(self) -> list[Kept]:
        """Needed storages that are only in host memory."""
        return [kept for kept in self.alive() if kept.values is None]


class Chain:
    """The block forwards in one forward of the model, or of a part of it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def last(self, before: Call | None = None) -> Call | None:
        """The last call (before another one) that keeps something. Its backward is the next to run."""
        calls = self.calls if before is None else self.calls[: self.calls.index(before)]
        return next((call for call in reversed(calls) if call.alive()), None)

    @property
    def is_waiting(self) -> bool:
        """Whether its backward has yet to run."""
        return not any(call.begun for call in self.calls) and self.last() is not None


class _Moving(NamedTuple):
    """Device tensors that a copy reads or writes.

    Their memory must not be reused before the copy has been waited for.
    """

    call: Call
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
        self._chains: list[Chain] = []
        self._open: Call | None = None  # the call whose forward runs
        self._staying: Storages = {}  # its tensors that stay on the device
        self._last: Call | None = None  # the call whose forward has ended and whose activations have not been sent
        self._leaving: _Moving | None = None
        self._coming: list[_Moving] = []

    @contextmanager
    def around(self, number: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Wrap a forward with gradients of the block with this number."""
        if self._open is not None:  # a nested block is a part of the outer one
            yield
            return
        self._send_last()
        hidden = args[0] if args else kwargs.get(HIDDEN)
        call = self._open = self._next_call(number, block, hidden)
        self._staying = _held_anyway(block, args, kwargs, hidden)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self._open, self._staying = None, {}
        self._let_go(but=call)
        self._last = call

    def _next_call(self, number: int, block: nn.Module, hidden: Any) -> Call:
        begins = isinstance(hidden, torch.Tensor) and hidden.is_leaf and hidden.requires_grad  # from another stage
        if begins or not self._chains or self._chains[-1].calls[-1].number >= number:
            self._chains = [*(chain for chain in self._chains if chain.is_waiting), Chain()]
            self._give_up_abandoned()
        chain = self._chains[-1]
        call = Call(number, type(block).__name__, chain)
        chain.calls.append(call)
        return call

    @torch.no_grad()
    def pack(self, tensor: torch.Tensor) -> torch.Tensor | Saved:
        """Return the object that autograd holds for a tensor: the tensor itself, or a handle to restore it."""
        call = self._open
        if call is None or not self._goes(tensor):
            return tensor
        key = _storage_key(tensor), tensor.dtype
        kept = self._known(key)
        if kept is None:
            kept = Kept(tensor, call.block, self.counts)
        call.kept[key] = weakref.ref(kept)
        return Saved(call, kept, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _known(self, key: tuple[int, torch.dtype]) -> Kept | None:
        """Return the entry of a storage that this block or the one before it has kept, if it is still on the device."""
        for call in (self._open, self._leaving.call if self._leaving else None):
            reference = call.kept.get(key) if call else None
            kept = reference() if reference else None
            if kept is not None and kept.values is not None:
                return kept
        return None

    def _goes(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type != self._device.type or tensor.layout is not torch.strided:
            return False
        if is_traceable_wrapper_subclass(tensor) or tensor.is_conj() or tensor.is_neg():
            return False
        if tensor.untyped_storage().nbytes() < LEAST_BYTES:
            return False
        return not _of_weights(tensor) and _storage_key(tensor) not in self._staying

    @torch.no_grad()
    def unpack(self, saved: torch.Tensor | Saved) -> torch.Tensor:
        """Return the tensor in device memory."""
        if isinstance(saved, torch.Tensor):
            return saved
        if not saved.call.begun:
            self._begin_backward(saved.call)
        if saved.kept.values is None:  # the block's own forward has already differentiated a part of it
            self._bring(saved.call, late=True)
            self._arrive(saved.call)
        assert saved.kept.values is not None
        return saved.kept.values.as_strided(saved.size, saved.stride, saved.offset)

    def _begin_backward(self, call: Call) -> None:
        call.begun = True
        if self._last is call:
            self._last = None  # it stays on the device
        self._let_go(but=call)
        following = call.chain.last(before=call) or self._likely_after(call)
        if self._last is not None and self._last is not following and self._last.chain is not call.chain:
            self._send_last()  # it belongs to another micro batch, which will wait longer
        self._bring(call, late=True)
        self._arrive(call)
        if following is not None:
            self._bring(following)

    def _likely_after(self, call: Call) -> Call | None:
        """Guess the call whose backward is next. A pipeline takes the oldest micro batch, part by part."""
        waiting = [chain for chain in self._chains if chain.is_waiting]
        part = call.chain.calls[-1].number
        chain = min(waiting, key=lambda chain: chain.calls[-1].number != part, default=None)
        return chain.last() if chain else None

    def _send_last(self) -> None:
        call, self._last = self._last, None
        if call is None or not call.alive():
            return
        self._let_go()
        going = [kept for kept in call.alive() if kept.copy is None]
        values = [kept.values for kept in going if kept.values is not None]
        copies, wait = self._host.send(values)
        for kept, copy in zip(going, copies, strict=True):
            kept.copy = copy
            self.counts.send(kept.size)
        self._leaving = _Moving(call, values, wait)

    def _let_go(self, but: Call | None = None) -> None:
        """Free device tensors that have been copied to the host, unless another call still uses them."""
        leaving, self._leaving = self._leaving, None
        if leaving is None:
            return
        leaving.wait()
        staying = but.alive() if but else []
        for kept in leaving.call.alive():
            if kept not in staying:
                kept.let_go()

    def _bring(self, call: Call, *, late: bool = False) -> None:
        """Start to fetch the activations of a call that are away."""
        away = call.away()
        if not away:
            return
        values, wait = self._host.fetch([kept.copy for kept in away])
        for kept, back in zip(away, values, strict=True):
            kept.values, kept.version = back, back._version
            self.counts.late += kept.size if late else 0
        self._coming.append(_Moving(call, values, wait))

    def _arrive(self, call: Call) -> None:
        for moving in [moving for moving in self._coming if moving.call is call]:
            moving.wait()
            self._coming.remove(moving)

    def _give_up_abandoned(self) -> None:
        """Free activations that were fetched for a backward that will not run."""
        for call in {moving.call for moving in self._coming if not moving.call.alive()}:
            self._arrive(call)


def _row_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor's storage as a flat tensor."""
    return tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def _storage_key(tensor: torch.Tensor) -> int:
    """Return a key that differs between all storages that are alive at the same time."""
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)


Storages = dict[int, StorageWeakRef]
"""Storages by key. The reference keeps a key reserved: ZeRO-3's empty weights would otherwise give it up."""


def _held_anyway(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Any) -> Storages:
    """Storages that are on the device anyway: the block's weights, and tensors that it shares with other blocks."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf is not hidden]
    held = [*given, *block.parameters(), *block.buffers()]
    storages = [StorageWeakRef(t.untyped_storage()) for t in held if not is_traceable_wrapper_subclass(t)]
    return {int(storage.cdata): storage for storage in storages}


def _of_weights(tensor: torch.Tensor) -> bool:
    """Whether this is a weight, a view of one, a weight in another type, or a leaf that somebody else holds."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad):
        return True
    node = base.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    return isinstance(getattr(node.next_functions[0][0], "variable", None), nn.Parameter)
