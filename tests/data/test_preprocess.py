"""Raw text to indexed data sets: the bytes, bad text, and every way to be stopped."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from rapidformer_templates.data import fast_tokenizers, indexed_writer, preprocess
from rapidformer_templates.data.encoding import Encoded, Encoder, Job, Recipe
from rapidformer_templates.data.fast_tokenizers import (
    PIECE,
    Differs,
    Gigatoken,
    Pieces,
    Whole,
    compare,
    hard_texts,
    proven,
)
from rapidformer_templates.data.files import Span
from rapidformer_templates.data.indexed import IndexedDataset
from rapidformer_templates.data.indexed_writer import IndexedWriter
from rapidformer_templates.data.preprocess import AHEAD, Made, cut
from rapidformer_templates.errors import DataError, WorkerFailed
from tests.data.conftest import WORDS, write_jsonl
from tests.data.test_indexed import contents, megatron  # noqa: F401

TEXTS = [f"{' '.join(WORDS[i % 40 : i % 40 + i % 9 + 1])}\n\t café №{i} 日本 ’s" for i in range(60)]
needs_gigatoken = pytest.mark.skipif(not fast_tokenizers.is_installed(), reason="gigatoken is not installed")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "corpus.jsonl", [{"text": text, "id": i} for i, text in enumerate(TEXTS)])


@pytest.fixture
def recipe(gpt_folder: Path) -> Recipe:
    return Recipe((gpt_folder / "tokenizer.json").read_text(encoding="utf-8"), "uint16", end=0)


@pytest.fixture
def make(tmp_path: Path, recipe: Recipe) -> Callable[..., Made]:
    """Preprocess into ``tmp_path/out_…``, one worker unless told."""

    def run(*files: Path, recipe: Recipe = recipe, prefix: str = "out", **options: Any) -> Made:
        options = {"workers": 1, "backend": "transformers", **options}
        return preprocess.preprocess(files, str(tmp_path / prefix), recipe, **options)

    return run


def files_of(prefix: str | Path) -> list[bytes]:
    return [Path(f"{prefix}.{end}").read_bytes() for end in ("bin", "idx", "sums.json")]


def plain(megatron: Any, tokenizer_folder: Path, texts: list[str], prefix: Path) -> list[bytes]:  # noqa: F811
    """What a script of Megatron's kind makes of the texts: transformers' tokenizer and megatron-core's builder."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for text in texts:
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        builder.add_document(ids, [len(ids)])
    builder.finalize(f"{prefix}.idx")
    return [Path(f"{prefix}.{end}").read_bytes() for end in ("bin", "idx")]


