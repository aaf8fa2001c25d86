"""The shared parts of ``evaluate``, ``predict`` and ``chat``: the command line, the workers, the loaded model."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from rapidformer_templates.commands.export import step_to_export
from rapidformer_templates.errors import CheckpointError, ConfigError, MistakeCollector
from rapidformer_templates.planning.config import COMMAND_LINE, RunConfig, checked_value, field_types, spelling
from rapidformer_templates.planning.environment import detect
from rapidformer_templates.planning.flag_parser import CommandParser, add_flags, parse, parse_words
from rapidformer_templates.planning.flags import DataFlags, ModelFlags, flag
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.run.folder import RunFolder
from rapidformer_templates.run.saved_model import SavedModel, find_saved, values_of
from rapidformer_templates.run.scripts import capture_template, overridden_hooks
from rapidformer_templates.system import launch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rapidformer_templates.data.generation import Generation
    from rapidformer_templates.data.tasks import Task
    from rapidformer_templates.run.export import ExportedWeights
    from rapidformer_templates.system.workers import Workers
    from rapidformer_templates.trainer import Trainer


@dataclass(frozen=True)
class GenerationFlags:
    """Generated texts (causal_lm, seq2seq_lm, preference)"""

    max_new_tokens: int | None = flag(
        None,
        "maximum number of new tokens of a text (default: what the model takes, at most 256)",
        metavar="N",
        minimum=1,
    )
    temperature: float = flag(
        0.0, "0: always the likeliest token; above 0: sample, with more randomness for higher values", minimum=0
    )


OF_THE_RUN = (
    *("task", "problem_type", "seq_length", "text_column", "pair_column", "label_column", "tools_column"),
    *("loss_on", "pack_sequences", "skip_bad_lines", "text_unit", "keep_documents_apart", "mask_prob"),
    *("whole_word_mask", "mean_span_length", "sentence_pairs", "short_seq_prob", "data_impl", "data_cache_dir"),
    *("preference_loss", "preference_beta", "simpo_gamma", "kto_desirable_weight", "kto_undesirable_weight"),
    *("mixed_precision", "seed", "micro_batch_size", "label_smoothing", "data_iterator"),
)
"""Flags of the run on which its metrics depend."""


WHERE = ("data_dir", "data_name", "data_path", "split")
"""Flags that name data other than the run's."""

OF_ITS_PARTS = (*WHERE, "data_config", "data_split", "validation_fraction", "max_train_samples")
"""Flags of the run that select its data and divide them into parts."""

OF_ITS_DATA = (*OF_ITS_PARTS, "max_eval_samples", "streaming", "shuffle_buffer", "eval_data_name")
"""Flags of the run that select its validation data."""


def parser_of_saved(name: str, description: str, options: Iterable[type]) -> argparse.ArgumentParser:
    """Return the parser of a command that uses a saved model.

    Args:
        name: name of the command.
        options: dataclasses with the command's flags.
    """
    parser = CommandParser(
        prog=f"rapidformer {name}",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        exit_on_error=False,
    )
    parser.add_argument("run", metavar="RUN|FOLDER", help="run folder with its export/, or a transformers folder")
    for option in options:
        add_flags(parser, option)
    return parser


Values = dict[str, Any]
"""Values of flags, by field name."""


def words_of_saved(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    options: Iterable[type],
    check: Callable[[Values], None] = lambda values: None,
) -> tuple[SavedModel, Values]:
    """Return the saved model, and the values of the command line.

    Args:
        argv: words after the name of the command.
        options: dataclasses with the command's flags.
        check: the command's own check of the values.

    Raises:
        RapidformerError: the mistakes of the command, all at once.
    """
    mistakes = MistakeCollector()
    values = parse_words(parser, argv, mistakes)
    path = values.pop("run")
    for kind in options:
        for f in dataclasses.fields(kind):
            if f.name in values:
                mistakes.run(checked_value, f, field_types(kind)[f.name], values[f.name], COMMAND_LINE)
    saved = None
    with mistakes.collect():
        saved = find_saved(str(path))
    mistakes.run(check, values)
    mistakes.raise_all()
    assert saved is not None
    return saved, values


