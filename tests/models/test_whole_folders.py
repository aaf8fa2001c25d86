"""A folder has the weights that its ``config.json`` describes, and the head that the task needs, or it is refused."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)  # fmt: skip

from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.adapters import new_modules_of
from rapidformer_templates.models.loading import build_model
from tests.support.messages import Says
from tests.support.texts import Configure

pytestmark = pytest.mark.usefixtures("offline")

Weights = dict[str, torch.Tensor]
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
CAUSAL, TEXTS, MASKED = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"
CLASSES, PAIRS = "AutoModelForSequenceClassification", "AutoModelForPreTraining"
LLAMA = LlamaConfig(vocab_size=400, **SIZES, pad_token_id=0)
BERT = BertConfig(vocab_size=400, **SIZES)
GPT2 = GPT2Config(vocab_size=400, n_embd=16, n_layer=2, n_head=2)
T5 = T5Config(vocab_size=400, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)


def _without(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {other: weight for other, weight in weights.items() if other != name}


def _with(end: str, tensor: torch.Tensor) -> Callable[[Weights], Weights]:
    """Add a tensor to each block, as other architectures or former versions of transformers have it."""

    def add(weights: Weights) -> Weights:
        blocks = {name[: match.end()] for name in weights if (match := re.search(r"\.\d+", name))}
        return weights | {f"{block}.{end}": tensor.clone() for block in blocks}

    return add


def _with_head(weights: Weights) -> Weights:
    return weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}


class Folder(NamedTuple):
    """A folder, and what happens with it.

    Attributes:
        saved: the class and configuration that were saved.
        auto_class: the class that the task needs.
        new: the names of the modules that begin with random values. None: the folder is refused.
        change: changes the weights in the folder.
        config: changes of its ``config.json``.
        labels: number of labels of the task.
    """

    saved: tuple[type[PreTrainedModel], PreTrainedConfig]
    auto_class: str
    new: set[str] | None = None
    change: Callable[[Weights], Weights] = lambda weights: weights
    config: dict[str, Any] | None = None
    labels: int | None = None


LM = (LlamaForCausalLM, LLAMA)
DENSE, QUERY = "cls.predictions.transform.dense.weight", "decoder.block.1.layer.0.SelfAttention.q.weight"
TIED = LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": True})
FOLDERS = {
    "no head": Folder(LM, CAUSAL, change=_without("lm_head.weight")),
    "body": Folder((LlamaModel, LLAMA), CAUSAL),
    "classifier": Folder((LlamaForSequenceClassification, LLAMA), CAUSAL),
    "classifier without a head": Folder(
        (BertForSequenceClassification, BERT), CLASSES, change=_without("classifier.weight"), labels=2
    ),
    "half of a masked head": Folder((BertForMaskedLM, BERT), MASKED, change=_without(DENSE)),
    "no layer of t5": Folder((T5ForConditionalGeneration, T5), TEXTS, change=_without(QUERY)),
    "too few blocks": Folder(LM, CAUSAL, config={"num_hidden_layers": 4}),
    "too many blocks": Folder(LM, CAUSAL, config={"num_hidden_layers": 2}),
    "vocabulary": Folder(LM, CAUSAL, config={"vocab_size": 500}),
    "width": Folder(LM, CAUSAL, config={"intermediate_size": 48}),
    "tied in the configuration alone": Folder(LM, CAUSAL, config={"tie_word_embeddings": True}),
    "biases of qwen2": Folder(LM, CAUSAL, change=_with("self_attn.q_proj.bias", torch.zeros(16))),
    "norms of qwen3": Folder(LM, CAUSAL, change=_with("self_attn.q_norm.weight", torch.ones(8))),
    "frequencies of former versions": Folder(LM, CAUSAL, set(), _with("self_attn.rotary_emb.inv_freq", torch.ones(4))),
    "masks of former versions": Folder(
        (GPT2LMHeadModel, GPT2), CAUSAL, set(), _with("attn.bias", torch.ones(1, 1, 8, 8, dtype=torch.bool))
    ),
    "tied, in two copies": Folder((LlamaForCausalLM, TIED), CAUSAL, set(), _with_head),
    "new classifier": Folder((LlamaModel, LLAMA), CLASSES, {"score"}, labels=3),
    "new pooler": Folder((BertForMaskedLM, BERT), CLASSES, {"bert.pooler.dense", "classifier"}, labels=3),
    "classifier for other labels": Folder((BertForSequenceClassification, BERT), CLASSES, {"classifier"}, labels=3),
    "new head for pairs": Folder((BertForMaskedLM, BERT), PAIRS, {"bert.pooler.dense", "cls.seq_relationship"}),
    "new masked head": Folder(
        (BertModel, BERT), MASKED, {"cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"}
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_whole_or_refused(
    name: str, tmp_path: Path, gpt_folder: Path, configure: Configure, says: Says
) -> None:
    (kind, config), auto_class, new, change, changed, labels = FOLDERS[name]
    kind(config).save_pretrained(tmp_path)
    save_file(change(load_file(tmp_path / "model.safetensors")), tmp_path / "model.safetensors", {"format": "pt"})
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(saved | (changed or {})))
    flags = configure(pretrained_model_name_or_path=str(tmp_path), tokenizer_path=str(gpt_folder))
    options = {"num_labels": labels} if labels else {}
    with says(ModelError) if new is None else contextlib.nullcontext():
        model = build_model(flags, auto_class, AutoTokenizer.from_pretrained(gpt_folder), **options)
        assert set(new_modules_of(model)) >= (new or set())
        assert bool(new_modules_of(model)) == bool(new)
