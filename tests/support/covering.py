"""The covering table: few runs with several switches each, which together contain every accepted pair of switches.

``python -m tests.support.covering`` computes it from the registry and writes ``covering.json``. Run it after you change
a switch or a rule. ``tests/switches/test_pairs.py`` compares every run of the table with one process.
"""

import itertools
import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TypedDict

from rapidformer_templates.planning.registry import REGISTRY
from tests.support.combinations import FP8, smallest

FILE = Path(__file__).with_name("covering.json")
LONGEST = 9
"""Largest number of switches in a row. With more, the rules accept few rows, and failures take longer to trace."""

Pair = tuple[str, str]

DEAR = {"torch-compile", "onnx-runtime"}
"""Switches that take seconds to compile on each worker. They fill no row and are added to no row of four workers, and a
row with one gets no more workers."""

SLOW: set[Pair] = {("dynamic-shape", "torch-compile"), ("dynamic-shape", "onnx-runtime")}
"""Pairs that occur in only one row each, of two workers and at most four switches, because every shape is compiled."""


class Table(TypedDict):
    """The content of the file.

    Attributes:
        rows: the switches of each run.
        pairs: the pairs that the rules accept on a machine without a GPU.
        triples: number of triples that the rules accept, and number of these that a row contains.
    """

    rows: list[list[str]]
    pairs: list[list[str]]
    triples: dict[str, int]


def table() -> Table:
    """Read the table from its file."""
    found: Table = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def summary() -> str:
    """Summarize runs, pairs and the share of triples in one line."""
    found = table()
    accepted, covered = found["triples"]["accepted"], found["triples"]["covered"]
    share = f"{covered:,} of {accepted:,} triples ({100 * covered / accepted:.0f} %)"
    return f"{len(found['rows'])} runs cover all {len(found['pairs'])} accepted pairs and {share}"


def accepted_of(size: int) -> list[tuple[str, ...]]:
    """Return the combinations of ``size`` switches that the rules accept."""
    names = [switch.name for switch in REGISTRY.switches]
    return [chosen for chosen in itertools.combinations(names, size) if smallest(chosen)]


def pairs_of(row: Iterable[str]) -> set[Pair]:
    """Return the pairs in a row, each in the order of the registry."""
    places = {switch.name: place for place, switch in enumerate(REGISTRY.switches)}
    return set(itertools.combinations(sorted(row, key=places.__getitem__), 2))


def _fits(name: str, row: list[str], missing: Collection[Pair]) -> bool:
    """Whether a row may grow by a switch without becoming slow."""
    longer = [*row, name]
    slow = pairs_of(longer) & SLOW
    covered = slow - pairs_of(row) - set(missing)
    if covered or (slow and len(longer) > 4):
        return False
    before, after = smallest(row), smallest(longer)
    if before is None or after is None or (slow and after.world > 2):
        return False
    if name in DEAR and before.world > 2:
        return False
    return not DEAR & set(longer) or after.world <= before.world


def cover(pairs: Sequence[Pair]) -> list[list[str]]:
    """Return rows that contain all pairs.

    The algorithm is greedy: a row grows by the switch that adds the largest number of missing pairs. It grows to its
    full length even if no pair is missing any more, because longer rows cover more triples. Pairs that need most
    workers come first, so that other rows can do with two. Pairs with fp8 have rows of their own, because not every
    machine has its package.
    """
    with_fp8, others = ([pair for pair in pairs if (FP8 in pair) is has] for has in (True, False))
    names = [switch.name for switch in REGISTRY.switches]
    return _rows(others, [name for name in names if name != FP8]) + _rows(with_fp8, names)


def _rows(pairs: Iterable[Pair], names: list[str]) -> list[list[str]]:
    worlds = {pair: found.world for pair in pairs if (found := smallest(pair))}
    missing, rows = dict.fromkeys(sorted(worlds, key=lambda pair: -worlds[pair])), list[list[str]]()
    while missing:
        row = list(next(iter(missing)))
        while len(row) < LONGEST:
            gains = {name: len(pairs_of([*row, name]) & missing.keys()) for name in names if name not in row}
            useful = [name for name in sorted(gains, key=lambda name: -gains[name]) if gains[name] or name not in DEAR]
            longer = next((name for name in useful if _fits(name, row, missing)), None)
            if longer is None:
                break
            row.append(longer)
        row.sort(key=names.index)
        rows.append(row)
        for pair in pairs_of(row):
            missing.pop(pair, None)
    return rows


def main() -> None:
    """Compute the table and write it."""
    pairs = [(one, other) for one, other in accepted_of(2)]
    rows = cover(pairs)
    triples = accepted_of(3)
    covered = sum(any(set(triple) <= set(row) for row in rows) for triple in triples)
    found = {
        "rows": rows,
        "pairs": [list(pair) for pair in pairs],
        "triples": {"accepted": len(triples), "covered": covered},
    }
    lines = [f'"{key}": [\n  ' + ",\n  ".join(map(json.dumps, found[key])) + "\n]" for key in ("rows", "pairs")]
    lines.append(f'"triples": {json.dumps(found["triples"])}')
    FILE.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")
    print(summary())


if __name__ == "__main__":
    main()