def template_of_script(
    script: str, saved: SavedModel, left_out: Iterable[str], values: Values, **more: object
) -> Trainer:
    """Return the template that a script would train, with the flags of its run that concern the model and the data.

    Args:
        left_out: names of flags of the run that do not apply.
        values: values of the command line, by field name, which win over those of the run.
        more: further values of flags.

    Raises:
        ConfigError: the folder is not one of a run, or the script trains nothing.
    """
    if saved.run is None:
        message = f"{saved.folder} is not of a run"
        raise ConfigError(message, where="--user-script", hint="name the --save folder of the script's run")
    template = cast("Trainer", capture_template(script, [], lambda template: template))
    config, user = template.config, type(template).Flags
    kinds = [ModelFlags, DataFlags, *(type(config.switches[s.name]) for s in REGISTRY.switches if s.exported)]
    names = {f.name for kind in (*kinds, *([user] if user else [])) for f in dataclasses.fields(kind)} | set(OF_THE_RUN)
    of_the_run = values_of(saved.run, config.kinds())
    in_code = {name: of_the_run[name] for name in (of_the_run.keys() & names).difference(left_out)}
    in_code |= {name: (value, "the command") for name, value in more.items()}
    in_code |= {name: (value, COMMAND_LINE) for name, value in values.items()}
    given = [spelling(f.name) for f in dataclasses.fields(DataFlags) if f.name in values]
    if given and "build_data" in overridden_hooks(type(template)):
        own = f"the build_data of {type(template).__name__} is the script's"
        print(f"note       {own}: {', '.join(given)} acts if it reads self.config.data", file=sys.stderr)
    template.set_config(REGISTRY.merge_files(parse([], REGISTRY.options(), user=user, in_code=in_code)))
    return template


def weights_of_run(saved: SavedModel) -> ExportedWeights:
    """Return the weights that a run exports, from its best or newest checkpoint.

    Raises:
        RapidformerError: the checkpoint is lost or damaged.
    """
    from rapidformer_templates.run.checkpoint.format import folder_of, problem_of
    from rapidformer_templates.run.export import ExportedWeights

    assert saved.run is not None, "template_of_script checks it"
    folder = RunFolder(saved.run)
    checkpoint = folder_of(folder.checkpoints, step_to_export(folder, None, merge=False)[0])
    if problem := problem_of(checkpoint):
        hint = "the weights of a run with its own hooks are read from there"
        raise CheckpointError(f"the checkpoint cannot be used: {problem}", where=str(checkpoint), hint=hint)
    return ExportedWeights(checkpoint, averages="ema_decay" in saved.values)


def in_workers(count: int | None, port: int | None, check: Callable[[], object], body: Callable[[], int]) -> int:
    """Run the body of a command in this process, or in several workers that run the whole command again.

    Args:
        check: finds mistakes before the workers start.

    Returns:
        The exit status.
    """
    if launch.is_worker():
        return launch.report_errors(body)
    if (count or 1) == 1:
        return body()
    check()
    launch.run_workers(launch.program_command(), count or 1, port)
    return 0


@contextmanager
def model_on_device(task: Task, config: RunConfig) -> Iterator[tuple[PreTrainedModel, Workers]]:
    """Join the workers and load the model. Forwards inside the context run in the type of ``--mixed-precision``."""
    import torch

    from rapidformer_templates.engines.local import COMPUTE_TYPES
    from rapidformer_templates.system import accelerator
    from rapidformer_templates.system.workers import join

    compute_type = COMPUTE_TYPES.get(config.get("mixed_precision") or "")
    with join(detect(None, "", device=config.launch.device).device) as workers:
        model = task.build_model().eval()
        accelerator.move(model, workers.device)
        with torch.autocast(workers.device.type, dtype=compute_type) if compute_type else nullcontext():
            yield model, workers


def generation_of(flags: GenerationFlags, config: RunConfig) -> Generation:
    """Return how texts are generated."""
    from rapidformer_templates.data.generation import Generation

    return Generation(flags.max_new_tokens, flags.temperature, config.training.seed)
