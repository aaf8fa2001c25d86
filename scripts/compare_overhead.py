"""Compare the time that this checkout and an older one add to a training step, in processor time.

    python scripts/compare_overhead.py ../older [--rounds 50] [--steps 40]

Both train the tiny job of ``python -m benchmarks overhead``, and a third process runs the plain loop. They take turns
in a random order, so that a busy machine hits all of them. It prints the median of the differences within a round.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

WARMUP = 100
"""Steps of each loop that do not count."""

CHILD = """
import gc, os, sys, time
import torch
from benchmarks.overhead_loops import Contender, Ours

left, mark = 0, 0.0

def step_done():
    global left, mark
    left -= 1
    if left <= 0:
        print(time.process_time() - mark, file=answers, flush=True)
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        left, mark = int(line), time.process_time()

torch.set_num_threads(1)
answers, sys.stdout = sys.stdout, open(os.devnull, "w")
loop = {"plain": Contender, "ours": Ours}[sys.argv[1]](int(sys.argv[2]))
gc.collect()
gc.freeze()
loop.run(step_done)
"""
"""Runs as many steps as each line of standard input says, and answers with their seconds."""


def start(checkout: Path, kind: str, total: int) -> subprocess.Popen[str]:
    """Start a loop of a checkout, and wait for its first step."""
    command = [sys.executable, "-c", CHILD, kind, str(total)]
    environment = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{checkout}"}
    loop = subprocess.Popen(
        command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert loop.stdout
    loop.stdout.readline()
    return loop


def seconds_of(loop: subprocess.Popen[str], steps: int) -> float:
    """Run some steps and return their processor seconds."""
    assert loop.stdin
    assert loop.stdout
    print(steps, file=loop.stdin, flush=True)
    return float(loop.stdout.readline())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("older", type=Path, help="folder of the older checkout")
    parser.add_argument("--rounds", type=int, default=50, help="turns of each loop (default: 50)")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps per turn (default: 40)")
    options = parser.parse_args(argv)
    here, total = Path(__file__).resolve().parents[1], WARMUP + (options.rounds + 1) * options.steps
    sources = {"plain": (here, "plain"), "older": (options.older.resolve(), "ours"), "this": (here, "ours")}
    loops = {name: start(checkout, kind, total) for name, (checkout, kind) in sources.items()}
    milliseconds: dict[str, list[float]] = {name: [] for name in loops}
    for loop in loops.values():
        seconds_of(loop, WARMUP)
    for _ in range(options.rounds):
        for name in random.sample(list(loops), len(loops)):
            milliseconds[name].append(seconds_of(loops[name], options.steps) / options.steps * 1000)
    for loop in loops.values():
        loop.kill()
        loop.wait()
    for name, own in milliseconds.items():
        extra = [a - b for a, b in zip(own, milliseconds["plain"], strict=True)]
        print(f"{name:6} {statistics.median(own):.3f} ms per step, {statistics.median(extra):+.3f} over the plain loop")
    return 0


if __name__ == "__main__":
    sys.exit(main())