def test_bytes_are_those_of_a_plain_script_for_any_number_of_workers(
    corpus: Path, make: Callable[..., Made], megatron: Any, gpt_folder: Path, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    expected = plain(megatron, gpt_folder, TEXTS, tmp_path / "plain")
    ways = [{"workers": 1}, {"workers": 2, "chunk_size": 1}, {"workers": 3, "chunk_size": 7}]
    if fast_tokenizers.is_installed():
        ways.append({"workers": 2, "chunk_size": 4, "backend": "gigatoken"})
    for number, way in enumerate(ways):
        made = make(corpus, prefix=f"way{number}", **way)
        assert files_of(made.prefix["text"])[:2] == expected, way
        assert made.documents == {"text": 60}
        assert made.tokens == {"text": len(expected[0]) // 2}
        assert files_of(made.prefix["text"])[2] == files_of(tmp_path / "way0_text_document")[2]


def test_text_and_parquet_give_the_same_documents(tmp_path: Path, make: Callable[..., Made]) -> None:
    texts = ["one tree\nsees a house\n", "a dog\n", "the river\n"]
    text = tmp_path / "a.txt"
    text.write_text("\n \n".join(texts), encoding="utf-8")
    pq.write_table(pa.table({"text": texts, "other": [1, 2, 3]}), tmp_path / "a.parquet")
    lines = write_jsonl(tmp_path / "a.jsonl", [{"text": one} for one in texts])
    expected = files_of(make(lines, prefix="jsonl").prefix["text"])
    for chunk_size in (1, 2):
        assert files_of(make(text, prefix=f"t{chunk_size}", chunk_size=chunk_size).prefix["text"]) == expected
    assert files_of(make(tmp_path / "a.parquet", prefix="parquet", chunk_size=2).prefix["text"]) == expected
    with pytest.raises(DataError, match="there is no column 'body'") as raised:
        make(tmp_path / "a.parquet", recipe=Recipe("", "uint16", None, ("body",)))
    assert raised.value.hint == "the columns are text, other"


def test_several_keys_in_one_pass(tmp_path: Path, recipe: Recipe, make: Callable[..., Made]) -> None:
    rows = [{"text": "a dog", "title": "dog"}, {"text": "a cat", "title": " "}, {"text": "a tree", "title": "tree"}]
    corpus = write_jsonl(tmp_path / "c.jsonl", rows)
    made = make(corpus, recipe=Recipe(recipe.tokenizer, "uint16", None, ("text", "title")))
    assert made.documents == {"text": 3, "title": 2}
    assert made.empty == {"text": 0, "title": 1}
    alone = make(corpus, recipe=Recipe(recipe.tokenizer, "uint16", None, ("title",)), prefix="alone")
    assert files_of(made.prefix["title"]) == files_of(alone.prefix["title"])


def test_sentences(tmp_path: Path, recipe: Recipe, make: Callable[..., Made]) -> None:
    rows = [{"text": "A dog. A cat! The tree?"}, {"text": ["he sees", "", "they run. we run"]}, {"text": "  "}]
    sentences = Recipe(recipe.tokenizer, "uint16", 0, sentences=True)
    made = make(write_jsonl(tmp_path / "c.jsonl", rows), recipe=sentences)
    assert made.prefix["text"].endswith("out_text_sentence")
    tokenizer = Whole(recipe.tokenizer)
    expected = [["A dog.", "A cat!", "The tree?"], ["he sees", "they run. we run"]]
    ids = [[tokenizer([sentence])[0].tolist() for sentence in document] for document in expected]
    for document in ids:
        document[-1].append(0)  # one end token a document
    assert contents(IndexedDataset(made.prefix["text"])) == ids
    assert made.empty == {"text": 1}


def test_what_is_empty_is_left_out_and_counted(tmp_path: Path, make: Callable[..., Made]) -> None:
    texts = ["", "a dog", "  \n", "a cat", ""]
    made = make(write_jsonl(tmp_path / "c.jsonl", [{"text": text} for text in texts]))
    assert (made.documents, made.empty) == ({"text": 2}, {"text": 3})
    with pytest.raises(DataError) as raised:
        make(write_jsonl(tmp_path / "e.jsonl", [{"text": ""}]), prefix="e")
    assert raised.value.message == "there is no document with text for the key 'text'"
    assert raised.value.hint == "check the files; 1 were empty, 0 lines were bad"
    assert not list(tmp_path.glob("e_*"))


BAD = {
    b'{"text": "caf\xe9"}': "the text is not UTF-8",
    b'{"text": ': "broken JSON: Expecting value (column 9)",
    b'["text"]': "a line must hold a JSON object, not list",
    b'{"body": "x"}': "there is no column 'text'",
    b'{"text": 3}': "the column 'text' holds int, not text",
    b'{"text": "half \\ud83d"}': "the column 'text' holds half of a surrogate pair, which is no character",
    b"[" * 100_000: "broken JSON: a number that is too long, or too many brackets in one another",
    b'{"n": ' + b"9" * 5000 + b"}": "broken JSON: a number that is too long, or too many brackets in one another",
}


def test_bad_lines_are_errors_or_listed(tmp_path: Path, recipe: Recipe, make: Callable[..., Made]) -> None:
    good = [json.dumps({"text": text}).encode() for text in TEXTS[:3]]
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b"\n".join([good[0], *BAD, *good[1:]]) + b"\n")
    skip = Recipe(recipe.tokenizer, "uint16", 0, skip=True)
    made = make(file, recipe=skip, chunk_size=2)
    reasons = [f"{file}:{line}: {reason}" for line, reason in enumerate(BAD.values(), start=2)]
    listed = Path(f"{tmp_path}/out.skipped.txt").read_text().splitlines()
    assert listed == reasons
    assert (made.skipped, made.examples) == (8, listed[:5])
    clean = make(write_jsonl(tmp_path / "good.jsonl", [{"text": text} for text in TEXTS[:3]]), prefix="clean")
    assert files_of(made.prefix["text"]) == files_of(clean.prefix["text"])
    assert not (tmp_path / "clean.skipped.txt").exists()
    for number, line in enumerate(BAD):
        file.write_bytes(good[0] + b"\n" + line)
        with pytest.raises(DataError) as raised:
            Encoder(recipe)(Job(file, Span(0, file.stat().st_size, 1), 0, check=False))
        assert raised.value.where == f"{file}:2"
        assert listed[number].endswith(raised.value.message)
    with pytest.raises(DataError, match="the column 'text' holds") as raised:
        make(corpus_with(tmp_path, 40, b'{"text": null}'), prefix="never", chunk_size=3, workers=2)
    assert raised.value.where == f"{tmp_path / 'null.jsonl'}:41"
    assert not list(tmp_path.glob("never*"))


def corpus_with(folder: Path, good: int, bad: bytes) -> Path:
    path = write_jsonl(folder / "null.jsonl", [{"text": text} for text in TEXTS[:good]])
    path.write_bytes(path.read_bytes() + bad + b"\n")
    return path


def test_a_line_of_50_mb(tmp_path: Path, make: Callable[..., Made], recipe: Recipe) -> None:
    file = tmp_path / "long.jsonl"
    small = json.dumps({"text": "a dog"})
    file.write_text("\n".join([small, json.dumps({"text": "a cat", "meta": "x" * 50_000_000}), small]) + "\n")
    assert make(file).documents == {"text": 3}
    if fast_tokenizers.is_installed():
        text = "a small dog sees the river " * 2_000_000
        file.write_text("\n".join([small, json.dumps({"text": text}), small]) + "\n")
        made = make(file, prefix="fast", backend="gigatoken")
        once, twice = (len(Whole(recipe.tokenizer)(["a small dog sees the river " * n])[0]) for n in (1, 2))
        assert IndexedDataset(made.prefix["text"]).lengths[1] == once + 1_999_999 * (twice - once) + 1
    file.write_bytes(b'{"text": "' + b"x" * 50_000_000)
    with pytest.raises(DataError, match=r"broken JSON: Unterminated string starting at \(column 10\)"):
        make(file, prefix="cut")
    assert not list(tmp_path.glob("cut*"))


def test_parts_of_a_file_are_whole_lines(tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * n} for n in range(50)])
    jobs = list(cut([lines], ["text"], 7))
    assert b"".join(job.part.read(lines).read() for job in jobs) == lines.read_bytes()
    assert [job.part.line for job in jobs] == list(range(1, 51, 7))
    assert sum(job.bytes for job in jobs) == lines.stat().st_size
    text = tmp_path / "a.txt"
    text.write_text("".join(f"first {n}\nsecond\n\n" for n in range(9)) + "last")
    jobs = list(cut([text], ["text"], 2))
    parts = [job.part.read(text).read().decode() for job in jobs]
    assert "".join(parts) == text.read_text()
    assert [part.count("first") for part in parts] == [2, 2, 2, 2, 1]
    assert all(part.startswith("first") for part in parts)


