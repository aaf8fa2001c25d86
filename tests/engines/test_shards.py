"""Shards of gradients: put together, they are the gradient of one process. Their boxes divide tensors as torch does."""

import itertools
import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rapidformer_templates.engines.boxes import Index, Parts, boxes_of_run
from rapidformer_templates.engines.local import SingleEngine
from rapidformer_templates.engines.shards import Shard as PartOfWorker
from rapidformer_templates.engines.shards import gather_whole
from rapidformer_templates.planning.environment import installed_packages
from tests.support import parity
from tests.support.parallel_jobs import JOBS
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

LAYOUTS = {
    "DDP": "",
    "FSDP": "--fsdp-memory-optimization",
    "divided update": "--use-distributed-optimizer",
    "divided gradients": "--zero-2-memory-optimization --tensor-model-parallel-size 2",
    "tensor": "--tensor-model-parallel-size 2",
    "pipeline with tied embeddings": "--pipeline-model-parallel-size 2",
}
if "deepspeed" in installed_packages():
    LAYOUTS |= {
        "ZeRO-1": "--zero-1-memory-optimization",
        "ZeRO-2": "--zero-2-memory-optimization",
        "ZeRO-2, offload": "--zero-2-memory-optimization --cpu-offload",
        "ZeRO-3": "--zero-3-memory-optimization",
        "ZeRO-3, offload": "--zero-3-memory-optimization --cpu-offload",
    }
SHORT = ("divided gradients", "pipeline with tied embeddings")
"""Layouts that run by default: each way to divide a gradient of this library's engines."""
FLAGS = "--train-iters 1 --global-batch-size 8 --clip-grad 0"
JOB = "gpt2-4-tied"


def _gradients(flags: str) -> dict[str, torch.Tensor]:
    """Return the whole gradients of a step by name, on rank 0, with the norm that the step reports as ``norm``."""
    gradients: dict[str, torch.Tensor] = {}
    setup = SingleEngine.setup

    def gather_before_update(engine: SingleEngine, *arguments: Any) -> None:
        setup(engine, *arguments)

        def gather() -> None:
            whole = gather_whole(engine.shards("gradients"), engine.workers)
            gradients.update({name: gradient.clone() for name, gradient in whole})

        engine.before_update.append(gather)

    assert JOB in JOBS
    in_deepspeed = "zero" in flags and "tensor" not in flags  # it computes in fp32 at most
    with mock.patch.object(SingleEngine, "setup", gather_before_update):
        run = parity.train(JOB, not in_deepspeed, f"{FLAGS} {flags}")
    return gradients | {"norm": torch.tensor(run["curve"][0][1], dtype=torch.float64)}


def _in_workers(workers: Any, layouts: Sequence[str]) -> dict[str, dict[str, torch.Tensor]]:
    return {layout: _gradients(f"--micro-batch-size 2 {LAYOUTS[layout]}") for layout in layouts}


@pytest.fixture(scope="module")
def gradients(request: pytest.FixtureRequest) -> dict[str, dict[str, torch.Tensor]]:
    layouts = selected(request, "layout")
    found: dict[str, dict[str, torch.Tensor]] = run_in_workers(2, _in_workers, layouts)[0]
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return _gradients("--micro-batch-size 2")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("layout", by_default(SHORT, LAYOUTS))
def test_shards_of_all_workers_are_the_gradient_of_one_process(
    layout: str, gradients: dict[str, dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]
) -> None:
    assert gradients[layout].keys() == expected.keys()
    rtol, atol = (1e-4, 1e-6) if layout.startswith("ZeRO") else (1e-9, 1e-12)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[layout][name].double(), gradient, rtol=rtol, atol=atol)


@pytest.mark.distributed
@pytest.mark.slow
def test_the_norm_is_that_of_the_gathered_gradient(expected: dict[str, torch.Tensor]) -> None:
    square = sum(gradient.square().sum() for name, gradient in expected.items() if name != "norm")
    torch.testing.assert_close(torch.as_tensor(square).sqrt(), expected["norm"])


WHOLE = torch.arange(7 * 12 * 5.0).view(7, 12, 5)


