"""``rapidformer convert``: reads another trainer's configuration, writes ours, and checks that its plan resolves."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from rapidformer_templates.commands.convert.reader import (
    UNKNOWN,
    Conversion,
    Options,
    Value,
    convert_megatron,
    convert_trainer,
    mapping_of,
    shown,
)
from rapidformer_templates.commands.convert.shell import arguments_of_script
from rapidformer_templates.errors import ConfigError, RapidformerError, Refused, counted
from rapidformer_templates.planning.data_rules import check_data_flags, check_task_flags
from rapidformer_templates.planning.environment import DEVICE_KINDS, OPTIONAL_PACKAGES
from rapidformer_templates.planning.flag_parser import CommandParser, dashed, positive
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.planning.tasks import TASKS
from rapidformer_templates.run.early_checks import check_metric
from rapidformer_templates.system.files import explain, write_text, writing

FORMATS = ("axolotl", "llama-factory", "transformers", "megatron")
"""The formats. The last one is a shell script, and the others are keys and values."""

USUAL_GPU = "a100-80gb"

NEWEST = "99.0"
"""A version that every rule about an optional package accepts."""


def main(argv: Sequence[str]) -> int:
    """Convert the file, write the result and check its plan.

    Args:
        argv: words after ``rapidformer convert``.

    Returns:
        0 if the plan of the result resolves, else the exit status of the refusal.

    Raises:
        RapidformerError: the file cannot be read, is of no known format, or asks for a training that is not supported.
    """
    arguments = build_parser().parse_args(dashed(argv))
    file = Path(arguments.file)
    output = Path(arguments.output) if arguments.output else None
    if output and output.exists() and not arguments.overwrite:
        raise ConfigError(f"{output} already exists and is left unchanged", where="--output", hint="add --overwrite")
    options = Options(arguments.world_size, arguments.samples, arguments.task, (Path(), *file.absolute().parents))
    name, result = converted(file, arguments.format, options)
    text = as_yaml(result, f"Converted by rapidformer convert from {file.name} ({name})")
    with tempfile.TemporaryDirectory() as folder:
        target = output or Path(folder) / "converted.yaml"
        with writing(target):
            write_text(target, text)
        if output:
            print(f"wrote {output}", *remarks(result), sep="\n")
        else:
            print(text, end="")
            sys.stdout.flush()
        refusal, packages = refusal_of(target, result.workers, arguments.device_kind)
    workers = counted(result.workers, "worker")
    if refusal is not None:
        print(f"The plan for {workers} does not resolve yet:", refusal.render(), sep="\n", file=sys.stderr)
        return refusal.exit_status
    print(f"The plan for {workers} resolves.", *packages, sep="\n  ", file=sys.stderr)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``rapidformer convert``."""
    parser = CommandParser(
        prog="rapidformer convert",
        description="Convert a configuration of another trainer to a YAML file for --config, name what has no "
        "counterpart, and check that the plan of the result resolves.",
    )
    parser.add_argument(
        "file", metavar="FILE", help="YAML of axolotl, LLaMA-Factory or TRL, JSON of TrainingArguments, or a shell "
        "script that starts Megatron-LM",
    )  # fmt: skip
    parser.add_argument("--from", dest="format", choices=FORMATS, help="format (default: recognized by its keys)")
    parser.add_argument("--output", metavar="FILE", help="file to write (default: standard output)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    parser.add_argument("--world-size", type=positive, metavar="N", help="workers (default: those in the file, else 1)")
    parser.add_argument(
        "--samples", type=positive, metavar="N", help="samples of an epoch, for a validation set that is a number of "
        "rows, and for log lines at a share of the run",
    )  # fmt: skip
    parser.add_argument("--task", choices=tuple(TASKS), help="task (default: from the file)")
    parser.add_argument(
        "--device-kind", choices=tuple(DEVICE_KINDS), default=USUAL_GPU, help=f"GPU of the plan (default: {USUAL_GPU})"
    )
    return parser


def converted(file: Path, name: str | None, options: Options) -> tuple[str, Conversion]:
    """Convert a file.

    Args:
        name: the format, or None to recognize it by its keys.

    Returns:
        The format and the result.

    Raises:
        RapidformerError: the file cannot be read or converted.
    """
    if not file.is_file():
        raise ConfigError(f"the file {file} does not exist", where="FILE")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not a text file: {error}", where="FILE") from error
    except OSError as error:
        what, to_do = explain(error)
        raise RapidformerError(f"{file} cannot be read: {what}", hint=to_do) from error
    if file.suffix == ".sh" or (name == "megatron" and file.suffix not in (".yaml", ".yml")):
        return "megatron", convert_megatron(*arguments_of_script(text), options)
    values = mapping_of(text, file)
    arguments = values.get("MODEL_ARGS")
    if name in (None, "megatron") and isinstance(arguments, dict):  # a test of Megatron-LM
        named = {key.removeprefix("--"): value for key, value in arguments.items()}
        script = re.search(r"pretrain_\w+\.py", text)
        return "megatron", convert_megatron(script[0] if script else "pretrain_gpt.py", named, None, options)
    name = name or recognized(values, file)
    if name == "megatron":
        raise ConfigError(f"{file} is not a shell script", where="--from megatron", hint="leave --from out")
    result = convert_trainer(name, values, options)
    if name == "transformers" and file.suffix == ".json":  # it has every argument, also those that nobody has set
        from transformers import TrainingArguments

        usual = {f"{argument.name}: {shown(argument.default)}" for argument in dataclasses.fields(TrainingArguments)}
        result.left = {setting: hint for setting, hint in result.left.items() if setting not in usual}
    return name, result


def remarks(result: Conversion) -> list[str]:
    """Return the lines about everything that the flags do not show."""
    lines = ["Not converted:"] if result.left else []
    for hint in sorted(dict.fromkeys(result.left.values()), key=UNKNOWN.__eq__):  # settings with one hint share a line
        lines += [f"  {'; '.join(key for key, other in result.left.items() if other == hint)}", f"    {hint}"]
    return [*lines, *(["Notes:"] if result.notes else []), *(f"  {note}" for note in result.notes)]


def as_yaml(result: Conversion, title: str) -> str:
    """Return the text of a file for ``--config``: the flags, and then the remarks as comments.

    Args:
        title: the first line.
    """
    flags = {name.replace("_", "-"): value for name, value in result.flags.items()}
    body = yaml.safe_dump(flags, sort_keys=False, allow_unicode=True, width=1000) if flags else ""
    comments = [f"# {line}\n" for line in remarks(result)]
    return "".join([f"# {title}\n", body, *(["\n", *comments] if comments else [])])


def recognized(values: Mapping[str, Value], file: Path) -> str:
    """Return the format of a mapping by its keys.

    Raises:
        ConfigError: the keys are of no format that can be converted.
    """
    keys = values.keys()
    if "base_model" in keys:
        return "axolotl"
    is_version_1 = {"model", "train_dataset"} <= keys
    if is_version_1 or ("model_name_or_path" in keys and keys & {"finetuning_type", "cutoff_len", "dataset_dir"}):
        return "llama-factory"
    if keys & {"compute_environment", "distributed_type"}:
        hint = "convert the file of the training. rapidformer starts workers by --nproc-per-node or torchrun"
        raise ConfigError(f"{file} is a file for accelerate launch, which starts workers", where="FILE", hint=hint)
    if keys & {"output_dir", "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size"}:
        return "transformers"
    hint = "name its format with --from"
    raise ConfigError(f"the keys of {file} are not those of a training configuration", where="FILE", hint=hint)


def refusal_of(file: Path, workers: int, device_kind: str) -> tuple[RapidformerError | None, tuple[str, ...]]:
    """Return why the plan of a file for ``--config`` is refused, or None if it resolves.

    The plan is for GPUs, and for a machine with all optional packages. The second value has a line for each of these
    packages that is missing here.
    """
    from rapidformer_templates.commands.plan import plan_request

    words = ["--config", str(file), "--world-size", str(workers)]
    if not re.search("^device:", file.read_text(encoding="utf-8"), flags=re.MULTILINE):
        words += ["--device-kind", device_kind]
    try:
        config, environment, _ = plan_request(words)
        everywhere = dict.fromkeys(OPTIONAL_PACKAGES, NEWEST) | dict(environment.packages)
        resolve(config, dataclasses.replace(environment, packages=everywhere))
        for check in [check_task_flags, check_data_flags, check_metric] if config.training.task else []:
            check(config)
    except RapidformerError as error:
        return error, ()
    try:
        resolve(config, environment)
    except Refused as refused:
        return None, tuple(diagnostic.message for diagnostic in refused.diagnostics)
    return None, ()
