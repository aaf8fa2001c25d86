"""``rapidformer doctor``: versions, devices, which packages can be imported, and DeepSpeed's compiled parts.

This module imports nothing that may fail. A child process imports the packages, so that a crash or a hang becomes a
finding.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from rapidformer_templates.planning import environment
from rapidformer_templates.planning.environment import OPTIONAL_PACKAGES, installed_packages, versions_of
from rapidformer_templates.planning.flag_parser import CommandParser
from rapidformer_templates.switches.zero import compiled_parts as deepspeed_parts

REQUIRED_PACKAGES = ("torch", "transformers", "datasets", "accelerate")
IMPORT_SECONDS = 120
"""Time limit for all imports together. After it, the import in progress counts as hanging."""
TITLES = ("Machine", "Packages", "DeepSpeed's compiled parts")
CRASHED = f"Python crashed, or hung for {IMPORT_SECONDS} s, while it was imported"
MODULES = {"apex": "apex.optimizers", "fairscale": "fairscale.optim.oss"}
"""Modules that the engines import, if not the package itself."""
OWN_EXTRAS = {
    "deepspeed": "deepspeed", "fairscale": "fairscale", "liger_kernel": "liger", "peft": "peft", "torchao": "torchao",
    "bitsandbytes": "bitsandbytes", **dict.fromkeys(("onnx", "onnxruntime", "onnxscript"), "onnx"),
    **dict.fromkeys(("tensorboard", "wandb", "mlflow"), "trackers"),
}  # fmt: skip
"""Packages with the extra of this library that installs them."""
INSTALLS = {
    "apex": "from source: github.com/NVIDIA/apex",
    "flash_attn": "pip install flash-attn --no-build-isolation",
    "trackio": "pip install trackio",
    **{name: f"pip install 'rapidformer_templates[{extra}]'" for name, extra in OWN_EXTRAS.items()},
}
"""How each extra package is installed. Others, such as triton, are listed if they are there."""


@dataclasses.dataclass(frozen=True)
class DoctorFinding:
    """Facts about a package or a compiled part.

    Attributes:
        name: its name.
        state: ``ok`` or ``built``, or else a short reason.
        version: version of the package, or empty.
        detail: the error, or what to do. Empty if there is no problem.
    """

    name: str
    state: str
    version: str = ""
    detail: str = ""


def main(words: Sequence[str]) -> int:
    """Run the command.

    Args:
        words: words after ``rapidformer doctor``.

    Raises:
        ConfigError: the command does not accept a word.
        PartError: a part that ``--build`` names cannot be built.
    """
    options, parts = build_parser().parse_args(words), deepspeed_parts.PARTS
    device = "cpu" if environment.detect_gpu() is None else "cuda"
    if options.build is not None:
        able = [part for part in parts if not deepspeed_parts.problems(part, device)]
        deepspeed_parts.export(device)
        deepspeed_parts.build(options.build or able or list(parts), device)
    report = examine(device)
    if options.json:
        print(json.dumps(report, indent=2, default=dataclasses.asdict))
        return 0
    for title, findings in zip(TITLES, report.values(), strict=True):
        print(title)
        for finding in findings if isinstance(findings, list) else [DoctorFinding(*fact) for fact in findings.items()]:
            print(f"  {finding.name:<22}{f'{finding.version} {finding.state}'.strip()}")
            if finding.detail:
                print(f"  {'':<22}{finding.detail}")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``rapidformer doctor``."""
    parser = CommandParser(
        prog="rapidformer doctor",
        description="Show what this machine has: its devices, the installed packages, what does not work, and what to "
        "do about it. It imports the packages in another process.",
        epilog="example: rapidformer doctor --build cpu_adam",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    text = f"first build compiled parts of DeepSpeed: {', '.join(deepspeed_parts.PARTS)} (default: all that can be)"
    parser.add_argument("--build", nargs="*", choices=[*deepspeed_parts.PARTS], metavar="PART", help=text)
    return parser


def examine(device: str) -> dict[str, Any]:
    """Return the facts about the machine, and the findings about its packages and DeepSpeed's compiled parts."""
    optional = installed_packages()
    present = [*filter(find_spec, REQUIRED_PACKAGES), *(name for name in OPTIONAL_PACKAGES if name in optional)]
    probed = probe({name: MODULES.get(name, name) for name in present})
    machine = versions_of(["rapidformer_templates"])
    machine |= {"device": probed.get("torch", {}).get("device", "unknown"), "cores": f"{len(os.sched_getaffinity(0))}"}
    names = dict.fromkeys([*REQUIRED_PACKAGES, *present, *(name for name in OPTIONAL_PACKAGES if name in INSTALLS)])
    return {
        "machine": machine,
        "packages": [_package(name, probed.get(name)) for name in names],
        "deepspeed_parts": [_part(name, device) for name in deepspeed_parts.PARTS if find_spec("deepspeed")],
    }


def _package(name: str, probed: Mapping[str, str] | None) -> DoctorFinding:
    """Return the finding about a package. ``probed`` is None if it is not installed."""
    if probed is None:
        return DoctorFinding(name, "not installed", detail=INSTALLS.get(name, f"pip install {name}"))
    state, version = "does not import" if probed["error"] else "ok", versions_of([name]).get(name, "unknown")
    return DoctorFinding(name, state, version, probed["error"])


def _part(name: str, device: str) -> DoctorFinding:
    if reason := deepspeed_parts.problems(name, device):
        return DoctorFinding(name, "cannot be built", detail=reason)
    if deepspeed_parts.is_built(name, deepspeed_parts.folder(device)):
        return DoctorFinding(name, "built")
    return DoctorFinding(name, "not built yet", detail=f"built at first use, or by rapidformer doctor --build {name}")


def probe(modules: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Import modules in a child process and return its report on each, by package name.

    If a module crashes or hangs, another round tries the remaining modules without it.
    """
    reports: dict[str, dict[str, str]] = {}
    path = os.pathsep.join(folder for folder in sys.path if folder)  # so that the child finds the same packages
    variables = {**os.environ, "PYTHONPATH": path}
    program = f"import {__name__} as doctor; doctor.import_all()"
    while rest := {name: module for name, module in modules.items() if name not in reports}:
        reports[next(iter(rest))] = {"error": CRASHED}
        command = [sys.executable, "-P", "-W", "ignore", "-c", program, json.dumps(rest)]
        try:
            child = subprocess.run(command, capture_output=True, env=variables, timeout=IMPORT_SECONDS, check=False)
            output = child.stdout
        except subprocess.TimeoutExpired as hang:
            output = hang.stdout or b""
        for line in output.splitlines():
            reports |= json.loads(line)
    return reports


def import_all() -> None:
    """Import the modules of the first argument. Print a line of JSON about each before and after its import."""
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that the packages print may mix with it
    for name, module in json.loads(sys.argv[1]).items():
        print(json.dumps({name: {"error": CRASHED}}), file=report, flush=True)
        facts = {"error": ""}
        try:
            importlib.import_module(module)
            if name == "torch":
                facts["device"] = _device()
        except BaseException as error:
            facts["error"] = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        print(json.dumps({name: facts}), file=report, flush=True)


def _device() -> str:
    """Return the devices that torch sees, for people. Runs in the child process."""
    torch = importlib.import_module("torch")
    gpus = [torch.cuda.get_device_properties(gpu) for gpu in range(torch.cuda.device_count())]
    if gpus:
        texts = (f"{p.name}, compute capability {p.major}.{p.minor}, {p.total_memory / 2**30:.1f} GB" for p in gpus)
        return "; ".join(texts)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return f"CPU (torch is built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPUs only'})"
    name = getattr(torch.get_device_module(accelerator), "get_device_name", lambda index: "")(0)
    return f"{torch.accelerator.device_count()} × {accelerator.type}" + (f" ({name})" if name else "")
