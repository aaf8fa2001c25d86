"""Pretraining on separate documents: the objectives for dynamic shapes."""

from __future__ import annotations

import numpy as np

from rapidformer_templates.data.collate import Collate, DocumentCollate, PadCollate
from rapidformer_templates.data.indexed.blend import Blend
from rapidformer_templates.data.indexed.cache import IndexCache
from rapidformer_templates.data.indexed.corpora import parse_data_path
from rapidformer_templates.data.indexed.dataset import IndexedDataset
from rapidformer_templates.data.pretraining.documents import Documents
from rapidformer_templates.data.pretraining.objectives import Causal, Masked, MaskWindows, Objective, Samples
from rapidformer_templates.data.types import Augment, Endless
from rapidformer_templates.errors import DataError, NoSamples


class ByDocuments(Objective):
    """Each document is a sample. Documents longer than the sequence length are split into several samples."""

    def check(self) -> None:
        super().check()
        words = self.options.data_path or ()
        if any(entry.weight is not None for entry in parse_data_path(words)):
            hint = "leave the weights out: each corpus then has the share that its size gives it"
            raise DataError(
                "dynamic shapes cannot be combined with a weighted blend",
                where=f"--data-path {' '.join(words)}",
                hint=hint,
            )

    @property
    def short_probability(self) -> float:
        """Fraction of the samples that are split in two."""
        return 0.0

    def samples(self, dataset: IndexedDataset, part: tuple[int, int], cache: IndexCache) -> Documents:
        samples = Documents(
            dataset,
            part,
            self.window,
            overlap=self.overlap,
            short_probability=self.short_probability,
            seed=self.task.config.training.seed,
        )
        if not len(samples):
            message = f"{part[1] - part[0]} documents have no sample"
            raise NoSamples(message, where=dataset.prefix, hint="use other shares or more text")
        return samples


class CausalDocuments(ByDocuments, Causal):
    """Predicts each token of a document from the tokens before it."""

    def batches(self, train: Samples | Blend | Endless) -> tuple[Collate, Augment | None]:
        return DocumentCollate(self._padding["input_ids"]), None

    def lengths(self, train: Samples | Blend) -> np.ndarray:
        assert isinstance(train, Documents)
        return train.sizes - self.overlap


class MaskedDocuments(ByDocuments, Masked):
    """Predicts masked tokens of ``[CLS]`` document ``[SEP]``."""

    @property
    def short_probability(self) -> float:
        return self.options.short_seq_prob

    def batches(self, train: Samples | Blend | Endless) -> tuple[Collate, Augment | None]:
        around = (self.token("cls"), self.token("sep"))
        return PadCollate(self._padding), MaskWindows(self.mask, around, 0.0)

    def lengths(self, train: Samples | Blend) -> np.ndarray:
        assert isinstance(train, Documents)
        return train.sizes + 2


BY_DOCUMENTS: dict[type[Objective], type[Objective]] = {Causal: CausalDocuments, Masked: MaskedDocuments}
"""The objectives that can use documents of any length."""
