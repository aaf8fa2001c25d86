"""Compare the memory and the time that this checkout and an older one need until the end of the first step.

    python scripts/compare_setup.py ../older [--width 1024] [--rounds 3] [--engines fsdp,2x2] [--dtype float32]

Four workers build the model of ``python -m benchmarks setup-memory``, with random weights or from files, and train
one step. The checkouts take turns, so that a busy machine hits both. It prints the medians of the workers that
need most, and the median of the ratios within a round, for the seconds and for the seconds of the processor.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from benchmarks.setup_memory import ENGINES, WORKERS, model_config, write_model
from rapidformer_templates.system.launch import reserved_port

CHILD = """
import json, os, sys, time
from pathlib import Path
import peft, torch
import transformers.models.llama.modeling_llama, transformers.models.mixtral.modeling_mixtral
from transformers import AutoConfig, AutoModelForCausalLM
import rapidformer_templates.run.fit
from rapidformer_templates import Data, Trainer
from rapidformer_templates.models.loading import build_model

def kilobytes(field):
    return int(Path("/proc/self/status").read_text().partition(field + ":")[2].split()[0])

class Job(Trainer):
    def build_data(self):
        tokens = torch.arange(32).repeat(8, 1)
        return Data(train=[{"input_ids": row, "labels": row} for row in tokens])

    def build_model(self):
        if self.config.model.pretrained_model_name_or_path:
            return build_model(self.config, "AutoModelForCausalLM")
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.folder), dtype=torch.float32)

    def on_train_start(self):
        self.peak = kilobytes("VmHWM") - self.resident

    def on_step_end(self, step, result):
        seconds = f"{time.perf_counter() - self.began} {time.process_time() - self.worked}"
        answer = f"{self.peak / 1000} {seconds}\\n"
        os.write(answers.fileno(), answer.encode())  # at once, because the workers share the pipe

def work(folder, flags):
    torch.set_num_threads(1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    Job.folder, Job.resident = folder, kilobytes("VmRSS")
    Job.began, Job.worked = time.perf_counter(), time.process_time()
    Job(flags).fit()

answers, sys.stdout = sys.stdout, open(os.devnull, "w")
for line in sys.stdin:
    folder, flags, environment = json.loads(line)
    os.environ.update(environment)
    for rank in range(int(environment["WORLD_SIZE"])):
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
        if os.fork() == 0:
            try:
                work(folder, flags)
            finally:
                os._exit(0)
    for rank in range(int(environment["WORLD_SIZE"])):
        os.wait()
    print("end", file=answers, flush=True)
"""
"""Forks workers for each line of standard input. Each answers with the MB of its peak and both kinds of seconds."""


@dataclass(frozen=True)
class Needs:
    """Needs of the workers that need most."""

    megabytes: float
    seconds: float
    processor_seconds: float


def start(checkout: Path) -> subprocess.Popen[str]:
    """Start a process that forks workers with the code of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD],
        cwd=checkout,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def measure(server: subprocess.Popen[str], folder: Path, flags: Sequence[str]) -> Needs | None:
    """Build a model and train a step in each worker. Returns None if one of them fails."""
    assert server.stdin
    assert server.stdout
    with reserved_port() as port:
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment |= {"WORLD_SIZE": str(WORKERS), "LOCAL_WORLD_SIZE": str(WORKERS)}
        print(json.dumps([str(folder), list(flags), environment]), file=server.stdin, flush=True)
        answers = [line.split() for line in iter(server.stdout.readline, "end\n")]
    if len(answers) < WORKERS:
        return None
    return Needs(*(max(map(float, column)) for column in zip(*answers, strict=True)))


def all_flags(engine: str, weights: str, folder: Path) -> list[str]:
    own = ["--device", "cpu", "--train-iters", "1", "--lr", "1e-4", "--template", "Trainer", "--no-save"]
    if weights == "pretrained":
        own += ["--pretrained-model-name-or-path", str(folder)]
    elif engine == "experts":
        own += ["--model-type", "mixtral"]  # experts are divided only if the flags name a mixture
    return [*own, *ENGINES[engine]]


def describe(rounds: Sequence[Sequence[Needs | None]]) -> str:
    """Describe the needs of the older checkout and of this one."""
    pairs = [(older, this) for older, this in rounds if older and this]
    if not pairs:
        return "one of the checkouts fails"
    parts = []
    for field, unit in (("megabytes", "MB"), ("seconds", "s"), ("processor_seconds", "s of the processor")):
        older, this = ([getattr(one, field) for one in column] for column in zip(*pairs, strict=True))
        ratio = statistics.median(new / old for old, new in zip(older, this, strict=True))
        parts.append(f"{statistics.median(older):,.1f} -> {statistics.median(this):,.1f} {unit} ({ratio:.2f})")
    return "; ".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("older", type=Path, help="folder of the older checkout")
    parser.add_argument("--width", type=int, default=1024, help="hidden size; 1024 gives 267 M parameters (default)")
    parser.add_argument("--blocks", type=int, default=16, help="blocks of the model (default: 16)")
    dtypes = ("bfloat16", "float32")
    parser.add_argument("--dtype", default=dtypes[0], choices=dtypes, help="type of the weights in the files")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each checkout (default: 3)")
    parser.add_argument("--engines", default=",".join(ENGINES), help="engines, separated by commas (default: all)")
    parser.add_argument("--weights", default="random,pretrained", help="sources of the weights (default: both)")
    options = parser.parse_args(argv)
    servers = [start(options.older.resolve()), start(Path(__file__).resolve().parents[1])]
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        for engine, weights in product(options.engines.split(","), options.weights.split(",")):
            config = model_config(options.width, options.blocks, mixture=engine == "experts")
            folder = Path(name) / config.model_type
            if not folder.exists():
                write_model(config, getattr(torch, options.dtype), folder)
            flags = all_flags(engine, weights, folder)
            rounds = [[measure(server, folder, flags) for server in servers] for _ in range(options.rounds)]
            print(f"{engine}, {weights}: {describe(rounds)}", flush=True)
    for server in servers:
        server.communicate()  # ends at the end of its input
    return 0


if __name__ == "__main__":
    sys.exit(main())
