"""``rapidformer predict``: the predictions of a run's model for each row of a file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rapidformer_templates.commands.saved_model import (
    GenerationFlags,
    Values,
    generation_of,
    in_workers,
    model_on_device,
    parser_of_saved,
    words_of_saved,
)
from rapidformer_templates.data.finetuning.column_names import check_input_columns
from rapidformer_templates.errors import ConfigError, DataError, MistakeCollector
from rapidformer_templates.models.model_files import check_model_files
from rapidformer_templates.planning.config import RunConfig, subset_of_flags
from rapidformer_templates.planning.flags import DataFlags, LaunchFlags, ModelFlags, TrainingFlags, flag
from rapidformer_templates.run.out_of_memory import explained_without_plan
from rapidformer_templates.run.saved_model import load_saved_task
from rapidformer_templates.switches.mixed_precision import MixedPrecisionFlags
from rapidformer_templates.system import launch

if TYPE_CHECKING:
    from rapidformer_templates.data.finetuning.tables import DataPart
    from rapidformer_templates.data.tasks.base import Inputs, Task

DESCRIPTION = """Predict each row of a file with the exported model of a run, or with any model of transformers.

Rows come from a .csv, .tsv, .json, .jsonl or .parquet file with the columns of the task, or are the lines of a .txt
file. Each line of the output is the row with its prediction, in the order of the input, with any number of
workers."""

KEY = "prediction"
"""Key of the prediction in an output line, next to the columns of the row."""


@dataclass(frozen=True)
class FileFlags:
    """Files"""

    input: str | None = flag(None, "rows to predict: .txt, .csv, .tsv, .json, .jsonl or .parquet", metavar="FILE")
    output: str | None = flag(None, "where the predictions go, one JSON object per line", metavar="FILE")


@dataclass(frozen=True)
class PredictFlags(FileFlags):
    """Files"""

    overwrite: bool = flag(False, "replace the output if it exists")


@dataclass(frozen=True)
class PredictOptions(FileFlags, GenerationFlags):
    """The options of the command that are not flags of a run. ``--overwrite`` is a flag of a run."""


AT_ONCE = {"micro_batch_size": 8}
"""Default number of rows per batch."""

OPTIONS = (
    PredictFlags,
    GenerationFlags,
    subset_of_flags(
        DataFlags, "text_column", "pair_column", "label_column", "skip_bad_lines", "micro_batch_size", **AT_ONCE
    ),
    subset_of_flags(ModelFlags, "seq_length", "base", "trust_remote_code"),
    subset_of_flags(TrainingFlags, "task", "seed"),
    MixedPrecisionFlags,
    subset_of_flags(LaunchFlags, "nproc_per_node", "master_port", "device"),
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``rapidformer predict``."""
    return parser_of_saved("predict", DESCRIPTION, OPTIONS)


def main(argv: Sequence[str] | None = None) -> int:
    """Predict and write the output.

    Args:
        argv: words after ``rapidformer predict``. The default is the command line of this process.

    Raises:
        RapidformerError: the model, the input or a flag cannot be used.
    """
    saved, values = words_of_saved(build_parser(), argv, OPTIONS, _check_files)
    config = saved.config(user=PredictOptions, **{**AT_ONCE, **values})
    columns = saved.decisions(config.training.task).get("columns") or {}
    mistakes = MistakeCollector()
    mistakes.run(check_model_files, config)
    mistakes.run(check_input_columns, config.training.task, config.data, columns, Path(config.user.input))
    mistakes.raise_all()

    def read() -> tuple[Task, DataPart, Inputs]:
        task = load_saved_task(config, saved)
        part = read_rows(config, task.text_column)
        return task, part, task.inputs(part)

    def body() -> int:
        with explained_without_plan(str(saved.folder), "a smaller --micro-batch-size, or a device with more memory"):
            return _predict(config, *read())

    return in_workers(config.launch.nproc_per_node, config.launch.master_port, read, body)


