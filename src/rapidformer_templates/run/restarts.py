"""``--min-workers``: the numbers of workers that a run can continue with, and restarts after a worker is lost.

A restart is a new set of workers that continues from the last checkpoint with the same global batch. Restarts
are limited as in TorchElastic, but a new checkpoint resets the count, because the run has made progress.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from rapidformer_templates.errors import ConfigError, RapidformerError
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.plan import Sizes
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.request import build_request
from rapidformer_templates.run.checkpoint.format import candidates
from rapidformer_templates.run.configure import environment_of
from rapidformer_templates.run.folder import RunFolder
from rapidformer_templates.run.run import Template
from rapidformer_templates.system.processes import interruptible
from rapidformer_templates.system.terminal import print_lines

LONGEST_PAUSE = 60
"""Seconds. The pause before a restart doubles from one second to this."""

T = TypeVar("T")

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
    count, restarts, checkpoint = config.launch.nproc_per_node or 1, 0, _newest_checkpoint(config)
    flags: Flags = {}
    while True:
        try:
            return attempt(count, flags)
        except RapidformerError as error:
            if not possible or not error.lost_workers:
                raise
            newest = _newest_checkpoint(config)
            restarts, checkpoint = (restarts if newest == checkpoint else 0) + 1, newest
            if restarts > limit:
                if limit:
                    print_lines(f"no restart: {limit} restarts without a new checkpoint (--max-restarts)")
                raise
            fewer = [number for number in possible if number <= count - error.lost_workers]
            count = max(fewer, default=possible[0])
            flags = _restart_flags(template, count, started)
            start = f"continues from {newest.name}" if newest and flags.get("resume") else "begins at step 0"
            pause = min(2 ** (restarts - 1), LONGEST_PAUSE)
            how = f"{restarts} of {limit} in {pause} s with {_listed([count])}, {start}"
            print_lines(f"{error.render()}\nrestart    {how}")
            hint = "--resume continues the run" if newest else "start it again"
            with interruptible("stopped before a restart", hint):
                time.sleep(pause)


def _newest_checkpoint(config: RunConfig) -> Path | None:
    saved = candidates(RunFolder(config.training.save).checkpoints) if config.training.save else []
    return saved[0] if saved else None


def _restart_flags(template: Template, count: int, started: float) -> Flags:
    """Return the flags of a restart. The run resumes, unless ``--overwrite`` has not yet emptied the folder.

    Args:
        started: time at which the first workers were started, in seconds.
    """
    config = template.config
    flags = {"nproc_per_node": count, **_same_batch(config, template.plan.sizes)}
    if config.training.save is None:
        return flags
    plan = RunFolder(config.training.save).plan
    has_begun = plan.exists() and plan.stat().st_mtime >= started
    return flags if config.training.overwrite and not has_begun else {**flags, "resume": True, "overwrite": False}
