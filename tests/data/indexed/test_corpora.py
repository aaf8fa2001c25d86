"""Corpora of ``--data-path``: samples compared with a concatenation by hand, the cache, blends, and every error."""

import multiprocessing
import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rapidformer_templates.data.collate import count_targets
from rapidformer_templates.data.indexed import corpora
from rapidformer_templates.data.indexed.corpora import Corpus, IndexCache, cache_root, load_corpora
from rapidformer_templates.data.indexed.tools import split_sequences, split_shares
from rapidformer_templates.data.tasks import load_task
from rapidformer_templates.data.text.files import text_files
from rapidformer_templates.errors import DataError
from rapidformer_templates.models.model_files import load_tokenizer
from rapidformer_templates.planning.config import RunConfig
from tests.support.messages import Says
from tests.support.texts import DOCUMENTS, Configure, write_jsonl
from tests.support.worker_pool import new_process


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
    data: Any = task.build_data()
    documents = stream_of(config, task.tokenizer.eos_token_id)
    for samples, part in ((data.train, (0, 48)), (data.valid, (48, 54)), (data.test, (54, 60))):
        row = row_of(documents, part, seed=5)
        expected = [row[i : i + 17].tolist() for i in range(0, len(row) - 16, 16)]
        assert sorted(samples[i]["input_ids"].tolist() for i in range(len(samples))) == sorted(expected)
    rows = [data.train[0], data.train[1]]
    batch = data.collate(rows)
    assert set(batch) == {"input_ids", "labels", "shift_labels"}
    assert batch["input_ids"].tolist() == [row["input_ids"][:-1].tolist() for row in rows]
    assert batch["shift_labels"].tolist() == [row["input_ids"][1:].tolist() for row in rows]
    assert batch["input_ids"].is_contiguous()
    assert count_targets(batch, shifted=True) == 32


def test_documents_apart(configure: Configure, flags: dict[str, Any]) -> None:
    """The loss is the sum of the losses of the documents, each run separately through the model."""
    config = configure(**flags, split="1", keep_documents_apart=True)
    task = load_task(config)
    data: Any = task.build_data()
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
    data: Any = task.build_data()
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
    short: Any = load_task(config.replace("command line", short_seq_prob=1.0)).build_data()
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


def test_what_a_killed_process_left_is_taken_away(configure: Configure, flags: dict[str, Any], says: Says) -> None:
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
    with says(DataError):
        load_corpus(config, load_tokenizer(config), 0)


def test_the_cache_folder(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_root(configure(data_cache_dir="here")) == Path("here")
    assert cache_root(configure()) == tmp_path / "user-cache" / "rapidformer_templates"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root(configure()) == Path.home() / ".cache" / "rapidformer_templates"


def test_a_full_disk(configure: Configure, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(28, os.strerror(28))))
    config = configure(**flags)
    with says(DataError):
        load_corpus(config, load_tokenizer(config), 0)
    assert [p.suffix for p in Path(flags["data_cache_dir"]).iterdir()] == [".lock"]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any), st.integers(1, 500))
def test_each_sequence_is_in_one_part(shares: list[int], documents: int) -> None:
    parts = split_sequences(split_shares(",".join(map(str, shares))), documents)
    assert len(parts) == 3
    assert [i for first, last in parts for i in range(first, last)] == list(range(documents))
    for share, (first, last) in zip(shares, parts, strict=False):
        assert abs(last - first - share / sum(shares) * documents) <= 2


def test_split_is_megatrons(says: Says) -> None:
    assert split_sequences(split_shares("1"), 5) == [(0, 5), (5, 5), (5, 5)]
    for wrong in ("a,b", "0,0,0", "1,2,3,4", "-1,2"):
        with says(DataError):
            split_shares(wrong)
    config = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_config", reason="needs megatron-core")
    for text in ("969,30,1", "1,1,1", "0.5,0.25,0.25", "7,0,2", "98,2,0"):
        bounds = config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(text))
        for count in (1, 7, 60, 999, 123457):
            theirs = [(round(b[0] * count), round(b[1] * count)) if b else None for b in bounds]
            ours = split_sequences(split_shares(text), count)
            assert [o for o, t in zip(ours, theirs, strict=True) if t] == [t for t in theirs if t]


