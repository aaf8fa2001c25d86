"""``rapidformer doctor``: shows what this machine has, what does not work, and what to do about it.

This module imports nothing that may fail. A child process imports the packages, so that a crash or a hang becomes a
finding.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from rapidformer_templates.errors import ConfigError, RapidformerError, did_you_mean
from rapidformer_templates.planning import environment
from rapidformer_templates.planning.environment import OPTIONAL_PACKAGES, version_of
from rapidformer_templates.planning.flag_parser import CommandParser
from rapidformer_templates.planning.flag_values import TRACKERS, TRACKERS_INSTALL
from rapidformer_templates.planning.optimizers import OPTIMIZER_PACKAGES, OPTIMIZERS
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.switches.zero import compiled_parts as deepspeed_parts
from rapidformer_templates.system.terminal import console

if TYPE_CHECKING:
    from rich.table import Table

REQUIRED_PACKAGES = ("torch", "transformers", "datasets", "accelerate")
IMPORT_SECONDS = 120
"""Time limit for all imports together. After it, the import in progress counts as hanging."""

# Facts that the declarations of the switches do not contain.
MODULES = {"apex": "apex.optimizers", "fairscale": "fairscale.optim.oss"}  # modules that the engines import
BACKENDS = ("triton", "tvm", "torch_xla")
"""Packages that only some backends of torch.compile need. They are listed if they are installed."""
HELPS = {
    "onnx": "onnx-runtime",
    "onnxscript": "onnx-runtime",
    "flash_attn": "flash-attention",
    "bitsandbytes": "lora (nf4)",
    "liger_kernel": "fused-linear-cross-entropy",
    **dict.fromkeys(BACKENDS, "torch-compile"),
    **dict.fromkeys(TRACKERS.values(), "--report-to"),
}
INSTALL = {
    "apex": "from source: github.com/NVIDIA/apex",  # the declared text is too long for a table
    "flash_attn": "pip install flash-attn --no-build-isolation",
    "onnx": "pip install 'rapidformer_templates[onnx]'",
    "onnxscript": "pip install 'rapidformer_templates[onnx]'",
    "liger_kernel": "pip install 'rapidformer_templates[liger]'",
    **{TRACKERS[name]: install for name, install in TRACKERS_INSTALL.items()},
}
NEEDS_GPU = ("apex", "flash_attn")

PROBE = """
import importlib, json, sys
from rapidformer_templates.commands.private_names import missing
def tell(**facts): print("\\n" + json.dumps(facts), file=told, flush=True)
told, sys.stdout = sys.stdout, sys.stderr
for name, module in json.loads(sys.argv[1]).items():
    tell(start=name)
    try:
        importlib.import_module(module)
        facts = {}
        if name == "torch":
            import torch
            gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
            facts["cuda"] = torch.version.cuda
            facts["gpus"] = [[p.name, f"{p.major}.{p.minor}", p.total_memory] for p in
                             map(torch.cuda.get_device_properties, gpus)]
            found = torch.accelerator.current_accelerator(check_available=True)
            if found is not None:
                called = getattr(torch.get_device_module(found), "get_device_name", None)
                facts["accelerator"] = {"kind": found.type, "count": torch.accelerator.device_count(),
                                        "name": called and called(0)}
        tell(end=name, error=None, gone=[[gone, entry.without] for gone, entry in missing(name)], **facts)
    except BaseException as error:
        lines = str(error).strip().splitlines() or [""]
        tell(end=name, error=f"{type(error).__name__}: {lines[0]}")
