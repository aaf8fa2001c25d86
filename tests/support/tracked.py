"""A small run that reports to trackers and can be killed, even while it reports."""

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

from rapidformer_templates import Data
from tests.support.lines import Line


class Tracked(Line):
    """Fits a line and evaluates on two sets."""

    samples = 80
    dies_after: int | None = None

    def build_data(self) -> Data:
        samples: Any = super().build_data().train
        return Data(train=samples, valid={"near": samples[:5], "far": samples[5:12]}, test=samples[12:15])

    def compute_metrics(self, predictions: Sequence[Any], references: Sequence[Any]) -> Mapping[str, float]:
        return {"samples@1": float(len(predictions))}

    def on_step_end(self, step: int, result: Any) -> None:
        if step == self.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: str, flags: Sequence[str], environment: Mapping[str, str], dies_after: int | None = None) -> None:
    """Train in a separate process: this changes the environment and the working folder."""
    os.environ.update(environment)
    os.chdir(folder)
    common = "--lr 0.1 --micro-batch-size 4 --eval-interval 4 --save-interval 4 --log-interval 1 --evaluate-test"
    job = Tracked([*common.split(), *flags, "--save", f"{folder}/run"])
    job.dies_after = dies_after
    with mock.patch("rapidformer_templates.run.console.draw_curves"):  # takes half of the time of such a short run
        job.fit()
