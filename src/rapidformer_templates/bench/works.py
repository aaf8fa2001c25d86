"""What the loops of a benchmark do: a model, its samples, and where and in what type it is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput

LR, WEIGHT_DECAY, CLIP, SEED = 1e-3, 0.01, 1.0, 1234

Sample = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Work:
    """A job that every loop does alike.

    Attributes:
        build: makes the model, from weights that are drawn anew.
        samples: what it is trained on.
        batch: samples an optimizer step.
        device: ``cpu`` or ``cuda``.
        precision: ``fp32`` or ``bf16`` (autocast).
        compiled: whether the loops compile the model, each in its own way.
    """

    build: Callable[[], nn.Module]
    samples: Sequence[Sample]
    batch: int
    device: str = "cpu"
    precision: str = "fp32"
    compiled: bool = False

    def model(self) -> nn.Module:
        """The same weights each time, whatever was drawn before; ``last_loss`` is that of its last forward."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model = self.build()
        model.last_loss = torch.zeros(())
        model.register_forward_hook(_keep_loss)
        return model

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * len(self.samples[0]["input_ids"])

    @property
    def example(self) -> Sample:
        """The first batch."""
        return stack(list(self.samples[: self.batch]))


def _keep_loss(model: nn.Module, inputs: Any, output: Any) -> None:
    model.last_loss = output.loss.detach()


def stack(batch: list[Sample]) -> Sample:
    return {name: torch.stack([sample[name] for sample in batch]) for name in batch[0]}


class TinyClassifier(nn.Module):
    """Two transformer blocks of width 32, without dropout: about 2 ms a step on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(64, 32)
        self.encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SequenceClassifierOutput:
        logits = self.head(self.encoder(self.embedding(input_ids)).mean(dim=1))
        return SequenceClassifierOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def tiny_work() -> Work:
    """So little that a step is mostly what the loop adds to it."""
    draw = torch.Generator().manual_seed(SEED)
    ids = torch.randint(0, 64, (1024, 16), generator=draw)
    return Work(TinyClassifier, [{"input_ids": row, "labels": row.sum() % 3} for row in ids], batch=8)


@dataclass(frozen=True)
class Shape:
    """A transformer by its sizes.

    Attributes:
        kind: ``gpt`` (causal language model) or ``bert`` (classification of two labels).
        length: tokens of a sample.
        batch: samples a step.
    """

    kind: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    length: int
    batch: int


MODELS = {
    "tiny": Shape("gpt", 2, 32, 2, 128, 16, batch=2),
    "gpt-124m/3": Shape("gpt", 4, 768, 12, 8_192, 256, batch=4),
    "bert-base/3": Shape("bert", 4, 768, 12, 30_522, 128, batch=8),
    "bert-base": Shape("bert", 12, 768, 12, 30_522, 512, batch=32),
    "gpt-124m": Shape("gpt", 12, 768, 12, 50_304, 1024, batch=16),
    "gpt-1.3b": Shape("gpt", 24, 2048, 32, 50_304, 1024, batch=8),
}
"""``/3``: a third of the layers, for a CPU."""


def build(shape: Shape, dropout: float = 0.0) -> nn.Module:
    """The model of a shape; without dropout, so that loops can be seen to compute the same losses."""
    from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

    if shape.kind == "bert":
        return BertForSequenceClassification(
            BertConfig(
                vocab_size=shape.vocabulary,
                hidden_size=shape.hidden,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                intermediate_size=4 * shape.hidden,
                max_position_embeddings=shape.length,
                hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
                num_labels=2,  # type: ignore[call-arg]
            )
        )
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=shape.vocabulary,
            n_embd=shape.hidden,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_positions=shape.length,
            use_cache=False,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    model.loss_type = "ForCausalLM"  # or transformers warns that it guesses so
    return model


class RandomTokens(Sequence[Sample]):
    """Samples that are drawn when they are asked for; each is the same one every time."""

    def __init__(self, shape: Shape, count: int) -> None:
        self._shape = shape
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(index)
        draw = torch.Generator().manual_seed(SEED + index)
        tokens = torch.randint(self._shape.vocabulary, (self._shape.length,), generator=draw)
        return {"input_ids": tokens, "labels": tokens if self._shape.kind == "gpt" else tokens[0] % 2}


def work_of(name: str, device: str, precision: str = "fp32", *, batch: int | None = None, **more: Any) -> Work:
    """The work of training one of :data:`MODELS`."""
    shape = MODELS[name]
    return Work(lambda: build(shape), RandomTokens(shape, 4096), batch or shape.batch, device, precision, **more)
