"""Pretraining from corpora: one task per objective, with its samples, its batches and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from rapidformer_templates.data import collate
from rapidformer_templates.data.collate import IGNORED, Collate, PadCollate
from rapidformer_templates.data.finetuning.tables import DataPart
from rapidformer_templates.data.generation import Generation, TrainedModel
from rapidformer_templates.data.indexed import corpora
from rapidformer_templates.data.indexed.blend import Blend
from rapidformer_templates.data.indexed.corpora import Corpus, IndexCache
from rapidformer_templates.data.indexed.dataset import IndexedDataset
from rapidformer_templates.data.indexed.tools import split_sequences, split_shares
from rapidformer_templates.data.pretraining import masking
from rapidformer_templates.data.pretraining.samples import Documents, GPTSamples, SentencePairs
from rapidformer_templates.data.streaming import RowStream, StreamedSamples, WindowsOfDocuments, buffer_of
from rapidformer_templates.data.tasks.base import Inputs, Loss, Record, Task, padding_of
from rapidformer_templates.data.tasks.language_models import (
    CausalLM,
    MaskedLM,
    Seq2SeqLM,
    predicted_tokens,
    token_accuracy,
)
from rapidformer_templates.data.types import Augment, Data, Endless, Model, ModelOutputs, Sample, Tensors
from rapidformer_templates.errors import DataError, ModelError, NoSamples
from rapidformer_templates.models.architectures import PairLabel, objective_of, pair_label_of
from rapidformer_templates.models.label_use import LabelUse, check_causal
from rapidformer_templates.models.loading import model_type_of
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.flags import DataFlags

PARTS = ("training", "validation", "test")

Samples = GPTSamples | SentencePairs | Documents


class Pretraining(Task):
    """Builds samples from corpora. By default, they are windows of the corpus. The metric is token accuracy.

    Subclasses are the objectives. The architecture and the flags choose one of them.

    Attributes:
        flags: data flags that affect only some objectives, including this one.
        overlap: tokens that a window shares with the next one.
        fine_tuning: the task whose predictions such a model makes.
    """

    name = "pretraining"
    state_fields = ()  # a corpus has no columns
    best_metric = "eval_loss"
    flags: ClassVar[tuple[str, ...]]
    overlap: ClassVar[int] = 0
    fine_tuning: ClassVar[type[Task]]

    @classmethod
    def kind_for(cls, config: RunConfig) -> type[Task]:
        """Return the objective of the architecture.

        Raises:
            DataError: a flag is set that only affects other objectives.
        """
        architecture = model_type_of(config)
        kind = OBJECTIVES[objective_of(architecture)]
        if config.data.sentence_pairs and issubclass(Pairs, kind):
            kind = Pairs
        options = config.switches.get("dynamic-shape")
        if options is not None and options.data_iterator == "dynamic-shape":
            if kind not in BY_DOCUMENTS:
                what = f"pretraining of {architecture} with {kind.__name__.lower()}"
                message = f"{what} cannot be combined with dynamic shapes"
                hint = "leave it out: these samples are all of one length, or have two lengths"
                raise DataError(message, where=f"--data-iterator ({config.origin('data_iterator')})", hint=hint)
            kind = BY_DOCUMENTS[kind]
        # Refuse flags that only affect other objectives.
        kinds: list[type[Pretraining]] = [*OBJECTIVES.values(), Pairs]
        for flag in sorted({flag for other in kinds for flag in other.flags}):
            if flag not in kind.flags and getattr(config.data, flag) != getattr(DataFlags(), flag):
                message = f"{architecture} is pretrained without {spelling(flag)}"
                hint = "leave it out; docs/pretraining-data.md says what acts with which architecture"
                raise DataError(message, where=f"{spelling(flag)} ({config.origin(flag)})", hint=hint)
        return kind

    def check(self) -> None:
        corpora.check_corpora(self.config)
        data = self.config.data
        if data.evaluate_test and not data.streaming and split_shares(data.split)[2] == 0:
            hint = "give the test part a share: --split 90,5,5"
            raise DataError("the corpus has no test part", where=f"--split {data.split}", hint=hint)
        assert self.window > 0

    def read_data(self) -> Data:
        if self.config.data.streaming:
            return self._streamed()
        opened = corpora.load_corpora(self.config, self.tokenizer, self.end_token)
        self.bad.skipped = [line for corpus in opened for line in corpus.skipped]
        self.notes = [note for corpus in opened for note in corpus.notes]
        parts = self._parts(opened)
        train, valid, test = parts
        if self.is_trained:
            train = valid = parts[self._first_part]  # nothing is trained
        assert train is not None
        if valid is None and split_shares(self.config.data.split)[1] > 0:
            self.notes.append(f"--split {self.config.data.split}: the corpus is too small for a validation part")
        return Data(train, valid, test, *self.batches(train), self.lengths(train), augments_evaluation=True)

    def _streamed(self) -> Data:
        """Read the corpus as a stream. No part of it is held out."""
        flags, seed, buffer = self.config.data, self.config.training.seed, buffer_of(self.config.data)
        recipe = corpora.recipe_of(self.config, self.tokenizer, self.end_token)
        files, seed_of_files = corpora.streamed_corpus(flags), seed if buffer else None
        rows = RowStream(files, seed_of_files, skip=recipe.skip, text_unit=recipe.text_unit, column=recipe.keys[0])
        apart = flags.keep_documents_apart
        windows = WindowsOfDocuments(
            recipe, self.window, overlap=self.overlap, marks_documents=apart, shuffles=buffer > 0
        )
        identity = f"{rows.identity} in windows of {self.window} tokens"
        train = StreamedSamples(rows, windows, seed=seed, buffer=buffer, identity=identity)
        return Data(train, None, None, *self.batches(train))

    @property
    def _first_part(self) -> int:
        """Index of the required part: the training part, or the part to evaluate for a trained model."""
        return ("train", "valid", "test").index(self.part or "valid") if self.is_trained else 0

    def _parts(self, opened: Sequence[Corpus]) -> list[Samples | Blend | None]:
        """Return the samples of the three parts.

        A part is None if the corpus is too small for it. An empty training part is an error. So is an empty validation
        part if the user set the shares with ``--split``. An empty test part is not, because runs do not need it.
        """
        shares = split_shares(self.config.data.split)
        cache = IndexCache(corpora.cache_root(self.config))
        parts: list[Samples | Blend | None] = []
        for i, name in enumerate(PARTS):
            needed = i == self._first_part or (i == 1 and shares[i] > 0 and self.config.origin("split") != "default")
            sources = []
            for corpus in opened:
                part = split_sequences(shares, self.units(corpus.dataset))[i]
                try:
                    sources.append((corpus, self.samples(corpus.dataset, part, cache)))
                except NoSamples as error:
                    if needed:
                        message = f"the {name} part of {corpus.dataset.prefix} is too small: {error.message}"
                        raise NoSamples(message, where=f"--split {self.config.data.split}", hint=error.hint) from error
            sets: list[Any] = [samples for _, samples in sources]
            if len(sets) < 2 or isinstance(sets[0], Documents):
                parts.append(reduce(add, sets) if sets else None)
                continue
            # Without weights each corpus counts by its size.
            weights = [len(samples) if corpus.weight is None else corpus.weight for corpus, samples in sources]
            parts.append(Blend(sets, weights, repeats=i == 0 and not self.is_trained, cache=cache))
        return parts

    def inputs(self, part: DataPart) -> Inputs:
        return self._fine_tuning_task.inputs(part)

    def records(self, model: TrainedModel, rows: Sequence[Sample], generation: Generation) -> list[Record]:
        return self._fine_tuning_task.records(model, rows, generation)

    @cached_property
    def _fine_tuning_task(self) -> Task:
        """The fine-tuning task that predicts like the objective: next words, masked words, or a text."""
        task = self.fine_tuning(self.config)
        task.tokenizer = self.tokenizer
        return task

    @property
    def end_token(self) -> int:
        """The token after each document of raw text: the tokenizer's EOS token, or SEP if it has none."""
        return self.token("sep" if self.tokenizer.eos_token_id is None else "eos")

    @property
    def window(self) -> int:
        """Number of tokens from the beginning of one window of the corpus to the beginning of the next."""
        return self.seq_length

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
            self.config.training.seed,
            overlap=self.overlap,
            marks_documents=self.config.data.keep_documents_apart,
            cache=cache,
        )
        if not len(samples):
            message = f"{part[1] - part[0]} documents with {samples.tokens} tokens are less than one sample"
            hint = f"use a --seq-length below {self.seq_length}, other shares or more text"
            raise NoSamples(message, where=dataset.prefix, hint=hint)
        return samples

    def batches(self, train: Samples | Blend | Endless) -> tuple[Collate, Augment | None]:
        """Return how samples are collated, and how a sample changes each time it is used (or None)."""
        raise NotImplementedError(f"{type(self).__name__} is not an objective")

    def lengths(self, train: Samples | Blend) -> np.ndarray | None:
        """Return the number of tokens of each training sample in a batch, or None if all are equal."""
        return None

    def predict(self, outputs: ModelOutputs, batch: Tensors) -> tuple[list[np.ndarray], list[np.ndarray]]:
        logits, targets = self.predicted(outputs, batch)
        return predicted_tokens(logits.argmax(dim=-1), targets)

    def compute_metrics(self, predictions: list[np.ndarray], references: list[np.ndarray]) -> dict[str, float]:
        return token_accuracy(predictions, references)

    def predicted(self, outputs: ModelOutputs, batch: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Return aligned (logits, targets): (samples, tokens, vocabulary) and (samples, tokens)."""
        return outputs.logits, batch["labels"]

    def token(self, name: str) -> int:
        """Return a special token of the tokenizer, such as ``eos``.

        Raises:
            DataError: the tokenizer does not have it.
        """
        token = getattr(self.tokenizer, f"{name}_token_id")
        if token is None:
            hint = "use a tokenizer that has one"
            raise DataError(f"the tokenizer has no {name.upper()} token", where="--tokenizer-type", hint=hint)
        return int(token)

    @property
    def _padding(self) -> dict[str, int]:
        return {**padding_of(self.tokenizer), "labels": IGNORED}


class Causal(Pretraining):
    """Predicts each token from those before it. Windows have one additional token, so each position has a target."""

    auto_class = "AutoModelForCausalLM"
    flags = ("keep_documents_apart",)
    fine_tuning = CausalLM
    overlap = 1
    _model_shifts = True

    def check(self) -> None:
        super().check()
        if self.config.data.keep_documents_apart:
            collate.check_packable(self.model_config.model_type, "--keep-documents-apart")

    def check_model(self, model: nn.Module) -> None:
        if self.config.data.keep_documents_apart:
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
        return collate.WindowCollate(keeps_documents_apart=self.config.data.keep_documents_apart), None

    def predicted(self, outputs: ModelOutputs, batch: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        if "shift_labels" in batch:
            return outputs.logits, batch["shift_labels"]
        return outputs.logits[:, :-1], batch["labels"][:, 1:]  # a user's own batches, which the model shifts


class Masked(Pretraining):
    """Predicts masked tokens of ``[CLS]`` window ``[SEP]`` (RoBERTa's FULL-SENTENCES, Liu et al. 2019)."""

    auto_class = "AutoModelForMaskedLM"
    flags: ClassVar[tuple[str, ...]] = ("mask_prob", "whole_word_mask", "short_seq_prob")
    fine_tuning = MaskedLM
    at_least_one: ClassVar[bool] = False

    def check(self) -> None:
        super().check()
        masking.check_mask_probability(self.config.data.mask_prob)
        assert self.mask

    @cached_property
    def mask(self) -> masking.MaskTokens:
        """Masks tokens."""
        share, words = self.config.data.mask_prob, self.config.data.whole_word_mask
        return masking.MaskTokens(self.tokenizer, share, whole_words=words, at_least_one=self.at_least_one)

    @property
    def end_token(self) -> int:
        return self.token("sep")

    @property
    def window(self) -> int:
        if self.seq_length < 3:
            message = f"a sequence of {self.seq_length} tokens is too short"
            raise DataError(message, where="--seq-length", hint="use at least 3")
        return self.seq_length - 2

    def batches(self, train: Samples | Blend | Endless) -> tuple[Collate, Augment | None]:
        short = self.config.data.short_seq_prob
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

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.label = pair_label_of(model_type_of(config))

    def units(self, dataset: IndexedDataset) -> int:
        return len(dataset.documents) - 1

    def samples(self, dataset: IndexedDataset, part: tuple[int, int], cache: IndexCache) -> Samples:
        return SentencePairs(
            dataset,
            part,
            self.seq_length,
            self.mask,
            cls_token_id=self.token("cls"),
            sep_token_id=self.token("sep"),
            short_probability=self.config.data.short_seq_prob,
            seed=self.config.training.seed,
            label=self.label,
            cache=cache,
        )

    def batches(self, train: Samples | Blend | Endless) -> tuple[Collate, Augment | None]:
        sets, weights = (train.sets, train.weights) if isinstance(train, Blend) else ([train], [1])
        mean_tokens = [pairs.mean_tokens for pairs in sets if isinstance(pairs, SentencePairs)]
        self._weight = self.config.data.mask_prob * float(np.average(mean_tokens, weights=weights))
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


class Spans(Pretraining):
    """Predicts masked spans of a window, for encoder-decoders. See :class:`SpanCorruption`."""

    auto_class = "AutoModelForSeq2SeqLM"
    flags = ("mask_prob", "mean_span_length")
    fine_tuning = Seq2SeqLM

    def check(self) -> None:
        super().check()
        assert self.spans

    @cached_property
    def spans(self) -> masking.SpanCorruption:
        """Masks spans."""
        sizes = masking.span_sizes(self.seq_length, self.config.data.mask_prob, self.config.data.mean_span_length)
        return masking.SpanCorruption(sizes, masking.sentinels_of(self.tokenizer), self.token("eos"))

    @property
    def window(self) -> int:
        return self.spans.sizes.window

    def batches(self, train: Samples | Blend | Endless) -> tuple[Collate, Augment | None]:
        return PadCollate(self._padding, mask=False), self.spans


OBJECTIVES: dict[str, type[Pretraining]] = {"causal": Causal, "masked": Masked, "seq2seq": Spans}
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


class ByDocuments(Pretraining):
    """Each document is a sample. Documents longer than the sequence length are split into several samples."""

    def check(self) -> None:
        super().check()
        words = self.config.data.data_path or ()
        if any(entry.weight is not None for entry in corpora.parse_data_path(words)):
            message = "dynamic shapes cannot be combined with a weighted blend"
            hint = "leave the weights out: each corpus then has the share that its size gives it"
            raise DataError(message, where=f"--data-path {' '.join(words)}", hint=hint)

    def samples(self, dataset: IndexedDataset, part: tuple[int, int], cache: IndexCache) -> Documents:
        seed = self.config.training.seed
        short = self.config.data.short_seq_prob if "short_seq_prob" in self.flags else 0.0
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


BY_DOCUMENTS: dict[type[Pretraining], type[Pretraining]] = {Causal: CausalDocuments, Masked: MaskedDocuments}
"""The objectives that can use documents of any length."""
