"""The user's script: a check of the names of its hooks, planning it, and running it again in workers.

All scripts, including those that call ``main()``, train through :meth:`Trainer.fit`. While :func:`capture_template`
runs a script for ``rapidformer plan``, ``fit`` is intercepted. The first template that reaches it is captured, with the
class, the values and the flags that the script has set.

Workers of ``fit`` run the script again, for exactly this one call, because its classes and functions are defined there.
Each worker reaches the same calls of ``fit`` in the same order. Earlier calls return their known results without
training. In this call the worker trains, and then it exits, so that the rest of the script runs only once, in the
process that started the workers. This module does not import torch.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from inspect import getattr_static, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

from rapidformer_templates.errors import (
    ConfigError,
    Explained,
    Interrupted,
    RapidformerError,
    ReportedError,
    WorkerFailed,
    alike,
)  # fmt: skip
from rapidformer_templates.run.folder import Summary
from rapidformer_templates.system import launch
from rapidformer_templates.system.files import private_folder, write_private

if TYPE_CHECKING:
    from rapidformer_templates.run.run import Template


F = TypeVar("F", bound=Callable[..., Any])

NEAR = 0.88
"""Lowest similarity (``difflib``) at which a name counts as a misspelt hook: one letter in eight, or a final s.
``build_dataset`` and ``loss`` are different enough to be a user's own names."""

CALLED_BY_A_LOOP = re.compile(
    r"on_(train|step|epoch|eval|valid|checkpoint|save|log|batch|fit|test|predict|init|optimizer|before|after)"
)
"""Prefixes of callback names, here and in other libraries. ``on_gpu`` is not a callback."""


def hook(method: F) -> F:
    """Mark a method that a script may override."""
    method.is_hook = True  # type: ignore[attr-defined]
    return method


def hooks_of(template: type) -> list[str]:
    """Return the names of the hooks."""
    return [name for name, method in vars(_library_base(template)).items() if hasattr(method, "is_hook")]


def overridden_hooks(template: type) -> list[str]:
    """Return the names of the library's hooks that a class or one of its bases overrides."""
    base = _library_base(template)
    return [name for name in hooks_of(template) if getattr(template, name) is not getattr(base, name)]


def _library_base(template: type) -> type:
    """Return the first class that defines default hooks. A class that only inherits defaults is part of a script."""
    for kind in template.__mro__:
        hooks = [method for method in vars(kind).values() if hasattr(method, "is_hook")]
        if any(method.__module__ == kind.__module__ for method in hooks):
            return kind
    raise TypeError(f"{template.__name__} is not a template")


def check_arguments(template: type) -> None:
    """Raise an error for a hook that cannot be called as the library calls it, before the run needs it.

    Raises:
        ConfigError: names the method and the arguments of the hook.
    """
    base = _library_base(template)
    for name in overridden_hooks(template):
        method, given = getattr_static(template, name), list(signature(getattr(base, name)).parameters)
        if not accepts(getattr(template, name), given[isinstance(method, staticmethod | classmethod) :]):
            message = f"{template.__name__}.{name} does not take the arguments of its hook"
            hint = f"declare it as def {name}({', '.join(given)})"
            raise ConfigError(message, where=_file_and_line(template, method), hint=hint)


def accepts(function: Callable[..., object], arguments: Sequence[str]) -> bool:
    """Whether a function can be called with this number of positional arguments. True if it does not say so."""
    try:
        signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # of a function in C
        return True
    return True


