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
from typing import NamedTuple, TypedDict

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


class StragglerSummary(TypedDict):
    """A straggler in ``summary.json``. The times belong to the last report.

    Attributes:
        reports: number of periods in which it was slow.
        first_step, last_step: the first and last step of these periods.
        slowdown: its highest slowdown.
    """

    rank: int
    host: str
    phase: str
    slowdown: float
    step_ms: float
    peers_ms: float
    first_step: int
    last_step: int
    reports: int


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
        if stragglers:
            hosts = self.workers.gather(socket.gethostname())
            for straggler in stragglers:
                self._announce(straggler, hosts[straggler.rank], step)

    def _announce(self, straggler: Straggler, host: str, step: int) -> None:
        first = step - PERIOD + 1
        say(
            self.workers,
            f"steps {first:,} to {step:,}: worker {straggler.rank} on {host} is slow: {straggler.busy_ms:,.1f} ms per "
            f"step without the exchanges, its peers {straggler.peers_ms:,.1f} ms; it loses most in {straggler.phase}: "
            f"{straggler.phase_ms:,.1f} ms, its peers {straggler.phase_peers_ms:,.1f} ms",
            loud=True,
        )
        before = self._found.get(straggler.rank)
        self._found[straggler.rank] = {
            "rank": straggler.rank,
            "host": host,
            "phase": straggler.phase,
            "slowdown": max(straggler.slowdown, before["slowdown"] if before else 0.0),
            "step_ms": round(straggler.busy_ms, 3),
            "peers_ms": round(straggler.peers_ms, 3),
            "first_step": before["first_step"] if before else first,
            "last_step": step,
            "reports": before["reports"] + 1 if before else 1,
        }
        if straggler.slowdown > self._unlogged.get("straggler_slowdown", 0.0):
            self._unlogged = {"straggler": straggler.rank, "straggler_slowdown": straggler.slowdown}

    def logged_values(self) -> dict[str, float]:
        """Return the rank and the slowdown of the slowest worker since the last call, if one was reported."""
        values, self._unlogged = self._unlogged, {}
        return values

    def summary(self) -> list[StragglerSummary]:
        """Return the stragglers of this process's steps, those with most reports first."""
        return sorted(self._found.values(), key=lambda one: (-one["reports"], one["rank"]))
