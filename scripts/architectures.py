"""Train every architecture of transformers in each layout and write docs/architectures.md.

    python scripts/architectures.py             train all of them, which takes about ten minutes
    python scripts/architectures.py gpt2 llama  train these and print their rows

Each run is compared with one process, as in tests/switches/test_architectures.py. Ends with status 1 if a run differs
or fails.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support import architecture_runs  # noqa: E402 - the tests are not installed
from tests.support.architecture_runs import LAYOUTS, Result  # noqa: E402
from tests.support.worker_pool import FAST_RUNS, WITHOUT_PICTURES, end_pool  # noqa: E402

SLOW = 20.0
"""Seconds of a run after which the other layouts of an architecture are left out: it computes without its kernels."""

Row = dict[str, Result]
"""The results of an architecture by layout."""


def results_of(architecture: str, objective: str) -> Row | None:
    """Train an architecture in each layout. None if transformers cannot build it small, or if it is too slow."""
    architecture_runs.forget()
    row: Row = {}
    for layout in LAYOUTS:
        began = time.monotonic()
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                row[layout] = architecture_runs.compared(architecture, objective, layout)
        except pytest.skip.Exception:
            return None
        if time.monotonic() - began > SLOW:
            return None
    return row


def reason(text: str) -> str:
    """Return the first line of a refusal without the names of this model."""
    line = text.strip().splitlines()[0].removeprefix("error: ")
    line = re.sub(r"\s*\(.*\)", "", line)
    line = re.sub(r"\b\w+(?:For[A-Z]\w+|Model|Decoder)\b", "the model", line)
    return re.sub(r"(?:\w+(?:\.\w+)*\.\d+(?:\.\w+)*(?:, \S+)* ?)+", "… ", line).strip()


def page(rows: dict[tuple[str, str], Row]) -> str:
    """Return the text of docs/architectures.md."""
    states = Counter(result.state for row in rows.values() for result in row.values())
    reasons: dict[str, str] = {}
    for row in rows.values():
        for result in row.values():
            if result.state == "refused":
                reasons.setdefault(reason(result.text), str(len(reasons) + 1))
    marks = {"equal": "yes", "different": "**differs**", "failed": "**fails**"}
    lines = [
        "# Architectures",
        f"`python scripts/architectures.py` trains small models of the architectures of transformers "
        f"{transformers.__version__} in each layout and\nwrites this page. Each run takes three steps in fp32 with "
        "padded batches. Its losses and gradient norms are\ncompared with those of one process.",
        f"{len(rows)} architectures, {states.total()} runs: {states['equal']} follow one process, {states['refused']} "
        f"are refused, {states['different']} differ,\n{states['failed']} fail. Architectures that cannot be built "
        "small, that need other packages, or that are very slow without their kernels\nare left out.",
        "*yes*: the run follows one process. A number: the run is refused for the reason [below](#reasons).",
    ]
    header = ["architecture", "objective", *LAYOUTS]
    table = [" | ".join(header), "|".join("---" for _ in header)]
    for (architecture, objective), row in rows.items():
        cells = [marks.get(r.state) or reasons[reason(r.text)] for r in row.values()]
        table.append(" | ".join([f"`{architecture}`", objective, *cells]))
    lines.append("\n".join(f"| {line} |" for line in table))
    lines += ["## Reasons", "\n".join(f"{number}. {text}" for text, number in reasons.items())]
    return "\n\n".join(lines) + "\n"


def main() -> int:
    """Train the architectures of the command line, or all of them."""
    asked, rows = set(sys.argv[1:]), {}
    models = [model for model in architecture_runs.every() if not asked or model[0] in asked]
    with FAST_RUNS, WITHOUT_PICTURES:
        for number, model in enumerate(models, 1):
            row = results_of(*model)
            found = " ".join(f"{name}: {r.state}" for name, r in row.items()) if row else "left out"
            print(f"{number}/{len(models)} {model[0]} ({model[1]}): {found}", flush=True)
            if row:
                rows[model] = row
                for name, result in row.items():
                    if result.state in ("different", "failed"):
                        print(f"  {name}: {result.text}", flush=True)
    end_pool()
    if not asked:
        (ROOT / "docs/architectures.md").write_text(page(rows), encoding="utf-8")
    return int(any(result.state in ("different", "failed") for row in rows.values() for result in row.values()))


if __name__ == "__main__":
    sys.exit(main())
