"""The tools that compile DeepSpeed's parts, and what to install if one is missing."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

INSTALL = "pip install 'rapidformer_templates[deepspeed]'"


def find_ninja() -> str | None:
    """Return the path of ninja in this Python environment, even if it is not active. Otherwise search PATH.

    Another version of ninja would recompile what this one has built.
    """
    return shutil.which("ninja", path=sysconfig.get_path("scripts")) or shutil.which("ninja")


def problems(part: str, device: str = "cpu") -> str | None:
    """Return why a part cannot be built here and what to do about it, or None. Takes at most 0.1 s."""
    missing = missing_tool() or missing_library(part, device)
    return f"{missing[0]}: {missing[1]}" if missing else None


def missing_tool() -> tuple[str, str] | None:
    """Return (what is missing, what to do) for the tools that torch needs even to load a part that is already built."""
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed", INSTALL
    if shutil.which(_compiler()) is None:
        return f"no C++ compiler ({_compiler()}) on PATH", "apt-get install g++"
    if find_ninja() is None:
        return "no ninja on PATH", "pip install ninja"
    return None


def missing_library(part: str, device: str) -> tuple[str, str] | None:
    """Return (what is missing, what to do) for the headers and libraries that a part is compiled against."""
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's C headers (Python.h) are missing", "apt-get install python3-dev"
    if part != "async_io":
        return None
    if not _has_libaio():
        return "libaio's header or library is missing", "apt-get install libaio-dev"
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    if device == "cuda" and not (shutil.which("nvcc") or Path(toolkit, "bin", "nvcc").exists()):
        return "the CUDA toolkit (nvcc) is missing", "install it in the version of torch's CUDA, and set CUDA_HOME"
    return None


def _compiler() -> str:
    """Return the compiler that torch uses."""
    return shlex.split(os.environ.get("CXX") or "c++")[0]


def _has_libaio() -> bool:
    """Return whether a program that uses libaio links, with the search paths of the compiler."""
    command = [_compiler(), "-x", "c++", "-", "-laio", "-o", os.devnull]
    program = "#include <libaio.h>\nint main() { io_context_t c = 0; return io_setup(1, &c); }\n"
    return subprocess.run(command, input=program, capture_output=True, text=True, check=False).returncode == 0
