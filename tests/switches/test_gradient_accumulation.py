"""Accumulation by epochs: the refusal offers these epochs as iterations, with the steps that the run will count."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from rapidformer_templates.commands.main import main
from rapidformer_templates.data.finetuning.tables import read_dataset
from rapidformer_templates.errors import Refused
from rapidformer_templates.planning.resolve import resolve
from tests.support.requests import CPU, config_of, on
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
    command, note = found.works[0].change, found.works[0].note
    assert command.startswith("rapidformer plan --world-size 2 ")
    assert "--epochs" not in command
    return command[command.index("--train-iters") :], note


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        *(
            ("csv", more)
            for more in ("--validation-fraction 0", "--max-train-samples 40", "--validation-fraction 0.25")
        ),
        *((kind, "") for kind in ("csv", "jsonl", "parquet", "saved")),
    ],
)
def test_iterations_are_those_of_the_epochs(kind: str, more: str, tmp_path: Path) -> None:
    write(tmp_path, kind)
    flags = f"{FLAGS} {tmp_path} {more}"
    samples = len(read_dataset(config_of(flags)).train)
    assert way_out(flags) == ("--train-iters 3epochs", f"in place of --epochs 3: {3 * -(-samples // 16)} steps")


def test_nothing_is_held_out_beside_a_validation_part(tmp_path: Path) -> None:
    write(tmp_path, "csv")
    write(tmp_path, "csv", ROWS[:7], part="dev")
    assert way_out(f"{FLAGS} {tmp_path}")[1].endswith(": 21 steps")  # 103 / 16 is 6.4


@pytest.mark.parametrize(
    ("kind", "more"),
    [(None, ""), ("csv", "--task question_answering"), ("csv", "--task causal_lm --pack-sequences"), ("large", "")],
)
def test_steps_that_only_the_data_tell_are_not_shown(
    kind: str | None, more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "large":
        monkeypatch.setattr("rapidformer_templates.data.finetuning.locating.MAX_COUNTED_BYTES", 100)
    if kind:
        write(tmp_path, "csv")
    assert way_out(f"{FLAGS} {tmp_path} {more}") == ("--train-iters 3epochs", "in place of --epochs 3")


def test_counting_imports_no_torch(tmp_path: Path) -> None:
    write(tmp_path, "csv")
    program = (
        "import sys; from rapidformer_templates.commands.main import main; status = main(['plan', *sys.argv[1:]]);"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules); sys.exit(status)"
    )
    words = [sys.executable, "-c", program, *f"{FLAGS} {tmp_path}".split()]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--train-iters 3epochs  # in place of --epochs 3: 18 steps" in done.stderr


def test_the_offer_is_accepted_and_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "csv")
    words = FLAGS.replace("--epochs 3", "--train-iters 3epochs").split()
    assert main(["plan", *words, str(tmp_path)]) == 0
    assert "note: length: 3 epochs = 18 steps" in capsys.readouterr().out
    words[words.index("3epochs")] = "1epochs"
    assert main(["plan", *words, str(tmp_path / "none")]) == 0
    assert "note: length: 1 epoch, counted in steps when the data is loaded" in capsys.readouterr().out


@pytest.mark.parametrize(("more", "micro", "accumulation"), [("", 16, 1), ("--train-iters 3epochs", 1, 16)])
def test_a_global_batch_alone_is_not_accumulated_over_epochs(more: str, micro: int, accumulation: int) -> None:
    flags = f"--task causal_lm --global-batch-size 32 {more or '--epochs 3'}"
    plan = resolve(config_of(flags), on(CPU, world_size=2))
    assert (plan.sizes.micro_batch, plan.sizes.accumulation) == (micro, accumulation)
    notes = [note for note in plan.notes if note.startswith("micro batch")]
    why = "--global-batch-size 32 / 2 data-parallel, because a run by --epochs does not accumulate (RF006)"
    assert notes == ([] if more else [f"micro batch 16: {why}"])
