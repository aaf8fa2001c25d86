"""``rapidformer new``: a script with the hooks that most change, or the examples; both lie in ``examples/``."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from rapidformer_templates.commands.words import Parser
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.config import dashed

EXAMPLES = Path(__file__).parent / "examples"
"""In a checkout a link to ``examples/`` of the repository, in a wheel the folder itself."""

STEM = "my_task"
"""What the scripts call themselves until they have a name."""


def main(argv: Sequence[str]) -> int:
    """Write what is asked for, and say how to run it.

    Args:
        argv: the words after ``rapidformer new``.

    Raises:
        ConfigError: the file is there already, or is no name of a Python script.
    """
    asked = build_parser().parse_args(dashed(argv))
    wanted = Path(asked.file)
    if wanted.exists():
        raise ConfigError(f"{wanted} is there already and stays as it is", where="FILE", hint="give another name")
    if asked.kind == "examples":
        shutil.copytree(EXAMPLES, wanted, ignore=shutil.ignore_patterns("__pycache__"))
        print(f"wrote {', '.join(sorted(str(file) for file in wanted.rglob('*') if file.is_file()))}")
        return 0
    if wanted.suffix != ".py":
        raise ConfigError(
            f"{wanted} is no name of a Python script", where="FILE", hint=f"rapidformer new {asked.kind} {wanted}.py"
        )
    text = (EXAMPLES / "new" / f"{asked.kind}.py").read_text(encoding="utf-8")
    wanted.parent.mkdir(parents=True, exist_ok=True)
    wanted.write_text(text.replace(f"{STEM}.py", str(wanted)).replace(STEM, wanted.stem), encoding="utf-8")
    print(f"wrote {wanted}; it runs as it is: python {wanted}")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of its words."""
    parser = Parser(
        prog="rapidformer new", description="Write a script to begin with, which runs as it is, or the examples."
    )
    parser.add_argument("kind", choices=("finetuner", "pretrainer", "trainer", "examples"), help="what to write")
    parser.add_argument("file", metavar="FILE", help="where to: a new script, of examples a new folder")
    return parser
