"""Adapters in pretrained mixtures of experts, as in peft: on linear layers, stacks of experts and routers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeForCausalLM

from rapidformer_templates import load_mixture
from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import CheckpointError, ModelError
from rapidformer_templates.models.model_files import OWN_EXPERTS
from tests.support import jobs, mixtures, parity
from tests.support.selection import by_default

peft: Any = pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")

from rapidformer_templates.switches.lora.transform import refuse_missing, targets_of  # noqa: E402 - it imports peft

STEPS = (
    "--train-iters 4 --global-batch-size 8 --micro-batch-size 4 --lr 1e-2 --log-interval 1 --lora-rank 3"
    " --moe-loss-coeff 0.2 --moe-z-loss-coeff 0.02"
)
PLAIN = "--micro-batch-size 8 --clip-grad 0 --weight-decay 0 --lr-decay-style constant"
EVERYTHING = "--lora-target-modules all-linear,experts,gate"
_BATCHES: list[dict[str, torch.Tensor]] = []


class _Recorded(mixtures.PretrainedJob):
    """Records the batches that it trains on."""

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if model.training and torch.is_grad_enabled() and hasattr(self, "model"):
            _BATCHES.append(batch)
        return super().compute_loss(model, batch)


def _with_dense_layer() -> torch.nn.Module:
    """A mixture whose first feed-forward is dense, with names that peft takes for those of experts."""
    sizes = mixtures.tiny("qwen3_moe").config.to_dict() | {"mlp_only_layers": [0]}
    torch.manual_seed(2)
    return Qwen3MoeForCausalLM(AutoConfig.for_model(**sizes)).float()


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of small pretrained mixtures."""
    folder = tmp_path_factory.mktemp("bases")
    made = {kind: mixtures.tiny(kind) for kind in sorted(OWN_EXPERTS)} | {"with a dense layer": _with_dense_layer()}
    for kind, model in made.items():
        model.save_pretrained(folder / kind)
    return {kind: folder / kind for kind in made}


def run(base: Path, folder: Path | None, flags: str = "") -> parity.Trained:
    """Train adapters. Files are written only if there is a folder for them."""
    words = [*STEPS.split(), *flags.split(), "--pretrained-model-name-or-path", str(base)]
    return parity.trained(_Recorded([*words, "--save", str(folder)] if folder else words))


def read_by_peft(base: Path, adapters: Path, **more: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, str(adapters), **more)


