"""Fine-tune a pretrained llama whose fp32 weights alone exceed the memory of a worker."""

import resource
import sys
from typing import Any

import torch

from rapidformer_templates import Data, OptimizerSpec, Trainer
from rapidformer_templates.models.loading import build_model

LR, STEPS = 0.1, 3


def samples() -> list[dict[str, torch.Tensor]]:
    """Return the samples of a step. Each step trains with all of them."""
    tokens = torch.randint(8000, (4, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


class Pretrained(Trainer):
    def build_data(self) -> Data:
        return Data(train=samples(), valid=samples())

    def build_model(self) -> Any:
        return build_model(self.config, "AutoModelForCausalLM")

    def build_optimizer(self) -> OptimizerSpec:
        return OptimizerSpec(torch.optim.SGD, {"lr": self.config.training.lr})


if __name__ == "__main__":
    limit = int(sys.argv.pop(1))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # the workers inherit it
    Pretrained.main(
        train_iters=STEPS, lr=LR, lr_decay_style="constant", clip_grad=0.0, global_batch_size=4, log_interval=1
    )
