"""Offload matmul outputs that selective recomputation saves.

torch holds them where autograd's hooks do not see them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from rapidformer_templates.engines.saved_matmuls import SavesMatmuls
from rapidformer_templates.engines.side_effects import backward_may_follow
from rapidformer_templates.switches.checkpoint_activations.transform import PRODUCTS
from rapidformer_templates.switches.offload_activations.offloader import Offloader


def offloaded_products(
    offloader: Offloader,
) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
    """Return a ``context_fn`` for torch's checkpoint: modes for the forward and for its recomputation."""

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if not backward_may_follow():
            return nullcontext(), nullcontext()  # the products of all blocks would stay on the device
        products: deque[Any] = deque()
        return _SaveProducts(offloader, products), _ReturnProducts(offloader, products)

    return contexts


class _SaveProducts(TorchDispatchMode, SavesMatmuls):
    def __init__(self, offloader: Offloader, products: deque[Any]) -> None:
        super().__init__()
        self._offloader, self._kept = offloader, products

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self._kept.append(self._offloader.pack(result.detach()))
        return result


class _ReturnProducts(_SaveProducts):
    """Returns the saved outputs in the order in which they were computed. The recomputation has the same order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            return self._offloader.unpack(self._kept.popleft())
        return func(*args, **(kwargs or {}))
