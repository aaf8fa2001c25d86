"""The ``rapidformer`` command. It does not import torch, so planning and help answer at once."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import select
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rapidformer_templates.commands.plan import PlanFlags
from rapidformer_templates.errors import ConfigError, Explained, Interrupted, did_you_mean, long_names_explained
from rapidformer_templates.planning.flag_parser import FlagParser, build_parser
from rapidformer_templates.planning.registry import load_object, switch_options
from rapidformer_templates.run import scripts
from rapidformer_templates.system import launch
from rapidformer_templates.system.terminal import escape_unknown_characters

if TYPE_CHECKING:
    from rapidformer_templates.trainer import Trainer

HELP = """Train transformers. Each acceleration is one switch.

commands:
  rapidformer --task TASK …     train
  rapidformer plan …            resolve the flags of a training command and start nothing;
                                with --auto-strategy: list the layouts that fit, best first;
                                with --user-script: plan what the script would run
  rapidformer switches          catalogue of the switches and their compatibility
  rapidformer explain RF002     a rule, its reason, an example that breaks it, and what to do instead
  rapidformer doctor            what this machine has, what does not work, and what to do about it
  rapidformer data …            make, join and check data sets for pretraining
  rapidformer export RUN        the model of a run that was interrupted, or of any of its checkpoints;
                                with --merge: adapters added to their base
  rapidformer evaluate RUN …    the metrics of a run's model, on its own or on other data
  rapidformer predict RUN …     predictions of a run's model for the rows of a file
  rapidformer chat RUN          talk to a language model
  rapidformer bench …           measure
  rapidformer demo              fine-tune a pretrained model on labelled tweets with 2 workers
  rapidformer new KIND FILE     write a script to start from: finetuner, pretrainer, trainer; or the examples
  rapidformer convert FILE      our YAML for a configuration of axolotl, LLaMA-Factory, transformers or Megatron-LM
  rapidformer schema            print the JSON schema of the YAML files of --config, for editors
  rapidformer completion SHELL  print a script for bash, zsh, fish …: eval "$(rapidformer completion bash)"

Each command has --help. Every flag is accepted with dashes or underscores, and as a key of the YAML file of
--config."""


@dataclass(frozen=True)
class CommandHome:
    """Where a command is.

    Attributes:
        module: its module in this folder.
        main: its function, which takes the words after the command.
        parser: the function that returns its parser.
    """

    module: str
    main: str = "main"
    parser: str = "build_parser"

    def run(self, words: Sequence[str]) -> int:
        """Run the command and return its exit status."""
        main: Callable[[Sequence[str]], int] = load_object(f"rapidformer_templates.commands.{self.module}:{self.main}")
        return main(words)

    def build_parser(self) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = load_object(f"rapidformer_templates.commands.{self.module}:{self.parser}")()
        return parser


OTHERS = {
    "data": CommandHome("data"),
    "export": CommandHome("export"),
    "evaluate": CommandHome("evaluate"),
    "predict": CommandHome("predict"),
    "chat": CommandHome("chat"),
    "bench": CommandHome("bench.cli"),
    "demo": CommandHome("demo"),
    "new": CommandHome("demo", "new_main", "new_parser"),
    "convert": CommandHome("convert.cli"),
    "schema": CommandHome("completion", "schema_main", "schema_parser"),
    "completion": CommandHome("completion"),
}
"""The commands that have their own parser."""

REFERENCE = {
    "plan": CommandHome("plan"),
    "switches": CommandHome("catalogue"),
    "explain": CommandHome("catalogue", "explain_main", "explain_parser"),
    "doctor": CommandHome("doctor"),
}
"""The commands that start nothing. ``rapidformer`` itself shows their help."""

COMMANDS = (*REFERENCE, *OTHERS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. A user's mistake is reported as one message on standard error, without a stack trace.

    Args:
        argv: words after ``rapidformer``. The default is the command line of this process.

    Returns:
        The exit status: 0, or that of the error. It is 2 for a mistake in the command, and ``errors.py`` has others.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    escape_unknown_characters()
    try:
        with _read_no_further(), long_names_explained():
            return _dispatch(words)
    except Explained as error:
        print(error.render(), file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:  # during imports only, because a run treats it as a request to save and stop
        print("interrupted", file=sys.stderr)
        return Interrupted.LOST


@contextmanager
def _read_no_further() -> Iterator[None]:
    """Exit without an error message if the reader of the output stops early, as ``head`` does."""
    try:
        yield
        sys.stdout.flush()  # here rather than at Python's exit
    except BrokenPipeError as error:
        watch = select.poll()
        watch.register(sys.stdout.fileno(), 0)
        if not any(event & select.POLLERR for _, event in watch.poll(0)):
            raise  # the error is about another pipe, used in the body
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for output that is still in the buffer
        raise SystemExit(128 + signal.SIGPIPE) from error  # as a shell reports a program that SIGPIPE has killed


def _dispatch(words: list[str]) -> int:
    command, rest = words[0] if words else "--help", words[1:]
    if command in OTHERS:
        return OTHERS[command].run(rest)
    if command == "--version":
        print(f"rapidformer_templates {importlib.metadata.version('rapidformer_templates')}")
        return 0
    if "--help-all" in words:
        print(all_flags_parser().format_help())
        return 0
    if {"-h", "--help"}.intersection(words or ["--help"]):
        is_own = command in REFERENCE
        print(REFERENCE[command].build_parser().format_help() if is_own else all_flags_parser().format_usual_help())
        return 0
    if command in REFERENCE:
        return REFERENCE[command].run(rest)
    if not command.startswith("-"):
        of_files = {".yaml": "--config", ".yml": "--config", ".json": "--config", ".py": "--user-script"}
        flag = of_files.get(Path(command).suffix)
        to_train = shlex.join(["rapidformer", *rest]) if rest else "rapidformer --task TASK …"
        hint = did_you_mean(command, COMMANDS) or f"to train: {to_train}; commands: {', '.join(COMMANDS)}"
        hint = f"did you mean rapidformer {flag} {command}?" if flag else hint
        raise ConfigError(f"unknown command '{command}'", hint=hint)
    return train(words)


def train(argv: Sequence[str]) -> int:
    """Train with the flags in ``argv``. If ``--user-script`` names a script, run it with the other flags instead.

    Raises:
        RapidformerError: the run is refused or fails.
    """
    from rapidformer_templates.run import configure
    from rapidformer_templates.run.early_checks import refuse_mistakes, refuse_mistakes_of_script

    script, rest = scripts.split_script(argv)
    if script is not None:
        refuse_mistakes_of_script(script, rest)
        scripts.train_script(script, rest)
        return 0
    template = configure.choose(argv)[0] if launch.is_worker() else refuse_mistakes(argv)
    _template(template)(argv).fit()
    return 0


def template_of(argv: Sequence[str]) -> type[Trainer]:
    """Return the template of a black-box run with these flags. It is chosen from the task and the switches."""
    from rapidformer_templates.run import configure

    return _template(configure.choose(argv)[0])


def _template(name: str) -> type[Trainer]:
    template: type[Trainer] = load_object(f"rapidformer_templates.{name.lower()}:{name}")
    return template


def all_flags_parser() -> FlagParser:
    """Return the parser of every flag. Its description lists the commands."""
    parser = build_parser("rapidformer", switch_options().values(), PlanFlags, HELP)
    parser.usual -= {field.name for field in dataclasses.fields(PlanFlags)}
    parser.usage = f"rapidformer [{' | '.join(COMMANDS)}] [flags]"
    return parser
