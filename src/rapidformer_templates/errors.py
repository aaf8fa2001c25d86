"""Errors that a user can fix, and the diagnostics of a refused plan.

Every error that is caused by a user's mistake derives from :class:`RapidformerError`, and a stopped run raises
:class:`Interrupted`. The command line prints both without a stack trace and exits with ``exit_status``.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ParamSpec

P = ParamSpec("P")


class Explained(BaseException):
    """An exception whose text tells the user what to do.

    Args:
        message: what is wrong, in one sentence.
        where: the file, line, column or flag that caused it.
        hint: what to do about it.

    Attributes:
        lost_workers: number of workers that are lost, if a restart with the others may help. 0 if it cannot help.
        in_code: the text for a program that gives flags as arguments, if it differs from that of a terminal.
    """

    exit_status = 2
    in_code: str | None = None
    prefix = "error: "
    lost_workers = 0

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def render(self) -> str:
        """Return the text for a terminal: one line each for the message, the place and the hint."""
        lines = [f"{self.prefix}{self.message}"]
        if self.where:
            lines.append(f"  where  {self.where}")
        if self.hint:
            lines.append(f"  help   {self.hint}")
        return "\n".join(lines)

    def render_line(self) -> str:
        """Return the same as one line, for a list of several errors."""
        where = f" ({self.where.replace(' (', ', ').replace(')', '')})" if self.where else ""
        return f"{self.prefix}{self.message}{where}" + (f": {self.hint}" if self.hint else "")

    def __str__(self) -> str:
        return self.in_code or self.render()

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows instead of a stack trace. IPython calls this."""
        return str(self).splitlines()


class RapidformerError(Explained, Exception):
    """A mistake or a condition that the user can fix."""


class ConfigError(RapidformerError):
    """A flag, a YAML key or a value that cannot be used."""


@contextmanager
def long_names_explained() -> Iterator[None]:
    """Replace the system's error about a file name that is too long, which any access to the file raises.

    Raises:
        ConfigError: a file name is too long.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        name = str(error.filename)
        message = f"a path of {len(name)} characters is too long for this file system: {name[:40]}…{name[-20:]}"
        raise ConfigError(message, hint="give a shorter name") from error


class UnknownName(ConfigError):
    """A flag or a YAML key that does not exist. The flag that was meant is not known."""


class DataError(RapidformerError):
    """A file, a column, a line or a label that cannot be used."""


class NoSamples(DataError):
    """A part of the data is too small for one sample."""


class ModelError(RapidformerError):
    """A model folder or architecture that cannot be used."""


class NoModel(ModelError, AttributeError):
    """A template has no model yet. ``hasattr(template, "model")`` is false."""


class HubUnreachable(ModelError):
    """A model is not in the cache, and the hub cannot be reached to download it."""


class CheckpointError(RapidformerError):
    """A checkpoint that is damaged, does not fit or cannot be written."""


class StorageFailed(CheckpointError):
    """A checkpoint could not be written for a reason that may pass, such as a full disk. Earlier ones are unchanged."""


class NonFiniteLoss(RapidformerError):
    """The loss or the gradient became infinite or NaN. The weights were not changed.

    Args:
        age: number of steps that were started after the failing one before the host detected the failure.
        samples: the samples of this worker's micro batches whose losses are not finite.
        more: see :class:`Explained`.
    """

    exit_status = 3

    def __init__(self, message: str, *, age: int = 0, samples: Sequence[int] = (), **more: str | None) -> None:
        super().__init__(message, **more)
        self.age, self.samples = age, samples


class OutOfMemory(RapidformerError):
    """Memory could not be allocated."""

    exit_status = 1
    lost_workers = 1


ALLOCATION_FAILED = ("can't allocate memory", "out of memory", "Cannot allocate memory", "bad_alloc")
"""Substrings in the error messages of torch's allocators and of the system."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory could not be allocated."""
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in ALLOCATION_FAILED)


class DeviceFailed(RapidformerError):
    """The accelerator reported an error: a kernel failed, or the device is gone."""

    exit_status = 1
    lost_workers = 1


class SwitchDidNothing(RapidformerError):
    """A switch was active, but the first step does not show that it did anything.

    Args:
        findings: for each such switch, the expected effect that was not observed.
        where: how the switches were requested.
    """

    exit_status = 1

    def __init__(self, findings: Mapping[str, str], *, where: str) -> None:
        idle = "; ".join(f"{name} did nothing in the first step: {finding}" for name, finding in findings.items())
        hint = "leave the switch out, or check whether one of your hooks replaces it; nothing of this step was saved"
        super().__init__(idle, where=where, hint=hint)
        self.switches = tuple(findings)


class WorkerFailed(RapidformerError):
    """A worker process ended too early.

    Args:
        lost_workers, more: see :class:`Explained`.
    """

    exit_status = 1

    def __init__(self, message: str, *, lost_workers: int = 0, **more: str | None) -> None:
        super().__init__(message, **more)
        self.lost_workers = lost_workers


class WorkerHangs(RapidformerError):
    """A worker makes no progress, and the others wait for it."""

    exit_status = 4
    lost_workers = 1


class ReplicasDiffer(RapidformerError):
    """Workers have different values where all must have the same."""

    exit_status = 5


class ReportedError(RapidformerError):
    """An error that a worker has already rendered. Its text is shown unchanged.

    Args:
        rank: rank of the worker.
        lost_workers: that of the error.
    """

    def __init__(self, text: str, exit_status: int, rank: int = 0, lost_workers: int = 0) -> None:
        super().__init__(text)
        self.exit_status = exit_status
        self.rank = rank
        self.lost_workers = lost_workers

    def render(self) -> str:
        return self.message


