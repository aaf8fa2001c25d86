"""``rapidformer evaluate``: the metrics of a run's model on the run's validation data or on other data."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rapidformer_templates.commands.saved_model import Values, in_workers, parser_of_saved, words_of_saved
from rapidformer_templates.data.finetuning.hub_cache import PART_NAMES
from rapidformer_templates.data.finetuning.locating import flags_of_sets, locate, locate_part
from rapidformer_templates.errors import ConfigError, MistakeCollector
from rapidformer_templates.models.model_files import check_model_files
from rapidformer_templates.planning.config import RunConfig, subset_of_flags
from rapidformer_templates.planning.flags import DataFlags, LaunchFlags, ModelFlags, TrainingFlags, flag
from rapidformer_templates.run.early_checks import check_text_paths
from rapidformer_templates.run.saved_model import SavedModel
from rapidformer_templates.switches.mixed_precision import MixedPrecisionFlags
from rapidformer_templates.system.terminal import console

if TYPE_CHECKING:
    from torch import nn

    from rapidformer_templates.trainer import Trainer

DESCRIPTION = """Evaluate the exported model of a run, or any model of transformers, by the metrics of its task.

Without data flags: on the validation part that the run itself was evaluated on. Each sample counts once, with
any number of workers."""


@dataclass(frozen=True)
class EvaluateFlags:
    """Evaluation"""

    part: Literal["train", "validation", "test"] | None = flag(
        None, "part of the named data (default: validation, or the only one)"
    )
    json: bool = flag(False, "print the metrics as JSON")


WHERE = ("data_dir", "data_name", "data_path", "split")
"""Flags that name data other than the run's."""

WITHIN = {"data_name": "data_dir", "split": "data_path"}
"""Flags that name something inside a place, with the flag of that place. The run's place is the default."""

OPTIONS = (
    EvaluateFlags,
    subset_of_flags(
        DataFlags, *WHERE, "text_column", "pair_column", "label_column", "max_eval_samples", "skip_bad_lines",
        "micro_batch_size", micro_batch_size=None,
    ),
    subset_of_flags(ModelFlags, "seq_length", "base", "trust_remote_code"),
    subset_of_flags(TrainingFlags, "task"),
    MixedPrecisionFlags,
    subset_of_flags(LaunchFlags, "nproc_per_node", "master_port", "device"),
)  # fmt: skip

OF_THE_RUN = (
    *("task", "problem_type", "seq_length", "text_column", "pair_column", "label_column"),
    *("loss_on", "pack_sequences", "skip_bad_lines", "text_unit", "keep_documents_apart", "mask_prob"),
    *("whole_word_mask", "mean_span_length", "sentence_pairs", "short_seq_prob", "data_impl", "data_cache_dir"),
    *("preference_loss", "preference_beta", "simpo_gamma", "kto_desirable_weight", "kto_undesirable_weight"),
    *("mixed_precision", "seed", "micro_batch_size", "label_smoothing"),
)
"""Flags of the run on which its metrics depend."""

OF_ITS_DATA = (
    *(*WHERE, "validation_fraction", "max_train_samples", "max_eval_samples", "eval_iters", "streaming"),
    "shuffle_buffer",
    "eval_data_name",
)
"""Flags of the run that select its validation data."""