def _part(placements: Sequence[Placement], mesh: Sequence[int], coordinate: Sequence[int]) -> torch.Tensor:
    return Parts(tuple(placements), tuple(mesh), (tuple(coordinate),)).take(WHOLE, 0)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_shard_is_what_chunk_gives(dim: int, size: int) -> None:
    chunks = WHOLE.chunk(size, dim)
    for rank in range(size):
        part = _part([Shard(dim)], [size], [rank])
        expected = chunks[rank] if rank < len(chunks) else WHOLE.narrow(dim, 0, 0)
        assert torch.equal(part, expected)
        assert Index.of_rank(tuple(WHOLE.shape), [Shard(dim)], [size], [rank]).local == tuple(expected.shape)


@pytest.mark.parametrize(("parts", "size"), [(3, 2), (3, 4), (2, 3)])
def test_of_fused_parts_a_rank_has_a_share_of_each(parts: int, size: int) -> None:
    placement = _StridedShard(1, split_factor=parts)
    for rank in range(size):
        expected = torch.cat([part.chunk(size, 1)[rank] for part in WHOLE.chunk(parts, 1)], 1)
        assert torch.equal(_part([placement], [size], [rank]), expected)
        assert len(Index.of_rank(tuple(WHOLE.shape), [placement], [size], [rank]).boxes) == parts


@pytest.mark.parametrize(
    "placements",
    [
        [Shard(0), Shard(1)],
        [Shard(1), Shard(1)],
        [Replicate(), Shard(2)],
        [_StridedShard(1, split_factor=3), Shard(1)],
    ],
    ids=str,
)
def test_the_boxes_of_all_ranks_fill_the_whole_once(placements: list) -> None:
    copies = 2 if isinstance(placements[0], Replicate) else 1
    counts = torch.zeros_like(WHOLE)
    rebuilt = torch.zeros_like(WHOLE)
    for coordinate in itertools.product(range(2), range(3)):
        part = _part(placements, [2, 3], coordinate)
        held = 0
        for box in Index.of_rank(tuple(WHOLE.shape), placements, [2, 3], coordinate).boxes:
            rebuilt[box.whole] = part[box.local]
            counts[box.whole] += 1
            held += part[box.local].numel()
        assert held == part.numel()
    assert torch.equal(counts, torch.full_like(counts, copies))
    assert torch.equal(rebuilt, WHOLE)


def test_a_plain_tensor_is_one_box_and_a_scalar_too() -> None:
    (box,) = Index.of(WHOLE).boxes
    assert (box.offset, box.shape) == ((0, 0, 0), tuple(WHOLE.shape))
    (box,) = Index.of(torch.tensor(3.0)).boxes
    assert box.shape == ()


def test_an_empty_shard_has_no_box() -> None:
    index = Index.of_rank((3, 2), [Shard(0)], [4], [3])
    assert index.boxes == []
    assert index.local == (0, 2)


def test_parts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="7 cannot be divided into 3 parts"):
        Index.of_rank((7,), [_StridedShard(0, split_factor=3)], [2], [0])


@given(shape=st.lists(st.integers(1, 5), max_size=4), run=st.data())
def test_a_run_is_its_boxes(shape: list[int], run: st.DataObject) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    start = run.draw(st.integers(0, tensor.numel()))
    count = run.draw(st.integers(0, tensor.numel() - start))
    values = tensor.flatten()[start : start + count]
    found = list(Index.whole(shape).run(start).parts(values))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    for offset, part in found:
        place = tuple(slice(o, o + s) for o, s in zip(offset, part.shape, strict=True))
        assert torch.equal(tensor[place], part)
    assert sum(part.numel() for _, part in found) == count


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), run=st.data())
def test_what_is_read_is_the_run(shape: list[int], run: st.DataObject) -> None:
    tensor = torch.arange(math.prod(shape)).view(shape)

    def read(offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        return tensor[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]

    start = run.draw(st.integers(0, tensor.numel()))
    target = torch.full((run.draw(st.integers(0, tensor.numel() - start)),), -1)
    shard = PartOfWorker("w", tuple(shape), Index.whole(shape).run(start), target)
    again = shard.read_like(read)
    shard.fill(read)
    assert torch.equal(target, tensor.flatten()[start : start + target.numel()])
    assert torch.equal(again, target)


def test_whole_rows_are_one_box() -> None:
    assert list(boxes_of_run((4, 3), 3, 6)) == [((1, 0), (2, 3))]
    assert list(boxes_of_run((), 0, 1)) == [((), ())]
