"""Each pass over a set has each sample once, and no batch holds a sample twice, for any size, batch and source."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rapidformer_templates.data.fingerprints import checksum
from rapidformer_templates.data.indexed.blend import Blend, ShuffledEpochs
from rapidformer_templates.data.order import Order, SampleOrder, keep_apart
from rapidformer_templates.data.shapes import choose_shapes
from rapidformer_templates.data.streaming import BlockResult, RowStream, StreamedRow, StreamedSamples, StreamOrder
from rapidformer_templates.planning.tasks import TASKS
from rapidformer_templates.run.steps import build_order
from rapidformer_templates.switches.dynamic_shape.batches import DynamicOrder
from tests.support.messages import Says
from tests.support.texts import ROW_OF, WORDS, Load, write_jsonl

Steps = Iterator[list[Any]]
SIZES, BATCHES, SEED, PASSES = (*range(1, 25), 33, 64, 100), (1, 2, 3, 4, 7, 8, 16), 1234, 4


def lengths_of(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(3, 40, size)


def steps_of(order: Order) -> Steps:
    return (order.step(step)[0].tolist() for step in iter(range(10**9)))


def in_random_order(size: int, batch: int) -> Order:
    return SampleOrder(size, batch, SEED, by_epochs=False)


def by_length(size: int, batch: int) -> Order:
    return SampleOrder(size, batch, SEED, by_epochs=False, lengths=lengths_of(size))


def by_epochs(size: int, batch: int) -> Order:
    return SampleOrder(size, batch, SEED, by_epochs=True, lengths=lengths_of(size))


def in_shapes(size: int, batch: int) -> Order:
    lengths = lengths_of(size)
    return DynamicOrder(lengths, choose_shapes(lengths, 40, 4, 8), batch, SEED)


ORDERS = (in_random_order, by_length, by_epochs, in_shapes)


def check_passes(steps: Steps, size: int, batch: int, *, ends_with_pass: bool = False, at: str = "") -> None:
    """Check the steps of some passes over the samples from 0 to ``size``."""
    seen: Counter[Any] = Counter()
    for done in range(1, PASSES + 1):
        while seen.total() < done * size:
            samples = next(steps)
            seen.update(samples)
            if ends_with_pass:
                assert seen.total() <= done * size, at
            else:
                assert len(samples) == batch, at
            if len(samples) <= size:
                assert len(set(samples)) == len(samples), f"{at}: a batch holds a sample twice: {samples}"
        # A batch across the border has begun the next pass. Below a batch, that may be several passes.
        ahead = seen.total() - done * size
        assert set(seen) == set(range(size)) or len(seen) == size, f"{at}: {size - len(seen)} samples are never seen"
        assert min(seen.values()) >= done, f"{at}: not all samples were seen {done} times: {seen}"
        assert sum(max(count - done, 0) for count in seen.values()) == ahead, at


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_each_pass_has_each_sample_once(order: Callable[[int, int], Order]) -> None:
    for size in SIZES:
        for batch in BATCHES:
            ends = order in (by_epochs, in_shapes)
            check_passes(steps_of(order(size, batch)), size, batch, ends_with_pass=ends, at=f"{size} in {batch}")
            made, sample_at, step = order(size, batch), dict[int, int](), 0
            while len(sample_at) < PASSES * size:
                samples, positions = made.step(step)
                assert sample_at.keys().isdisjoint(positions.tolist()), "random changes of two samples are the same"
                sample_at.update(zip(positions.tolist(), samples.tolist(), strict=True))
                step += 1
            for first in range(0, PASSES * size, size):
                assert sorted(sample_at[p] for p in range(first, first + size)) == list(range(size))


SHOWN = ((8, 4, 4), (10, 4, 6), (6, 4, 4), (3, 4, 3))


def shown(order: Order, size: int, steps: int) -> str:
    batches = []
    for samples, positions in map(order.step, range(steps)):
        passes = positions // size
        batches.append(" | ".join(" ".join(map(str, samples[passes == p])) for p in np.unique(passes)))
    return " ".join(f"[{batch}]" for batch in batches)


def test_the_batches_of_small_sets(says: Says) -> None:
    """Show the samples of the first steps. A bar is the border of two passes in a batch."""
    for order in ORDERS[:3]:
        says.text(order.__name__)
        for n, batch, steps in SHOWN:
            says.text(f"{n} in batches of {batch}  {shown(order(n, batch), n, steps)}")


# Sources with their own order


def rows_of_files(rows: list[StreamedRow], left: Any, generator: np.random.Generator) -> BlockResult:
    return BlockResult([row.row["id"] for row in rows if row.row])


def stream(folder: Path, size: int, files: int, buffer: int, batch: int) -> StreamedSamples:
    paths = []
    for number in range(min(files, size)):
        rows = [{"id": row} for row in range(number, size, files)]
        paths.append(write_jsonl(folder / f"{size}-{number}-of-{files}.jsonl", rows))
    samples = StreamedSamples(RowStream(paths, SEED), rows_of_files, seed=SEED, buffer=buffer, identity="")
    keep_apart(samples, batch)
    return samples


@pytest.mark.slow
@pytest.mark.parametrize(("files", "buffer"), [(1, 1000), (3, 1000), (1, 5)])
def test_each_pass_over_a_stream_has_each_row_once(files: int, buffer: int, tmp_path: Path) -> None:
    for size, batch in ((1, 2), (5, 1), (5, 4), (7, 7), (12, 8), (13, 4), (20, 16), (33, 8), (64, 16)):
        samples = stream(tmp_path, size, files, buffer, batch)
        order = StreamOrder(samples, batch, SEED)
        steps = (samples.__getitems__(positions) for positions in steps_of(order))
        check_passes(steps, size, batch, at=f"{size} in {batch}")


@pytest.mark.slow
@pytest.mark.parametrize("weights", [(1, 1), (9, 1), (1, 30)])
def test_each_pass_over_a_set_of_a_mixture_has_each_sample_once(weights: tuple[int, int]) -> None:
    sizes = (13, 40)
    for batch in (1, 4, 8, 12):
        sets = [
            ShuffledEpochs([(name, i) for i in range(size)], SEED, number, name)
            for number, (name, size) in enumerate(zip("ab", sizes, strict=True))
        ]
        samples = Blend(sets, weights)
        keep_apart(samples, batch)
        order = SampleOrder(len(samples), batch, SEED, by_epochs=False, in_order=True)
        drawn = [samples.__getitems__(positions) for positions in islice(steps_of(order), 200)]
        assert all(len(set(step)) == batch for step in drawn)
        for name, size in zip("ab", sizes, strict=True):
            numbers = [i for step in drawn for of, i in step if of == name]
            passes = [numbers[i : i + size] for i in range(0, len(numbers) - size + 1, size)]
            assert all(sorted(one) == list(range(size)) for one in passes)


# Every task


def test_every_task_is_listed() -> None:
    assert ROW_OF.keys() == TASKS.keys() - {"pretraining"}


@pytest.mark.slow
@pytest.mark.parametrize("task", ROW_OF)
def test_each_pass_of_a_task_has_each_sample_once(task: str, load: Load) -> None:
    rows = [ROW_OF[task](" ".join(WORDS[i : i + i % 7 + 1])) for i in range(13)]
    for more in ({}, {"streaming": True}) if TASKS[task].is_streamed else ({},):
        made = load(task, rows, lr=1e-3, seq_length=64, train_iters="3epochs", **more)
        data: Any = made.build_data()
        for batch in (4, 8):
            plan = SimpleNamespace(sizes=SimpleNamespace(global_batch=batch), switches=())
            run: Any = SimpleNamespace(config=made.config, data=data, plan=plan)
            ids: dict[int, int] = {}
            steps = (
                [ids.setdefault(checksum(data.train[position]), len(ids)) for position in positions]
                for positions in steps_of(build_order(run, data.train))
            )
            check_passes(steps, 13, batch, at=f"{task} {more} in batches of {batch}")
