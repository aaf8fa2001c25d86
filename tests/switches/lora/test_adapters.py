"""Adapters: parity with peft on the same weights, their export, their merging, and the base that they belong to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from rapidformer_templates import Data
from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import CheckpointError, ModelError
from tests.support.jobs import ClassJob, PretrainedJob, _pad, _sequences
from tests.support.parity import Trained, trained

peft: Any = pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")

STEPS = "--train-iters 4 --global-batch-size 8 --micro-batch-size 4 --lr 1e-2 --log-interval 1 --lora-rank 4"


def run(base: Path, folder: Path | None, flags: str = "", job: type = PretrainedJob) -> Trained:
    """Train adapters. Files are written only if there is a folder for them."""
    kind = type("Job", (job,), {"folder": str(base)})
    return trained(kind([*STEPS.split(), *flags.split(), *(["--save", str(folder)] if folder else [])]))


class _Recorded(PretrainedJob):
    """Records the batches that it trains on."""

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if model.training and torch.is_grad_enabled() and hasattr(self, "model"):
            _BATCHES.append(batch)
        return super().compute_loss(model, batch)


class _OneShape(PretrainedJob):
    """All batches have one length and there is no validation, so each direction needs one graph."""

    def build_data(self) -> Data:
        return Data(train=_sequences(200), collate=lambda samples: _pad(samples, (len(samples), 40), classes=False))


_BATCHES: list[dict[str, torch.Tensor]] = []
PLAIN = "--micro-batch-size 8 --clip-grad 0 --weight-decay 0 --lr-decay-style constant"


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["lora", "rslora", "dora"])
def test_trains_as_a_loop_over_peft_does(base: Path, tmp_path: Path, variant: str) -> None:
    flags = f"--lora-variant {variant} --lora-alpha 12 {PLAIN}"
    run(base, tmp_path / "start", f"{flags} --lr 0")
    _BATCHES.clear()
    found = run(base, tmp_path / "run", flags, job=_Recorded)
    saved = json.loads((tmp_path / "run/export/adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"]) == (4, 12)
    assert (saved["use_rslora"], saved["use_dora"]) == (variant == "rslora", variant == "dora")
    theirs = peft.PeftModel.from_pretrained(
        GPT2LMHeadModel.from_pretrained(base, dtype=torch.float32), str(tmp_path / "start/export"), is_trainable=True
    ).train()
    optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=1e-2, weight_decay=0)
    losses = []
    for batch in _BATCHES[-4:]:
        loss = theirs(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert [loss for loss, _ in found["curve"]] == pytest.approx(losses, rel=1e-6)
    weights = {name.removeprefix("base_model.model."): p for name, p in theirs.named_parameters() if p.requires_grad}
    assert weights.keys() == found["weights"].keys()
    for name, weight in weights.items():
        torch.testing.assert_close(found["weights"][name].float(), weight.detach(), rtol=1e-4, atol=1e-5)


def test_only_adapters_are_kept_and_what_is_frozen_stays(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(base, None)
    receipts = found["summary"]["receipts"]
    whole = sum(p.numel() for p in GPT2LMHeadModel.from_pretrained(base).parameters())
    assert receipts["frozen_parameters"] == whole
    assert f"{receipts['trained_parameters']:,} of them trained" in " ".join(capsys.readouterr().out.split())
    # Layers of two blocks of width 16: qkv, attention output and two of the feed-forward. The rank is 4.
    assert receipts["trained_parameters"] == 2 * 4 * ((16 + 48) + (16 + 16) + (16 + 64) + (64 + 16))
    assert receipts["trained_bytes"] == 4 * receipts["trained_parameters"]
    assert receipts["adapted_layers"] == 8
    # Adam's two moments, and a step count for each parameter.
    assert receipts["optimizer_state_bytes"] == 8 * receipts["trained_parameters"] + 4 * 16
    assert sum(weight.numel() for weight in found["weights"].values()) == receipts["trained_parameters"]


@pytest.mark.slow
def test_a_base_in_half_the_bytes_trains_to_the_same_bits(base: Path) -> None:
    """Autocast rounds the same weights to the same bits before each product."""
    whole = run(base, None, "--mixed-precision bf16")
    half = run(base, None, "--mixed-precision bf16 --quantize-base half")
    assert half["curve"] == whole["curve"]
    assert all(torch.equal(half["weights"][name], weight) for name, weight in whole["weights"].items())
    sizes = [found["summary"]["receipts"]["frozen_bytes"] for found in (half, whole)]
    layers = 2 * (16 * 48 + 48 + 16 * 16 + 16 + 16 * 64 + 64 + 64 * 16 + 16)
    assert sizes[1] - sizes[0] == 2 * layers


def test_merged_model_is_the_adapted_one(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(base, tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), "--merge"]) == 0
    assert "wrote" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run/merged").eval()
    adapted = peft.PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(base), str(tmp_path / "run/export")).eval()
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert (merged(tokens).logits - adapted(tokens).logits).abs().max() < 1e-6
        assert (merged(tokens).logits - GPT2LMHeadModel.from_pretrained(base)(tokens).logits).abs().max() > 1e-3
    assert main(["export", str(tmp_path / "run"), "--merge"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "--merge"]) == 2
    assert "holds no adapters" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.longer
@pytest.mark.parametrize("flags", ["", "--lora-dropout 0.2 --lora-variant rslora"])
def test_graphs_of_onnx_runtime_have_the_adapters_in_them(base: Path, flags: str) -> None:
    """The covering table also contains adapters in such graphs."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    plain = run(base, None, flags, job=_OneShape)
    found = run(base, None, f"{flags} --onnx-runtime-training", job=_OneShape)
    torch.testing.assert_close(torch.tensor(found["curve"]), torch.tensor(plain["curve"]), rtol=1e-5, atol=1e-6)
    assert found["weights"].keys() == plain["weights"].keys()
    for name, weight in plain["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(base: Path, tmp_path: Path) -> None:
    whole = run(base, None, "--lora-dropout 0.3")
    run(base, tmp_path / "parts", "--lora-dropout 0.3 --train-iters 2 --lr-decay-iters 4 --keep-checkpoints 1")
    parts = run(base, tmp_path / "parts", "--lora-dropout 0.3 --resume --keep-checkpoints 1")
    assert parts["weights"].keys() == whole["weights"].keys()
    for name, weight in whole["weights"].items():
        assert torch.equal(parts["weights"][name], weight), name


@pytest.mark.slow
def test_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    run(base, tmp_path / "run", "--train-iters 2")
    other = GPT2LMHeadModel.from_pretrained(base)
    with torch.no_grad():
        other.transformer.h[1].mlp.c_fc.weight[3, 5] += 1e-6  # one element
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="were trained with other base weights"):
        run(tmp_path / "other", tmp_path / "run", "--resume")
    with pytest.raises(CheckpointError, match="were trained with other base weights"):
        run(tmp_path / "other", tmp_path / "new", f"--load {tmp_path / 'run'} --weights-only")


