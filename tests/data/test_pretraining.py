"""Raw corpora: windows against a concatenation by hand, the cache, and every mistake."""

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

from rapidformer_templates.config import RunConfig
from rapidformer_templates.data import pretraining
from rapidformer_templates.data.pretraining import cache_root, corpus_files, load_corpus, split_documents, split_shares
from rapidformer_templates.data.tasks import load_task
from rapidformer_templates.data.tokenizers import load_tokenizer
from rapidformer_templates.errors import DataError
from tests.data.conftest import TINY, WORDS, write_jsonl

Configure = Callable[..., RunConfig]
DOCUMENTS = [" ".join(np.random.default_rng(i).choice(WORDS, 5 + i % 17)) for i in range(60)]


@pytest.fixture
def flags(tmp_path: Path, gpt_folder: Path) -> dict[str, Any]:
    write_jsonl(tmp_path / "corpus.jsonl", [{"text": text} for text in DOCUMENTS])
    return {
        "task": "pretraining", "model_type": "gpt2", "tokenizer_path": str(gpt_folder), "seq_length": 16,
        "data_path": (str(tmp_path / "corpus.jsonl"),), "data_cache_dir": str(tmp_path / "cache"), **TINY,
    }  # fmt: skip


def stream_of(config: RunConfig, end: int) -> list[list[int]]:
    tokenizer = load_tokenizer(config)
    return [[*tokenizer(text, add_special_tokens=False)["input_ids"], end] for text in DOCUMENTS]


def test_causal_windows_are_the_stream(configure: Configure, flags: dict[str, Any]) -> None:
    config = configure(**flags, split="8,1,1")
    task = load_task(config)
    data = task.build_data()
    documents = stream_of(config, task.tokenizer.eos_token_id)
    for samples, (first, last) in ((data.train, (0, 48)), (data.valid, (48, 54)), (data.test, (54, 60))):
        assert samples is not None
        stream = np.concatenate(documents[first:last])
        windows = [stream[i : i + 16] for i in range(0, len(stream) - 15, 16)]
        assert len(samples) == len(windows)
        assert all((samples[i]["input_ids"] == window).all() for i, window in enumerate(windows))
    assert data.collate is not None
    batch = data.collate([data.train[0], data.train[1]])
    assert set(batch) == {"input_ids", "labels"}
    assert (batch["labels"][:, 0] == -100).all()
    assert torch.equal(batch["labels"][:, 1:], batch["input_ids"][:, 1:])


def test_masked_windows(configure: Configure, flags: dict[str, Any], bert_folder: Path) -> None:
    config = configure(**(flags | {"model_type": "bert", "tokenizer_path": str(bert_folder)}), short_seq_prob=0.0)
    task = load_task(config)
    data = task.build_data()
    assert data.train is not None
    assert data.augment is not None
    assert data.collate is not None
    stream = np.concatenate(stream_of(config, task.tokenizer.sep_token_id))
    assert data.train[3]["input_ids"].tolist() == [2, *stream[42:56].tolist(), 3]
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
    documents = [corpus.tokens[a:b] for a, b in zip(corpus.ends, corpus.ends[1:], strict=False)]
    if kind == "txt":  # a line break stands at the end of all but the last
        documents = [d[d != tokenizer.encode("\n")[0]] for d in documents]
    assert [d.tolist() for d in documents] == stream_of(config, 0)
    assert corpus.tokens.dtype == np.uint16


def test_the_cache_is_used_again_and_made_anew(
    configure: Configure, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch, bert_folder: Path
) -> None:
    config = configure(**flags)
    made: list[Path] = []
    write = pretraining._write_corpus
    monkeypatch.setattr(pretraining, "_write_corpus", lambda *a: (made.append(a[-1]), write(*a)))
    tokenizer = load_tokenizer(config)
    first = load_corpus(config, tokenizer, 0)
    tokenizer("the cat", truncation=True, max_length=1)  # leaves its mark on the tokenizer
    again = load_corpus(config, tokenizer, 0)
    assert len(made) == 1
    assert again.tokens.tolist() == first.tokens.tolist()
    load_corpus(config, tokenizer, 1)
    load_corpus(config, load_tokenizer(configure(tokenizer_path=str(bert_folder))), 0)
    path = Path(flags["data_path"][0])
    path.write_text(path.read_text(encoding="utf-8") + '{"text": "new"}\n', encoding="utf-8")
    load_corpus(config, tokenizer, 0)
    assert len(set(made)) == 4
    copy = pickle.dumps(first)
    assert len(copy) < 10_000
    assert pickle.loads(copy).tokens.tolist() == first.tokens.tolist()


def _tokens_of(config: RunConfig, barrier: Any, results: Any) -> None:
    written = []
    write = pretraining._write_corpus
    pretraining._write_corpus = lambda *a: (written.append(1), write(*a))  # type: ignore[assignment]
    tokenizer = load_tokenizer(config)
    barrier.wait()
    corpus = load_corpus(config, tokenizer, 0)
    results.put((len(written), corpus.tokens.tolist()))


