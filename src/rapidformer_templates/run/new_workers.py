"""Trains in new local workers: ``fit(workers=N)`` sends them the template, and ``--min-workers`` starts them again.

The program around ``fit`` does not run again. cloudpickle sends classes and functions of a notebook cell, a prompt or a
script, with their closures. The workers import classes and functions of modules, with the module search path of this
process.

A restart is a new set of workers that continues from the last checkpoint with the same global batch. Restarts
are limited as in TorchElastic, but a new checkpoint resets the count, because the run has made progress.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import TypeVar

import cloudpickle
import torch

from rapidformer_templates.data.types import kind_of
from rapidformer_templates.errors import ConfigError, RapidformerError, ReportedError, WorkerFailed
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.plan import Sizes
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.request import build_request
from rapidformer_templates.run.checkpoint.format import candidates
from rapidformer_templates.run.configure import environment_of
from rapidformer_templates.run.folder import RunFolder, Summary
from rapidformer_templates.run.hooks import load_callback_states, states_of
from rapidformer_templates.run.inference import Weights, copied_weights
from rapidformer_templates.run.run import Run, Template
from rapidformer_templates.system import launch
from rapidformer_templates.system.files import check_private, private, private_folder, write_private
from rapidformer_templates.system.processes import interruptible
from rapidformer_templates.system.tensor_files import TensorFiles
from rapidformer_templates.system.terminal import print_lines

RUN_ATTRIBUTES = ("_run", "_trained", "_model", "_plan_without_training", "task")
"""Attributes of a template that each run creates again."""

TEMPLATE, SUMMARY, CALLBACKS, WEIGHTS = "template.pickle", "summary.json", "callbacks.json", "weights.pt"

T = TypeVar("T")

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
        command = [sys.executable, "-m", "rapidformer_templates.run.new_workers", str(folder)]
        try:
            launch.run_workers(command, count, port, variables, resumes, shown=not launch.is_script())
        except ReportedError as report:
            sent: object = None
            with suppress(Exception):  # it could not be sent, or unpickling fails, as it may for any class
                check_private(folder / f"error-{report.rank}.pickle")
                sent = pickle.loads((folder / f"error-{report.rank}.pickle").read_bytes())
            if not isinstance(sent, Exception):
                raise
            if not hasattr(sent, "render"):
                sent.add_note(f"in worker {report.rank}:\n{report.message}")
            raise sent from None
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


LONGEST_PAUSE = 60
"""Seconds. The pause before a restart doubles from one second to this."""

Flags = Mapping[str, object]
"""Values of flags that replace those of the command."""


def worker_numbers(template: Template) -> tuple[Sequence[int], str]:
    """Return the numbers of workers with which a run can continue, ascending, and a line about them.

    Both are empty without ``--min-workers``.

    Raises:
        ConfigError: no number below the current one works, or there are fewer workers than ``--min-workers``.
    """
    config, sizes, lowest = template.config, template.plan.sizes, template.config.launch.min_workers
    if lowest is None:
        return (), ""
    where = f"--min-workers {lowest} ({config.origin('min_workers')})"
    if lowest > sizes.world:
        raise ConfigError(f"there are only {sizes.world} workers", where=where, hint=f"give at most {sizes.world}")
    environment = environment_of(type(template), config, sizes.world, sizes.local_world)
    changed = REGISTRY.complete(config.replace("a restart", **_same_batch(config, sizes)))
    step = sizes.local_world if sizes.local_world < sizes.world else 1  # of several nodes, a whole node is lost
    refusals: dict[int, str | None] = {}  # why a number is refused, or None if it is not
    for count in range(step, sizes.world + 1, step):
        local = min(count, sizes.local_world)
        fewer = dataclasses.replace(environment, world_size=count, local_world_size=local)
        findings = REGISTRY.refusals(build_request(changed, fewer, REGISTRY.switches, training=True))
        refusals[count] = findings[0][1].message.partition(";")[0] if findings else None
    possible = [count for count, why in refusals.items() if why is None and count >= lowest]
    refused = {count: why for count, why in refusals.items() if why is not None and count >= lowest}
    if refused and len(possible) == 1:
        works = [count for count, why in refusals.items() if why is None]
        message = f"the run cannot continue with fewer than {sizes.world} workers: {next(iter(refused.values()))}"
        raise ConfigError(message, where=where, hint=f"numbers that work with these flags: {_listed(works)}")
    reasons = "".join(f"; not with {count}: {why}" for count, why in refused.items())
    return possible, f"note       --min-workers: the run can continue with {_listed(possible)}{reasons}"


def _same_batch(config: RunConfig, sizes: Sizes) -> dict[str, object]:
    """Return the flags that keep the global batch with another number of workers."""
    free = {"data_parallel_size": None} if config.launch.data_parallel_size else {}
    return {"global_batch_size": sizes.global_batch, **free}


def _listed(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    workers = "worker" if last == "1" else "workers"
    return f"{', '.join(first)} or {last} {workers}" if first else f"{last} {workers}"


def run_with_restarts(template: Template, attempt: Callable[[int, Flags], T]) -> T:
    """Run local workers, and start them again after some are lost if ``--min-workers`` allows it.

    Args:
        attempt: runs this number of workers with these flags until they end, and returns their result.

    Raises:
        RapidformerError: the error of the last attempt. A restart does not help, or the limit is reached.
    """
    config, started = template.config, time.time()
    (possible, _), limit = worker_numbers(template), config.launch.max_restarts
    folder = RunFolder(config.training.save) if config.training.save else None
    count, restarts, checkpoint = config.launch.nproc_per_node or 1, 0, _newest_checkpoint(folder)
    flags: dict[str, object] = {}
    while True:
        try:
            return attempt(count, flags)
        except RapidformerError as error:
            if not possible or not error.lost_workers:
                raise
            newest = _newest_checkpoint(folder)
            restarts, checkpoint = (restarts if newest == checkpoint else 0) + 1, newest
            if restarts > limit:
                if limit:
                    print_lines(f"no restart: {limit} restarts without a new checkpoint (--max-restarts)")
                raise
            fewer = [number for number in possible if number <= count - error.lost_workers]
            count = max(fewer, default=possible[0])
            flags = {"nproc_per_node": count, **_same_batch(config, template.plan.sizes)}
            # The run resumes, unless --overwrite has not yet emptied the folder.
            has_begun = folder and folder.plan.exists() and folder.plan.stat().st_mtime >= started
            if folder and (has_begun or not config.training.overwrite):
                flags |= {"resume": True, "overwrite": False}
            start = f"continues from {newest.name}" if newest and flags.get("resume") else "begins at step 0"
            pause = min(2 ** (restarts - 1), LONGEST_PAUSE)
            how = f"{restarts} of {limit} in {pause} s with {_listed([count])}, {start}"
            print_lines(f"{error.render()}\nrestart    {how}")
            hint = "--resume continues the run" if newest else "start it again"
            with interruptible("stopped before a restart", hint):
                time.sleep(pause)


def _newest_checkpoint(folder: RunFolder | None) -> Path | None:
    return next(iter(candidates(folder.checkpoints)), None) if folder else None


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
