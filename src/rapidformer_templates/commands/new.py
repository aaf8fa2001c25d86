"""``rapidformer new``: writes a script with the hooks that usually change, or the examples, from ``examples/``."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.flag_parser import CommandParser, dashed
from rapidformer_templates.system.files import new_folder, write_text, writing

EXAMPLES = Path(__file__).parent / "examples"
"""The examples. In a checkout this is a link to the repository's ``examples/``, in a wheel the folder itself."""

STEM = "my_task"
"""The name that the scripts use for themselves. It is replaced by the name of the new file."""


def main(argv: Sequence[str]) -> int:
    """Write the requested script or the examples, and print how to run it.

    Args:
        argv: words after ``rapidformer new``.

    Raises:
        ConfigError: the file exists already, or its name does not end in .py.
    """
    options = build_parser().parse_args(dashed(argv))
    target = Path(options.file)
    if target.exists():
        raise ConfigError(f"{target} already exists and is left unchanged", where="FILE", hint="give another name")
    if options.kind == "examples":
        with writing(target), new_folder(target) as folder:
            left_out = shutil.ignore_patterns("__pycache__", ".*", "runs")
            shutil.copytree(EXAMPLES, folder, ignore=left_out, dirs_exist_ok=True)
        print(f"wrote {', '.join(sorted(str(file) for file in target.rglob('*') if file.is_file()))}")
        return 0
    if target.suffix != ".py":
        raise ConfigError(
            f"{target} is not a name of a Python script",
            where="FILE",
            hint=f"rapidformer new {options.kind} {target}.py",
        )
    text = (EXAMPLES / "new" / f"{options.kind}.py").read_text(encoding="utf-8")
    command = shlex.quote(str(target))
    named = re.sub(rf"{STEM}(\.py)?", lambda match: command if match[1] else target.stem, text)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, named)
    print(f"wrote {target}; run it with: python {command}")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``rapidformer new``."""
    parser = CommandParser(
        prog="rapidformer new", description="Write a script to start from, which runs unchanged, or the examples."
    )
    parser.add_argument("kind", choices=("finetuner", "pretrainer", "trainer", "examples"), help="what to write")
    parser.add_argument("file", metavar="FILE", help="path of the new script, or of the new folder for examples")
    return parser
