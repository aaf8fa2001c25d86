"""Corpora of ``--data-path``: samples compared with a concatenation by hand, the cache, blends, and every error."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rapidformer_templates.data.collate import count_targets
from rapidformer_templates.data.indexed import corpora
from rapidformer_templates.data.indexed.cache import cache_root
from rapidformer_templates.data.indexed.corpora import (
    Corpus,
    load_corpora,
)
from rapidformer_templates.data.indexed.tools import split_sequences, split_shares
from rapidformer_templates.data.tasks import load_task
from rapidformer_templates.data.text.files import text_files
from rapidformer_templates.errors import DataError
from rapidformer_templates.models.model_files import load_tokenizer
from rapidformer_templates.planning.config import RunConfig
from tests.support.texts import DOCUMENTS, write_jsonl
from tests.support.worker_pool import new_process

Configure = Callable[..., RunConfig]


def stream_of(config: RunConfig, end: int) -> list[list[int]]:
    tokenizer = load_tokenizer(config)
    return [[*tokenizer(text, add_special_tokens=False)["input_ids"], end] for text in DOCUMENTS]


def load_corpus(config: RunConfig, tokenizer: Any, end: int) -> Corpus:
    (corpus,) = load_corpora(config, tokenizer, end)
    return corpus


def tokens_of(corpus: Corpus) -> list[int]:
    return corpus.dataset.tokens[0 : corpus.dataset.token_count].tolist()


def row_of(documents: list[list[int]], part: tuple[int, int], seed: int) -> np.ndarray:
    """Return the tokens of the first epoch, in its order of documents."""
    order = np.arange(*part)
    np.random.RandomState(seed).shuffle(order)
    return np.concatenate([documents[i] for i in order])


def test_causal_samples_are_the_corpus(configure: Configure, flags: dict[str, Any]) -> None:
    config = configure(**flags, split="8,1,1", seed=5)
    task = load_task(config)
    data = task.build_data()
    documents = stream_of(config, task.tokenizer.eos_token_id)
    for samples, part in ((data.train, (0, 48)), (data.valid, (48, 54)), (data.test, (54, 60))):
        assert samples is not None
        row = row_of(documents, part, seed=5)
        expected = [row[i : i + 17].tolist() for i in range(0, len(row) - 16, 16)]
        assert sorted(samples[i]["input_ids"].tolist() for i in range(len(samples))) == sorted(expected)
    assert data.collate is not None
    rows = [data.train[0], data.train[1]]
    batch = data.collate(rows)
    assert set(batch) == {"input_ids", "labels", "shift_labels"}
    assert batch["input_ids"].tolist() == [row["input_ids"][:-1].tolist() for row in rows]
    assert batch["shift_labels"].tolist() == [row["input_ids"][1:].tolist() for row in rows]
    assert batch["input_ids"].is_contiguous()
    assert count_targets(batch, shifted=True) == 32


def test_every_token_but_the_first_is_a_target_once(configure: Configure, flags: dict[str, Any]) -> None:
    config = configure(**flags, split="1")
    data = load_task(config).build_data()
    assert data.train is not None
    assert data.collate is not None
    batch = data.collate([data.train[i] for i in range(len(data.train))])
    row = row_of(stream_of(config, 0), (0, 60), config.training.seed)
    used = row[: len(data.train) * 16 + 1]
    assert sorted(batch["shift_labels"].flatten().tolist()) == sorted(used[1:].tolist())


def test_documents_apart(configure: Configure, flags: dict[str, Any]) -> None:
    """The loss is the sum of the losses of the documents, each run separately through the model."""
    config = configure(**flags, split="1", keep_documents_apart=True)
    task = load_task(config)
    data = task.build_data()
    assert data.train is not None
    assert data.collate is not None
    samples = [data.train[i] for i in range(3)]
    batch = data.collate(samples)
    torch.manual_seed(0)
    model = task.build_model().double().eval()
    together = model(**batch).loss.item() * count_targets(batch, shifted=True)
    alone = 0.0
    for sample in samples:
        ends = np.flatnonzero(np.diff(sample["documents"])) + 1
        for piece in np.split(sample["input_ids"].astype(np.int64), ends):
            if len(piece) > 1:
                tokens = torch.from_numpy(piece)[None]
                alone += model(input_ids=tokens, labels=tokens).loss.item() * (len(piece) - 1)
    assert any(len(np.unique(sample["documents"])) > 1 for sample in samples)
    assert together == pytest.approx(alone, rel=1e-6)  # transformers computes the loss in fp32
    mixed = model(**{name: value for name, value in batch.items() if name != "position_ids"})
    assert mixed.loss.item() * count_targets(batch, shifted=True) != pytest.approx(alone, rel=1e-5)


def test_masked_windows(configure: Configure, flags: dict[str, Any], bert_folder: Path) -> None:
    config = configure(
        **(flags | {"model_type": "bert", "tokenizer_path": str(bert_folder)}), short_seq_prob=0.0, split="1"
    )
    task = load_task(config)
    data = task.build_data()
    assert data.train is not None
    assert data.augment is not None
    assert data.collate is not None
    row = row_of(stream_of(config, task.tokenizer.sep_token_id), (0, 60), config.training.seed)
    windows = sorted(row[i : i + 14].tolist() for i in range(0, len(row) - 13, 14))
    assert sorted(data.train[i]["input_ids"].tolist() for i in range(len(data.train))) == windows
    masked = data.augment(data.train[3], np.random.default_rng(0))
    whole = np.where(masked["labels"] == -100, masked["input_ids"], masked["labels"])
    assert whole.tolist() == [2, *data.train[3]["input_ids"].tolist(), 3]
    batch = data.collate([data.augment(data.train[i], np.random.default_rng(i)) for i in range(4)])
    assert set(batch) == {"input_ids", "labels"}  # windows of one length need no padding mask
    model = task.build_model().eval()
    outputs = model(**batch)
    guesses, truths = task.predict(outputs, batch)
    assert [len(t) for t in truths] == (batch["labels"] != -100).sum(1).tolist()
    assert 0 <= task.compute_metrics(guesses, truths)["token_accuracy"] <= 1
    short = load_task(config.replace("command line", short_seq_prob=1.0)).build_data()
    assert short.augment is not None
    assert short.collate is not None
    assert short.train is not None
    rows = [short.augment(short.train[i], np.random.default_rng(i)) for i in range(8)]
    assert len({len(row["input_ids"]) for row in rows}) > 1
    assert "attention_mask" in short.collate(rows)


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet", "folder", "glob"])
def test_every_format_gives_the_same_tokens(
    configure: Configure, flags: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    if kind == "txt":
        (raw / "a.txt").write_text("\n\n".join(DOCUMENTS), encoding="utf-8")
    elif kind == "parquet":
        pq.write_table(pa.table({"text": DOCUMENTS}), raw / "a.parquet")
    else:
        write_jsonl(raw / "a.jsonl", [{"text": t} for t in DOCUMENTS[:20]])
        write_jsonl(raw / "b.jsonl", [{"text": t} for t in [*DOCUMENTS[20:], "  "]])
    paths = {"jsonl": [raw / "a.jsonl", raw / "b.jsonl"], "glob": [raw / "*.jsonl"]}.get(kind, [raw])
    config = configure(**(flags | {"data_path": tuple(map(str, paths))}))
    tokenizer = load_tokenizer(config)
    corpus = load_corpus(config, tokenizer, 0)
    documents = [corpus.dataset[i] for i in range(len(corpus.dataset))]
    if kind == "txt":  # all lines but the last end with a line break
        documents = [d[d != tokenizer.encode("\n")[0]] for d in documents]
    assert [d.tolist() for d in documents] == stream_of(config, 0)
    assert corpus.dataset.dtype == np.uint16


def test_the_cache_is_used_again_and_made_anew(
    configure: Configure, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch, bert_folder: Path
) -> None:
    config = configure(**flags)
    made: list[str] = []
    write = corpora.preprocess
    monkeypatch.setattr(corpora, "preprocess", lambda *a, **k: (made.append(a[1]), write(*a, **k)))
    tokenizer = load_tokenizer(config)
    first = load_corpus(config, tokenizer, 0)
    tokenizer("the cat", truncation=True, max_length=1)  # this changes the state of the tokenizer
    again = load_corpus(config, tokenizer, 0)
    assert len(made) == 1
    assert tokens_of(again) == tokens_of(first)
    load_corpus(config, tokenizer, 1)
    load_corpus(config, load_tokenizer(configure(tokenizer_path=str(bert_folder))), 0)
    path = Path(flags["data_path"][0])
    path.write_text(path.read_text(encoding="utf-8") + '{"text": "new"}\n', encoding="utf-8")
    load_corpus(config, tokenizer, 0)
    assert len(set(made)) == 4
    copy = pickle.dumps(first)
    assert len(copy) < 10_000
    assert tokens_of(pickle.loads(copy)) == tokens_of(first)


def _tokens_of(config: RunConfig, barrier: Any, results: Any) -> None:
    written = []
    write = corpora.preprocess
    corpora.preprocess = lambda *a, **k: (written.append(1), write(*a, **k))  # type: ignore[assignment]
    tokenizer = load_tokenizer(config)
    barrier.wait()
    corpus = load_corpus(config, tokenizer, 0)
    results.put((len(written), tokens_of(corpus)))


@pytest.mark.slow
def test_two_processes_make_one_cache(configure: Configure, flags: dict[str, Any]) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [new_process(_tokens_of, configure(**flags), barrier, results) for _ in range(2)]
    for worker in workers:
        worker.start()
    counts, tokens = zip(*(results.get(timeout=120) for _ in workers), strict=True)
    for worker in workers:
        worker.join()
    assert sum(counts) == 1
    assert tokens[0] == tokens[1]
    assert not list(Path(flags["data_cache_dir"]).glob("*.tmp"))


def test_what_a_killed_process_left_is_taken_away(configure: Configure, flags: dict[str, Any]) -> None:
    config = configure(**flags)
    corpus = load_corpus(config, load_tokenizer(config), 0)
    folder, tokens = Path(corpus.dataset.prefix).parent, tokens_of(corpus)
    del corpus  # its memory map would not survive the changes to the file
    half = folder.rename(folder.with_suffix(".tmp"))
    (half / "corpus_text_document.bin").write_bytes(b"")
    again = load_corpus(config, load_tokenizer(config), 0)
    assert tokens_of(again) == tokens
    del again
    (folder / "corpus_text_document.bin").write_bytes(b"12")
    with pytest.raises(
        DataError, match="cache of the tokenized corpus is damaged: the file of tokens is truncated"
    ) as caught:
        load_corpus(config, load_tokenizer(config), 0)
    assert caught.value.where == str(folder)
    assert caught.value.hint == "delete this folder; it will be created again"


def test_the_cache_folder(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_root(configure(data_cache_dir="here")) == Path("here")
    assert cache_root(configure()) == tmp_path / "user-cache" / "rapidformer_templates"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root(configure()) == Path.home() / ".cache" / "rapidformer_templates"


def test_a_full_disk(configure: Configure, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    config = configure(**flags)
    with pytest.raises(DataError, match="the disk is full") as caught:
        load_corpus(config, load_tokenizer(config), 0)
    assert "free some space" in str(caught.value.hint)
    assert [p.suffix for p in Path(flags["data_cache_dir"]).iterdir()] == [".lock"]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any), st.integers(1, 500))
def test_each_sequence_is_in_one_part(shares: list[int], documents: int) -> None:
    parts = split_sequences(split_shares(",".join(map(str, shares))), documents)
    assert len(parts) == 3
    assert [i for first, last in parts for i in range(first, last)] == list(range(documents))
    for share, (first, last) in zip(shares, parts, strict=False):
        assert abs(last - first - share / sum(shares) * documents) <= 2


def test_split_is_megatrons() -> None:
    assert split_sequences(split_shares("969,30,1"), 1000) == [(0, 969), (969, 999), (999, 1000)]
    assert split_sequences(split_shares("1"), 5) == [(0, 5), (5, 5), (5, 5)]
    config = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_config", reason="needs megatron-core")
    for text in ("969,30,1", "1,1,1", "0.5,0.25,0.25", "7,0,2", "98,2,0"):
        shares = config.parse_and_normalize_split(text)
        bounds = config.convert_split_vector_to_split_matrix(shares)
        for count in (1, 7, 60, 999, 123457):
            theirs = [(round(b[0] * count), round(b[1] * count)) if b else None for b in bounds]
            ours = split_sequences(split_shares(text), count)
            assert [o for o, t in zip(ours, theirs, strict=True) if t] == [t for t in theirs if t]
    for wrong in ("a,b", "0,0,0", "1,2,3,4", "-1,2"):
        with pytest.raises(DataError, match="are not shares of a corpus"):
            split_shares(wrong)


def test_a_bad_line_is_named_or_left_out(configure: Configure, flags: dict[str, Any]) -> None:
    path = Path(flags["data_path"][0])
    path.write_text('{"text": "the cat runs"}\n{"text"\n{"text": 3}\n{"text": "a dog"}\n', encoding="utf-8")
    config = configure(**(flags | {"seq_length": 2}), split="1")
    with pytest.raises(DataError, match="at least 2 rows cannot be used") as caught:
        load_task(config).build_data()
    first, second = str(caught.value.where).split("\n")
    assert first.startswith(f"{path}:2: broken JSON")
    assert second.strip() == f"{path}:3: the column 'text' holds int, not text"
    for _ in range(2):  # the second time from the cache
        task = load_task(config.replace("command line", skip_bad_lines=True))
        task.build_data()
        assert [line.split(": ")[0] for line in task.bad.skipped] == [f"{path}:2", f"{path}:3"]
    with pytest.raises(DataError) as caught:
        load_task(config.replace("command line", text_column="body")).build_data()
    assert "there is no column 'body'" in str(caught.value.where)
    assert "columns: text" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ((), "no corpus is named"),
        (("{dir}/none.txt",), "{dir}/none.txt does not exist"),
        (("{dir}/corpus.json",), "{dir}/corpus.json does not exist"),
        (("{dir}/image.png",), "{dir}/image.png is not a text file"),
        (("{dir}/empty",), "there is no text file in {dir}/empty"),
        (("0.3", "{dir}/blank.txt", "0.7"), "weights and corpora do not alternate"),
        (("0.3", "0.7", "{dir}/blank.txt", "{dir}/blank.txt"), "weights and corpora do not alternate"),
        (("0.3", "{dir}/none", "0.7", "{dir}/blank.txt"), "{dir}/none does not exist"),
        (("{dir}/indexed",), "this is not an index in Megatron's format"),
        (("{dir}/indexed.bin",), "this is not an index in Megatron's format"),
        (("{dir}/blank.txt",), "there is no document with text"),
    ],
)
def test_corpora_that_cannot_be_read(
    configure: Configure, flags: dict[str, Any], tmp_path: Path, paths: tuple[str, ...], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("\n \n", encoding="utf-8")
    for name in ("image.png", "indexed.bin", "indexed.idx"):
        (tmp_path / name).write_bytes(b"no index at all")
    config = configure(**(flags | {"data_path": tuple(p.format(dir=tmp_path) for p in paths)}))
    with pytest.raises(DataError) as caught:
        load_task(config).build_data()
    assert message.format(dir=tmp_path) in caught.value.message


def test_files_are_in_the_order_given(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c/d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = text_files([str(tmp_path / "b.txt"), str(tmp_path)], "--data-path")
    assert [p.relative_to(tmp_path).as_posix() for p in found] == ["b.txt", "a.txt", "c/d.jsonl"]


def test_a_corpus_that_is_too_small(configure: Configure, flags: dict[str, Any]) -> None:
    data = load_task(configure(**flags)).build_data()
    assert data.test is None  # a thousandth of these documents is none
    assert load_task(configure(**flags, split="969,30,1")).build_data().test is None
    with pytest.raises(DataError, match=r"the validation part of .* is too small: 0 documents") as caught:
        load_task(configure(**flags, split="998,1,1")).build_data()
    assert caught.value.where == "--split 998,1,1"
    with pytest.raises(DataError, match=r"the training part of .* is too small: 58 documents"):
        load_task(configure(**(flags | {"seq_length": 5000}))).build_data()


def test_what_cannot_be_pretrained(configure: Configure, flags: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="the tokenizer has no sentinel tokens"):
        load_task(configure(**(flags | {"model_type": "t5"}))).check()
    with pytest.raises(DataError, match="the tokenizer has no"):
        load_task(configure(**(flags | {"model_type": "bert"}))).build_data()


def test_what_people_are_told(configure: Configure, flags: dict[str, Any]) -> None:
    task = load_task(configure(**flags | {"seq_length": 64}))
    task.build_data()
    folder = next(Path(flags["data_cache_dir"]).glob("text-*/")).resolve()
    first, second = task.notes
    assert first.startswith("0.0 MB of raw text were tokenized in ")
    assert first.endswith(f" s, and are kept in {folder}")
    assert second == "--split 969,30,1: the corpus is too small for a validation part"
    again = load_task(configure(**flags, split="1,1,0"))
    again.build_data()
    assert again.notes == []
