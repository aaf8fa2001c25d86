"""Samples across documents, compared with a plain concatenation and with Megatron-LM's own data set."""

from __future__ import annotations

import itertools
import logging
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapidformer_templates.data.indexed.cache import IndexCache
from rapidformer_templates.data.pretraining.windows import GPTSamples
from tests.support.indexed_sets import numbered

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def _row_of(samples: GPTSamples, epoch: int) -> list[int]:
    """Return all tokens of an epoch, by drawing the orders again and reading the documents one by one."""
    state = np.random.RandomState(samples.seed if epoch == 0 else [samples.seed, epoch])
    documents = list(range(*samples.part))
    state.shuffle(documents)
    return [int(token) for document in documents for token in samples.dataset[document]]


@given(LENGTHS, st.integers(1, 50), st.integers(0, 1), st.integers(0, 3), st.data())
@settings(max_examples=80, deadline=None)
def test_an_epoch_is_its_documents_cut_into_samples(
    lengths: list[int], length: int, overlap: int, epoch: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(lengths) - 1))
    last = data.draw(st.integers(first + 1, len(lengths)))
    with tempfile.TemporaryDirectory() as folder:
        dataset = numbered(Path(folder) / "set", lengths)
        samples = GPTSamples(dataset, (first, last), length, 7, overlap=overlap)
        row = _row_of(samples, epoch)
        expected = [
            row[i : i + length + overlap] for i in range(0, len(row), length) if i + length + overlap <= len(row)
        ]
        assert len(samples) == len(expected)
        if not expected:
            return
        positions = range(epoch * len(samples), (epoch + 1) * len(samples))
        drawn = [item["input_ids"].tolist() for item in samples.__getitems__(positions)]
        assert sorted(drawn) == sorted(expected)
        assert drawn == [samples[p]["input_ids"].tolist() for p in positions]


def test_batches_may_cross_epochs(tmp_path: Path) -> None:
    samples = GPTSamples(numbered(tmp_path / "set", [5, 9, 4, 12]), (0, 4), 4, 1)
    positions = range(3, 3 + 3 * len(samples))
    together = [item["input_ids"].tolist() for item in samples.__getitems__(positions)]
    assert together == [samples[p]["input_ids"].tolist() for p in positions]
    assert together[: len(samples)] != together[len(samples) : 2 * len(samples)]


def test_other_seeds_and_epochs_have_other_orders(tmp_path: Path) -> None:
    dataset = numbered(tmp_path / "set", [3] * 200)
    orders = [
        [samples[p]["input_ids"].tolist() for p in range(epoch * len(samples), (epoch + 1) * len(samples))]
        for samples in (GPTSamples(dataset, (0, 200), 10, seed) for seed in (1, 2))
        for epoch in (0, 1)
    ]
    assert all(one != other for one, other in itertools.combinations(orders, 2))


def test_marks_change_where_documents_begin(tmp_path: Path) -> None:
    lengths = [5, 1, 9, 4, 12, 2]
    dataset = numbered(tmp_path / "set", lengths)
    begins = {0, *np.cumsum(lengths).tolist()}
    for item in GPTSamples(dataset, (0, 6), 8, 1, marks_documents=True).__getitems__(range(4)):
        changes = np.diff(item["documents"]) != 0
        # Tokens are numbered consecutively, so the first token of a document is known by its number.
        assert changes.tolist() == [int(token) in begins for token in item["input_ids"][1:]]


def test_tables_are_shared_through_the_cache(tmp_path: Path) -> None:
    dataset = numbered(tmp_path / "set", [7, 8, 9] * 10)
    cache = IndexCache(tmp_path / "cache")
    samples = GPTSamples(dataset, (0, 30), 16, 3, cache=cache)
    drawn = [samples[p]["input_ids"].tolist() for p in range(30)]
    folders = sorted(path.name for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert len(folders) == 3  # the epochs used by 30 samples
    copy = pickle.loads(pickle.dumps(samples))
    assert len(pickle.dumps(samples)) < 2000
    assert [copy[p]["input_ids"].tolist() for p in range(30)] == drawn
    assert sorted(path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()) == folders
    GPTSamples(numbered(tmp_path / "set", [7, 8, 10] * 10), (0, 30), 16, 3, cache=cache)[0]
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 4  # a new set, a new index


@pytest.mark.parametrize("length", [16, 200])
def test_the_first_epoch_is_megatrons(tmp_path: Path, length: int) -> None:
    gpt_dataset = pytest.importorskip("megatron.core.datasets.gpt_dataset", reason="needs megatron-core")
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    split = pytest.importorskip("megatron.core.datasets.utils").Split.train
    logging.getLogger("megatron").setLevel(logging.ERROR)

    class Tokenizer:
        eod, pad, vocab_size, unique_identifiers = 0, 10**6, 10**6 + 1, {}

    lengths = np.random.default_rng(0).integers(1, 120, 500)
    dataset = numbered(tmp_path / "set", lengths.tolist())
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=1234, sequence_length=length, split="1", tokenizer=Tokenizer(), reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
        path_to_cache=str(tmp_path / "megatron"),
    )  # fmt: skip
    prefix = str(tmp_path / "set")
    documents = np.arange(10, 480, dtype=np.int32)
    theirs = gpt_dataset.GPTDataset(indexed.IndexedDataset(prefix), prefix, documents, None, split, config)
    ours = GPTSamples(dataset, (10, 480), length, 1234)
    assert len(ours) == len(theirs)
    for place in range(len(ours)):
        tokens, sample = ours[place]["input_ids"], theirs[place]
        assert tokens[:-1].tolist() == sample["tokens"].tolist()
        assert tokens[1:].tolist() == sample["labels"].tolist()
