"""Models with random weights, batches of random tokens and model FLOPs: for ``bench`` and for comparisons."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.data.types import Data
from rapidformer_templates.engines.current_batch import rows_of, watch_positions
from rapidformer_templates.planning.environment import detect_gpu
from rapidformer_templates.switches.auto_strategy.tracing import Batch, loss_of_model
from rapidformer_templates.trainer import Trainer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SEED = 1234

Tokens = dict[str, torch.Tensor]


@dataclass
class BenchModel:
    """A model with random weights. It is a :class:`ModelSource` of the planner.

    Attributes:
        kind: ``gpt`` or ``llama`` (causal language models), ``bert`` (masked tokens and sentence order) or
            ``classifier`` (a BERT).
        vocabulary: number of tokens in the vocabulary, including padding.
        tokens: tokens per sample.
        micro_batch: samples per micro batch.
        dropout: without it, the losses of all ways to train the model can be compared.
        key_value_heads: of a ``llama``. 0 means as many as heads.
    """

    kind: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    tokens: int
    micro_batch: int = 1
    dropout: float = 0.0
    key_value_heads: int = 0

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
        if self.kind == "llama":
            sizes = {"num_hidden_layers": layers, "hidden_size": self.hidden, "num_attention_heads": self.heads}
            sizes |= {"intermediate_size": 3 * self.hidden, "vocab_size": self.vocabulary, "use_cache": False}
            sizes |= {"num_key_value_heads": self.key_value_heads or self.heads}
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, max_position_embeddings=self.tokens))
        kind = transformers.BertForPreTraining if self.kind == "bert" else transformers.BertForSequenceClassification
        sizes = {"vocab_size": self.vocabulary, "hidden_size": self.hidden, "intermediate_size": 4 * self.hidden}
        sizes |= {"num_hidden_layers": layers, "num_attention_heads": self.heads}
        dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), self.dropout)
        return kind(transformers.BertConfig(**sizes, max_position_embeddings=self.tokens, **dropouts))

    def sample(self, index: int) -> Tokens:
        """Draw a sample. An index always gives the same one."""
        tokens = torch.randint(self.vocabulary, (self.tokens,), generator=torch.Generator().manual_seed(SEED + index))
        if self.kind in ("gpt", "llama"):
            # Nothing predicts the first token, but transformers' Trainer counts its label.
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
    """Samples that are drawn when they are read. Loader processes receive each tensor of a list as an open file."""

    source: BenchModel
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tokens:
        return self.source.sample(index)


SCALES = {
    "tiny": BenchModel("gpt", 2, 32, 2, 128, 16, micro_batch=2),
    "small": BenchModel("bert", 4, 768, 12, 8_192, 128, micro_batch=8),
    "bert-base": BenchModel("bert", 12, 768, 12, 30_522, 512, micro_batch=32),
    "gpt-124m": BenchModel("gpt", 12, 768, 12, 50_304, 1024, micro_batch=16),
    "paper": BenchModel("gpt", 24, 2048, 32, 50_304, 1024, micro_batch=8),
    "llama-1.5b": BenchModel("llama", 28, 2048, 16, 32_000, 4096, micro_batch=2, key_value_heads=8),
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


# Model FLOPs count the matrix products and the attention in one forward and its backward, as torch's flop counter does
# for the plain model: a multiply-add as 2 FLOPs, the backward as twice the forward, and attention as the whole square,
# also under a causal mask. Recomputation, norms, activations and the optimizer do not count.
# For a decoder this is 6 × parameters + 12 × layers × hidden × length per token (Chowdhery et al., 2022, appendix B),
# without embedding tables that are only looked up. Utilisation is the rate of model FLOPs divided by the rate of a
# large matrix product in the same type on the same machine, measured in the same run.

PRODUCT_SIZES = {"cpu": 2048, "accelerator": 8192}
"""Rows and columns of the matrices. Larger ones are not faster."""

AT_LEAST_SECONDS = 0.1


def training_flops(build: Callable[[], nn.Module], example: Mapping[str, torch.Tensor]) -> int:
    """Return the FLOPs of a model's forward and backward over one batch, without allocating memory for it.

    Args:
        build: function that creates the model. The model's output must have a ``loss``.
        example: the batch. Only its shapes matter.
    """
    with torch.device("meta"):
        model = build().train()
    batch = {name: torch.empty_like(tensor, device="meta") for name, tensor in example.items()}
    settings = getattr(model, "config", None)
    if settings is not None:
        settings.use_cache = False
    watch_positions(model)
    packed = MicroBatch(batch, [], mask_facts={"position_ids": False})
    counter = FlopCounterMode(display=False)
    with counter, rows_of(packed, batch, answers=True):
        model(**batch).loss.backward()
    return int(counter.get_total_flops())


def training_flops_of(kind: type[nn.Module], settings: PretrainedConfig | None, batch: object) -> int:
    """Return :func:`training_flops` for a transformers class and its configuration, or 0 for any other module."""
    if settings is None or not isinstance(batch, Mapping):
        return 0
    shapes = {name: tensor for name, tensor in batch.items() if isinstance(tensor, torch.Tensor)}
    shapes.pop("attention_mask", None)  # masked positions count as well
    return training_flops(lambda: kind(settings), shapes)


class MatrixProduct:
    """A large matrix product in a given type. Its rate is the upper limit for a model."""

    def __init__(self, device: str, precision: str, size: int | None = None) -> None:
        self.is_apart = device != "cpu"
        self.size = size or PRODUCT_SIZES["accelerator" if self.is_apart else "cpu"]
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        draw = torch.Generator(device).manual_seed(0)
        self._a, self._b = (torch.randn(self.size, self.size, generator=draw, device=device).to(kind) for _ in "ab")
        self._out = torch.empty_like(self._a)
        self.nbytes = 3 * self._out.nbytes
        self.rate()  # warm up caches, clocks and the library's choice of a kernel

    def rate(self) -> float:
        """Measure the current rate in FLOP/s, over about a tenth of a second."""
        self.wait()
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < AT_LEAST_SECONDS:
            for _ in range(8 if self.is_apart else 1):
                torch.mm(self._a, self._b, out=self._out)
                count += 1
            self.wait()
        return 2 * self.size**3 * count / (time.perf_counter() - began)

    def wait(self) -> None:
        """Wait until the device has finished its work."""
        if self.is_apart:
            torch.accelerator.synchronize()
