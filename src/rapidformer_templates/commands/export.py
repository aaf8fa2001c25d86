"""``rapidformer export``: the whole model of a run that has trained adapters. Imports no torch until it starts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rapidformer_templates.commands.words import Parser
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.config import dashed

ADAPTERS = "adapter_config.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Merge the adapters of a run into their base and write the whole model.

    Args:
        argv: the words after ``rapidformer export``; by default those of this process.

    Raises:
        ConfigError: the folder holds no adapters, or the output is there already.
    """
    asked = build_parser().parse_args(dashed(sys.argv[1:] if argv is None else argv))
    source = _adapters(Path(asked.run))
    if not asked.merge:
        raise ConfigError(
            f"{source} holds the adapters already, as peft reads them", hint="--merge writes the whole model"
        )
    output = Path(asked.output) if asked.output else source.with_name("merged")
    if output.exists() and not asked.overwrite:
        raise ConfigError(f"{output} is there already", where="--output", hint="give another one, or --overwrite")
    if output.resolve() == source.resolve():
        raise ConfigError("the adapters would be replaced", where="--output", hint="give another folder")
    from rapidformer_templates.switches.lora.merge import merge

    merge(source, output)
    print(f"wrote {output}")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of its words."""
    parser = Parser(prog="rapidformer export", description="Write the whole model of a run that trained adapters.")
    parser.add_argument("run", metavar="RUN", help="run folder, or a folder of adapters")
    parser.add_argument("--merge", action="store_true", help="add the adapters to the weights that they stand beside")
    parser.add_argument("--output", metavar="FOLDER", help="where to write (default: RUN/merged)")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    return parser


def _adapters(run: Path) -> Path:
    for folder in (run / "export", run):
        if (folder / ADAPTERS).is_file():
            return folder
    if not run.exists():
        raise ConfigError(f"{run} does not exist", where="RUN", hint="name the --save folder of a run")
    what = "a whole model is in its export/" if (run / "export").is_dir() else "nothing was exported there"
    raise ConfigError(f"{run} holds no adapters", where="RUN", hint=what)
