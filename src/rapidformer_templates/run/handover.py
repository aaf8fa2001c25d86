"""A script that runs up to its training, and hands over its template instead: what ``rapidformer plan`` looks at.

A white-box script trains through one door, :meth:`Trainer.fit`, which ``main()`` goes through, too. While
:func:`ask` runs a script that door is locked: the first template that comes to it is the answer, with the
class, the values and the flags that the script has given it. Imports no torch.
"""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rapidformer_templates.errors import ConfigError, RapidformerError

if TYPE_CHECKING:
    from rapidformer_templates.run.template import Template

T = TypeVar("T")

_look: Callable[[Any], Any] | None = None
"""What is asked of the template where the door is locked."""


class _HandedOver(BaseException):
    """Takes the answer out of the script; no ``except Exception`` of the script's stops it."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer


def is_asked_for() -> bool:
    """Whether the script that runs now is only looked at."""
    return _look is not None


def at_the_door(template: Template) -> None:
    """What ``fit`` begins with: hand the template over if nothing is to be trained."""
    if _look is not None:
        raise _HandedOver(_look(template))


def take_script(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of ``--user-script``, and the command line without it."""
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
    """Run a script with these words after its name, as ``python script …`` does.

    Raises:
        ConfigError: there is no such file.
    """
    path = Path(script)
    if not path.is_file():
        raise ConfigError(f"the script {script} does not exist", where="--user-script")
    sys.argv = [str(path), *argv]
    sys.path.insert(0, str(path.resolve().parent))
    runpy.run_path(str(path), run_name="__main__")


def ask(script: str, argv: Sequence[str], look: Callable[[Template], T]) -> T:
    """What ``look`` finds at the template that a script would train with these words.

    Nothing is trained. What the script prints goes to standard error.

    Args:
        look: is called while the script's classes still have their source.

    Raises:
        ConfigError: it fails, or ends without ``main()`` or ``fit()``.
        RapidformerError: what the script's template has refused.
        SystemExit: it ends itself with an exit status, after it has said why.
    """
    name = Path(script).name
    with _door_locked(look), redirect_stdout(sys.stderr):
        try:
            run_script(script, argv)
        except _HandedOver as reached:
            return cast(T, reached.answer)
        except RapidformerError:
            raise
        except SystemExit as ended:
            if ended.code:
                raise
        except Exception as error:
            raise _failure(script, error) from error
    raise ConfigError(
        f"{name} ended without training: nothing in it called main() or fit()",
        where="--user-script",
        hint=f"the last line of {name} is to be YourTemplate.main()",
    )


@contextmanager
def _door_locked(look: Callable[[Template], Any]) -> Iterator[None]:
    global _look
    argv, path = sys.argv, list(sys.path)
    _look = look
    try:
        yield
    finally:
        _look = None
        sys.argv, sys.path[:] = argv, path


def _failure(script: str, error: Exception) -> ConfigError:
    """A script's own mistake, at the line of the script that led to it."""
    path = Path(script)
    if isinstance(error, SyntaxError):
        file, line = Path(error.filename or script), error.lineno
    else:
        here = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
        file, line = path, here[-1].lineno if here else None
    words = str(error).strip().split("\n")[0] or "it gives no reason"
    return ConfigError(
        f"the script fails before it trains: {type(error).__name__}: {words}",
        where=f"{file.name}:{line}" if line else file.name,
        hint=f"python {script} … shows the whole stack",
    )
