"""A job with one weight and one bias whose runs take hundredths of a second."""

from typing import Any

import numpy as np
import torch
from torch import nn

from rapidformer_templates import Data, Trainer

FLAGS = ["--lr", "0.1", "--log-interval", "1", "--micro-batch-size", "4"]


class Line(Trainer):
    """Fits y = 2x + 1 with one weight and one bias. Sample ``poisoned`` has an infinite x."""

    samples = 20
    poisoned: int | None = None

    def build_data(self) -> Data:
        x = np.random.default_rng(0).normal(size=(self.samples, 1)).astype(np.float32)
        if self.poisoned is not None:
            x[self.poisoned] = np.inf
        return Data(train=[{"x": row, "y": 2 * row + 1} for row in x])

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])


class Died(Exception):
    """Stands for the death of the process."""


class Mortal(Line):
    """Dies after a step."""

    dies_after: int | None = None

    def on_step_end(self, step: int, result: Any) -> None:
        if step == self.dies_after:
            raise Died


class Worsening(Mortal):
    """On its way to the line, the fit passes through the validation sample. So the best step is early."""

    def build_data(self) -> Data:
        data = super().build_data()
        data.valid = [{"x": np.float32([1.0]), "y": np.float32([0.6])}]
        return data
