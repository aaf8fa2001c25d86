"""``rapidformer evaluate`` prints the metrics of the run itself, for every task, number of workers and script."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch

from rapidformer_templates import Pretrainer, Trainer
from rapidformer_templates.commands.main import main
from tests.support.messages import Says
from tests.support.preference_runs import judged, pairs, pretrained, scored, words
from tests.support.programs import run_script
from tests.support.scored import Scored
from tests.support.selection import by_default
from tests.support.texts import write_jsonl
from tests.support.worker_pool import run_in_workers

FLAGS = (
    "--train-iters 2 --lr 5e-3 --eval-interval 2 --seq-length 32 --global-batch-size 4 --micro-batch-size 2"
    " --num-layers 1 --hidden-size 32 --num-attention-heads 2"
)
TEXTS = [words(3 + i % 9, i) for i in range(18)]
ROWS: Mapping[str, list[dict[str, Any]]] = {
    "one label": [{"text": text, "label": "abc"[i % 3]} for i, text in enumerate(TEXTS)],
    "several labels": scored(list),
    "numbers": scored(float),
    "tags": [{"tokens": t.split(), "tags": ["O", "B-x", "I-x"] * 3 + ["O"] * 3} for t in TEXTS],
    "answers": [
        {"question": "the cat", "context": t, "answers": {"text": [t.split()[1]], "answer_start": [t.index(" ") + 1]}}
        for t in TEXTS
    ],
    "choices": [{"context": t, "choices": [t[::-1], t[:9], t[3:]], "label": i % 3} for i, t in enumerate(TEXTS)],
    "hidden words": [{"text": text} for text in TEXTS],
    "texts": [{"text": text} for text in TEXTS],
    "chat": [{"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": t[::-1]}]} for t in TEXTS],
    "texts from texts": [{"source": text, "target": " ".join(text.split()[1::-1])} for text in TEXTS],
    "preferences": pairs(),
    "good answers": judged(),
    "rewards": pairs(),
}
for row in ROWS["tags"]:
    row["tags"] = row["tags"][: len(row["tokens"])]
TASKS: Mapping[str, str] = {
    "one label": "sequence_classification --model-type bert",
    "several labels": "sequence_classification --model-type bert",
    "numbers": "sequence_classification --model-type bert --dropout 0",
    "tags": "token_classification --model-type bert",
    "answers": "question_answering --model-type bert",
    "choices": "multiple_choice --model-type bert",
    "hidden words": "masked_lm --model-type bert",
    "texts": "causal_lm --model-type gpt2 --pack-sequences",
    "chat": "causal_lm --model-type gpt2",
    "texts from texts": "seq2seq_lm --model-type t5",
    "preferences": "preference",
    "good answers": "preference --preference-loss kto --lora-rank 2",
    "rewards": "reward --model-type gpt2",
}
"""The first ten use the tokenizer of bert or gpt, depending on the model."""
DECOYS = {"class": 3, "system": "not that", "review": "not this", "history": []}
"""Columns that other kinds of rows use."""


def train(folder: Path, name: str, tokenizer: Path, words_of: Path) -> dict[str, float]:
    """Train on one kind of rows, and return the metrics."""
    for part, rows in (("train", ROWS[name]), ("valid", ROWS[name][:7])):
        write_jsonl(folder / f"{part}.jsonl", rows)
    flags = f"{FLAGS} --task {TASKS[name]} --data-dir {folder} --save {folder / 'run'}"
    if "model-type" in flags:
        flags += f" --tokenizer-path {tokenizer}"
    else:
        start = pretrained(folder / "start", words_of)
        flags = f"{flags.partition(' --num-layers')[0]} {flags.partition('heads 2 ')[2]}"
        flags += f" --pretrained-model-name-or-path {start}"
    metrics: dict[str, float] = Trainer(flags.split()).fit()["metrics"]
    return metrics


def evaluate(capsys: Any, *given: object) -> dict[str, float]:
    capsys.readouterr()
    assert main(["evaluate", *map(str, given), "--json"]) == 0
    metrics: dict[str, float] = json.loads(capsys.readouterr().out)
    return metrics


def alike(told: Mapping[str, float], wanted: Mapping[str, float], name: str) -> None:
    assert told.keys() == wanted.keys(), name
    for metric, value in told.items():  # if predictions hardly vary, their correlation depends on the last digits
        assert value == pytest.approx(wanted[metric], rel=1e-5, abs=1e-3 if metric == "pearson" else 1e-6), name


def evaluate_all(workers: Any, runs: Mapping[str, list[str]]) -> dict[str, dict[str, float]]:
    """Run each evaluation in a worker, which the command treats as one that it has started."""
    told = {}
    with (
        mock.patch("rapidformer_templates.commands.evaluate._show") as show,
        mock.patch("rapidformer_templates.system.launch.report_errors", lambda body: body()),
    ):
        for name, given in runs.items():
            main(["evaluate", *given])
            told[name] = show.call_args.args[1]
    return told


@pytest.mark.distributed
@pytest.mark.parametrize("names", by_default([["tags"]], [["tags"], [name for name in ROWS if name != "tags"]]))
def test_the_numbers_of_every_task(
    names: list[str], tmp_path: Path, bert_folder: Path, gpt_folder: Path, capsys: Any
) -> None:
    wanted: dict[str, dict[str, float]] = {}
    given: dict[str, list[str]] = {}
    for name in names:
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        wanted[name] = train(folder, name, gpt_folder if "gpt2" in TASKS[name] else bert_folder, gpt_folder)
        alike(evaluate(capsys, str(folder / "run")), wanted[name], name)
        (folder / "other").mkdir()
        write_jsonl(folder / "other/rows.jsonl", [{**DECOYS, **row} for row in ROWS[name][:7]])
        given[name] = [str(folder / "run"), "--data-dir", str(folder / "other"), "--data-name", "rows.jsonl"]
        alike(evaluate(capsys, *given[name]), wanted[name], f"{name}, named")
    for flags in given.values():
        flags += ["--micro-batch-size", "3"]
    for told in run_in_workers(2, evaluate_all, given):
        for name, metrics in told.items():
            alike(metrics, wanted[name], f"{name}, 2 workers")


@pytest.mark.slow
def test_what_is_refused(tmp_path: Path, says: Says) -> None:
    job, run = type("Job", (Scored,), {"scores": [1.0]}), tmp_path / "run"
    job(["--train-iters", "2", "--lr", "0.1", "--save", str(run), "--no-export-model"]).fit()
    for given in (run, f"{run} --zero-3-memory-optimization", tmp_path, f"{run}/checkpoints/step-2"):
        says.command(f"evaluate {given}")
    assert main(["export", str(run)]) == 0
    says.command(f"evaluate {run}")


@pytest.mark.slow
def test_a_folder_from_elsewhere(tmp_path: Path, capsys: Any, bert_folder: Path, says: Says) -> None:
    wanted = train(tmp_path, "one label", bert_folder, bert_folder)
    (tmp_path / "run/export").rename(tmp_path / "model")
    (tmp_path / "test.jsonl").write_text((tmp_path / "valid.jsonl").read_text())
    model, data = f"{tmp_path}/model", ("--data-dir", str(tmp_path))
    alike(evaluate(capsys, model, *data, "--part", "test", "--seq-length", "32"), wanted, "test")
    assert evaluate(capsys, model, *data, "--part", "train") != wanted
    says.command(f"evaluate {model}")
    for given in ("--part nowhere", "--label-column labels", "--task preference"):
        says.command(f"evaluate {model} {' '.join(data)} {given}")


@pytest.mark.slow
def test_the_training_part_has_no_rows_that_were_held_out(tmp_path: Path, capsys: Any, bert_folder: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS["one label"])
    flags = f"{FLAGS} --task {TASKS['one label']} --tokenizer-path {bert_folder} --max-train-samples 15"
    Trainer(f"{flags} --data-dir {tmp_path} --save {tmp_path}/run".split()).fit()
    run, rows = str(tmp_path / "run"), tmp_path / "other/rows.jsonl"
    rows.parent.mkdir()
    assert main(["predict", run, "--part", "train", "--output", str(rows)]) == 0
    assert len(rows.read_text().splitlines()) == 15
    named = evaluate(capsys, run, "--data-dir", rows.parent, "--data-name", "rows.jsonl")
    alike(evaluate(capsys, run, "--part", "train"), named, "the rows of predict")


def evaluate_with_bar(workers: Any, words: list[str]) -> tuple[int, int, bool]:
    """Return the total of the progress bar, what it has reached, and whether it is shown."""
    with mock.patch("rapidformer_templates.run.fit.ProgressBar") as bar:
        evaluate_all(workers, {"one": words})
    steps = bar.return_value.__enter__.return_value.advance.call_args_list
    return bar.call_args.args[1], sum(step.args[0] for step in steps), bar.call_args.kwargs["show"]


@pytest.mark.longer
@pytest.mark.distributed
def test_other_data_in_the_folder_of_the_run(tmp_path: Path, capsys: Any, bert_folder: Path, says: Says) -> None:
    """Test the progress bar, too: each worker has a part of the rows, and the first one shows the progress."""
    run = str(tmp_path / "run")
    wanted = train(tmp_path, "one label", bert_folder, bert_folder)
    write_jsonl(tmp_path / "other.jsonl", ROWS["one label"][:7])
    write_jsonl(tmp_path / "many.jsonl", ROWS["one label"] * 2)
    alike(evaluate(capsys, run, "--data-name", "other"), wanted, "the same rows")
    alike(evaluate(capsys, run, "--data-name", "0.5 other 0.5 valid"), wanted, "twice")
    says.command(f"evaluate {run} --data-name othre")
    says.command(f"evaluate {run} --data-dir {tmp_path} --data-name many --part validation")
    words = [run, "--data-name", "many", "--micro-batch-size", "3"]
    assert evaluate_with_bar(None, words) == (36, 36, True)
    assert run_in_workers(2, evaluate_with_bar, words) == [(18, 18, True), (18, 18, False)]


@pytest.mark.longer
@pytest.mark.slow
def test_numbers_that_are_none(tmp_path: Path, capsys: Any, bert_folder: Path) -> None:
    """A broken model produces these numbers, which JSON cannot represent."""
    train(tmp_path, "one label", bert_folder, bert_folder)
    weights = tmp_path / "run/export/model.safetensors"
    safetensors.torch.save_file({n: t * float("nan") for n, t in safetensors.torch.load_file(weights).items()}, weights)
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert told["eval_loss"] is None
    given = ["predict", str(tmp_path / "run"), "--input", str(tmp_path / "valid.jsonl")]
    assert main([*given, "--output", str(tmp_path / "out.jsonl")]) == 0
    assert "the predictions of 7 rows hold infinite numbers or NaN, written as null" in capsys.readouterr().err
    for line in (tmp_path / "out.jsonl").read_text().splitlines():
        told = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        assert set(told["prediction"]["scores"].values()) == {None}


@pytest.mark.longer
@pytest.mark.slow
def test_nothing_is_measured_over_no_target(tmp_path: Path, capsys: Any, bert_folder: Path) -> None:
    train(tmp_path, "hidden words", bert_folder, bert_folder)
    write_jsonl(tmp_path / "empty.jsonl", [{"text": ""}])
    told = evaluate(capsys, str(tmp_path / "run"), "--data-name", "empty")
    assert told == {"eval_loss": None, "perplexity": None, "token_accuracy": 0.0}


@pytest.mark.longer
@pytest.mark.slow
def test_pretraining(tmp_path: Path, capsys: Any, gpt_folder: Path, says: Says) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"text": text} for text in TEXTS * 6])
    flags = f"{FLAGS} --task pretraining --model-type gpt2 --tokenizer-path {gpt_folder} --data-path {corpus}"
    flags += f" --split 60,40,0 --data-cache-dir {tmp_path}/cache --save {tmp_path}/run"
    wanted = Trainer(flags.replace("--seq-length 32", "--seq-length 16").split()).fit()["metrics"]
    run = str(tmp_path / "run")
    alike(evaluate(capsys, run), wanted, "its own")
    alike(evaluate(capsys, run, "--data-path", str(corpus), "--split", "60,40,0"), wanted, "the same part")
    first, last = (evaluate(capsys, run, "--data-path", str(corpus), "--split", of) for of in ("0,60,40", "60,40,0"))
    for part, split, same in (("train", "60,40,0", first), ("test", "60,0,40", last)):
        given = ("--data-path", str(corpus), "--split", split, "--part", part)
        alike(evaluate(capsys, run, *given), same, "the same part")
    alike(evaluate(capsys, run, "--split", "60,0,40", "--part", "test"), last, "in the corpus of the run")
    says.command(f"evaluate {run} --data-path {corpus} --split 60,40,0 --part test")
    apart = flags.replace(f"{tmp_path}/run", f"{tmp_path}/apart").split()
    wanted_apart = Pretrainer([*apart, "--data-iterator", "dynamic-shape"]).fit()["metrics"]
    alike(evaluate(capsys, f"{tmp_path}/apart"), wanted_apart, "documents")
    whole = evaluate(capsys, run, "--data-path", str(corpus))
    assert whole.keys() == wanted.keys()
    assert whole != wanted


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


@pytest.mark.slow
def test_a_script_with_its_own_model_and_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, says: Says
) -> None:
    """The averages are exported, and the best checkpoint is not the last one."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    script, run, output = tmp_path / "own.py", tmp_path / "run", tmp_path / "out.jsonl"
    script.write_text(OWN)
    flags = ["--slope", "3", "--ema-decay", "0.5", "--evaluate-test", "--metric-for-best", "eval_loss"]
    assert run_script(script, *flags, "--save", str(run)) == 0
    metrics = json.loads((run / "summary.json").read_text())["metrics"]
    says.command(f"evaluate {run}")
    hooks = ["--user-script", str(script)]
    of_validation, of_test = evaluate(capsys, run, *hooks), evaluate(capsys, run, *hooks, "--part", "test")
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
