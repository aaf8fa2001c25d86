"""The schedule of forwards, backwards and transfers on each worker of a pipeline. These functions are pure.

1F1B and its interleaved form follow Narayanan et al., 2021. torch.distributed.pipelining has them, too, but only
for micro batches of one shape. It also does not support every number of micro batches: fewer than stages, or a number
that is not divisible by the rounds of the interleaved form. Here, every number has a schedule. The test compares with
torch's schedule where torch has one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

LEAVING = 2
"""Maximum number of pending transfers in each direction, per stage of a worker."""


class Kind(enum.Enum):
    """The kind of an action."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_FORWARD = "send F"
    RECEIVE_FORWARD = "receive F"
    SEND_BACKWARD = "send B"
    RECEIVE_BACKWARD = "receive B"


class Action(NamedTuple):
    """One action of a worker.

    Attributes:
        kind: the kind of action.
        stage: index of the stage in the model, from 0. Worker ``stage % workers`` has it. A send has the stage of the
            sender, and a receive that of the receiver.
        microbatch: index of the micro batch in the step, from 0.
    """

    kind: Kind
    stage: int
    microbatch: int


def compute_schedule(workers: int, rank: int, per_worker: int, microbatches: int) -> list[Action]:
    """Return the forwards and backwards of one worker in order.

    Args:
        workers: number of workers in the pipeline.
        rank: rank of this worker in the pipeline.
        per_worker: number of stages on each worker. 1 is plain 1F1B, more are interleaved.
        microbatches: number of micro batches in the step.
    """
    rounds = list(_rounds(workers, microbatches))
    stages = range(rank, workers * per_worker, workers)
    forwards = [Action(Kind.FORWARD, stage, m) for part in rounds for stage in stages for m in part]
    backwards = [Action(Kind.BACKWARD, stage, m) for part in rounds for stage in reversed(stages) for m in part]
    # Run the forwards that are needed before the first backward can arrive. Interleaved workers run twice as far ahead,
    # so that transfers overlap with a forward or a backward.
    ahead = workers - 1 - rank
    warmup = ahead if per_worker == 1 else (per_worker - 1) * len(rounds[0]) + 2 * ahead
    warmup = min(warmup, len(forwards))
    schedule = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        schedule += [forward, backward]
    return schedule + backwards[len(forwards) - warmup :]


def _rounds(workers: int, microbatches: int) -> Iterator[range]:
    """Yield the micro batches in rounds of about equal size.

    Each round has at least one per worker, if there are enough.
    """
    count = max(1, microbatches // workers)
    begin = 0
    for i in range(count):
        end = begin + microbatches // count + (i < microbatches % count)
        yield range(begin, end)
        begin = end


@cache
def with_transfers(workers: int, per_worker: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each worker, including transfers.

    This simulates the schedules. A result is sent as soon as it is ready, and the receive is added to the receiver's
    actions at the same time. So any two workers list their transfers in the same order, and there is no deadlock.
    """
    pending = [compute_schedule(workers, rank, per_worker, microbatches) for rank in range(workers)]
    sequences: list[list[Action]] = [[] for _ in range(workers)]
    completed: set[Action] = set()
    last = workers * per_worker - 1

    def is_ready(action: Action) -> bool:
        kind, stage, microbatch = action
        if kind is Kind.FORWARD:
            return stage == 0 or Action(kind, stage - 1, microbatch) in completed
        before = Action(kind, stage + 1, microbatch) if stage < last else Action(Kind.FORWARD, stage, microbatch)
        return before in completed

    while any(pending):
        ready = [rank for rank in range(workers) if pending[rank] and is_ready(pending[rank][0])]
        assert ready, "a schedule that waits for itself"
        for rank in ready:
            action = pending[rank].pop(0)
            sequences[rank].append(action)
            completed.add(action)
            kind, stage, microbatch = action
            if kind is Kind.FORWARD and stage < last:
                sequences[rank].append(Action(Kind.SEND_FORWARD, stage, microbatch))
                sequences[(stage + 1) % workers].append(Action(Kind.RECEIVE_FORWARD, stage + 1, microbatch))
            elif kind is Kind.BACKWARD and stage > 0:
                sequences[rank].append(Action(Kind.SEND_BACKWARD, stage, microbatch))
                sequences[(stage - 1) % workers].append(Action(Kind.RECEIVE_BACKWARD, stage - 1, microbatch))
    return tuple(map(tuple, sequences))
