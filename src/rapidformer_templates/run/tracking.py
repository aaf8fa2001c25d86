"""Sends a run to its trackers: the plan, each line of metrics.jsonl once, and the summary.

A resumed run repeats some steps, and some values of the earlier process may not have arrived. So each tracker's store
is read once at the start. The tracker then receives the missing values of the lines that are kept, and those values of
new lines that it does not have yet.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.run.console import say
from rapidformer_templates.run.folder import RunFolder, is_test_line, read_metrics
from rapidformer_templates.run.trackers import KINDS, IsLogged, RunName, Tracker
from rapidformer_templates.system.files import write_json
from rapidformer_templates.system.workers import Workers

RUN_IDS = "runs.json"
"""File with the identity of the run in each tracker, so that a resumed run finds it again."""

CONFIGURED = "configured"


class Trackers:
    """The trackers of a run, on its main worker.

    A tracker that fails is disabled with one warning. The run continues.

    Args:
        names: names of the trackers.
        called: names of the run in the trackers.
        plan: logged as the configuration if the run is new to a tracker.
    """

    def __init__(
        self, folder: RunFolder, names: tuple[str, ...], run_name: RunName, plan: Plan, workers: Workers
    ) -> None:
        self.workers = workers
        self.folder = folder
        self.failed: dict[str, str] = {}
        self._known: dict[str, dict[str, Any]] = _read(folder.trackers / RUN_IDS)
        self._open: dict[str, Tracker] = {}
        self._is_logged: dict[str, IsLogged] = {}
        self._row: dict[str, float] = {}
        self._step = 0
        folder.trackers.mkdir(exist_ok=True)
        for name in names:
            self._try(name, lambda name=name: self._open_tracker(name, run_name, plan))  # type: ignore[misc]
        for line in read_metrics(folder.metrics):
            self.log(line)

    def _open_tracker(self, name: str, run_name: RunName, plan: Plan) -> None:
        saved = self._known.get(name, {})
        identity = {key: value for key, value in saved.items() if key != CONFIGURED}
        self._open[name] = tracker = KINDS[name](self.folder.trackers, run_name, identity)
        self._remember(name, {**tracker.identity, CONFIGURED: saved.get(CONFIGURED, False)})
        if not saved.get(CONFIGURED):
            tracker.configure(configuration(plan))
            self._remember(name, {**tracker.identity, CONFIGURED: True})
        self._is_logged[name] = tracker.logged()

    def _remember(self, name: str, identity: dict[str, Any]) -> None:
        self._known[name] = identity
        write_json(self.folder.trackers / RUN_IDS, self._known)

    def log(self, line: Mapping[str, Any]) -> None:
        """Log a line of metrics. Lines of one step are combined, because some trackers accept each step only once."""
        if is_test_line(line):
            return  # part of the summary, because its step (the best one) may be earlier
        if line["step"] != self._step:
            self.flush()
        self._step = line["step"]
        self._row |= {name: value for name, value in numbers(line) if name != "step"}

    def flush(self) -> None:
        """Log the collected values of the current step. No more values may follow for it."""
        row, self._row = self._row, {}
        if row:
            self._all(lambda tracker, is_logged: self._log_new(tracker.log, row, is_logged))

    def _log_new(
        self, log: Callable[[Mapping[str, float], int], None], row: Mapping[str, float], is_logged: IsLogged
    ) -> None:
        new = {name: value for name, value in row.items() if not is_logged(name, self._step)}
        if new:
            log(new, self._step)

    def end(self, summary: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Log the summary, and close.

        Returns:
            For each tracker ``where`` its curves are, and the reason why it ``failed`` or None.
        """
        self.flush()
        self._step = summary["steps"]
        of_test = {name: value for name, value in numbers(summary["metrics"]) if is_test_line({name: value})}
        row = of_test | {f"summary/{name}": value for name, value in numbers(summary)}
        self._all(lambda tracker, is_logged: self._log_new(tracker.summarise, row, is_logged))
        where = {name: tracker.where for name, tracker in self._open.items()}
        self.close()
        return {
            name: {"where": where.get(name), "failed": self.failed.get(name)} for name in sorted({*where, *self.failed})
        }

    def close(self) -> None:
        self.flush()
        self._all(lambda tracker, _: tracker.finish())
        self._open.clear()

    def _all(self, call: Callable[[Tracker, IsLogged], None]) -> None:
        for name, tracker in list(self._open.items()):
            self._try(name, lambda name=name, tracker=tracker: call(tracker, self._is_logged[name]))  # type: ignore[misc]

    def _try(self, name: str, call: Callable[[], None]) -> None:
        """Disable a tracker if the call fails. Trackers may raise any exception, and none should end a run."""
        try:
            call()
        except Exception as error:
            self._open.pop(name, None)
            reason = next(iter(str(error).splitlines()), "").rstrip(".") or type(error).__name__
            self.failed[name] = f"{reason} (at step {self._step})"
            say(
                self.workers,
                f"{name} failed: {reason}; the run continues without it, and what it misses is in "
                f"{self.folder.metrics}",
                loud=True,
            )


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Read the identities that an earlier process of this run stored."""
    if not path.exists():
        return {}
    identities: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return identities


def configuration(plan: Plan) -> dict[str, str | int | float | bool]:
    """Return the plan as plain values: its decisions, and each given flag by name."""
    values_of_plan = plan.to_json()
    fields = ("template", "engine", "device", "precision", "optimizer", "optimizer_implementation", "switches")
    flags = {name.lstrip("-"): flag["value"] for name, flag in values_of_plan["values"].items()}
    values = {name: values_of_plan[name] for name in fields} | {
        f"sizes/{name}": size for name, size in values_of_plan["sizes"].items()
    }
    return {name: _plain(value) for name, value in (flags | values).items()}


def _plain(value: Any) -> str | int | float | bool:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return value if isinstance(value, str | int | float | bool) and not isinstance(value, str) else str(value)


def numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, number) for each number. Nested values have their path as name, separated by slashes."""
    for name, value in values.items():
        if isinstance(value, list | tuple):
            value = {str(i): one for i, one in enumerate(value)}
        if isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", number) for inner, number in numbers(value))
        elif isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value) if isinstance(value, float) else int(value)
