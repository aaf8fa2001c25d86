"""Pretraining from corpora: causal, masked, sentence pairs or spans, depending on the architecture and the flags."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce
from operator import add
from typing import Any

import numpy as np
from torch import nn

from rapidformer_templates.data.finetuning.tables import DataPart
from rapidformer_templates.data.generation import Generation, TrainedModel
from rapidformer_templates.data.indexed.blend import Blend
from rapidformer_templates.data.indexed.corpora import (
    Corpus,
    IndexCache,
    cache_root,
    check_corpora,
    load_corpora,
    recipe_of,
    streamed_corpus,
)
from rapidformer_templates.data.indexed.tools import split_sequences, split_shares
from rapidformer_templates.data.pretraining.objectives import BY_DOCUMENTS, OBJECTIVES, Objective, Pairs, Samples
from rapidformer_templates.data.pretraining.samples import Documents
from rapidformer_templates.data.streaming import RowStream, StreamedSamples, WindowsOfDocuments, buffer_of
from rapidformer_templates.data.tasks.base import Inputs, Loss, Record, Task
from rapidformer_templates.data.tasks.language_models import (
    CausalLM,
    MaskedLM,
    Seq2SeqLM,
    predicted_tokens,
    token_accuracy,
)
from rapidformer_templates.data.types import Data, Model, ModelOutputs, Sample, Tensors
from rapidformer_templates.errors import DataError, NoSamples
from rapidformer_templates.models.architectures import objective_of
from rapidformer_templates.models.label_use import LabelUse
from rapidformer_templates.models.loading import model_type_of
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.flags import DataFlags

PARTS = ("training", "validation", "test")


class Pretraining(Task):
    """Builds samples from corpora for the objective of the architecture. The metric is token accuracy."""

    name = "pretraining"
    state_fields = ()  # a corpus has no columns
    best_metric = "eval_loss"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
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
        kinds: list[type[Objective]] = [*OBJECTIVES.values(), Pairs]
        for flag in sorted({flag for other in kinds for flag in other.flags}):
            if flag not in kind.flags and getattr(config.data, flag) != getattr(DataFlags(), flag):
                message = f"{architecture} is pretrained without {spelling(flag)}"
                hint = "leave it out; docs/pretraining-objectives.md says what acts with which architecture"
                raise DataError(message, where=f"{spelling(flag)} ({config.origin(flag)})", hint=hint)
        self.auto_class = kind.auto_class
        self.objective = kind(self)

    def check(self) -> None:
        check_corpora(self.config)
        data = self.config.data
        if data.evaluate_test and not data.streaming and split_shares(data.split)[2] == 0:
            hint = "give the test part a share: --split 90,5,5"
            raise DataError("the corpus has no test part", where=f"--split {data.split}", hint=hint)
        self.objective.check()

    def check_model(self, model: nn.Module) -> None:
        self.objective.check_model(model)

    def read_data(self) -> Data:
        if self.config.data.streaming:
            return self._streamed()
        corpora = load_corpora(self.config, self.tokenizer, self.objective.end_token)
        self.bad.skipped = [line for corpus in corpora for line in corpus.skipped]
        self.notes = [note for corpus in corpora for note in corpus.notes]
        parts = self._parts(corpora)
        train, valid, test = parts
        if self.is_trained:
            train = valid = parts[self._first_part]  # nothing is trained
        assert train is not None
        if valid is None and split_shares(self.config.data.split)[1] > 0:
            self.notes.append(f"--split {self.config.data.split}: the corpus is too small for a validation part")
        collate, augment = self.objective.batches(train)
        return Data(train, valid, test, collate, augment, self.objective.lengths(train))

    def _streamed(self) -> Data:
        """Read the corpus as a stream. No part of it is held out."""
        flags, objective, seed = self.config.data, self.objective, self.config.training.seed
        recipe = recipe_of(self.config, self.tokenizer, objective.end_token)
        rows = RowStream(
            streamed_corpus(flags),
            seed if buffer_of(flags) else None,
            skip=recipe.skip,
            text_unit=recipe.text_unit,
            column=recipe.keys[0],
        )
        windows = WindowsOfDocuments(
            recipe,
            objective.window,
            overlap=objective.overlap,
            marks_documents=flags.keep_documents_apart,
            shuffles=buffer_of(flags) > 0,
        )
        identity = f"{rows.identity} in windows of {objective.window} tokens"
        train = StreamedSamples(rows, windows, seed=seed, buffer=buffer_of(flags), identity=identity)
        collate, augment = objective.batches(train)
        return Data(train, None, None, collate, augment)

    @property
    def _first_part(self) -> int:
        """Index of the required part: the training part, or the part to evaluate for a trained model."""
        return ("train", "valid", "test").index(self.part or "valid") if self.is_trained else 0

    def _parts(self, corpora: Sequence[Corpus]) -> list[Samples | Blend | None]:
        """Return the samples of the three parts.

        A part is None if the corpus is too small for it. An empty training part is an error. So is an empty validation
        part if the user set the shares with ``--split``. An empty test part is not, because runs do not need it.
        """
        shares = split_shares(self.config.data.split)
        cache = IndexCache(cache_root(self.config))
        parts: list[Samples | Blend | None] = []
        for i, name in enumerate(PARTS):
            needed = i == self._first_part or (i == 1 and shares[i] > 0 and self.config.origin("split") != "default")
            sources = []
            for corpus in corpora:
                part = split_sequences(shares, self.objective.units(corpus.dataset))[i]
                try:
                    sources.append((corpus, self.objective.samples(corpus.dataset, part, cache)))
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
        kinds: dict[str, type[Task]] = {"masked": MaskedLM, "seq2seq": Seq2SeqLM, "causal": CausalLM}
        kind = kinds[objective_of(model_type_of(self.config))]
        task = kind(self.config)
        task.tokenizer = self.tokenizer
        return task

    def use_labels(self, use: LabelUse) -> bool:
        return self.objective.use_labels(use)

    def compute_loss(self, model: Model, batch: Tensors) -> Loss:
        return self.objective.compute_loss(model, batch)

    def predict(self, outputs: ModelOutputs, batch: Tensors) -> tuple[list[np.ndarray], list[np.ndarray]]:
        logits, targets = self.objective.predicted(outputs, batch)
        return predicted_tokens(logits.argmax(dim=-1), targets)

    def compute_metrics(self, predictions: list[np.ndarray], references: list[np.ndarray]) -> dict[str, float]:
        return token_accuracy(predictions, references)
