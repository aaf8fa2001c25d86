"""Exported adapters open with peft's and transformers' Auto classes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn

from rapidformer_templates import Data, Trainer

peft: Any = pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
pytestmark = pytest.mark.slow

VOCABULARY = 67
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT = transformers.BertConfig(vocab_size=VOCABULARY, **SIZES)
LLAMA = transformers.LlamaConfig(vocab_size=VOCABULARY, **SIZES, bos_token_id=1, eos_token_id=2, pad_token_id=0)


class Kind(NamedTuple):
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
ANSWERS = ("AutoPeftModelForQuestionAnswering", "AutoModelForQuestionAnswering")
TEXTS = ("AutoPeftModelForSeq2SeqLM", "AutoModelForSeq2SeqLM")
T5 = transformers.T5Config(
    vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
)
MIXTRAL = transformers.MixtralConfig(vocab_size=VOCABULARY, **SIZES, num_key_value_heads=2, num_local_experts=4)


SHORT, OTHERS = ("trained head", "classes", "masked"), ("experts", "reward", "answers", "texts")


def kinds() -> dict[str, Kind]:
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(LLAMA)
    return {
        "trained head": Kind(transformers.LlamaForCausalLM, llama, CAUSAL, flags="--lora-modules-to-save lm_head"),
        "experts": Kind(
            transformers.MixtralForCausalLM,
            transformers.MixtralForCausalLM(MIXTRAL),
            CAUSAL,
            flags="--lora-target-modules all-linear,experts",
        ),
        "reward": Kind(transformers.LlamaForSequenceClassification, llama, SEQUENCES, labels=1),
        "classes": Kind(transformers.BertForSequenceClassification, transformers.BertModel(BERT), SEQUENCES, labels=3),
        "answers": Kind(transformers.BertForQuestionAnswering, transformers.BertModel(BERT), ANSWERS),
        "masked": Kind(
            transformers.BertForMaskedLM, transformers.BertForMaskedLM(BERT), ("AutoPeftModel", "AutoModelForMaskedLM")
        ),
        "texts": Kind(transformers.T5ForConditionalGeneration, transformers.T5ForConditionalGeneration(T5), TEXTS),
    }


def _train(kind: Kind, folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Train adapters on random tokens. Return inputs, and the outputs of the trained model."""
    ids = torch.randint(3, VOCABULARY, (4, 9))
    inputs = {
        "input_ids": ids,
        **({"decoder_input_ids": ids} if kind.model is transformers.T5ForConditionalGeneration else {}),
    }
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
    return inputs, after


@pytest.mark.parametrize("names", [SHORT, pytest.param(OTHERS, marks=pytest.mark.longer)], ids=["short", "others"])
def test_peft_and_transformers_open_the_adapters_of_each_task(names: Sequence[str], tmp_path: Path) -> None:
    for name in names:
        kind = kinds()[name]
        folder = tmp_path / name.replace(" ", "-")
        inputs, outputs = _train(kind, folder)
        settings = json.loads((folder / "run/export/adapter_config.json").read_text())
        assert (settings["task_type"] is None) == (name == "masked")
        options = {"num_labels": kind.labels} if kind.labels else {}
        for auto in kind.classes:
            package: Any = peft if "Peft" in auto else transformers
            model = getattr(package, auto).from_pretrained(folder / "run/export", **options).eval()
            with torch.no_grad():
                torch.testing.assert_close(model(**inputs)[0], outputs, rtol=0, atol=1e-5)