def check_names(template: type) -> None:
    """Raise an error for a method whose name is almost a hook, because nothing would ever call it.

    A name is accepted if the class also defines the hook that it resembles, or if it begins with an underscore.

    Raises:
        ConfigError: names the method and the hook.
    """
    base, hooks = _library_base(template), hooks_of(template)
    package, library_names = base.__module__.rpartition(".")[0], set(dir(base))
    of_library = {f"{package}.{name}" for name in ("trainer", "pretrainer", "finetuner")}
    others = [kind for kind in template.__mro__ if kind is not object and kind.__module__ not in of_library]
    # Subclasses of a template, and mixins that define a hook.
    own_classes = [kind for kind in others if issubclass(kind, base) or any(name in vars(kind) for name in hooks)]
    defined = {name for kind in own_classes for name in vars(kind)}
    plain_names = {known.replace("_", "").lower(): known for known in (*hooks, "Flags")}
    for kind in own_classes:
        for name, value in vars(kind).items():
            if name == "predict":
                message = f"{kind.__name__}.predict is not a hook: a program calls predict(samples) after the training"
                hint = "did you mean read_outputs(self, outputs, batch)?"
                raise ConfigError(message, where=_file_and_line(kind, value), hint=hint)
            is_method = callable(value) or isinstance(value, staticmethod | classmethod | property)
            if name.startswith("_") or name in library_names or not is_method:
                continue
            plain = name.replace("_", "").lower()
            if CALLED_BY_A_LOOP.match(name):
                near = alike(plain, [known for known in plain_names if known.startswith("on")], cutoff=0.0)
            else:
                near = [known for known in alike(plain, plain_names, cutoff=NEAR) if plain_names[known] not in defined]
            if near:
                message = f"{kind.__name__}.{name} is not a hook, so nothing would call it"
                hint = f"did you mean {plain_names[near[0]]}? your own methods may begin with an underscore: _{name}"
                raise ConfigError(message, where=_file_and_line(kind, value), hint=hint)


