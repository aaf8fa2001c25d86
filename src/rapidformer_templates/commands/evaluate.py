"""``rapidformer evaluate``: the metrics of a run's model on the run's validation data or on other data."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from rapidformer_templates.commands import saved_model
from rapidformer_templates.commands.export import ADAPTERS
from rapidformer_templates.data.finetuning.hub_cache import PART_NAMES
from rapidformer_templates.data.finetuning.locating import flags_of_sets, locate, locate_part
from rapidformer_templates.errors import ConfigError, MistakeCollector
from rapidformer_templates.models.model_files import CONVERTED, check_model_files
from rapidformer_templates.planning.config import RunConfig, spelling, subset_of_flags
from rapidformer_templates.planning.environment import detect
from rapidformer_templates.planning.flag_values import TEST
from rapidformer_templates.planning.flags import DataFlags, LaunchFlags, ModelFlags, TrainingFlags, flag
from rapidformer_templates.planning.request import precision_on, read_model_config
from rapidformer_templates.run.early_checks import check_text_paths
from rapidformer_templates.run.saved_model import SavedModel
from rapidformer_templates.switches.mixed_precision import MixedPrecisionFlags
from rapidformer_templates.system import launch
from rapidformer_templates.system.terminal import console

if TYPE_CHECKING:
    from torch import nn

    from rapidformer_templates.trainer import Trainer

DESCRIPTION = """Evaluate the exported model of a run, or any model of transformers, by the metrics of its task.

Without data flags: on the validation part that the run itself was evaluated on, or on its --part test. Each sample
counts once, with any number of workers. --user-script evaluates by the script's own hooks."""


@dataclass(frozen=True)
class EvaluateFlags:
    """Evaluation"""

    part: Literal["train", "validation", "test"] | None = flag(
        None, "part of the named data, or of the run's own (default: validation, or the only one)"
    )
    json: bool = flag(False, "print the metrics as JSON")
    lm_eval: str | None = flag(None, "tasks of lm-eval to run instead, separated by commas", metavar="TASKS")


WITHIN = {"data_name": "data_dir", "split": "data_path"}
"""Flags that name something inside a place, with the flag of that place. The run's place is the default."""

OPTIONS = (
    EvaluateFlags,
    subset_of_flags(
        DataFlags, *saved_model.WHERE, "text_column", "pair_column", "label_column", "tools_column", "max_eval_samples",
        "skip_bad_lines", "micro_batch_size", micro_batch_size=None,
    ),
    subset_of_flags(ModelFlags, "seq_length", "base", "trust_remote_code"),
    subset_of_flags(TrainingFlags, "task"),
    MixedPrecisionFlags,
    subset_of_flags(LaunchFlags, "user_script", "nproc_per_node", "master_port", "device"),
)  # fmt: skip

OWN_METRICS = ("build_data", "compute_loss", "count_targets", "read_outputs", "compute_metrics")
"""Hooks with which a script computes metrics other than those of the task."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``rapidformer evaluate``."""
    return saved_model.parser_of_saved("evaluate", DESCRIPTION, OPTIONS)


def main(argv: Sequence[str]) -> int:
    """Evaluate and print the metrics.

    Args:
        argv: words after ``rapidformer evaluate``.

    Raises:
        RapidformerError: the model, the data or a flag cannot be used.
    """
    saved, values = saved_model.words_of_saved(build_parser(), argv, OPTIONS)
    if values.get("lm_eval"):
        return evaluate_tasks(saved, values)
    script: str | None = values.pop("user_script", None)
    part: str | None = values.pop("part", None)
    as_json: bool = values.pop("json", False)
    of_its_data, whole = _selected(values, part)
    is_validation = of_its_data is saved_model.OF_ITS_DATA
    # The flags of the evaluation are those of a run that does not train.
    of_a_run: saved_model.Values = {"no_save": True, "lr": 0.0, "train_iters": 1, **whole}
    if not script:
        config = _config_without_script(saved, of_its_data, values, of_a_run)
        _check_files(config, part, is_validation=is_validation)

    from rapidformer_templates.pretrainer import Pretrainer
    from rapidformer_templates.run.fit import evaluate
    from rapidformer_templates.trainer import Trainer

    if script:
        left_out = {"global_batch_size", "evaluate_test", *saved_model.OF_ITS_DATA}.difference(of_its_data)
        template = saved_model.template_of_script(script, saved, left_out, values, **of_a_run)
    else:
        template = Pretrainer([]) if config.training.task == "pretraining" else Trainer([])
        template.set_config(config)
    if template.reads_task_data and not is_validation:
        decisions = saved.decisions(template.config.training.task)
        template.task.load_label_state(decisions, part and PART_NAMES[part])

    def check() -> None:
        if template.reads_task_data:
            template.task.check()
        assert template.plan

    def body() -> int:
        check()
        weights = saved_model.weights_of_run(saved) if script else None
        reference = None if script else _reference(saved, template)
        metrics = evaluate(
            template,
            reference,
            test=part == TEST and not template.reads_task_data,
            limit=saved.evaluated_samples if is_validation else None,
            weights=weights,
        )
        _show(saved, metrics, as_json=as_json, is_run=script is not None)
        return 0

    return saved_model.in_workers(
        template.config.launch.nproc_per_node, template.config.launch.master_port, check, body
    )


