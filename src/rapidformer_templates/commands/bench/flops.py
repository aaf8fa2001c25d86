"""Model FLOPs, and the highest rate that a machine can reach.

The convention: model FLOPs count the matrix products and the attention in one forward and its backward, as
torch's flop counter counts them for the plain model.

- A multiply-add counts as 2 FLOPs, and the backward as twice the forward.
- Attention counts as the whole square. A causal mask is not discounted.
- Recomputation, norms, activations and the optimizer do not count.

For a decoder this is 6 × parameters + 12 × layers × hidden × length per token (Chowdhery et al., 2022, appendix B),
without embedding tables that are only looked up. Utilisation is the rate of model FLOPs divided by the rate of a large
matrix product in the same type on the same machine, measured in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.engines.current_batch import mask_answers, watch_positions

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SIZES = {"cpu": 2048, "accelerator": 8192}
"""Rows and columns of the matrices. Larger ones are not faster."""

AT_LEAST_SECONDS = 0.1


def training_flops(build: Callable[[], nn.Module], example: Mapping[str, torch.Tensor]) -> int:
    """Return the FLOPs of a model's forward and backward over one batch, without allocating memory for it.

    Args:
        build: function that creates the model. The model's output must have a ``loss``.
        example: the batch. Only its shapes matter.
    """
    with torch.device("meta"):
        model = build().train()
    batch = {name: torch.empty_like(tensor, device="meta") for name, tensor in example.items()}
    settings = getattr(model, "config", None)
    if settings is not None:
        settings.use_cache = False
    watch_positions(model)
    packed = MicroBatch(batch, [], mask_facts={"position_ids": False})
    counter = FlopCounterMode(display=False)
    with counter, mask_answers(packed, batch):
        model(**batch).loss.backward()
    return int(counter.get_total_flops())


def training_flops_of(kind: type[nn.Module], settings: PretrainedConfig | None, batch: object) -> int:
    """Return :func:`training_flops` for a transformers class and its configuration, or 0 for any other module."""
    if settings is None or not isinstance(batch, Mapping):
        return 0
    shapes = {name: tensor for name, tensor in batch.items() if isinstance(tensor, torch.Tensor)}
    shapes.pop("attention_mask", None)  # masked positions count as well
    return training_flops(lambda: kind(settings), shapes)


class MatrixProduct:
    """A large matrix product in a given type. Its rate is the upper limit for a model."""

    def __init__(self, device: str, precision: str, size: int | None = None) -> None:
        self.is_apart = device != "cpu"
        self.size = size or SIZES["accelerator" if self.is_apart else "cpu"]
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        draw = torch.Generator(device).manual_seed(0)
        self._a, self._b = (torch.randn(self.size, self.size, generator=draw, device=device).to(kind) for _ in "ab")
        self._out = torch.empty_like(self._a)
        self.nbytes = 3 * self._out.nbytes
        self.rate()  # warm up caches, clocks and the library's choice of a kernel

    def rate(self) -> float:
        """Measure the current rate in FLOP/s, over about a tenth of a second."""
        self.wait()
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < AT_LEAST_SECONDS:
            for _ in range(8 if self.is_apart else 1):
                torch.mm(self._a, self._b, out=self._out)
                count += 1
            self.wait()
        return 2 * self.size**3 * count / (time.perf_counter() - began)

    def wait(self) -> None:
        """Wait until the device has finished its work."""
        if self.is_apart:
            torch.accelerator.synchronize()
