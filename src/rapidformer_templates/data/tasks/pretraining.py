"""Pretraining from corpora: causal or masked, by the architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import nn

from rapidformer_templates.architectures import objective_of
from rapidformer_templates.config import RunConfig
from rapidformer_templates.data.blend import Blend
from rapidformer_templates.data.collate import PadCollate, WindowCollate
from rapidformer_templates.data.corpora import Corpus, check_corpora, load_corpora, split_sequences, split_shares
from rapidformer_templates.data.gpt import GPTSamples
from rapidformer_templates.data.index_cache import IndexCache, cache_root
from rapidformer_templates.data.masking import MaskTokens
from rapidformer_templates.data.packing import check_packable, check_packable_model
from rapidformer_templates.data.tasks.base import Task
from rapidformer_templates.data.tasks.causal_lm import predicted_tokens, token_accuracy
from rapidformer_templates.data.types import Data
from rapidformer_templates.errors import DataError
from rapidformer_templates.models import model_type_of
from rapidformer_templates.targets import IGNORED

AUTO_CLASSES = {"causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM"}
PARTS = ("training", "validation", "test")

Samples = GPTSamples | Blend


class Pretraining(Task):
    """Samples of a fixed length from corpora; the model's own objective; metric: token accuracy.

    Causal: samples of the sequence length and one more token, so that each position has a target, as in
    Megatron-LM. Masked: ``[CLS]`` window ``[SEP]`` of that length in all, cut shorter with
    ``--short-seq-prob``, and masked; there is no next-sentence prediction (RoBERTa's FULL-SENTENCES,
    Liu et al. 2019).
    """

    name = "pretraining"
    best_metric = "eval_loss"
    greater_is_better = False

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.objective = objective_of(model_type_of(config))
        if self.objective not in AUTO_CLASSES:
            hint = "choose a causal or masked architecture, such as gpt2 or bert"
            raise DataError("pretraining of encoder-decoder models is not in this version", where="--task", hint=hint)
        self.auto_class = AUTO_CLASSES[self.objective]
        if self.masks and config.data.keep_documents_apart:
            hint = "leave it out, or choose a causal architecture, such as gpt2"
            message = "only causal models can be kept from seeing other documents"
            raise DataError(message, where="--keep-documents-apart", hint=hint)

    @cached_property
    def masks(self) -> bool:
        return self.objective == "masked"

    def check(self) -> None:
        check_corpora(self.config.data.data_path or ())
        assert self.seq_length > 0
        if self.config.data.keep_documents_apart:
            check_packable(self.model_config.model_type, "--keep-documents-apart")

    def check_model(self, model: nn.Module) -> None:
        if self.config.data.keep_documents_apart:
            check_packable_model(model, "--keep-documents-apart")

    def build_data(self) -> Data:
        tokenizer, flags = self.tokenizer, self.config.data
        end = tokenizer.sep_token_id
        if not self.masks and tokenizer.eos_token_id is not None:
            end = tokenizer.eos_token_id
        if end is None or (self.masks and tokenizer.cls_token_id is None):
            needed = "[CLS] and [SEP] tokens" if self.masks else "end token"
            raise DataError(f"the tokenizer has no {needed}", where="--tokenizer-type", hint="use a tokenizer that has")
        corpora = load_corpora(self.config, tokenizer, end)
        self.skipped = [line for corpus in corpora for line in corpus.skipped]
        train, valid, test = self._parts(corpora)
        if not self.masks:
            collate = WindowCollate(keeps_documents_apart=flags.keep_documents_apart)
            return Data(train, valid, test, collate=collate)
        assert isinstance(tokenizer.pad_token_id, int)
        # Windows of one length need no padding mask, so that the flash kernel can be used.
        padding = {"input_ids": tokenizer.pad_token_id, "labels": IGNORED}
        around = (tokenizer.cls_token_id, tokenizer.sep_token_id)
        augment = MaskWindows(MaskTokens(tokenizer, flags.mask_prob), around, flags.short_seq_prob)
        return Data(train, valid, test, collate=PadCollate(padding, mask=flags.short_seq_prob > 0), augment=augment)

    def _parts(self, corpora: Sequence[Corpus]) -> list[Samples | None]:
        """The samples of the three parts.

        A corpus too small for a validation or test part has none (None); with shares of the user's
        own that is an error, like a training part without a sample.
        """
        flags, length = self.config.data, self.seq_length - 2 * self.masks
        if length < 1:
            raise DataError(
                f"a sequence of {self.seq_length} tokens is too short", where="--seq-length", hint="use at least 3"
            )
        shares = split_shares(flags.split)
        cache = IndexCache(cache_root(self.config))
        make = partial(
            GPTSamples,
            length=length,
            seed=self.config.training.seed,
            overlap=0 if self.masks else 1,
            marks_documents=flags.keep_documents_apart,
            cache=cache,
        )
        parts: list[Samples | None] = []
        for i, name in enumerate(PARTS):
            needed = i == 0 or (shares[i] > 0 and self.config.origin("split") != "default")
            found = []
            for corpus in corpora:
                part = split_sequences(shares, len(corpus.dataset))[i]
                samples = make(corpus.dataset, part)
                if needed and not len(samples):
                    raise self._too_small(name, samples)
                if len(samples):
                    found.append((corpus, samples))
            parts.append(_blended(found, repeats=i == 0, cache=cache))
        return parts

    def _too_small(self, name: str, samples: GPTSamples) -> DataError:
        documents = samples.part[1] - samples.part[0]
        message = f"the {name} part of {samples.dataset.prefix} has {documents} documents with {samples.tokens} tokens"
        hint = f"use a --seq-length below {self.seq_length}, other shares or more text"
        return DataError(f"{message}, less than one sample", where=f"--split {self.config.data.split}", hint=hint)

    def predict(self, outputs: Any, batch: Mapping[str, torch.Tensor]) -> tuple[list[Any], list[Any]]:
        targets = batch["labels"] if self.masks else batch["shift_labels"]
        return predicted_tokens(outputs.logits.argmax(dim=-1), targets)

    def compute_metrics(self, predictions: list[Any], references: list[Any]) -> dict[str, float]:
        return token_accuracy(predictions, references)


def _blended(found: Sequence[tuple[Corpus, GPTSamples]], *, repeats: bool, cache: IndexCache) -> Samples | None:
    """One set of the samples of several corpora; without weights, each in proportion to its size."""
    if not found:
        return None
    sets = [samples for _, samples in found]
    if len(sets) == 1:
        return sets[0]
    weights = [len(samples) if corpus.weight is None else corpus.weight for corpus, samples in found]
    return Blend(sets, weights, repeats=repeats, cache=cache)


class MaskWindows:
    """``[CLS]`` window ``[SEP]``, masked. Some windows are cut short: to 1 to all of their tokens, evenly drawn.

    Args:
        mask: hides tokens.
        around: ids of ``[CLS]`` and ``[SEP]``.
        short_probability: share of the windows that are cut short.
    """

    def __init__(self, mask: MaskTokens, around: tuple[int, int], short_probability: float) -> None:
        if not 0 <= short_probability <= 1:
            raise DataError(
                f"{short_probability:g} is not a share", where="--short-seq-prob", hint="choose a share from 0 to 1"
            )
        self.mask = mask
        self.around = around
        self.short_probability = short_probability

    def __call__(self, sample: Mapping[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        tokens = sample["input_ids"].astype(np.int64)
        if generator.random() < self.short_probability:
            tokens = tokens[: int(generator.integers(1, len(tokens) + 1))]
        first, last = self.around
        return self.mask({"input_ids": np.concatenate([[first], tokens, [last]])}, generator)
