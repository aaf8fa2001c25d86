"""Preprocessing that is stopped by a full disk, a signal, or a worker that exits. No incomplete output is left."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates.data.indexed import writer as indexed_writer
from rapidformer_templates.data.indexed.writer import IndexedWriter
from rapidformer_templates.data.text import preprocess
from rapidformer_templates.data.text.encoding import EncodingRecipe
from rapidformer_templates.data.text.preprocess import PreprocessResult
from rapidformer_templates.errors import DataError, WorkerFailed
from tests.support.texts import files_of, write_jsonl


def test_a_full_disk(
    corpus: Path, make: Callable[..., PreprocessResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    corpus: Path, make: Callable[..., PreprocessResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = IndexedWriter.add

    def add(self: IndexedWriter, *arguments: Any) -> None:
        for worker in multiprocessing.active_children():
            worker.kill()
        real(self, *arguments)

    monkeypatch.setattr(IndexedWriter, "add", add)
    with pytest.raises(WorkerFailed) as raised:
        make(corpus, chunk_size=1)
    assert raised.value.message == "a worker process was killed; nothing was written"
    assert list(tmp_path.iterdir()) == [corpus]


@pytest.mark.slow
def test_of_several_sets_all_or_none_are_there(
    tmp_path: Path, recipe: EncodingRecipe, make: Callable[..., PreprocessResult], monkeypatch: pytest.MonkeyPatch
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
def test_workers_are_not_waited_for_after_an_error(recipe: EncodingRecipe) -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        _fail_while_a_worker_is_busy(recipe)
    assert time.monotonic() - began < 40


def _fail_while_a_worker_is_busy(recipe: EncodingRecipe) -> None:
    with preprocess._pool(recipe, 1) as pool:
        _wait_until(pool.submit(time.sleep, 50).running)
        raise RuntimeError


SLOW = """
import multiprocessing, resource, sys, time
from rapidformer_templates.commands import data as cli
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
sys.exit(cli.main(sys.argv[2:]))
"""
"""A script whose preprocessing prints its workers and waits after a first part, or may write at most 300 bytes."""


def words_for(corpus: Path, gpt_folder: Path, prefix: Path) -> list[str]:
    return ["preprocess", "--input", str(corpus), "--output-prefix", str(prefix), "--append-eod",
            "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(gpt_folder / "vocab.json"),
            "--merge-file", str(gpt_folder / "merges.txt"),
             "--workers", "2", "--chunk-size", "3", "--tokenizer-backend", "transformers"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_interrupted_and_run_again(
    corpus: Path,
    recipe: EncodingRecipe,
    make: Callable[..., PreprocessResult],
    gpt_folder: Path,
    tmp_path: Path,
    number: signal.Signals,
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


@pytest.mark.slow
def test_a_limit_of_the_system_on_files(corpus: Path, gpt_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLOW, "limit", *words_for(corpus, gpt_folder, tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot write: File too large\n")
    assert list(tmp_path.iterdir()) == [corpus]
