"""Accumulation by epochs: the suggestion names the iterations of the epochs, as the run would count them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from rapidformer_templates.data.finetuning.tables import read_dataset
from rapidformer_templates.errors import Refused
from rapidformer_templates.planning.resolve import resolve
from tests.support.requests import CPU, config_of
from tests.support.texts import write_jsonl

ROWS: list[dict[str, Any]] = [{"text": f'row {i}, "quoted"\nand more', "label": i % 2} for i in range(103)]
FLAGS = "--task sequence_classification --epochs 3 --micro-batch-size 4 --global-batch-size 16 --data-dir"


def write(folder: Path, kind: str, rows: list[dict[str, Any]] = ROWS, part: str = "train") -> None:
    table = datasets.Dataset.from_list(rows)
    if kind == "saved":
        datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(folder))
    elif kind == "jsonl":
        write_jsonl(folder / f"{part}.jsonl", rows)
    else:
        getattr(table, f"to_{kind}")(str(folder / f"{part}.{kind}"))


def way_out(flags: str) -> tuple[str, str]:
    with pytest.raises(Refused) as caught:
        resolve(config_of(flags), CPU)
    (found,) = caught.value.diagnostics
    assert found.rule == "RF006"
    return found.works[0].change, found.works[0].note


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "saved"])
@pytest.mark.parametrize(
    "more", ["", "--validation-fraction 0", "--max-train-samples 40", "--validation-fraction 0.25"]
)
def test_iterations_are_those_of_the_epochs(kind: str, more: str, tmp_path: Path) -> None:
    write(tmp_path, kind)
    flags = f"{FLAGS} {tmp_path} {more}"
    samples = len(read_dataset(config_of(flags)).train)
    expected = -(-3 * samples // 16)
    note = f"in place of --epochs: 3 × {samples} training samples / 16"
    assert way_out(flags) == (f"--train-iters {expected}", note)


def test_nothing_is_held_out_beside_a_validation_part(tmp_path: Path) -> None:
    write(tmp_path, "csv")
    write(tmp_path, "csv", ROWS[:7], part="dev")
    assert way_out(f"{FLAGS} {tmp_path}")[0] == "--train-iters 20"  # 309 / 16


@pytest.mark.parametrize(
    ("kind", "more"),
    [(None, ""), ("csv", "--task question_answering"), ("csv", "--task causal_lm --pack-sequences"), ("large", "")],
)
def test_what_only_the_data_tell_is_said_how_to_compute(
    kind: str | None, more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "large":
        monkeypatch.setattr("rapidformer_templates.data.finetuning.locating.MAX_COUNTED_BYTES", 100)
    if kind:
        write(tmp_path, "csv")
    expected = ("--train-iters N", "in place of --epochs; N = 3 × the training samples / 16")
    assert way_out(f"{FLAGS} {tmp_path} {more}") == expected


def test_counting_imports_no_torch(tmp_path: Path) -> None:
    write(tmp_path, "csv")
    program = (
        "import sys; from rapidformer_templates.commands.main import main; status = main(['plan', *sys.argv[1:]]);"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules); sys.exit(status)"
    )
    words = [sys.executable, "-c", program, *f"{FLAGS} {tmp_path}".split()]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--train-iters 18" in done.stderr
