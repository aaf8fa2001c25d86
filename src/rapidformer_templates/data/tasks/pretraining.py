"""Pretraining from corpora: causal, masked or spans, by the architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from rapidformer_templates.architectures import PairLabel, objective_of, pair_label_of
from rapidformer_templates.config import RunConfig, spelling
from rapidformer_templates.data.blend import Blend
from rapidformer_templates.data.collate import PadCollate, WindowCollate
from rapidformer_templates.data.corpora import Corpus, check_corpora, load_corpora, split_sequences, split_shares
from rapidformer_templates.data.gpt import GPTSamples
from rapidformer_templates.data.index_cache import IndexCache, cache_root
from rapidformer_templates.data.indexed import IndexedDataset
from rapidformer_templates.data.masking import MaskTokens, check_short_probability
from rapidformer_templates.data.packing import check_packable, check_packable_model
from rapidformer_templates.data.pair_loss import pair_loss
from rapidformer_templates.data.sentence_pairs import SentencePairs
from rapidformer_templates.data.spans import SpanCorruption, sentinels_of, span_sizes
from rapidformer_templates.data.tasks.base import Task
from rapidformer_templates.data.tasks.causal_lm import predicted_tokens, token_accuracy
from rapidformer_templates.data.types import Data
from rapidformer_templates.errors import DataError
from rapidformer_templates.flags import DataFlags
from rapidformer_templates.models import model_type_of
from rapidformer_templates.targets import IGNORED

AUTO_CLASSES = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "pairs": "AutoModelForPreTraining",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
FLAGS_OF = {
    "keep_documents_apart": ("causal",),
    "mask_prob": ("masked", "pairs", "seq2seq"),
    "whole_word_mask": ("masked", "pairs"),
    "short_seq_prob": ("masked", "pairs"),
    "sentence_pairs": ("pairs",),
    "mean_span_length": ("seq2seq",),
}
"""Flags that act with some objectives only; given with another one, they are refused."""

PARTS = ("training", "validation", "test")

Own = GPTSamples | SentencePairs
"""The samples of one corpus."""

Samples = Own | Blend


class Pretraining(Task):
    """Samples of a fixed length from corpora; the model's own objective; metric: token accuracy.

    Causal: samples of the sequence length and one more token, so that each position has a target, as in
    Megatron-LM. Masked: ``[CLS]`` window ``[SEP]`` of that length in all, cut shorter with
    ``--short-seq-prob``, and masked (RoBERTa's FULL-SENTENCES, Liu et al. 2019). Pairs, with
    ``--sentence-pairs``: see :class:`SentencePairs`. Encoder-decoders: see :class:`SpanCorruption`.
    """

    name = "pretraining"
    best_metric = "eval_loss"
    greater_is_better = False

    pair_label: PairLabel

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        model_type = model_type_of(config)
        self.objective = objective_of(model_type)
        if config.data.sentence_pairs and self.objective == "masked":
            self.objective, self.pair_label = "pairs", pair_label_of(model_type)
        for flag, objectives in FLAGS_OF.items():
            if config.get(flag) != getattr(DataFlags(), flag) and self.objective not in objectives:
                message = f"{model_type} is pretrained without {spelling(flag)}"
                hint = f"leave it out; docs/pretraining-objectives.md says what acts with {', '.join(objectives)}"
                raise DataError(message, where=config.origin(flag), hint=hint)
        self.auto_class = AUTO_CLASSES[self.objective]

    @cached_property
    def mask(self) -> MaskTokens:
        flags, pairs = self.config.data, self.objective == "pairs"
        return MaskTokens(self.tokenizer, flags.mask_prob, whole_words=flags.whole_word_mask, at_least_one=pairs)

    @cached_property
    def spans(self) -> SpanCorruption:
        flags = self.config.data
        sizes = span_sizes(self.seq_length, flags.mask_prob, flags.mean_span_length)
        return SpanCorruption(sizes, sentinels_of(self.tokenizer), self._token("eos"))

    def _token(self, name: str) -> int:
        token = getattr(self.tokenizer, f"{name}_token_id")
        if token is None:
            hint = "use a tokenizer that has one"
            raise DataError(f"the tokenizer has no {name.upper()} token", where="--tokenizer-type", hint=hint)
        return int(token)

    def check(self) -> None:
        check_corpora(self.config.data.data_path or ())
        assert self.seq_length > 0
        if self.objective == "seq2seq":
            assert self.spans
        elif self.objective != "causal":
            assert self.mask
        if self.config.data.keep_documents_apart:
            check_packable(self.model_config.model_type, "--keep-documents-apart")

    def check_model(self, model: nn.Module) -> None:
        if self.config.data.keep_documents_apart:
            check_packable_model(model, "--keep-documents-apart")

    def build_data(self) -> Data:
        tokenizer, flags = self.tokenizer, self.config.data
        masks = self.objective in ("masked", "pairs")
        around = (self._token("cls"), self._token("sep")) if masks else (0, 0)
        has_eos = tokenizer.eos_token_id is not None
        corpora = load_corpora(self.config, tokenizer, self._token("eos" if has_eos and not masks else "sep"))
        self.skipped = [line for corpus in corpora for line in corpus.skipped]
        train, valid, test = self._parts(corpora)
        if self.objective == "causal":
            return Data(train, valid, test, collate=WindowCollate(keeps_documents_apart=flags.keep_documents_apart))
        assert isinstance(tokenizer.pad_token_id, int)
        padding = {"input_ids": tokenizer.pad_token_id, "token_type_ids": 0, "labels": IGNORED}
        if self.objective == "pairs":
            assert train is not None
            self.pair_weight = flags.mask_prob * _mean_tokens(train)
            return Data(train, valid, test, collate=PadCollate(padding))
        if self.objective == "seq2seq":
            return Data(train, valid, test, collate=PadCollate(padding, mask=False), augment=self.spans)
        # Windows of one length need no padding mask, so that the flash kernel can be used.
        augment = MaskWindows(self.mask, around, flags.short_seq_prob)
        return Data(train, valid, test, collate=PadCollate(padding, mask=flags.short_seq_prob > 0), augment=augment)

    def _parts(self, corpora: Sequence[Corpus]) -> list[Samples | None]:
        """The samples of the three parts.

        A corpus too small for a validation or test part has none (None); with shares of the user's
        own that is an error, like a training part without a sample.
        """
        shares = split_shares(self.config.data.split)
        cache = IndexCache(cache_root(self.config))
        parts: list[Samples | None] = []
        for i in range(len(PARTS)):
            needed = i == 0 or (shares[i] > 0 and self.config.origin("split") != "default")
            found: list[tuple[Corpus, Own]] = []
            for corpus in corpora:
                try:
                    found.append((corpus, self._own(corpus.dataset, shares, i, cache)))
                except DataError:
                    if needed:
                        raise
            parts.append(_blended(found, repeats=i == 0, cache=cache))
        return parts

    def _own(self, dataset: IndexedDataset, shares: Sequence[float], i: int, cache: IndexCache) -> Own:
        """Part ``i`` of one corpus.

        Raises:
            DataError: it has not one sample.
        """
        if self.objective == "pairs":
            return self._pairs(dataset, split_sequences(shares, len(dataset.documents) - 1)[i], cache)
        samples = self._windows(dataset, split_sequences(shares, len(dataset))[i], cache)
        if not len(samples):
            raise self._too_small(PARTS[i], samples)
        return samples

    def _windows(self, dataset: IndexedDataset, part: tuple[int, int], cache: IndexCache) -> GPTSamples:
        length = self.seq_length - 2 * (self.objective == "masked")
        if self.objective == "seq2seq":
            length = self.spans.sizes.window
        if length < 1:
            message = f"a sequence of {self.seq_length} tokens is too short"
            raise DataError(message, where="--seq-length", hint="use at least 3")
        return GPTSamples(
            dataset,
            part,
            length,
            self.config.training.seed,
            overlap=int(self.objective == "causal"),
            marks_documents=self.config.data.keep_documents_apart,
            cache=cache,
        )

    def _pairs(self, dataset: IndexedDataset, documents: tuple[int, int], cache: IndexCache) -> SentencePairs:
        return SentencePairs(
            dataset,
            documents,
            self.seq_length,
            self.mask,
            cls_token_id=self._token("cls"),
            sep_token_id=self._token("sep"),
            short_probability=self.config.data.short_seq_prob,
            seed=self.config.training.seed,
            label=self.pair_label,
            cache=cache,
        )

    def _too_small(self, name: str, samples: GPTSamples) -> DataError:
        documents = samples.part[1] - samples.part[0]
        message = f"the {name} part of {samples.dataset.prefix} has {documents} documents with {samples.tokens} tokens"
        hint = f"use a --seq-length below {self.seq_length}, other shares or more text"
        return DataError(f"{message}, less than one sample", where=f"--split {self.config.data.split}", hint=hint)

    def compute_loss(self, model: Any, batch: Mapping[str, torch.Tensor]) -> Any:
        if self.objective == "pairs":
            return pair_loss(model, batch, self.pair_label, self.pair_weight)
        return super().compute_loss(model, batch)

    def predict(self, outputs: Any, batch: Mapping[str, torch.Tensor]) -> tuple[list[Any], list[Any]]:
        logits = outputs.prediction_logits if self.objective == "pairs" else outputs.logits
        return predicted_tokens(
            logits.argmax(dim=-1), batch["shift_labels" if self.objective == "causal" else "labels"]
        )

    def compute_metrics(self, predictions: list[Any], references: list[Any]) -> dict[str, float]:
        return token_accuracy(predictions, references)


def _blended(
    found: Sequence[tuple[Corpus, GPTSamples | SentencePairs]], *, repeats: bool, cache: IndexCache
) -> Samples | None:
    """One set of the samples of several corpora; without weights, each in proportion to its size."""
    if not found:
        return None
    sets = [samples for _, samples in found]
    if len(sets) == 1:
        return sets[0]
    weights = [len(samples) if corpus.weight is None else corpus.weight for corpus, samples in found]
    return Blend(sets, weights, repeats=repeats, cache=cache)


def _mean_tokens(samples: Any) -> float:
    if isinstance(samples, Blend):
        return float(np.average([part.mean_tokens for part in samples.sets], weights=samples.weights))
    return float(samples.mean_tokens)


class MaskWindows:
    """``[CLS]`` window ``[SEP]``, masked. Some windows are cut short: to 1 to all of their tokens, evenly drawn.

    Args:
        mask: hides tokens.
        around: ids of ``[CLS]`` and ``[SEP]``.
        short_probability: share of the windows that are cut short.
    """

    def __init__(self, mask: MaskTokens, around: tuple[int, int], short_probability: float) -> None:
        check_short_probability(short_probability)
        self.mask = mask
        self.around = around
        self.short_probability = short_probability

    def __call__(self, sample: Mapping[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        tokens = sample["input_ids"].astype(np.int64)
        if generator.random() < self.short_probability:
            tokens = tokens[: int(generator.integers(1, len(tokens) + 1))]
        first, last = self.around
        return self.mask({"input_ids": np.concatenate([[first], tokens, [last]])}, generator)