OWN_METRICS = ("build_data", "compute_loss", "count_targets", "read_outputs", "compute_metrics")
"""Hooks with which a script computes metrics other than those of the task."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``rapidformer evaluate``."""
    return parser_of_saved("evaluate", DESCRIPTION, OPTIONS)


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate and print the metrics.

    Args:
        argv: words after ``rapidformer evaluate``. The default is the command line of this process.

    Raises:
        RapidformerError: the model, the data or a flag cannot be used.
    """
    saved, values = words_of_saved(build_parser(), argv, OPTIONS)
    metric_hooks = [hook for hook in saved.described().get("hooks", ()) if hook in OWN_METRICS]
    if metric_hooks and "task" not in values:
        raise ConfigError(
            f"the run's script has its own {metric_hooks[0]}, which only the script knows",
            where=str(saved.run),
            hint="--task NAME with --data-dir and --data-name evaluates by the library's metrics of that task",
        )
    own_data = not any(name in values for name in WHERE)
    config = _config(saved, values, own_data=own_data)
    _check_files(config, own_data=own_data)

    from rapidformer_templates.run.fit import evaluate

    template = _template(saved, config, own_data=own_data)

    def check() -> None:
        template.task.check()
        assert template.plan

    def body() -> int:
        template.task.check()
        metrics = evaluate(template, _reference(saved, template))
        _show(saved, metrics, as_json=config.user.json)
        return 0

    return in_workers(config.launch.nproc_per_node, config.launch.master_port, check, body)


def _config(saved: SavedModel, values: Values, *, own_data: bool) -> RunConfig:
    """Return the flags of the evaluation as the configuration of a run that does not train.

    Raises:
        ConfigError: no data is named and the run has none, or ``--part`` is given for the run's own data.
    """
    of_the_place = [place for name, place in WITHIN.items() if name in values and place not in values]
    names = (*OF_THE_RUN, *(OF_ITS_DATA if own_data else of_the_place))
    of_a_run: Values = {"no_save": True, "lr": 0.0, "train_iters": 1}
    if "data_path" in values and "split" not in values:
        of_a_run["split"] = "0,1,0"
    config = saved.config(names, EvaluateFlags, **of_a_run, **values)
    if own_data and not {"data_dir", "data_name", "data_path"}.intersection(config.origins):
        hint = "name data with --data-dir and --data-name"
        raise ConfigError("no data is named, and there is no run to take it from", where="--data-dir", hint=hint)
    if own_data and config.user.part is not None:
        hint = "leave it out, or name data with --data-dir and --data-name"
        raise ConfigError("the evaluation of the run itself has only one part", where="--part", hint=hint)
    return config


def _check_files(config: RunConfig, *, own_data: bool) -> None:
    """Check that the model and the data exist. This needs no torch.

    Raises:
        RapidformerError: the mistakes.
    """
    data, part = config.data, config.user.part
    mistakes = MistakeCollector()
    mistakes.run(check_model_files, config)
    with mistakes.collect():
        if config.training.task == "pretraining":
            check_text_paths(data.data_path or ())
        elif not data.streaming:
            for flags in flags_of_sets(data):
                if own_data:
                    locate(flags)
                else:
                    locate_part(flags, part and PART_NAMES[part])
    mistakes.raise_all()


def _template(saved: SavedModel, config: RunConfig, *, own_data: bool) -> Trainer:
    from rapidformer_templates.trainer import Trainer

    template = Trainer([])
    template.config = config
    if not own_data:
        part = config.user.part
        template.task.load_label_state(saved.decisions(config.training.task), part and PART_NAMES[part])
    return template


def _reference(saved: SavedModel, template: Trainer) -> Callable[[], nn.Module] | None:
    """Return a function that builds the run's initial model, if preferences are measured against it.

    Raises:
        ConfigError: the initial model is not known.
    """
    if not template.task.needs_reference:
        return None
    start = saved.values.get("pretrained_model_name_or_path")
    if start is None or "load" in saved.values:
        raise ConfigError(
            "the reference model that preferences are measured against is unknown",
            where="RUN",
            hint="evaluate the run folder of a run that began with --pretrained-model-name-or-path",
        )
    from rapidformer_templates.data.tasks import load_task

    # --base names the base of the run's adapters. With adapters, the run began with their base.
    begun = template.config.model.base or start[0]
    config = template.config.replace(start[1], pretrained_model_name_or_path=begun, base=None)
    return lambda: load_task(config).build_model()


def _show(saved: SavedModel, metrics: dict[str, float], *, as_json: bool) -> None:
    """Print the metrics on rank 0."""
    import os

    from rapidformer_templates.system.files import finite

    if os.environ.get("RANK", "0") != "0":
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
    if coding:
        print(
            f"note: the run rounded its base with --quantize-base {coding}. Here the base is used as it is in its "
            "files, so these numbers differ a little from those of the run."
        )
