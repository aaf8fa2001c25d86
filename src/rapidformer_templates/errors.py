"""Errors that a user can mend, and the diagnostics by which a plan is refused.

Everything raised for a user's mistake derives from :class:`RapidformerError`; the command line
prints it without a stack trace and exits with ``exit_status``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class RapidformerError(Exception):
    """A mistake or a condition that the user can mend.

    Args:
        message: what is wrong, in one sentence.
        where: the file, line, column or flag that it is about.
        hint: what to do about it.
    """

    exit_status = 2

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def render(self) -> str:
        """The text for a terminal: one line for what, one for where, one for what to do."""
        lines = [f"error: {self.message}"]
        if self.where:
            lines.append(f"  where  {self.where}")
        if self.hint:
            lines.append(f"  help   {self.hint}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render()

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows in the place of a stack: IPython asks for it."""
        return self.render().splitlines()


class ConfigError(RapidformerError):
    """A flag, a YAML key or a value that cannot be used."""


class DataError(RapidformerError):
    """A file, a column, a line or a label that cannot be used."""


class NoSamples(DataError):
    """A part of the data is too small for one sample."""


class ModelError(RapidformerError):
    """A model folder or architecture that cannot be used."""


class CheckpointError(RapidformerError):
    """A checkpoint that is damaged, does not fit or cannot be written."""


class NonFiniteLoss(RapidformerError):
    """The loss or the gradient became infinite or NaN; the weights were not touched.

    Args:
        age: steps that were begun after the one that it is about, before the host heard of it.
    """

    exit_status = 3

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None, age: int = 0) -> None:
        super().__init__(message, where=where, hint=hint)
        self.age = age


class OutOfMemory(RapidformerError):
    """Memory could not be allocated."""

    exit_status = 1


class DeviceFailed(RapidformerError):
    """The accelerator told of an error: a kernel went wrong, or it is gone."""

    exit_status = 1


class SwitchDidNothing(RapidformerError):
    """A switch was active, and the first step does not show that it did anything.

    Args:
        findings: for each such switch, what should have been seen and was not.
        where: how the switches were asked for.
    """

    exit_status = 1

    def __init__(self, findings: Mapping[str, str], *, where: str) -> None:
        idle = "; ".join(f"{name} did nothing in the first step: {finding}" for name, finding in findings.items())
        super().__init__(
            idle,
            where=where,
            hint="leave the switch out, or see whether a hook of yours takes its place; nothing of this step was saved",
        )
        self.switches = tuple(findings)


class WorkerFailed(RapidformerError):
    """A worker process ended before its time."""

    exit_status = 1


class ReportedError(RapidformerError):
    """An error of a worker, already put into words there; shown as it is.

    Args:
        rank: of the worker.
    """

    def __init__(self, text: str, exit_status: int, rank: int = 0) -> None:
        super().__init__(text)
        self.exit_status = exit_status
        self.rank = rank

    def render(self) -> str:
        return self.message


class Interrupted(RapidformerError):
    """The run was asked to end (SIGTERM, SIGINT, SIGHUP).

    Args:
        saved: whether there is something to go on from; the exit status says it, too: 75 is sysexits'
            ``EX_TEMPFAIL``, try again later; 130 is a shell's for what Ctrl-C has ended.
    """

    SAVED = 75
    LOST = 130

    def __init__(self, message: str, *, hint: str | None = None, saved: bool = True) -> None:
        super().__init__(message, hint=hint)
        self.saved = saved
        self.exit_status = self.SAVED if saved else self.LOST


def alike(word: str, known: Iterable[str], *, limit: int = 1, cutoff: float = 0.6) -> list[str]:
    """The known words that are most like ``word``, best first.

    Args:
        limit: how many at most.
        cutoff: the least similarity by :mod:`difflib`, from 0 to 1.
    """
    return difflib.get_close_matches(word, list(known), limit, cutoff)


def did_you_mean(word: str, known: Iterable[str], also: str = "", *, limit: int = 1, cutoff: float = 0.6) -> str:
    """A hint for a word that is not known: the known one that is most like it, and what to say in any case.

    Args:
        also: follows the question, or stands alone where nothing is like the word.
        limit, cutoff: as in :func:`alike`.
    """
    near = " or ".join(alike(word, known, limit=limit, cutoff=cutoff))
    return " ".join(part for part in (f"did you mean {near}?" if near else "", also) if part)


@dataclass(frozen=True)
class Suggestion:
    """A change of the command that is known to be accepted: ``change`` to make, and why it helps."""

    change: str
    note: str = ""


@dataclass(frozen=True)
class Diagnostic:
    """One reason why a plan is refused.

    Attributes:
        rule: code of the rule, such as ``RF002``.
        message: what is wrong.
        why: the fact behind the rule.
        source: where the rule is documented, such as ``[R]``.
        asked: the values that clash, each with where it came from.
        works: the nearest combinations that are accepted, nearest first.
    """

    rule: str
    message: str
    why: str
    source: str
    asked: tuple[str, ...] = ()
    works: tuple[Suggestion, ...] = ()

    def render(self) -> str:
        lines = [f"error[{self.rule}]: {self.message}", f"  why    {self.why}  {self.source}".rstrip()]
        if self.asked:
            lines.append(f"  asked  {', '.join(self.asked)}")
        width = max((len(s.change) for s in self.works), default=0)
        for i, suggestion in enumerate(self.works):
            label = "works" if i == 0 else "  or "
            lines.append(f"  {label}  {suggestion.change:<{width}}  {suggestion.note}".rstrip())
        lines.append(f"  more   rapidformer explain {self.rule}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "message": self.message,
            "why": self.why,
            "source": self.source,
            "asked": list(self.asked),
            "works": [{"change": s.change, "note": s.note} for s in self.works],
        }


class Refused(RapidformerError):
    """The plan breaks rules; ``diagnostics`` holds all of them at once."""

    def __init__(self, diagnostics: Sequence[Diagnostic]) -> None:
        super().__init__("; ".join(d.message for d in diagnostics))
        self.diagnostics = tuple(diagnostics)

    def render(self) -> str:
        return "\n\n".join(d.render() for d in self.diagnostics)
