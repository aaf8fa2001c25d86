"""The forwards and backwards of a pipeline worker in a step, and what it holds during each. Pure functions."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import NamedTuple

from rapidformer_templates.switches.layout.schedule import LEAVING, Action, Kind, with_transfers

ENOUGH_ROUNDS = 4
"""Rounds of one micro batch per worker. More rounds only repeat the same passes."""


class Pass(NamedTuple):
    """A forward or backward of a micro batch through one of a worker's parts.

    Attributes:
        part: index of the part.
        is_forward: True for a forward, False for a backward.
        others: pairs of a part and its number of other micro batches whose activations wait for their backwards.
        newest: part of the newest of these micro batches.
        travelling: tensors that have arrived from other workers for later passes, or that may still be in flight.
        begun: parts that have had a forward.
        added: parts with gradients of earlier micro batches.
        summed: parts whose last backward is over.
        is_last: whether this is the part's last backward.
    """

    part: int
    is_forward: bool
    others: tuple[tuple[int, int], ...]
    newest: int | None
    travelling: int
    begun: frozenset[int]
    added: frozenset[int]
    summed: frozenset[int]
    is_last: bool


def passes(workers: int, rank: int, per_worker: int, microbatches: int) -> tuple[Pass, ...]:
    """Return the different passes of a step on one worker.

    Args:
        workers: workers of the pipeline. 1 means no pipeline.
        rank: rank of this worker in the pipeline.
        per_worker: parts of each worker. With more than one, they are interleaved.
        microbatches: micro batches of the step.
    """
    if per_worker == 1 or microbatches % workers == 0:
        microbatches = min(microbatches, ENOUGH_ROUNDS * workers)
    return _passes(workers, rank, per_worker, microbatches)


@cache
def _passes(workers: int, rank: int, per_worker: int, microbatches: int) -> tuple[Pass, ...]:
    passes_seen: dict[Pass, None] = {}
    alive: list[Action] = []
    come: Counter[tuple[int, int]] = Counter()
    sent: Counter[Kind] = Counter()
    begun, added, summed = (frozenset[int]() for _ in range(3))
    for action in with_transfers(workers, per_worker, microbatches)[rank]:
        kind, stage, number = action
        part, place = stage // workers, (stage, number)
        if kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
            come[place] += 1
        if kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            sent[kind] = min(sent[kind] + 1, LEAVING * per_worker)
        if kind not in (Kind.FORWARD, Kind.BACKWARD):
            continue
        come[place] = 0
        alive = [other for other in alive if (other.stage, other.microbatch) != place]
        others = Counter(other.stage // workers for other in alive)
        passes_seen[
            Pass(
                part,
                kind is Kind.FORWARD,
                tuple(sorted(others.items())),
                alive[-1].stage // workers if alive else None,
                come.total() + sent.total(),
                begun,
                added,
                summed,
                kind is Kind.BACKWARD and number == microbatches - 1,
            )
        ] = None
        if kind is Kind.FORWARD:
            alive.append(action)
            begun |= {part}
        else:
            added |= {part}
            summed |= {part} if number == microbatches - 1 else set()
    return tuple(passes_seen)
