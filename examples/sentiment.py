"""White-box fine-tuning: a pretrained model learns the sentiment of tweets, with custom hooks.

    MODEL=$(rapidformer demo --prepare)
    python examples/sentiment.py --config examples/sentiment.yaml --pretrained-model-name-or-path $MODEL

It takes every flag of the black box. Hooks that you leave out come from the task and the flags.
"""

import csv
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding

from rapidformer_templates import Data, Finetuner, flag

LABELS = ["negative", "neutral", "positive"]


@dataclass(frozen=True)
class SentimentFlags:
    """Sentiment"""

    temperature: float = flag(1.0, "what the logits are divided by in the loss")


class Sentiment(Finetuner):
    """Fine-tune a classifier of tweets."""

    Flags = SentimentFlags
    uses_task = True  # the data have the same form as the task's, so its predictions and metrics fit

    def build_data(self) -> Data:
        self.tokenizer = self.task.tokenizer  # exported with the model
        return Data(self.read("train"), self.read("valid"), collate=DataCollatorWithPadding(self.tokenizer))

    def read(self, part: str) -> list[dict[str, Any]]:
        flags = self.config.data
        with open(f"{flags.data_dir}/{flags.data_name}-{part}.csv", encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        tokenized = self.task.tokenizer([row["text"] for row in rows], truncation=True, max_length=self.task.seq_length)
        return [
            {"input_ids": ids, "labels": LABELS.index(row["label"])}
            for ids, row in zip(tokenized["input_ids"], rows, strict=True)
        ]

    def build_model(self) -> Any:
        folder = str(self.config.model.pretrained_model_name_or_path)
        names = dict(enumerate(LABELS))
        return AutoModelForSequenceClassification.from_pretrained(folder, dtype="float32", id2label=names)

    def compute_loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return cross_entropy(logits / self.flags.temperature, batch["labels"])


if __name__ == "__main__":
    Sentiment.main(task="sequence_classification")
