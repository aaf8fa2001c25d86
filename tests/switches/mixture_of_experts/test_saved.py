"""An exported mixture can be loaded, but not by code that would fill it with random numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rapidformer_templates.switches.mixture_of_experts.transform import load_mixture
from tests.support.jobs import CausalJob
from tests.support.mixtures import MixtralJob

FLAGS = "--train-iters 1 --lr 1e-2 --micro-batch-size 2"
IDS = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))


def test_a_converted_model_is_read_again(tmp_path: Path) -> None:
    job = CausalJob([*FLAGS.split(), "--num-experts", "4", "--moe-layer-interval", "2", "--save", str(tmp_path)])
    job.fit()
    export = tmp_path / "export"
    with pytest.raises(ValueError, match="moe-gpt2"):
        AutoModelForCausalLM.from_pretrained(export)
    model = load_mixture(export)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, job.model.eval()(IDS).logits, rtol=1e-6, atol=1e-7)
    assert json.loads((export / "config.json").read_text())["num_experts"] == 4
    weights = load_file(export / "model.safetensors")
    name = next(name for name in weights if "experts" in name)
    save_file({other: weight for other, weight in weights.items() if other != name}, export / "model.safetensors")
    with pytest.raises(ValueError, match=f"1 weights of a GPT2LMHeadModel are missing in .*: {name}"):
        load_mixture(export)


def test_a_mixture_of_transformers_stays_one(tmp_path: Path) -> None:
    job = MixtralJob([*FLAGS.split(), "--moe-loss-coeff", "0.01", "--save", str(tmp_path)])
    job.fit()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    assert model.config._experts_implementation == "grouped_mm"
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, job.model.eval()(IDS).logits, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="from_pretrained"):
        load_mixture(tmp_path / "export")
