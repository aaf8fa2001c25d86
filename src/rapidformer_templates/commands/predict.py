"""``rapidformer predict``: the predictions of a run's model for each row of a file."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rapidformer_templates.commands import saved_model
from rapidformer_templates.data.finetuning.hub_cache import PART_NAMES
from rapidformer_templates.data.finetuning.locating import check_input_columns
from rapidformer_templates.errors import ConfigError, DataError, MistakeCollector
from rapidformer_templates.models.model_files import check_model_files
from rapidformer_templates.planning.config import COMMAND_LINE, RunConfig, subset_of_flags
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.flag_values import TEST, mixture_of
from rapidformer_templates.planning.flags import DataFlags, LaunchFlags, ModelFlags, TrainingFlags, flag
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.run.out_of_memory import explained_without_plan
from rapidformer_templates.run.saved_model import OF_THE_SAMPLES, SavedModel, load_saved_task
from rapidformer_templates.switches.mixed_precision import MixedPrecisionFlags
from rapidformer_templates.system import launch

if TYPE_CHECKING:
    from rapidformer_templates.data.finetuning.tables import DataPart
    from rapidformer_templates.data.tasks.base import Inputs, Task
    from rapidformer_templates.data.types import Data

DESCRIPTION = """Predict each row of a file with the exported model of a run, or with any model of transformers.

Rows come from a .csv, .tsv, .json, .jsonl or .parquet file with the columns of the task, or are the lines of a .txt
file, or are a --part of the run's own data. Each row of the output is the row with its prediction, in the order of the
input, with any number of workers. --user-script predicts with the script's own hooks, in one process."""

KEY = "prediction"
"""Key of the prediction in a row of the output, next to the columns of the row."""


@dataclass(frozen=True)
class FileFlags:
    """Files"""

    input: str | None = flag(None, "rows to predict: .txt, .csv, .tsv, .json, .jsonl or .parquet", metavar="FILE")
    part: Literal["train", "validation", "test"] | None = flag(None, "predict this part of the run's own data instead")
    output: str | None = flag(
        None, "where the predictions go: .jsonl (an object per line), .json, .csv, .tsv or .parquet", metavar="FILE"
    )


@dataclass(frozen=True)
class PredictFlags(FileFlags):
    """Files"""

    overwrite: bool = flag(False, "replace the output if it exists")


@dataclass(frozen=True)
class PredictOptions(FileFlags, saved_model.GenerationFlags):
    """The options of the command that are not flags of a run. ``--overwrite`` is a flag of a run."""


AT_ONCE = {"micro_batch_size": 8}
"""Default number of rows per batch."""