def test_every_64th_part_is_checked(tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}] * 130)
    assert [n for n, job in enumerate(cut([lines], ["text"], 1)) if job.check] == [0, 64, 128]
    assert all(job.check for job in cut([lines], ["text"], 1, check_all=True))


def test_few_parts_are_under_way(corpus: Path, recipe: Recipe) -> None:
    taken = 0

    def jobs() -> Iterator[Job]:
        nonlocal taken
        for job in cut([corpus], ["text"], 1):
            taken += 1
            yield job

    for written, _ in enumerate(preprocess.encoded(jobs(), recipe, 1)):
        assert taken - written <= AHEAD
    assert taken == 60


def _hands_out_wrong_ids(number: int) -> Callable[..., Any]:
    def wrong(self: Gigatoken, texts: Any) -> Any:
        ids, lengths = Whole.__call__(self, texts)  # type: ignore[arg-type]
        if f"№{number}" in "".join(texts):
            ids = ids.copy()
            ids[-1] += 1
        return ids, lengths

    return wrong


@needs_gigatoken
def test_a_fast_tokenizer_that_differs_is_not_used(corpus: Path, make: Callable[..., Made], recipe: Recipe) -> None:
    word_piece = json.dumps(json.loads(recipe.tokenizer) | {"model": {
        "type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
        "vocab": {"a": 0, "dog": 1, "cat": 2}}, "added_tokens": []})  # fmt: skip
    made = make(corpus, recipe=Recipe(word_piece, "uint16", None), backend="auto")
    assert made.way == "pieces"
    assert made.compared == sum(made.tokens.values())  # of a single part, which is checked
    assert made.notes[0].startswith("gigatoken is not used: it cannot read this tokenizer")
    reference = make(corpus, recipe=Recipe(word_piece, "uint16", None), prefix="reference")
    assert files_of(made.prefix["text"]) == files_of(reference.prefix["text"])