def _selected(values: saved_model.Values, part: str | None) -> tuple[Sequence[str], saved_model.Values]:
    """Return the flags of the run that select the data, and the values with which other data are evaluated whole."""
    if not any(name in values for name in saved_model.WHERE):
        return saved_model.OF_ITS_DATA if part in (None, "validation") else saved_model.OF_ITS_PARTS, {}
    shares = {"split": "0,1,0"} if "data_path" in values and "split" not in values else {}
    places = [place for name, place in WITHIN.items() if name in values and place not in values]
    return places, {"validation_fraction": 0.0, **shares}


def _config_without_script(
    saved: SavedModel, of_its_data: Sequence[str], values: saved_model.Values, of_a_run: saved_model.Values
) -> RunConfig:
    """Return the configuration of an evaluation by the metrics of a task.

    Raises:
        ConfigError: the script of the run has its own metrics, or no data is named.
    """
    hooks = [hook for hook in saved.described().get("hooks", ()) if hook in OWN_METRICS]
    if hooks and "task" not in values:
        message = f"the run's script has its own {hooks[0]}, which only the script knows"
        hint = "give --user-script; --task NAME with --data-dir and --data-name uses the metrics of a task"
        raise ConfigError(message, where=str(saved.run), hint=hint)
    task = values.get("task", saved.values.get("task", (None,))[0])
    # Only pretraining on documents needs dynamic shapes.
    of_the_run = [name for name in saved_model.OF_THE_RUN if name != "data_iterator" or task == "pretraining"]
    config = saved.config((*of_the_run, *of_its_data), **{**of_a_run, **values})
    if not config.data.is_named:
        hint = "name data with --data-dir and --data-name"
        raise ConfigError("no data is named, and there is no run to take it from", where="--data-dir", hint=hint)
    return config


def _check_files(config: RunConfig, part: str | None, *, is_validation: bool) -> None:
    """Check that the model and the data exist. This needs no torch.

    Args:
        is_validation: whether the validation part of the run itself is evaluated.

    Raises:
        RapidformerError: the mistakes.
    """
    data = config.data
    mistakes = MistakeCollector()
    mistakes.run(check_model_files, config)
    with mistakes.collect():
        if config.training.task == "pretraining":
            check_text_paths(data.data_path or ())
        elif not data.streaming:
            for flags in flags_of_sets(data):
                if is_validation:
                    locate(flags)
                else:
                    locate_part(flags, part and PART_NAMES[part])
    mistakes.raise_all()


def _reference(saved: SavedModel, template: Trainer) -> Callable[[], nn.Module] | None:
    """Return a function that builds the run's initial model, if preferences are measured against it.

    Raises:
        ConfigError: the initial model is not known.
    """
    if not template.task.needs_reference:
        return None
    start = saved.values.get("pretrained_model_name_or_path")
    if start is None or "load" in saved.values:
        message = "the reference model that preferences are measured against is unknown"
        hint = "evaluate the run folder of a run that began with --pretrained-model-name-or-path"
        raise ConfigError(message, where="RUN", hint=hint)
    from rapidformer_templates.data.tasks import load_task

    # --base names the base of the run's adapters. With adapters, the run began with their base.
    begun = template.config.model.base or start[0]
    revision, _ = saved.values.get("revision", (None, "")) if begun == start[0] else (None, "")
    config = template.config.replace(start[1], pretrained_model_name_or_path=begun, revision=revision, base=None)
    return lambda: load_task(config).build_model()


