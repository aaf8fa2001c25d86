"""Teach a vision-language model to answer questions about images (Liu et al., Visual Instruction Tuning, 2304.08485).

    python vision_language.py
    python vision_language.py --nproc-per-node 2 --fsdp-memory-optimization
    python vision_language.py --pretrained-model-name-or-path FOLDER --data-path train.jsonl valid.jsonl \\
        --lora-rank 16 --lora-target-modules language_model --lr 1e-4 --mixed-precision bf16 --save runs/mine

Each line of the files is a conversation, which ends with the answer to learn. Paths are relative to the file:

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "…?"}]},
                  {"role": "assistant", "content": [{"type": "text", "text": "…"}]}]}

With these adapters, only the language part is trained: the vision part and the projector stay frozen. Without files,
shapes are drawn, and without FOLDER, a tiny LLaVA starts from random weights.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)  # fmt: skip
from transformers.modeling_outputs import CausalLMOutput

from rapidformer_templates import Data, Trainer

DRAWN, SIDE, PATCH = Path("runs/drawings"), 32, 8
COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 80, 230), "yellow": (230, 220, 50)}
SHAPES = {"circle": 60, "square": 4, "triangle": 3}  # corners
QUESTION = "which shape is this ?"

Messages = list[dict[str, Any]]
"""Messages in the format of transformers' chat templates: a role, and a list of parts as content."""


class Conversations:
    """The lines of a file with conversations. Images are read when a conversation is used."""

    def __init__(self, file: Path) -> None:
        self.folder, self.lines = file.parent, file.read_text(encoding="utf-8").splitlines()

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Messages:
        messages: Messages = json.loads(self.lines[index])["messages"]
        for part in (part for message in messages for part in message["content"] if part["type"] == "image"):
            with Image.open(self.folder / part["image"]) as image:
                part["image"] = image.convert("RGB")
        return messages


class VisionLanguage(Trainer):
    """Train a model that reads images and text, on the last answer of each conversation."""

    def build_data(self) -> Data:
        name = self.config.model.pretrained_model_name_or_path
        self.processor: ProcessorMixin = AutoProcessor.from_pretrained(name) if name else tiny_processor()
        self.tokenizer = self.processor  # exported with the model
        files = [Path(file) for file in self.config.data.data_path or draw_conversations(DRAWN)]
        train, *valid = [Conversations(file) for file in files]
        return Data(train, valid[0] if valid else None, collate=self.collate)

    def collate(self, samples: list[Messages]) -> dict[str, Tensor]:
        """Let the processor make the pixels, and as many tokens for each image as the model has features of it."""
        batch = self.encode(samples)
        prompts = self.encode([messages[:-1] for messages in samples], add_generation_prompt=True)
        lengths = prompts["attention_mask"].sum(1, keepdim=True)
        is_answer = (torch.arange(batch["input_ids"].shape[1]) >= lengths) & (batch["attention_mask"] == 1)
        return {**batch, "labels": batch["input_ids"].masked_fill(~is_answer, -100)}

    def encode(self, samples: list[Messages], *, add_generation_prompt: bool = False) -> dict[str, Tensor]:
        """Tokenize conversations with the chat template of the model, padded on the right."""
        encoded: Any = self.processor.apply_chat_template(
            samples, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=True, return_tensors="pt",
            processor_kwargs={"padding": True, "padding_side": "right"},
        )  # fmt: skip
        return dict(encoded)

    def build_model(self) -> nn.Module:
        name = self.config.model.pretrained_model_name_or_path
        return AutoModelForImageTextToText.from_pretrained(name, dtype="float32") if name else tiny_model()

    def count_targets(self, batch: dict[str, Tensor]) -> int:
        return int((batch["labels"][:, 1:] != -100).sum())

    def compute_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        """Return the sum over the answer tokens, and their number. The logits of a token predict the next one."""
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
        losses = cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten(), reduction="sum")
        return losses, self.count_targets(batch)

    def read_outputs(self, outputs: CausalLMOutput, batch: dict[str, Tensor]) -> tuple[list[bool], list[bool]]:
        assert outputs.logits is not None
        labels = batch["labels"][:, 1:]
        is_right = (outputs.logits[:, :-1].argmax(-1) == labels) | (labels == -100)
        return is_right.all(1).tolist(), [True] * len(labels)

    def compute_metrics(self, predictions: Sequence[bool], references: Sequence[bool]) -> Mapping[str, float]:
        """Return the share of answers whose tokens are all the likeliest ones."""
        return {"accuracy": sum(predictions) / len(references)}


def tiny_processor() -> LlavaProcessor:
    """Make a processor for the drawings: one token per word, and 16 per image."""
    words = ["<pad>", "<image>", "</s>", "user:", "assistant:", *QUESTION.split(), "a", *COLOURS, *SHAPES]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}),
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", additional_special_tokens=["<image>"]
        ),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # of the whole image, which that strategy drops
        chat_template="{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
        "{{ '<image>' if part.type == 'image' else part.text }} {% endfor %}"
        "{{ '</s> ' if message.role == 'assistant' }}{% endfor %}{{ 'assistant: ' if add_generation_prompt }}",
    )


def tiny_model() -> nn.Module:
    """Make a LLaVA with the parts of the real one: a CLIP, a projector and a llama."""
    vision = CLIPVisionConfig(
        image_size=SIDE, patch_size=PATCH, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, initializer_range=0.1,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=32, max_position_embeddings=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, initializer_range=0.1, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=1, vision_feature_layer=-1)
    return LlavaForConditionalGeneration(config)


def draw_conversations(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Draw shapes and write conversations about them: 600 for training. One worker does it for all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            generator, unfinished = np.random.default_rng(seed), folder.with_suffix(".unfinished")
            unfinished.mkdir(exist_ok=True)
            for part, count in {"train": 600, "valid": 100}.items():
                rows = [draw(unfinished / f"{part}-{number}.png", generator) for number in range(count)]
                (unfinished / f"{part}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            unfinished.rename(folder)
    return folder / "train.jsonl", folder / "valid.jsonl"


def draw(file: Path, generator: np.random.Generator) -> dict[str, Messages]:
    """Draw a shape of some colour, size and place, and return a conversation about it."""
    colour, shape = str(generator.choice(list(COLOURS))), str(generator.choice(list(SHAPES)))
    image = Image.new("RGB", (SIDE, SIDE), (20, 20, 20))
    circle = (*generator.integers(13, SIDE - 13, 2).tolist(), int(generator.integers(10, 15)))
    ImageDraw.Draw(image).regular_polygon(circle, SHAPES[shape], fill=COLOURS[colour])
    image.save(file)
    question = [{"type": "image", "image": file.name}, {"type": "text", "text": QUESTION}]
    answer = [{"type": "text", "text": f"a {colour} {shape}"}]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


if __name__ == "__main__":
    VisionLanguage.main(
        epochs=12, lr=2e-3, lr_warmup_fraction=0.05, micro_batch_size=16, metric_for_best="accuracy", log_interval=38,
        save="runs/vision",
    )  # fmt: skip
