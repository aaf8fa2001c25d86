"""Passes that a pipeline worker holds at the same time, compared with the formulas of the schedules' authors."""

from __future__ import annotations

import random

import pytest

from rapidformer_templates.switches.auto_strategy.trace import ENOUGH_ROUNDS, Pass, _passes, largest_passes, passes


def alive(workers: int, rank: int, per_worker: int, microbatches: int) -> int:
    """Return the maximum number of forwards that still wait for their backward, including the current one."""
    return 1 + max(sum(count for _, count in each.others) for each in passes(workers, rank, per_worker, microbatches))


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_1f1b_holds_a_micro_batch_for_each_stage_that_follows(workers: int, microbatches: int) -> None:
    """Narayanan et al., 2021, section 2.2."""
    for rank in range(workers):
        assert alive(workers, rank, 1, microbatches) == min(workers - rank, microbatches)


@pytest.mark.parametrize(("workers", "per_worker"), [(2, 2), (2, 4), (4, 2), (4, 3)])
def test_interleaved_workers_look_twice_as_far_ahead(workers: int, per_worker: int) -> None:
    """One more than the warm-up passes of Megatron-LM's interleaved schedule."""
    for rank in range(workers):
        warmup = 2 * (workers - rank - 1) + (per_worker - 1) * workers
        assert alive(workers, rank, per_worker, 4 * workers) == warmup + 1


def test_a_backward_adds_to_gradients_that_are_there() -> None:
    backwards = [each for each in passes(2, 0, 2, 4) if not each.is_forward]
    assert {part for each in backwards if each.is_last for part in each.added} == {0, 1}
    assert backwards[0].added == frozenset()
    assert [each.part for each in backwards if each.is_last] == [1, 0]
    assert backwards[-1].others == ()
    assert backwards[-1].summed == {1}


@pytest.mark.parametrize(("workers", "per_worker"), [(1, 1), (2, 1), (4, 1), (2, 3), (4, 2)])
def test_more_rounds_bring_nothing_new(workers: int, per_worker: int) -> None:
    for rank in range(workers):
        few = set(passes(workers, rank, per_worker, 1000 * workers))
        assert few == set(_passes(workers, rank, per_worker, 2 * ENOUGH_ROUNDS * workers))


@pytest.mark.parametrize(("workers", "per_worker"), [(1, 1), (2, 1), (4, 1), (2, 3), (4, 2)])
def test_no_pass_holds_more_than_the_largest_ones(workers: int, per_worker: int) -> None:
    """The bytes that a part keeps, casts and sends are drawn at random."""
    draw = random.Random(0)
    for rank in range(workers):
        every = passes(workers, rank, per_worker, 4 * workers)
        largest = largest_passes(workers, rank, per_worker, 4 * workers)
        assert set(largest) <= set(every)
        for _ in range(20):
            kept, cast = ([draw.random() for _ in range(per_worker)] for _ in range(2))
            hidden = draw.random()
            highest: list[dict[Pass, float]] = []
            for some in (every, largest):
                highest.append({})
                for each in some:
                    kind = each._replace(others=(), travelling=0, begun=frozenset())
                    held = sum(count * kept[part] for part, count in each.others) + each.travelling * hidden
                    held += sum(cast[part] for part in each.begun)
                    highest[-1][kind] = max(held, highest[-1].get(kind, 0))
            assert highest[1] == pytest.approx(highest[0])
