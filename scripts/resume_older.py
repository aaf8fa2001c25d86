"""Resume checkpoints of an earlier commit with this checkout, and compare the rest of the run.

    python scripts/resume_older.py 6ab747f             every layout
    python scripts/resume_older.py 6ab747f FSDP LoRA   some layouts

For each layout, the earlier commit trains a tiny GPT-2 to the end and saves a checkpoint halfway. This checkout resumes
that checkpoint. The table compares the losses and gradient norms of the remaining steps, and all weights and optimizer
states of the last checkpoint. The exit status is 1 if they are not equal bit for bit.

The earlier commit is checked out to a temporary folder and runs in the same environment. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPS, SAVED = 4, 2

LAYOUTS = {
    "one process": (1, ""),
    "DDP": (2, ""),
    "FSDP": (2, "--fsdp-memory-optimization"),
    "OSS": (2, "--oss-memory-optimization"),
    "ZeRO-2": (2, "--zero-2-memory-optimization"),
    "divided update in bf16": (2, "--use-distributed-optimizer --mixed-precision bf16"),
    "tensor × pipeline": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "divided experts": (2, "--num-experts 4 --expert-model-parallel-size 2"),
    "LoRA": (1, "--lora-rank 2"),
}
"""Workers and flags of each layout."""

AS_BEFORE = {"FSDP": ["--no-fsdp-reduce-every-micro-batch"]}
"""Flags by layout with which this checkout does what is no longer the default."""

FLAGS = (
    f"--train-iters {STEPS} --save-interval {SAVED} --global-batch-size 8 --micro-batch-size 2 --lr 1e-2"
    " --clip-grad 0.1 --lr-decay-style cosine --log-interval 1 --ema-decay 0.5 --no-export-model"
)

JOB = """
import json, os, sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer_templates import Data, Trainer


class Job(Trainer):
    def build_model(self):
        return GPT2LMHeadModel.from_pretrained("base")

    def build_data(self):
        draw = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, 60, (32, 16), generator=draw)
        return Data(train=list(tokens), collate=lambda rows: dict.fromkeys(("input_ids", "labels"), torch.stack(rows)))

    def on_step_end(self, step, result):
        if os.environ.get("RANK", "0") == "0":
            with open(os.environ["CURVE"], "a") as file:
                file.write(json.dumps([float(result.loss), float(result.grad_norm)]) + "\\n")


if __name__ == "__main__":
    if not os.path.isdir("base"):
        torch.manual_seed(0)
        tokens = {"vocab_size": 60, "bos_token_id": 1, "eos_token_id": 1}
        GPT2LMHeadModel(GPT2Config(**tokens, n_positions=16, n_embd=16, n_layer=4, n_head=2)).save_pretrained("base")
    Job.main()
"""
"""A script that both versions understand. It computes in the current folder."""


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Check out a commit to a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "older"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(path), commit], cwd=ROOT, check=True)
        try:
            yield path
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(path)], cwd=ROOT, check=True)


def train(source: Path, folder: Path, layout: str, run: str, *flags: str) -> None:
    """Train a layout with the code in ``source``, and write its losses and gradient norms to ``RUN.jsonl``.

    Raises:
        RuntimeError: the run failed.
    """
    workers, switches = LAYOUTS[layout]
    words = [*FLAGS.split(), *switches.split(), "--save", run, *flags]
    if workers > 1:
        words += ["--nproc-per-node", str(workers)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(source / "src"),
        "CURVE": str(folder / f"{run}.jsonl"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "job.py", *words]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{layout}: {source} failed with {' '.join(words)}\n{ended.stdout}\n{ended.stderr}")


def halve(folder: Path) -> None:
    """Copy the run ``older`` to ``resumed`` as if it had died after its first checkpoint."""
    ignored = shutil.ignore_patterns(f"step-{STEPS}", "summary.json")
    shutil.copytree(folder / "older", folder / "resumed", ignore=ignored)
    (folder / "resumed/checkpoints/latest").write_text(f"step-{SAVED}\n")


def compare(folder: Path) -> float:
    """Return the largest difference of the two runs: 0 if they are equal bit for bit, NaN if one has more numbers."""
    import torch

    older, resumed = curve_of(folder / "older.jsonl")[SAVED:], curve_of(folder / "resumed.jsonl")
    pairs = [(torch.tensor(older, dtype=torch.float64), torch.tensor(resumed, dtype=torch.float64))]
    before, after = (tensors_of(folder / run / f"checkpoints/step-{STEPS}") for run in ("older", "resumed"))
    if before.keys() != after.keys() or len(older) != len(resumed):
        return float("nan")
    pairs += [(before[key], after[key]) for key in before]
    return max(float((one.double() - other.double()).abs().max()) for one, other in pairs if one.numel())


def curve_of(file: Path) -> list[list[float]]:
    """Read (loss, gradient norm) of each step."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def tensors_of(checkpoint: Path) -> dict:
    """Read the whole tensors of a checkpoint by kind and name, independently of the library."""
    import torch
    from safetensors import safe_open

    tensors = {}
    for kind, entries in json.loads((checkpoint / "index.json").read_text()).items():
        for name, entry in entries.items():
            for file, key, offset, *_ in entry["boxes"]:  # earlier formats have no shape
                part = safe_open(checkpoint / file, framework="pt").get_tensor(key)
                whole = tensors.setdefault((kind, name), torch.full(entry["shape"], 0, dtype=part.dtype))
                whole[tuple(slice(o, o + size) for o, size in zip(offset, part.shape, strict=True))] = part
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the earlier commit")
    parser.add_argument("layouts", nargs="*", help=", ".join(LAYOUTS))
    words = parser.parse_args()
    unknown = set(words.layouts) - LAYOUTS.keys()
    if unknown:
        parser.error(f"unknown layouts {', '.join(sorted(unknown))}; choose {', '.join(LAYOUTS)}")
    print(f"{'layout':24} {'equal bitwise':14} largest difference", flush=True)
    differs = False
    with checkout(words.commit) as older:
        for layout in words.layouts or LAYOUTS:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                (folder / "job.py").write_text(JOB)
                train(older, folder, layout, "older")
                halve(folder)
                train(ROOT, folder, layout, "resumed", "--resume", *AS_BEFORE.get(layout, []))
                difference = compare(folder)
            differs |= difference != 0
            print(f"{layout:24} {'no' if difference else 'yes':14} {difference:g}", flush=True)
    sys.exit(differs)


if __name__ == "__main__":
    main()