"""


@dataclasses.dataclass(frozen=True)
class DoctorFinding:
    """A line of the table.

    Attributes:
        name: name of a package or a compiled part.
        state: ``ok`` or ``built``, or else a short reason.
        version: version of the package, or empty.
        detail: the error, or what to do. Empty if there is no problem.
        serves: switches and optimizers of this version that use it.
    """

    name: str
    state: str
    version: str = ""
    detail: str = ""
    serves: tuple[str, ...] = ()


class AcceleratorFacts(TypedDict):
    """The accelerator that torch sees."""

    kind: str
    count: int
    name: str | None


class ImportFacts(TypedDict, total=False):
    """Facts that :data:`PROBE` prints about a package. Only torch has ``cuda``, ``gpus`` and ``accelerator``."""

    start: str
    end: str
    error: str | None
    gone: list[tuple[str, str]]
    cuda: str | None
    gpus: list[tuple[str, str, int]]
    accelerator: AcceleratorFacts


class GpuFacts(TypedDict):
    """A GPU of the machine."""

    name: str
    compute_capability: str
    memory_gb: float


class MachineFacts(TypedDict):
    """The machine: its processors, devices and memory."""

    python: str
    rapidformer_templates: str
    torch_cuda: str | None
    gpus: list[GpuFacts]
    accelerator: AcceleratorFacts | None
    cores: int
    memory_gb: float


class PartsFindings(TypedDict):
    """DeepSpeed's compiled parts, and their folder. Both are empty without DeepSpeed."""

    folder: str | None
    parts: list[DoctorFinding]


class DoctorFindings(TypedDict):
    """All findings, in the form that ``--json`` prints."""

    machine: MachineFacts
    packages: list[DoctorFinding]
    deepspeed_parts: PartsFindings


