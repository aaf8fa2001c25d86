"""Raw text to indexed data sets: the bytes, bad text, parts and their order, and what is left after a stop."""

import gzip
import json
import multiprocessing
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from rapidformer_templates.data.indexed import writer as indexed_writer
from rapidformer_templates.data.indexed.dataset import IndexedDataset
from rapidformer_templates.data.indexed.writer import IndexedWriter
from rapidformer_templates.data.text import fast_tokenizers, preprocess
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.data.text.encoding import Encoder, EncodingJob, EncodingRecipe
from rapidformer_templates.data.text.fast_tokenizers import Reference
from rapidformer_templates.data.text.files import Span, TextUnit, documents, text_documents
from rapidformer_templates.data.text.preprocess import AHEAD, split_files
from rapidformer_templates.errors import DataError, WorkerFailed
from tests.support.indexed_sets import contents
from tests.support.messages import Says
from tests.support.programs import is_running, wait_until
from tests.support.selection import by_default
from tests.support.texts import TEXTS, Preprocess, files_of, write_jsonl


def plain(megatron: Any, tokenizer_folder: Path, texts: list[str], prefix: Path) -> list[bytes]:
    """Return the files of a script in Megatron's style: transformers' tokenizer and megatron-core's builder."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for text in texts:
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        builder.add_document(ids, [len(ids)])
    builder.finalize(f"{prefix}.idx")
    return [Path(f"{prefix}.{end}").read_bytes() for end in ("bin", "idx")]


@pytest.mark.slow
def test_bytes_are_those_of_a_plain_script_for_any_number_of_workers(
    corpus: Path, make: Preprocess, megatron: Any, gpt_folder: Path, tmp_path: Path
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


@pytest.mark.longer
def test_text_and_parquet_give_the_same_documents(tmp_path: Path, make: Preprocess, says: Says) -> None:
    texts = ["one tree\nsees a house\n", "a dog\n", "the river\n"]
    text = tmp_path / "a.txt"
    text.write_text("\n \n".join(texts), encoding="utf-8")
    pq.write_table(pa.table({"text": texts, "other": [1, 2, 3]}), tmp_path / "a.parquet")
    lines = write_jsonl(tmp_path / "a.jsonl", [{"text": one} for one in texts])
    expected = files_of(make(lines, prefix="jsonl").prefix["text"])
    for chunk_size in (1, 2):
        assert files_of(make(text, prefix=f"t{chunk_size}", chunk_size=chunk_size).prefix["text"]) == expected
    assert files_of(make(tmp_path / "a.parquet", prefix="parquet", chunk_size=2).prefix["text"]) == expected
    with says(DataError):
        make(tmp_path / "a.parquet", recipe=EncodingRecipe("", "uint16", None, ("body",)))


@pytest.mark.slow
def test_several_keys_in_one_pass(tmp_path: Path, recipe: EncodingRecipe, make: Preprocess) -> None:
    rows = [{"text": "a dog", "title": "dog"}, {"text": "a cat", "title": " "}, {"text": "a tree", "title": "tree"}]
    corpus = write_jsonl(tmp_path / "c.jsonl", rows)
    made = make(corpus, recipe=EncodingRecipe(recipe.tokenizer, "uint16", None, ("text", "title")))
    assert made.documents == {"text": 3, "title": 2}
    assert made.empty == {"text": 0, "title": 1}
    alone = make(corpus, recipe=EncodingRecipe(recipe.tokenizer, "uint16", None, ("title",)), prefix="alone")
    assert files_of(made.prefix["title"]) == files_of(alone.prefix["title"])


def test_sentences(tmp_path: Path, recipe: EncodingRecipe, make: Preprocess) -> None:
    rows = [{"text": "A dog. A cat! The tree?"}, {"text": ["he sees", "", "they run. we run"]}, {"text": "  "}]
    sentences = EncodingRecipe(recipe.tokenizer, "uint16", 0, sentences=True)
    made = make(write_jsonl(tmp_path / "c.jsonl", rows), recipe=sentences)
    assert made.prefix["text"].endswith("out_text_sentence")
    tokenizer = Reference(recipe.tokenizer)
    expected = [["A dog.", "A cat!", "The tree?"], ["he sees", "they run. we run"]]
    ids = [[tokenizer([sentence])[0].tolist() for sentence in document] for document in expected]
    for document in ids:
        document[-1].append(0)  # one end token per document
    assert contents(IndexedDataset(made.prefix["text"])) == ids
    assert made.empty == {"text": 1}


BAD = (
    b'{"text": "caf\xe9"}', b'{"text": ', b'["text"]', b'{"body": "x"}', b'{"text": 3}', b'{"text": "half \\ud83d"}',
    b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}",
)  # fmt: skip


def test_compressed_and_utf_16_files_give_the_same_sets(tmp_path: Path, make: Preprocess) -> None:
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS[:9])
    paragraphs = "\n\n".join(TEXTS[:9])
    forms = {
        "jsonl": (lines.encode(), lines.encode("utf-16"), gzip.compress(lines.encode())),
        "txt": (paragraphs.encode(), paragraphs.encode("utf-16"), gzip.compress(paragraphs.encode("utf-16"))),
    }
    for ending, (plain_bytes, utf_16, compressed) in forms.items():
        wanted = None
        for name, content in (("a", plain_bytes), ("b", utf_16), ("c", compressed)):
            file = tmp_path / f"{name}.{ending}{'.gz' if name == 'c' else ''}"
            file.write_bytes(content)
            made = make(file, prefix=f"{name}-{ending}", chunk_size=2, workers=0)
            found = files_of(made.prefix["text"])[:2]
            wanted = wanted or found
            assert (found, made.documents) == (wanted, {"text": 9})


@pytest.mark.longer
def test_bad_lines_are_errors_or_listed(tmp_path: Path, recipe: EncodingRecipe, make: Preprocess, says: Says) -> None:
    good = [json.dumps({"text": text}).encode() for text in TEXTS[:3]]
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b"\n".join([good[0], *BAD, *good[1:]]) + b"\n")
    made = make(file, recipe=EncodingRecipe(recipe.tokenizer, "uint16", 0, skip=True), chunk_size=2)
    listed = Path(f"{tmp_path}/out.skipped.txt").read_text().splitlines()
    says.text("\n".join(listed))
    assert (made.skipped, made.examples) == (8, listed[:5])
    clean = make(write_jsonl(tmp_path / "good.jsonl", [{"text": text} for text in TEXTS[:3]]), prefix="clean")
    assert files_of(made.prefix["text"]) == files_of(clean.prefix["text"])
    assert not (tmp_path / "clean.skipped.txt").exists()
    for line in BAD:
        file.write_bytes(good[0] + b"\n" + line)
        with says(DataError):
            Encoder(recipe)(EncodingJob(file, Span(0, file.stat().st_size, 1), 0, check=False))
    file.write_bytes(b"\n".join([*good * 14, b'{"text": null}', b""]))
    with says(DataError):
        make(file, prefix="never", chunk_size=3, workers=2)
    assert not list(tmp_path.glob("never*"))


@pytest.mark.longer
def test_a_line_of_50_mb(tmp_path: Path, make: Preprocess, recipe: EncodingRecipe) -> None:
    file = tmp_path / "long.jsonl"
    small = json.dumps({"text": "a dog"})
    file.write_text("\n".join([small, json.dumps({"text": "a cat", "meta": "x" * 50_000_000}), small]) + "\n")
    assert make(file).documents == {"text": 3}
    if fast_tokenizers.is_installed():
        text = "a small dog sees the river " * 2_000_000
        file.write_text("\n".join([small, json.dumps({"text": text}), small]) + "\n")
        made = make(file, prefix="fast", backend="gigatoken")
        once, twice = (len(Reference(recipe.tokenizer)(["a small dog sees the river " * n])[0]) for n in (1, 2))
        assert IndexedDataset(made.prefix["text"]).lengths[1] == once + 1_999_999 * (twice - once) + 1
    file.write_bytes(b'{"text": "' + b"x" * 50_000_000)
    with pytest.raises(DataError, match=r"broken JSON: Unterminated string starting at \(column 10\)"):
        make(file, prefix="cut")
    assert not list(tmp_path.glob("cut*"))


def test_parts_of_a_file_are_whole_lines(tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * n} for n in range(50)])
    jobs = list(split_files([lines], ["text"], 7))
    assert b"".join(job.part.read(lines).read() for job in jobs) == lines.read_bytes()
    assert [job.part.line for job in jobs] == list(range(1, 51, 7))
    assert sum(job.bytes for job in jobs) == lines.stat().st_size
    text = tmp_path / "a.txt"
    text.write_text("".join(f"first {n}\nsecond\n\n" for n in range(9)) + "last")
    jobs = list(split_files([text], ["text"], 2))
    parts = [job.part.read(text).read().decode() for job in jobs]
    assert "".join(parts) == text.read_text()
    assert [part.count("first") for part in parts] == [2, 2, 2, 2, 1]
    assert all(part.startswith("first") for part in parts)


@pytest.mark.parametrize("unit", ["paragraph", "line", "file"])
@pytest.mark.parametrize("chunk_size", [1, 2, 1000])
def test_a_document_is_what_the_unit_says(tmp_path: Path, unit: TextUnit, chunk_size: int) -> None:
    """The result does not depend on how the file is divided into jobs. It equals plain splitting of the text."""
    file = tmp_path / "a.txt"
    file.write_text("\n\nfirst\nsecond\n \n\nthird\n\nfourth\nfifth\n")
    text = file.read_text()
    expected = {
        "paragraph": ["first\nsecond\n", "third\n", "fourth\nfifth\n"],
        "line": [line for line in text.splitlines(keepends=True) if line.strip()],
        "file": [text.lstrip()],
    }[unit]
    jobs = list(split_files([file], ["text"], chunk_size, unit=unit))
    found = [
        (number, document)
        for job in jobs
        for number, document in text_documents(file, BadLines(), cast("Span", job.part), unit)
    ]
    assert [document for _, document in found] == expected
    lines = text.splitlines()
    assert all(lines[number - 1] == document.splitlines()[0] for number, document in found)
    assert list(documents(file, "text", BadLines(), unit)) == expected
    assert len(jobs) == 1 if unit == "file" else len(jobs) >= min(1, 3 // chunk_size)


def test_every_64th_part_is_checked(tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}] * 130)
    assert [n for n, job in enumerate(split_files([lines], ["text"], 1)) if job.check] == [0, 64, 128]
    assert all(job.check for job in split_files([lines], ["text"], 1, check_all=True))


def test_few_parts_are_under_way(corpus: Path, recipe: EncodingRecipe) -> None:
    taken = 0

    def jobs() -> Iterator[EncodingJob]:
        nonlocal taken
        for job in split_files([corpus], ["text"], 1):
            taken += 1
            yield job

    for written, _ in enumerate(preprocess.encoded(jobs(), recipe, 1)):
        assert taken - written <= AHEAD
    assert taken == 60


def test_a_full_disk(
    corpus: Path, make: Preprocess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    real = indexed_writer.write_at

    def full(descriptor: int, data: memoryview, place: int) -> None:
        if place > 200:
            raise OSError(28, "No space left on device")
        real(descriptor, data, place)

    monkeypatch.setattr(indexed_writer, "write_at", full)
    with says(DataError):
        make(corpus, chunk_size=3)
    assert list(tmp_path.iterdir()) == [corpus]


def test_a_worker_that_is_killed(
    corpus: Path, make: Preprocess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    real = IndexedWriter.add

    def add(self: IndexedWriter, *arguments: Any) -> None:
        for worker in multiprocessing.active_children():
            worker.kill()
        real(self, *arguments)

    monkeypatch.setattr(IndexedWriter, "add", add)
    with says(WorkerFailed):
        make(corpus, chunk_size=1)
    assert list(tmp_path.iterdir()) == [corpus]


@pytest.mark.slow
def test_of_several_sets_all_or_none_are_there(
    tmp_path: Path, recipe: EncodingRecipe, make: Preprocess, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = IndexedWriter._write_index

    def full(self: IndexedWriter, path: Path) -> None:
        if "_text_" in path.name:
            raise OSError(28, "No space left on device")
        real(self, path)

    monkeypatch.setattr(IndexedWriter, "_write_index", full)
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"text": "a dog", "title": "dog"}])
    with pytest.raises(DataError, match="the disk is full"):
        make(corpus, recipe=EncodingRecipe(recipe.tokenizer, "uint16", None, ("text", "title")))
    assert list(tmp_path.iterdir()) == [corpus]


@pytest.mark.slow
def test_workers_are_not_waited_for_after_an_error(
    recipe: EncodingRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def jobs() -> Any:
        yield f"import time; open({str(tmp_path / 'busy')!r}, 'w'); time.sleep(50)"
        wait_until((tmp_path / "busy").exists, "the worker does not start")
        raise RuntimeError

    monkeypatch.setattr(preprocess, "work", exec)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        list(preprocess.encoded(jobs(), recipe, 1))
    assert time.monotonic() - began < 40


SLOW = """
import multiprocessing, resource, sys, time
from rapidformer_templates.commands.main import main
from rapidformer_templates.data.indexed.writer import IndexedWriter

