"""``rapidformer chat``: talk to the language model of a run."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rapidformer_templates.commands import saved_model
from rapidformer_templates.data.finetuning.messages import Tools, read_tools
from rapidformer_templates.data.text.files import NOT_UTF8, UTF8_HINT
from rapidformer_templates.errors import ConfigError, DataError
from rapidformer_templates.models.model_files import check_model_files
from rapidformer_templates.planning.config import subset_of_flags
from rapidformer_templates.planning.flags import LaunchFlags, ModelFlags, TrainingFlags, flag
from rapidformer_templates.planning.tasks import tasks_with
from rapidformer_templates.run.out_of_memory import explained_without_plan
from rapidformer_templates.run.saved_model import SavedModel, load_saved_task
from rapidformer_templates.switches.mixed_precision import MixedPrecisionFlags

if TYPE_CHECKING:
    from rapidformer_templates.run.predictions import Conversation

DESCRIPTION = """Talk to the exported language model of a run, or to any causal language model of transformers.

At a terminal: answers come word by word; /reset forgets the conversation, /exit or Ctrl-D ends the program, Ctrl-C
ends an answer. Elsewhere each line of standard input is a message, and each answer goes to standard output. With
--tools, a line /tool TEXT is the result of a call."""

PROMPT = "> "


@dataclass(frozen=True)
class ChatFlags:
    """Conversation"""

    system: str | None = flag(None, "system message, before all others", metavar="TEXT")
    tools: str | None = flag(None, "JSON file with a list of tools that the model may call", metavar="FILE")


@dataclass(frozen=True)
class ChatOptions(ChatFlags, saved_model.GenerationFlags):
    """The options of the command that are not flags of a run."""


OPTIONS = (
    ChatFlags,
    saved_model.GenerationFlags,
    subset_of_flags(ModelFlags, "base", "trust_remote_code"),
    subset_of_flags(TrainingFlags, "task", "seed"),
    MixedPrecisionFlags,
    subset_of_flags(LaunchFlags, "device"),
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``rapidformer chat``."""
    return saved_model.parser_of_saved("chat", DESCRIPTION, OPTIONS)


def main(argv: Sequence[str]) -> int:
    """Chat until the input ends.

    Args:
        argv: words after ``rapidformer chat``.

    Raises:
        RapidformerError: the model or a flag cannot be used.
    """
    saved, values = saved_model.words_of_saved(build_parser(), argv, OPTIONS)
    config = saved.config(user=ChatOptions, **values)
    if config.training.task not in tasks_with(lambda task: task.continues_text):
        raise _cannot_chat(config.training.task, saved)
    check_model_files(config)
    tools = _read_tools(config.user.tools)
    task = load_saved_task(config, saved)
    if task.auto_class != "AutoModelForCausalLM":  # pretraining of an encoder
        raise _cannot_chat(task.name, saved)

    from rapidformer_templates.run.predictions import Conversation

    with (
        explained_without_plan(str(saved.folder), "a device with more memory, or a smaller model"),
        saved_model.model_on_device(task, config) as (model, _),
    ):
        conversation = Conversation(
            model, task.tokenizer, saved_model.generation_of(config.user, config), config.user.system, tools
        )
        if conversation.is_plain:
            print("note: the tokenizer has no chat template: a plain one is used", file=sys.stderr)
        talk(conversation, at_terminal=sys.stdin.isatty() and sys.stdout.isatty(), name=str(saved.folder))
    return 0


def _read_tools(file: str | None) -> Tools | None:
    """Read the tools of a file.

    Raises:
        DataError: it cannot be read, or holds no tools.
    """
    if file is None:
        return None
    try:
        tools = read_tools(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}", where="--tools", hint="name a JSON file") from error
    except DataError as error:
        raise DataError(error.message, where=f"--tools {file}", hint=error.hint) from error
    if tools is None:
        raise DataError("there is no tool in the file", where=f"--tools {file}", hint="write a list of JSON schemas")
    return tools


def _cannot_chat(task: str | None, saved: SavedModel) -> ConfigError:
    hint = f"rapidformer predict {saved.run or saved.folder} --input FILE --output FILE predicts the rows of a file"
    return ConfigError(f"a model for {task} does not chat", where="RUN", hint=hint)


def talk(conversation: Conversation, *, at_terminal: bool, name: str) -> None:
    """Answer each line of the input until it ends or a line is ``/exit``."""
    if at_terminal:
        print(f"{name}: /reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C ends an answer")
    for line in _lines(at_terminal=at_terminal):
        if line == "/exit":
            return
        if line == "/reset":
            conversation.reset()
            if at_terminal:
                print("(forgotten)")
        elif line.startswith("/tool "):
            _answer(conversation, line.removeprefix("/tool "), "tool")
        elif line.startswith("/") and at_terminal and " " not in line:
            print(f"unknown command {line}: use /reset, /tool TEXT or /exit")
        elif line:
            _answer(conversation, line)


def _lines(*, at_terminal: bool) -> Iterator[str]:
    """Yield the lines of the input. A terminal shows a prompt, and Ctrl-C clears its line."""
    if not at_terminal:
        try:
            yield from (line.strip() for line in sys.stdin)
        except UnicodeDecodeError as error:
            raise DataError(NOT_UTF8, where="standard input", hint=UTF8_HINT) from error
        return
    with suppress(ImportError):
        import readline  # noqa: F401 - arrows and earlier lines at the prompt
    while True:
        try:
            yield input(PROMPT).strip()
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def _answer(conversation: Conversation, line: str, role: str = "user") -> None:
    """Print an answer piece by piece. Ctrl-C stops it at the next word.

    Python drops an interrupt that is raised inside a callback, so the signal handler only records it.
    """
    interrupts: list[int] = []

    def say(piece: str) -> None:
        print(piece, end="", flush=True)
        if interrupts:
            interrupts.clear()  # the rest of the answer is still printed when it has ended
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        forgotten = conversation.answer(line, say, role)
        print()
    except KeyboardInterrupt:
        print(" …")
        return
    except DataError as error:
        print(error.render(), file=sys.stderr)
        return
    finally:
        signal.signal(signal.SIGINT, before)
    if forgotten:
        print(f"note: the {forgotten} oldest messages are forgotten: the model has no room for them", file=sys.stderr)
