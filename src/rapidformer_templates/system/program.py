"""The program that this process runs: whether it is a script, its arguments, and what starts it again."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rapidformer_templates.errors import ConfigError, Interrupted


def is_script() -> bool:
    """Whether a file or a module is run, and not what is typed in, piped in, or a cell of a notebook."""
    program = sys.modules["__main__"]
    shell = sys.modules.get("IPython")
    if shell is not None and shell.get_ipython() is not None:
        return False
    file = getattr(program, "__file__", None)  # of a program on standard input it is "<stdin>"
    return getattr(program, "__spec__", None) is not None or (file is not None and Path(file).is_file())


def place_of(frame: FrameType) -> str:
    """Where the code of a frame stands: ``train.py:8``, or ``In[3]:8`` of the third cell that a notebook has run."""
    shell = sys.modules.get("IPython")
    cell = shell.get_ipython() if shell is not None else None
    if cell is not None and frame.f_globals.get("__name__") == "__main__":
        return f"In[{cell.execution_count}]:{frame.f_lineno}"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def arguments() -> list[str]:
    """The command line of the program; what stands behind the name of a notebook's kernel is not ours to read."""
    piped_in = sys.argv[:1] in (["-"], ["-c"])  # as Python names what is in no file
    return sys.argv[1:] if is_script() or piped_in else []


def command() -> list[str]:
    """The words that start this very program again.

    Raises:
        ConfigError: there is no program to start, in a notebook, an interactive session or on standard input.
    """
    if not is_script():
        raise ConfigError(
            "workers can only be started from a script or the command line",
            where="--nproc-per-node",
            hint="each worker runs the program again, and this one is in no file: "
            "save the code as a script, or train with one worker here (nproc_per_node=1)",
        )
    return [sys.executable, *sys.orig_argv[1:]]


def interrupted_while_importing() -> NoReturn:
    """End a script whose imports, which take seconds, were ended by Ctrl-C: a line, and no stack trace of ours.

    Raises:
        KeyboardInterrupt: at a prompt or in a notebook, which goes on.
    """
    if not is_script():
        raise KeyboardInterrupt
    print("interrupted", file=sys.stderr)
    raise SystemExit(Interrupted.LOST)
