"""Evaluations after ``fit`` return the numbers of the run: they use the same task with the same reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer, BartConfig, BartForCausalLM

from rapidformer_templates import Trainer
from rapidformer_templates.errors import ConfigError, DataError
from tests.support.messages import Says
from tests.support.preference_runs import judged, make, pairs, words
from tests.support.selection import by_default
from tests.support.texts import TINY, write_jsonl

PREFERENCES = "--task preference --micro-batch-size 4 --eval-interval 3 --device cpu --no-keep-best --lr 2e-2"
WAYS = {"copy": "", "adapters": "--lora-rank 2", "average": "--ema-decay 0.5"}
LOSSES = {"dpo": pairs, "ipo": pairs, "kto": judged}
LAYOUTS = {
    "pipeline": "--pipeline-model-parallel-size 2",
    "replicas": "",
    "tensor": "--tensor-model-parallel-size 2",
    "context": "--context-parallel-size 2",
}


def trained(flags: list[str], *more: str, workers: int | None = None) -> tuple[Trainer, dict[str, Any]]:
    job = Trainer([*flags, *PREFERENCES.split(), *(word for words_ in more for word in words_.split())])
    return job, job.fit(workers=workers)


def assert_same(found: dict[str, float], wanted: dict[str, float]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "way"),
    by_default(
        [("dpo", "copy"), ("ipo", "adapters"), ("kto", "average")], [(loss, way) for loss in LOSSES for way in WAYS]
    ),
)
def test_rows_are_measured_against_the_reference(loss: str, way: str, gpt_folder: Path, tmp_path: Path) -> None:
    if way == "adapters":
        pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
    rows = LOSSES[loss]()
    job, summary = trained(make(tmp_path, gpt_folder, rows), f"--preference-loss {loss}", WAYS[way], "--no-save")
    wanted = {name: value for name, value in summary["metrics"].items() if name.startswith(("eval_", "rewards"))}
    assert abs(wanted["rewards/chosen"]) > 1e-3, "the model is not its own reference any more"
    assert_same(job.evaluate(), wanted)
    assert_same(job.evaluate(rows[:5]), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "is_kept"), [("copy", True), ("average", False)])
def test_a_reference_that_was_computed_once(
    way: str, is_kept: bool, gpt_folder: Path, tmp_path: Path, says: Says
) -> None:
    place = f"--save {tmp_path / 'run'}" if is_kept else "--no-save"
    job, summary = trained(make(tmp_path, gpt_folder, pairs()), WAYS[way], "--precompute-reference", place)
    assert abs(summary["metrics"]["rewards/chosen"]) > 1e-3
    assert_same(job.evaluate(), summary["metrics"])
    with says(DataError):
        job.evaluate(pairs()[:5])


@pytest.mark.distributed
@pytest.mark.parametrize("layout", by_default([], LAYOUTS))
def test_a_model_that_workers_have_divided_is_whole_afterwards(layout: str, gpt_folder: Path, tmp_path: Path) -> None:
    rows = pairs()
    flags = make(tmp_path, gpt_folder, rows, layers=4)
    once = "--precompute-reference" if layout == "pipeline" else ""
    job, summary = trained(flags, LAYOUTS[layout], once, "--no-save --micro-batch-size 2", workers=2)
    assert_same(job.evaluate(), summary["metrics"])
    assert abs(summary["metrics"]["rewards/chosen"]) > 1e-3
    assert isinstance(job.model, torch.nn.Module)
    if not once:
        assert_same(job.evaluate(rows[:5]), summary["metrics"])


@pytest.mark.slow
def test_rows_of_a_decoder_that_does_not_shift_labels(gpt_folder: Path, tmp_path: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(gpt_folder), tmp_path / "model"
    torch.manual_seed(0)
    sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
    config = BartConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes)
    BartForCausalLM(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    rows = [{"text": words(3 + i % 9, i)} for i in range(12)]
    for part, of_part in (("train", rows), ("valid", rows[:5])):
        write_jsonl(tmp_path / f"{part}.jsonl", of_part)
    flags = "--task causal_lm --train-iters 2 --lr 1e-2 --micro-batch-size 4 --no-save --seq-length 32 --device cpu"
    job = Trainer([*flags.split(), "--data-dir", str(tmp_path), "--pretrained-model-name-or-path", str(model)])
    metrics = job.fit()["metrics"]
    assert_same(job.evaluate(rows[:5]), metrics)


def untrained(folder: Path, tokenizer: Path, model: str) -> Trainer:
    flags = f"{model} --no-save --seq-length 32 --device cpu --epochs 1 --lr 1 --data-dir {folder}"
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    return Trainer([*flags.split(), *sizes, f"--tokenizer-path={tokenizer}"])


def test_tables_in_memory_are_rows(bert_folder: Path, tmp_path: Path, says: Says) -> None:
    """A Dataset, which names its labels, and a DataFrame give the numbers of the same rows in a list."""
    rows = [{"text": words(3 + i % 5, i), "label": "yes" if i % 3 else "no"} for i in range(8)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    job = untrained(tmp_path, bert_folder, "--task sequence_classification --model-type bert")
    wanted = job.evaluate(rows)
    names = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["yes", "no"])})
    tables = [datasets.Dataset.from_list(rows), datasets.Dataset.from_list(rows, features=names), pd.DataFrame(rows)]
    for table in tables:
        assert job.evaluate(table) == wanted
        texts = table.drop(columns="label") if isinstance(table, pd.DataFrame) else table
        assert job.predict(texts) == job.predict(rows)
    for wrong in (datasets.DatasetDict(train=tables[0]), pd.DataFrame([*rows, {"text": "a"}])):
        with says(DataError):
            job.evaluate(wrong)
    with says(ConfigError):
        job.predict(rows, batch_size=0)


def test_messages_are_one_conversation(gpt_folder: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"text": words(6, i)} for i in range(4)])
    job = untrained(tmp_path, gpt_folder, "--task causal_lm --model-type gpt2")
    messages = [{"role": "user", "content": "the cat"}]
    (wanted,) = job.predict([{"messages": messages}], max_new_tokens=4)
    assert job.predict(messages, max_new_tokens=4) == wanted
    assert job.predict([messages], max_new_tokens=4) == [wanted]
    assert job.predict(messages[0], max_new_tokens=4) == wanted
    assert job.predict("the cat", max_new_tokens=4) != wanted
