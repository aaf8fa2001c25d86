"""A small job whose evaluations return the scores that a test chooses."""

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from rapidformer_templates import Data
from tests.support.lines import Line


class Scored(Line):
    """Fits a line. The evaluation after step ``s`` returns ``scores[s // every - 1]`` as ``utility``."""

    samples, every = 80, 2
    scores: Sequence[float] = ()
    dies_after: int | None = None
    asks_after: int | None = None
    done = 0

    def build_data(self) -> Data:
        data = super().build_data()
        data.valid = data.train[:5]  # type: ignore[index]
        return data

    def compute_metrics(self, predictions: Sequence[Any], references: Sequence[Any]) -> Mapping[str, float]:
        return {"utility": self.scores[self.done // self.every - 1]}

    def on_step_end(self, step: int, result: Any) -> None:
        self.done = step
        if step == self.dies_after:
            raise InterruptedError
        if step == self.asks_after:
            os.kill(os.getpid(), signal.SIGTERM)
