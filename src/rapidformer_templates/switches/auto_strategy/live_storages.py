"""Live storages: how many bytes the tensors of a piece of code use at each moment."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rapidformer_templates.engines.shards import local_part


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
        """Count the storage of a tensor if it is new."""
        storage = local_part(tensor).untyped_storage()
        if id(storage) not in self._sizes:
            self._watch(storage, storage.nbytes())
            self.peak = max(self.peak, self.live)

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are live now."""
        self.peak = self.live

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Update the size of a resized storage. FSDP frees and allocates memory in this way."""
        key = id(storage)
        if key in self._sizes:
            self.live += storage.nbytes() - self._sizes[key]
            self._sizes[key] = storage.nbytes()
            self.peak = max(self.peak, self.live)

    def _watch(self, storage: torch.UntypedStorage, size: int) -> None:
        key = id(storage)
        self._sizes[key] = size
        self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
        self.live += size

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        del self._references[key]
