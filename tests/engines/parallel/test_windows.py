"""Windows cover every parameter once, and the ranks' shares every window once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rapidformer_templates.engines.parallel.windows import windows


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
