"""Small indexed data sets that the tests create."""

import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rapidformer_templates.data.indexed.dataset import IndexedDataset, bin_path, idx_path
from rapidformer_templates.data.indexed.writer import IndexedWriter


def numbered(prefix: Path, lengths: Sequence[int], first: int = 0) -> IndexedDataset:
    """Write a data set in which every token is a different number, counted from ``first``."""
    tokens = np.arange(first, first + sum(lengths), dtype=np.int32)
    with IndexedWriter(prefix, tokens.dtype, overwrite=True) as writer:
        writer.add(tokens, np.asarray(lengths))
    return IndexedDataset(prefix)


DOCUMENTS = [[[5, 6, 7]], [[1], [2, 3], [65499]], [[9, 9, 9, 9, 9]]]
"""Tokens by document and sequence."""


@pytest.fixture(scope="session")
def megatron() -> Any:
    """The ``indexed_dataset`` module of megatron-core."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


def write(prefix: Path, documents: list[list[list[int]]], dtype: str = "uint16") -> Path:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            tokens = np.concatenate([np.array(sequence) for sequence in document])
            writer.add(tokens, np.array([len(sequence) for sequence in document]), np.array([len(document)]))
    return prefix


def write_with_megatron(megatron: Any, prefix: Path, documents: list[list[list[int]]], dtype: str = "uint16") -> Path:
    builder = megatron.IndexedDatasetBuilder(str(bin_path(prefix)), dtype=np.dtype(dtype).type)
    for document in documents:
        builder.add_document([token for sequence in document for token in sequence], [len(s) for s in document])
    builder.finalize(str(idx_path(prefix)))
    return prefix


def contents(dataset: IndexedDataset) -> list[list[list[int]]]:
    bounds = dataset.documents
    return [
        [dataset[sequence].tolist() for sequence in range(bounds[number], bounds[number + 1])]
        for number in range(len(bounds) - 1)
    ]
