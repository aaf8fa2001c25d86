"""transformers' own mixtures: the same function, with losses whose gradient equals that of transformers' formula."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.models.model_files import OWN_EXPERTS
from rapidformer_templates.switches.mixture_of_experts.layer import patch_native_experts
from rapidformer_templates.switches.mixture_of_experts.transform import load_mixture
from tests.support.jobs import CausalJob
from tests.support.messages import Says
from tests.support.mixtures import MixtralJob, tiny
from tests.support.parity import trained
from tests.support.worker_pool import alone

IDS = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(1))


def _gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", sorted(OWN_EXPERTS))
def test_function_and_losses_are_those_of_transformers(kind: str) -> None:
    """For one layer and one sample, transformers' pooled formula equals the sum of ours."""
    model = tiny(kind, layers=1)
    outputs = model(input_ids=IDS, labels=IDS, output_router_logits=True)
    balance = load_balancing_loss_func(outputs.router_logits, 4, 2)
    plain = model(input_ids=IDS, labels=IDS)
    expected = _gradients(model, plain.loss + 0.5 * balance)
    losses = patch_native_experts(model, balance=2 * 0.5, z=0.0)  # theirs is top-k times ours
    model.config.output_router_logits = False
    result = model(input_ids=IDS, labels=IDS)
    part = MicroBatch({"input_ids": IDS}, [0])
    losses.begin_step([part], alone())
    losses.follow(result.loss, part, 1.0)
    got = _gradients(model, result.loss)
    torch.testing.assert_close(result.loss, plain.loss, rtol=1e-6, atol=0)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-7)
    assert float(losses.results(alone())["balance_loss"]) == pytest.approx(float(balance) / 2, rel=1e-5)


def test_mixed_precision_reaches_the_experts() -> None:
    """transformers' grouped products compute in the type of the weights and ignore autocast."""
    model = tiny("mixtral")
    seen = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        patch_native_experts(model, balance=0.0, z=0.0)
        activation = model.model.layers[0].mlp.experts.act_fn
        activation.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        model(input_ids=IDS)
    assert seen == [torch.bfloat16]


def test_the_models_own_coefficient_is_the_default() -> None:
    model = tiny("mixtral")
    model.config.router_aux_loss_coef = 0.07
    assert patch_native_experts(model, balance=None, z=0.0).balance == 0.07
    assert model.config.output_router_logits is False


class RouterLossJob(MixtralJob):
    """The user's own mixture, whose loss includes the router loss of transformers."""

    def make(self) -> torch.nn.Module:
        model = super().make()
        model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.1
        return model


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--moe-loss-coeff 0.1"])
def test_a_router_loss_that_depends_on_the_micro_batch_is_noted(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    steps = "--train-iters 2 --global-batch-size 8 --lr 1e-2"
    curves = [trained(RouterLossJob(f"{steps} --micro-batch-size {m} {flags}".split()))["curve"] for m in (8, 2)]
    noted = "MixtralForCausalLM adds a router loss per micro batch" in capsys.readouterr().err
    assert noted == (not flags)
    differ = abs(curves[0][-1][1] - curves[1][-1][1]) > 1e-4
    assert differ == noted


# Exports can be loaded, but not by code that would fill them with random numbers.

FLAGS = "--train-iters 1 --lr 1e-2 --micro-batch-size 2"


def test_a_converted_model_is_read_again(tmp_path: Path, says: Says) -> None:
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
    with says(ValueError):
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