def test_a_bad_line_is_named_or_left_out(configure: Configure, flags: dict[str, Any], says: Says) -> None:
    path = Path(flags["data_path"][0])
    path.write_text('{"text": "the cat runs"}\n{"text"\n{"text": 3}\n{"text": "a dog"}\n', encoding="utf-8")
    config = configure(**(flags | {"seq_length": 2}), split="1")
    for more in ({}, {"text_column": "body"}):
        with says(DataError):
            load_task(config.replace("command line", **more)).build_data()
    for _ in range(2):  # the second time from the cache
        task = load_task(config.replace("command line", skip_bad_lines=True))
        task.build_data()
        assert [line.split(": ")[0] for line in task.bad.skipped] == [f"{path}:2", f"{path}:3"]


@pytest.mark.parametrize(
    "paths",
    ["", "none.txt", "corpus.json", "image.png", "empty", "0.3 blank.txt 0.7", "0.3 0.7 blank.txt blank.txt",
     "0.3 none 0.7 blank.txt", "indexed", "indexed.bin", "blank.txt"],
)  # fmt: skip
def test_corpora_that_cannot_be_read(
    configure: Configure, flags: dict[str, Any], tmp_path: Path, paths: str, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("\n \n", encoding="utf-8")
    for name in ("image.png", "indexed.bin", "indexed.idx"):
        (tmp_path / name).write_bytes(b"no index at all")
    with says(DataError):
        load_task(configure(**(flags | {"data_path": tuple(paths.split())}))).build_data()


def test_files_are_in_the_order_given(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c/d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = text_files([str(tmp_path / "b.txt"), str(tmp_path)], "--data-path")
    assert [p.relative_to(tmp_path).as_posix() for p in found] == ["b.txt", "a.txt", "c/d.jsonl"]


def test_a_corpus_that_is_too_small(configure: Configure, flags: dict[str, Any], says: Says) -> None:
    assert load_task(configure(**flags)).build_data().test is None  # a thousandth of these documents is none
    assert load_task(configure(**flags, split="969,30,1")).build_data().test is None
    for more in ({"split": "998,1,1"}, {"seq_length": 5000}):
        with says(DataError):
            load_task(configure(**(flags | more))).build_data()


def test_what_cannot_be_pretrained(configure: Configure, flags: dict[str, Any], says: Says) -> None:
    for model_type in ("t5", "bert"):
        with says(DataError):
            load_task(configure(**(flags | {"model_type": model_type}))).build_data()


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


def _ask(root: Path, barrier: Any, results: Any) -> None:
    made = []

    def make() -> dict[str, np.ndarray]:
        made.append(1)
        return {"a": np.arange(100_000), "b": np.ones(3)}

    barrier.wait()
    tables = IndexCache(root)("group", make)
    results.put((len(made), int(tables["a"].sum()), tables["b"].tolist()))


@pytest.mark.slow
def test_two_processes_make_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [new_process(_ask, tmp_path / "cache", barrier, results) for _ in range(2)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
    assert sum(made for made, *_ in found) == 1
    assert [rest for _, *rest in found] == [[4999950000, [1.0, 1.0, 1.0]]] * 2


def test_a_full_disk_for_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    monkeypatch.setattr(np, "save", mock.Mock(side_effect=OSError(28, os.strerror(28))))
    with says(DataError):
        IndexCache(tmp_path)("group", lambda: {"a": np.arange(4)})
    assert not (tmp_path / "group").exists()


def test_a_damaged_table(tmp_path: Path, says: Says) -> None:
    cache = IndexCache(tmp_path)
    cache("group", lambda: {"a": np.arange(4)})
    for size in (130, 0):
        os.truncate(tmp_path / "group" / "a.npy", size)
        with says(DataError):
            cache("group", lambda: {"a": np.arange(4)})
