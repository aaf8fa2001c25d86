"""Pretraining objectives: one class per objective, with its samples, its batches and its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from rapidformer_templates.data import collate
from rapidformer_templates.data.collate import IGNORED, Collate, PadCollate
from rapidformer_templates.data.indexed.blend import Blend
from rapidformer_templates.data.indexed.corpora import IndexCache, parse_data_path
from rapidformer_templates.data.indexed.dataset import IndexedDataset
from rapidformer_templates.data.pretraining import masking
from rapidformer_templates.data.pretraining.samples import Documents, GPTSamples, SentencePairs
from rapidformer_templates.data.types import Augment, Endless, Model, ModelOutputs, Sample, Tensors
from rapidformer_templates.errors import DataError, ModelError, NoSamples
from rapidformer_templates.models.architectures import PairLabel, pair_label_of
from rapidformer_templates.models.label_use import LabelUse, check_causal
from rapidformer_templates.models.loading import model_type_of

if TYPE_CHECKING:
    from rapidformer_templates.data.tasks.base import Loss, Task

Samples = GPTSamples | SentencePairs | Documents


class Objective(ABC):
    """The parts in which pretraining tasks differ. By default, samples are windows of the corpus.

    Attributes:
        auto_class: name of the transformers auto class of the model.
        flags: data flags that affect only some objectives, including this one.
    """

    auto_class: ClassVar[str]
    flags: ClassVar[tuple[str, ...]]

    def __init__(self, task: Task) -> None:
        self.task = task
        self.options = task.config.data

    def check(self) -> None:
        """Check what can be checked before a worker starts."""
        assert self.window > 0

    def check_model(self, model: nn.Module) -> None:  # noqa: B027 - most objectives suit every model
        """See :meth:`Task.check_model`."""

    @property
    def end_token(self) -> int:
        """The token after each document of raw text: the tokenizer's EOS token, or SEP if it has none."""
        return self.token("sep" if self.task.tokenizer.eos_token_id is None else "eos")

    @property
    def window(self) -> int:
        """Number of tokens from the beginning of one window of the corpus to the beginning of the next."""
        return self.task.seq_length

    overlap: ClassVar[int] = 0

    def units(self, dataset: IndexedDataset) -> int:
        """Return the number of units that ``--split`` divides."""
        return len(dataset)

    def samples(self, dataset: IndexedDataset, part: tuple[int, int], cache: IndexCache) -> Samples:
        """Return the samples of a part of a corpus, ``[first, last)`` of its units.

        Raises:
            NoSamples: the part is too small for one sample.
        """
        samples = GPTSamples(
            dataset,
            part,
            self.window,
            self.task.config.training.seed,
            overlap=self.overlap,
            marks_documents=self.options.keep_documents_apart,
            cache=cache,
        )
        if not len(samples):
            message = f"{part[1] - part[0]} documents with {samples.tokens} tokens are less than one sample"
            hint = f"use a --seq-length below {self.task.seq_length}, other shares or more text"
            raise NoSamples(message, where=dataset.prefix, hint=hint)
        return samples

    @abstractmethod
    def batches(self, train: Samples | Blend | Endless) -> tuple[Collate, Augment | None]:
        """Return how samples are collated, and how a sample changes each time it is used (or None)."""

    def lengths(self, train: Samples | Blend) -> np.ndarray | None:
        """Return the number of tokens of each training sample in a batch, or None if all are equal."""
        return None

    def use_labels(self, use: LabelUse) -> bool:
        """See :meth:`Task.use_labels`."""
        return use.shifts

    def compute_loss(self, model: Model, batch: Tensors) -> Loss:
        """See :meth:`Task.compute_loss`."""
        return model(**batch).loss

    def predicted(self, outputs: ModelOutputs, batch: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Return aligned (logits, targets): (samples, tokens, vocabulary) and (samples, tokens)."""
        return outputs.logits, batch["labels"]

    def token(self, name: str) -> int:
        """Return a special token of the tokenizer, such as ``eos``.

        Raises:
            DataError: the tokenizer does not have it.
        """
        token = getattr(self.task.tokenizer, f"{name}_token_id")
        if token is None:
            hint = "use a tokenizer that has one"
            raise DataError(f"the tokenizer has no {name.upper()} token", where="--tokenizer-type", hint=hint)
        return int(token)

    @property
    def _padding(self) -> dict[str, int]:
        pad = self.task.tokenizer.pad_token_id
        assert isinstance(pad, int)
        return {"input_ids": pad, "token_type_ids": 0, "labels": IGNORED}


class Causal(Objective):
    """Predicts each token from those before it. Windows have one additional token, so each position has a target."""

    auto_class = "AutoModelForCausalLM"
    flags = ("keep_documents_apart",)
    overlap = 1
    _model_shifts = True

    def check(self) -> None:
        super().check()
        if self.options.keep_documents_apart:
            collate.check_packable(self.task.model_config.model_type, "--keep-documents-apart")

    def check_model(self, model: nn.Module) -> None:
        if self.options.keep_documents_apart:
            collate.check_packable_model(model, "--keep-documents-apart")

    def use_labels(self, use: LabelUse) -> bool:
        check_causal(use, "--task pretraining")
        if use.shifts and not use.takes_shifted:
            message = f"{use.model} does not take shift_labels, without which windows of a corpus lose targets"
            hint = "fine-tune it with --task causal_lm, whose labels it shifts itself"
            raise ModelError(message, where="--task pretraining", hint=hint)
        self._model_shifts = use.shifts
        return True

    def compute_loss(self, model: Model, batch: Tensors) -> Loss:
        if not self._model_shifts:
            batch = dict(batch)
            labels = batch["labels"]
            batch["labels"] = batch.pop("shift_labels") if "shift_labels" in batch else collate.shifted_left(labels)
        return model(**batch).loss

    def batches(self, train: Samples | Blend | Endless) -> tuple[Collate, Augment | None]:
        return collate.WindowCollate(keeps_documents_apart=self.options.keep_documents_apart), None

    def predicted(self, outputs: ModelOutputs, batch: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        if "shift_labels" in batch:
            return outputs.logits, batch["shift_labels"]
        return outputs.logits[:, :-1], batch["labels"][:, 1:]  # a user's own batches, which the model shifts


class Masked(Objective):
    """Predicts masked tokens of ``[CLS]`` window ``[SEP]`` (RoBERTa's FULL-SENTENCES, Liu et al. 2019)."""

    auto_class = "AutoModelForMaskedLM"
    flags: ClassVar[tuple[str, ...]] = ("mask_prob", "whole_word_mask", "short_seq_prob")
    at_least_one: ClassVar[bool] = False

    def check(self) -> None:
        super().check()
        masking.check_mask_probability(self.options.mask_prob)
        assert self.mask

    @cached_property
    def mask(self) -> masking.MaskTokens:
        """Masks tokens."""
        words, at_least_one = self.options.whole_word_mask, self.at_least_one
        tokenizer = self.task.tokenizer
        return masking.MaskTokens(tokenizer, self.options.mask_prob, whole_words=words, at_least_one=at_least_one)

    @property
    def end_token(self) -> int:
        return self.token("sep")

    @property
    def window(self) -> int:
        if self.task.seq_length < 3:
            message = f"a sequence of {self.task.seq_length} tokens is too short"
            raise DataError(message, where="--seq-length", hint="use at least 3")
        return self.task.seq_length - 2

    def batches(self, train: Samples | Blend | Endless) -> tuple[Collate, Augment | None]:
        short = self.options.short_seq_prob
        # Windows of equal length need no padding mask, so the flash kernel can be used.
        return PadCollate(self._padding, mask=short > 0), MaskWindows(self.mask, self._around, short)

    @property
    def _around(self) -> tuple[int, int]:
        return self.token("cls"), self.token("sep")


class Pairs(Masked):
    """Predicts masked tokens, and whether two texts belong together. See :class:`SentencePairs`."""

    auto_class = "AutoModelForPreTraining"
    flags = (*Masked.flags, "sentence_pairs")
    at_least_one = True

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.label = pair_label_of(model_type_of(task.config))

    def units(self, dataset: IndexedDataset) -> int:
        return len(dataset.documents) - 1

    def samples(self, dataset: IndexedDataset, part: tuple[int, int], cache: IndexCache) -> Samples:
        return SentencePairs(
            dataset,
            part,
            self.task.seq_length,
            self.mask,
            cls_token_id=self.token("cls"),
            sep_token_id=self.token("sep"),
            short_probability=self.options.short_seq_prob,
            seed=self.task.config.training.seed,
            label=self.label,
            cache=cache,
        )

    def batches(self, train: Samples | Blend | Endless) -> tuple[Collate, Augment | None]:
        sets, weights = (train.sets, train.weights) if isinstance(train, Blend) else ([train], [1])
        mean_tokens = [pairs.mean_tokens for pairs in sets if isinstance(pairs, SentencePairs)]
        self._weight = self.options.mask_prob * float(np.average(mean_tokens, weights=weights))
        return PadCollate(self._padding), None

    def compute_loss(self, model: Model, batch: Tensors) -> Loss:
        return pair_loss(model, batch, self.label, self._weight)

    def predicted(self, outputs: ModelOutputs, batch: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        return outputs.prediction_logits, batch["labels"]


def pair_loss(model: Model, batch: Tensors, label: PairLabel, weight: float) -> tuple[torch.Tensor, int]:
    """Return (sum of both losses over the batch, number of masked tokens).

    Transformers adds the mean over masked tokens and the mean over samples, which cannot be computed as a sum over
    micro batches. Here each sample's pair counts as ``weight`` masked tokens. If ``weight`` is their mean number per
    sample (``mask.probability * pairs.mean_tokens``), both means have the same weight over a global batch, and the loss
    does not depend on how the batch is divided.
    """
    inputs = {name: values for name, values in batch.items() if name not in ("labels", label)}
    outputs = model(**inputs)
    labels, targets = batch["labels"].flatten(), batch[label]
    pairs = outputs.sop_logits if label == "sentence_order_label" else outputs.seq_relationship_logits
    masked = cross_entropy(outputs.prediction_logits.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
    return masked + weight * cross_entropy(pairs, targets, reduction="sum"), int((labels != IGNORED).sum())


class Spans(Objective):
    """Predicts masked spans of a window, for encoder-decoders. See :class:`SpanCorruption`."""

    auto_class = "AutoModelForSeq2SeqLM"
    flags = ("mask_prob", "mean_span_length")

    def check(self) -> None:
        super().check()
        assert self.spans

    @cached_property
    def spans(self) -> masking.SpanCorruption:
        """Masks spans."""
        sizes = masking.span_sizes(self.task.seq_length, self.options.mask_prob, self.options.mean_span_length)
        return masking.SpanCorruption(sizes, masking.sentinels_of(self.task.tokenizer), self.token("eos"))

    @property
    def window(self) -> int:
        return self.spans.sizes.window

    def batches(self, train: Samples | Blend | Endless) -> tuple[Collate, Augment | None]:
        return PadCollate(self._padding, mask=False), self.spans


OBJECTIVES: dict[str, type[Objective]] = {"causal": Causal, "masked": Masked, "seq2seq": Spans}
"""Objectives by the result of :func:`~rapidformer_templates.models.architectures.objective_of`."""


@dataclass(frozen=True)
class MaskWindows:
    """Masks ``[CLS]`` window ``[SEP]``. Some windows are first truncated to a random length with uniform distribution.

    Attributes:
        mask: masks tokens.
        around: ids of ``[CLS]`` and ``[SEP]``.
        short_probability: fraction of the windows that are truncated.
    """

    mask: masking.MaskTokens
    around: tuple[int, int]
    short_probability: float

    def __call__(self, sample: Sample, generator: np.random.Generator) -> dict[str, np.ndarray]:
        tokens = sample["input_ids"].astype(np.int64)
        if generator.random() < self.short_probability:
            tokens = tokens[: int(generator.integers(1, len(tokens) + 1))]
        first, last = self.around
        return self.mask({"input_ids": np.concatenate([[first], tokens, [last]])}, generator)


class ByDocuments(Objective):
    """Each document is a sample. Documents longer than the sequence length are split into several samples."""

    def check(self) -> None:
        super().check()
        words = self.options.data_path or ()
        if any(entry.weight is not None for entry in parse_data_path(words)):
            message = "dynamic shapes cannot be combined with a weighted blend"
            hint = "leave the weights out: each corpus then has the share that its size gives it"
            raise DataError(message, where=f"--data-path {' '.join(words)}", hint=hint)

    def samples(self, dataset: IndexedDataset, part: tuple[int, int], cache: IndexCache) -> Documents:
        seed = self.task.config.training.seed
        short = self.options.short_seq_prob if "short_seq_prob" in self.flags else 0.0
        samples = Documents(dataset, part, self.window, overlap=self.overlap, short_probability=short, seed=seed)
        if not len(samples):
            message = f"{part[1] - part[0]} documents have no sample"
            raise NoSamples(message, where=dataset.prefix, hint="use other shares or more text")
        return samples


class CausalDocuments(ByDocuments, Causal):
    """Predicts each token of a document from the tokens before it."""

    def batches(self, train: Samples | Blend | Endless) -> tuple[Collate, Augment | None]:
        return collate.DocumentCollate(self._padding["input_ids"]), None

    def lengths(self, train: Samples | Blend) -> np.ndarray:
        assert isinstance(train, Documents)
        return train.sizes - self.overlap


class MaskedDocuments(ByDocuments, Masked):
    """Predicts masked tokens of ``[CLS]`` document ``[SEP]``."""

    def batches(self, train: Samples | Blend | Endless) -> tuple[Collate, Augment | None]:
        return PadCollate(self._padding), MaskWindows(self.mask, self._around, 0.0)

    def lengths(self, train: Samples | Blend) -> np.ndarray:
        assert isinstance(train, Documents)
        return train.sizes + 2


BY_DOCUMENTS: dict[type[Objective], type[Objective]] = {Causal: CausalDocuments, Masked: MaskedDocuments}
"""The objectives that can use documents of any length."""