class Interrupted(Explained, KeyboardInterrupt):
    """The run was asked to stop (SIGTERM, SIGINT, SIGHUP). This is not an error, and the message does not call it one.

    An ``except Exception`` does not catch it, so Ctrl-C also ends a program that trains several times.

    Args:
        saved: whether there is a checkpoint from which the run can resume. It decides the exit status. 75 is
            ``EX_TEMPFAIL`` of sysexits, which means "try again later". 130 is a shell's status for a program that
            Ctrl-C has stopped.
    """

    SAVED = 75
    LOST = 130
    prefix = ""

    def __init__(self, message: str, *, hint: str | None = None, saved: bool = True) -> None:
        super().__init__(message, hint=hint)
        self.saved = saved
        self.exit_status = self.SAVED if saved else self.LOST


def alike(word: str, known: Iterable[str], *, limit: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the known words that are most similar to ``word``, best first.

    Args:
        limit: maximum number of words.
        cutoff: minimum similarity according to :mod:`difflib`, from 0 to 1.
    """
    return difflib.get_close_matches(word, list(known), limit, cutoff)


def did_you_mean(word: str, known: Iterable[str], also: str = "", *, limit: int = 1, cutoff: float = 0.6) -> str:
    """Return a hint that suggests similar known words for an unknown word.

    Args:
        also: text that follows the suggestion, or is the whole hint if no known word is similar.
        limit, cutoff: see :func:`alike`.
    """
    near = " or ".join(alike(word, known, limit=limit, cutoff=cutoff))
    return " ".join(part for part in (f"did you mean {near}?" if near else "", also) if part)


def counted(number: float, noun: str) -> str:
    """Return a number with its noun: ``1 worker``, ``2,000 workers``, ``0.106 epochs``."""
    shown = f"{number:.3g}" if number < 100 else f"{number:,.0f}"
    return f"{shown} {noun}{'' if shown == '1' else 's'}"


@dataclass(frozen=True)
class Suggestion:
    """A change to the command that is known to be accepted.

    Attributes:
        change: the change.
        note: why it helps.
    """

    change: str
    note: str = ""


def lines_of(suggestions: Sequence[Suggestion]) -> list[str]:
    """Return one line for each suggestion. The note of a whole command is a comment, so that the line can be copied."""
    changes = {s.change: s.change.startswith("rapidformer ") for s in suggestions}
    width = max((len(change) for change, is_command in changes.items() if not is_command), default=0)
    return [
        f"{s.change}  # {s.note}" if changes[s.change] and s.note else f"{s.change:<{width}}  {s.note}".rstrip()
        for s in suggestions
    ]


@dataclass(frozen=True)
class Diagnostic:
    """One reason why a plan is refused.

    Attributes:
        rule: code of the rule, such as ``RF002``.
        message: what is wrong.
        why: the fact behind the rule.
        source: where the rule comes from, in words.
        asked: the conflicting values, each with its origin.
        works: the closest combinations that are accepted, closest first.
    """

    rule: str
    message: str
    why: str
    source: str
    asked: tuple[str, ...] = ()
    works: tuple[Suggestion, ...] = ()

    def render(self) -> str:
        lines = [f"error[{self.rule}]: {self.message}", f"  why    {self.why} ({self.source})"]
        if self.asked:
            lines.append(f"  asked  {', '.join(self.asked)}")
        for i, line in enumerate(lines_of(self.works)):
            lines.append(f"  {'works' if i == 0 else '  or '}  {line}")
        lines.append(f"  more   rapidformer explain {self.rule}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        return {
            "rule": self.rule,
            "message": self.message,
            "why": self.why,
            "source": self.source,
            "asked": list(self.asked),
            "works": [{"change": s.change, "note": s.note} for s in self.works],
        }


class Refused(RapidformerError):
    """The plan breaks rules. ``diagnostics`` has one entry for each broken rule."""

    def __init__(self, diagnostics: Sequence[Diagnostic]) -> None:
        super().__init__("; ".join(d.message for d in diagnostics))
        self.diagnostics = tuple(diagnostics)

    def render(self) -> str:
        return "\n\n".join(d.render() for d in self.diagnostics)


class SeveralMistakes(ConfigError):
    """Several mistakes in one command. ``errors`` has one entry for each."""

    def __init__(self, errors: Sequence[RapidformerError]) -> None:
        super().__init__("; ".join(error.message for error in errors))
        self.errors = tuple(errors)

    def render(self) -> str:
        """Return one line for each mistake, and then the rules that the plan breaks."""
        refusals = [error.render() for error in self.errors if isinstance(error, Refused)]
        lines = [error.render_line() for error in self.errors if not isinstance(error, Refused)]
        return "\n\n".join(["\n".join(lines), *refusals] if lines else refusals)


class MistakeCollector:
    """Collects the mistakes of a command, so that the user sees all of them at once.

    Attributes:
        errors: the mistakes so far, in the order in which they were found.
    """

    def __init__(self) -> None:
        self.errors: list[RapidformerError] = []

    @property
    def has_unknown_names(self) -> bool:
        """Whether a flag or a key is unknown. Then a flag that seems to be missing may be the one that was meant."""
        return any(isinstance(error, UnknownName) for error in self.errors)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Context for one check. Its mistake is collected, and the code after the context runs."""
        try:
            yield
        except SeveralMistakes as several:
            self.errors += several.errors
        except RapidformerError as error:
            self.errors.append(error)

    def run(self, check: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run one check and collect its mistake."""
        with self.collect():
            check(*args, **kwargs)

    def raise_all(self) -> None:
        """Raise what was collected, if anything.

        Raises:
            RapidformerError: the only mistake, or a :class:`SeveralMistakes`.
        """
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise SeveralMistakes(self.errors)
