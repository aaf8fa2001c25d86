"""The recipe for rewards from ratings: compared with its formula in plain torch, in layouts, and what it exports."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import rankdata
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.recipes.watched import Watched, largest_difference, train, train_alike, train_in_workers
from tests.support.programs import one_thread

NAME, STEPS, MICRO, ACCUMULATION = "reward_from_scalar", 6, 4, 4
WORDS = ("answer", "clear", "wrong", "table", "parts", "kind", "late", "was")
RATINGS = (1.0, 2.0, 5.0)
SHARES = (0.1, 0.2, 0.7)
FLAGS = (
    f"--lr 1e-3 --lr-warmup-fraction 0 --lr-decay-style constant --train-iters {STEPS} --weight-decay 0 --clip-grad 1 "
    f"--adam-epsilon 1e-6 --micro-batch-size {MICRO} --global-batch-size {MICRO * ACCUMULATION}"
)


@pytest.fixture(scope="module")
def rated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write texts of 10 to 24 words with ratings of very different frequencies. Some have a weight."""
    folder, draw = tmp_path_factory.mktemp("rated"), np.random.default_rng(0)
    for part, count in (("train", 90), ("valid", 21)):
        rows = []
        for number in range(count):
            text = " ".join(map(str, draw.choice(WORDS, draw.integers(5, 13))))
            rows.append({"text": f"{text} {text}", "rating": float(draw.choice(RATINGS, p=SHARES))})
            if number % 4 == 0:
                rows[-1]["weight"] = float(draw.uniform(0, 3))
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def _rows(folder: Path, part: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()]


def _flags(folder: Path) -> list[str]:
    return [*FLAGS.split(), "--data-path", str(folder / "train.jsonl"), str(folder / "valid.jsonl")]


@pytest.fixture(scope="module")
def alone(rated: Path, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return train(NAME, tmp_path_factory.mktemp("alone"), *_flags(rated))


def _targets(folder: Path) -> dict[str, tuple[float, float]]:
    """Return (normalized rating, weight) by text, computed from the file."""
    rows = _rows(folder, "train")
    ratings = np.array([row["rating"] for row in rows])
    found = {}
    for row in rows:
        balance = len(rows) / (len(RATINGS) * (ratings == row["rating"]).sum())
        rating = (row["rating"] - ratings.mean()) / ratings.std()
        found[row["text"]] = (float(rating), float(balance * row.get("weight", 1.0)))
    assert len(found) == len(rows)
    return found


def test_losses_and_weights_equal_the_formula(alone: Watched, rated: Path) -> None:
    """Plain torch computes the weighted mean over all samples of a step at once."""
    folder, targets = alone.folder / "run/export", _targets(rated)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).train()
    model.load_state_dict(alone.start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.0)
    losses, of_micro_batches = [], []
    with one_thread():
        for first, last in pairwise(range(0, len(alone.trained) + 1, ACCUMULATION)):
            texts, parts = [], []
            for batch in alone.trained[first:last]:
                texts += [str(tokenizer.decode(ids[: int(n)])) for ids, n in
                          zip(batch["input_ids"], batch["attention_mask"].sum(1), strict=True)]  # fmt: skip
            goals, weights = torch.tensor([targets[text] for text in texts]).T
            rewards = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
            errors = weights * (rewards - goals) ** 2
            loss = errors.sum() / weights.sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss))
            parts = [e.sum() / w.sum() for e, w in zip(errors.split(MICRO), weights.split(MICRO), strict=True)]
            of_micro_batches.append(float(sum(parts) / len(parts)))
    assert len(losses) == STEPS
    assert alone.losses == pytest.approx(losses, abs=1e-6)
    model.save_pretrained(alone.folder / "by-hand")
    assert largest_difference(alone.weights, _saved(alone.folder / "by-hand")) < 1e-6
    # A mean of the means of micro batches is something else.
    assert np.abs(np.subtract(losses, of_micro_batches)).min() > 1e-3


def _saved(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def test_metrics_and_export(alone: Watched, rated: Path) -> None:
    """The export gives rewards in units of the ratings, and the metrics follow from them."""
    folder = alone.folder / "run/export"
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = _rows(rated, "valid")
    with torch.no_grad():
        logits = model(**tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")).logits[:, 0]
    rewards = logits.numpy() * model.config.rating_deviation + model.config.rating_mean
    ratings = np.array([row["rating"] for row in rows])
    found = alone.metrics[-1]
    assert found["mse"] == pytest.approx(((rewards - ratings) ** 2).mean(), abs=1e-5)
    assert found["pearson"] == pytest.approx(np.corrcoef(rewards, ratings)[0, 1], abs=1e-5)
    ranks = np.corrcoef(rankdata(rewards), rankdata(ratings))[0, 1]
    assert found["spearman"] == pytest.approx(ranks, abs=1e-5)


LAYOUTS = {
    "fsdp": "--fsdp-memory-optimization",
    "tensor": "--tensor-model-parallel-size 2",
    "pipeline": "--pipeline-model-parallel-size 2",
}


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["fsdp", "tensor", pytest.param("pipeline", marks=pytest.mark.longer)])
def test_layouts_train_like_one_process(layout: str, alone: Watched, rated: Path, tmp_path: Path) -> None:
    found = train_in_workers(NAME, tmp_path, *_flags(rated), *LAYOUTS[layout].split())
    assert found.losses == pytest.approx(alone.losses, abs=1e-5)
    assert largest_difference(found.weights, alone.weights) < 1e-5
    for name in ("eval_loss", "mse", "pearson", "spearman"):
        assert found.metrics[-1][name] == pytest.approx(alone.metrics[-1][name], abs=1e-4)


@pytest.mark.distributed
def test_adapters_train_alike_in_layouts(alone: Watched, rated: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
    pretrained = ["--pretrained-model-name-or-path", str(alone.folder / "run/export")]
    flags = [*_flags(rated), *pretrained, "--lora-rank", "4"]
    _, found = train_alike(NAME, tmp_path, flags, "--fsdp-memory-optimization")
    assert any("lora_A" in name for name in found.weights)


@pytest.mark.longer
def test_it_learns_the_generated_ratings(tmp_path: Path) -> None:
    """Without flags, as on its page."""
    assert train(NAME, tmp_path).metrics[-1]["spearman"] > 0.9
