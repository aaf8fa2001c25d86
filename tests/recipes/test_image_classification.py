"""The recipe for image classification: compared with transformers' ``Trainer``, in layouts, and what it exports."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTConfig, ViTForImageClassification

from tests.recipes.watched import Watched, largest_difference, reference, train, train_alike, train_in_workers

NAME = "image_classification"
CLASSES = ("dawn", "day", "night")
COUNT, STEPS = 16, 12
FLAGS = (
    "--lr 1e-3 --micro-batch-size 8 --global-batch-size 16 --train-iters 4epochs --weight-decay 0.1 --clip-grad 1 "
    "--adam-epsilon 1e-6"
)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write images of random colours, each brighter on its left side: 48 for training and 12 for validation."""
    folder, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for part, count in (("train", COUNT), ("valid", 4)):
        for number, name in enumerate(CLASSES):
            (folder / part / name).mkdir(parents=True)
            for index in range(count):
                pixels = draw.integers(40 * number, 40 * number + 120, (32, 32, 3), dtype=np.uint8)
                pixels[:, :16] += 40
                Image.fromarray(pixels).save(folder / part / name / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def alone(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return train(NAME, tmp_path_factory.mktemp("alone"), "--data-dir", str(images), *FLAGS.split())


def _normalized(file: Path) -> Tensor:
    """Return an image of the right size as the model expects it: numbers from -1 to 1."""
    with Image.open(file) as image:
        return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1) / 255 * 2 - 1


def test_each_epoch_has_every_image_once_and_half_of_them_flipped(alone: Watched, images: Path) -> None:
    pixels = torch.cat([batch["pixel_values"] for batch in alone.trained])
    labels = torch.cat([batch["labels"] for batch in alone.trained])
    files = {part: [(i, file) for i, name in enumerate(CLASSES) for file in (images / part / name).iterdir()]
             for part in ("train", "valid")}  # fmt: skip
    plain = torch.stack([_normalized(file) for _, file in files["train"]])
    places, flips = [], 0
    for image, label in zip(pixels, labels, strict=True):
        distances = [(plain - version).abs().amax((1, 2, 3)) for version in (image, image.flip(-1))]
        flipped = int(distances[1].min() < distances[0].min())
        assert distances[flipped].min() < 1e-5
        places.append(int(distances[flipped].argmin()))
        assert files["train"][places[-1]][0] == label
        flips += flipped
    epochs = [places[start : start + 48] for start in range(0, len(places), 48)]
    assert len(epochs) == 4
    assert all(sorted(epoch) == list(range(48)) for epoch in epochs)
    assert 0.4 < flips / len(places) < 0.6
    shown = torch.cat([batch["pixel_values"] for batch in alone.evaluated])
    valid = torch.stack([_normalized(file) for _, file in files["valid"]])
    assert all((valid - image).abs().amax((1, 2, 3)).min() < 1e-5 for image in shown)


def test_losses_and_weights_equal_those_of_transformers(alone: Watched, tmp_path: Path) -> None:
    config = ViTConfig(
        image_size=32, patch_size=4, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        id2label=dict(enumerate(CLASSES)),
    )  # fmt: skip
    model = ViTForImageClassification(config)
    model.load_state_dict(alone.start)
    theirs, weights = reference(
        model, alone.trained, tmp_path, accumulation=2, learning_rate=1e-3, weight_decay=0.1, max_grad_norm=1.0,
        adam_epsilon=1e-6,
    )  # fmt: skip
    assert len(alone.losses) == STEPS
    assert alone.losses == pytest.approx(theirs, abs=1e-5)
    assert largest_difference(alone.weights, weights) < 1e-5


def test_the_export_is_a_classifier_with_names_and_processor(alone: Watched, images: Path) -> None:
    folder = alone.folder / "run/export"
    model, processor = (kind.from_pretrained(folder) for kind in (AutoModelForImageClassification, AutoImageProcessor))
    assert model.config.id2label == dict(enumerate(CLASSES))
    files = [file for name in CLASSES for file in sorted((images / "valid" / name).iterdir())]
    with torch.no_grad():
        found = model(**processor([Image.open(file) for file in files], return_tensors="pt")).logits.argmax(-1)
    right = [model.config.id2label[int(number)] == file.parent.name for number, file in zip(found, files, strict=True)]
    assert alone.metrics[-1]["accuracy"] == pytest.approx(np.mean(right))


LAYOUTS = {
    "fsdp": "--fsdp-memory-optimization",
    "tensor": "--tensor-model-parallel-size 2",
}


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_like_one_process(layout: str, alone: Watched, images: Path, tmp_path: Path) -> None:
    found = train_in_workers(NAME, tmp_path, "--data-dir", str(images), *FLAGS.split(), *LAYOUTS[layout].split())
    assert found.losses == pytest.approx(alone.losses, abs=1e-5)
    assert largest_difference(found.weights, alone.weights) < 1e-5
    assert found.metrics[-1]["accuracy"] == alone.metrics[-1]["accuracy"]


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["fsdp", pytest.param("tensor", marks=pytest.mark.longer)])
def test_adapters_train_alike_in_layouts(layout: str, images: Path, tmp_path: Path) -> None:
    flags = ["--data-dir", str(images), *FLAGS.split(), "--lora-rank", "4"]
    _, found = train_alike(NAME, tmp_path, flags, LAYOUTS[layout])
    assert any("lora_A" in name for name in found.weights)


@pytest.mark.longer
def test_it_learns_the_drawn_shapes(tmp_path: Path) -> None:
    """Without flags, as on its page."""
    assert train(NAME, tmp_path).metrics[-1]["accuracy"] > 0.9
