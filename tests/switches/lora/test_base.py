"""Adapters whose base has moved or changed: every command that reads the base names it, and ``--base`` replaces it."""

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file

from rapidformer_templates import Trainer
from rapidformer_templates.commands.main import main
from rapidformer_templates.switches.lora.transform import targets_of
from tests.support.messages import Says
from tests.support.preference_runs import pretrained, words
from tests.support.saved_models import open_saved
from tests.support.selection import by_default
from tests.support.texts import write_jsonl

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, gpt_folder: Path) -> Path:
    """A run with adapters. Its base, ``start``, is now in ``moved``."""
    folder = tmp_path_factory.mktemp("base")
    start = pretrained(folder / "start", gpt_folder)
    write_jsonl(folder / "train.jsonl", [{"text": words(3 + i % 9, i)} for i in range(12)])
    write_jsonl(folder / "valid.jsonl", [{"text": words(4, i)} for i in range(5)])
    flags = f"--task causal_lm --lora-rank 2 --train-iters 2 --lr 1e-2 --seq-length 32 --data-dir {folder}"
    Trainer(f"{flags} --pretrained-model-name-or-path {start} --save {folder / 'run'}".split()).fit()
    (folder / "rows.jsonl").write_text(json.dumps({"text": words(4, 1)}) + "\n")
    start.rename(folder / "moved")
    return folder / "run"


OWN = {
    "evaluate": "evaluate {run}",
    "predict": "predict {run} --input {root}/rows.jsonl --max-new-tokens 2 --output {out}.jsonl",
    "chat": "chat {run} --max-new-tokens 2",
    "export": "export {run} --merge --output {out}",
    "train": "--task causal_lm --train-iters 1 --seq-length 32 --lr 1e-3 --no-save --data-dir {root}"
    " --pretrained-model-name-or-path {run}/export",
}
"""Commands that read the base of adapters."""


@pytest.fixture(autouse=True)
def a_question() -> Iterator[None]:
    with mock.patch("sys.stdin", io.StringIO("the cat\n")):
        yield


def _command(name: str, run: Path, folder: Path) -> str:
    return OWN[name].format(run=run, root=run.parent, out=folder / "out")


@pytest.mark.parametrize("command", OWN)
def test_a_base_that_has_moved_is_named(command: str, run: Path, tmp_path: Path, says: Says) -> None:
    says.command(_command(command, run, tmp_path), ROOT=run.parent)


@pytest.mark.parametrize("command", by_default(["evaluate", "export", "train"], OWN))
def test_the_new_place_can_be_named(
    command: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{_command(command, run, tmp_path)} --base {run.parent / 'moved'}".split()
    assert main([*words, *(["--json"] if command == "evaluate" else [])]) == 0
    if command == "evaluate":
        metrics = json.loads(capsys.readouterr().out)
        expected = json.loads((run / "summary.json").read_text())["metrics"]["eval_loss"]
        assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)
    if command == "export":
        plain = transformers.AutoModelForCausalLM.from_pretrained(run.parent / "moved")
        merged = PeftModel.from_pretrained(plain, run / "export").merge_and_unload()
        ids = torch.arange(4)[None]
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
        torch.testing.assert_close(found, merged(ids).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("command", by_default(["evaluate", "export", "train"], OWN))
def test_a_base_with_other_weights_is_refused(command: str, run: Path, tmp_path: Path, says: Says) -> None:
    other = tmp_path / "other"
    shutil.copytree(run.parent / "moved", other)
    weights = load_file(other / "model.safetensors")
    name = next(name for name in weights if name.endswith("c_attn.weight"))
    weights[name][0, 0] += 1e-3
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    says.command(f"{_command(command, run, tmp_path)} --base {other}", ROOT=run.parent)


def test_python_names_it_too(run: Path) -> None:
    opened = open_saved(run, base=run.parent / "moved")
    assert json.loads((run / "summary.json").read_text())["parameters"] > opened.model.num_parameters()


@pytest.mark.parametrize(
    "words",
    [
        "evaluate {root}/moved --base {root}/moved --data-dir {root}",
        "evaluate {root}/run --base {root}/run",
        "export {root}/run --base {root}/moved --output {root}/run/new",
    ],
)
def test_a_base_that_nobody_reads_is_refused(words: str, run: Path, says: Says) -> None:
    says.command(words.format(root=run.parent), ROOT=run.parent)


BODIES = {
    "bert": lambda size: transformers.BertModel(
        transformers.BertConfig(**SIZES, vocab_size=size), add_pooling_layer=False
    ),
    "distilbert": lambda size: transformers.DistilBertModel(
        transformers.DistilBertConfig(dim=16, n_layers=1, n_heads=2, vocab_size=size)
    ),
}
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
NEW = {"bert": "bert.pooler.dense", "distilbert": "pre_classifier"}
"""The layer in front of the head, which the body lacks."""


@pytest.mark.parametrize("kind", BODIES)
def test_layers_that_the_base_lacks_are_trained_and_exported(kind: str, bert_folder: Path, tmp_path: Path) -> None:
    """With frozen random values that no file contains, the export would be another model."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert_folder)
    torch.manual_seed(0)
    BODIES[kind](len(tokenizer)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    write_jsonl(tmp_path / "train.jsonl", [{"text": words(3 + i % 9, i), "label": "abc"[i % 3]} for i in range(12)])
    flags = f"--task sequence_classification --lora-rank 2 --train-iters 2 --lr 1e-2 --data-dir {tmp_path}"
    name = f"--pretrained-model-name-or-path {tmp_path / 'base'} --save {tmp_path / 'run'}"
    Trainer(f"{flags} {name} --device cpu --validation-fraction 0.25".split()).fit()
    weights = load_file(tmp_path / "run/export/adapter_model.safetensors")
    assert {name for name in weights if "lora" not in name} == {
        f"base_model.model.{module}.{part}" for module in (NEW[kind], "classifier") for part in ("weight", "bias")
    }
    base = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3)
    by_peft = PeftModel.from_pretrained(base, tmp_path / "run/export").eval()
    ours: Any = open_saved(str(tmp_path / "run")).model
    batch = tokenizer(words(5, 1), return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(by_peft(**batch).logits, ours.eval()(**batch).logits)


def test_a_pretrained_layer_whose_name_ends_like_the_head_is_trained_whole_too() -> None:
    """peft would take pre_classifier for the head and for a layer with an adapter at once."""
    model = transformers.DistilBertForSequenceClassification(
        transformers.DistilBertConfig(dim=16, n_layers=1, n_heads=2, vocab_size=9)
    )
    targets = targets_of(model, "all-linear", None)
    assert targets.trained_whole == ["classifier", "pre_classifier"]
    assert not any("classifier" in name for name in targets.layers)
    assert len(targets.layers) == 6
