"""Buckets cover every parameter once, and the shares of the ranks cover every bucket once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rapidformer_templates.engines.parallel.buckets import (
    assign_whole_parameters,
    bucket_size_for,
    buckets_by_key,
    split_into_buckets,
    update_chunks,
)


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 40), max_size=8), ranks=st.integers(1, 5), limit=st.integers(1, 30))
def test_every_element_is_in_one_bucket_and_has_one_owner(sizes: list[int], ranks: int, limit: int) -> None:
    found = split_into_buckets(list(enumerate(sizes)), ranks, limit)
    covered = [(s.parameter, s.start + i) for w in found for s in w.segments for i in range(s.length)]
    assert covered == [(index, i) for index, size in enumerate(sizes) for i in range(size)]
    owned = []
    for bucket in found:
        for rank in range(ranks):
            end = 0
            for (parameter, start, length), place in bucket.owned(rank):
                assert place == end, "runs lie end to end in a share"
                end = place + length
                owned += [(parameter, start + i) for i in range(length)]
            assert end <= bucket.share
    assert owned == covered
    assert sum(w.share * ranks - w.length for w in found) < ranks, "only the last bucket is padded"


@given(sizes=st.lists(st.integers(0, 40), max_size=12), limit=st.integers(1, 30))
def test_chunks_are_whole_parameters_up_to_a_limit(sizes: list[int], limit: int) -> None:
    found = update_chunks(sizes, limit)
    assert [place for chunk in found for place in chunk] == list(range(len(sizes)))
    assert all(sum(sizes[place] for place in chunk) <= limit or len(chunk) == 1 for chunk in found)
    following = [sizes[after[0]] for after in found[1:]]
    assert all(
        sum(sizes[place] for place in chunk) + size > limit for chunk, size in zip(found, following, strict=False)
    )


def test_a_bucket_is_a_matrix_of_the_model() -> None:
    assert [bucket_size_for(width) for width in (16, 768, 2048, 8192)] == [2**18, 768**2, 2048**2, 2**23]


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 40), max_size=12), ranks=st.integers(1, 5), limit=st.integers(1, 60))
def test_whole_parameters_have_one_owner_each_and_even_loads(sizes: list[int], ranks: int, limit: int) -> None:
    loads = [0] * ranks
    found = assign_whole_parameters(list(enumerate(sizes)), loads, limit)
    owned = {rank: [run for w in found for run, _ in w.owned(rank)] for rank in range(ranks)}
    everything = [(run.parameter, run.start, run.length) for runs in owned.values() for run in runs]
    assert sorted(everything) == [(index, 0, size) for index, size in enumerate(sizes)]
    assert loads == [sum(run.length for run in owned[rank]) for rank in range(ranks)]
    assert loads == [sum(w.share_of(rank) for w in found) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max((w.length for w in found), default=0)
    assert sum(w.packed for w in found) == sum(sizes), "nothing is padded"


def test_copies_in_several_stages_have_one_owner_whatever_else_a_stage_has() -> None:
    tied = [(0, 30), (1, 20)]

    def owners(others: list[tuple[int, int]]) -> list[int | None]:
        kinds = {"own": others, "tied": tied}
        found = buckets_by_key(kinds, 10, ranks=lambda kind: 2, whole=True, is_tied=lambda kind: kind == "tied")
        return [bucket.owner for bucket, kind in found.items() if kind == "tied"]

    assert owners([(2, 50)]) == owners([(2, 5), (3, 60), (4, 7)]) == [0, 1]
