"""The schedule of forwards, backwards and transfers on each worker of a pipeline. Pure.

1F1B and its interleaved form are those of Narayanan et al., 2021. torch.distributed.pipelining has them, too,
but for micro batches of one shape, and not for every number of them: fewer than stages, or one that the
rounds of the interleaved form do not divide. Here any number has a schedule, and the test compares with
torch's where torch has one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

LEAVING = 2
"""Transfers in each direction that may be on their way, for each stage of a worker."""


class Kind(enum.Enum):
    """What is done."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_FORWARD = "send F"
    RECEIVE_FORWARD = "receive F"
    SEND_BACKWARD = "send B"
    RECEIVE_BACKWARD = "receive B"


class Action(NamedTuple):
    """One thing that a worker does.

    Attributes:
        kind: what.
        stage: of the model, from 0; worker ``stage % workers`` has it. A transfer has its sender's stage
            when it is sent and its receiver's when it is received.
        microbatch: of the step, from 0.
    """

    kind: Kind
    stage: int
    microbatch: int


def compute_schedule(workers: int, rank: int, per_worker: int, microbatches: int) -> list[Action]:
    """Forwards and backwards of one worker in their order.

    Args:
        workers: of the pipeline.
        rank: of this worker in it.
        per_worker: stages that each worker has; 1 is plain 1F1B, more are interleaved.
        microbatches: of the step.
    """
    rounds = list(_rounds(workers, microbatches))
    forwards = [
        Action(Kind.FORWARD, local * workers + rank, m) for part in rounds for local in range(per_worker) for m in part
    ]
    backwards = [
        Action(Kind.BACKWARD, local * workers + rank, m)
        for part in rounds
        for local in reversed(range(per_worker))
        for m in part
    ]
    # Forwards before the first backward can come back; interleaved workers look twice as far ahead, so that
    # transfers have a forward or a backward to hide behind.
    ahead = workers - 1 - rank
    warmup = ahead if per_worker == 1 else (per_worker - 1) * len(rounds[0]) + 2 * ahead
    warmup = min(warmup, len(forwards))
    schedule = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        schedule += [forward, backward]
    return schedule + backwards[len(forwards) - warmup :]


def _rounds(workers: int, microbatches: int) -> Iterator[range]:
    """The micro batches in rounds of about equal size, each of as many as there are workers or more."""
    count = max(1, microbatches // workers)
    begin = 0
    for i in range(count):
        end = begin + microbatches // count + (i < microbatches % count)
        yield range(begin, end)
        begin = end


@cache
def with_transfers(workers: int, per_worker: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """What each worker does, transfers included.

    The schedules are played through: a result is sent when it is there, and its receiver takes it at that place
    of its own list. So any two workers name their transfers in the same order, and nobody waits for
    something that comes only after what the other waits for.
    """
    waiting = [compute_schedule(workers, rank, per_worker, microbatches) for rank in range(workers)]
    done: list[list[Action]] = [[] for _ in range(workers)]
    there: set[Action] = set()
    last = workers * per_worker - 1
    while any(waiting):
        ready = [rank for rank in range(workers) if waiting[rank] and _needs(waiting[rank][0], last) <= there]
        assert ready, "a schedule that waits for itself"
        for rank in ready:
            action = waiting[rank].pop(0)
            done[rank].append(action)
            there.add(action)
            for send, receive in _transfer(action, last):
                done[rank].append(send)
                done[receive.stage % workers].append(receive)
    return tuple(map(tuple, done))


def _needs(action: Action, last: int) -> set[Action]:
    """What must have been done before, by whichever worker."""
    kind, stage, microbatch = action
    if kind is Kind.FORWARD:
        return {Action(kind, stage - 1, microbatch)} if stage else set()
    return {Action(kind, stage + 1, microbatch) if stage < last else Action(Kind.FORWARD, stage, microbatch)}


def _transfer(action: Action, last: int) -> Iterator[Sequence[Action]]:
    kind, stage, microbatch = action
    if kind is Kind.FORWARD and stage < last:
        yield Action(Kind.SEND_FORWARD, stage, microbatch), Action(Kind.RECEIVE_FORWARD, stage + 1, microbatch)
    elif kind is Kind.BACKWARD and stage > 0:
        yield Action(Kind.SEND_BACKWARD, stage, microbatch), Action(Kind.RECEIVE_BACKWARD, stage - 1, microbatch)
