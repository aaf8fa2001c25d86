"""The words of a command in a shell script, with the values of the variables that the script sets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from rapidformer_templates.errors import ConfigError

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
    return (
        str(eval(named.strip().replace("/", "//"))) if _SUM.fullmatch(named) else match[0]
    )  # digits and operators only


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
