"""``rapidformer predict``: from files of every kind to one line per row, and what is refused before anything starts."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pandas
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, pipeline

from rapidformer_templates.commands.main import main
from tests.support.messages import Says
from tests.support.preference_runs import pretrained, words
from tests.support.texts import write_jsonl
from tests.support.worker_pool import run_in_workers

TEXTS = [words(2 + i * 5 % 11, i) for i in range(21)]
LABELS = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory, bert_folder: Path) -> Path:
    torch.manual_seed(7)
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=48, **LABELS,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("bert")
    model = BertForSequenceClassification(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def predict(folder: Path, source: Path, output: Path, *flags: str) -> list[dict[str, Any]]:
    assert main(["predict", str(folder), "--input", str(source), "--output", str(output), *flags]) == 0
    assert not list(output.parent.glob("*.tmp"))
    return lines_of(output)


def predict_all(workers: Any, runs: Mapping[str, list[str]]) -> None:
    """Run each prediction in a worker, which the command treats as one that it has started."""
    with mock.patch("rapidformer_templates.system.launch.report_errors", lambda body: body()):
        for output, given in runs.items():
            main(["predict", *given, "--output", output])


@pytest.mark.distributed
def test_files_of_every_kind_and_any_number_of_workers(tmp_path: Path, bert: Path, gpt_folder: Path) -> None:
    rows = [{"text": text, "number": i, "note": "é №"} for i, text in enumerate(TEXTS)]
    jsonl = write_jsonl(tmp_path / "rows.jsonl", rows)
    (tmp_path / "rows.txt").write_text("".join(f"{text}\r\n" for text in TEXTS), encoding="utf-8")
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([("review",), *((text,) for text in TEXTS)])
    told = predict(bert, jsonl, tmp_path / "of-jsonl.jsonl")
    assert [{**line, "prediction": 0} for line in told] == [{**row, "prediction": 0} for row in rows]
    wanted = pipeline("text-classification", str(bert))(TEXTS)
    scores = [line["prediction"]["score"] for line in told]
    assert scores == pytest.approx([one["score"] for one in wanted], rel=1e-3)
    assert len(set(scores)) > 10
    for name, column in (("rows.txt", "text"), ("rows.csv", "review")):
        again = predict(bert, tmp_path / name, tmp_path / f"{name}.jsonl", "--text-column", column)
        assert again == [{column: line["text"], "prediction": line["prediction"]} for line in told]
    gpt = pretrained(tmp_path / "gpt", gpt_folder)
    for name, flags in {"greedy": [], "drawn": ["--temperature", "2", "--seed", "3"]}.items():
        predict(gpt, jsonl, tmp_path / f"{name}.jsonl", "--max-new-tokens", "5", "--micro-batch-size", "4", *flags)
    shared = {
        "of-jsonl": [str(bert)],
        "greedy": [str(gpt), "--max-new-tokens", "5", "--micro-batch-size", "4"],
        "drawn": [str(gpt), *["--max-new-tokens", "5", "--micro-batch-size", "4", "--temperature", "2", "--seed", "3"]],
    }
    run_in_workers(
        2, predict_all, {f"{tmp_path}/{name}.shared.jsonl": [*of, "--input", str(jsonl)] for name, of in shared.items()}
    )
    one = write_jsonl(tmp_path / "one-row.jsonl", rows[:1])
    wanted_of_one = predict(bert, one, tmp_path / "of-one.jsonl")
    run_in_workers(2, predict_all, {f"{tmp_path}/of-one.shared.jsonl": [str(bert), "--input", str(one)]})
    assert lines_of(tmp_path / "of-one.shared.jsonl") == wanted_of_one
    for name in shared:
        assert (tmp_path / f"{name}.shared.jsonl").read_bytes() == (tmp_path / f"{name}.jsonl").read_bytes(), name
    assert (tmp_path / "greedy.jsonl").read_bytes() != (tmp_path / "drawn.jsonl").read_bytes()


@pytest.mark.slow
def test_the_output_has_the_format_of_its_name(tmp_path: Path, bert: Path) -> None:
    texts = ['"w1 said', 'a; "b", c', "x\ty", "two\r\nlines", "é", "NA"]
    source = write_jsonl(
        tmp_path / "rows.jsonl", [{"text": t, "list": [i, 2], "none": None} for i, t in enumerate(texts)]
    )
    wanted = predict(bert, source, tmp_path / "out.jsonl")
    for name in ("out.json", "out.parquet", "out.csv.gz", "out.TSV"):
        assert main(["predict", str(bert), "--input", str(source), "--output", str(tmp_path / name)]) == 0
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) == wanted
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == wanted
    for name, delimiter in (("out.csv.gz", ","), ("out.TSV", "\t")):
        frame = pandas.read_csv(tmp_path / name, sep=delimiter, keep_default_na=False)
        keys = ("label", "score", "scores.bad", "scores.good")
        assert list(frame) == ["text", "list", "none", *(f"prediction.{key}" for key in keys)]
        assert frame["text"].tolist() == texts
        assert frame["prediction.scores.good"].tolist() == [row["prediction"]["scores"]["good"] for row in wanted]
        again = predict(bert, tmp_path / name, tmp_path / f"{name}.jsonl")  # it can be read again
        assert [row["text"] for row in again] == texts
        assert [row["prediction"] for row in again] == [row["prediction"] for row in wanted]


def test_what_is_refused(tmp_path: Path, bert: Path, says: Says) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"txt": "a"}, {"txt": None}])
    kept = write_jsonl(tmp_path / "kept.jsonl", [{"text": "a", "prediction": 1}])
    other, none = tmp_path / "rows.xml", tmp_path / "none.csv"
    other.write_text("<a/>")
    with mock.patch("rapidformer_templates.system.launch.run_workers") as run_workers:
        for source, more in (
            (rows, ""), (rows, "--text-column txt"), (none, ""), (other, ""), (kept, ""), (rows, f"--output {kept}"),
            (rows, f"--output {rows} --overwrite"), (none, f"--output {kept} --overwrite"),
            (rows, f"--output {tmp_path}"), (rows, f"--output {tmp_path}/out.xlsx"), (rows, f"--output {tmp_path}/out"),
        ):  # fmt: skip
            says.command(f"predict {bert} --input {source} --output {tmp_path}/out.jsonl {more} --nproc-per-node 2")
    run_workers.assert_not_called()
    says.command(f"predict {bert} --output {tmp_path}/out.jsonl")