def test_two_processes_make_one_cache(configure: Configure, flags: dict[str, Any]) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [context.Process(target=_tokens_of, args=(configure(**flags), barrier, results)) for _ in range(2)]
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
    half = corpus.folder.rename(corpus.folder.with_suffix(".tmp"))
    (half / "tokens.bin").write_bytes(b"")
    again = load_corpus(config, load_tokenizer(config), 0)
    assert len(again.tokens) == again.ends[-1]
    (again.folder / "tokens.bin").write_bytes(b"12")
    with pytest.raises(DataError, match="cache of the tokenized corpus is damaged") as caught:
        load_corpus(config, load_tokenizer(config), 0)
    assert caught.value.where == str(again.folder)


def test_the_cache_folder(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_root(configure(data_cache_dir="here")) == Path("here")
    assert cache_root(configure()) == tmp_path / "user-cache" / "rapidformer_templates"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root(configure()) == Path.home() / ".cache" / "rapidformer_templates"


def test_a_full_disk(configure: Configure, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(np, "save", full)
    config = configure(**flags)
    with pytest.raises(DataError, match="the disk is full") as caught:
        load_corpus(config, load_tokenizer(config), 0)
    assert "--data-cache-dir" in str(caught.value.hint)
    assert [p.suffix for p in Path(flags["data_cache_dir"]).iterdir()] == [".lock"]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any), st.integers(1, 500))
def test_each_document_is_in_one_part(shares: list[int], documents: int) -> None:
    parts = split_documents(split_shares(",".join(map(str, shares))), documents)
    assert len(parts) == 3
    assert [i for first, last in parts for i in range(first, last)] == list(range(documents))
    for share, (first, last) in zip(shares, parts, strict=False):
        assert abs(last - first - share / sum(shares) * documents) <= 2


def test_split_is_megatrons() -> None:
    assert split_documents(split_shares("969,30,1"), 1000) == [(0, 969), (969, 999), (999, 1000)]
    assert split_documents(split_shares("1"), 5) == [(0, 5), (5, 5), (5, 5)]
    for wrong in ("a,b", "0,0,0", "1,2,3,4", "-1,2"):
        with pytest.raises(DataError, match="are not shares of a corpus"):
            split_shares(wrong)


def test_a_bad_line_is_named_or_left_out(configure: Configure, flags: dict[str, Any]) -> None:
    path = Path(flags["data_path"][0])
    path.write_text('{"text": "the cat runs"}\n{"text"\n{"text": 3}\n{"text": "a dog"}\n', encoding="utf-8")
    config = configure(**(flags | {"seq_length": 2}), split="1")
    with pytest.raises(DataError, match="broken JSON") as caught:
        load_task(config).build_data()
    assert caught.value.where == f"{path}:2"
    for _ in range(2):  # the second time from the cache
        task = load_task(config.replace("command line", skip_bad_lines=True))
        task.build_data()
        assert [line.split(": ")[0] for line in task.skipped] == [f"{path}:2", f"{path}:3"]
    with pytest.raises(DataError, match="there is no column 'body'") as caught:
        load_task(config.replace("command line", text_column="body")).build_data()
    assert "columns: text" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ((), "no corpus is named"),
        (("{dir}/none.txt",), "{dir}/none.txt does not exist"),
        (("{dir}/corpus.json",), "{dir}/corpus.json does not exist"),
        (("{dir}/image.png",), "there is no text file in {dir}/image.png"),
        (("{dir}/empty",), "there is no text file in {dir}/empty"),
        (("0.3", "{dir}/a", "0.7", "{dir}/b"), "a weighted blend of corpora is not in this version"),
        (("{dir}/indexed",), "Megatron's indexed format is not in this version"),
        (("{dir}/indexed.bin",), "Megatron's indexed format is not in this version"),
        (("{dir}/blank.txt",), "the corpus is empty"),
    ],
)
def test_corpora_that_cannot_be_read(
    configure: Configure, flags: dict[str, Any], tmp_path: Path, paths: tuple[str, ...], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("\n \n", encoding="utf-8")
    for name in ("image.png", "indexed.bin", "indexed.idx"):
        (tmp_path / name).write_bytes(b"")
    config = configure(**(flags | {"data_path": tuple(p.format(dir=tmp_path) for p in paths)}))
    with pytest.raises(DataError) as caught:
        load_task(config).build_data()
    assert message.format(dir=tmp_path) in caught.value.message


def test_files_are_in_the_order_given(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c/d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = corpus_files([str(tmp_path / "b.txt"), str(tmp_path)])
    assert [p.relative_to(tmp_path).as_posix() for p in found] == ["b.txt", "a.txt", "c/d.jsonl"]


def test_a_corpus_that_is_too_small(configure: Configure, flags: dict[str, Any]) -> None:
    data = load_task(configure(**flags)).build_data()
    assert data.test is None  # one document in a thousand is none of these
    with pytest.raises(DataError, match="the test part has 0 documents") as caught:
        load_task(configure(**flags, split="969,30,1")).build_data()
    assert caught.value.where == "--split 969,30,1"
    with pytest.raises(DataError, match="the training part has 58 documents"):
        load_task(configure(**(flags | {"seq_length": 5000}))).build_data()


def test_what_cannot_be_pretrained(configure: Configure, flags: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="pretraining of encoder-decoder models is not in this version"):
        load_task(configure(**(flags | {"model_type": "t5"})))
    with pytest.raises(DataError, match="the tokenizer has no"):
        load_task(configure(**(flags | {"model_type": "bert"}))).build_data()
