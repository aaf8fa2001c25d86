"""Model FLOPs compared with the formula for decoders, and the matrix product used as the unit of measurement."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rapidformer_templates.commands.bench.flops import MatrixProduct, training_flops


def test_a_decoder_s_flops_are_those_of_the_formula() -> None:
    """6 N + 12 L H S per token, where N excludes the table that is only looked up (PaLM, appendix B)."""
    layers, hidden, length, vocabulary, rows = 3, 64, 32, 512, 2
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=length, tie_word_embeddings=False,
    )  # fmt: skip
    ids = torch.zeros(rows, length, dtype=torch.long)
    counted = training_flops(lambda: LlamaForCausalLM(config), {"input_ids": ids, "labels": ids})
    with torch.device("meta"):
        parameters = sum(p.numel() for p in LlamaForCausalLM(config).parameters() if p.ndim > 1) - vocabulary * hidden
    expected = (6 * parameters + 12 * layers * hidden * length) * rows * length
    assert counted == pytest.approx(expected, rel=0.01)


def test_the_matrix_product_has_a_rate() -> None:
    product = MatrixProduct("cpu", "fp32", size=64)
    assert 1e6 < product.rate() < 1e15
