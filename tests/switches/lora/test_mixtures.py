"""Adapters in pretrained mixtures of experts, as in peft. Exports of each task open with the Auto classes of peft."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeForCausalLM

from rapidformer_templates import Data, Trainer, load_mixture
from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.model_files import OWN_EXPERTS
from tests.support import jobs, mixtures, parity
from tests.support.adapters import Recording, read_codes, train_by_hand
from tests.support.messages import Says
from tests.support.selection import by_default

peft: Any = pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")

from rapidformer_templates.switches.lora.transform import refuse_missing, targets_of  # noqa: E402 - it imports peft

STEPS = (
    "--train-iters 4 --global-batch-size 8 --micro-batch-size 4 --lr 1e-2 --log-interval 1 --lora-rank 3"
    " --moe-loss-coeff 0.2 --moe-z-loss-coeff 0.02"
)
PLAIN = "--micro-batch-size 8 --clip-grad 0 --weight-decay 0 --lr-decay-style constant"
EVERYTHING = "--lora-target-modules all-linear,experts,gate"
KINDS = [("mixtral", EVERYTHING), ("qwen2_moe", "--lora-variant rslora"), ("olmoe", "--lora-target-modules experts")]


class _Recorded(Recording, mixtures.PretrainedJob):
    pass


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


def _job(base: Path, folder: Path | None, flags: str = "") -> Any:
    words = [*STEPS.split(), *flags.split(), "--pretrained-model-name-or-path", str(base)]
    return _Recorded([*words, "--save", str(folder)] if folder else words)


def run(base: Path, folder: Path | None, flags: str = "") -> parity.Trained:
    """Train adapters. Files are written only if there is a folder for them."""
    return parity.trained(_job(base, folder, flags))


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
    by_default(KINDS[:1], KINDS),
)
def test_trains_as_a_loop_over_peft_does(kind: str, flags: str, bases: dict[str, Path], tmp_path: Path) -> None:
    run(bases[kind], tmp_path / "start", f"{flags} {PLAIN} --lr 0")
    job = _job(bases[kind], None, f"{flags} {PLAIN}")
    found = parity.trained(job)
    theirs = read_by_peft(bases[kind], tmp_path / "start/export", is_trainable=True).train()
    losses, weights = train_by_hand(theirs, job.batches[-4:], _objective)
    assert [loss for loss, _ in found["curve"]] == pytest.approx(losses, rel=1e-6)
    assert weights.keys() == found["weights"].keys()
    for name, weight in weights.items():
        torch.testing.assert_close(found["weights"][name].float(), weight, rtol=1e-3, atol=1e-5)


@pytest.mark.longer
@pytest.mark.parametrize("kind", [*sorted(OWN_EXPERTS), "with a dense layer"])
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
    if kind == "with a dense layer":
        saved = json.loads((tmp_path / "run/export/adapter_config.json").read_text())
        dense = {f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
        stacks = {f"model.layers.1.mlp.experts.{part}_proj" for part in ("gate_up", "down")}
        assert set(saved["target_parameters"]) == dense | stacks


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


def test_errors_name_the_matrices(bases: dict[str, Path], says: Says) -> None:
    model = AutoModelForCausalLM.from_pretrained(bases["mixtral"])
    with says(ModelError):
        refuse_missing(model, targets_of(model, "w1", None), "w1", None)
    with says(ModelError):  # peft has no dropout for matrices that are not layers
        run(bases["mixtral"], None, "--lora-target-modules gate --lora-dropout 0.1")


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


@pytest.mark.longer
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


def test_what_peft_does_not_have_is_refused(tmp_path: Path, says: Says) -> None:
    flags = "--train-iters 1 --global-batch-size 8 --num-experts 4"
    parity.train("causal", False, flags, "--save", str(tmp_path / "mixture"))
    words = f"{STEPS} {EVERYTHING} --pretrained-model-name-or-path {tmp_path}/mixture/export"
    with says(ModelError):
        parity.trained(_OwnJob(words.split()))


def test_new_experts_are_not_frozen(says: Says) -> None:
    with says(ModelError):
        parity.train("causal", False, f"{STEPS} --num-experts 4")


@pytest.mark.longer
@pytest.mark.parametrize("coding", ["int8", "int4"])
def test_experts_in_codes_train_as_the_read_ones_do(coding: str, bases: dict[str, Path], tmp_path: Path) -> None:
    read = AutoModelForCausalLM.from_pretrained(bases["qwen2_moe"])
    with torch.no_grad():
        for name, parameter in read.named_parameters():
            if ".experts." in name or (
                ".layers." in name and parameter.ndim == 2 and not name.endswith("mlp.gate.weight")
            ):
                parameter.copy_(read_codes(parameter, coding))
    read.save_pretrained(tmp_path / "read")
    plain = run(tmp_path / "read", None, EVERYTHING)
    found = run(bases["qwen2_moe"], None, f"{EVERYTHING} --quantize-base {coding} --checkpoint-activations")
    parity.assert_follows(found, plain, 1e-5, 1e-7, weights=(1e-3, 1e-5))
    receipts = found["summary"]["receipts"]
    assert receipts["adapted_routers"] == 2
    assert receipts["quantized_layers"] == receipts["adapted_layers"] - 2 == 2 * (4 + 4 + 2)
    assert receipts["frozen_parameters"] == plain["summary"]["receipts"]["frozen_parameters"]


VOCABULARY = 67
ALONE_SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT = transformers.BertConfig(vocab_size=VOCABULARY, **ALONE_SIZES)
LLAMA = transformers.LlamaConfig(vocab_size=VOCABULARY, **ALONE_SIZES, bos_token_id=1, eos_token_id=2, pad_token_id=0)


class Opened(NamedTuple):
    """Adapters of a model class.

    Attributes:
        model: the class that is trained.
        base: the model in the folder that the run starts from.
        classes: peft's and transformers' classes that open the export.
        labels: the number of labels of a new head.
        flags: of the run.
    """

    model: type[transformers.PreTrainedModel]
    base: transformers.PreTrainedModel
    classes: tuple[str, str]
    labels: int | None = None
    flags: str = ""


CAUSAL = ("AutoPeftModelForCausalLM", "AutoModelForCausalLM")
SEQUENCES = ("AutoPeftModelForSequenceClassification", "AutoModelForSequenceClassification")


def kinds() -> dict[str, Opened]:
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(LLAMA)
    return {
        "trained head": Opened(transformers.LlamaForCausalLM, llama, CAUSAL, flags="--lora-modules-to-save lm_head"),
        "classes": Opened(
            transformers.BertForSequenceClassification, transformers.BertModel(BERT), SEQUENCES, labels=3
        ),
        "masked": Opened(
            transformers.BertForMaskedLM, transformers.BertForMaskedLM(BERT), ("AutoPeftModel", "AutoModelForMaskedLM")
        ),
    }


def _train(kind: Opened, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Train adapters on random tokens. Return inputs, and the outputs of the trained model."""
    ids = torch.randint(3, VOCABULARY, (4, 9))
    kind.base.save_pretrained(folder / "base")

    class Job(Trainer):
        def build_data(self) -> Data:
            return Data(train=list(ids), collate=lambda rows: {"input_ids": torch.stack(rows)})

        def build_model(self) -> nn.Module:
            options = {"num_labels": kind.labels} if kind.labels else {}
            model: nn.Module = kind.model.from_pretrained(folder / "base", **options)
            return model

        def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            outputs: torch.Tensor = model(**batch)[0]
            return (outputs - 1).square().mean()

    flags = f"--lora-rank 2 --train-iters 2 --lr 0.1 --micro-batch-size 4 --device cpu {kind.flags}"
    job = Job([*flags.split(), "--save", str(folder / "run")])
    job.fit()
    with torch.no_grad():
        before, after = (model.eval()(ids)[0] for model in (job.build_model(), job.model))
    assert (after - before).abs().max() > 1e-2  # otherwise the base alone would pass the test
    return ids, after


@pytest.mark.longer
def test_peft_and_transformers_open_the_adapters_of_each_task(tmp_path: Path) -> None:
    for name, kind in kinds().items():
        folder = tmp_path / name.replace(" ", "-")
        ids, outputs = _train(kind, folder)
        settings = json.loads((folder / "run/export/adapter_config.json").read_text())
        assert (settings["task_type"] is None) == (name == "masked")
        options = {"num_labels": kind.labels} if kind.labels else {}
        for auto in kind.classes:
            package: Any = peft if "Peft" in auto else transformers
            model = getattr(package, auto).from_pretrained(folder / "run/export", **options).eval()
            with torch.no_grad():
                torch.testing.assert_close(model(ids)[0], outputs, rtol=0, atol=1e-5)
