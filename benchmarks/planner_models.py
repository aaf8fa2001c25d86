"""The models of ``bench planner``: three architectures, small enough for a processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rapidformer_templates.switches.auto_strategy.model_shapes import ModelShapes


@dataclass(frozen=True)
class Sizes:
    """A model and its batches.

    Attributes:
        make: builds it with a number of blocks.
        blocks: how many it has.
        vocabulary: tokens.
        length: of a sample, tokens.
        width: of the hidden state.
        heads: of a block's attention.
    """

    make: Callable[[int], Any]
    blocks: int
    vocabulary: int
    length: int
    width: int
    heads: int

    def shapes(self) -> ModelShapes:
        """The model as the planner knows it."""
        import torch

        from rapidformer_templates.switches.auto_strategy.model_shapes import ModelShapes

        def batch(samples: int) -> dict[str, torch.Tensor]:
            tokens = torch.zeros((samples, self.length), dtype=torch.long)
            return {"input_ids": tokens, "labels": tokens}

        return ModelShapes(lambda blocks: self.make(self.blocks if blocks is None else blocks), batch)

    def build(self) -> Any:
        return self.make(self.blocks)

    def samples(self) -> list[dict[str, Any]]:
        """Random tokens, of one length and without padding."""
        import torch

        draw = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocabulary, (64, self.length), generator=draw)
        return [{"input_ids": row, "labels": row} for row in tokens]


def _gpt2(blocks: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_embd": 128, "n_layer": blocks, "n_head": 4, "n_positions": 128}
    return GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=1024, bos_token_id=0, eos_token_id=0, use_cache=False))


def _llama(blocks: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": blocks, "intermediate_size": 512, "max_position_embeddings": 256}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=2048, bos_token_id=0, eos_token_id=0, use_cache=False))


def _bert(blocks: int) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    sizes: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": blocks}
    sizes |= {"intermediate_size": 1024, "max_position_embeddings": 128}
    return BertForMaskedLM(BertConfig(**sizes, vocab_size=4096))


MODELS = {
    "gpt2": Sizes(_gpt2, 6, 1024, 128, 128, 4),
    "llama": Sizes(_llama, 8, 2048, 192, 192, 6),
    "bert": Sizes(_bert, 4, 4096, 96, 256, 4),
}
"""By architecture: 1.3 M parameters with dropout and a tied head, 4 M with grouped heads and none, 5 M with a mask."""
