"""Tabs on the site: a training command as a command, in Python and as a YAML file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from rapidformer_templates.planning.config import COMMAND_LINE, to_yaml
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.flag_values import Interval
from rapidformer_templates.planning.registry import REGISTRY, switch_options
from rapidformer_templates.planning.resolve import choose_template

BLOCK = re.compile(r"^```bash\n((?:[^`\n]*\n)+?)^```$", flags=re.M)
TRAINING = re.compile(r"rapidformer --\w")
FORM = re.compile(r"[$…]|^\w+=|--config|--user-script", flags=re.M)
"""Parts of a command that have no equal in Python or YAML, and of forms that are not commands."""
FOR_WORKERS = "nproc_per_node"


def with_tabs(markdown: str) -> str:
    """Return a page on which every block with one training command has three tabs."""
    return BLOCK.sub(lambda block: _tabs(block[1]) or block[0], markdown)


def training_words(block: str) -> Sequence[str] | None:
    """Return the flags of a block that is one training command without variables, or None."""
    joined = block.replace("\\\n", " ").strip()
    if "\n" in joined or not TRAINING.match(joined) or FORM.search(joined):
        return None
    return shlex.split(joined)[1:]


def _tabs(command: str) -> str | None:
    words = training_words(command)
    if words is None:
        return None
    tabs = {
        "Command": f"```bash\n{command}```",
        "Python": f"```python\n{as_python(words)}\n```",
        "YAML": f"```yaml\n# run.yaml, for: rapidformer --config run.yaml\n{as_yaml(words)}```",
    }
    return "\n\n".join(f'=== "{name}"\n\n{_indented(text)}' for name, text in tabs.items()) + "\n"


def as_python(words: Sequence[str]) -> str:
    """Return the call of a template that does the same as a command."""
    config = parse(words, switch_options())
    template, _ = choose_template(REGISTRY.complete(config), REGISTRY)
    given = {name: value for name, value in config.items() if config.origin(name) == COMMAND_LINE}
    workers = given.pop(FOR_WORKERS, None)
    position = _order(words)
    names = sorted(given.keys() - {"template"}, key=position)
    fit = f".fit(workers={workers})" if workers else ".fit()"
    texts = {
        name: words[position(name) + 1] if isinstance(given[name], float) else _literal(given[name]) for name in names
    }
    lines = [f"    {name}={text}," for name, text in texts.items()]
    return "\n".join([f"from rapidformer_templates import {template}\n", f"{template}(", *lines, f"){fit}"])


def as_yaml(words: Sequence[str]) -> str:
    """Return the file for ``--config`` that does the same as a command."""
    given = yaml.safe_load(to_yaml(parse(words, switch_options())))
    return yaml.safe_dump({name: given[name] for name in sorted(given, key=_order(words))}, sort_keys=False, width=1000)


def _order(words: Sequence[str]) -> Callable[[str], int]:
    """Return the position of a flag in a command, by its name. A flag with another spelling comes last."""
    positions = {word.removeprefix("--").replace("-", "_"): i for i, word in enumerate(words) if word.startswith("--")}
    return lambda name: positions.get(name.replace("-", "_"), len(words))


def _literal(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, Interval) and value.isdecimal():
        return str(value)
    if isinstance(value, str):
        return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())
