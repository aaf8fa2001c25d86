"""Every pretraining objective in the black box, and flags that are not compatible with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForPreTraining, AutoTokenizer, PreTrainedTokenizerFast

from rapidformer_templates import Pretrainer
from rapidformer_templates.data.collate import IGNORED
from rapidformer_templates.data.indexed.writer import IndexedWriter
from rapidformer_templates.data.tasks import load_task
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.run.folder import read_metrics
from tests.support.messages import Says
from tests.support.texts import TINY, WORDS, Configure


@pytest.fixture
def t5_folder(tmp_path: Path) -> Path:
    tokens = ["<pad>", "</s>", "<unk>", *dict.fromkeys(WORDS)]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=[f"<extra_id_{i}>" for i in range(20)],
    )  # fmt: skip
    fast.save_pretrained(tmp_path / "t5")
    return tmp_path / "t5"


def write_sentences(prefix: Path, tokenizer: Any, seed: int = 0) -> str:
    """Write sixty documents. WordPiece has to split their words: each consists of two."""
    glue = "" if tokenizer.cls_token else " "
    generator = np.random.default_rng(seed)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(60):
            lengths = generator.integers(2, 9, size=generator.integers(1, 8))
            pairs = [generator.choice(WORDS, (length, 2)).tolist() for length in lengths]
            texts = [" ".join(glue.join(pair) for pair in text) for text in pairs]
            rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
            writer.add(np.concatenate(rows), np.array([len(row) for row in rows]), np.array([len(rows)]))
    return str(prefix)


def flags_of(folder: Path, tokenizer: Path, *, blend: bool = False, **more: Any) -> dict[str, Any]:
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    path: tuple[str, ...] = (write_sentences(folder / "a", loaded),)
    if blend:
        path = ("0.25", *path, "0.75", write_sentences(folder / "b", loaded, seed=1))
    return {
        "task": "pretraining", "tokenizer_path": str(tokenizer), "seq_length": 32, "data_path": path, "split": "8,2",
        "data_cache_dir": str(folder / "cache"), **TINY, **more,
    }  # fmt: skip


def fit(flags: dict[str, Any], folder: Path, **more: Any) -> list[Any]:
    """Return the metrics lines of a short run."""
    run = {"train_iters": 4, "lr": 1e-3, "log_interval": 1, "global_batch_size": 8, "micro_batch_size": 8}
    Pretrainer([], **(flags | run | {"save": str(folder), "device": "cpu"} | more)).fit()
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.parametrize(("model_type", "blend"), [("bert", False), ("bert", True), ("albert", False)])
def test_pairs_through_the_black_box(model_type: str, blend: bool, bert_folder: Path, tmp_path: Path) -> None:
    flags = flags_of(tmp_path, bert_folder, model_type=model_type, sentence_pairs=True, blend=blend)
    lines = fit(flags, tmp_path / "whole")
    # The loss does not depend on how a batch is divided, although it is a sum of two losses.
    cut = fit(flags, tmp_path / "cut", micro_batch_size=2)
    for whole, parts in zip(lines, cut, strict=True):
        for name in {"loss", "grad_norm", "eval_loss"} & whole.keys():
            assert whole[name] == pytest.approx(parts[name], rel=2e-5)
    assert np.isfinite([line["loss"] for line in lines if "loss" in line]).all()
    head = AutoModelForPreTraining.from_pretrained(tmp_path / "whole" / "export")
    assert type(head).__name__.endswith("ForPreTraining")


def test_spans_through_the_black_box(t5_folder: Path, tmp_path: Path) -> None:
    flags = flags_of(tmp_path, t5_folder, model_type="t5", mask_prob=0.25, mean_span_length=2.0)
    lines = fit(flags, tmp_path / "run")
    assert np.isfinite([line["loss"] for line in lines if "loss" in line]).all()
    assert any("eval_loss" in line for line in lines)


def test_spans_fill_the_sequence_length(configure: Configure, t5_folder: Path, tmp_path: Path) -> None:
    task = load_task(configure(**flags_of(tmp_path, t5_folder, model_type="t5")))
    task.check()
    data: Any = task.build_data()
    batch = data.collate([data.augment(data.train[i], np.random.default_rng(i)) for i in range(4)])
    assert batch["input_ids"].shape == (4, 32)
    assert "attention_mask" not in batch
    with torch.no_grad():
        outputs = task.build_model()(**batch)
    guesses, truths = task.predict(outputs, batch)
    assert sum(map(len, truths)) == int((batch["labels"] != IGNORED).sum())
    assert len(guesses) == 4


def test_windows_mask_whole_words(configure: Configure, bert_folder: Path, tmp_path: Path) -> None:
    task: Any = load_task(configure(**flags_of(tmp_path, bert_folder, model_type="bert", whole_word_mask=True)))
    data, words = task.build_data(), 0
    starts = task.objective.mask.starts
    for i in range(10):
        sample = data.augment(data.train[i], np.random.default_rng(i))
        chosen = sample["labels"] != IGNORED
        tokens = np.where(chosen, sample["labels"], sample["input_ids"])
        goes_on = np.flatnonzero(~starts[tokens[2:]]) + 2
        assert (chosen[goes_on] == chosen[goes_on - 1]).all()
        words += len(goes_on)
    assert words > 20


def test_flags_of_other_objectives_are_refused(configure: Configure, bert_folder: Path, says: Says) -> None:
    for model_type, flag, value in (
        ("bert", "mean_span_length", 2.0), ("gpt2", "mask_prob", 0.2), ("gpt2", "sentence_pairs", True),
        ("t5", "short_seq_prob", 0.0), ("t5", "whole_word_mask", True), ("roberta", "sentence_pairs", True),
        ("fnet", "sentence_pairs", True),
    ):  # fmt: skip
        with says(RapidformerError):
            given = {"model_type": model_type, "tokenizer_path": str(bert_folder), flag: value}
            load_task(configure(task="pretraining", **given))
