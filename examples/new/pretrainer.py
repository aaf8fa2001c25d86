"""Pretraining with custom hooks. It runs in seconds on a CPU: the text is generated, the model is tiny.

    python my_task.py
    python my_task.py --train-iters 500 --nproc-per-node 2 --mixed-precision bf16 --save runs/longer

It takes every flag: python my_task.py --help-all. To see what a run would do: rapidformer plan --user-script my_task.py
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer_templates import Data, Pretrainer


class MyTask(Pretrainer):
    """Pretrain a small GPT to count: one token is one byte."""

    def build_data(self) -> Data:
        text = "".join(f"{number}," for number in range(20000))
        samples = torch.tensor(list(text.encode())).split(64)[:-1]  # the last one is shorter
        return Data(train=samples[:-64], valid=samples[-64:], collate=self.collate)

    @staticmethod
    def collate(samples: list[Tensor]) -> dict[str, Tensor]:
        tokens = torch.stack(samples)
        return {"input_ids": tokens, "labels": tokens}

    def build_model(self) -> nn.Module:
        sizes = GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
        return GPT2LMHeadModel(sizes)

    def build_scheduler(self, total_steps: int) -> Callable[[int], float]:
        return lambda step: min((step + 1) / 20, 1 - step / total_steps)  # 20 steps of warmup, then down to 0


if __name__ == "__main__":
    MyTask.main(train_iters=150, lr=3e-3, micro_batch_size=16, eval_interval=75, log_interval=15, save="runs/my_task")
