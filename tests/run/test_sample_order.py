"""The samples of a step: they are the same, in the same order, with every layout and after every resume."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapidformer_templates.data.collate import WindowCollate
from rapidformer_templates.data.indexed.blend import Blend
from rapidformer_templates.data.loader import load, train_requests
from rapidformer_templates.data.order import SampleOrder
from rapidformer_templates.data.pretraining.windows import GPTSamples
from rapidformer_templates.data.types import Data
from tests.support.indexed_sets import numbered

pytestmark = pytest.mark.usefixtures("offline")

CORPORA = st.lists(
    st.tuples(st.lists(st.integers(1, 60), min_size=3, max_size=20), st.integers(1, 9)), min_size=1, max_size=3
)
STEPS = 7


def _set(folder: Path, corpora: list[tuple[list[int], int]], length: int) -> Any:
    sets = []
    for i, (lengths, _) in enumerate(corpora):
        lengths = [*lengths, length + 1]  # so that there is a sample
        sets.append(GPTSamples(numbered(folder / str(i), lengths, 10_000 * i), (0, len(lengths)), length, 3))
    return sets[0] if len(sets) == 1 else Blend(sets, [weight for _, weight in corpora])


def _steps(samples: Any, global_batch: int, ranks: int, micro: int, start: int, *, by_epochs: bool) -> list[Any]:
    """Return, for each step, the (samples, tokens) of all ranks, in the order of the micro batches of one process."""
    order = SampleOrder(len(samples), global_batch, 3, by_epochs=by_epochs, in_order=True)
    data = Data(samples, collate=WindowCollate())
    accumulation = global_batch // (ranks * micro)
    loaders = [
        load(
            samples, data,
            train_requests(order, start, STEPS, rank=rank, data_size=ranks, accumulation=accumulation),
            workers=0, pin_memory=False,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    steps = []
    for _ in range(start, STEPS):
        batches = [next(loader) for _ in range(accumulation) for loader in loaders]
        here = [batch for batch in batches if not batch.idle]
        tokens = [row for batch in here for row in batch.batch["input_ids"].tolist()]
        steps.append(([sample for batch in here for sample in batch.samples], tokens))
    return steps


@pytest.mark.slow
@given(CORPORA, st.integers(1, 30), st.integers(1, 8), st.integers(1, 3), st.integers(1, 3), st.data())
@settings(max_examples=60, deadline=None)
def test_layouts_and_resumes_change_nothing(
    corpora: list[tuple[list[int], int]], length: int, ranks: int, micro: int, accumulation: int, data: st.DataObject
) -> None:
    by_epochs = data.draw(st.booleans())
    resume_at = data.draw(st.integers(0, STEPS - 1))
    global_batch = ranks * micro * accumulation
    with tempfile.TemporaryDirectory() as folder:
        samples = _set(Path(folder), corpora, length)
        alone = _steps(samples, global_batch, 1, global_batch, 0, by_epochs=by_epochs)
        assert _steps(samples, global_batch, ranks, micro, 0, by_epochs=by_epochs) == alone
        assert _steps(samples, global_batch, ranks, micro, resume_at, by_epochs=by_epochs) == alone[resume_at:]
        positions = [sample for step, _ in alone for sample in step]
        assert positions == list(range(len(positions)))  # nothing is lost or doubled, even at the ends of epochs
        for _, tokens in alone:
            assert np.shape(tokens)[1] == length
