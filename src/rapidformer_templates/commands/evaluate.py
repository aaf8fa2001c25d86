"""``rapidformer evaluate``: the metrics of a run's model on the run's validation data or on other data."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rapidformer_templates.commands import saved_model
from rapidformer_templates.commands.lm_eval import evaluate_tasks
from rapidformer_templates.data.finetuning.hub_cache import PART_NAMES
from rapidformer_templates.data.finetuning.locating import flags_of_sets, locate, locate_part
from rapidformer_templates.errors import ConfigError, MistakeCollector
from rapidformer_templates.models.model_files import check_model_files
from rapidformer_templates.planning.config import RunConfig, subset_of_flags
from rapidformer_templates.planning.flag_values import TEST
from rapidformer_templates.planning.flags import DataFlags, LaunchFlags, ModelFlags, TrainingFlags, flag
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


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate and print the metrics.

    Args:
        argv: words after ``rapidformer evaluate``. The default is the command line of this process.

    Raises:
        RapidformerError: the model, the data or a flag cannot be used.
    """
    saved, values = saved_model.words_of_saved(build_parser(), argv, OPTIONS)
    if values.get("lm_eval"):
        return evaluate_tasks(saved, values)
    script: str | None = values.pop("user_script", None)
    part: str | None = values.pop("part", None)
    as_json: bool = values.pop("json", False)
    of_its_data = _of_its_data(values, part)
    is_validation = of_its_data is saved_model.OF_ITS_DATA
    if script is None and "task" not in values:
        _check_metrics(saved)
    of_a_run: saved_model.Values = {"no_save": True, "lr": 0.0, "train_iters": 1, **_whole(values)}
    if not script:
        # The flags of the evaluation, as the configuration of a run that does not train.
        config = saved.config((*_of_the_run(saved, values), *of_its_data), **{**of_a_run, **values})
        if not config.data.is_named:
            hint = "name data with --data-dir and --data-name"
            raise ConfigError("no data is named, and there is no run to take it from", where="--data-dir", hint=hint)
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


def _check_metrics(saved: SavedModel) -> None:
    """Check that the metrics of the run are those of its task.

    Raises:
        ConfigError: the script of the run has its own.
    """
    if hooks := [hook for hook in saved.described().get("hooks", ()) if hook in OWN_METRICS]:
        message = f"the run's script has its own {hooks[0]}, which only the script knows"
        hint = "give --user-script; --task NAME with --data-dir and --data-name uses the metrics of a task"
        raise ConfigError(message, where=str(saved.run), hint=hint)


def _of_the_run(saved: SavedModel, values: saved_model.Values) -> list[str]:
    """Return the flags of the run on which its metrics depend. Only pretraining on documents needs dynamic shapes."""
    task = values.get("task", saved.values.get("task", (None,))[0])
    return [name for name in saved_model.OF_THE_RUN if name != "data_iterator" or task == "pretraining"]


def _names_data(values: saved_model.Values) -> bool:
    return any(name in values for name in saved_model.WHERE)


def _whole(values: saved_model.Values) -> saved_model.Values:
    """Return the flags with which other data are evaluated whole."""
    if not _names_data(values):
        return {}
    shares = {"split": "0,1,0"} if "data_path" in values and "split" not in values else {}
    return {"validation_fraction": 0.0, **shares}


def _of_its_data(values: saved_model.Values, part: str | None) -> Sequence[str]:
    """Return the flags of the run that select the data, which are fewer if the command line names other data."""
    if _names_data(values):
        return [place for name, place in WITHIN.items() if name in values and place not in values]
    return saved_model.OF_ITS_DATA if part in (None, "validation") else saved_model.OF_ITS_PARTS


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
