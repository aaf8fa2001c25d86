"""From text to a trained model with commands only: tokenizer, preprocessing, inspection and training."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates.commands import main as cli
from rapidformer_templates.data.indexed.dataset import IndexedDataset
from rapidformer_templates.data.indexed.tools import split_sequences, split_shares, unigram_loss

SPLIT = "969,30,1"


def _command(*words: str) -> None:
    status = cli.main(list(words))
    assert status == 0, words


@pytest.mark.longer
@pytest.mark.slow
def test_a_gpt_learns_more_than_how_often_tokens_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, tokenizer, prefix, run = (str(tmp_path / name) for name in ("corpus.jsonl", "tokenizer", "python", "run"))
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    lines = [json.dumps({"text": file.read_text(encoding="utf-8", errors="replace")}) for file in files[:150]]
    Path(corpus).write_text("\n".join(lines), encoding="utf-8")
    _command("data", "tokenizer", "--input", corpus, "--type", "bpe", "--vocab-size", "1024", "--output", tokenizer)
    folder = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-path", tokenizer]
    _command("data", "preprocess", "--input", corpus, "--output-prefix", prefix, *folder, "--append-eod")
    data = f"{prefix}_text_document"
    capsys.readouterr()
    _command("data", "inspect", data, "--split", SPLIT, "--json")
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)["sets"][0]
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 16"
    schedule = "--train-iters 240 --lr 5e-3 --lr-warmup-iters 10 --log-interval 80 --eval-interval 80"
    _command(
        "--task", "pretraining", "--model-type", "gpt2", "--data-path", data, "--split", SPLIT, "--save", run,
        "--data-cache-dir", str(tmp_path / "cache"), "--device", "cpu", *folder, *sizes.split(), *schedule.split(),
    )  # fmt: skip
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["eval_loss"] for line in metrics if "eval_loss" in line]
    dataset = IndexedDataset(data)
    train, valid, _ = split_sequences(split_shares(SPLIT), len(dataset))
    assert printed["unigram_loss"] == unigram_loss(dataset, train, valid)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < printed["unigram_loss"]
