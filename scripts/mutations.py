"""Break the product on purpose and check that a test fails: omit each switch, and change lines of engines.

    python scripts/mutations.py                  all mutations, one after another
    python scripts/mutations.py fsdp "the norm"  mutations whose name contains one of these words

A mutation runs its tests in a copy of the source, until the first one fails. The script prints a row with that test for
each mutation. It exits with status 1 if a mutation failed no test.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

import torch

from rapidformer_templates.planning.registry import REGISTRY

ROOT = Path(__file__).parents[1]
PAIRS, RECEIPTS = "tests/switches/test_pairs.py", "tests/run/test_receipts.py"
SECONDS = 600


@dataclass(frozen=True)
class Line:
    """A changed line of an engine.

    Attributes:
        file: Path in the package.
        line: The text to replace. It must occur exactly once.
        instead: The replacement.
        tests: Test files that must detect the change.
    """

    file: str
    line: str
    instead: str
    tests: tuple[str, ...]


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
LINES = {name: Line(**{**row, "tests": tuple(row["tests"])}) for name, row in TABLE.items()}
"""The lines of mutations.toml."""

ELSEWHERE = {
    "auto-strategy": ("tests/switches/auto_strategy/test_auto_strategy.py", RECEIPTS),
    "tf32": ("tests/test_gpu.py", "tests/switches/test_on_a_gpu.py"),
    "offload-activations": ("tests/switches/offload_activations",),
    "fp8-products": ("tests/switches/fp8/test_products.py",),
    "sequence-parallel": ("tests/switches/tensor_parallel",),
    "fsdp-options": ("tests/switches/fsdp",),
}
"""Tests of switches without a quick row in the covering table on a machine without a GPU. Those of fp8 need torchao."""

NEEDS_GPU = {"tf32"}
"""Switches that have no effect without a GPU, so that no test can notice their absence."""

FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)


def first_failure(tests: tuple[str, ...], environment: dict[str, str], *more: str) -> str | None:
    """Return the first test that fails, or None."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *more, *tests]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    found = FAILED.search(done.stdout)
    if found is None and done.returncode != 0:
        return f"pytest ended with status {done.returncode}: {done.stdout.splitlines()[-1:]}"
    return found[1] if found else None


def without_switch(name: str) -> str | None:
    """Omit a switch. Returns the first test that fails, or None."""
    if name in NEEDS_GPU and not torch.cuda.is_available():
        return "not tried: it needs a GPU"
    tests, plugin = ELSEWHERE.get(name, (PAIRS,)), ("-p", "tests.support.left_out")
    environment = {"RAPIDFORMER_LEFT_OUT": name}
    # Rows that need four workers or a fast disk are among the longer cases.
    return first_failure(tests, environment, *plugin) or first_failure(tests, environment, *plugin, "-m", "longer")


def with_line(line: Line) -> str | None:
    """Change a line in a copy of the source. Returns the first test that fails, or None.

    Raises:
        ValueError: The line does not occur, or it occurs several times.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "rapidformer_templates")
        shutil.copytree(ROOT / "src/rapidformer_templates", copy, ignore=shutil.ignore_patterns("__pycache__"))
        path = copy / line.file
        text = path.read_text(encoding="utf-8")
        if (count := text.count(line.line)) != 1:
            raise ValueError(f"{line.file} has {count} times: {line.line}")
        path.write_text(text.replace(line.line, line.instead), encoding="utf-8")
        return first_failure(line.tests, {"PYTHONPATH": folder})


def main() -> None:
    """Run the mutations whose name contains a word of the command line, or all mutations."""
    words = sys.argv[1:] or [""]
    mutations = {f"without {switch.name}": (without_switch, switch.name) for switch in REGISTRY.switches}
    mutations |= {name: (with_line, line) for name, line in LINES.items()}
    survived = []
    for name, (run, what) in mutations.items():
        if any(word in name for word in words):
            failure = run(what)  # type: ignore[operator]
            print(f"{name:58} {failure or 'NO TEST FAILED'}", flush=True)
            survived += [] if failure else [name]
    print(f"{len(survived)} mutations failed no test{': ' if survived else ''}{', '.join(survived)}")
    sys.exit(bool(survived))


if __name__ == "__main__":
    main()
