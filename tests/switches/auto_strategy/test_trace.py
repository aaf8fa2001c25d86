"""A trace on fake tensors, compared with the allocations of a real forward and backward in torch's profiler."""

import itertools
import random
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rapidformer_templates.engines.forwards import Checkpointed
from rapidformer_templates.models.blocks import find_blocks
from rapidformer_templates.switches.auto_strategy.layouts import RECOMPUTED
from rapidformer_templates.switches.auto_strategy.model_shapes import Variant
from rapidformer_templates.switches.auto_strategy.trace import Pass, largest_passes, passes
from rapidformer_templates.switches.auto_strategy.tracing import LiveStorages, traffic_of
from tests.support.allocations import measured_allocations
from tests.support.model_shapes import LENGTH, MODELS, batch, shapes
from tests.support.selection import few


def real_step(model: Any, variant: Variant) -> None:
    narrow = variant.precision == "bf16"
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow):
        loss = model(**batch(variant.micro_batch)).loss * 2.0
    loss.backward()


def real_model(name: str, blocks: int, variant: Variant) -> Any:
    model = MODELS[name](blocks)
    for block in find_blocks(model).values() if variant.recompute != "none" else ():
        block.forward = Checkpointed(block.forward, selective=variant.recompute == "selective")
    return model


same_shapes = cache(shapes)
"""The shapes of a model, with the traces of all tests that do not change the model."""

VARIANTS = [Variant(samples, how, kind) for samples, kind in ((4, "fp32"), (2, "bf16")) for how in RECOMPUTED]
NAMES = ("gpt2", "llama", "bert", "t5")


def test_an_operation_reads_its_operands_and_writes_its_result() -> None:
    """An expanded operand has less memory than elements, and a table is read only where it is looked up."""
    table, rows, states = torch.zeros(100, 8), torch.zeros(4, dtype=torch.long), torch.zeros(4, 8)
    bias = torch.zeros(8).expand(4, 8)
    for operation, operands, moved in (
        (torch.ops.aten.add.Tensor, (states, states), 3 * 128),
        (torch.ops.aten.add.Tensor, (states, bias), 128 + 32 + 128),
        (torch.ops.aten.embedding.default, (table, rows), 2 * 128),
        (torch.ops.aten.detach.default, (states,), 0),
    ):
        assert traffic_of(operation, operands, {}, operation(*operands)) == moved


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), few([("gpt2", VARIANTS[0])], itertools.product(NAMES, VARIANTS)), ids=str)
def test_a_deepened_trace_is_the_peak_of_the_real_model(name: str, variant: Variant) -> None:
    predicted = same_shapes(name).trace(variant)
    model = real_model(name, 5, variant)
    with LiveStorages([*model.parameters(), *model.buffers()]) as live:
        real_step(model, variant)
    assert predicted.peak >= live.peak * 0.997  # 1 KB of a mask is much for a model of this size
    assert predicted.peak == pytest.approx(live.peak, rel=0.01)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_live_storages_are_what_the_allocator_gave(name: str) -> None:
    model = real_model(name, 3, Variant(4))
    real_step(model, Variant(4))  # caches that are created once
    model.zero_grad()
    with LiveStorages([*model.parameters(), *model.buffers()]) as live:
        real_step(model, Variant(4))
    model.zero_grad()
    with measured_allocations() as allocations:
        real_step(model, Variant(4))
    assert live.peak == pytest.approx(allocations.peak, abs=4096)


def test_a_resized_storage_counts_with_its_new_size() -> None:
    """FSDP frees and allocates whole parameters in this way."""
    with LiveStorages() as live, live.following_resizes():
        storage = torch.ones(100).untyped_storage()
        before = live.live
        for size in (0, 800):
            storage.resize_(size)
            assert live.live == before - 400 + size
    assert live.peak == before + 400


@pytest.mark.slow
def test_operations_are_those_that_torch_counts() -> None:
    model = real_model("llama", 5, Variant(2))
    with FlopCounterMode(display=False) as counter:
        real_step(model, Variant(2))
    # torch's counter does not know the kernel that a CPU runs: two products in the forward and five in the backward.
    attention = 5 * (2 + 5) * 2 * (2 * LENGTH * LENGTH * 32) // 2  # under a causal mask
    assert same_shapes("llama").trace(Variant(2)).flops == counter.get_total_flops() + attention


@pytest.mark.slow
def test_selective_recomputation_repeats_no_product_with_weights() -> None:
    """The only matrix products that are repeated are the two of attention. A full recomputation repeats the forward."""
    model = same_shapes("gpt2")
    plain, selective, full = (model.trace(Variant(4, recompute)) for recompute in RECOMPUTED)
    attention = 4 * 5 * 2 * (2 * LENGTH * LENGTH * 32)
    assert selective.flops == plain.flops + attention
    assert full.flops == plain.flops + sum(phase.flops for phase in plain.phases if phase.name == "forward")
    assert full.saved < min(selective.saved, plain.saved / 4)
    assert selective.saved < plain.saved
    assert full.peak < selective.peak < plain.peak


@pytest.mark.longer
def test_the_logits_never_exist_whole_under_tensor_parallelism() -> None:
    """If the vocabulary is much wider than the model, the head decides the peak, and workers divide it."""
    model = same_shapes("llama")
    whole, shared = model.trace(Variant(4)), model.trace(Variant(4, tensor=2))
    head = {phase.name: phase for phase in whole.phases}["head"]
    of_two = {phase.name: phase for phase in shared.phases}["head"]
    logits = 4 * 32 * 128 * 4
    assert head.peak - head.end >= logits
    assert of_two.peak - shared.saved < head.peak - whole.saved
    assert shared.peak < 0.75 * whole.peak


@pytest.mark.longer
def test_sequence_parallelism_divides_what_tensor_parallelism_leaves_whole() -> None:
    model = shapes("llama")
    plain = model.trace(Variant(4, tensor=2))
    assert model.trace(Variant(4, tensor=2, sequence_parallel=True)).saved < 0.9 * plain.saved


def test_tensors_without_memory_do_not_count() -> None:
    """DeepSpeed keeps one on the meta device for each parameter, to know its shape."""
    with LiveStorages() as live:
        shape, values = torch.zeros(1000, device="meta"), torch.zeros(10)
    assert live.live == values.nbytes < shape.nbytes


# Passes that a pipeline worker holds at the same time, compared with the formulas of the authors of its schedules.


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
