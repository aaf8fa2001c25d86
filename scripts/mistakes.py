"""Make the mistakes that users make, and list what is printed, the exit status and the processor seconds.

    python scripts/mistakes.py                    a table in Markdown
    python scripts/mistakes.py --json FILE        also the whole output of each command
    python scripts/mistakes.py --only yaml flag   only cases whose group is named

Each case of mistakes.toml is one command in a new process. The cases without torch are also tests
(tests/scripts/test_mistakes.py).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FILES: dict[str, str] = TABLE["files"]
"""The files that the cases name, by path."""


@dataclass(frozen=True)
class Case:
    """A command with a mistake.

    Attributes:
        group: the kind of mistake.
        command: words after ``rapidformer``, or a script with its arguments.
        expected: a part of the output.
        status: the exit status.
        needs_torch: whether the mistake can be found only with torch.
    """

    group: str
    command: str
    expected: str
    status: int = 2
    needs_torch: bool = False


WORDS: dict[str, str] = {}
for _name, _text in TABLE["words"].items():
    WORDS[_name] = _text.format_map(WORDS)
"""Words that cases share, by name."""

CASES = tuple(
    Case(group, command.format_map(WORDS), expected, **(more[0] if more else {}))
    for group, rows in TABLE["mistakes"].items()
    for command, expected, *more in rows
)


def prepare(folder: Path) -> None:
    """Write the files that the cases name."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Outcome:
    """The result of a case.

    Attributes:
        output: standard error, and standard output before it.
        processor: processor seconds of the process and its children.
        wall: seconds that the user waits.
    """

    status: int
    output: str
    processor: float
    wall: float


def measure(case: Case, folder: Path) -> Outcome:
    """Run a case in a new process."""
    words = shlex.split(case.command)
    program = [sys.executable] if words[0] == "hooks.py" else [sys.executable, "-m", "rapidformer_templates"]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run([*program, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Outcome(done.returncode, done.stdout + done.stderr, processor, time.perf_counter() - began)


def as_row(case: Case, outcome: Outcome, lines: int = 3) -> str:
    """Return the row of a case in the table."""
    shown = [line for line in outcome.output.splitlines() if line.strip()]
    first = next((i for i, line in enumerate(shown) if line.startswith("error")), 0)
    text = "<br>".join(line.replace("|", "\\|") for line in shown[first : first + lines])
    command = case.command.replace("|", "\\|")
    for name in ("scratch", "trained", "run"):
        command = command.replace(WORDS[name], "…")
    return f"| {case.group} | `{command}` | {text} | {outcome.status} | {outcome.processor:.2f} |"


def problems_of(case: Case, outcome: Outcome) -> list[str]:
    """Return what is wrong with the outcome of a case."""
    problems = []
    if outcome.status != case.status:
        problems.append(f"the status is {outcome.status}, not {case.status}")
    if case.expected not in outcome.output:
        problems.append(f"the output lacks '{case.expected}'")
    if "Traceback" in outcome.output:
        problems.append("there is a stack trace")
    return problems


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes to a file")
    parser.add_argument("--only", nargs="+", default=(), metavar="GROUP", help="groups of cases")
    options = parser.parse_args(argv)
    results, failed = [], 0
    print("| group | command | output | status | processor s |\n|---|---|---|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        for case in CASES:
            if options.only and case.group not in options.only:
                continue
            outcome = measure(case, Path(name))
            print(as_row(case, outcome), flush=True)
            problems = problems_of(case, outcome)
            failed += bool(problems)
            results.append({**asdict(case), **asdict(outcome), "problems": problems})
            print(*(f"{problem}: {case.command}\n" for problem in problems), sep="", end="", file=sys.stderr)
    slowest = max((result["processor"] for result in results if not result["needs_torch"]), default=0)
    print(f"\n{len(results)} mistakes. Without torch: at most {slowest:.2f} processor seconds.")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