def _show(saved: SavedModel, metrics: dict[str, float], *, as_json: bool, is_run: bool) -> None:
    """Print the metrics on rank 0. ``is_run``: the model was built as in the run, with a rounded base."""
    from rapidformer_templates.system.files import finite

    if not launch.is_first_worker():
        return
    if as_json:
        print(json.dumps(finite(metrics), indent=2, allow_nan=False))
        return
    from rich.table import Table

    print(f"evaluation of {saved.folder}")
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4f}")
    console().print(table)
    coding, _ = saved.values.get("quantize_base", (None, ""))
    if coding and not is_run:
        here = "Here the base is used as it is in its files, so these numbers differ a little from those of the run."
        print(f"note: the run rounded its base with --quantize-base {coding}. {here}")


HARNESS_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
FORWARDED = {"micro_batch_size": "--batch_size", "max_eval_samples": "--limit", "device": "--device"}
"""Flags that lm-evaluation-harness knows under another name."""

OTHERS_OF_HARNESS = ("lm_eval", "base", "mixed_precision", "nproc_per_node", "trust_remote_code")


def evaluate_tasks(saved: SavedModel, values: Mapping[str, object]) -> int:
    """Run tasks of lm-evaluation-harness, which prints its table. With a run folder, it also writes ``RUN/lm-eval``.

    Args:
        values: flags of the command line by field name.

    Returns:
        The exit status of the harness.

    Raises:
        ConfigError: the harness is not installed, or a flag has no meaning for it.
    """
    if unknown := [name for name in values if name not in (*FORWARDED, *OTHERS_OF_HARNESS)]:
        message = f"{spelling(unknown[0])} has no effect on the tasks of lm-eval"
        raise ConfigError(message, where="--lm-eval", hint="leave one of them out")
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("lm-eval is not installed", where="--lm-eval", hint="pip install 'lm-eval[hf]'")
    words = [sys.executable, "-m"]
    if (workers := values.get("nproc_per_node", 1)) != 1:
        words += ["accelerate.commands.launch", "--num_processes", str(workers), "-m"]
    words += ["lm_eval", "--model", "hf", "--model_args", _model_of_harness(saved.folder, values)]
    words += ["--tasks", str(values["lm_eval"])]
    words += [word for name, flag in FORWARDED.items() if name in values for word in (flag, str(values[name]))]
    if values.get("trust_remote_code"):
        words.append("--trust_remote_code")
    if saved.run is not None:
        words += ["--output_path", str(saved.run / "lm-eval")]
    print(f"runs {shlex.join(words[2:])}", file=sys.stderr, flush=True)
    return subprocess.run(words, check=False).returncode


def _model_of_harness(folder: Path, values: Mapping[str, object]) -> str:
    """Return the harness's description of the model: with adapters, they are loaded onto their base.

    Raises:
        ConfigError: transformers does not know the model.
        ModelError: the base does not exist, or it has other weights than the one of the training.
    """
    kind = str(read_model_config(folder).get("model_type"))
    if kind.startswith(CONVERTED):
        message = f"lm-eval reads models with transformers, which does not know {kind}"
        hint = "leave --lm-eval out: rapidformer evaluate computes the metrics of the run's task"
        raise ConfigError(message, where=str(folder), hint=hint)
    described = {"pretrained": str(folder)}
    if (folder / ADAPTERS).is_file():
        from rapidformer_templates.switches.lora.exported import check_named_base, revision_of

        base = cast("str | None", values.get("base"))
        described = {"pretrained": check_named_base(folder, base), "peft": str(folder)}
        if not base and (revision := revision_of(folder)):
            described["revision"] = revision
        if (folder / "tokenizer_config.json").is_file():
            described["tokenizer"] = str(folder)
    if precision := values.get("mixed_precision"):
        device = detect(None, "", device=str(values.get("device", "auto"))).device
        described["dtype"] = HARNESS_DTYPES[precision_on(device, str(precision))]
    return ",".join(f"{name}={value}" for name, value in described.items())
