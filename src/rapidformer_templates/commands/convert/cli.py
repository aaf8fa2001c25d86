"""``rapidformer convert``: reads another trainer's configuration, writes ours, and checks that its plan resolves.

The second half reads the words of a command in a shell script, with the values of the variables that the script sets.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from rapidformer_templates.commands.convert import reader
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
    options = reader.Options(
        arguments.world_size, arguments.samples, arguments.task, (Path(), *file.absolute().parents)
    )
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
    about = "Convert a configuration of another trainer to a YAML file for --config, name what has no counterpart, "
    about += "and check that the plan of the result resolves."
    parser = CommandParser(prog="rapidformer convert", description=about)
    text = "YAML of axolotl, LLaMA-Factory or TRL, JSON of TrainingArguments, or a shell script that starts Megatron-LM"
    parser.add_argument("file", metavar="FILE", help=text)
    parser.add_argument("--from", dest="format", choices=FORMATS, help="format (default: recognized by its keys)")
    parser.add_argument("--output", metavar="FILE", help="file to write (default: standard output)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    parser.add_argument("--world-size", type=positive, metavar="N", help="workers (default: those in the file, else 1)")
    text = "samples of an epoch, for a validation set that is a number of rows, and for log lines at a share of the run"
    parser.add_argument("--samples", type=positive, metavar="N", help=text)
    parser.add_argument("--task", choices=tuple(TASKS), help="task (default: from the file)")
    text = f"GPU of the plan (default: {USUAL_GPU})"
    parser.add_argument("--device-kind", choices=tuple(DEVICE_KINDS), default=USUAL_GPU, help=text)
    return parser


def converted(file: Path, name: str | None, options: reader.Options) -> tuple[str, reader.Conversion]:
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
        return "megatron", reader.convert_megatron(*arguments_of_script(text), options)
    values = reader.mapping_of(text, file)
    name = name or recognized(values, file)
    if name == "megatron":
        raise ConfigError(f"{file} is not a shell script", where="--from megatron", hint="leave --from out")
    result = reader.convert_trainer(name, values, options)
    if name == "transformers" and file.suffix == ".json":  # it has every argument, also those that nobody has set
        from transformers import TrainingArguments

        usual = {f"{field.name}: {reader.shown(field.default)}" for field in dataclasses.fields(TrainingArguments)}
        result.left = {setting: hint for setting, hint in result.left.items() if setting not in usual}
    return name, result


def remarks(result: reader.Conversion) -> list[str]:
    """Return the lines about everything that the flags do not show."""
    lines = ["Not converted:"] if result.left else []
    for hint in sorted(
        dict.fromkeys(result.left.values()), key=reader.UNKNOWN.__eq__
    ):  # settings with one hint share a line
        lines += [f"  {'; '.join(key for key, other in result.left.items() if other == hint)}", f"    {hint}"]
    return [*lines, *(["Notes:"] if result.notes else []), *(f"  {note}" for note in result.notes)]


def as_yaml(result: reader.Conversion, title: str) -> str:
    """Return the text of a file for ``--config``: the flags, and then the remarks as comments.

    Args:
        title: the first line.
    """
    flags = {name.replace("_", "-"): value for name, value in result.flags.items()}
    body = yaml.safe_dump(flags, sort_keys=False, allow_unicode=True, width=1000) if flags else ""
    comments = [f"# {line}\n" for line in remarks(result)]
    return "".join([f"# {title}\n", body, *(["\n", *comments] if comments else [])])


def recognized(values: Mapping[str, reader.Value], file: Path) -> str:
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


_TOKEN = re.compile(
    r"""(?P<document><<-?\s*['"]?(?P<mark>\w+)['"]?[^\n]*\n.*?^\s*(?P=mark)$)
    |(?P<quoted>'[^']*'|"(?:\\.|[^"\\])*"|\\.|\$\(\([^()]*\)\)|\$\([^()]*\))
    |(?P<comment>(?<!\S)\#[^\n]*)
    |(?P<other>.)""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_VARIABLE = re.compile(r"\$\{(\w+)(\[[@*]\])?(:?[-=]([^{}]*))?\}|\$(\w+)")
_ARITHMETIC = re.compile(r"\$\(\(([^()$]*)\)\)")
_SETTING = re.compile(
    r"(?:export\s+|local\s+|declare\s+(?:-\w+\s+)?)?(\w+)(\+?)=(\(.*\)|\"[^\"]*\"|'[^']*'|\S*)$", re.DOTALL
)
_TEST = re.compile(r"\[\[?\s+(.*?)\s+\]?\]", re.DOTALL)
_SUM = re.compile(r"\s*[1-9]\d{0,17}(\s*[-+*/%]\s*[1-9]\d{0,17})*\s*")
_JOINING = ("then", "do", "done", "{", "}")


def arguments_of_script(text: str) -> tuple[str, dict[str, Any], int | None]:
    """Return the training script, its arguments and the number of workers that a shell script starts.

    Raises:
        ConfigError: the shell script starts no training script with arguments.
    """
    for words in commands(text):
        scripts = [i for i, word in enumerate(words) if word.endswith(".py")]
        if scripts and any(word.startswith("--") for word in words[scripts[0] + 1 :]):
            launcher = {name.replace("-", "_"): str(value) for name, value in _arguments(words[: scripts[0]]).items()}
            local, nodes = launcher.get("nproc_per_node", ""), launcher.get("nnodes", "")
            workers = int(local) * (int(nodes) if nodes.isdecimal() else 1) if local.isdecimal() else None
            return words[scripts[0]], _arguments(words[scripts[0] + 1 :]), workers
    hint = "the file must contain a command such as: torchrun … pretrain_gpt.py --num-layers …"
    raise ConfigError("no command with a training script and its arguments was read", where="FILE", hint=hint)


def _arguments(words: Iterable[str]) -> dict[str, str | int]:
    """Return the arguments by name, without the dashes. An argument without a value is true."""
    arguments: dict[str, str | bool] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            arguments[name] = value if equals else True
        elif name:
            before = arguments[name]
            arguments[name] = word if before is True else f"{before} {word}"
    return {name: int(value) if str(value).isdecimal() else value for name, value in arguments.items()}


@dataclass
class _Branch:
    """An ``if`` or a ``case`` whose end was not read yet.

    Attributes:
        word: the word that a ``case`` compares, or None for an ``if``.
        is_taken: whether the commands of the current branch run.
        is_done: whether one of the branches was taken.
    """

    word: str | None
    is_taken: bool
    is_done: bool

    def take(self, *, holds: bool) -> None:
        """Begin the next branch."""
        self.is_taken = holds and not self.is_done
        self.is_done = self.is_done or self.is_taken


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a script.

    Variables have the values that the script gives them. A variable from elsewhere keeps its name: ``$1``. A branch
    runs if it compares texts and its condition holds. Other conditions do not hold. The body of a loop runs once.

    Raises:
        ConfigError: a command that starts a Python script has a quote that is not closed.
    """
    variables: dict[str, str] = {}
    branches: list[_Branch] = []
    for statement in _statements(text):
        if _is_branch(statement, branches, variables) or not all(branch.is_taken for branch in branches):
            continue
        setting = _SETTING.fullmatch(statement)
        if setting:
            name, more, value = setting.groups()
            value = _value(expanded(value, variables))
            variables[name] = f"{variables.get(name, '')} {value}".strip() if more else value
        elif ".py" in (command := expanded(statement, variables)):
            yield _words(command)


def _statements(text: str) -> Iterator[str]:
    """Yield the statements of a script without comments. A list in parentheses is one statement."""
    statement, depth = "", 0
    for token in _TOKEN.finditer(text.replace("\\\n", " ") + "\n"):
        character = token["other"]
        if token["comment"] or token["document"]:
            continue
        if character == "(" and (depth or statement.endswith("=")):
            depth += 1
        elif character == ")" and depth:
            depth -= 1
        if character and character in ";\n" and not depth:
            for word in _JOINING:  # a command may follow "then" on its line
                statement = re.sub(rf"^\s*{re.escape(word)}(?=\s|$)", "", statement)
            if statement.strip():
                yield statement.strip()
            statement = ""
        else:
            statement += token[0]


def _is_branch(statement: str, branches: list[_Branch], variables: dict[str, str]) -> bool:
    """Return whether a statement begins or ends a branch, and do so."""
    first, _, rest = statement.partition(" ")
    branch = branches[-1] if branches else None
    if first == "if":
        holds = _holds(rest, variables)
        branches.append(_Branch(None, holds, holds))
    elif first == "case":
        branches.append(_Branch(_value(expanded(rest.removesuffix(" in").strip(), variables)), False, False))
    elif branch and first in ("fi", "esac"):
        branches.pop()
    elif branch and branch.word is None and first in ("elif", "else"):
        branch.take(holds=first == "else" or _holds(rest, variables))
    elif branch and branch.word is not None and statement.endswith(")") and "(" not in statement:
        patterns = (pattern.strip(" \"'") for pattern in statement[:-1].split("|"))
        branch.take(holds=any(fnmatchcase(branch.word or "", pattern) for pattern in patterns))
    else:
        return False
    return True


def _holds(condition: str, variables: dict[str, str]) -> bool:
    """Return whether a condition holds, if it tests texts. ``||`` joins several tests."""
    for test in condition.split("||"):
        inside = _TEST.fullmatch(test.strip())
        # A variable that the script does not set is empty.
        match [_value(expanded(word, variables, unset="")) for word in inside[1].split()] if inside else []:
            case [text, "==" | "=" | "!=" as operator, pattern]:
                holds = fnmatchcase(text, pattern) == (operator != "!=")
            case ["-z" | "-n" as operator, text]:
                holds = (text == "") == (operator == "-z")
            case _:
                holds = False
        if holds:
            return True
    return False


def expanded(text: str, variables: dict[str, str], unset: str | None = None) -> str:
    """Return a text with the values of variables and of whole-number arithmetic.

    Args:
        unset: the value of a variable that is not set. None keeps its name.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[5]
        default = match[4] if match[3] else match[0] if unset is None else unset
        return variables.get(name) or default

    for _ in range(4):  # values and defaults may name variables, too
        text = _ARITHMETIC.sub(lambda match: _computed(match, variables), _VARIABLE.sub(value, text))
    return text


def _computed(match: re.Match[str], variables: dict[str, str]) -> str:
    """Return the result of an arithmetic expression, or the expression if it is not one of positive whole numbers."""
    named = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1])
    # Only digits and operators are evaluated.
    return str(eval(named.strip().replace("/", "//"))) if _SUM.fullmatch(named) else match[0]


def _value(text: str) -> str:
    """Return the value of a setting without its quotes. A list is a text with spaces."""
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        # An item "--name value" becomes two words, because scripts use lists without quotes.
        return " ".join(word if " " in word else shlex.quote(word) for word in _words(text[1:-1]))
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1].strip()
    return text


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"a command cannot be read ({error}): {text[:60]}", where="FILE") from error
