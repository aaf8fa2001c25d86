"""Workers of ``fit`` that run the script again, for exactly this one call. This module does not import torch.

Each worker runs the script because its classes and functions are defined there. It reaches the same calls of ``fit`` in
the same order. Earlier calls return their known results without training. In this call the worker trains, and then it
exits, so that the rest of the script runs only once, in the process that started the workers.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypedDict

from rapidformer_templates.errors import ConfigError, RapidformerError, ReportedError, WorkerFailed
from rapidformer_templates.run.folder import Summary
from rapidformer_templates.system import launch

CALL = "RAPIDFORMER_CALL"
"""Environment variable of workers that ``fit`` has started: the folder with the data of the call."""


class Outcome(TypedDict, total=False):
    """The result of a call of ``fit``: a summary, or the text of an error and its exit status."""

    summary: Summary
    error: str
    status: int


class Call(TypedDict):
    """The call of ``fit`` that workers are started for.

    Attributes:
        template: name of the class whose ``fit`` was called.
        flags: values of its flags, which the workers must use.
        outcomes: results of the earlier calls.
    """

    template: str
    flags: Mapping[str, object]
    outcomes: list[Outcome]


_outcomes: list[Outcome] = []
"""Results of this process's calls, in order."""


def record_outcome(train: Callable[[], Summary]) -> Summary:
    """Run a call in the first process and record its result. Workers of later calls return the same result."""
    try:
        summary = train()
    except Exception as error:
        text = error.render() if isinstance(error, RapidformerError) else f"{type(error).__name__}: {error}"
        _outcomes.append({"error": text, "status": getattr(error, "exit_status", 1)})
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
        template, flags: see :class:`Call`.
        count, port, variables, resumes: see :func:`launch.run_workers`.

    Raises:
        WorkerFailed: the workers ended without an error, but have not trained.
    """
    with tempfile.TemporaryDirectory(prefix="rapidformer-") as folder:
        call = Call(template=template, flags=flags, outcomes=_outcomes)
        Path(folder, "call.json").write_text(json.dumps(call), encoding="utf-8")
        launch.run_workers(launch.program_command(), count, port, {**(variables or {}), CALL: folder}, resumes)
        result = Path(folder, "summary.json")
        if not result.exists():
            raise WorkerFailed(
                f"the workers ended without reaching this call of {template}.fit()",
                hint="each of them runs the script again, which must take the same path every time",
            )
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
        template, flags: see :class:`Call`.
        override_flags: takes values of the first process that differ here, such as a folder name with the time.
        train: runs the training.

    Raises:
        ReportedError: an earlier call, which has also failed in the first process.
    """
    if CALL not in os.environ:  # torchrun, not fit(), has started this worker
        return launch.report_errors(train)
    folder = Path(os.environ[CALL])
    call: Call = json.loads((folder / "call.json").read_text(encoding="utf-8"))
    number = len(_outcomes)
    if number < len(call["outcomes"]):
        outcome = call["outcomes"][number]
        _outcomes.append(outcome)
        if "error" in outcome:
            raise ReportedError(outcome["error"], outcome["status"])
        return outcome["summary"]

    def train_for_the_call() -> None:
        if template != call["template"]:
            raise ConfigError(
                f"a worker reached {template}.fit() while the process that started it was at {call['template']}.fit()",
                hint="each worker runs the script again, which must take the same path every time",
            )
        values = json.loads(json.dumps(flags))
        override_flags({name: value for name, value in call["flags"].items() if values.get(name) != value})
        summary = train()
        if os.environ["RANK"] == "0":
            (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")

    launch.report_errors(train_for_the_call)
    raise SystemExit(0)
