"""White-box fine-tuning: a pretrained model learns the sentiment of tweets, with hooks of your own.

    MODEL=$(python -m rapidformer_templates.bench.demo_data runs/demo-data)
    python examples/sentiment.py --config examples/sentiment.yaml --pretrained-model-name-or-path $MODEL

The second line takes every flag of the black box, and those of ``SentimentFlags``. Hooks that are
left out (optimizer, schedule, predictions, metrics …) come from the task and the flags.
"""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding

from rapidformer_templates import Data, Finetuner, flag

LABELS = ["negative", "neutral", "positive"]


@dataclass(frozen=True)
class SentimentFlags:
    """Sentiment"""

    label_smoothing: float = flag(0.0, "share of each target that is spread over all labels", minimum=0)


class Sentiment(Finetuner):
    """Fine-tune a classifier of tweets."""

    Flags = SentimentFlags

    def build_data(self) -> Data:
        collate = DataCollatorWithPadding(self.task.tokenizer)
        return Data(train=self.read("train"), valid=self.read("valid"), collate=collate)

    def read(self, part: str) -> list[dict[str, Any]]:
        flags = self.config.data
        with Path(f"{flags.data_dir}/{flags.data_name}-{part}.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        tokenized = self.task.tokenizer([row["text"] for row in rows], truncation=True, max_length=self.task.seq_length)
        return [
            {"input_ids": ids, "labels": LABELS.index(row["label"])}
            for ids, row in zip(tokenized["input_ids"], rows, strict=True)
        ]

    def build_model(self) -> Any:
        names = dict(enumerate(LABELS))
        folder = self.config.model.pretrained_model_name_or_path
        return AutoModelForSequenceClassification.from_pretrained(folder, id2label=names)

    def compute_loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return cross_entropy(logits, batch["labels"], label_smoothing=self.flags.label_smoothing)


if __name__ == "__main__":
    Sentiment.main(task="sequence_classification")
