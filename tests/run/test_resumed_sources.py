"""A run that stops and resumes reads the rows of a complete run, from every source and with any loader processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rapidformer_templates import Pretrainer, Trainer
from rapidformer_templates.commands.main import main
from rapidformer_templates.run.folder import read_metrics
from tests.support.selection import by_default
from tests.support.texts import WORDS, write_jsonl
from tests.support.worker_pool import run_in_workers

STEPS = (
    "--model-type gpt2 --num-layers 1 --hidden-size 16 --num-attention-heads 2 --dropout 0 --device cpu --lr 1e-3"
    " --train-iters 6 --save-interval 2 --keep-checkpoints 9 --micro-batch-size 2 --global-batch-size 4"
    " --log-interval 1 --no-export-model"
)
TUNING = "--task causal_lm --seq-length 32 --validation-fraction 0"
PRETRAINING = "--task pretraining --seq-length 16"
SOURCES = {
    "files": f"{TUNING} --data-dir {{0}}/shards",
    "grouped": f"{TUNING} --data-dir {{0}}/shards --group-by-length",
    "packed": f"{TUNING} --data-dir {{0}}/shards --pack-sequences",
    "mixture": f"{TUNING} --data-dir {{0}}/sets --data-name",
    "stream": f"{TUNING} --data-dir {{0}}/shards --streaming --shuffle-buffer 7",
    "packed stream": f"{TUNING} --data-dir {{0}}/shards --streaming --pack-sequences --shuffle-buffer 11",
    "corpus": f"{PRETRAINING} --data-path {{0}}/shards/train-00000-of-00003.jsonl",
    "streamed corpus": f"{PRETRAINING} --data-path {{0}}/shards/*.jsonl --streaming --shuffle-buffer 7",
    "indexed": f"{PRETRAINING} --data-path {{0}}/first_text_document",
    "blend": f"{PRETRAINING} --data-path 0.3 {{0}}/first_text_document 0.7 {{0}}/second_text_document",
}
LAST_WORD = {"mixture": ["0.7 a 0.3 b"]}
STREAMS = ("stream", "packed stream", "streamed corpus")
EVERY = [(source, loaders, world) for source in SOURCES for loaders in ("0", "1", "2") for world in (1, 2)]
EVERY += [(source, "2 spawned", 1) for source in SOURCES]
SHORT = [*((source, "1", 1) for source in STREAMS), *((source, "2", 1) for source in ("files", "packed", "blend"))]
SPAWNED_TOO = ("grouped", "packed stream", "blend")
"""Sources with spawned loaders that ``make test-longer`` runs. A spawned process imports everything again."""
SLOW = [(source, "2 spawned", 1) for source in SOURCES if source not in SPAWNED_TOO]
SLOW += [(source, loaders, 2) for source in SOURCES for loaders in ("0", "2") if source not in STREAMS]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, gpt_folder: Path) -> Path:
    """Create shards, sets and indexed corpora. A run reads more than each of them has, so each restarts."""
    folder, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (folder / "shards").mkdir()
    (folder / "sets").mkdir()
    for shard in range(3):
        rows = [{"text": " ".join(draw.choice(WORDS, draw.integers(2, 30)))} for _ in range(6)]
        write_jsonl(folder / "shards" / f"train-{shard:05d}-of-00003.jsonl", rows)
    for name, word in (("a", "river"), ("b", "tree")):
        write_jsonl(folder / "sets" / f"{name}.jsonl", [{"text": f"{word} {WORDS[i]} {i}"} for i in range(9)])
    for shard, name in enumerate(("first", "second")):
        source = folder / "shards" / f"train-{shard:05d}-of-00003.jsonl"
        words = ["data", "preprocess", "--input", str(source), "--output-prefix", str(folder / name)]
        assert main([*words, "--tokenizer-path", str(gpt_folder), "--append-eod"]) == 0
    return folder


def run(workers: Any, flags: list[str], folder: str, *more: str) -> None:
    template = Pretrainer if "pretraining" in flags else Trainer
    template([*flags, "--save", folder, *more]).fit()


@contextmanager
def _start_method(name: str) -> Iterator[None]:
    """Start processes by this method inside the context."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(name, force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


def lines_of(folder: Path) -> list[tuple[int, float, float]]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


@pytest.mark.distributed
@pytest.mark.parametrize(("source", "loaders", "world"), by_default(SHORT, EVERY, SLOW))
def test_a_resumed_run_has_the_lines_of_the_whole_one(
    source: str, loaders: str, world: int, data: Path, gpt_folder: Path, tmp_path: Path
) -> None:
    """Loader processes are forked, or spawned as on macOS, where they get everything by pickle."""
    count, _, method = loaders.partition(" ")
    flags = [*STEPS.split(), *SOURCES[source].format(data).split(), *LAST_WORD.get(source, [])]
    flags += ["--tokenizer-path", str(gpt_folder), "--dataloader-num-workers", count]

    def train(folder: Path, *more: str) -> None:
        if world == 1:
            run(None, flags, str(folder), *more)
        else:
            run_in_workers(world, run, flags, str(folder), *more)

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(whole)
    with _start_method("spawn" if method else "fork"):
        train(stopped, "--train-iters", "2", "--lr-decay-iters", "6")
        train(stopped, "--resume", "--train-iters", "4", "--lr-decay-iters", "6")
        train(stopped, "--resume", "--lr-decay-iters", "6")
    assert lines_of(stopped) == lines_of(whole)
    assert len({loss for _, loss, _ in lines_of(whole)}) == 6