OPTIONS = (
    PredictFlags,
    saved_model.GenerationFlags,
    subset_of_flags(
        DataFlags,
        "text_column",
        "pair_column",
        "label_column",
        "tools_column",
        "skip_bad_lines",
        "micro_batch_size",
        **AT_ONCE,
    ),
    subset_of_flags(ModelFlags, "seq_length", "base", "trust_remote_code"),
    subset_of_flags(TrainingFlags, "task", "seed"),
    MixedPrecisionFlags,
    subset_of_flags(LaunchFlags, "user_script", "nproc_per_node", "master_port", "device"),
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``rapidformer predict``."""
    return saved_model.parser_of_saved("predict", DESCRIPTION, OPTIONS)


def main(argv: Sequence[str]) -> int:
    """Predict and write the output.

    Args:
        argv: words after ``rapidformer predict``.

    Raises:
        RapidformerError: the model, the input or a flag cannot be used.
    """
    saved, values = saved_model.words_of_saved(build_parser(), argv, OPTIONS, _check_files)
    own = {f.name for f in dataclasses.fields(PredictOptions)}.intersection(values)
    in_code = {name: (values.pop(name), COMMAND_LINE) for name in own}
    options: PredictOptions = parse([], REGISTRY.options(), user=PredictOptions, in_code=in_code).user
    if script := values.pop("user_script", None):
        return _predict_by_script(script, saved, options, values)
    names = (*OF_THE_SAMPLES, *(("seed", *saved_model.OF_ITS_DATA) if options.part else ()))
    config = saved.config(names, **{**AT_ONCE, "evaluate_test": options.part == TEST, **values})
    columns = saved.decisions(config.training.task).get("columns") or {}
    mistakes = MistakeCollector()
    mistakes.run(check_model_files, config)
    if options.input:
        mistakes.run(check_input_columns, config.training.task, config.data, columns, Path(options.input))
    mistakes.raise_all()

    def read() -> tuple[Task, DataPart, Inputs]:
        task = load_saved_task(config, saved)
        part = read_rows(config, options, task.text_column)
        return task, part, task.inputs(part)

    def body() -> int:
        from rapidformer_templates.models.architectures import choose_frequencies
        from rapidformer_templates.run.predictions import predict_inputs
        from rapidformer_templates.system.terminal import ProgressBar

        with explained_without_plan(str(saved.folder), "a smaller --micro-batch-size, or a device with more memory"):
            task, part, inputs = read()
            with saved_model.model_on_device(task, config) as (model, workers):
                choose_frequencies(model, config.model.seq_length)
                with ProgressBar("predicting", len(part) // workers.world, show=workers.is_main) as bar:
                    records = predict_inputs(
                        task, model, inputs, config.data.micro_batch_size, saved_model.generation_of(options, config),
                        workers, lambda count: bar.advance(count, lambda: ""),
                    )  # fmt: skip
                if workers.is_main:
                    _finish(options, part.table, records)
                workers.barrier()
        return 0

    return saved_model.in_workers(config.launch.nproc_per_node, config.launch.master_port, read, body)


def _check_files(values: saved_model.Values) -> None:
    """Check that the input exists, and that the output can be written.

    Raises:
        RapidformerError: the mistakes. A worker does not repeat the check of the launcher.
    """
    if launch.is_worker():
        return
    from rapidformer_templates.data.text.files import ROW_WRITERS, data_suffix

    mistakes = MistakeCollector()
    for name in ("input", "output"):
        if name not in values and not (name == "input" and "part" in values):
            mistakes.errors.append(ConfigError(f"--{name} is missing", hint=f"add --{name} FILE"))
    if "input" in values and "part" in values:
        mistakes.errors.append(ConfigError("--input and --part exclude each other", hint="leave out one of them"))
    source, output = Path(values.get("input", "")), Path(values.get("output", ""))
    if "input" in values and not source.is_file():
        hint = "name the file with the rows"
        mistakes.errors.append(DataError(f"{source} does not exist", where="--input", hint=hint))
    if "output" in values:
        if output.is_dir() or not output.parent.is_dir():
            what = f"{output} is a folder" if output.is_dir() else f"the folder {output.parent} does not exist"
            mistakes.errors.append(ConfigError(what, where="--output", hint="name a file"))
        elif output.exists() and (not values.get("overwrite", False) or (source.exists() and output.samefile(source))):
            is_input = source.exists() and output.samefile(source)
            what = f"{output} is also the input" if is_input else f"{output} already exists"
            hint = "give another one" if is_input else "give another one, or --overwrite"
            mistakes.errors.append(ConfigError(what, where="--output", hint=hint))
        elif data_suffix(output) not in ROW_WRITERS:
            what = f"files {output.suffix or 'without an ending'} are not written"
            mistakes.errors.append(ConfigError(what, where="--output", hint=f"use {', '.join(ROW_WRITERS)}"))
    mistakes.raise_all()


def _predict_by_script(script: str, saved: SavedModel, options: PredictOptions, values: saved_model.Values) -> int:
    """Predict with the hooks of a script, in this process."""
    left_out = ("global_batch_size", *(() if options.part else saved_model.OF_ITS_DATA))
    template = saved_model.template_of_script(script, saved, left_out, values, evaluate_test=options.part == TEST)
    config = template.config
    if (config.launch.nproc_per_node or 1) > 1:
        message = "--user-script predicts in one process"
        raise ConfigError(message, where="--nproc-per-node", hint="leave the flag out")

    from rapidformer_templates.run import inference
    from rapidformer_templates.run.predictions import predict_inputs
    from rapidformer_templates.run.saving import load_exported

    if template.reads_task_data and not options.part:
        template.task.load_label_state(saved.decisions(config.training.task))
    run = inference.build_single_process(template, None)
    load_exported(run, saved_model.weights_of_run(saved))
    generation, rows = saved_model.generation_of(options, config), config.data.micro_batch_size
    if run.task is None:
        samples = _own_samples(run.data, options.part)
        predictions = inference.predict(template, run, samples, rows, generation)
        records = [record.tolist() if hasattr(record, "tolist") else record for record in predictions]
        _finish(options, [{"sample": place} for place in range(len(samples))], records)
        return 0
    part = read_rows(config, options, run.task.text_column)
    with run.engine.precision():
        records = predict_inputs(run.task, run.model, run.task.inputs(part), rows, generation)
    _finish(options, part.table, records)
    return 0


def _own_samples(data: Data, part: str | None) -> list[object]:
    """Return the samples of a part of the data that a script's own ``build_data`` has built.

    Raises:
        ConfigError: no part is named.
        DataError: there is no such part.
    """
    if part is None:
        hint = "predict a part of its data: --part validation or --part test"
        raise ConfigError("the script's own build_data reads no rows of a file", where="--input", hint=hint)
    samples = getattr(data, PART_NAMES[part])
    if isinstance(samples, Mapping) or not hasattr(samples, "__getitem__"):
        raise DataError(f"build_data returns no single {part} set", where="--part", hint="choose another part")
    return [samples[place] for place in range(len(samples))]


def read_rows(config: RunConfig, options: PredictOptions, text_column: str) -> DataPart:
    """Read the rows of ``--input``, or of a part of the run's own data.

    Args:
        text_column: column name for the lines of a ``.txt`` file.

    Raises:
        DataError: the type of the file is unknown, the file has no rows or already has the output's column, or a line
            cannot be read.
    """
    from rapidformer_templates.data.finetuning.tables import part_of, read_files
    from rapidformer_templates.data.text.bad_lines import BadLines, add_by_reason, describe_skipped
    from rapidformer_templates.data.text.files import ROW_READERS, data_suffix, text_lines

    if options.part:
        return _part_of_run(config, options.part)
    path = Path(str(options.input))
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
        message = f"there is a column '{KEY}' already"
        raise DataError(message, where=str(path), hint="rename it: the output adds this column")
    if bad.skipped:
        print(describe_skipped(add_by_reason({}, bad.skipped)), file=sys.stderr)
    return part


def _part_of_run(config: RunConfig, part: str) -> DataPart:
    """Read the rows of a part of the run's own data, as the run has divided them.

    Raises:
        DataError: the run has no such rows.
    """
    from rapidformer_templates.data.tasks import load_task

    if config.training.task == "pretraining" or config.data.streaming or mixture_of(config.data.data_name):
        what, hint = "the data of the run are not the rows of one data set", "name a file with --input"
        raise DataError(what, where="--part", hint=hint)
    rows: DataPart | None = getattr(load_task(config).read_rows(), PART_NAMES[part])
    if rows is None:
        raise DataError(f"the data of the run have no {part} part", where="--part", hint="choose another part")
    return rows


def _finish(options: PredictOptions, rows: Iterable[Mapping[str, object]], records: Sequence[object]) -> None:
    """Write the rows with their predictions, and say so. The output is renamed when it is complete."""
    from rapidformer_templates.data.text.files import write_rows
    from rapidformer_templates.system.files import finite, sync, writing

    output, plain = Path(str(options.output)), [finite(record) for record in records]
    temporary = output.with_name(output.name + ".tmp")
    with writing(output):
        merged = ({**row, KEY: record} for row, record in zip(rows, plain, strict=True))
        write_rows(temporary, output, ({name: finite(value) for name, value in row.items()} for row in merged))
        sync(temporary)
        temporary.rename(output)
    print(f"wrote {output}: {len(records):,} rows")
    if broken := sum(one != record for one, record in zip(plain, records, strict=True)):
        note = "hold infinite numbers or NaN, written as null: check the model"
        print(f"warning: the predictions of {broken:,} rows {note}", file=sys.stderr)
