"""Adapters: parity with peft on the same weights, their export, their merging, and the base that they belong to."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel

from rapidformer_templates.errors import CheckpointError, ModelError
from tests.support.adapters import Recording, train_by_hand
from tests.support.jobs import ClassJob, PretrainedJob
from tests.support.messages import Says
from tests.support.parity import Trained, assert_follows, trained
from tests.support.selection import by_default

peft: Any = pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")

STEPS = "--train-iters 4 --global-batch-size 8 --micro-batch-size 4 --lr 1e-2 --log-interval 1 --lora-rank 4"


def _job(base: Path, folder: Path | None, flags: str = "", job: type = PretrainedJob) -> Any:
    kind = type("Job", (job,), {"folder": str(base)})
    return kind([*STEPS.split(), *flags.split(), *(["--save", str(folder)] if folder else [])])


def run(base: Path, folder: Path | None, flags: str = "", job: type = PretrainedJob) -> Trained:
    """Train adapters. Files are written only if there is a folder for them."""
    return trained(_job(base, folder, flags, job))


class _Recorded(Recording, PretrainedJob):
    pass


PLAIN = "--micro-batch-size 8 --clip-grad 0 --weight-decay 0 --lr-decay-style constant"


@pytest.mark.slow
@pytest.mark.parametrize("variant", by_default(["dora"], ["lora", "rslora", "dora"]))
def test_trains_as_a_loop_over_peft_does(base: Path, tmp_path: Path, variant: str) -> None:
    flags = f"--lora-variant {variant} --lora-alpha 12 {PLAIN}"
    run(base, tmp_path / "start", f"{flags} --lr 0")
    job = _job(base, tmp_path / "run", flags, _Recorded)
    found = trained(job)
    saved = json.loads((tmp_path / "run/export/adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"]) == (4, 12)
    assert (saved["use_rslora"], saved["use_dora"]) == (variant == "rslora", variant == "dora")
    theirs = peft.PeftModel.from_pretrained(
        GPT2LMHeadModel.from_pretrained(base, dtype=torch.float32), str(tmp_path / "start/export"), is_trainable=True
    ).train()
    losses, weights = train_by_hand(theirs, job.batches[-4:])
    assert [loss for loss, _ in found["curve"]] == pytest.approx(losses, rel=1e-6)
    assert weights.keys() == found["weights"].keys()
    for name, weight in weights.items():
        torch.testing.assert_close(found["weights"][name].float(), weight, rtol=1e-4, atol=1e-5)


WIDENED = ("--mixed-precision bf16 --lora-modules-to-save ln_f", "--lora-variant lora", "--lora-variant dora")


class _InHalf(_Recorded):
    def make(self) -> torch.nn.Module:
        return super().make().bfloat16()


@pytest.mark.parametrize("flags", by_default(WIDENED[:1], WIDENED))
def test_adapters_of_a_16_bit_model_are_fp32(base: Path, tmp_path: Path, flags: str) -> None:
    """peft converts them as well, but not the modules that are trained whole."""
    run(base, tmp_path / "start", f"{flags} {PLAIN} --lr 0", _InHalf)
    job = _job(base, None, f"{flags} {PLAIN}", _InHalf)
    found = trained(job)
    theirs = peft.PeftModel.from_pretrained(
        GPT2LMHeadModel.from_pretrained(base, dtype=torch.bfloat16), str(tmp_path / "start/export"), is_trainable=True
    ).train()
    is_mixed = "mixed" in flags
    for parameter in theirs.parameters() if is_mixed else ():
        parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data

    def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_mixed):
            loss = model(**batch).loss
        return loss, loss

    losses, weights = train_by_hand(theirs, job.batches[-4:], loss_of)
    assert [loss for loss, _ in found["curve"]] == pytest.approx(losses, rel=1e-5)
    assert weights.keys() == found["weights"].keys()
    for name, weight in weights.items():
        torch.testing.assert_close(found["weights"][name].float(), weight.float(), rtol=1e-3, atol=1e-4)
    receipts = found["summary"]["receipts"]
    assert receipts["frozen_bytes"] == 2 * receipts["frozen_parameters"]
    assert receipts["trained_bytes"] == 4 * receipts["trained_parameters"]


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


@pytest.mark.longer
def test_a_base_in_half_the_bytes_trains_to_the_same_bits(base: Path) -> None:
    """Autocast rounds the same weights to the same bits before each product."""
    whole = run(base, None, "--mixed-precision bf16")
    half = run(base, None, "--mixed-precision bf16 --quantize-base half")
    assert_follows(half, whole, 0, 0)
    sizes = [found["summary"]["receipts"]["frozen_bytes"] for found in (half, whole)]
    layers = 2 * (16 * 48 + 48 + 16 * 16 + 16 + 16 * 64 + 64 + 64 * 16 + 16)
    assert sizes[1] - sizes[0] == 2 * layers


def test_transformers_saves_no_adapters_that_it_cannot_read(base: Path, tmp_path: Path, says: Says) -> None:
    job = _job(base, None, "--train-iters 1", PretrainedJob)
    job.fit()
    model: Any = job.model
    with says(ModelError):
        model.save_pretrained(tmp_path / "saved")


def test_what_cannot_be_merged_is_refused(base: Path, tmp_path: Path, says: Says) -> None:
    run(base, tmp_path / "run")
    (tmp_path / "run/merged").mkdir()
    for folder in (tmp_path / "run", tmp_path):
        says.command(f"export {folder} --merge")


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
def test_adapters_go_on_with_the_scale_that_they_were_trained_with(
    base: Path, tmp_path: Path, says: Says, capsys: pytest.CaptureFixture[str]
) -> None:
    run(base, tmp_path / "run", "--train-iters 2")
    for flags in ("--lora-alpha 64", "--lora-variant rslora"):
        with says(CheckpointError):
            run(base, tmp_path / "run", f"--resume {flags}")
    run(base, tmp_path / "run", "--resume --lora-alpha 8 --train-iters 3")  # the default
    capsys.readouterr()
    run(base, tmp_path / "new", f"--load {tmp_path / 'run'} --weights-only --lora-alpha 64 --train-iters 1")
    assert "they were trained with --lora-alpha 8.0, not 64.0" in capsys.readouterr().err


@pytest.mark.slow
def test_a_whole_model_and_adapters_do_not_go_on_from_each_other(base: Path, tmp_path: Path, says: Says) -> None:
    run(base, tmp_path / "adapters", "--train-iters 2")
    kind = type("Job", (PretrainedJob,), {"folder": str(base)})
    flags = "--train-iters 4 --global-batch-size 8 --lr 1e-2"
    with says(CheckpointError):
        kind([*flags.split(), "--save", str(tmp_path / "adapters"), "--resume"]).fit()
    kind([*flags.split(), "--save", str(tmp_path / "whole")]).fit()
    with says(CheckpointError):
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


def test_the_name_of_a_part_means_its_linear_layers(base: Path) -> None:
    found = run(base, None, "--lora-target-modules h.1,attn.c_proj")
    adapted = {name.split(".lora_")[0] for name in found["weights"] if "lora" in name}
    inner = {f"transformer.h.1.{layer}" for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    assert adapted == {*inner, "transformer.h.0.attn.c_proj"}


@pytest.mark.parametrize(
    "flags", ["--lora-target-modules q_proj", "--lora-target-modules wte,ln_1", "--lora-modules-to-save head"]
)
def test_names_that_are_not_there(base: Path, flags: str, says: Says) -> None:
    with says(ModelError):
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


def test_adapters_of_a_script_get_no_others(base: Path, says: Says) -> None:
    """The export would name modules inside of peft's model, which nothing could load."""

    class Job(PretrainedJob):
        folder = str(base)

        def make(self) -> torch.nn.Module:
            model: torch.nn.Module = peft.get_peft_model(super().make(), peft.LoraConfig(target_modules=["c_attn"]))
            return model

    with says(ModelError):
        trained(Job(STEPS.split()))