@pytest.mark.slow
def test_a_whole_model_and_adapters_do_not_go_on_from_each_other(base: Path, tmp_path: Path) -> None:
    run(base, tmp_path / "adapters", "--train-iters 2")
    kind = type("Job", (PretrainedJob,), {"folder": str(base)})
    flags = "--train-iters 4 --global-batch-size 8 --lr 1e-2"
    with pytest.raises(CheckpointError, match="holds adapters, and this model has none"):
        kind([*flags.split(), "--save", str(tmp_path / "adapters"), "--resume"]).fit()
    kind([*flags.split(), "--save", str(tmp_path / "whole")]).fit()
    with pytest.raises(CheckpointError, match="holds a whole model, and this run trains adapters"):
        run(base, tmp_path / "whole", "--resume --train-iters 6")


def test_a_new_head_is_trained_whole(tmp_path: Path) -> None:
    found = run(tmp_path, tmp_path / "run", job=ClassJob)
    assert {name for name in found["weights"] if "lora" not in name} == {
        "classifier.modules_to_save.default.weight",
        "classifier.modules_to_save.default.bias",
    }
    saved = load_file(tmp_path / "run/export/adapter_model.safetensors")
    assert torch.equal(
        saved["base_model.model.classifier.weight"].double(),
        found["weights"]["classifier.modules_to_save.default.weight"],
    )


def test_named_layers_alone(base: Path) -> None:
    found = run(base, None, "--lora-target-modules attn.c_attn,c_fc --lora-modules-to-save ln_f")
    adapted = {name.split(".lora_")[0] for name in found["weights"] if "lora" in name}
    assert adapted == {f"transformer.h.{block}.{layer}" for block in (0, 1) for layer in ("attn.c_attn", "mlp.c_fc")}
    assert "transformer.ln_f.modules_to_save.default.weight" in found["weights"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lora-target-modules q_proj", "GPT2LMHeadModel has no layer called q_proj"),
        ("--lora-target-modules wte,ln_1", "cannot get adapters"),
        ("--lora-modules-to-save head", "has no module called head"),
    ],
)
def test_names_that_are_not_there(base: Path, flags: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        run(base, None, flags)


def test_a_folder_of_adapters_is_a_pretrained_model(base: Path, tmp_path: Path) -> None:
    """Every command that accepts a pretrained folder reads it with the adapters merged."""
    from rapidformer_templates.models.loading import build_model
    from rapidformer_templates.planning.flag_parser import parse
    from rapidformer_templates.planning.registry import REGISTRY

    run(base, tmp_path / "run")
    config = parse(["--pretrained-model-name-or-path", str(tmp_path / "run/export")], REGISTRY.options())

    class Tokens:
        pad_token_id = 0

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 59}

    model = build_model(config, "AutoModelForCausalLM", Tokens())  # type: ignore[arg-type]
    adapted = peft.PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(base), str(tmp_path / "run/export")).eval()
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert (model.eval()(tokens).logits - adapted(tokens).logits).abs().max() < 1e-6


def test_adapters_of_a_script_get_no_others(base: Path) -> None:
    """The export would name modules inside of peft's model, which nothing could load."""

    class Job(PretrainedJob):
        folder = str(base)

        def make(self) -> torch.nn.Module:
            model: torch.nn.Module = peft.get_peft_model(super().make(), peft.LoraConfig(target_modules=["c_attn"]))
            return model

    with pytest.raises(ModelError, match="PeftModel already has adapters, and --lora-rank adds others"):
        trained(Job(STEPS.split()))


def test_all_linear_leaves_the_head_out() -> None:
    from rapidformer_templates.switches.lora.transform import targets_of

    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    ends = {name.rpartition(".")[2] for name in targets_of(model, "all-linear", None).layers}
    assert ends == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
