"""Fine-tune a pretrained llama whose fp32 weights alone exceed the memory of a worker."""

from typing import Any

import torch

from rapidformer_templates import Data, Trainer
from rapidformer_templates.models.loading import build_model

LENGTH = 16


def samples() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(8000, (8, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


class Pretrained(Trainer):
    def build_data(self) -> Data:
        return Data(train=samples(), valid=samples())

    def build_model(self) -> Any:
        return build_model(self.config, "AutoModelForCausalLM")


if __name__ == "__main__":
    Pretrained.main(
        train_iters=2, lr=1e-4, micro_batch_size=4, global_batch_size=4, log_interval=1, optimizer="adafactor"
    )
