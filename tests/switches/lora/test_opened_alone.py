"""Exported adapters open with peft's and transformers' Auto classes, in a program that does not import this library."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from rapidformer_templates import Data, Trainer

pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
pytestmark = pytest.mark.slow

VOCABULARY = 67
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT = BertConfig(vocab_size=VOCABULARY, **SIZES)
LLAMA = LlamaConfig(vocab_size=VOCABULARY, **SIZES, bos_token_id=1, eos_token_id=2, pad_token_id=0)


class Kind(NamedTuple):
    """Adapters of a model class.

    Attributes:
        model: the class that is trained.
        base: the model in the folder that the run starts from.
        classes: peft's and transformers' classes that open the export.
        labels: the number of labels of a new head.
        flags: of the run.
    """

    model: type[PreTrainedModel]
    base: PreTrainedModel
    classes: tuple[str, str]
    labels: int | None = None
    flags: str = ""


CAUSAL = ("AutoPeftModelForCausalLM", "AutoModelForCausalLM")
SEQUENCES = ("AutoPeftModelForSequenceClassification", "AutoModelForSequenceClassification")
ANSWERS = ("AutoPeftModelForQuestionAnswering", "AutoModelForQuestionAnswering")
TEXTS = ("AutoPeftModelForSeq2SeqLM", "AutoModelForSeq2SeqLM")
T5 = T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
MIXTRAL = MixtralConfig(vocab_size=VOCABULARY, **SIZES, num_key_value_heads=2, num_local_experts=4)


SHORT, OTHERS = ("trained head", "classes", "masked"), ("experts", "reward", "answers", "texts")


def kinds() -> dict[str, Kind]:
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LLAMA)
    return {
        "trained head": Kind(LlamaForCausalLM, llama, CAUSAL, flags="--lora-modules-to-save lm_head"),
        "experts": Kind(
            MixtralForCausalLM, MixtralForCausalLM(MIXTRAL), CAUSAL, flags="--lora-target-modules all-linear,experts"
        ),
        "reward": Kind(LlamaForSequenceClassification, llama, SEQUENCES, labels=1),
        "classes": Kind(BertForSequenceClassification, BertModel(BERT), SEQUENCES, labels=3),
        "answers": Kind(BertForQuestionAnswering, BertModel(BERT), ANSWERS),
        "masked": Kind(BertForMaskedLM, BertForMaskedLM(BERT), ("AutoPeftModel", "AutoModelForMaskedLM")),
        "texts": Kind(T5ForConditionalGeneration, T5ForConditionalGeneration(T5), TEXTS),
    }


OPEN = """
import json, sys
import peft, torch, transformers

differences = {}
for name, (folder, classes, labels) in json.load(open(sys.argv[1])).items():
    expected = torch.load(f"{folder}/outputs.pt")
    options = {"num_labels": labels} if labels else {}
    for kind in classes:
        package = peft if "Peft" in kind else transformers
        model = getattr(package, kind).from_pretrained(f"{folder}/run/export", **options).eval()
        with torch.no_grad():
            found = model(**expected["inputs"])[0]
        differences[f"{name}: {kind}"] = float((found - expected["outputs"]).abs().max())
assert not any(name.startswith("rapidformer") for name in sys.modules)
print(json.dumps(differences))
"""
"""The program that opens the exports, and prints how much their outputs differ from those of the trained models."""


def _train(kind: Kind, folder: Path) -> None:
    """Train adapters on random tokens, and save the outputs of the trained model."""
    ids = torch.randint(3, VOCABULARY, (4, 9))
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if kind.model is T5ForConditionalGeneration else {})}
    kind.base.save_pretrained(folder / "base")

    class Job(Trainer):
        def build_data(self) -> Data:
            rows = [{name: tensor[i] for name, tensor in inputs.items()} for i in range(len(ids))]
            return Data(
                train=rows, collate=lambda rows: {name: torch.stack([r[name] for r in rows]) for name in inputs}
            )

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
        before, after = (model.eval()(**inputs)[0] for model in (job.build_model(), job.model))
    assert (after - before).abs().max() > 1e-2  # otherwise the base alone would pass the test
    torch.save({"inputs": inputs, "outputs": after}, folder / "outputs.pt")


@pytest.mark.parametrize("names", [SHORT, pytest.param(OTHERS, marks=pytest.mark.longer)], ids=["short", "others"])
def test_peft_and_transformers_open_the_adapters_of_each_task(names: Sequence[str], tmp_path: Path) -> None:
    runs = {}
    for name in names:
        kind = kinds()[name]
        folder = tmp_path / name.replace(" ", "-")
        _train(kind, folder)
        runs[name] = (str(folder), kind.classes, kind.labels)
        settings = json.loads((folder / "run/export/adapter_config.json").read_text())
        assert (settings["task_type"] is None) == (name == "masked")
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    program = [sys.executable, "-c", OPEN, str(tmp_path / "runs.json")]
    answer = subprocess.run(program, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    differences = json.loads(answer.splitlines()[-1])
    assert len(differences) == 2 * len(runs)
    assert differences == pytest.approx(dict.fromkeys(differences, 0.0), abs=1e-5)
