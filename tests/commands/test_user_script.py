"""``--user-script`` of ``evaluate`` and ``predict``: the hooks of a run's script, and the parts of its own data."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertModel

from rapidformer_templates.commands.main import main
from tests.support.messages import Says
from tests.support.programs import run_script
from tests.support.texts import write_jsonl

OWN = """
from dataclasses import dataclass
import numpy as np
from torch import nn
from rapidformer_templates import Data, Trainer, flag

@dataclass(frozen=True)
class Slope:
    \"\"\"Own\"\"\"
    slope: float = flag(2.0, "the slope")

class Own(Trainer):
    Flags = Slope

    def build_data(self):
        x = np.random.default_rng(0).normal(size=(20, 1)).astype(np.float32)
        rows = [{"x": row, "y": self.flags.slope * row} for row in x]
        return Data(train=rows[:8], valid=rows[8:14], test=rows[14:])

    def build_model(self):
        return nn.Linear(1, 1)

    def build_optimizer(self):
        assert self.config.training.lr, "an evaluation needs no optimizer"
        return super().build_optimizer()

    def compute_loss(self, model, batch):
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])

    def read_outputs(self, outputs, batch):
        return list(outputs[:, 0]), batch["y"][:, 0].tolist()

    def compute_metrics(self, predictions, references):
        return {"furthest": float(np.abs(np.array(predictions) - references).max())}

Own.main(lr=0.1, epochs=2, micro_batch_size=4)
"""
TASK = """
from rapidformer_templates import Finetuner

class Counts(Finetuner):
    def compute_metrics(self, predictions, references):
        return {**super().compute_metrics(predictions, references), "rows": float(len(references))}

Counts.main(epochs=1, lr=1e-2)
"""


@pytest.fixture(autouse=True)
def keeps_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def evaluated(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, float]:
    capsys.readouterr()
    assert main(["evaluate", *map(str, words), "--json"]) == 0
    metrics: dict[str, float] = json.loads(capsys.readouterr().out)
    return metrics


@pytest.mark.slow
def test_a_script_with_its_own_model_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str], says: Says) -> None:
    """The averages are exported, and the best checkpoint is not the last one."""
    script, run, output = tmp_path / "own.py", tmp_path / "run", tmp_path / "out.jsonl"
    script.write_text(OWN)
    flags = ["--slope", "3", "--ema-decay", "0.5", "--evaluate-test", "--metric-for-best", "eval_loss"]
    assert run_script(script, *flags, "--save", str(run)) == 0
    metrics = json.loads((run / "summary.json").read_text())["metrics"]
    says.command(f"evaluate {run}")
    hooks = ["--user-script", str(script)]
    of_validation, of_test = evaluated(capsys, run, *hooks), evaluated(capsys, run, *hooks, "--part", "test")
    assert of_validation == pytest.approx({name: metrics[name] for name in ("eval_loss", "furthest")}, rel=1e-6)
    assert of_test == pytest.approx({"eval_loss": metrics["test/loss"], "furthest": metrics["test/furthest"]}, rel=1e-6)

    words = ["predict", str(run), *hooks, "--output", str(output)]
    assert main([*words, "--part", "test"]) == 0
    weights = safetensors.torch.load_file(run / "export/model.safetensors")
    x = np.random.default_rng(0).normal(size=(20, 1)).astype(np.float32)[14:]
    wanted = torch.nn.functional.linear(torch.from_numpy(x), weights["weight"], weights["bias"])[:, 0]
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["sample"] for line in lines] == list(range(6))
    assert [line["prediction"] for line in lines] == pytest.approx(wanted.tolist(), rel=1e-6)

    rows = write_jsonl(tmp_path / "rows.jsonl", [{"x": 1.0}])
    for more in (f"--input {rows}", "--part test --nproc-per-node 2"):
        says.command(f"{' '.join(words)} --overwrite {more}")
    assert main(["evaluate", str(run), *hooks, "--data-dir", str(tmp_path)]) == 0
    assert "the build_data of Own is the script's: --data-dir acts if it reads" in capsys.readouterr().err
    (run / "export").rename(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    says.command(f"evaluate {tmp_path}/model --user-script {script}")


@pytest.mark.slow
def test_a_script_with_its_own_metrics(tmp_path: Path, bert_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They equal the metrics of the run, which trains adapters."""
    peft = pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
    script, run, data = tmp_path / "counts.py", tmp_path / "run", tmp_path / "data"
    script.write_text(TASK)
    data.mkdir()
    rows = [{"text": f"the {'cat' if i % 3 else 'dog'} {i % 5}", "label": "yes" if i % 3 else "no"} for i in range(12)]
    for part, of_part in (("train", rows), ("valid", rows[:5]), ("test", rows[5:])):
        write_jsonl(data / f"{part}.jsonl", of_part)
    torch.manual_seed(0)
    tokenizer, base = AutoTokenizer.from_pretrained(bert_folder), tmp_path / "base"
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(base)
    tokenizer.save_pretrained(base)
    words = f"--task sequence_classification --pretrained-model-name-or-path {base} --lora-rank 2 --seq-length 16"
    words += f" --data-dir {data} --save {run} --evaluate-test --device cpu"
    assert run_script(script, *words.split()) == 0
    metrics = json.loads((run / "summary.json").read_text())["metrics"]
    hooks = ["--user-script", str(script)]
    of_test = {
        name.removeprefix("test/").replace("loss", "eval_loss"): value
        for name, value in metrics.items()
        if name.startswith("test/")
    }
    of_validation = {name: value for name, value in metrics.items() if not name.startswith("test/")}
    assert (of_validation["rows"], of_test["rows"]) == (5, 7)
    assert evaluated(capsys, run, *hooks) == pytest.approx(of_validation, rel=1e-5)
    assert evaluated(capsys, run, *hooks, "--part", "test") == pytest.approx(of_test, rel=1e-5)
    assert evaluated(capsys, run, *hooks, "--data-name", "test.jsonl") == pytest.approx(of_test, rel=1e-5)

    whole = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    model = peft.PeftModel.from_pretrained(whole, str(run / "export")).eval()
    with torch.no_grad():
        scores = [model(**tokenizer(row["text"], return_tensors="pt")).logits.softmax(1)[0].tolist() for row in rows]
    inputs = write_jsonl(tmp_path / "rows.jsonl", [{"text": row["text"]} for row in rows[5:]])
    for source in (
        ["--input", str(inputs)],
        ["--part", "test"],
        [*hooks, "--part", "test"],
        [*hooks, "--input", str(inputs)],
    ):
        output = tmp_path / "out.jsonl"
        assert main(["predict", str(run), *source, "--output", str(output), "--overwrite"]) == 0
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        told = [list(line["prediction"]["scores"].values()) for line in lines]
        assert np.allclose(told, scores[5:], atol=1e-3), source
        assert [line["text"] for line in lines] == [row["text"] for row in rows[5:]]
