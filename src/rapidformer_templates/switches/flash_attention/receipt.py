"""Receipt of the attention kernels that ran. torch's profiler counts them, also inside compiled graphs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.autograd.profiler import profile

from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.receipt import Receipt

KERNEL = re.compile(r"_scaled_dot_product_\w+|_?flash_attn\w*_(forward|backward)|_flash_attention_(forward|backward)")
"""Names of torch's and ``flash_attn``'s operators that compute attention."""


def attention_functions(model: nn.Module) -> list[str]:
    """Return the attention functions that the parts of a model call, by their names in transformers' registry."""
    configs = (getattr(part, "config", None) for part in model.modules())
    return sorted({name for config in configs if (name := getattr(config, "_attn_implementation", None))})


@contextmanager
def count_kernels() -> Iterator[dict[str, int]]:
    """Yield a dict. On exit, it contains the number of calls of each attention operator in this process."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it writes two lines per block to standard error
    counts: dict[str, int] = {}
    with profile(use_kineto=False) as events:
        yield counts
    for event in events.key_averages():
        name = event.key.rpartition("::")[2]
        if KERNEL.fullmatch(name):
            counts[name] = counts.get(name, 0) + event.count


class AttentionKernels(Receipt):
    """Reports ``attention_kernels`` (calls of each in the first step) and ``attention_functions`` (their callers)."""

    def __init__(self) -> None:
        self._kernels: dict[str, int] = {}

    @contextmanager
    def around_step(self) -> Iterator[None]:
        with count_kernels() as self._kernels:
            yield

    def after_step(self, engine: Engine) -> dict[str, object]:
        return {"attention_kernels": self._kernels, "attention_functions": attention_functions(engine.model)}