def _file_and_line(kind: type, value: object) -> str:
    code = getattr(getattr(value, "__func__", None) or getattr(value, "fget", None) or value, "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else kind.__module__


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


class ScriptArguments(list[str]):
    """``sys.argv`` of a script that the command runs.

    Attributes:
        is_read: whether anything has read the words after the script's name.
    """

    is_read = False

    def __getitem__(self, index: Any) -> Any:
        self.is_read |= index != 0
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[str]:
        self.is_read = True
        return super().__iter__()

    def __contains__(self, word: object) -> bool:
        self.is_read = True
        return super().__contains__(word)

    def __reduce__(self) -> tuple[type, tuple[list[str]]]:
        return list, (self[:],)  # for processes that multiprocessing starts


_is_used = False
"""Whether the running script has used a template, so that its flags act."""


def note_use() -> None:
    """Note that the running script uses a template. ``evaluate``, ``predict``, ``fit`` and ``compose`` call this.

    Raises:
        ConfigError: the command has flags for the script, and the script has not read them.
    """
    global _is_used
    _is_used = True
    if isinstance(sys.argv, ScriptArguments) and len(sys.argv) > 1 and not sys.argv.is_read:
        name = Path(sys.argv[0]).name
        message = f"{name} does not read its command line, so {sys.argv[1]} would have no effect"
        hint = "YourTemplate.main(…) reads it, and so does YourTemplate(sys.argv[1:], …).fit()"
        raise ConfigError(message, where="--user-script", hint=hint)


def intercept_for_planning(template: Template) -> None:
    """Stop before training if the script is only inspected. ``fit`` and ``compose`` call this first."""
    note_use()
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
    sys.argv = ScriptArguments([str(path), *argv])
    sys.path.insert(0, str(path.resolve().parent))
    runpy.run_path(str(path), run_name="__main__")


def train_script(script: str, argv: Sequence[str]) -> None:
    """Run a script that must use a template, because the flags would have no effect without one.

    Raises:
        ConfigError: the file does not exist, or the script ends without using a template.
        SystemExit: the script ends itself.
    """
    global _is_used
    _is_used = False
    try:
        run_script(script, argv)
    except SystemExit as end:
        if end.code or _is_used:
            raise
    if not _is_used and CALL not in os.environ:  # otherwise the process that started this worker reports it
        raise _without_training(script)


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
    global _inspect
    argv_before, path_before = sys.argv, list(sys.path)
    _inspect = inspect
    try:
        with redirect_stdout(sys.stderr):
            run_script(script, argv)
    except _Captured as captured:
        return cast(T, captured.answer)
    except RapidformerError:
        raise
    except SystemExit as end:
        if end.code:
            raise
    except Exception as error:
        file, line = Path(script), None
        if isinstance(error, SyntaxError):
            file, line = Path(error.filename or script), error.lineno
        elif frames := [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == file]:
            line = frames[-1].lineno
        words = str(error).strip().split("\n")[0] or "it gives no reason"
        message = f"the script fails before it trains: {type(error).__name__}: {words}"
        hint = f"python {script} … shows the whole stack"
        raise ConfigError(message, where=f"{file.name}:{line}" if line else file.name, hint=hint) from error
    finally:
        _inspect = None
        sys.argv, sys.path[:] = argv_before, path_before
    raise _without_training(script)


def _without_training(script: str) -> ConfigError:
    name = Path(script).name
    message = f"{name} ended without training: nothing in it called main() or fit()"
    return ConfigError(message, where="--user-script", hint=f"the last line of {name} must be YourTemplate.main()")


CALL = "RAPIDFORMER_CALL"
"""Environment variable of workers that ``fit`` has started: the folder with the data of the call."""


class Outcome(TypedDict, total=False):
    """The result of a call of ``fit``: a summary, or the text of an error and its exit status."""

    summary: Summary
    error: str
    status: int
    interrupted: bool


_outcomes: list[Outcome] = []
"""Results of this process's calls, in order."""


def record_outcome(train: Callable[[], Summary]) -> Summary:
    """Run a call in the first process and record its result. Workers of later calls return the same result."""
    try:
        summary = train()
    except (Exception, Interrupted) as error:
        text = error.render() if isinstance(error, Explained) else f"{type(error).__name__}: {error}"
        is_stop = isinstance(error, Interrupted)
        _outcomes.append({"error": text, "status": getattr(error, "exit_status", 1), "interrupted": is_stop})
        raise
    _outcomes.append({"summary": summary})
    return summary


def train_in_new_workers(
    template: str,
    flags: Mapping[str, object],
    count: int,
    port: int | None = None,
    variables: Mapping[str, str] | None = None,
    resumes: Callable[[], bool] = lambda: False,
) -> Summary:
    """Start workers for this call, wait for them, and return the summary of rank 0.

    Args:
        template: name of the class whose ``fit`` was called.
        flags: values of its flags, which the workers must use.
        count, port, variables, resumes: see :func:`launch.run_workers`.

    Raises:
        WorkerFailed: the workers ended without an error, but have not trained.
    """
    with private_folder() as folder:
        call = {"template": template, "flags": flags, "outcomes": _outcomes}
        write_private(folder / "call.json", json.dumps(call).encode())
        launch.run_workers(launch.program_command(), count, port, {**(variables or {}), CALL: str(folder)}, resumes)
        result = folder / "summary.json"
        if not result.exists():
            hint = "each of them runs the script again, which must take the same path every time"
            raise WorkerFailed(f"the workers ended without reaching this call of {template}.fit()", hint=hint)
        summary: Summary = json.loads(result.read_text(encoding="utf-8"))
    return summary


def train_in_this_worker(
    template: str,
    flags: Mapping[str, object],
    override_flags: Callable[[Mapping[str, object]], None],
    train: Callable[[], Summary],
) -> Summary:
    """Run a call in a worker. The call for which the worker was started is its last, whether or not it fails.

    Args:
        template, flags: see :func:`train_in_new_workers`.
        override_flags: takes values of the first process that differ here, such as a folder name with the time.
        train: runs the training.

    Raises:
        Interrupted, ReportedError: an earlier call, which was also stopped or has failed in the first process.
    """
    if CALL not in os.environ:  # torchrun, not fit(), has started this worker
        return launch.report_errors(train)
    folder = Path(os.environ[CALL])
    call = json.loads((folder / "call.json").read_text(encoding="utf-8"))
    number = len(_outcomes)
    if number < len(call["outcomes"]):
        outcome: Outcome = call["outcomes"][number]
        _outcomes.append(outcome)
        if "error" in outcome:
            if outcome["interrupted"]:
                raise Interrupted(outcome["error"], saved=outcome["status"] == Interrupted.SAVED)
            raise ReportedError(outcome["error"], outcome["status"])
        return outcome["summary"]

    def train_for_the_call() -> None:
        if template != call["template"]:
            here = f"a worker reached {template}.fit()"
            hint = "each worker runs the script again, which must take the same path every time"
            raise ConfigError(f"{here} while the process that started it was at {call['template']}.fit()", hint=hint)
        values = json.loads(json.dumps(flags))
        override_flags({name: value for name, value in call["flags"].items() if values.get(name) != value})
        summary = train()
        if os.environ["RANK"] == "0":
            write_private(folder / "summary.json", json.dumps(summary).encode())

    launch.report_errors(train_for_the_call)
    raise SystemExit(0)
