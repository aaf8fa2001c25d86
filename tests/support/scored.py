"""A small job whose evaluations return the scores that a test chooses."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rapidformer_templates import Data, Trainer


class Scored(Trainer):
    """Fits y = 2x + 1. The evaluation after step ``s`` returns ``scores[s // every - 1]`` as ``utility``."""

    every = 2
    scores: Sequence[float] = ()
    dies_after: int | None = None
    asks_after: int | None = None
    done = 0

    def build_data(self) -> Data:
        x = np.random.default_rng(0).normal(size=(80, 1)).astype(np.float32)
        samples = [{"x": row, "y": 2 * row + 1} for row in x]
        return Data(train=samples, valid=samples[:5])

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])

    def compute_metrics(self, predictions: Sequence[Any], references: Sequence[Any]) -> Mapping[str, float]:
        return {"utility": self.scores[self.done // self.every - 1]}

    def on_step_end(self, step: int, result: Any) -> None:
        self.done = step
        if step == self.dies_after:
            raise InterruptedError
        if step == self.asks_after:
            os.kill(os.getpid(), signal.SIGTERM)
