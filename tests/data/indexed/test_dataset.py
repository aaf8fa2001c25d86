"""Indexed data sets compared with those of megatron-core, byte for byte, and every kind of damage."""

import math
import pickle
import struct
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapidformer_templates.data.indexed import tools
from rapidformer_templates.data.indexed.dataset import (
    HEADER,
    TYPES,
    IndexedDataset,
    bin_path,
    check_vocabulary,
    idx_path,
    type_for,
)
from rapidformer_templates.data.indexed.writer import IndexedWriter, read_sums
from rapidformer_templates.errors import DataError
from tests.support.indexed_sets import DOCUMENTS, contents, write, write_with_megatron
from tests.support.messages import Says


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return write(tmp_path / "set", DOCUMENTS)


@pytest.mark.parametrize("dtype", sorted(str(dtype) for dtype in TYPES.values()))
def test_bytes_are_those_of_megatron(megatron: Any, tmp_path: Path, dtype: str) -> None:
    documents = [[[5, 6, 7]], [[1], [2, 3], [120]], [[9] * 5]]
    theirs = write_with_megatron(megatron, tmp_path / "theirs", documents, dtype)
    ours = write(tmp_path / "ours", documents, dtype)
    assert bin_path(ours).read_bytes() == bin_path(theirs).read_bytes()
    assert idx_path(ours).read_bytes() == idx_path(theirs).read_bytes()


document_lists = st.lists(
    st.lists(st.lists(st.integers(0, 65499), min_size=1, max_size=9), min_size=1, max_size=4), min_size=1, max_size=9
)


@settings(max_examples=25, deadline=None)
@given(documents=document_lists)
def test_each_reads_what_the_other_writes(
    megatron: Any, tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]]
) -> None:
    folder = tmp_path_factory.mktemp("both")
    theirs = write_with_megatron(megatron, folder / "theirs", documents)
    assert contents(IndexedDataset(theirs)) == documents
    ours = write(folder / "ours", documents)
    read = megatron.IndexedDataset(str(ours))
    assert [read[i].tolist() for i in range(len(read))] == [sequence for one in documents for sequence in one]
    assert read.document_indices.tolist() == np.cumsum([0, *map(len, documents)]).tolist()
    assert bin_path(ours).read_bytes() == bin_path(theirs).read_bytes()
    assert idx_path(ours).read_bytes() == idx_path(theirs).read_bytes()


def test_a_set_of_images_and_text_is_read_past_its_modes(megatron: Any, tmp_path: Path) -> None:
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "set.bin"), dtype=np.int32, multimodal=True)
    builder.add_document([1, 2, 3], [1, 2], [0, 1])
    builder.finalize(str(tmp_path / "set.idx"))
    dataset = IndexedDataset(tmp_path / "set")
    assert contents(dataset) == [[[1], [2, 3]]]
    assert dataset.has_modes


def test_types_are_chosen_as_megatron_does(megatron: Any) -> None:
    for size in (1, 50257, 65499, 65500, 65501, 250_000):
        assert type_for(size) == np.dtype(megatron.DType.optimal_dtype(size))


@pytest.mark.parametrize("access", ["mmap", "lazy", "cached", "infer"])
def test_ways_to_read(prefix: Path, access: Any) -> None:
    dataset = IndexedDataset(f"{prefix}.bin", access)
    assert contents(dataset) == DOCUMENTS
    assert len(dataset) == 5
    assert dataset.token_count == 12
    assert dataset.tokens[2:6].tolist() == [7, 1, 2, 3]
    assert dataset.lengths.tolist() == [3, 1, 2, 1, 5]
    state = pickle.dumps(dataset)
    assert len(state) < 500  # the tokens are not pickled
    again = pickle.loads(state)
    assert contents(again) == DOCUMENTS
    assert again.access == access


