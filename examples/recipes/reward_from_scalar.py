"""Train a reward model from numeric ratings, by weighted regression (Wang et al., HelpSteer2, arXiv 2406.08673).

    python reward_from_scalar.py
    python reward_from_scalar.py --nproc-per-node 2 --fsdp-memory-optimization
    python reward_from_scalar.py --pretrained-model-name-or-path FOLDER --data-path train.jsonl valid.jsonl \\
        --seq-length 1024 --lora-rank 16 --lr 1e-4 --epochs 2 --mixed-precision bf16 --save runs/mine

A line of the files is {"text": "…", "rating": 4}, and may have a "weight". Without files, texts are generated, and
without FOLDER, a tiny llama starts from random weights. The loss of a step is the weighted mean over its whole global
batch, sum(w * (reward - rating)^2) / sum(w), with any micro batches and workers.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.stats import pearsonr, spearmanr
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from rapidformer_templates import Data, Trainer, flag

GOOD, BAD = ("clear", "correct", "kind", "helpful"), ("wrong", "rude", "vague", "late")
NEUTRAL = ("the", "answer", "was", "and", "it", "came", "with", "a", "table", "of", "numbers", "in", "two", "parts")


@dataclass(frozen=True)
class Rated:
    """A text with its rating, and how much its error counts."""

    text: str
    rating: float
    weight: float


@dataclass(frozen=True)
class RewardFlags:
    """Ratings"""

    balance: bool = flag(True, "let all ratings count equally, however many texts have them")


class RewardFromScalar(Trainer):
    """Train a model that gives a text the reward that people would."""

    Flags = RewardFlags

    def build_data(self) -> Data:
        name, files = self.config.model.pretrained_model_name_or_path, self.config.data.data_path
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name) if name else tiny_tokenizer()
        train, *valid = [read(Path(file)) for file in files] if files else [generate(1600, 0), generate(300, 1)]
        # The model learns ratings of mean 0 and variance 1. Its configuration has the mean and the deviation.
        ratings = np.array([row.rating for row in train])
        self.mean, self.deviation = float(ratings.mean()), float(ratings.std())
        self.weights = balanced_weights(ratings.tolist()) if self.flags.balance else {}
        return Data(train, valid[0] if valid else None, collate=self.collate)

    def collate(self, rows: list[Rated]) -> dict[str, Tensor]:
        """Tokenize texts. The weight of a row is its own times the weight of its rating."""
        length = self.config.model.seq_length
        texts = [row.text for row in rows]
        tokens = self.tokenizer(
            texts, truncation=length is not None, max_length=length, padding=True, padding_side="right",
            return_tensors="pt",
        )  # fmt: skip
        return {
            "input_ids": tokens["input_ids"],
            "attention_mask": tokens["attention_mask"],
            "targets": torch.tensor([(row.rating - self.mean) / self.deviation for row in rows]),
            "weights": torch.tensor([row.weight * self.weights.get(row.rating, 1.0) for row in rows]),
        }

    def build_model(self) -> nn.Module:
        name, pad = self.config.model.pretrained_model_name_or_path, self.tokenizer.pad_token_id
        if name:
            model = AutoModelForSequenceClassification.from_pretrained(
                name, dtype="float32", num_labels=1, pad_token_id=pad
            )
        else:
            config = LlamaConfig(
                vocab_size=len(self.tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=4,
                num_attention_heads=4, pad_token_id=pad, id2label={0: "reward"},
            )  # fmt: skip
            model = LlamaForSequenceClassification(config)
        model.config.update({"rating_mean": self.mean, "rating_deviation": self.deviation})
        return model

    def count_targets(self, batch: dict[str, Tensor]) -> float:
        """Return the sum of the weights: the loss of a step is divided by that of its whole global batch."""
        return float(batch["weights"].sum())

    def compute_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the squared errors, and the sum of the weights."""
        rewards = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.squeeze(-1)
        errors = (rewards.float() - batch["targets"]) ** 2
        return (batch["weights"] * errors).sum(), batch["weights"].sum()

    def read_outputs(
        self, outputs: SequenceClassifierOutputWithPast, batch: dict[str, Tensor]
    ) -> tuple[list[float], list[float]]:
        assert outputs.logits is not None
        ratings = (outputs.logits.squeeze(-1).float(), batch["targets"])
        predictions, references = [(rating * self.deviation + self.mean).tolist() for rating in ratings]
        return predictions, references

    def compute_metrics(self, predictions: Sequence[float], references: Sequence[float]) -> Mapping[str, float]:
        """Return the errors in units of the ratings, without weights, and two correlations."""
        errors = np.subtract(predictions, references)
        return {
            "mse": float(np.mean(errors**2)),
            "pearson": float(pearsonr(predictions, references).statistic),
            "spearman": float(spearmanr(predictions, references).statistic),
        }


def balanced_weights(ratings: list[float]) -> dict[float, float]:
    """Return n / (k · n_r) for each of k ratings r, as scikit-learn's class_weight="balanced". Their mean is 1."""
    counts = Counter(ratings)
    return {rating: len(ratings) / (len(counts) * count) for rating, count in counts.items()}


def read(file: Path) -> list[Rated]:
    """Read the lines of a file."""
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [Rated(row["text"], float(row["rating"]), float(row.get("weight", 1.0))) for row in rows]


def generate(count: int, seed: int) -> list[Rated]:
    """Generate texts with words of praise and blame. Ratings from 1 to 5 follow from them. Most are 3."""
    draw, rows = np.random.default_rng(seed), list[Rated]()
    for _ in range(count):
        praise, blame, others = draw.poisson(0.7), draw.poisson(0.7), draw.integers(3, 12)
        words = [*draw.choice(GOOD, praise), *draw.choice(BAD, blame), *draw.choice(NEUTRAL, others)]
        text = " ".join(map(str, draw.permutation(words)))
        rows.append(Rated(text, float(np.clip(3 + praise - blame, 1, 5)), 1.0))
    return rows


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Make a tokenizer with one token per word."""
    words = dict.fromkeys(["<pad>", "<unk>", *GOOD, *BAD, *NEUTRAL])
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")


if __name__ == "__main__":
    RewardFromScalar.main(
        epochs=4, lr=2e-3, lr_warmup_fraction=0.05, micro_batch_size=16, metric_for_best="spearman", log_interval=100,
        save="runs/reward",
    )  # fmt: skip
