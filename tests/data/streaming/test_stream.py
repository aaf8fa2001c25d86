"""Samples of a stream: the same for any reader from any bookmark, and the same as if the text is read at once."""

import json
import pickle
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from rapidformer_templates.data.streaming import (
    BlockResult,
    RowStream,
    StreamedRow,
    StreamedSamples,
    WindowsOfDocuments,
)
from rapidformer_templates.data.text.encoding import EncodingRecipe
from rapidformer_templates.data.text.fast_tokenizers import CachedPieces, Reference
from rapidformer_templates.errors import DataError
from tests.support.messages import Says
from tests.support.texts import WORDS, Load, write_jsonl

SIZES = (7, 1, 12, 5)
ROWS = [f"{shard}-{row}" for shard, size in enumerate(SIZES) for row in range(size)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Write four shards of 25 rows, jsonl and parquet."""
    folder = tmp_path_factory.mktemp("shards")
    files = []
    for shard, size in enumerate(SIZES):
        rows = [{"text": f"{shard}-{row}"} for row in range(size)]
        if shard % 2:
            files.append(folder / f"train-{shard:05d}-of-00004.parquet")
            pq.write_table(pa.Table.from_pylist(rows), files[-1])
        else:
            files.append(write_jsonl(folder / f"train-{shard:05d}-of-00004.jsonl", rows))
    return files


def texts(rows: RowStream, count: int) -> list[str]:
    taken = (next(rows) for _ in iter(int, 1))
    return [row.row["text"] for row in islice((row for row in taken if row.row), count) if row.row]


def test_rows_in_order_and_a_new_order_of_the_shards_in_each_epoch(shards: list[Path]) -> None:
    assert texts(RowStream(shards, None), 30) == [*ROWS, *ROWS[:5]]
    rows = RowStream(shards, 3)
    epochs = [texts(rows, 25) for _ in range(4)]
    assert all(sorted(epoch) == sorted(ROWS) for epoch in epochs)
    assert len({tuple(dict.fromkeys(text[0] for text in epoch)) for epoch in epochs}) > 1
    assert texts(RowStream(shards, 4), 25) != epochs[0] or texts(RowStream(shards, 5), 25) != epochs[0]


@pytest.mark.slow
def test_lines_that_cannot_be_read_are_named_or_left_out(tmp_path: Path, says: Says) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"text": "a"}\n{"text"\n{"text": "b"}\n[]\n')
    with says(DataError):
        texts(RowStream([file], None), 2)
    samples = StreamedSamples(RowStream([file], None, skip=True), whole_rows, seed=1, buffer=0, identity="")
    assert [samples[p] for p in range(4)] == ["a", "b", "a", "b"]
    last = [samples[p] for p in range(4, 40)] and samples.bookmark
    says.text("\n".join(last["reasons"]))
    assert all(count in (last["epoch"], last["epoch"] + 1) for count in last["reasons"].values())


def whole_rows(rows: list[StreamedRow], left: Any, generator: np.random.Generator) -> BlockResult:
    return BlockResult([row.row["text"] for row in rows if row.row])


class Pairs:
    """Combines two rows into a sample. An odd row at the end is left over."""

    def __call__(self, rows: list[StreamedRow], left: Any, generator: np.random.Generator) -> BlockResult:
        all_rows = [*(left or []), *(row.row["text"] for row in rows if row.row)]
        even = len(all_rows) // 2 * 2
        return BlockResult([tuple(all_rows[i : i + 2]) for i in range(0, even, 2)], all_rows[even:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "buffer"),
    [
        pytest.param(make, buffer, id=f"{buffer}-{name}", marks=() if buffer in always else pytest.mark.longer)
        for name, make, always in (("rows", whole_rows, (1, 10)), ("pairs", Pairs(), (0, 3, 60)))
        for buffer in (0, 1, 3, 10, 60)
    ],
)
def test_any_reader_from_any_bookmark_has_the_same_samples(shards: list[Path], make: Any, buffer: int) -> None:
    def stream() -> StreamedSamples:
        samples = StreamedSamples(RowStream(shards, 3), make, seed=5, buffer=buffer, identity="")
        samples.keep_apart(4)
        return samples

    reference = stream()
    whole = [reference[p] for p in range(80)]
    assert max(Counter(str(sample) for sample in whole).values()) <= 8
    reader, bookmarks = stream(), []
    for p in range(0, 60, 4):
        assert reader.__getitems__([p, p + 3]) == [whole[p], whole[p + 3]]
        bookmarks.append(reader.bookmark)
    for p, bookmark in zip(range(0, 60, 4), bookmarks, strict=True):
        assert bookmark["position"] <= p + 3
        other = stream()
        other.go_to(json.loads(json.dumps(bookmark)))
        assert [other[i] for i in range(p + 4, 80)] == whole[p + 4 : 80]
        assert other[0] == whole[0]  # a step back, to the beginning
        assert pickle.loads(pickle.dumps(other))[20] == whole[20]


@pytest.mark.parametrize("buffer", [1, 3, 10])
def test_a_block_has_its_rows_in_another_order(shards: list[Path], buffer: int) -> None:
    samples = StreamedSamples(RowStream(shards, None), whole_rows, seed=2, buffer=buffer, identity="")
    found, rows = [samples[p] for p in range(75)], ROWS * 3
    for start in range(0, 75, 25):  # a block ends with the pass
        one_pass = found[start : start + 25]
        for block in range(0, 25, buffer):
            assert sorted(one_pass[block : block + buffer]) == sorted(ROWS[block : block + buffer])
    assert (found == rows) == (buffer == 1)
    if buffer == 10:  # the blocks have different orders
        orders = [tuple(rows[s : s + 10].index(text) for text in found[s : s + 10]) for s in (0, 10)]
        assert orders[0] != orders[1]


def test_a_stream_without_a_sample_ends(tmp_path: Path, says: Says) -> None:
    def nothing(rows: list[StreamedRow], left: Any, generator: np.random.Generator) -> BlockResult:
        return BlockResult([])

    for content, make in (('{"text": "a"}\n' * 3, nothing), ("\n\n", whole_rows)):
        (tmp_path / "a.jsonl").write_text(content)
        with says(DataError):
            StreamedSamples(RowStream([tmp_path / "a.jsonl"], 1), make, seed=1, buffer=2, identity="")[0]


def documents(count: int, seed: int = 0) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, draw.integers(1, 30))) for _ in range(count)]


@pytest.fixture
def pretrain(load: Load) -> Load:
    """A function that loads a task which streams files."""

    def make(*files: Path, **flags: Any) -> Any:
        common = {"model_type": "gpt2", "seq_length": 16, "streaming": True, "seed": 5, "data_dir": None}
        data = {"data_path": tuple(map(str, files)), "validation_fraction": None}
        return load("pretraining", **common | data | flags)

    return make


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("buffer", [0, 10])
def test_windows_are_those_of_the_text_in_a_row(pretrain: Load, tmp_path: Path, buffer: int, apart: bool) -> None:
    """Without a shuffle, the windows equal those of all documents in a row. With a shuffle, each token occurs once."""
    text = documents(50)
    files = [write_jsonl(tmp_path / f"{i}.jsonl", [{"text": t} for t in text[i * 25 : i * 25 + 25]]) for i in range(2)]
    task = pretrain(*files, shuffle_buffer=buffer, keep_documents_apart=apart)
    task.check()
    data: Any = task.build_data()
    assert (data.valid, data.test) == (None, None)
    end = task.tokenizer.eos_token_id
    encoded = [[*task.tokenizer(t, add_special_tokens=False)["input_ids"], end] for t in text]
    row = np.concatenate(encoded * 3)
    count = (sum(map(len, encoded)) - 1) // 16
    samples = [data.train[p] for p in range(count)]
    in_a_row = [row[i * 16 : i * 16 + 17] for i in range(count)]
    assert all(np.array_equal(s["input_ids"], w) for s, w in zip(samples, in_a_row, strict=True)) == (not buffer)
    if apart and not buffer:
        expected = np.searchsorted(np.flatnonzero(row == end), np.arange(len(row)), side="left")
        for i, sample in enumerate(samples):
            assert (np.diff(sample["documents"]) == np.diff(expected[i * 16 : i * 16 + 17])).all()
    taken = Counter(np.concatenate([sample["input_ids"][:-1] for sample in samples]).tolist())
    assert sum((taken - Counter(np.concatenate(encoded).tolist())).values()) == 0
    assert data.collate(samples[:3])["input_ids"].shape == (3, 16)


@pytest.mark.slow
def test_the_column_and_the_unit_of_a_text(pretrain: Load, tmp_path: Path) -> None:
    """Compare the windows of one text, read from files of lines and from rows with a different column."""
    text = documents(30)
    (tmp_path / "a.txt").write_text("\n".join(text))
    write_jsonl(tmp_path / "a.jsonl", [{"body": f"{line}\n" if i < 29 else line} for i, line in enumerate(text)])
    found = []
    for name in ("a.txt", "a.jsonl"):
        task = pretrain(tmp_path / name, shuffle_buffer=5, text_column="body", text_unit="line")
        samples: Any = task.build_data().train
        found.append([samples[p]["input_ids"].tolist() for p in range(20)])
    assert found[0] == found[1]


def test_a_fast_tokenizer_is_used_only_where_it_gives_the_same(
    gpt_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gpt_folder)
    rows = [StreamedRow(Path("a.jsonl"), i, {"text": text}, ()) for i, text in enumerate(documents(20))]
    recipe = EncodingRecipe(tokenizer.backend_tokenizer.to_str(), "uint16", 0)

    def windows() -> tuple[Any, WindowsOfDocuments]:
        made = WindowsOfDocuments(recipe, 8, overlap=1, shuffles=False)
        return [s["input_ids"].tolist() for s in made(rows, None, np.random.default_rng(0)).samples], made  # type: ignore[attr-defined]

    plain, made = windows()
    assert isinstance(made._encoder and made._encoder.encode, CachedPieces)
    monkeypatch.setattr(
        CachedPieces, "__call__", lambda self, texts: (np.zeros(len(texts), int), np.ones(len(texts), int))
    )
    again, made = windows()
    assert isinstance(made._encoder and made._encoder.encode, Reference)
    assert again == plain


@pytest.mark.parametrize("task", ["pretraining", "masked_lm"])
def test_masked_windows_and_texts(load: Load, pretrain: Load, tmp_path: Path, task: str) -> None:
    """Tasks whose samples change at each use produce batches of one shape with hidden tokens."""
    rows = [{"text": text} for text in documents(40)]
    if task == "masked_lm":
        made = load(task, rows, seq_length=16, streaming=True, shuffle_buffer=7, seed=5)
    else:
        file = write_jsonl(tmp_path / "train.jsonl", rows)
        made = pretrain(file, model_type="bert", short_seq_prob=0.0, shuffle_buffer=7)
    data: Any = made.build_data()
    assert isinstance(data.train, StreamedSamples)
    batch = data.collate([data.augment(data.train[p], np.random.default_rng(p)) for p in range(6)])
    assert batch["input_ids"].shape == batch["labels"].shape
    assert batch["input_ids"].shape[1] <= 16
    assert (batch["labels"] != -100).any()


@pytest.mark.parametrize("packs", [False, True])
def test_a_streamed_task_has_the_samples_of_the_same_rows_read_whole(load: Load, tmp_path: Path, packs: bool) -> None:
    text = documents(40)
    for i in range(2):
        write_jsonl(tmp_path / f"train-{i}-of-2.jsonl", [{"text": t} for t in text[i * 20 : i * 20 + 20]])
    valid = [{"text": t} for t in documents(5, 1)]
    flags: dict[str, Any] = {"valid": valid, "seq_length": 64, "pack_sequences": packs, "seed": 5}
    whole: Any = load("causal_lm", **flags).build_data()
    streamed: Any = load("causal_lm", **flags, streaming=True, shuffle_buffer=40).build_data()

    def texts_in(samples: Any, count: int) -> list[list[int]]:
        """Return single samples, also those in packed rows."""
        found = []
        for row in (samples[p] for p in range(count)):
            starts = np.flatnonzero(row["position_ids"] == 0) if packs else np.array([0])
            found += [part.tolist() for part in np.split(row["input_ids"], starts[1:])]
        return sorted(found)

    count = len(whole.train)
    assert texts_in(streamed.train, count) == texts_in(whole.train, count)
    assert len(streamed.valid or []) == len(whole.valid or [])
    if packs:
        assert sum(streamed.train[p].samples for p in range(count)) == 40


def test_conversations_and_what_is_told_of_them(load: Load, says: Says) -> None:
    talk = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "the cat"}]
    rows, flags = [{"messages": talk[: 2 - i % 2]} for i in range(6)], {"streaming": True, "shuffle_buffer": 3}
    task = load("causal_lm", rows, **flags, seq_length=64, skip_bad_lines=True)
    samples: Any = task.build_data().train
    labels = [samples[p]["labels"].tolist() for p in range(8)]
    assert labels == labels[:1] * 8
    assert -100 in labels[0]
    says.text("\n".join([*task.notes, *samples.bookmark["reasons"]]))
    with says(DataError):
        load("causal_lm", **flags).build_data().train[0]  # type: ignore[index]


def test_what_is_not_streamed(load: Load, pretrain: Load, tmp_path: Path, says: Says) -> None:
    datasets.Dataset.from_dict({"text": documents(5)}).save_to_disk(str(tmp_path / "saved"))
    with says(DataError):
        load("causal_lm", data_dir=str(tmp_path / "saved"), streaming=True).check()
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in documents(5)])
    with says(DataError):
        pretrain(data_path=("0.5", str(file), "0.5", str(file))).check()