def test_where_a_file_cannot_be_mapped(prefix: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    from rapidformer_templates.data.indexed import dataset as indexed

    real = indexed.mmap.mmap

    def refuse(descriptor: int, *arguments: Any, **options: Any) -> Any:
        if Path(f"/proc/self/fd/{descriptor}").resolve().suffix == ".bin":
            raise OSError(19, "No such device")
        return real(descriptor, *arguments, **options)

    monkeypatch.setattr(indexed.mmap, "mmap", refuse)
    assert contents(IndexedDataset(prefix, "infer")) == DOCUMENTS
    with says(DataError):
        IndexedDataset(prefix, "mmap")


def test_a_set_without_documents(megatron: Any, tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "set", np.dtype(np.int32)):
        pass
    assert len(IndexedDataset(tmp_path / "set")) == 0
    assert len(IndexedDataset(tmp_path / "set", "lazy")) == 0


INDEX = len(HEADER.pack(b"", 0, 0, 0, 0))
LENGTHS, POINTERS, ENTRIES = INDEX, INDEX + 4 * 5, INDEX + 12 * 5


def _put(place: int, form: str, *values: int) -> Any:
    """Return a change of the index that writes these values at this offset."""

    def change(data: bytes) -> bytes:
        new = struct.pack(form, *values)
        return data[:place] + new + data[place + len(new) :]

    return change


DAMAGE: dict[str, tuple[str, Any]] = {
    "cut index": ("idx", lambda data: data[:-3]),
    "cut head": ("idx", lambda data: data[:20]),
    "empty index": ("idx", lambda data: b""),
    "longer index": ("idx", lambda data: data + b"12"),
    "other file": ("idx", lambda data: b"PK\x03\x04" + data),
    "old format": ("idx", lambda data: b"TNTIDX\x00\x00" + data),
    "version": ("idx", _put(9, "<Q", 2)),
    "type": ("idx", _put(17, "<B", 99)),
    "huge count": ("idx", _put(18, "<Q", 2**60)),
    "shifted pointer": ("idx", _put(POINTERS + 8, "<q", 8)),
    "other length": ("idx", _put(LENGTHS + 4, "<i", 2)),
    "last length": ("idx", _put(LENGTHS + 16, "<i", 6)),
    "negative length": ("idx", _put(LENGTHS + 8, "<i", -1)),
    "no tokens": ("idx", _put(LENGTHS, "<i", 0)),
    "first document": ("idx", _put(ENTRIES, "<q", 1)),
    "last document": ("idx", _put(ENTRIES + 24, "<q", 4)),
    "empty document": ("idx", _put(ENTRIES + 8, "<qq", 4, 4)),
    "no index": ("idx", None),
    "cut tokens": ("bin", lambda data: data[:-2]),
    "more tokens": ("bin", lambda data: data + b"\x00" * 2),
    "no file of tokens": ("bin", None),
}
"""Changes of the two files. None: it is missing."""


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_set_is_refused_when_it_is_opened(prefix: Path, name: str, says: Says) -> None:
    end, change = DAMAGE[name]
    path = Path(f"{prefix}.{end}")
    data = path.read_bytes()
    path.unlink()
    if change:
        path.write_bytes(change(data))
    with says(DataError):
        IndexedDataset(prefix)


def test_tokens_beyond_the_vocabulary(prefix: Path, says: Says) -> None:
    dataset = IndexedDataset(prefix)
    assert check_vocabulary(dataset, 65500) == check_vocabulary(dataset, 65500, largest=65499) == 65499
    write(prefix.with_name("signed"), [[[1, -2]]], "int32")
    for name, size in (("set", 65499), ("signed", 10)):
        with says(DataError):
            check_vocabulary(IndexedDataset(prefix.with_name(name)), size)


def test_sums_know_the_largest_token(prefix: Path, says: Says) -> None:
    sums = read_sums(prefix)
    assert sums is not None
    assert (sums["largest_token"], sums["bin"]["bytes"]) == (65499, 24)
    Path(f"{prefix}.sums.json").write_text("{}")
    with says(DataError):
        read_sums(prefix)


def test_a_writer_leaves_all_or_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        _fail_to_write(IndexedWriter(tmp_path / "set", np.dtype(np.int32)))
    assert list(tmp_path.iterdir()) == []


def _fail_to_write(writer: IndexedWriter) -> None:
    with writer:
        writer.add(np.arange(3), np.array([3]))
        raise RuntimeError


def test_a_writer_does_not_replace_a_set_unasked(prefix: Path, says: Says) -> None:
    before = idx_path(prefix).read_bytes()
    with says(DataError):
        IndexedWriter(prefix, np.dtype(np.int32))
    with pytest.raises(RuntimeError):
        _fail_to_write(IndexedWriter(prefix, np.dtype(np.int32), overwrite=True))
    assert idx_path(prefix).read_bytes() == before
    with IndexedWriter(prefix, np.dtype(np.int32), overwrite=True) as writer:
        writer.add(np.arange(3), np.array([3]))
    assert contents(IndexedDataset(prefix)) == [[[0, 1, 2]]]


def test_two_writers_of_one_set(tmp_path: Path, says: Says) -> None:
    with IndexedWriter(tmp_path / "set", np.dtype(np.int32)) as writer:
        with says(DataError):
            IndexedWriter(tmp_path / "set", np.dtype(np.int32)).__enter__()
        writer.add(np.arange(3), np.array([3]))
    assert contents(IndexedDataset(tmp_path / "set")) == [[[0, 1, 2]]]


def test_what_a_writer_left_that_was_killed_while_renaming_is_replaced(prefix: Path) -> None:
    idx_path(prefix).unlink()
    write(prefix, [[[1]]])
    assert contents(IndexedDataset(prefix)) == [[[1]]]


def test_unigram_loss_is_that_of_single_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is the likelihood computed token by token."""
    monkeypatch.setattr(tools, "CHUNK", 37)  # so that counting needs several chunks
    generator = np.random.default_rng(0)
    documents = [generator.zipf(1.5, size).clip(max=99).tolist() for size in generator.integers(1, 40, 60)]
    prefix = write(tmp_path / "set", [[document] for document in documents])
    train, held_out = (list(chain.from_iterable(part)) for part in (documents[5:50], documents[50:]))
    counts, size = Counter(train), max(train + held_out) + 1
    expected = -sum(math.log((counts[token] + 1) / (len(train) + size)) for token in held_out) / len(held_out)
    assert tools.unigram_loss(IndexedDataset(prefix), (5, 50), (50, 60)) == pytest.approx(expected, rel=1e-12)


def test_negative_tokens_are_refused(tmp_path: Path, says: Says) -> None:
    prefix = write(tmp_path / "set", [[[1, 2]], [[-3, 4]]], "int32")
    with says(DataError):
        tools.counts_of(IndexedDataset(prefix), (0, 2))
    with says(DataError):
        tools.add_sums(str(prefix))
