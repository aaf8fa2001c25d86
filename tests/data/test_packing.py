"""Packed rows: no token is lost, samples do not see their neighbours, and loss and gradients do not change."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from rapidformer_templates.commands.main import main
from rapidformer_templates.data.collate import (
    IGNORED,
    PACKABLE,
    PackedRows,
    assign_rows,
    check_packable_model,
    count_targets,
)
from rapidformer_templates.data.tasks import load_task
from rapidformer_templates.errors import ModelError
from rapidformer_templates.run.folder import read_metrics
from tests.support.messages import Says
from tests.support.packed_rows import CAPACITY, _generator, _gradients, _loss, _model, _packed_batch, _samples
from tests.support.preference_runs import words
from tests.support.texts import TINY, Configure, write_jsonl


@given(st.integers(1, 20), st.lists(st.integers(0, 20), min_size=1, max_size=300), st.integers(0, 9))
@settings(max_examples=150, deadline=None)
def test_each_sample_is_in_one_row_and_no_row_is_too_full(capacity: int, raw: list[int], seed: int) -> None:
    lengths = np.minimum(raw, capacity)
    rows = assign_rows(lengths, capacity, _generator(seed))
    loads = np.bincount(rows, weights=lengths)
    assert loads.max() <= capacity
    assert set(rows.tolist()) == set(range(len(loads)))
    # Best fit opens a new row only for samples that fit nowhere else. So no two rows would fit into one.
    smallest_two = np.sort(loads)[:2]
    assert len(loads) < 2 or smallest_two.sum() > capacity


def test_rows_of_real_lengths_are_full_and_drawn_by_the_seed() -> None:
    lengths = np.minimum(_generator(4).lognormal(4, 0.8, 20_000).astype(np.int64) + 1, 512)
    rows = assign_rows(lengths, 512, _generator(1))
    assert lengths.sum() / (512 * (rows.max() + 1)) > 0.995
    assert rows.tolist() == assign_rows(lengths, 512, _generator(1)).tolist()
    assert rows.tolist() != assign_rows(lengths, 512, _generator(2)).tolist()
    # Neighbours in the file are not neighbours in the rows.
    together = [a == b for a, b in pairwise(rows.tolist())]
    assert sum(together) < 0.01 * len(together)


def _parts(row: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """Yield the samples of a packed row. Positions restart in each sample."""
    starts = [*np.flatnonzero(row["position_ids"] == 0).tolist(), len(row["position_ids"])]
    for start, stop in pairwise(starts):
        yield {name: values[start:stop] for name, values in row.items()}


@pytest.mark.parametrize("labels", [False, True])
def test_rows_hold_the_samples_and_their_labels(labels: bool) -> None:
    lengths = [1, 9, 30, 32, 2, 2, 7, 15, 16, 1, 5, 0, 11]
    samples = _samples(lengths, labels=labels)
    packed = PackedRows(samples, CAPACITY, _generator())
    parts = [part for row in packed for part in _parts(row)]
    found = sorted((part["input_ids"].tolist(), part["labels"].tolist()) for part in parts)
    wanted = []
    for sample in samples:
        row = sample.get("labels", sample["input_ids"]).tolist()
        if row:
            wanted.append((sample["input_ids"].tolist(), [IGNORED, *row[1:]]))
    assert found == sorted(wanted)
    assert all(part["position_ids"].tolist() == list(range(len(part["input_ids"]))) for part in parts)
    assert sum(row.samples for row in packed) == len(lengths)


NORMS_IN_FLOAT32 = ("cohere", "cohere2", "gemma", "gemma3_text", "helium")
"""Architectures whose norms multiply by their weight in float32 with any type of the model."""


EVERY_DAY = {"gpt2", "gpt_neox", "llama", "mistral", "mixtral", "qwen2"}

KINDS = [kind if kind in EVERY_DAY else pytest.param(kind, marks=pytest.mark.slow) for kind in PACKABLE]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return _model(request.param)


def test_loss_and_gradients_are_those_of_the_samples_alone(model: PreTrainedModel) -> None:
    check_packable_model(model.train(), "--pack-sequences")
    samples = _samples([9, 20, 1, 13, 6, 17, 3, 8], labels=True)
    batch = _packed_batch(samples)
    assert len(batch["input_ids"]) == 3  # several rows in a batch, several samples in a row, padding at an end
    loss = _loss(model, batch)
    assert model(**batch).loss.item() == pytest.approx(loss.item() / count_targets(batch, shifted=True), abs=1e-5)
    loss.backward()
    packed = _gradients(model)
    alone, targets = 0.0, 0.0
    for sample in samples:
        one = {name: torch.from_numpy(row.astype(np.int64))[None] for name, row in sample.items()}
        part = _loss(model, one)
        part.backward()
        alone, targets = alone + part.item(), targets + count_targets(one, shifted=True)
    assert targets == count_targets(batch, shifted=True) > 20
    assert loss.item() == pytest.approx(alone, abs=1e-10)
    worst = max((a - b).abs().max().item() for a, b in zip(packed, _gradients(model), strict=True))
    assert worst < (1e-5 if model.config.model_type in NORMS_IN_FLOAT32 else 1e-10)


@torch.no_grad()
def test_no_sample_sees_another(model: PreTrainedModel) -> None:
    model.eval()
    batch = _packed_batch(_samples([9, 20, 1, 13, 6, 17, 3, 8]))
    before = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    blocks = (batch["position_ids"] == 0).cumsum(dim=1)
    changed = batch["input_ids"].clone()
    here = blocks == 1  # the first sample of each row
    changed[here] = (changed[here] + 5) % 90
    after = model(input_ids=changed, position_ids=batch["position_ids"]).logits
    assert torch.equal(before[~here], after[~here])
    assert not torch.isclose(before[here], after[here]).all(dim=-1).any()


@pytest.mark.parametrize("kind", ["opt", "bloom"])
@torch.no_grad()
def test_a_refused_architecture_does_mix_samples(kind: str, says: Says) -> None:
    model = _model(kind).eval()
    with says(ModelError):
        check_packable_model(model, "--pack-sequences")
    batch = _packed_batch(_samples([9, 20]))
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    before = model(**inputs).logits
    inputs["input_ids"][0, 0] += 1
    assert not torch.isclose(before[0, 20:29], model(**inputs).logits[0, 20:29]).all()


def test_attention_that_takes_no_mask_is_refused(says: Says) -> None:
    model = _model("gpt2")
    model.config._attn_implementation = "flash_attention_2"
    with says(ModelError):
        check_packable_model(model, "--pack-sequences")


@pytest.fixture
def flags(tmp_path: Path, gpt_folder: Path) -> dict[str, Any]:
    """Write texts of 1 to 12 words, and return the flags of a small GPT-2 without dropout."""
    for name, count in (("train", 60), ("valid", 14)):
        rows = [{"text": words(1 + i * 7 % 12, i)} for i in range(count)]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    sizes = {**TINY, "seq_length": CAPACITY, "max_position_embeddings": 64}
    return {"data_dir": str(tmp_path), "model_type": "gpt2", "tokenizer_path": str(gpt_folder), **sizes}


def test_task_packs_both_parts(flags: dict[str, Any], configure: Configure, says: Says) -> None:
    tasks = [load_task(configure(task="causal_lm", pack_sequences=p, **flags)) for p in (False, True)]
    alone, packed = (task.build_data() for task in tasks)  # type: Any, Any
    for name in ("train", "valid"):
        rows, texts = getattr(packed, name), getattr(alone, name)
        found = sorted(part["input_ids"].tolist() for row in rows for part in _parts(row))
        assert found == sorted(text["input_ids"].tolist() for text in texts)
    batch = packed.collate([packed.train[0], packed.train[1]])
    assert sorted(batch) == ["input_ids", "labels", "position_ids"]
    assert batch["input_ids"].shape == (2, CAPACITY)
    says.text(tasks[1].notes[0])


def test_an_architecture_that_mixes_samples_is_refused_before_work_starts(
    flags: dict[str, Any], configure: Configure, says: Says
) -> None:
    flags |= {"model_type": "opt", "data_path": (str(Path(flags["data_dir"]) / "train.jsonl"),)}
    for task, flag in (("causal_lm", "pack_sequences"), ("pretraining", "keep_documents_apart")):
        with says(ModelError):
            load_task(configure(task=task, **{flag: True}, **flags)).check()


def _command(flags: dict[str, Any], **more: Any) -> list[str]:
    words = ["--task", "causal_lm", "--device", "cpu", "--lr", "1e-3", "--log-interval", "1"]
    for name, value in (flags | more).items():
        words += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
    return words


@pytest.mark.slow
def test_black_box_run_evaluates_as_without_packing(flags: dict[str, Any], tmp_path: Path) -> None:
    """A learning rate of 0 leaves the weights unchanged, so both runs evaluate the same model."""
    for name, more in (("alone", {}), ("packed", {"pack_sequences": True})):
        words = _command(flags, save=str(tmp_path / name), epochs=1, micro_batch_size=4, **more)
        words[words.index("--lr") + 1] = "0"
        assert main(words) == 0
    alone, packed = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("alone", "packed"))
    names = ("eval_loss", "perplexity", "token_accuracy")
    for name in names:
        assert packed[-1][name] == pytest.approx(alone[-1][name], rel=1e-5)
    # Real samples and tokens are counted, not rows and padding, and each once per epoch.
    last = [[line for line in lines if "loss" in line][-1] for lines in (alone, packed)]
    assert last[0]["samples"] == last[1]["samples"] == 60
    assert last[0]["tokens"] == last[1]["tokens"]
    assert last[1]["step"] < last[0]["step"] == 15
    assert last[1]["epoch"] == 1


@pytest.mark.slow
def test_flash_attention_takes_documents_one_by_one(flags: dict[str, Any], tmp_path: Path) -> None:
    """Training and evaluation are the same as with the mask, at every logged step."""
    for name, more in (("mask", {}), ("flash", {"use_flash_attn": True})):
        words = _command(flags, save=str(tmp_path / name), epochs=1, micro_batch_size=4, pack_sequences=True, **more)
        assert main(words) == 0
    masked, flash = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("mask", "flash"))
    for expected, actual in zip(masked, flash, strict=True):
        for name in {"loss", "grad_norm", "eval_loss"} & expected.keys():
            assert actual[name] == pytest.approx(expected[name], rel=1e-5)
    summary = json.loads((tmp_path / "flash" / "summary.json").read_text(encoding="utf-8"))
    calls = summary["receipts"]["attention_kernels"]
    layers, rows = flags["num_layers"], 4
    assert calls["_scaled_dot_product_flash_attention_for_cpu"] > layers * rows  # more documents than rows
    exported = json.loads((tmp_path / "flash" / "export" / "config.json").read_text(encoding="utf-8"))
    assert not [value for value in exported.values() if "rapidformer" in str(value)]
