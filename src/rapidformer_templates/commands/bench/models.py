"""Models with random weights and batches of random tokens: for ``bench mfu``, ``bench calibrate`` and comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from rapidformer_templates.data.types import Data
from rapidformer_templates.planning.environment import detect_gpu
from rapidformer_templates.switches.auto_strategy.tracing import Batch, loss_of_model
from rapidformer_templates.trainer import Trainer

if TYPE_CHECKING:
    from torch import nn

SEED = 1234

Tokens = dict[str, torch.Tensor]


@dataclass
class BenchModel:
    """A model with random weights. It is a :class:`ModelSource` of the planner.

    Attributes:
        kind: ``gpt`` (causal language model), ``bert`` (masked tokens and sentence order) or ``classifier`` (a BERT).
        vocabulary: number of tokens in the vocabulary, including padding.
        tokens: tokens per sample.
        micro_batch: samples per micro batch.
        dropout: without it, the losses of all ways to train the model can be compared.
    """

    kind: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    tokens: int
    micro_batch: int = 1
    dropout: float = 0.0

    def build(self, blocks: int | None = None) -> nn.Module:
        """Build the model with ``blocks`` blocks, or with all of them."""
        import transformers

        layers = self.layers if blocks is None else blocks
        if self.kind == "gpt":
            sizes: dict[str, Any] = {"n_positions": self.tokens, "n_embd": self.hidden, "n_head": self.heads}
            sizes |= {"n_layer": layers, "vocab_size": self.vocabulary, "bos_token_id": 0, "eos_token_id": 0}
            dropouts: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), self.dropout)
            dropouts["loss_type"] = "ForCausalLM"  # otherwise transformers warns that it guesses this
            return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts, use_cache=False))
        kind = transformers.BertForPreTraining if self.kind == "bert" else transformers.BertForSequenceClassification
        sizes = {"vocab_size": self.vocabulary, "hidden_size": self.hidden, "intermediate_size": 4 * self.hidden}
        sizes |= {"num_hidden_layers": layers, "num_attention_heads": self.heads}
        dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), self.dropout)
        return kind(transformers.BertConfig(**sizes, max_position_embeddings=self.tokens, **dropouts))

    def sample(self, index: int) -> Tokens:
        """Draw a sample. An index always gives the same one."""
        tokens = torch.randint(self.vocabulary, (self.tokens,), generator=torch.Generator().manual_seed(SEED + index))
        if self.kind == "gpt":  # nothing predicts the first token, but transformers' Trainer counts its label
            return {"input_ids": tokens, "labels": torch.where(torch.arange(self.tokens) > 0, tokens, -100)}
        if self.kind == "classifier":
            return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens[0] % 2}
        # Every sample has the same number of targets, so the mean over a batch does not depend on how it is divided.
        labels = torch.where(torch.arange(self.tokens) % 7 == 0, tokens, -100)
        return {"input_ids": tokens, "labels": labels, "next_sentence_label": tokens[0] % 2}

    def batch(self, samples: int) -> Tokens:
        """Build a micro batch."""
        return torch.utils.data.default_collate([self.sample(index) for index in range(samples)])

    def compute_loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Compute the mean loss of a batch."""
        return loss_of_model(model, batch)

    def job(self, samples: int) -> type[Trainer]:
        """Return a template that trains the model on this number of samples."""
        source = self

        class RandomJob(Trainer):
            def build_model(self) -> nn.Module:
                return source.build()

            def build_data(self) -> Data:
                return Data(train=RandomSamples(source, samples))

        return RandomJob


@dataclass(frozen=True)
class RandomSamples:
    """A data set of random samples, which are drawn when they are read."""

    source: BenchModel
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tokens:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.source.sample(index)


SCALES = {
    "tiny": BenchModel("gpt", 2, 32, 2, 128, 16, micro_batch=2),
    "small": BenchModel("bert", 4, 768, 12, 8_192, 128, micro_batch=8),
    "bert-base": BenchModel("bert", 12, 768, 12, 30_522, 512, micro_batch=32),
    "gpt-124m": BenchModel("gpt", 12, 768, 12, 50_304, 1024, micro_batch=16),
    "paper": BenchModel("gpt", 24, 2048, 32, 50_304, 1024, micro_batch=8),
}
"""Models of ``bench mfu``. ``paper`` is the published GPT of 1.3 billion parameters."""


def fast_precision(device: str) -> str:
    """Return the 16-bit type in which a device computes fast, or fp32 if there is none."""
    if device == "cpu":
        return "bf16" if cpu_is_fast_at_bf16() else "fp32"
    capability = detect_gpu() if device == "cuda" else None
    return "fp16" if capability and capability < (8, 0) else "bf16"


@cache
def cpu_is_fast_at_bf16() -> bool:
    """Whether this CPU has instructions for bf16 products: AVX512-BF16 or AMX of x86."""
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))
