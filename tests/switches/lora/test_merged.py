"""The merged model equals the evaluated one, even if head and embeddings share their weight."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from rapidformer_templates.errors import ModelError
from rapidformer_templates.models import weight_files
from tests.support import parity
from tests.support.jobs import VOCABULARY, CausalJob
from tests.support.messages import Says
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
from peft import LoraConfig, get_peft_model

from rapidformer_templates.switches.lora.exported import _note_untied, merge, read_config, read_model

pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

STEPS = "--train-iters 3 --eval-interval 3 --lr 1e-1 --no-keep-best --export-model --device cpu --lora-rank 4"
SHARD_BYTES = 5000
KINDS = {
    "adapters of the head": "--lora-target-modules c_attn,lm_head",
    "adapters of the embeddings": "--lora-target-modules c_attn,wte",
    "trained head": "--lora-modules-to-save lm_head",
    "trained embeddings": "--lora-modules-to-save wte",
    "dora": "--lora-variant dora --lora-target-modules c_attn,lm_head",
}
LAYOUTS = {"fsdp": "--fsdp-memory-optimization", "zero-3": "--zero-3-memory-optimization"}
CASES = [*((kind, "") for kind in KINDS), ("adapters of the head", "fsdp"), ("trained head", "zero-3")]


class Tied(CausalJob):
    base = ""

    def make(self) -> torch.nn.Module:
        model: torch.nn.Module = GPT2LMHeadModel.from_pretrained(self.base, dtype=torch.float32)
        return model


def _train(workers: Any, folder: str, base: str, flags: str) -> parity.Trained:
    job = type("Tied", (Tied,), {"base": base})
    return parity.trained(job([*f"{STEPS} {flags}".split(), "--save", folder]))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("kind", "layout"), by_default([(kind, "") for kind in KINDS], CASES))
def test_the_merged_model_is_the_one_that_was_evaluated(
    kind: str, layout: str, base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, flags = str(tmp_path / "run"), f"{KINDS[kind]} --micro-batch-size {4 if layout else 8}"
    if layout:
        run = run_in_workers(2, _train, folder, str(base), f"{flags} {LAYOUTS[layout]}")[0]
    else:
        run = _train(None, folder, str(base), flags)
    capfd.readouterr()
    with warnings.catch_warnings(record=True) as caught:
        merge(tmp_path / "run/export", tmp_path / "merged")
    assert capfd.readouterr() == ("", "")
    assert [str(warning.message) for warning in caught if warning.category is UserWarning] == []
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    config = read_config(tmp_path / "run/export")
    here, _ = read_model(GPT2LMHeadModel, tmp_path / "run/export", config)
    _assert_same_weights(here, tmp_path / "run/export", tmp_path)
    data = CausalJob().build_data()
    assert data.valid is not None
    for model in (plain.eval(), here.eval()):
        assert model.config.tie_word_embeddings is False
        with torch.no_grad():
            loss = float(model(**data.collate(list(data.valid))).loss)
        assert loss == pytest.approx(run["evaluations"][-1], rel=1e-5)


def _assert_same_weights(in_memory: Any, adapters: Path, root: Path) -> None:
    """Assert that the merged files have the bits that peft computes in memory, in one file and in shards."""
    in_memory.config.use_cache = True
    in_memory.save_pretrained(root / "in memory")
    assert (root / "merged/model.safetensors").read_bytes() == (root / "in memory/model.safetensors").read_bytes()
    with mock.patch.object(weight_files, "SHARD_BYTES", SHARD_BYTES):
        merge(adapters, root / "shards")
    shards = [load_file(file) for file in (root / "shards").glob("*.safetensors")]
    assert len(shards) > 2
    expected = load_file(root / "in memory/model.safetensors")
    together = {name: tensor for shard in shards for name, tensor in shard.items()}
    assert together.keys() == expected.keys()
    assert all(torch.equal(together[name], expected[name]) for name in expected)
    again = AutoModelForCausalLM.from_pretrained(root / "shards").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in in_memory.state_dict().items())


def test_a_weight_that_neither_folder_has_is_named(base: Path, tmp_path: Path, says: Says) -> None:
    """Adapters of other programs have no fingerprints, so nothing else would notice it."""
    model = GPT2LMHeadModel.from_pretrained(base)
    adapters, part = tmp_path / "adapters", tmp_path / "part"
    model.config.save_pretrained(adapters)
    get_peft_model(model, LoraConfig(target_modules=["c_attn"], base_model_name_or_path=str(base))).save_pretrained(
        adapters
    )
    merge(adapters, tmp_path / "merged")
    shutil.copytree(base, part)
    weights = load_file(part / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    with says(ModelError):
        merge(adapters, tmp_path / "random", str(part))
    assert not (tmp_path / "random").exists()


def test_an_architecture_that_ties_always_is_refused(tmp_path: Path, says: Says) -> None:
    """T5 scales the output of a tied head, so untied weights make a different model."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes)).save_pretrained(tmp_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    _note_untied(model)
    assert model.config.tie_word_embeddings
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with says(ModelError):
        _note_untied(model)