def _objective(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss of the task, full objective), with the terms computed row by row."""
    seen: list[torch.Tensor] = []
    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    hooks = [router.register_forward_hook(lambda module, args, output: seen.append(output[0])) for router in routers]
    task = model(**batch).loss
    for hook in hooks:
        hook.remove()
    mask = batch["attention_mask"].bool()
    others = torch.zeros(())
    for logits in seen:
        for row, real in zip(logits.unflatten(0, mask.shape), mask, strict=True):
            tokens = row[real]
            chosen = torch.nn.functional.one_hot(tokens.topk(2).indices, 4).sum(1).float()
            balance = 4 * (chosen.mean(0) / 2 * tokens.softmax(-1).mean(0)).sum()
            others = others + (0.2 * balance * len(tokens) + 0.02 * tokens.logsumexp(-1).square().sum())
    return task, task + others / mask.sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "flags"),
    [("mixtral", EVERYTHING), ("qwen2_moe", "--lora-variant rslora"), ("olmoe", "--lora-target-modules experts")],
)
def test_trains_as_a_loop_over_peft_does(kind: str, flags: str, bases: dict[str, Path], tmp_path: Path) -> None:
    run(bases[kind], tmp_path / "start", f"{flags} {PLAIN} --lr 0")
    _BATCHES.clear()
    found = run(bases[kind], None, f"{flags} {PLAIN}")
    theirs = read_by_peft(bases[kind], tmp_path / "start/export", is_trainable=True).train()
    optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=1e-2, weight_decay=0)
    losses = []
    for batch in _BATCHES[-4:]:
        task, objective = _objective(theirs, batch)
        objective.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(task.detach()))
    assert [loss for loss, _ in found["curve"]] == pytest.approx(losses, rel=1e-6)
    weights = {name.removeprefix("base_model.model."): p for name, p in theirs.named_parameters() if p.requires_grad}
    assert weights.keys() == found["weights"].keys()
    for name, weight in weights.items():
        torch.testing.assert_close(found["weights"][name].float(), weight.detach(), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", by_default(["mixtral", "with a dense layer"], [*sorted(OWN_EXPERTS), "with a dense layer"])
)
def test_peft_and_transformers_read_what_was_trained(
    kind: str, bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(bases[kind], tmp_path / "run", "--lora-target-modules all-linear,experts")
    adapted = read_by_peft(bases[kind], tmp_path / "run/export").eval()
    theirs = {n.removeprefix("base_model.model."): p for n, p in adapted.named_parameters() if "lora" in n}
    assert theirs.keys() == found["weights"].keys()
    assert all(torch.equal(found["weights"][name], weight.double()) for name, weight in theirs.items())
    assert main(["export", str(tmp_path / "run"), "--merge"]) == 0
    assert main(["export", str(tmp_path / "run"), "--step", "4", "--output", str(tmp_path / "again")]) == 0
    capsys.readouterr()
    again = read_by_peft(bases[kind], tmp_path / "again").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run/merged").eval()
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        logits = adapted(tokens).logits
        assert (merged(tokens).logits - logits).abs().max() < 1e-6
        assert torch.equal(again(tokens).logits, logits)
        with adapted.disable_adapter():
            assert (adapted(tokens).logits - logits).abs().max() > 1e-3


def test_all_linear_leaves_experts_and_routers_out(bases: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(bases["qwen2_moe"])
    targets = targets_of(model, "all-linear", None)
    assert not targets.matrices
    ends = {name.rpartition(".")[2] for name in targets.layers}
    assert ends == {*(f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")), "shared_expert_gate"}


@pytest.mark.parametrize(
    ("asked", "matrices"),
    [
        ("experts", ("experts.gate_up_proj", "experts.down_proj")),
        ("q_proj,experts.down_proj", ("experts.down_proj",)),
        ("layers.0.mlp.gate", ("gate.weight",)),
    ],
)
def test_matrices_by_the_ends_of_their_names(bases: dict[str, Path], asked: str, matrices: tuple[str, ...]) -> None:
    targets = targets_of(AutoModelForCausalLM.from_pretrained(bases["mixtral"]), asked, None)
    layers = (0,) if asked.startswith("layers") else (0, 1)
    assert targets.matrices == [f"model.layers.{layer}.mlp.{matrix}" for layer in layers for matrix in matrices]
    assert len(targets.layers) == (2 if "q_proj" in asked else 0)


def test_names_of_matrices_are_told(bases: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(bases["mixtral"])
    with pytest.raises(ModelError, match="no layer called w1") as error:
        refuse_missing(model, targets_of(model, "w1", None), "w1", None)
    assert "experts.down_proj, experts.gate_up_proj, gate.weight" in str(error.value.hint)


@pytest.mark.slow
def test_layers_before_the_first_adapter_are_counted_too(bases: dict[str, Path]) -> None:
    """The backward does not reach their routers, here that of the first layer, with or without recomputation."""
    flags = "--lora-target-modules layers.1.mlp.experts"
    whole = run(bases["mixtral"], None, f"{flags} --micro-batch-size 8")
    parts = run(bases["mixtral"], None, f"{flags} --checkpoint-activations")
    loads = [found["summary"]["receipts"]["expert_load_by_layer"] for found in (whole, parts)]
    assert loads[0] == loads[1]
    assert all(sum(layer) == pytest.approx(4, abs=1e-3) for layer in loads[0])
    losses = [torch.tensor(mixtures.losses_of(found["lines"])) for found in (whole, parts)]
    assert len(losses[0]) == 4
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_beside_the_same_base(bases: dict[str, Path], tmp_path: Path) -> None:
    whole = run(bases["mixtral"], None, EVERYTHING)
    run(bases["mixtral"], tmp_path / "parts", f"{EVERYTHING} --train-iters 2 --lr-decay-iters 4 --keep-checkpoints 1")
    other = AutoModelForCausalLM.from_pretrained(bases["mixtral"])
    with torch.no_grad():
        other.model.layers[1].mlp.experts.down_proj[3, 5, 7] += 1e-6  # one element of one expert
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="were trained with other base weights"):
        run(tmp_path / "other", tmp_path / "parts", f"{EVERYTHING} --resume")
    parts = run(bases["mixtral"], tmp_path / "parts", f"{EVERYTHING} --resume --keep-checkpoints 1")
    assert parts["weights"].keys() == whole["weights"].keys()
    for name, weight in whole["weights"].items():
        assert "lora" in name
        assert torch.equal(parts["weights"][name], weight), name


def test_what_peft_lacks_beside_matrices_is_refused_by_name(bases: dict[str, Path]) -> None:
    with pytest.raises(
        ModelError,
        match=r"with --lora-dropout together with matrices that are not layers: "
        r".*gate\.weight",
    ):
        run(bases["mixtral"], None, "--lora-target-modules gate --lora-dropout 0.1")


@pytest.mark.slow
def test_the_export_says_what_peft_puts_where(bases: dict[str, Path], tmp_path: Path) -> None:
    run(bases["with a dense layer"], tmp_path / "run", "--lora-target-modules all-linear,experts")
    saved = json.loads((tmp_path / "run/export/adapter_config.json").read_text())
    dense = {f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    stacks = {f"model.layers.1.mlp.experts.{part}_proj" for part in ("gate_up", "down")}
    assert set(saved["target_parameters"]) == dense | stacks


class _LlamaJob(jobs.CausalJob):
    """A dense model."""

    def make(self) -> torch.nn.Module:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=jobs.VOCABULARY, num_key_value_heads=2, **sizes))


jobs.OTHERS["llama"] = _LlamaJob


class _OwnJob(jobs.CausalJob):
    """A mixture of this library, loaded from a folder."""

    def build_model(self) -> torch.nn.Module:
        return load_mixture(self.config.model.pretrained_model_name_or_path).train()  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_mixture_of_our_own_gets_adapters_like_any_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, flags = tmp_path / "mixture/export", "--train-iters 2 --global-batch-size 8 --num-experts 4"
    parity.train("llama", False, f"{flags} --moe-capacity-factor 4", "--save", str(tmp_path / "mixture"))
    words = f"{STEPS} {EVERYTHING} --pretrained-model-name-or-path {base} --save {tmp_path}/run"
    found = parity.trained(_OwnJob(words.split()))
    assert found["summary"]["receipts"]["adapted_layers"] == 2 * (4 + 3 + 1)  # attention, three stacks, gate
    adapted = peft.PeftModel.from_pretrained(load_mixture(base), str(tmp_path / "run/export")).eval()
    assert main(["export", str(tmp_path / "run"), "--merge"]) == 0
    assert main(["export", str(tmp_path / "run"), "--merge", "--step", "4", "--output", str(tmp_path / "again")]) == 0
    capsys.readouterr()
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        logits = adapted(tokens).logits
        for folder in (tmp_path / "run/merged", tmp_path / "again"):
            assert (load_mixture(folder)(tokens).logits - logits).abs().max() < 1e-6
        assert (load_mixture(base)(tokens).logits - logits).abs().max() > 1e-3


def test_peft_has_not_both_beside_matrices_and_conv1d(tmp_path: Path) -> None:
    flags = "--train-iters 1 --global-batch-size 8 --num-experts 4"
    parity.train("causal", False, flags, "--save", str(tmp_path / "mixture"))
    words = f"{STEPS} {EVERYTHING} --pretrained-model-name-or-path {tmp_path}/mixture/export"
    with pytest.raises(ModelError, match="layers of the kind Conv1D together with matrices"):
        parity.trained(_OwnJob(words.split()))


def test_new_experts_are_not_frozen() -> None:
    with pytest.raises(ModelError, match="new experts are untrained"):
        parity.train("causal", False, f"{STEPS} --num-experts 4")


@pytest.mark.slow
@pytest.mark.parametrize("coding", by_default(["int4"], ["int8", "int4"]))
def test_experts_in_codes_train_as_the_read_ones_do(coding: str, bases: dict[str, Path], tmp_path: Path) -> None:
    read = AutoModelForCausalLM.from_pretrained(bases["qwen2_moe"])
    with torch.no_grad():
        for name, parameter in read.named_parameters():
            if ".experts." in name or (
                ".layers." in name and parameter.ndim == 2 and not name.endswith("mlp.gate.weight")
            ):
                parameter.copy_(_read(parameter, coding))
    read.save_pretrained(tmp_path / "read")
    plain = run(tmp_path / "read", None, EVERYTHING)
    found = run(bases["qwen2_moe"], None, f"{EVERYTHING} --quantize-base {coding} --checkpoint-activations")
    torch.testing.assert_close(torch.tensor(found["curve"]), torch.tensor(plain["curve"]), rtol=1e-5, atol=1e-7)
    for name, weight in plain["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-3, atol=1e-5)
    receipts = found["summary"]["receipts"]
    assert receipts["adapted_routers"] == 2
    assert receipts["quantized_layers"] == receipts["adapted_layers"] - 2 == 2 * (4 + 4 + 2)
    assert receipts["frozen_parameters"] == plain["summary"]["receipts"]["frozen_parameters"]


def _read(weight: torch.Tensor, coding: str) -> torch.Tensor:
    """Quantize and dequantize a weight: to the nearest multiple of a step per row or per block of 64."""
    lowest, highest = (-127, 127) if coding == "int8" else (-8, 7)
    blocks = weight.flatten().split(weight.shape[-1] if coding == "int8" else 64)
    steps = [part.abs().max() / ((highest - lowest) / 2) for part in blocks]
    read = [(part * (1 / step)).round().clamp(lowest, highest) * step for part, step in zip(blocks, steps, strict=True)]
    return torch.cat(read).view(weight.shape)
