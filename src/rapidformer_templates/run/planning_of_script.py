"""Run a script only until its training starts, and capture its template. ``rapidformer plan`` uses this.

All scripts, including those that call ``main()``, train through :meth:`Trainer.fit`. While :func:`capture_template`
runs a script, ``fit`` is intercepted. The first template that reaches it is captured, with the class, the values and
the flags that the script has set. This module does not import torch.
"""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from rapidformer_templates.errors import ConfigError, RapidformerError

if TYPE_CHECKING:
    from rapidformer_templates.run.run import Template

T = TypeVar("T")

_inspect: Callable[[Template], object] | None = None
"""Inspects the captured template. None if ``fit`` is not intercepted."""


class _Captured(BaseException):
    """Carries the result out of the script. An ``except Exception`` in the script does not catch it."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer = answer


def is_planning() -> bool:
    """Whether the running script is only inspected, not trained."""
    return _inspect is not None


def intercept_for_planning(template: Template) -> None:
    """Stop before training if the script is only inspected. ``fit`` calls this first."""
    if _inspect is not None:
        raise _Captured(_inspect(template))


def split_script(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the value of ``--user-script``, and the command line without it."""
    rest, script = [], None
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == "--user-script":
            script = value if equals else next(words, None)
            if not script:
                raise ConfigError("--user-script needs the path of a script")
        else:
            rest.append(word)
    return script, rest


def run_script(script: str, argv: Sequence[str]) -> None:
    """Run a script with these arguments, as ``python script …`` does.

    Raises:
        ConfigError: the file does not exist.
    """
    path = Path(script)
    if not path.is_file():
        raise ConfigError(f"the script {script} does not exist", where="--user-script")
    sys.argv = [str(path), *argv]
    sys.path.insert(0, str(path.resolve().parent))
    runpy.run_path(str(path), run_name="__main__")


def capture_template(script: str, argv: Sequence[str], inspect: Callable[[Template], T]) -> T:
    """Return the result of ``inspect`` for the template that a script would train with these arguments.

    Nothing is trained. The output of the script goes to standard error.

    Args:
        inspect: called with the template while the source of the script's classes is still available.

    Raises:
        ConfigError: the script fails, or ends without ``main()`` or ``fit()``.
        RapidformerError: raised by the script's template.
        SystemExit: the script ends itself with a nonzero exit status, after it has reported the reason.
    """
    name = Path(script).name
    with _intercept_fit(inspect), redirect_stdout(sys.stderr):
        try:
            run_script(script, argv)
        except _Captured as captured:
            return cast(T, captured.answer)
        except RapidformerError:
            raise
        except SystemExit as end:
            if end.code:
                raise
        except Exception as error:
            raise _failure(script, error) from error
    raise ConfigError(
        f"{name} ended without training: nothing in it called main() or fit()",
        where="--user-script",
        hint=f"the last line of {name} must be YourTemplate.main()",
    )


@contextmanager
def _intercept_fit(inspect: Callable[[Template], object]) -> Iterator[None]:
    global _inspect
    argv, path = sys.argv, list(sys.path)
    _inspect = inspect
    try:
        yield
    finally:
        _inspect = None
        sys.argv, sys.path[:] = argv, path


def _failure(script: str, error: Exception) -> ConfigError:
    """Convert an exception of the script to an error that names the line of the script."""
    path = Path(script)
    if isinstance(error, SyntaxError):
        file, line = Path(error.filename or script), error.lineno
    else:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
        file, line = path, frames[-1].lineno if frames else None
    words = str(error).strip().split("\n")[0] or "it gives no reason"
    return ConfigError(
        f"the script fails before it trains: {type(error).__name__}: {words}",
        where=f"{file.name}:{line}" if line else file.name,
        hint=f"python {script} … shows the whole stack",
    )
