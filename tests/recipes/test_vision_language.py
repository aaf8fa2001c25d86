"""The recipe for vision-language models: as transformers' ``Trainer``, in layouts, with adapters, exported."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from rapidformer_templates.commands.main import main
from tests.recipes.watched import Watched, largest_difference, reference, train, train_alike, train_in_workers

pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")

NAME, STEPS = "vision_language", 4
QUESTIONS = ("which shape is this ?", "is this a square ?", "this is")
ANSWERS = ("red", "a red circle", "blue blue blue square", "yellow", "a green triangle ?")
FLAGS = (
    f"--lr 1e-3 --lr-warmup-fraction 0 --train-iters {STEPS} --micro-batch-size 4 --global-batch-size 8 "
    "--weight-decay 0 --clip-grad 1 --adam-epsilon 1e-6"
)
FEATURES = 16
"""Tokens per image."""


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write conversations with questions and answers of different lengths. Every third one has two images."""
    folder, draw = tmp_path_factory.mktemp("chats"), np.random.default_rng(0)
    for part, count in (("train", 21), ("valid", 5)):
        rows = []
        for row in range(count):
            content: list[dict[str, str]] = [{"type": "text", "text": QUESTIONS[row % 3]}]
            for number in range(1 + (row % 3 == 0)):
                name = f"{part}-{row}-{number}.png"
                Image.fromarray(draw.integers(0, 256, (32, 40, 3), dtype=np.uint8)).save(folder / name)
                content.insert(0, {"type": "image", "image": name})
            answer = [{"type": "text", "text": ANSWERS[row % 5]}]
            rows.append([{"role": "user", "content": content}, {"role": "assistant", "content": answer}])
        lines = [json.dumps({"messages": row}) + "\n" for row in rows]
        (folder / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def _flags(chats: Path) -> list[str]:
    return [*FLAGS.split(), "--data-path", str(chats / "train.jsonl"), str(chats / "valid.jsonl")]


@pytest.fixture(scope="module")
def alone(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return train(NAME, tmp_path_factory.mktemp("alone"), *_flags(chats))


def _with_labels(batch: dict[str, Tensor], assistant: int) -> dict[str, Tensor]:
    """Add the labels: what comes after the name of the assistant, without the padding."""
    ids = batch["input_ids"]
    is_answer = ((ids == assistant).cumsum(1) > 0) & (ids != assistant) & (batch["attention_mask"] == 1)
    return {**batch, "labels": ids.masked_fill(~is_answer, -100)}


def test_losses_and_weights_equal_those_of_transformers(alone: Watched, tmp_path: Path) -> None:
    folder = alone.folder / "run/export"
    processor = AutoProcessor.from_pretrained(folder)
    assistant = processor.tokenizer.convert_tokens_to_ids("assistant:")
    batches = [_with_labels(batch, assistant) for batch in alone.trained]
    answers = [processor.tokenizer.decode(row[row != -100]) for batch in batches for row in batch["labels"]]
    assert {answer.removesuffix(" </s>") for answer in answers} == set(ANSWERS)
    assert all(answer.endswith(" </s>") for answer in answers)
    images = [int((batch["input_ids"] == processor.image_token_id).sum()) / FEATURES for batch in batches]
    assert images == [len(batch["pixel_values"]) for batch in batches]
    assert max(images) > 4
    model = AutoModelForImageTextToText.from_pretrained(folder)
    model.load_state_dict(alone.start)
    theirs, weights = reference(
        model, batches, tmp_path, accumulation=2, learning_rate=1e-3, weight_decay=0.0, max_grad_norm=1.0,
        adam_epsilon=1e-6,
    )  # fmt: skip
    assert alone.losses == pytest.approx(theirs, abs=1e-5)
    assert largest_difference(alone.weights, weights) < 1e-5


LAYOUTS = {"fsdp": "--fsdp-memory-optimization", "tensor": "--tensor-model-parallel-size 2"}


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_like_one_process(layout: str, alone: Watched, chats: Path, tmp_path: Path) -> None:
    found = train_in_workers(NAME, tmp_path, *_flags(chats), *LAYOUTS[layout].split())
    assert found.losses == pytest.approx(alone.losses, abs=1e-5)
    assert largest_difference(found.weights, alone.weights) < 1e-5
    assert found.metrics[-1]["eval_loss"] == pytest.approx(alone.metrics[-1]["eval_loss"], abs=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["fsdp", pytest.param("tensor", marks=pytest.mark.longer)])
def test_adapters_of_the_language_part_train_alike_in_layouts(
    layout: str, alone: Watched, chats: Path, tmp_path: Path
) -> None:
    """From the export of another run, as from any folder of transformers."""
    pretrained = ["--pretrained-model-name-or-path", str(alone.folder / "run/export")]
    flags = [*_flags(chats), *pretrained, "--lora-rank", "4", "--lora-target-modules", "language_model"]
    single, found = train_alike(NAME, tmp_path, flags, LAYOUTS[layout])
    assert all(".language_model.layers." in name and "lora" in name for name in found.weights)
    changed = {n for n, before in single.start.items() if not torch.equal(before, single.end[n])}
    assert changed
    assert all("lora" in name and "language_model" in name for name in changed)


def test_a_merged_model_has_the_processor(alone: Watched, chats: Path, tmp_path: Path) -> None:
    pretrained = ["--pretrained-model-name-or-path", str(alone.folder / "run/export")]
    train(NAME, tmp_path, *_flags(chats), *pretrained, "--lora-rank", "4", "--lora-target-modules", "language_model")
    for _ in range(2):  # an export may be replaced by another one
        assert main(["export", str(tmp_path / "run"), "--merge", "--overwrite"]) == 0
    own, merged = (AutoProcessor.from_pretrained(tmp_path / "run" / name) for name in ("export", "merged"))
    assert type(merged) is type(own)
    assert merged.to_dict() == own.to_dict()
    assert merged.chat_template == own.chat_template
    images = [np.zeros((32, 40, 3), np.uint8)]
    mine, theirs = (kind(images=images, text="<image> red", return_tensors="pt") for kind in (merged, own))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.longer
def test_it_learns_the_drawings_and_its_export_answers(tmp_path: Path) -> None:
    """Without flags, as on its page."""
    found = train(NAME, tmp_path)
    assert found.metrics[-1]["accuracy"] > 0.85
    folder = tmp_path / "run/export"
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    rows = [json.loads(line)["messages"] for line in (tmp_path / "runs/drawings/valid.jsonl").open(encoding="utf-8")]
    right = 0
    for messages in rows:
        messages[0]["content"][0]["image"] = str(tmp_path / "runs/drawings" / messages[0]["content"][0]["image"])
        inputs = processor.apply_chat_template(
            messages[:-1], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        right += processor.decode(tokens, skip_special_tokens=True) == messages[1]["content"][0]["text"]
    assert right / len(rows) == pytest.approx(max(line.get("accuracy", 0) for line in found.metrics), abs=0.02)