def _check_files(values: Values) -> None:
    """Check that the input exists, and that the output can be written.

    Raises:
        RapidformerError: the mistakes. A worker does not repeat the check of the launcher.
    """
    if launch.is_worker():
        return
    mistakes = MistakeCollector()
    for name in ("input", "output"):
        if name not in values:
            mistakes.errors.append(ConfigError(f"--{name} is missing", hint=f"add --{name} FILE"))
    source, output = Path(values.get("input", "")), Path(values.get("output", ""))
    if "input" in values and not source.is_file():
        hint = "name the file with the rows"
        mistakes.errors.append(DataError(f"{source} does not exist", where="--input", hint=hint))
    if "output" in values:
        if output.is_dir() or not output.parent.is_dir():
            what = f"{output} is a folder" if output.is_dir() else f"the folder {output.parent} does not exist"
            mistakes.errors.append(ConfigError(what, where="--output", hint="name a file"))
        elif output.exists() and (not values.get("overwrite", False) or (source.exists() and output.samefile(source))):
            hint = "give another one, or --overwrite"
            mistakes.errors.append(ConfigError(f"{output} already exists", where="--output", hint=hint))
    mistakes.raise_all()


def read_rows(config: RunConfig, text_column: str) -> DataPart:
    """Read the rows of ``--input``.

    Args:
        text_column: column name for the lines of a ``.txt`` file.

    Raises:
        DataError: the type of the file is unknown, the file has no rows or already has the output's column, or a line
            cannot be read.
    """
    from rapidformer_templates.data.finetuning.tables import part_of, read_files
    from rapidformer_templates.data.text.bad_lines import BadLines, add_by_reason, describe_skipped
    from rapidformer_templates.data.text.files import ROW_READERS, data_suffix, text_lines

    path = Path(config.user.input)
    bad = BadLines(skip=config.data.skip_bad_lines)
    if data_suffix(path) == ".txt":
        lines = list(text_lines(path, bad))
        bad.raise_all()
        rows, places = [{text_column: text.rstrip("\r\n")} for _, text in lines], [(0, number) for number, _ in lines]
        if not rows:
            raise DataError("the file is empty", where=str(path), hint="it needs at least one line")
        part = part_of(rows, places, (str(path),))
    elif data_suffix(path) in ROW_READERS:
        part = read_files([path], bad)
        bad.raise_all()
    else:
        hint = f"use {', '.join(('.txt', *ROW_READERS))}"
        raise DataError(f"files {path.suffix or 'without an ending'} are not read", where="--input", hint=hint)
    if KEY in part.table.column_names:
        raise DataError(
            f"there is a column '{KEY}' already", where=str(path), hint="rename it: the output adds this column"
        )
    if bad.skipped:
        print(describe_skipped(add_by_reason({}, bad.skipped)), file=sys.stderr)
    return part


def _predict(config: RunConfig, task: Task, part: DataPart, inputs: Inputs) -> int:
    from rapidformer_templates.models.rotary import choose_frequencies
    from rapidformer_templates.run.predictions import predict_inputs
    from rapidformer_templates.system.files import finite
    from rapidformer_templates.system.terminal import ProgressBar

    output = Path(config.user.output)
    with model_on_device(task, config) as (model, workers):
        choose_frequencies(model, config.model.seq_length)
        with ProgressBar("predicting", len(part) // workers.world, show=workers.is_main) as bar:
            records = predict_inputs(
                task, model, inputs, config.data.micro_batch_size, generation_of(config), workers,
                lambda count: bar.advance(count, lambda: ""),
            )  # fmt: skip
        if workers.is_main:
            plain = [finite(record) for record in records]
            _write(output, part, plain)
            print(f"wrote {output}: {len(records):,} rows")
            if broken := sum(one != record for one, record in zip(plain, records, strict=True)):
                note = "hold infinite numbers or NaN, written as null: check the model"
                print(f"warning: the predictions of {broken:,} rows {note}", file=sys.stderr)
        workers.barrier()
    return 0


def _write(output: Path, part: DataPart, records: Sequence[object]) -> None:
    """Write the records to a temporary file and rename it, so that the output is never incomplete."""
    from rapidformer_templates.system.files import finite, sync, writing

    temporary = output.with_name(output.name + ".tmp")
    with writing(output):
        with temporary.open("w", encoding="utf-8") as file:
            for row, record in zip(part.table, records, strict=True):
                line = finite({**row, KEY: record})
                file.write(json.dumps(line, ensure_ascii=False, allow_nan=False, default=str) + "\n")
        sync(temporary)
        temporary.rename(output)