def main(words: Sequence[str]) -> int:
    """Run the command.

    Args:
        words: words after ``rapidformer doctor``.

    Raises:
        ConfigError: the command does not accept a word.
        PartError: a part that ``--build`` names cannot be built.
    """
    options = build_parser().parse_args(words)
    names = options.build or []
    if wrong := [name for name in names if name not in deepspeed_parts.PARTS]:
        hint = did_you_mean(wrong[0], deepspeed_parts.PARTS, f"the parts are {', '.join(deepspeed_parts.PARTS)}")
        raise ConfigError(f"DeepSpeed has no part '{wrong[0]}'", where="--build", hint=hint)
    device = "cpu" if environment.detect_gpu() is None else "cuda"
    if options.build is not None:
        _build(names or [part for part in deepspeed_parts.PARTS if not deepspeed_parts.problems(part, device)], device)
    report = examine(device)
    if options.json:
        print(json.dumps(report, indent=2, default=dataclasses.asdict))
    else:
        show(report)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``rapidformer doctor``."""
    parser = CommandParser(
        prog="rapidformer doctor",
        description="Show what this machine has: its devices, the installed packages, what each of them serves, what\n"
        "does not work, and what to do about it. It imports the packages in another process.",
        epilog="example: rapidformer doctor --build cpu_adam",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--build",
        nargs="*",
        metavar="PART",
        help=f"first build compiled parts of DeepSpeed: {', '.join(deepspeed_parts.PARTS)} (default: all that can be)",
    )
    return parser


def _build(parts: Sequence[str], device: str) -> None:
    if find_spec("deepspeed") is None:
        raise ConfigError("deepspeed is not installed: it has no parts to build", hint=deepspeed_parts.INSTALL)
    if not parts:
        reason = deepspeed_parts.problems(next(iter(deepspeed_parts.PARTS)), device)
        raise ConfigError(f"DeepSpeed's parts cannot be built here: {reason}")
    deepspeed_parts.export(device)
    deepspeed_parts.build(parts, device)


def examine(device: str) -> DoctorFindings:
    """Examine the machine and its packages."""
    names = [name for name in (*REQUIRED_PACKAGES, *OPTIONAL_PACKAGES) if find_spec(name) is not None]
    probed = probe({name: MODULES.get(name, name) for name in names})
    torch = probed.get("torch", ImportFacts())
    has_gpu = bool(torch.get("gpus"))
    listed = (name for name in OPTIONAL_PACKAGES if name in probed or name not in BACKENDS)
    packages = [_package(name, probed.get(name), has_gpu) for name in (*REQUIRED_PACKAGES, *listed)]
    gpus: list[GpuFacts] = [
        {"name": name, "compute_capability": capability, "memory_gb": round(size / 2**30, 1)}
        for name, capability, size in torch.get("gpus", ())
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # the memory limit of a container
    if limit.exists() and (limit_text := limit.read_text(encoding="utf-8").strip()).isdecimal():
        memory = min(memory, int(limit_text))
    return {
        "machine": {
            "python": platform.python_version(),
            "rapidformer_templates": _version("rapidformer_templates"),
            "torch_cuda": torch.get("cuda"),
            "gpus": gpus,
            "accelerator": torch.get("accelerator"),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gb": round(memory / 2**30, 1),
        },
        "packages": packages,
        "deepspeed_parts": _parts(device),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def serves(package: str) -> tuple[str, ...]:
    """Return the switches and optimizers that use a package."""
    names = [switch.name for switch in REGISTRY.switches if switch.needs_package == package]
    if package in HELPS:
        names.append(HELPS[package])
    for name, facts in OPTIMIZERS.items():
        if facts.needs_package == package or facts.implementation.path.startswith(f"{package}."):
            names.append(name)
    return tuple(names)


def _install(package: str) -> str:
    if package in INSTALL:
        return INSTALL[package]
    declared = [switch.install for switch in REGISTRY.switches if switch.needs_package == package]
    if package in OPTIMIZER_PACKAGES:
        declared.append(OPTIMIZER_PACKAGES[package].install)
    return next((text for text in declared if text), f"pip install {package}")


def _package(name: str, probed: ImportFacts | None, has_gpu: bool) -> DoctorFinding:
    """Return the finding about a package. ``probed`` is None if it is not installed."""
    needed_by = ("everything",) if name in REQUIRED_PACKAGES else serves(name)
    if probed is None:
        return DoctorFinding(name, "not installed", detail=_install(name), serves=needed_by)
    installed = _version(name)
    if name == "apex":
        spec = find_spec(name)
        folders = (spec.submodule_search_locations if spec else None) or ()
        if not any(Path(folder, "optimizers").is_dir() for folder in folders):
            return DoctorFinding(name, "not Nvidia's", installed, _install(name), needed_by)
    on_cpu_since = OPTIMIZER_PACKAGES[name].cpu_since if name in OPTIMIZER_PACKAGES else None
    has_no_cpu_form = on_cpu_since is not None and version_of(installed) < on_cpu_since
    if not has_gpu and (name in NEEDS_GPU or has_no_cpu_form):
        return DoctorFinding(name, "needs a GPU", installed, "torch sees none here", needed_by)
    if probed["error"]:
        return DoctorFinding(name, "does not import", installed, probed["error"], needed_by)
    if probed["gone"]:
        missing_names = "; ".join(f"no {what}: without it, {broken}" for what, broken in probed["gone"])
        return DoctorFinding(name, "lacks what this version uses", installed, missing_names, needed_by)
    return DoctorFinding(name, "ok", installed, serves=needed_by)


def probe(modules: dict[str, str]) -> dict[str, ImportFacts]:
    """Import modules in a child process and return its report on each, including ``error``, by package name.

    If a module crashes or hangs, another round tries the remaining modules without it.
    """
    results: dict[str, ImportFacts] = {}
    remaining = dict(modules)
    while remaining:
        lines, end = _import_all(remaining)
        reports: list[ImportFacts] = [json.loads(line) for line in lines if line.startswith(('{"start": ', '{"end": '))]
        results |= {line["end"]: line for line in reports if "end" in line}
        remaining = {name: module for name, module in remaining.items() if name not in results}
        if remaining:
            started = [line["start"] for line in reports if line.get("start") in remaining]
            results[started[0] if started else next(iter(remaining))] = {"error": f"{end} while it was imported"}
            remaining = {name: module for name, module in remaining.items() if name not in results}
    return results


def _import_all(modules: dict[str, str]) -> tuple[list[str], str]:
    """Return (lines of the child's output, how the child ended)."""
    path = os.pathsep.join(folder for folder in sys.path if folder)  # so that the child finds the same packages
    command = [sys.executable, "-P", "-W", "ignore", "-c", PROBE, json.dumps(modules)]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
    ) as child:
        try:
            text, _ = child.communicate(timeout=IMPORT_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            text, _ = child.communicate()
            return text.splitlines(), f"hung for {IMPORT_SECONDS} s"
    status = child.returncode
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended Python with status {status}"
    return text.splitlines(), how


def _parts(device: str) -> PartsFindings:
    try:
        root = deepspeed_parts.folder(device)
    except RapidformerError:
        return {"folder": None, "parts": []}  # the table of packages reports that it is missing
    return {"folder": str(root), "parts": [_part(name, root, device) for name in deepspeed_parts.PARTS]}


def _part(name: str, root: Path, device: str) -> DoctorFinding:
    part = deepspeed_parts.PARTS[name]
    built = deepspeed_parts.is_built(name, root)
    reason = deepspeed_parts.problems(name, device)
    locks = [lock for lock in deepspeed_parts.locks([name], root) if lock.parent.name in part.folders]
    if reason:
        return DoctorFinding(name, "cannot be used" if built else "cannot be built", "", reason, part.serves)
    for lock in locks:
        builder = deepspeed_parts.holder(lock)
        if builder is not None:
            return DoctorFinding(name, "in use", "", f"process {builder} is building or loading it", part.serves)
        mend = (
            "the next run removes it"
            if deepspeed_parts.is_own_folder(root)
            else "delete it if nothing is building there"
        )
        return DoctorFinding(name, "stale lock", "", f"{lock}: {mend}", part.serves)
    if not built:
        mend = f"built at first use ({part.takes}), or now by rapidformer doctor --build {name}"
        return DoctorFinding(name, "not built yet", "", mend, part.serves)
    return DoctorFinding(name, "built", serves=part.serves)


def show(report: DoctorFindings) -> None:
    """Print the report as tables."""
    from rich.table import Table

    machine = report["machine"]
    devices = [
        f"{gpu['name']}, compute capability {gpu['compute_capability']}, {gpu['memory_gb']} GB"
        for gpu in machine["gpus"]
    ]
    if not devices and (accelerator := machine["accelerator"]):
        name = f" ({accelerator['name']})" if accelerator["name"] else ""
        devices = [f"{accelerator['count']} × {accelerator['kind']}{name}"]
    cuda = f"built for CUDA {machine['torch_cuda']}" if machine["torch_cuda"] else "built for CPUs only"
    about = Table(title="Machine", title_justify="left", show_header=False)
    about.add_row("python", machine["python"])
    about.add_row("rapidformer_templates", machine["rapidformer_templates"])
    about.add_row("device", "\n".join(devices) or f"CPU (torch is {cuda})")
    about.add_row("cores", str(machine["cores"]))
    about.add_row("memory", f"{machine['memory_gb']} GB")
    terminal = console()
    terminal.print(about)
    terminal.print(_table("Packages", report["packages"]))
    parts = report["deepspeed_parts"]
    if parts["folder"]:
        terminal.print(_table("DeepSpeed's compiled parts", parts["parts"]))
        print(f"in {parts['folder']}")
    details = {finding.name: finding.detail for finding in (*report["packages"], *parts["parts"])}
    width = max(map(len, details), default=0)
    lines = [f"  {name:<{width}}  {detail}" for name, detail in details.items() if detail]
    if lines:  # below the tables, whose columns would break commands that can be copied
        print("Details:", *lines, sep="\n")


def _table(title: str, findings: Sequence[DoctorFinding]) -> Table:
    from rich.table import Table

    table = Table("", "state", title=title, title_justify="left")
    words = [word for finding in findings for word in ", ".join(finding.serves).split()]
    table.add_column("serves", min_width=max(map(len, words), default=0))
    for finding in findings:
        state = f"{finding.version} {finding.state}".strip()
        fine, absent = finding.state in ("ok", "built"), finding.state.startswith("not ")
        table.add_row(
            finding.name, state, ", ".join(finding.serves), style=None if fine else "dim" if absent else "yellow"
        )
    return table
