"""Model FLOPs, and what a machine can do of them at most.

The convention: FLOPs are those of the matrix products and attention of one forward and its backward, as torch's
flop counter counts them for the plain model: 2 a multiply-add, the backward twice the forward, attention as the
whole square (a causal mask is not discounted), nothing for what is computed again, for norms, for activations or
for the optimizer. For a decoder this is 6 × parameters + 12 × layers × hidden × length a token (Chowdhery et al.,
2022, appendix B), without the tables that are only looked up. Utilisation is that rate over the rate of a large
matrix product of the same type on the same machine, measured in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.engines.mask_checks import answered, watch_positions

SIZES = {"cpu": 2048, "accelerator": 8192}
"""Rows and columns of the matrices: large enough that more is not faster."""

AT_LEAST_SECONDS = 0.1


def training_flops(build: Callable[[], nn.Module], example: Mapping[str, torch.Tensor]) -> int:
    """FLOPs of a forward and a backward of a model over one batch; no memory is taken for it.

    Args:
        build: makes the model, whose output has a ``loss``.
        example: the batch; only its shapes matter.
    """
    with torch.device("meta"):
        model = build().train()
    batch = {name: torch.empty_like(tensor, device="meta") for name, tensor in example.items()}
    settings: Any = getattr(model, "config", None)
    if settings is not None:
        settings.use_cache = False
    watch_positions(model)
    packed = MicroBatch(batch, [], looked={"position_ids": False})
    counter = FlopCounterMode(display=False)
    with counter, answered(packed, batch):
        model(**batch).loss.backward()
    return int(counter.get_total_flops())


def training_flops_of(kind: type[nn.Module], settings: Any, batch: Any) -> int:
    """As :func:`training_flops`, of a transformers class with its configuration; 0 for any other module."""
    if settings is None or not isinstance(batch, Mapping):
        return 0
    shapes = {name: tensor for name, tensor in batch.items() if isinstance(tensor, torch.Tensor)}
    shapes.pop("attention_mask", None)  # what a mask leaves out is counted all the same
    return training_flops(lambda: kind(settings), shapes)


class MatrixProduct:
    """A large matrix product in a type; its rate is the most that a model can hope for."""

    def __init__(self, device: str, precision: str, size: int | None = None) -> None:
        self.is_apart = device != "cpu"
        self.size = size or SIZES["accelerator" if self.is_apart else "cpu"]
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        draw = torch.Generator(device).manual_seed(0)
        self._a, self._b = (torch.randn(self.size, self.size, generator=draw, device=device).to(kind) for _ in "ab")
        self._out = torch.empty_like(self._a)
        self.rate()  # caches, clocks and the library's own choice of a kernel

    def rate(self) -> float:
        """FLOP/s now, over about a tenth of a second."""
        self.wait()
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < AT_LEAST_SECONDS:
            for _ in range(8 if self.is_apart else 1):
                torch.mm(self._a, self._b, out=self._out)
                count += 1
            self.wait()
        return 2 * self.size**3 * count / (time.perf_counter() - began)

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.is_apart:
            torch.accelerator.synchronize()
