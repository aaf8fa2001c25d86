"""transformers' models read nothing in a forward whose questions the host has answered, and compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engines.test_outcomes import CountReads
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, GPT2Config, LlamaConfig

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.engines.mask_checks import answered

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
CONFIGS = {
    "gpt2": GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0),
    "llama": LlamaConfig(vocab_size=32, max_position_embeddings=16, **SMALL),
    "bert": BertConfig(vocab_size=32, max_position_embeddings=16, **SMALL),
}


def _batch(kind: str) -> dict[str, torch.Tensor]:
    ids = torch.arange(24).reshape(2, 12) % 29 + 1
    batch = {"input_ids": ids, "labels": ids}
    if kind in ("full mask", "padded"):
        batch["attention_mask"] = torch.ones_like(ids)
    if kind == "padded":
        batch["attention_mask"][0, 9:] = 0
    if kind == "packed":
        batch["position_ids"] = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1).contiguous()
    return batch


@pytest.mark.parametrize("kind", ["no mask", "full mask", "padded", "packed"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_forward_reads_nothing_and_is_the_same(name: str, kind: str) -> None:
    torch.manual_seed(0)
    factory: Any = AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM
    model = factory.from_config(CONFIGS[name]).eval()
    model.config.use_cache = False
    batch = _batch(kind)
    microbatch = MicroBatch(batch, [0, 1])
    microbatch.size = (2, microbatch.tokens)
    with torch.no_grad(), CountReads() as plain:
        expected = model(**batch).logits
    with torch.no_grad(), answered(microbatch), CountReads() as counted:
        actual = model(**batch).logits
    assert counted.reads == 0
    assert plain.reads > 0 or name == "bert" or kind == "packed"
    used = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    torch.testing.assert_close(actual[used], expected[used], rtol=1e-5, atol=1e-6)
