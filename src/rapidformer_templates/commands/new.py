"""``rapidformer new``: a script with the hooks that most change, or the examples; both lie in ``examples/``."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from rapidformer_templates.commands.words import Parser
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.config import dashed
from rapidformer_templates.system.files import new_folder, write_text, writing

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
        with writing(wanted), new_folder(wanted) as folder:
            left_out = shutil.ignore_patterns("__pycache__", ".*", "runs")
            shutil.copytree(EXAMPLES, folder, ignore=left_out, dirs_exist_ok=True)
        print(f"wrote {', '.join(sorted(str(file) for file in wanted.rglob('*') if file.is_file()))}")
        return 0
    if wanted.suffix != ".py":
        raise ConfigError(
            f"{wanted} is no name of a Python script", where="FILE", hint=f"rapidformer new {asked.kind} {wanted}.py"
        )
    text = (EXAMPLES / "new" / f"{asked.kind}.py").read_text(encoding="utf-8")
    command = shlex.quote(str(wanted))
    named = re.sub(rf"{STEM}(\.py)?", lambda found: command if found[1] else wanted.stem, text)
    with writing(wanted):
        wanted.parent.mkdir(parents=True, exist_ok=True)
        write_text(wanted, named)
    print(f"wrote {wanted}; it runs as it is: python {command}")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of its words."""
    parser = Parser(
        prog="rapidformer new", description="Write a script to begin with, which runs as it is, or the examples."
    )
    parser.add_argument("kind", choices=("finetuner", "pretrainer", "trainer", "examples"), help="what to write")
    parser.add_argument("file", metavar="FILE", help="where to: a new script, of examples a new folder")
    return parser
