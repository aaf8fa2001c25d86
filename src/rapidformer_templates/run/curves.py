"""What trackers are told of a run: each line of metrics.jsonl once, the plan before it and the summary after it.

A run that goes on trains some steps again, and some of what it said before may not have arrived. So nobody counts
what was told: each tracker's store is asked once, at the start; then it is told what is missing of the lines that are
kept, and of each new one what it has not got.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.run.console import say
from rapidformer_templates.run.folder import RunFolder, is_of_test, read_metrics
from rapidformer_templates.run.trackers import KINDS, Called, Curve, WasTold
from rapidformer_templates.system.files import write_json
from rapidformer_templates.system.workers import Workers

RUNS = "runs.json"
"""What each tracker calls the run, so that it is found again."""

CONFIGURED = "configured"


class Curves:
    """The trackers of a run, on its main worker.

    A tracker that fails is left out from then on, with one warning; the run goes on.

    Args:
        names: of the trackers.
        called: what the run is called in them.
        plan: told to each of them as the configuration, when the run is new to it.
    """

    def __init__(self, folder: RunFolder, names: tuple[str, ...], called: Called, plan: Plan, workers: Workers) -> None:
        self.workers = workers
        self.folder = folder
        self.failed: dict[str, str] = {}
        self._known: dict[str, dict[str, Any]] = _read(folder.trackers / RUNS)
        self._open: dict[str, Curve] = {}
        self._told: dict[str, WasTold] = {}
        self._row: dict[str, float] = {}
        self._step = 0
        folder.trackers.mkdir(exist_ok=True)
        for name in names:
            self._try(name, lambda name=name: self._take_up(name, called, plan))  # type: ignore[misc]
        for line in read_metrics(folder.metrics):
            self.tell(line)

    def _take_up(self, name: str, called: Called, plan: Plan) -> None:
        known = self._known.get(name, {})
        identity = {key: value for key, value in known.items() if key != CONFIGURED}
        self._open[name] = curve = KINDS[name](self.folder.trackers, called, identity)
        self._remember(name, {**curve.identity, CONFIGURED: known.get(CONFIGURED, False)})
        if not known.get(CONFIGURED):
            curve.configure(configuration(plan))
            self._remember(name, {**curve.identity, CONFIGURED: True})
        self._told[name] = curve.told()

    def _remember(self, name: str, identity: dict[str, Any]) -> None:
        self._known[name] = identity
        write_json(self.folder.trackers / RUNS, self._known)

    def tell(self, line: Mapping[str, Any]) -> None:
        """Tell a line of metrics. Those of one step go together: some trackers take a step once."""
        if is_of_test(line):
            return  # it is part of the summary: its step may be an earlier one, the best
        if line["step"] != self._step:
            self.flush()
        self._step = line["step"]
        self._row |= {name: value for name, value in numbers(line) if name != "step"}

    def flush(self) -> None:
        """Tell what is known of the step so far; nothing may follow of it."""
        row, self._row = self._row, {}
        if row:
            self._all(lambda curve, told: self._tell_new(curve.log, row, told))

    def _tell_new(
        self, log: Callable[[Mapping[str, float], int], None], row: Mapping[str, float], told: WasTold
    ) -> None:
        new = {name: value for name, value in row.items() if not told(name, self._step)}
        if new:
            log(new, self._step)

    def end(self, summary: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Tell the summary, and close.

        Returns:
            For each tracker ``where`` its curves are and why it ``failed``, or None.
        """
        self.flush()
        self._step = summary["steps"]
        of_test = {name: value for name, value in numbers(summary["metrics"]) if is_of_test({name: value})}
        row = of_test | {f"summary/{name}": value for name, value in numbers(summary)}
        self._all(lambda curve, told: self._tell_new(curve.summarise, row, told))
        where = {name: curve.where for name, curve in self._open.items()}
        self.close()
        return {
            name: {"where": where.get(name), "failed": self.failed.get(name)} for name in sorted({*where, *self.failed})
        }

    def close(self) -> None:
        self.flush()
        self._all(lambda curve, _: curve.finish())
        self._open.clear()

    def _all(self, call: Callable[[Curve, WasTold], None]) -> None:
        for name, curve in list(self._open.items()):
            self._try(name, lambda name=name, curve=curve: call(curve, self._told[name]))  # type: ignore[misc]

    def _try(self, name: str, call: Callable[[], None]) -> None:
        """What a tracker may fail at is not known here, and no reason to end a run."""
        try:
            call()
        except Exception as error:
            self._open.pop(name, None)
            reason = next(iter(str(error).splitlines()), "").rstrip(".") or type(error).__name__
            self.failed[name] = f"{reason} (at step {self._step})"
            say(
                self.workers,
                f"{name} failed: {reason}; the run goes on without it, and what it misses is in {self.folder.metrics}",
                loud=True,
            )


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """What an earlier process of this run has noted of its trackers."""
    if not path.exists():
        return {}
    known: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return known


def configuration(plan: Plan) -> dict[str, str | int | float | bool]:
    """The plan as plain values: what was decided, and each flag that was given by its name."""
    told = plan.to_json()
    decided = ("template", "engine", "device", "precision", "optimizer", "optimizer_implementation", "switches")
    flags = {name.lstrip("-"): given["value"] for name, given in told["values"].items()}
    values = {name: told[name] for name in decided} | {f"sizes/{name}": size for name, size in told["sizes"].items()}
    return {name: _plain(value) for name, value in (flags | values).items()}


def _plain(value: Any) -> str | int | float | bool:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return value if isinstance(value, str | int | float | bool) and not isinstance(value, str) else str(value)


def numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(name, number) of what is one; in what is nested, under the names that lead to it with slashes between."""
    for name, value in values.items():
        if isinstance(value, list | tuple):
            value = {str(i): one for i, one in enumerate(value)}
        if isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", number) for inner, number in numbers(value))
        elif isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value) if isinstance(value, float) else int(value)
