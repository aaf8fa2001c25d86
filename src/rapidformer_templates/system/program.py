"""The program of this process: whether it is a script, its arguments, and the command that starts it again."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rapidformer_templates.errors import ConfigError, Interrupted


def is_script() -> bool:
    """Return whether a file or a module is run, instead of an interactive session, piped code or a notebook cell."""
    program = sys.modules["__main__"]
    shell = sys.modules.get("IPython")
    if shell is not None and shell.get_ipython() is not None:
        return False
    file = getattr(program, "__file__", None)  # "<stdin>" for a program on standard input
    return getattr(program, "__spec__", None) is not None or (file is not None and Path(file).is_file())


def line_of(frame: FrameType) -> str:
    """Return the location of a frame: ``train.py:8``, or ``In[3]:8`` for the third cell that a notebook has run."""
    shell = sys.modules.get("IPython")
    cell = shell.get_ipython() if shell is not None else None
    if cell is not None and frame.f_globals.get("__name__") == "__main__":
        return f"In[{cell.execution_count}]:{frame.f_lineno}"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def arguments() -> list[str]:
    """Return the command line of the program. Arguments of a notebook's kernel are not included."""
    piped_in = sys.argv[:1] in (["-"], ["-c"])  # Python's names for code without a file
    return sys.argv[1:] if is_script() or piped_in else []


def command() -> list[str]:
    """Return the command that starts this program again.

    Raises:
        ConfigError: there is no program to start, as in a notebook, an interactive session or on standard input.
    """
    if not is_script():
        raise ConfigError(
            "workers can only be started from a script or the command line",
            where="--nproc-per-node",
            hint="each worker runs the program again, but this one is not in a file: "
            "save the code as a script, or train with one worker here (nproc_per_node=1)",
        )
    return [sys.executable, *sys.orig_argv[1:]]


def interrupted_while_importing() -> NoReturn:
    """End a script with one line and no stack trace if Ctrl-C interrupted its imports, which take seconds.

    Raises:
        KeyboardInterrupt: at a prompt or in a notebook, which continues.
    """
    if not is_script():
        raise KeyboardInterrupt
    print("interrupted", file=sys.stderr)
    raise SystemExit(Interrupted.LOST)
