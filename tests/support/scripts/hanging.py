"""A job in which one worker misbehaves after step 5: ``python hanging.py HOW RANK FLAGS``."""

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from rapidformer_templates import Data
from tests.support.jobs import CausalJob

HOW, RANK = sys.argv[1:3]


class Samples(list[Any]):
    """Samples that can no longer be read after step 5."""

    blocks = False

    def __getitem__(self, index: Any) -> Any:
        if self.blocks:
            time.sleep(600)
        return super().__getitem__(index)


class Hanging(CausalJob):
    layers = 4

    def build_data(self) -> Data:
        data = super().build_data()
        self.samples = data.train = Samples(data.train)
        return data

    def on_step_end(self, step: int, result: Any) -> None:
        if step != 5 or os.environ["RANK"] != RANK:
            return
        if HOW == "sleeps":
            time.sleep(600)
        elif HOW == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif HOW == "reads":
            self.samples.blocks = True
        elif HOW == "exits":
            sys.exit(0)
        elif HOW == "leaves":
            os._exit(0)
        elif HOW == "calls another collective":
            dist.all_reduce(torch.zeros(1))


if __name__ == "__main__":
    sys.argv[1:3] = []  # the workers run the same command
    Hanging.main()
