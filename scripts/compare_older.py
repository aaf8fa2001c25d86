"""Compare the figures of a benchmark with those of an older checkout.

    python scripts/compare_older.py ../older overhead --rounds 20
    python scripts/compare_older.py ../older setup-memory --engines fsdp,2x2 --width 1024

Both checkouts run ``python -m benchmarks`` with their own code, in turns, so that a busy machine hits both. For each
number that both report, it prints the median of each, and the median of the ratios within a turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
LEFT_OUT = ("machine", "versions")


def run(checkout: Path, words: Sequence[str]) -> dict[str, float]:
    """Run a benchmark with the code of a checkout. Returns its numbers by name."""
    with tempfile.TemporaryDirectory(prefix="rf-") as folder:
        file = Path(folder) / "figures.json"
        environment = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{checkout}"}
        command = [sys.executable, "-m", "benchmarks", *words, "--json", str(file)]
        subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
        document = json.loads(file.read_text(encoding="utf-8"))
    return dict(numbers({name: value for name, value in document.items() if name not in LEFT_OUT}))


def numbers(value: object, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a document. A row of a list is named by its texts."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from numbers(part, f"{path} {name}".strip())
    elif isinstance(value, list) and all(isinstance(row, dict) for row in value):
        for row in value:
            texts = (text for text in row.values() if isinstance(text, str))
            yield from numbers(row, f"{path} [{', '.join(texts)}]".strip())
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("older", type=lambda name: Path(name).resolve(), help="folder of the older checkout")
    parser.add_argument("--turns", type=int, default=3, help="runs of each checkout (default: 3)")
    options, words = parser.parse_known_args(argv)
    pairs = [(run(options.older, words), run(HERE, words)) for _ in range(options.turns)]
    for name in pairs[0][0].keys() & pairs[0][1].keys():
        older, this = ([turn[name] for turn in turns] for turns in zip(*pairs, strict=True))
        ratios = [b / a for a, b in zip(older, this, strict=True) if a]
        ratio = f" ({statistics.median(ratios):.2f} ×)" if ratios else ""
        print(f"{name}: {statistics.median(older):,.4g} -> {statistics.median(this):,.4g}{ratio}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