def test_a_difference_is_found(recipe: Recipe, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Whole(recipe.tokenizer)
    monkeypatch.setattr(Gigatoken, "__init__", Whole.__init__)
    monkeypatch.setattr(Gigatoken, "ids", Whole.ids, raising=False)
    monkeypatch.setattr(Gigatoken, "__call__", _hands_out_wrong_ids(50))
    encoder = Encoder(Recipe(recipe.tokenizer, "uint16", 0, way="gigatoken"))
    first, *_, last = cut([corpus], ["text"], 20, check_all=True)
    assert encoder(first).compared == sum(reference(TEXTS[:20])[1])
    with pytest.raises(Differs, match=r"it gives other tokens in .*corpus.jsonl, text 20: '"):
        encoder(last)
    with pytest.raises(Differs, match="text 2: 'b'"):
        compare(
            lambda texts: (np.arange(3), np.array([1, 2])), lambda texts: (np.arange(3), np.array([1, 1])), "ab", ""
        )


def test_a_difference_in_the_middle_starts_again(
    corpus: Path, make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, passes = preprocess.encoded, []

    def encoded(jobs: Iterator[Job], recipe: Recipe, workers: int) -> Iterator[tuple[Job, Encoded]]:
        passes.append(recipe.way)
        for number, found in enumerate(real(jobs, Recipe(recipe.tokenizer, "uint16", 0), workers)):
            if recipe.way != "whole" and number == 3:
                raise Differs("it gives other tokens in corpus.jsonl, text 1: 'x'")
            yield found

    monkeypatch.setattr(preprocess, "encoded", encoded)
    monkeypatch.setattr(fast_tokenizers, "is_installed", lambda: True)
    made = make(corpus, backend="auto", chunk_size=5)
    assert passes == ["gigatoken", "pieces", "whole"]
    assert made.notes == [
        "gigatoken is not used: it gives other tokens in corpus.jsonl, text 1: 'x'",
        "transformers' tokenizer with a memory of pieces is not used: it gives other tokens in corpus.jsonl, "
        "text 1: 'x'",
    ]
    assert made.way == "whole"
    assert made.documents == {"text": 60}


@needs_gigatoken
def test_hard_texts_are_hard_and_the_same(recipe: Recipe) -> None:
    fast, reference = proven("gigatoken", recipe.tokenizer)
    texts = hard_texts(["<|endoftext|>"])
    assert texts == hard_texts(["<|endoftext|>"])
    assert sum("<|endoftext|>" in text for text in texts) > 100
    assert {"\u3000", "日", "'", "\r", "\U0010ffff"} <= set("".join(texts))
    assert np.array_equal(fast(TEXTS)[0], reference(TEXTS)[0])


@pytest.mark.parametrize("folder", ["gpt_folder", "bert_folder"])
def test_pieces_are_the_text_and_give_the_same_tokens(folder: str, request: pytest.FixtureRequest) -> None:
    description = (request.getfixturevalue(folder) / "tokenizer.json").read_text(encoding="utf-8")
    texts = [*TEXTS, *hard_texts(["<|endoftext|>", "[SEP]"], 5000), "", " ", "\n", "x", "a" * 1000]
    assert all("".join(PIECE.findall(text)) == text for text in texts)
    assert PIECE.findall("don't (a,b)\n\tself.x_1 é") == ["don't", " (a", ",b", ")", "\n\tself", ".x", "_1", " é", ""]
    pieces, whole = proven("pieces", description)
    assert isinstance(pieces, Pieces)
    pieces.ROOM = 10_000  # type: ignore[misc]
    for start in range(0, len(texts), 100):
        part = texts[start : start + 100]
        assert compare(pieces, whole, part, "") == sum(whole(part)[1])
        assert len(pieces.known) < 1500


def test_pieces_are_not_used_where_words_run_together(gpt_folder: Path) -> None:
    description = json.loads((gpt_folder / "tokenizer.json").read_text(encoding="utf-8"))
    prepends = description | {"normalizer": {"type": "Prepend", "prepend": "a"}}
    with pytest.raises(Differs, match="it gives other tokens in made-up hard texts"):
        proven("pieces", json.dumps(prepends))
    description["pre_tokenizer"]["use_regex"] = False  # tokens may now reach over words, as " the" and "a a"
    model = description["model"]
    for merge in (["Ġ", "q"], ["q", "Ġq"]):
        model["vocab"].setdefault("".join(merge), len(model["vocab"]))
        model["merges"].append(merge)
    assert Pieces(Whole(json.dumps(description))).doubtful == ["q q"]
    with pytest.raises(Differs, match="made-up hard texts, text 3001: 'q q'"):
        proven("pieces", json.dumps(description))


def test_tokens_that_never_come_of_a_text_do_not_matter(bert_folder: Path) -> None:
    description = json.loads((bert_folder / "tokenizer.json").read_text(encoding="utf-8"))
    description["model"]["vocab"]["[unused0]"] = len(description["model"]["vocab"])
    pieces, _ = proven("pieces", json.dumps(description))
    assert isinstance(pieces, Pieces)
    assert pieces.doubtful == ["[unused0]"]


def test_the_fast_tokenizer_asked_for_is_absent(
    corpus: Path, make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="gigatoken is not installed"):
        make(corpus, backend="gigatoken")
    monkeypatch.undo()


def test_truncation_in_the_description_is_not_used(recipe: Recipe) -> None:
    cut_short = json.loads(recipe.tokenizer) | {
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    }
    assert Whole(json.dumps(cut_short))(TEXTS)[1].tolist() == Whole(recipe.tokenizer)(TEXTS)[1].tolist()


def test_a_full_disk(corpus: Path, make: Callable[..., Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = indexed_writer.write_at

    def full(descriptor: int, data: memoryview, place: int) -> None:
        if place > 200:
            raise OSError(28, "No space left on device")
        real(descriptor, data, place)

    monkeypatch.setattr(indexed_writer, "write_at", full)
    with pytest.raises(DataError) as raised:
        make(corpus, chunk_size=3)
    assert raised.value.message == "the disk is full"
    assert raised.value.hint.endswith("nothing was left behind")
    assert list(tmp_path.iterdir()) == [corpus]


def test_a_worker_that_is_killed(
    corpus: Path, make: Callable[..., Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = IndexedWriter.add

    def add(self: IndexedWriter, *arguments: Any) -> None:
        for worker in multiprocessing.active_children():
            os.kill(worker.pid or 0, signal.SIGKILL)
        real(self, *arguments)

    monkeypatch.setattr(IndexedWriter, "add", add)
    with pytest.raises(WorkerFailed) as raised:
        make(corpus, chunk_size=1)
    assert raised.value.message == "a worker process was killed; nothing was written"
    assert list(tmp_path.iterdir()) == [corpus]


def test_of_several_sets_all_or_none_are_there(
    tmp_path: Path, recipe: Recipe, make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = IndexedWriter._write_index

    def full(self: IndexedWriter, path: Path) -> None:
        if "_text_" in path.name:
            raise OSError(28, "No space left on device")
        real(self, path)

    monkeypatch.setattr(IndexedWriter, "_write_index", full)
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"text": "a dog", "title": "dog"}])
    with pytest.raises(DataError, match="the disk is full"):
        make(corpus, recipe=Recipe(recipe.tokenizer, "uint16", None, ("text", "title")))
    assert list(tmp_path.iterdir()) == [corpus]


def test_workers_are_not_waited_for_after_an_error(recipe: Recipe) -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        _fail_while_a_worker_is_busy(recipe)
    assert time.monotonic() - began < 40


def _fail_while_a_worker_is_busy(recipe: Recipe) -> None:
    with preprocess._pool(recipe, 1) as pool:
        _wait_until(pool.submit(time.sleep, 50).running)
        raise RuntimeError


SLOW = """
import multiprocessing, resource, sys, time
from rapidformer_templates.data import cli
from rapidformer_templates.data.indexed_writer import IndexedWriter

def add(self, *arguments, real=IndexedWriter.add):
    real(self, *arguments)
    if self.documents > 10:
        print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
        time.sleep(60)

if sys.argv[1] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
else:
    IndexedWriter.add = add
sys.exit(cli.main(sys.argv[2:]))
"""
"""Preprocessing that names its workers and waits after a first part, or that may write 300 bytes at most."""


def words_for(corpus: Path, gpt_folder: Path, prefix: Path) -> list[str]:
    return ["preprocess", "--input", str(corpus), "--output-prefix", str(prefix), "--append-eod",
            "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(gpt_folder / "vocab.json"),
            "--merge-file", str(gpt_folder / "merges.txt"),
             "--workers", "2", "--chunk-size", "3", "--tokenizer-backend", "transformers"]  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_interrupted_and_run_again(
    corpus: Path, recipe: Recipe, make: Callable[..., Made], gpt_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    words = words_for(corpus, gpt_folder, tmp_path / "out")
    command = [sys.executable, "-c", SLOW, "wait", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert len(workers) == 2
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert not list(tmp_path.glob("out*.bin")) + list(tmp_path.glob("out*.idx")) + list(tmp_path.glob("out*.json"))
    if number == signal.SIGKILL:
        assert [path.name for path in tmp_path.glob("out*")] == ["out_text_document.bin.tmp"]
    else:
        assert process.returncode == 75
        assert errors.startswith("error: interrupted; nothing was written\n")
        assert not list(tmp_path.glob("out*"))
    _wait_until(lambda: not any(_runs(pid) for pid in workers))
    made = make(corpus)
    assert files_of(made.prefix["text"]) == files_of(make(corpus, prefix="whole").prefix["text"])
    assert not list(tmp_path.glob("*.tmp"))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_limit_of_the_system_on_files(corpus: Path, gpt_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLOW, "limit", *words_for(corpus, gpt_folder, tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot write: File too large\n")
    assert list(tmp_path.iterdir()) == [corpus]
