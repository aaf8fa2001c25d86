"""See the parameters that modules get while a model is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

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
