"""Indexed data sets compared with those of megatron-core, byte for byte, and every kind of damage."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapidformer_templates.data.indexed.dataset import (
    HEADER,
    TYPES,
    IndexedDataset,
    bin_path,
    check_vocabulary,
    idx_path,
    is_indexed,
    type_for,
)
from rapidformer_templates.data.indexed.writer import IndexedWriter, read_sums
from rapidformer_templates.errors import DataError
from tests.support.indexed_sets import DOCUMENTS, contents, write, write_with_megatron


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


def test_where_a_file_cannot_be_mapped(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rapidformer_templates.data.indexed import dataset as indexed

    real = indexed.mmap.mmap

    def refuse(descriptor: int, *arguments: Any, **options: Any) -> Any:
        if Path(f"/proc/self/fd/{descriptor}").resolve().suffix == ".bin":
            raise OSError(19, "No such device")
        return real(descriptor, *arguments, **options)

    monkeypatch.setattr(indexed.mmap, "mmap", refuse)
    assert contents(IndexedDataset(prefix, "infer")) == DOCUMENTS
    with pytest.raises(DataError, match="the file cannot be mapped") as raised:
        IndexedDataset(prefix, "mmap")
    assert raised.value.hint == "read it with --data-impl lazy, or copy it to a local disk"


def test_is_indexed(prefix: Path, tmp_path: Path) -> None:
    assert is_indexed(prefix)
    assert is_indexed(f"{prefix}.idx")
    assert not is_indexed(tmp_path / "text.jsonl")


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


DAMAGE = {
    "cut index": (lambda data: data[:-3], "the index is truncated: 5 sequences and 4 entries of documents need 126 "
                  "bytes, the file has 123"),
    "cut head": (lambda data: data[:20], "the index is truncated: 20 bytes are less than its header"),
    "empty index": (lambda data: b"", "the index is truncated: 0 bytes are less than its header"),
    "longer index": (lambda data: data + b"12", "the index is too long: 5 sequences and 4 entries of documents need "
                     "126 bytes, the file has 128"),
    "other file": (lambda data: b"PK\x03\x04" + data, "this is not an index in Megatron's format (MMIDIDX)"),
    "old format": (lambda data: b"TNTIDX\x00\x00" + data, "the index has the older format TNTIDX, not MMIDIDX"),
    "version": (_put(9, "<Q", 2), "the index has version 2; only 1 is supported"),
    "type": (_put(17, "<B", 99), "the index has an unknown token type (code 99)"),
    "huge count": (_put(18, "<Q", 2**60), "the index is truncated: 1,152,921,504,606,846,976 sequences and 4 entries "
                   "of documents need 13,835,058,055,282,163,778 bytes, the file has 126"),
    "shifted pointer": (_put(POINTERS + 8, "<q", 8), "sequence 1 does not begin where the previous one ends"),
    "other length": (_put(LENGTHS + 4, "<i", 2), "sequence 2 does not begin where the previous one ends"),
    "last length": (_put(LENGTHS + 16, "<i", 6), "the file of tokens is truncated: 24 bytes of 26"),
    "negative length": (_put(LENGTHS + 8, "<i", -1), "sequence 2 has a negative length"),
    "no tokens": (_put(LENGTHS, "<i", 0), "sequence 0 has no tokens"),
    "first document": (_put(ENTRIES, "<q", 1), "the document table does not cover the sequences"),
    "last document": (_put(ENTRIES + 24, "<q", 4), "the document table does not cover the sequences"),
    "empty document": (_put(ENTRIES + 8, "<qq", 4, 4), "document 1 has no tokens, or begins before the previous one"),
}  # fmt: skip
"""Changes of the index, and the messages that they cause."""


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_index_is_refused_when_it_is_opened(prefix: Path, name: str) -> None:
    change, message = DAMAGE[name]
    path = idx_path(prefix)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError) as raised:
        IndexedDataset(prefix)
    assert raised.value.message == message
    assert raised.value.where in (str(path), str(bin_path(prefix)))
    assert raised.value.hint


@pytest.mark.parametrize(
    ("size", "message"),
    [(22, "the file of tokens is truncated: 22 bytes of 24"), (26, "the file of tokens is too long: 26 bytes, not 24")],
)
def test_other_sizes_of_the_tokens(prefix: Path, size: int, message: str) -> None:
    data = bin_path(prefix).read_bytes()
    bin_path(prefix).write_bytes((data + b"\x00" * 2)[:size])
    with pytest.raises(DataError) as raised:
        IndexedDataset(prefix)
    assert raised.value.message == message
    assert raised.value.where == str(bin_path(prefix))


@pytest.mark.parametrize("end", ["bin", "idx"])
def test_one_of_the_two_files_is_missing(prefix: Path, end: str) -> None:
    Path(f"{prefix}.{end}").unlink()
    with pytest.raises(DataError) as raised:
        IndexedDataset(prefix)
    assert raised.value.message == f"{prefix}.{end} does not exist"


def test_tokens_beyond_the_vocabulary(prefix: Path) -> None:
    dataset = IndexedDataset(prefix)
    assert check_vocabulary(dataset, 65500) == 65499
    with pytest.raises(DataError) as raised:
        check_vocabulary(dataset, 65499)
    assert raised.value.message == "token 65499 in sequence 3 is not in the vocabulary of 65,499 tokens"
    assert check_vocabulary(dataset, 65500, largest=65499) == 65499
    write(prefix.with_name("signed"), [[[1, -2]]], "int32")
    with pytest.raises(DataError, match="token -2 in sequence 0 is not in the vocabulary"):
        check_vocabulary(IndexedDataset(prefix.with_name("signed")), 10)


def test_sums_know_the_largest_token(prefix: Path) -> None:
    sums = read_sums(prefix)
    assert sums is not None
    assert sums["largest_token"] == 65499
    assert sums["bin"]["bytes"] == 24
    Path(f"{prefix}.sums.json").write_text("{}")
    with pytest.raises(DataError, match="the file of checksums is damaged"):
        read_sums(prefix)


def test_a_writer_leaves_all_or_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        _fail_to_write(IndexedWriter(tmp_path / "set", np.dtype(np.int32)))
    assert list(tmp_path.iterdir()) == []


def _fail_to_write(writer: IndexedWriter) -> None:
    with writer:
        writer.add(np.arange(3), np.array([3]))
        raise RuntimeError


def test_a_writer_does_not_replace_a_set_unasked(prefix: Path) -> None:
    before = idx_path(prefix).read_bytes()
    with pytest.raises(DataError) as raised:
        IndexedWriter(prefix, np.dtype(np.int32))
    assert raised.value.message == f"{idx_path(prefix)} exists"
    with pytest.raises(RuntimeError):
        _fail_to_write(IndexedWriter(prefix, np.dtype(np.int32), overwrite=True))
    assert idx_path(prefix).read_bytes() == before
    with IndexedWriter(prefix, np.dtype(np.int32), overwrite=True) as writer:
        writer.add(np.arange(3), np.array([3]))
    assert contents(IndexedDataset(prefix)) == [[[0, 1, 2]]]


def test_two_writers_of_one_set(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "set", np.dtype(np.int32)) as writer:
        with pytest.raises(DataError, match="another process is writing this set"):
            IndexedWriter(tmp_path / "set", np.dtype(np.int32)).__enter__()
        writer.add(np.arange(3), np.array([3]))
    assert contents(IndexedDataset(tmp_path / "set")) == [[[0, 1, 2]]]


def test_what_a_writer_left_that_was_killed_while_renaming_is_replaced(prefix: Path) -> None:
    idx_path(prefix).unlink()
    write(prefix, [[[1]]])
    assert contents(IndexedDataset(prefix)) == [[[1]]]


def test_a_type_that_the_format_lacks(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the format has no tokens of type uint32"):
        IndexedWriter(tmp_path / "set", np.dtype(np.uint32))
