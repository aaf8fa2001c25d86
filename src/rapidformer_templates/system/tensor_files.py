"""Tensors in temporary files that are mapped into memory.

When memory is short, the system drops pages of such files and reads them again at their next use. So a process can hold
more tensors than fit into its memory, if it computes with a few of them at a time. ``parameters_seen_by`` moves a model
there while it is built.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from rapidformer_templates.system.files import write_at
from rapidformer_templates.system.process_state import return_freed_memory

FIRST_FILE, LARGEST_FILE = 1 << 26, 1 << 32
"""Bytes of the first file, and of the largest one unless a tensor needs more. Each file has twice the last one's."""
RETURNED_AFTER = 1 << 25
"""Bytes of stored tensors after which freed memory is returned. Many small tensors leave holes that glibc keeps."""
ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes."""


class TensorFiles:
    """Stores tensors in files that have no name, so that nothing of them remains after the process.

    A file is deleted with the last of its tensors. Changes to a stored tensor change its file.

    Args:
        folder: a folder on the disk that the files need.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[torch.Tensor] = []  # the bytes of each file
        self._others: dict[int, torch.Tensor] = {}  # tensors in files of others, by the address of their storage
        self._descriptor = -1
        self._end = 0  # of the last tensor in the last file
        self._unreturned = 0  # bytes that were stored since freed memory was returned

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *unused: object) -> None:
        self._files.clear()
        self._others.clear()
        self._close()

    def store(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in a file with the same values. A tensor that is already in a file is returned unchanged.

        Raises:
            OSError: the file cannot be written.
        """
        if self._has(tensor):
            return tensor
        size = tensor.numel() * tensor.element_size()
        if size == 0:
            return tensor.detach().cpu().clone()
        if not self._files or self._end + size > len(self._files[-1]):
            self._close()
            file_size = max(size, min(2 * len(self._files[-1]), LARGEST_FILE) if self._files else FIRST_FILE)
            with tempfile.TemporaryFile(dir=self._folder) as file:
                file.truncate(file_size)
                try:
                    pages = mmap.mmap(file.fileno(), file_size)
                except OSError:  # some network file systems cannot write through a mapping, so changes need memory
                    pages = mmap.mmap(file.fileno(), file_size, flags=mmap.MAP_PRIVATE)
                self._descriptor = os.dup(file.fileno())
            self._files.append(torch.frombuffer(pages, dtype=torch.uint8))
            self._end = 0
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        write_at(self._descriptor, values.numpy().data, self._end)
        stored = self._files[-1][self._end : self._end + size]
        self._end = -(-(self._end + size) // ALIGNMENT) * ALIGNMENT
        self._unreturned += size
        if self._unreturned > RETURNED_AFTER:
            return_freed_memory()
            self._unreturned = 0
        # A storage for each tensor: safetensors and transformers take tensors of one storage for tied weights.
        own_storage = torch.frombuffer(stored.numpy().data, dtype=torch.uint8)
        return own_storage.view(tensor.dtype).view(tensor.shape)

    def add_mapped(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that is already in a mapped file, such as one of safetensors. It counts as stored."""
        self._others[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def results_stored(self) -> TorchFunctionMode:
        """Store the results of torch's functions inside the context, unless they are views of stored tensors."""
        return _Results(self)

    def parameters_stored(self) -> AbstractContextManager[None]:
        """Store parameters that modules get inside the context, and new values that are assigned to them."""
        return parameters_seen_by(self.store_parameter)

    def store_parameter(self, parameter: nn.Parameter) -> None:
        """Store the values of a parameter on the host."""
        if _is_plain(parameter) and not self._has(parameter):
            parameter.data = self.store(parameter)

    def _has(self, tensor: torch.Tensor) -> bool:
        if _is_plain(tensor):
            place = tensor.untyped_storage().data_ptr()
            return place in self._others or any(0 <= place - file.data_ptr() < len(file) for file in self._files)
        return False

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the host and of no subclass."""
    return type(tensor.data) is torch.Tensor and tensor.device.type == "cpu"


class _Results(TorchFunctionMode):
    def __init__(self, files: TensorFiles) -> None:
        super().__init__()
        self.files = files

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        return tree_map_only(torch.Tensor, self.files.store, func(*args, **(kwargs or {})))


See = Callable[[nn.Parameter], None]
_Tensor: Any = torch.Tensor


@contextmanager
def parameters_seen_by(see: See) -> Iterator[None]:
    """Call a function with each parameter that a module gets inside the context, and again if it gets new values."""

    def see_registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            see(parameter)

    hook = register_module_parameter_registration_hook(see_registered)
    try:
        with _NewValues(see):
            yield
    finally:
        hook.remove()


class _NewValues(TorchFunctionMode):
    """Sees assignments to ``data``."""

    def __init__(self, see: See) -> None:
        super().__init__()
        self.see = see

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func == _Tensor.data.__set__ and isinstance(args[0], nn.Parameter):
            self.see(args[0])
        return result
