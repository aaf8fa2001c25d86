"""The shared parts of ``evaluate``, ``predict`` and ``chat``: the command line, the workers, the loaded model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rapidformer_templates.errors import MistakeCollector
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.environment import detect
from rapidformer_templates.planning.flag_parser import CommandParser, add_flags, check_values, parse_words
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.run.saved_model import SavedModel, find_saved
from rapidformer_templates.system import launch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rapidformer_templates.data.generation import Generation
    from rapidformer_templates.data.tasks import Task
    from rapidformer_templates.system.workers import Workers


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
    argv: Sequence[str] | None,
    options: Iterable[type],
    check: Callable[[Values], None] = lambda values: None,
) -> tuple[SavedModel, Values]:
    """Return the saved model, and the values of the command line.

    Args:
        argv: words after the name of the command. The default is the command line of this process.
        options: dataclasses with the command's flags.
        check: the command's own check of the values.

    Raises:
        RapidformerError: the mistakes of the command, all at once.
    """
    mistakes = MistakeCollector()
    values = parse_words(parser, sys.argv[1:] if argv is None else argv, mistakes)
    path = values.pop("run")
    check_values(values, options, mistakes)
    saved = None
    with mistakes.collect():
        saved = find_saved(str(path))
    mistakes.run(check, values)
    mistakes.raise_all()
    assert saved is not None
    return saved, values


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


def generation_of(config: RunConfig) -> Generation:
    """Return how texts are generated, from the :class:`GenerationFlags` among the command's own flags."""
    from rapidformer_templates.data.generation import Generation

    return Generation(config.user.max_new_tokens, config.user.temperature, config.training.seed)
