"""Windows cover every parameter once, and the ranks' shares every window once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rapidformer_templates.engines.parallel.windows import turns, window_for, windows


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 40), max_size=8), ranks=st.integers(1, 5), limit=st.integers(1, 30))
def test_every_element_is_in_one_window_and_has_one_owner(sizes: list[int], ranks: int, limit: int) -> None:
    found = windows(list(enumerate(sizes)), ranks, limit)
    covered = [(s.parameter, s.start + i) for w in found for s in w.segments for i in range(s.length)]
    assert covered == [(index, i) for index, size in enumerate(sizes) for i in range(size)]
    owned = []
    for window in found:
        for rank in range(ranks):
            end = 0
            for (parameter, start, length), place in window.owned(rank):
                assert place == end, "runs lie end to end in a share"
                end = place + length
                owned += [(parameter, start + i) for i in range(length)]
            assert end <= window.share
    assert owned == covered
    assert sum(w.share * ranks - w.length for w in found) < ranks, "only the last window is padded"


@given(sizes=st.lists(st.integers(0, 40), max_size=12), limit=st.integers(1, 30))
def test_turns_are_whole_parameters_up_to_a_limit(sizes: list[int], limit: int) -> None:
    found = turns(sizes, limit)
    assert [place for turn in found for place in turn] == list(range(len(sizes)))
    assert all(sum(sizes[place] for place in turn) <= limit or len(turn) == 1 for turn in found)
    following = [sizes[after[0]] for after in found[1:]]
    assert all(sum(sizes[place] for place in turn) + size > limit for turn, size in zip(found, following, strict=False))


def test_a_window_is_a_matrix_of_the_model() -> None:
    assert [window_for(width) for width in (16, 768, 2048, 8192)] == [2**18, 768**2, 2048**2, 2**23]
