"""Finds stragglers: workers that are slower than their peers, so that all workers wait for them in every step.

Every :data:`PERIOD` steps the workers exchange how long they were busy in each phase of a typical step, the median. The
time in which a worker waits for others does not count, because in a synchronous step the fast workers wait as long as
the slow one computes.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rapidformer_templates.run import watch
from rapidformer_templates.run.performance import WARMUP
from rapidformer_templates.system.phase_clock import BACKWARD, EXCHANGE, FORWARD, UPDATE
from rapidformer_templates.system.terminal import say
from rapidformer_templates.system.workers import Workers

PERIOD = 50
"""Number of steps over which workers are compared."""

LOGGING = "logging"

PHASES = (watch.DATA, watch.STEP, FORWARD, BACKWARD, UPDATE, watch.OWN_CODE, LOGGING)
"""The phases that are compared. Evaluations, saves and exports are not: the first worker has more to do there."""

MINIMUM_LOSS = 0.1
"""Minimum fraction of a step that the others must lose. Below that it does not matter who is slow."""


class PhaseTimes(NamedTuple):
    """Milliseconds of a worker in a typical step.

    Attributes:
        busy: the time in all of :data:`PHASES`, without the time in which it waited for others.
        phases: the same in each of them.
        waiting: the time in which it waited for others, or exchanged tensors with them.
    """

    busy: float
    phases: Sequence[float]
    waiting: float


class Straggler(NamedTuple):
    """A worker that is slower than its peers.

    Attributes:
        busy_ms, peers_ms: milliseconds of the worker in a typical step, and the median of its peers.
        phase: the phase in which it loses most of the time.
        phase_ms, phase_peers_ms: the same for that phase.
    """

    rank: int
    busy_ms: float
    peers_ms: float
    phase: str
    phase_ms: float
    phase_peers_ms: float

    @property
    def slowdown(self) -> float:
        return round(self.busy_ms / max(self.peers_ms, 1e-6), 2)


StragglerSummary = dict[str, Any]
"""A straggler in ``summary.json``: its ``rank``, ``host``, slowest ``phase`` and highest ``slowdown``.

``reports`` is the number of periods in which it was slow, ``first_step`` and ``last_step`` are their first and last
step. The times ``step_ms`` and ``peers_ms`` belong to the last report.
"""


def find_stragglers(times: Sequence[PhaseTimes], stages: Sequence[int], factor: float) -> Iterator[Straggler]:
    """Yield the workers that are busy for at least ``factor`` times as long as the median of their peers.

    Args:
        times: the times of each worker by rank.
        stages: the pipeline stage of each worker. Only workers of the same stage do the same work.
    """
    for rank, own in enumerate(times):
        peers = [times[peer] for peer, stage in enumerate(stages) if stage == stages[rank] and peer != rank]
        if not peers:
            continue
        usual = statistics.median(peer.busy for peer in peers)
        if own.busy < factor * usual or own.busy - usual < MINIMUM_LOSS * (own.busy + own.waiting):
            continue
        usual_phases = [statistics.median(phase) for phase in zip(*(peer.phases for peer in peers), strict=True)]
        slowest = max(range(len(PHASES)), key=lambda phase: own.phases[phase] - usual_phases[phase])
        yield Straggler(rank, own.busy, usual, PHASES[slowest], own.phases[slowest], usual_phases[slowest])


@dataclass
class StragglerCheck:
    """Compares the workers of a run every :data:`PERIOD` steps, after the first few steps of this process.

    Attributes:
        factor: the slowdown that is reported. 0 compares nothing.
    """

    workers: Workers
    factor: float
    _steps: int = field(init=False, default=0)
    _seconds: list[tuple[float, ...]] = field(init=False, default_factory=list)
    """For each step of this period: in all :data:`PHASES`, in each of them, and waiting."""
    _found: dict[int, StragglerSummary] = field(init=False, default_factory=dict)
    _unlogged: dict[str, float] = field(init=False, default_factory=dict)

    def step_done(self, step: int) -> None:
        """Count a step, and compare the workers if a period ends. Call it on every rank.

        Args:
            step: number of the step, from 1.
        """
        if not self.factor or self.workers.world == 1:
            return
        busy, waiting = self.workers.clock.take()
        self._steps += 1
        if self._steps <= WARMUP:
            return
        phases = [busy.get(phase, 0.0) for phase in PHASES]
        exchanging = busy.get(watch.EXCHANGE, 0.0) + busy.get(EXCHANGE, 0.0) + sum(waiting.values())
        self._seconds.append((sum(phases), *phases, exchanging))
        if len(self._seconds) < PERIOD:
            return
        typical = map(statistics.median, zip(*self._seconds, strict=True))
        self._seconds.clear()
        rows = (self.workers.gather_numbers(*typical) * 1000).tolist()
        times = [PhaseTimes(row[0], row[1:-1], row[-1]) for row in rows]
        per_stage = self.workers.world // self.workers.pipeline
        stages = [rank // per_stage for rank in range(self.workers.world)]
        stragglers = list(find_stragglers(times, stages, self.factor))
        hosts = self.workers.gather(socket.gethostname()) if stragglers else []
        for one in stragglers:
            first, host = step - PERIOD + 1, hosts[one.rank]
            say(
                self.workers,
                f"steps {first:,} to {step:,}: worker {one.rank} on {host} is slow: {one.busy_ms:,.1f} ms per step "
                f"without the exchanges, its peers {one.peers_ms:,.1f} ms; it loses most in {one.phase}: "
                f"{one.phase_ms:,.1f} ms, its peers {one.phase_peers_ms:,.1f} ms",
                loud=True,
            )
            before = self._found.get(one.rank, {"slowdown": 0.0, "first_step": first, "reports": 0})
            self._found[one.rank] = {
                "rank": one.rank,
                "host": host,
                "phase": one.phase,
                "slowdown": max(one.slowdown, before["slowdown"]),
                "step_ms": round(one.busy_ms, 3),
                "peers_ms": round(one.peers_ms, 3),
                "first_step": before["first_step"],
                "last_step": step,
                "reports": before["reports"] + 1,
            }
            if one.slowdown > self._unlogged.get("straggler_slowdown", 0.0):
                self._unlogged = {"straggler": one.rank, "straggler_slowdown": one.slowdown}

    def logged_values(self) -> dict[str, float]:
        """Return the rank and the slowdown of the slowest worker since the last call, if one was reported."""
        values, self._unlogged = self._unlogged, {}
        return values

    def summary(self) -> list[StragglerSummary]:
        """Return the stragglers of this process's steps, those with most reports first."""
        return sorted(self._found.values(), key=lambda one: (-one["reports"], one["rank"]))
