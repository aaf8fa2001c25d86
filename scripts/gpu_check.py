"""Check one GPU and measure on it, in one call of less than nine minutes.

``python scripts/gpu_check.py --output results`` runs three kinds of parts. It runs the rehearsals of tests/rehearsal on
the GPU and the tests that need one, also those of NCCL ranks that share it. It measures the model FLOPs utilisation of
BERT-base, two GPTs and a Llama with grouped heads, and that of a hand-written loop, of torchtitan's and of
transformers' Trainer. It profiles each model (how often the host waits per step, and how long the device is idle). The
results are in ``gpu_check.json``. Each part is a process with its own time limit, and the file is written after each
part. Parts without time left are skipped: name parts to run those whose names contain a word.

``--device cpu --tiny`` tries the script itself on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

GOALS = {
    "bert-base": {"utilisation": 0.45, "over plain PyTorch": 0.99, "over transformers' Trainer": 1.2},
    "gpt-124m": {"utilisation": 0.45, "over plain PyTorch": 0.99, "over transformers' Trainer": 1.2},
    "paper": {"utilisation": 0.50, "over plain PyTorch": 0.99, "over transformers' Trainer": 1.2},
    "llama-1.5b": {"utilisation": 0.50, "over torchtitan's loop": 1.0, "over transformers' Trainer compiled": 1.2},
}
IDLE_GOAL = 0.02
OF_THE_PROFILER = ("cudaDeviceSynchronize", "cudaEventSynchronize")
"""Waits that the profiler adds: for the device at its start and end, and for the event that a later step reads."""


@dataclass
class Part:
    """A part of the check.

    Attributes:
        name: Name of the part.
        command: Words after ``python`` of the process.
        seconds: Time limit.
        result: File with the results of the part.
    """

    name: str
    command: list[str]
    seconds: float
    result: Path | None = None


def parts(output: Path, device: str, *, tiny: bool) -> list[Part]:
    """Return the parts of the check, the most important ones first."""
    found = [Part("versions", ["-m", "rapidformer_templates", "doctor"], 120)]
    if not tiny:
        found += [
            _tests("ranks", "gpu", "tests/test_nccl.py", output),
            _tests("tests", "gpu", "tests/test_gpu.py", output),
        ]
    slack = 1.0 if device == "cuda" else 4.0  # the limits are made for a GPU: a CPU gets more time
    for scale in ["tiny"] if tiny else ["gpt-124m", "bert-base", "paper"]:
        folder = output / f"profile-{scale}"
        record = [__file__, "--record", scale, "--device", device, "--output", str(folder)]
        found.append(Part(f"profile {scale}", record, 60 * slack, folder / "run/profile/summary.json"))
        found.append(_utilisation(f"utilisation {scale}", scale, "eager", output, device, 120 * slack))
    if tiny:
        return found
    for scale in ("llama-1.5b", "gpt-124m"):
        found.append(_utilisation(f"utilisation {scale}, compiled", scale, "compiled", output, device, 150))
    found.append(_tests("switches", "gpu", "tests/switches/test_on_a_gpu.py", output))
    found.append(_tests("rehearsed runs", "accelerator", "tests/rehearsal", output))
    for name in ("packing", "moe", "adapters"):
        file = output / f"{name}.json"
        found.append(Part(name, ["-m", "benchmarks", name, "--json", str(file)], 120, file))
    return found


def _tests(name: str, marker: str, where: str, output: Path) -> Part:
    words = f"-m pytest -q --timeout 120 -p no:cacheprovider -m {marker}".split()
    return Part(name, [*words, str(ROOT / where), f"--junitxml={output / name.replace(' ', '-')}.xml"], 180)


def _utilisation(name: str, scale: str, solution: str, output: Path, device: str, seconds: float) -> Part:
    file = output / f"{name.replace(' ', '-')}.json"
    words = f"-m benchmarks mfu --scale {scale} --rounds 4 --device {device} --solutions {solution} --json".split()
    return Part(name, [*words, str(file)], seconds, file)


def run(part: Part, seconds: float) -> dict[str, Any]:
    """Run a part for at most ``seconds``. Returns its exit, the end of its output, and the results written by then."""
    began, command = time.monotonic(), [sys.executable, *part.command]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True
    )
    try:
        text, _ = process.communicate(timeout=seconds)
        status = "ok" if process.returncode == 0 else f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # kills its workers, too
        text, _ = process.communicate()
        status = f"stopped after {seconds:.0f} s"
    spent = round(time.monotonic() - began, 1)
    result = json.loads(part.result.read_text()) if part.result and part.result.exists() else None
    return {"status": status, "seconds": spent, "output": text[-4000:], "result": result}


def verdicts(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return lines that compare the goals with the measured values."""
    lines = []
    for scale, goals in GOALS.items():
        tables = (results.get(f"utilisation {scale}{how}") for how in ("", ", compiled"))
        for table in [table["result"] for table in tables if table and table["result"]]:
            rows = table["solutions"]
            measured = {f"over {row['name']}": row.get("ratio") for row in rows if not row["ours"]}
            measured["utilisation"] = next((row["utilisation"] for row in rows if row["ours"]), None)
            lines += [
                _verdict(f"{scale}: {name}", measured[name], goal) for name, goal in goals.items() if name in measured
            ]
        profile = (results.get(f"profile {scale}") or {}).get("result")
        if profile:
            waits = sum(n for name, n in profile["host_waits_a_step"].items() if name not in OF_THE_PROFILER)
            lines.append(f"{scale}: host reads and waits per step: {waits:g}; goal 0")
            lines.append(f"{scale}: device idle {profile.get('device_idle_share')}; goal at most {IDLE_GOAL}")
    return lines


