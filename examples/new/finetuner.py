"""Fine-tuning with custom hooks. It runs in seconds on a CPU: the data are generated, the model is tiny.

    python my_task.py
    python my_task.py --epochs 5 --nproc-per-node 2 --mixed-precision bf16 --save runs/longer

It takes every flag: python my_task.py --help-all. To see what a run would do: rapidformer plan --user-script my_task.py
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForSequenceClassification

from rapidformer_templates import Data, Finetuner


class MyTask(Finetuner):
    """Fine-tune a classifier of made sequences: are most of their tokens small?"""

    def build_data(self) -> Data:
        tokens = torch.randint(100, (1280, 9), generator=torch.Generator().manual_seed(0))
        samples = [{"input_ids": row, "labels": (row < 50).sum() > 4} for row in tokens]
        return Data(train=samples[:1024], valid=samples[1024:])

    def build_model(self) -> nn.Module:  # in your task: from_pretrained(FOLDER, dtype="float32")
        config = BertConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
        return BertForSequenceClassification(config)

    def compute_loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(model(input_ids=batch["input_ids"]).logits, batch["labels"].long())

    def read_outputs(self, outputs: Any, batch: dict[str, Tensor]) -> tuple[list[int], list[int]]:
        return outputs.logits.argmax(-1).tolist(), batch["labels"].tolist()

    def compute_metrics(self, predictions: Sequence[int], references: Sequence[int]) -> Mapping[str, float]:
        right = sum(told == true for told, true in zip(predictions, references, strict=True))
        return {"accuracy": right / len(references)}


if __name__ == "__main__":
    MyTask.main(
        epochs=3, lr=2e-3, micro_batch_size=16, metric_for_best="accuracy", log_interval=32, save="runs/my_task"
    )
