"""Classify images: a vision transformer learns from a folder of images (Dosovitskiy et al., arXiv 2010.11929).

    python image_classification.py
    python image_classification.py --nproc-per-node 2 --fsdp-memory-optimization
    python image_classification.py --pretrained-model-name-or-path FOLDER --data-dir IMAGES --lr 5e-5 --epochs 3 \\
        --mixed-precision bf16 --save runs/mine

IMAGES has train/CLASS/*.png and valid/CLASS/*.png (or .jpg …). Without IMAGES, a folder of drawn shapes is made, and
without FOLDER, a tiny model starts from random weights. Add --lora-rank 16 to train adapters only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor, nn
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)  # fmt: skip
from transformers.modeling_outputs import ImageClassifierOutput

from rapidformer_templates import Data, Trainer, flag

DRAWN, SIDE = Path("runs/shapes"), 32
SHAPES = {"circle": 60, "square": 4, "triangle": 3}  # corners
ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}


@dataclass(frozen=True)
class Photo:
    """One sample: an image and the number of its class."""

    image: Image.Image
    label: int


class ImageFolder:
    """The images in ``folder/CLASS/``. Each is read from its file when it is used."""

    def __init__(self, folder: Path, classes: list[str]) -> None:
        self.files = sorted(file for file in folder.glob("*/*") if file.suffix.lower() in ENDINGS)
        self.classes = classes

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Photo:
        file = self.files[index]
        with Image.open(file) as image:
            return Photo(image.convert("RGB"), self.classes.index(file.parent.name))


@dataclass(frozen=True)
class ImageFlags:
    """Images"""

    flips: bool = flag(True, "mirror half of the training images, anew in each epoch")


class ImageClassification(Trainer):
    """Train a classifier of images."""

    Flags = ImageFlags

    def build_data(self) -> Data:
        name = self.config.model.pretrained_model_name_or_path
        tiny = ViTImageProcessorPil(size={"height": SIDE, "width": SIDE})
        self.processor = AutoImageProcessor.from_pretrained(name) if name else tiny
        self.tokenizer = self.processor  # exported with the model
        folder = Path(self.config.data.data_dir or draw_shapes(DRAWN))
        self.classes = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
        train, valid = (ImageFolder(folder / part, self.classes) for part in ("train", "valid"))
        return Data(train, valid, collate=self.collate, augment=self.augment if self.flags.flips else None)

    @staticmethod
    def augment(photo: Photo, generator: np.random.Generator) -> Photo:
        """Mirror half of the training images. Put other transforms here: they must draw from ``generator``."""
        return replace(photo, image=ImageOps.mirror(photo.image)) if generator.random() < 0.5 else photo

    def collate(self, photos: list[Photo]) -> dict[str, Tensor]:
        """Resize and normalize the images as the model expects them."""
        pixels = self.processor([photo.image for photo in photos], return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, "labels": torch.tensor([photo.label for photo in photos])}

    def build_model(self) -> nn.Module:
        name = self.config.model.pretrained_model_name_or_path
        id2label = dict(enumerate(self.classes))
        label2id = {label: number for number, label in id2label.items()}
        if name:  # a head for other classes is replaced
            return AutoModelForImageClassification.from_pretrained(
                name, dtype="float32", id2label=id2label, label2id=label2id, ignore_mismatched_sizes=True
            )
        config = ViTConfig(
            image_size=SIDE, patch_size=4, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
            num_attention_heads=4, initializer_range=0.1, id2label=id2label, label2id=label2id,
        )  # fmt: skip
        return ViTForImageClassification(config)

    # The loss is that of the model: the mean cross-entropy over the images.

    def read_outputs(self, outputs: ImageClassifierOutput, batch: dict[str, Tensor]) -> tuple[list[int], list[int]]:
        assert outputs.logits is not None
        return outputs.logits.argmax(-1).tolist(), batch["labels"].tolist()

    def compute_metrics(self, predictions: Sequence[int], references: Sequence[int]) -> Mapping[str, float]:
        right = sum(told == true for told, true in zip(predictions, references, strict=True))
        return {"accuracy": right / len(references)}


def draw_shapes(folder: Path, seed: int = 0) -> Path:
    """Draw shapes of random colours, sizes and places: 240 per class for training. One worker does it for all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            generator, unfinished = np.random.default_rng(seed), folder.with_suffix(".unfinished")
            for part, count in {"train": 240, "valid": 60}.items():
                for shape, corners in SHAPES.items():
                    (unfinished / part / shape).mkdir(parents=True, exist_ok=True)
                    for number in range(count):
                        draw(corners, generator).save(unfinished / part / shape / f"{number:03}.png")
            unfinished.rename(folder)
    return folder


def draw(corners: int, generator: np.random.Generator) -> Image.Image:
    """Draw a bright shape on a dark ground."""
    dark, bright = (tuple(generator.integers(low, low + 128, 3).tolist()) for low in (0, 128))
    image, radius = Image.new("RGB", (SIDE, SIDE), dark), int(generator.integers(8, 14))
    circle = (*generator.integers(radius, SIDE - radius, 2).tolist(), radius)
    ImageDraw.Draw(image).regular_polygon(circle, corners, fill=bright)
    return image


if __name__ == "__main__":
    ImageClassification.main(
        epochs=12, lr=2e-3, micro_batch_size=16, metric_for_best="accuracy", log_interval=50, save="runs/images"
    )
