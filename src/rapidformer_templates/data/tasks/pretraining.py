"""Pretraining from raw text: causal or masked, by the architecture."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch

from rapidformer_templates.architectures import objective_of
from rapidformer_templates.config import RunConfig
from rapidformer_templates.data.collate import CausalCollate, PadCollate
from rapidformer_templates.data.documents import Documents
from rapidformer_templates.data.masking import MaskTokens
from rapidformer_templates.data.pretraining import (
    Corpus,
    Windows,
    corpus_files,
    load_corpus,
    split_documents,
    split_shares,
)
from rapidformer_templates.data.tasks.base import Task
from rapidformer_templates.data.tasks.causal_lm import predicted_tokens, token_accuracy
from rapidformer_templates.data.types import Data
from rapidformer_templates.errors import DataError
from rapidformer_templates.models import model_type_of
from rapidformer_templates.targets import IGNORED

AUTO_CLASSES = {"causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM"}


class Pretraining(Task):
    """Fixed windows of a corpus; the model's own objective; metric: token accuracy.

    Causal: windows of the sequence length. Masked: ``[CLS]`` window ``[SEP]`` of that length in
    all, cut shorter with ``--short-seq-prob``, and masked; there is no next-sentence prediction
    (RoBERTa's FULL-SENTENCES, Liu et al. 2019). With dynamic shapes, samples are documents of any
    length, cut at the sequence length.
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

    @cached_property
    def masks(self) -> bool:
        return self.objective == "masked"

    @cached_property
    def by_documents(self) -> bool:
        """Whether each document is a sample, as dynamic shapes allow."""
        options = self.config.switches.get("dynamic-shape")
        return options is not None and options.data_iterator == "dynamic-shape"

    def check(self) -> None:
        corpus_files(self.config.data.data_path or ())
        assert self.seq_length > 0

    def build_data(self) -> Data:
        tokenizer, flags = self.tokenizer, self.config.data
        around = ([tokenizer.cls_token_id], [tokenizer.sep_token_id]) if self.masks else ([], [])
        end = tokenizer.sep_token_id
        if not self.masks and tokenizer.eos_token_id is not None:
            end = tokenizer.eos_token_id
        if end is None or None in around[0]:
            needed = "[CLS] and [SEP] tokens" if self.masks else "end token"
            raise DataError(f"the tokenizer has no {needed}", where="--tokenizer-type", hint="use a tokenizer that has")
        short = 0.0 if self.by_documents else flags.short_seq_prob  # documents are cut before there are batches
        augment = MaskWindows(MaskTokens(tokenizer, flags.mask_prob), short) if self.masks else None
        corpus = load_corpus(self.config, tokenizer, end)
        self.skipped = corpus.skipped
        train, valid, test = self._parts(corpus, around)
        return Data(
            train, valid, test, collate=self._collate(), augment=augment, lengths=train.lengths if train else None
        )

    def _collate(self) -> CausalCollate | PadCollate:
        pad = self.tokenizer.pad_token_id
        assert isinstance(pad, int)
        # Windows of one length need no padding mask, so that the flash kernel can be used.
        if self.masks:
            shorter = self.by_documents or self.config.data.short_seq_prob > 0
            return PadCollate({"input_ids": pad, "labels": IGNORED}, mask=shorter)
        return CausalCollate(pad, mask=False)  # no token looks at the padding to its right

    def _parts(self, corpus: Corpus, around: tuple[list[int], list[int]]) -> list[Windows | Documents | None]:
        """The windows of the three parts.

        A corpus too small for a validation or test part has none (None); with shares of the user's
        own that is an error, like a training part without a sample.
        """
        flags = self.config.data
        length = self.seq_length - len(around[0]) - len(around[1])
        if length < 1:
            raise DataError(
                f"a sequence of {self.seq_length} tokens is too short", where="--seq-length", hint="use at least 3"
            )
        shares = split_shares(flags.split)
        ranges = split_documents(shares, len(corpus.ends) - 1)
        train, *held_out = (self._samples(corpus, part, length, around) for part in ranges)
        if not len(train):
            raise self._too_small("training", ranges[0], corpus)
        parts: list[Windows | Documents | None] = [train]
        for name, share, part, windows in zip(("validation", "test"), shares[1:], ranges[1:], held_out, strict=True):
            if not len(windows) and share > 0 and self.config.origin("split") != "default":
                raise self._too_small(name, part, corpus)
            parts.append(windows if len(windows) else None)
        return parts

    def _samples(
        self, corpus: Corpus, part: tuple[int, int], length: int, around: tuple[list[int], list[int]]
    ) -> Windows | Documents:
        if not self.by_documents:
            return Windows(corpus, part, length, *around)
        # ``around`` ends a masked sample itself; a causal one learns from the end token where to stop.
        short = self.config.data.short_seq_prob if self.masks else 0.0
        seed = self.config.training.seed
        return Documents(corpus, part, length, *around, dropped=len(around[1]), short_probability=short, seed=seed)

    def _too_small(self, name: str, part: tuple[int, int], corpus: Corpus) -> DataError:
        tokens = int(corpus.ends[part[1]] - corpus.ends[part[0]])
        message = f"the {name} part has {part[1] - part[0]} documents with {tokens} tokens, less than one sample"
        hint = f"use a --seq-length below {self.seq_length}, other shares or more text"
        return DataError(message, where=f"--split {self.config.data.split}", hint=hint)

    def predict(self, outputs: Any, batch: Mapping[str, torch.Tensor]) -> tuple[list[Any], list[Any]]:
        if self.masks:
            return predicted_tokens(outputs.logits.argmax(dim=-1), batch["labels"])
        return predicted_tokens(outputs.logits[:, :-1].argmax(dim=-1), batch["labels"][:, 1:])

    def compute_metrics(self, predictions: list[Any], references: list[Any]) -> dict[str, float]:
        return token_accuracy(predictions, references)


class MaskWindows:
    """Cut some windows short, then mask. A shorter one has from 1 to all of its tokens, evenly drawn."""

    def __init__(self, mask: MaskTokens, short_probability: float) -> None:
        if not 0 <= short_probability <= 1:
            raise DataError(
                f"{short_probability:g} is not a share", where="--short-seq-prob", hint="choose a share from 0 to 1"
            )
        self.mask = mask
        self.short_probability = short_probability

    def __call__(self, sample: Mapping[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        tokens = sample["input_ids"]
        if generator.random() < self.short_probability:
            content = int(generator.integers(1, len(tokens) - 1))
            tokens = np.concatenate([tokens[: content + 1], tokens[-1:]])
        return self.mask({"input_ids": tokens}, generator)
