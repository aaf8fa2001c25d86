"""``fit(workers=N)``: the template itself is sent to the workers. The surrounding program does not run again.

cloudpickle sends classes and functions of a notebook cell, a prompt or a script, with their closures. The workers
import classes and functions of modules, with the module search path of this process.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType

import cloudpickle
import torch

from rapidformer_templates.data.types import kind_of
from rapidformer_templates.errors import ConfigError, ReportedError, WorkerFailed
from rapidformer_templates.run.folder import Summary
from rapidformer_templates.run.hooks import load_callback_states, states_of
from rapidformer_templates.run.inference import Weights, copied_weights
from rapidformer_templates.run.run import Run, Template
from rapidformer_templates.system import launch
from rapidformer_templates.system.files import check_private, private, private_folder, write_private
from rapidformer_templates.system.tensor_files import TensorFiles

RUN_ATTRIBUTES = ("_run", "_trained", "_model", "_plan_without_training", "task")
"""Attributes of a template that each run creates again."""

TEMPLATE, SUMMARY, CALLBACKS, WEIGHTS = "template.pickle", "summary.json", "callbacks.json", "weights.pt"


Keep = Callable[[Weights], None]
"""Takes the full weights that workers have trained, also those of a run that was stopped."""


def train_sent(
    template: Template,
    changed: Mapping[str, object],
    keep: Keep,
    count: int,
    port: int | None,
    variables: Mapping[str, str],
    resumes: Callable[[], bool],
) -> Summary:
    """Train a template in new workers, and return the summary. Callbacks get the state of rank 0.

    Args:
        changed: flags with other values.
        count, port, variables, resumes: see :func:`launch.run_workers`.

    Raises:
        ConfigError: something in the template cannot be sent. The error names it.
        Interrupted: the run was asked to stop.
        Exception: the exception of a worker, with its stack as a note.
    """
    variables = {**variables, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    bare = copy.copy(template)
    for name in RUN_ATTRIBUTES:
        vars(bare).pop(name, None)
    bare.override_flags(changed)
    try:
        pickled = cloudpickle.dumps(bare)
    except Exception as error:
        name, culprit = _culprit(bare, type(template).__name__, set())
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        message = f"{name}, {kind_of(culprit)}, cannot be sent to workers: {reason}"
        hint = "make it in the hook that needs it (build_data, build_model …), which runs in each worker"
        raise ConfigError(message, where="fit(workers=…)", hint=hint) from None
    with private_folder() as folder:
        write_private(folder / TEMPLATE, pickled)
        command = [sys.executable, "-m", "rapidformer_templates.run.launch_from_python", str(folder)]
        try:
            launch.run_workers(command, count, port, variables, resumes, shown=not launch.is_script())
        except ReportedError as report:
            raise _worker_error(folder, report) from None
        finally:
            if (folder / WEIGHTS).exists():
                load_callback_states(template.callbacks, json.loads((folder / CALLBACKS).read_text("utf-8")))
                check_private(folder / WEIGHTS)
                keep(torch.load(folder / WEIGHTS, weights_only=True, mmap=True))
        if not (folder / SUMMARY).exists():
            hint = "one of your hooks may have called sys.exit()"
            raise WorkerFailed("the workers ended without a result", hint=hint)
        summary: Summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    return summary


def _culprit(value: object, name: str, visited: set[int]) -> tuple[str, object]:
    """Return the path and value of the innermost part of a value that cannot be pickled."""
    visited.add(id(value))
    for part_name, part in _parts(value, name):
        if id(part) not in visited:
            try:
                cloudpickle.dumps(part)
            except Exception:
                return _culprit(part, part_name, visited)
    return name, value


def _parts(value: object, name: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, FunctionType):
        variables = inspect.getclosurevars(value)
        for label, part in {**variables.nonlocals, **variables.globals}.items():
            yield f"{label} (which {name} uses)", part
    elif isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{place}]", part) for place, part in enumerate(value))
    elif isinstance(value, type):
        for label, part in vars(value).items():
            yield f"{value.__name__}.{label}", getattr(part, "__func__", None) or getattr(part, "fget", None) or part
    elif hasattr(value, "__dict__"):
        yield from ((f"{name}.{label}", part) for label, part in vars(value).items())
        yield type(value).__name__, type(value)


def _worker_error(folder: Path, report: ReportedError) -> Exception:
    """Return the exception of a worker, or its text if it could not be sent."""
    file = folder / f"error-{report.rank}.pickle"
    try:
        check_private(file)
        error = pickle.loads(file.read_bytes())
    except Exception:  # unpickling may fail for any class
        return report
    if not isinstance(error, Exception):
        return report
    if not hasattr(error, "render"):
        error.add_note(f"in worker {report.rank}:\n{report.message}")
    return error


# In a worker.


def main(folder: Path) -> None:
    """Train the template that is stored in a folder, as one of its workers."""
    from rapidformer_templates.run.fit import join_and_train

    rank = os.environ["RANK"]

    def store_weights(run: Run) -> None:
        with TensorFiles(folder) as files:
            weights = copied_weights(run.engine, files.store)
            if run.workers.is_main:
                write_private(folder / CALLBACKS, json.dumps(states_of(run.callbacks)).encode())
                with open(folder / f"{WEIGHTS}.tmp", "wb", opener=private) as file:
                    torch.save(weights, file)
                (folder / f"{WEIGHTS}.tmp").rename(folder / WEIGHTS)  # a second request may end this process earlier

    def train() -> None:
        try:
            check_private(folder / TEMPLATE)
            template: Template = pickle.loads((folder / TEMPLATE).read_bytes())
            summary = join_and_train(template, store_weights)
        except Exception as error:
            file = folder / f"error-{rank}.pickle"
            try:
                write_private(file, cloudpickle.dumps(error))
            except Exception:  # its text is reported in any case
                file.unlink(missing_ok=True)
            raise
        if rank == "0":
            write_private(folder / SUMMARY, json.dumps(summary).encode())

    launch.report_errors(train)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