def add(self, *arguments, real=IndexedWriter.add):
    real(self, *arguments)
    if self.documents > 10:
        print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
        for _ in range(600):
            time.sleep(0.1)  # a signal that another thread receives does not end a sleep

if sys.argv[1] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
else:
    IndexedWriter.add = add
sys.exit(main(["data", *sys.argv[2:]]))
"""
"""A script whose preprocessing prints its workers and waits after a first part, or may write at most 300 bytes."""


def words_for(corpus: Path, gpt_folder: Path, prefix: Path) -> list[str]:
    return ["preprocess", "--input", str(corpus), "--output-prefix", str(prefix), "--append-eod",
            "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(gpt_folder / "vocab.json"),
            "--merge-file", str(gpt_folder / "merges.txt"),
             "--workers", "2", "--chunk-size", "3", "--tokenizer-backend", "transformers"]  # fmt: skip


SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]


@pytest.mark.slow
@pytest.mark.parametrize("number", by_default([signal.SIGKILL], SIGNALS), ids=lambda number: number.name)
def test_interrupted_and_run_again(
    corpus: Path, recipe: EncodingRecipe, make: Preprocess, gpt_folder: Path, tmp_path: Path, number: signal.Signals
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
        assert errors.startswith("interrupted; nothing was written\n")
        assert not list(tmp_path.glob("out*"))
    wait_until(lambda: not any(map(is_running, workers)), "the workers go on")
    made = make(corpus)
    assert files_of(made.prefix["text"]) == files_of(make(corpus, prefix="whole").prefix["text"])
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.longer
def test_a_limit_of_the_system_on_files(corpus: Path, gpt_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLOW, "limit", *words_for(corpus, gpt_folder, tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot write: File too large\n")
    assert list(tmp_path.iterdir()) == [corpus]