def _verdict(what: str, measured: float | None, goal: float) -> str:
    if measured is None:
        return f"{what}: not measured; goal {goal}"
    return f"{what}: {measured:.3f}; goal {goal}: {'reached' if measured >= goal else 'missed'}"


def record(scale: str, device: str, output: Path) -> None:
    """Train a model of the utilisation table for a few steps, and profile them."""
    from rapidformer_templates.commands.bench.models import SCALES

    model = SCALES[scale]
    flags = ["--device", device, "--micro-batch-size", str(model.micro_batch), "--train-iters", "20"]
    flags += ["--lr", "1e-4", "--profile", "8", "--save", str(output / "run"), "--overwrite", "--no-export-model"]
    flags += ["--save-interval", "1000000"] + (["--mixed-precision", "bf16"] if device == "cuda" else [])
    model.job(samples=20 * model.micro_batch)(flags).fit()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "words", nargs="*", metavar="PART", help="words in the names of the parts to run (default: all)"
    )
    parser.add_argument("--output", type=Path, default=Path("gpu_check"), help="folder of the results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models with a few thousand parameters")
    parser.add_argument("--limit", type=float, default=520, help="seconds for all parts together")
    parser.add_argument("--record", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        record(options.record, options.device, options.output)
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + options.limit
    results: dict[str, dict[str, Any]] = {}
    for part in parts(options.output.resolve(), options.device, tiny=options.tiny):
        if options.words and not any(word in part.name for word in options.words):
            continue
        left = ends - time.monotonic()
        if left < 5:
            results[part.name] = {"status": "no time left", "seconds": 0.0, "output": "", "result": None}
        else:
            results[part.name] = run(part, min(part.seconds, left))
        print(f"{part.name}: {results[part.name]['status']}, {results[part.name]['seconds']} s", flush=True)
        document = {"limit": options.limit, "verdicts": verdicts(results), "parts": results}
        (options.output / "gpu_check.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    for line in verdicts(results):
        print(line)
    return 0 if all(result["status"] == "ok" for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
