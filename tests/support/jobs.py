"""Small real models on data of very different lengths with many masked labels. Dropout is off.

Each job is a pair of hooks. :func:`tests.support.parity.train` runs one with any flags.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from rapidformer_templates import Data, Pretrainer, Trainer
from tests.support.lines import Died

VOCABULARY = 67


def _sequences(count: int = 61) -> list[dict[str, Any]]:
    """Return sequences of 3 to 40 tokens. Some have no target token at all."""
    draw = np.random.default_rng(7)
    samples = []
    for i in range(count):
        length = int(draw.integers(3, 41)) if i % 5 else 3
        ids = draw.integers(3, VOCABULARY, length)
        labels = np.where(draw.random(length) < 0.4, ids, -100)
        if i % 7 == 0:
            labels[:] = -100
        samples.append({"input_ids": ids, "labels": labels, "label": int(draw.integers(0, 3))})
    return samples


def _pad(
    samples: list[dict[str, Any]], shape: tuple[int, int] | None = None, *, classes: bool
) -> dict[str, torch.Tensor]:
    rows, longest = shape or (len(samples), max(len(s["input_ids"]) for s in samples))
    ids = torch.zeros(rows, longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        ids[row, :length] = torch.from_numpy(sample["input_ids"])
        mask[row, :length] = 1
        labels[row, :length] = torch.from_numpy(sample["labels"])
    if classes:
        labels = torch.tensor([sample["label"] for sample in samples])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class _Job(Trainer):
    """A job that saves nothing unless a test asks for a folder. It can die after a step."""

    dies_after: int | None = None
    classes = False
    shift = 0
    double = False

    def __init__(self, argv: Sequence[str] | None = None, **flags: Any) -> None:
        super().__init__(argv, **{"no_save": True, **flags})

    def build_data(self) -> Data:
        samples = _sequences()
        return Data(train=samples, valid=samples[:13], collate=partial(_pad, classes=self.classes))

    def build_model(self) -> torch.nn.Module:
        model = self.make()
        return model.double() if self.double else model

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if not self.double:
            return super().compute_loss(model, batch)
        # transformers rounds the logits to fp32 before it computes its losses.
        logits = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
        labels = batch["labels"]
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())

    def on_step_end(self, step: int, result: Any) -> None:
        self.curve = [*getattr(self, "curve", []), (float(result.loss), float(result.grad_norm))]
        if step == self.dies_after:
            raise Died


def _bert() -> BertConfig:
    return BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip


class CausalJob(_Job):
    shift = 1
    layers = 2

    def make(self) -> torch.nn.Module:
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=self.layers, n_head=2, resid_pdrop=0.0,
                embd_pdrop=0.0, attn_pdrop=0.0,
            )
        )  # fmt: skip


class PretrainedJob(CausalJob):
    """Continues from the model in ``folder``."""

    folder = ""

    def make(self) -> torch.nn.Module:
        model: torch.nn.Module = GPT2LMHeadModel.from_pretrained(self.folder, dtype=torch.float32)
        return model


class DeepJob(CausalJob):
    """Deep enough for two stages."""

    layers = 4


KEEP_FIRST = "--keep-best --metric-for-best utility --metric-for-best-mode max"
"""With :class:`FallingMetric`, the first checkpoint is the best one."""


class FallingMetric:
    """A mixin whose metric falls with each evaluation."""

    times = 0

    def compute_metrics(self, predictions: Any, references: Any) -> dict[str, float]:
        self.times += 1
        return {"utility": -float(self.times)}


class MaskedJob(_Job):
    def make(self) -> torch.nn.Module:
        return BertForMaskedLM(_bert())


class ClassJob(_Job):
    classes = True

    def make(self) -> torch.nn.Module:
        return BertForSequenceClassification(_bert())


class FrozenJob(ClassJob):
    """The embeddings and the first block are frozen."""

    def make(self) -> torch.nn.Module:
        model = super().make()
        for part in (model.bert.embeddings, model.bert.encoder.layer[0]):
            part.requires_grad_(False)
        return model


class WideJob(CausalJob):
    """Large enough that DeepSpeed swaps its partitions to the disk."""

    def make(self) -> torch.nn.Module:
        sizes = {"n_positions": 64, "n_embd": 256, "n_layer": 2, "n_head": 2}
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **dropouts))


class HalfFrozenJob(ClassJob):
    """The first of its two blocks is frozen."""

    def make(self) -> torch.nn.Module:
        model = super().make()
        model.bert.encoder.layer[0].requires_grad_(False)
        return model


class FreezingJob(CausalJob):
    """Its hooks freeze the first block for two steps, and then the embeddings. The second block has no dropout."""

    def make(self) -> torch.nn.Module:
        model = super().make()
        model.transformer.h[1].mlp.dropout.p = 0.5
        return model

    def _train(self, part: str, wanted: bool) -> None:
        for name, parameter in self.model.named_parameters():
            if part in name:
                parameter.requires_grad_(wanted)

    def on_train_start(self) -> None:
        self._train("h.0.", False)
        self.model.transformer.h[1].eval()

    def on_step_end(self, step: int, result: Any) -> None:
        super().on_step_end(step, result)
        if step == 2:
            self._train("h.0.", True)

    def on_evaluate(self, step: int, metrics: Any) -> None:
        self._train("wte", False)


class UnreachedJob(CausalJob):
    def make(self) -> torch.nn.Module:
        model = super().make()
        model.spare = torch.nn.Linear(4, 4)
        return model


class BrokenJob(CausalJob):
    """The loss becomes infinite in the third step, on the second worker only."""

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = super().compute_loss(model, batch)
        broken = len(getattr(self, "curve", [])) == 2 and torch.distributed.get_rank() == 1
        return loss * float("inf") if broken else loss


class PretrainedCausalJob(CausalJob, Pretrainer):
    """Uses the template that dynamic shapes need."""


class PretrainedMaskedJob(MaskedJob, Pretrainer):
    """Uses the template that dynamic shapes need."""


JOBS: dict[str, type[_Job]] = {"causal": CausalJob, "masked": MaskedJob, "classifier": ClassJob}
OTHERS: dict[str, type[_Job]] = {
    "deep": DeepJob, "frozen": FrozenJob, "half-frozen": HalfFrozenJob, "wide": WideJob, "unreached": UnreachedJob,
    "freezing": FreezingJob, "broken": BrokenJob, "pretrained-causal": PretrainedCausalJob,
    "pretrained-masked": PretrainedMaskedJob,
}  # fmt: skip
"""Jobs for single tests. Not every engine is compared on them."""
