"""The search compared with brute force over the same predictions, and jobs for which it must find a layout."""

import functools
import itertools
import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rapidformer_templates.commands.plan import plan_request
from rapidformer_templates.errors import ModelError
from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.request import build_request
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.switches.auto_strategy import command
from rapidformer_templates.switches.auto_strategy.command import reasons
from rapidformer_templates.switches.auto_strategy.device_file import ALL_REDUCE
from rapidformer_templates.switches.auto_strategy.layouts import (
    PARTITIONINGS,
    RECOMPUTED,
    Layout,
    MemoryOptions,
    memory_options_of,
)
from rapidformer_templates.switches.auto_strategy.memory import predict, states_by_worker
from rapidformer_templates.switches.auto_strategy.model_of_flags import Subject
from rapidformer_templates.switches.auto_strategy.results import ALLOWANCE, SearchResult
from rapidformer_templates.switches.auto_strategy.search import COMPARED, Search
from rapidformer_templates.switches.auto_strategy.setup_memory import setup_memory
from rapidformer_templates.switches.auto_strategy.step_seconds import (
    CommunicationSizes,
    Timing,
    exchange_seconds,
    predict_seconds,
    product_seconds,
)
from rapidformer_templates.switches.auto_strategy.timing import GB, KERNEL_SECONDS, Hardware, find_hardware
from rapidformer_templates.switches.auto_strategy.trace import Phase, Product, Trace
from rapidformer_templates.switches.auto_strategy.tracing import in_forks
from tests.support.messages import Says
from tests.support.pipeline_time import of_all, of_link, step_seconds
from tests.support.plans import planned
from tests.support.selection import by_default

ALL = 10**9
"""Layouts of a search that leaves none out."""

TINY = "--model-type gpt2 --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32"


def search_of(flags: str, monkeypatch: pytest.MonkeyPatch, gigabytes: float) -> Search:
    monkeypatch.setenv("DEVICE_MEMORY_GB", str(gigabytes))
    config, place, _ = plan_request(flags.split())
    return Search(config, place, tiny(), find_hardware(place, "fp32"), enough=ALL)


@functools.cache
def tiny() -> Subject:
    """One subject for all tests, with its traces."""
    return Subject(plan_request(TINY.split())[0], gpu=False)


@pytest.mark.longer
def test_brute_force_agrees_on_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"{TINY} --auto-strategy --world-size 4 --local-world-size 4 --global-batch-size 4 --device cpu"
    flags += " --mixed-precision bf16"
    search = search_of(flags, monkeypatch, 0.8 + 0.045)  # between the lowest and the highest memory of a layout
    found = search.run()
    fitting = {candidate.layout for candidate in found.layouts}
    assert fitting
    assert any("memory" in rejected.constraint for rejected in found.rejected)
    for layout in random.Random(0).sample(all_layouts(4, 4), 30):
        expected = fits(search, layout)
        assert (layout in fitting) is expected, layout


def all_layouts(world: int, batch: int) -> list[Layout]:
    """Return every division of the workers with every switch, including layouts that cannot work."""
    sizes = [(t, p, world // (t * p)) for t in range(1, world + 1) for p in range(1, world + 1) if world % (t * p) == 0]
    return [
        Layout(t, p, d, micro, batch // (micro * d), partitioning, recompute, sequence_parallel=t > 1)
        for (t, p, d), micro, partitioning, recompute in itertools.product(sizes, (1, 2, 4), PARTITIONINGS, RECOMPUTED)
        if batch % (micro * d) == 0 and (d > 1 or partitioning == "none")
        if t * p > 1 or partitioning != "sharding-strategy"  # otherwise it is FSDP
    ]


def fits(search: Search, layout: Layout) -> bool:
    """Check a layout only with the rules of the switches and the exact prediction."""
    config = search.config.replace("test", **layout.values())
    if REGISTRY.refusals(build_request(config, search.environment, REGISTRY.switches)):
        return False
    try:
        plan = resolve(REGISTRY.merge_files(config), search.environment)
        memory = predict(search.subject.shapes, layout, memory_options_of(plan, search.subject.shapes.width))
    except ModelError:
        return False
    setup = setup_memory(search.subject.shapes, layout, memory_options_of(plan, search.subject.shapes.width))
    peak = max(memory.total, setup.device)
    return peak * (1 + ALLOWANCE) / GB + search.hardware.context_gb <= search.hardware.memory_gb


@functools.cache
def of_four() -> SearchResult:
    """All layouts of four workers on two nodes. One search for all tests that look at its result."""
    with pytest.MonkeyPatch.context() as patch:
        return search_of(f"{FOUR} --auto-strategy --max-global-batch-size 8", patch, 4).run()


FOUR = f"{TINY} --world-size 4 --local-world-size 2 --device cpu"


@pytest.mark.parametrize("more", by_default(["--no-checkpoint-activations"], ["--no-checkpoint-activations", ""]))
def test_a_short_search_finds_the_fastest_and_one_of_each_size(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"{FOUR} --auto-strategy --max-global-batch-size 8 {more}"
    whole = search_of(flags, monkeypatch, 0.84).run()
    short = search_of(flags, monkeypatch, 0.84)
    short.enough = 10
    found = short.run()
    assert len(whole.layouts) > 20
    assert whole.rejected
    assert found.layouts[:10] == whole.layouts[:10]
    for name in COMPARED:
        values = {getattr(candidate.layout, name) for candidate in whole.layouts}
        shown = {getattr(candidate.layout, name) for candidate in found.layouts}
        assert len(shown) > 1 or values == shown, name
    tried = len(found.layouts) + len(found.rejected)
    assert found.slower == len(whole.layouts) + len(whole.rejected) - tried > 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks safely")
def test_each_core_has_a_process_and_failures_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    known = {"here": 1}

    def fails() -> tuple[int, int]:
        raise ValueError

    def dies() -> tuple[int, int]:
        os._exit(1)

    told = in_forks([lambda: (known["here"], os.getpid()), fails, dies, lambda: (2, os.getpid())])
    assert sorted(number for number, _ in told) == [1, 2]
    assert len({os.getpid(), *(pid for _, pid in told)}) == 3


@pytest.mark.longer
def test_the_flags_of_each_layout_resolve_to_it() -> None:
    for candidate in of_four().layouts:
        config, place, _ = plan_request([*FOUR.split(), *candidate.layout.flags()])
        plan, layout = resolve(config, place), candidate.layout
        sizes = (plan.sizes.tensor, plan.sizes.pipeline, plan.sizes.data, plan.sizes.micro_batch)
        assert sizes == (layout.tensor, layout.pipeline, layout.data, layout.micro_batch)
        assert (plan.sizes.global_batch, plan.sizes.accumulation) == (layout.global_batch, layout.accumulation)
        assert ("checkpoint-activations" in plan.switches) is (layout.recompute != "none")
        assert (config.get("recompute_granularity") == "selective") is (layout.recompute == "selective")
        assert layout.partitioning == "none" or layout.partitioning in plan.switches
        assert plan.engine_options.parameter_sharding.shard_size == layout.shard_size
        assert config.get("virtual_pipeline_size") == layout.virtual
        assert layout.global_batch <= 8


@pytest.mark.longer
def test_sequences_are_divided_where_nothing_fits_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"{TINY} --auto-strategy --world-size 2 --local-world-size 2 --device cpu --global-batch-size 1"
    flags += " --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --no-checkpoint-activations"
    alone = search_of(f"{flags} --context-parallel-size 1", monkeypatch, 4).run()
    assert not alone.layouts  # one sample is not enough for two replicas
    (best, *others) = search_of(flags, monkeypatch, 4).run().layouts
    assert {candidate.layout.context for candidate in (best, *others)} == {2}
    config, place, _ = plan_request([*flags.replace("--auto-strategy", "").split(), *best.layout.flags()])
    assert resolve(config, place).sizes.context == 2


@pytest.mark.longer
@pytest.mark.parametrize(("more", "sizes"), [("", {1, 2}), ("--virtual-pipeline-size 2", {2})])
def test_stages_are_interleaved_as_far_as_the_blocks_divide(
    more: str, sizes: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = f"{TINY} --auto-strategy --world-size 2 --local-world-size 2 --device cpu --micro-batch-size 1 {more}"
    flags += " --pipeline-model-parallel-size 2 --no-checkpoint-activations --global-batch-size 8"
    search = search_of(flags, monkeypatch, 4)
    found = {candidate.layout.virtual: candidate for candidate in search.run().layouts}
    assert found.keys() == sizes
    if 1 in found:
        plain, interleaved = found[1], found[2]
        assert interleaved.layout.bubble == pytest.approx(1 / 17)  # and 1 / 9 of the plain one (Narayanan et al., 2021)
        assert interleaved.timing.bubble < 0.6 * plain.timing.bubble
        assert interleaved.memory.activations > plain.memory.activations


@pytest.mark.longer
def test_experts_are_divided_as_far_as_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"{TINY} --auto-strategy --world-size 4 --local-world-size 4 --device cpu --micro-batch-size 1"
    flags += " --num-experts 4 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1"
    monkeypatch.setenv("DEVICE_MEMORY_GB", "4")
    config, place, _ = plan_request([*flags.split(), "--no-checkpoint-activations", "--use-distributed-optimizer"])
    plan = resolve(config.replace("test", auto_strategy=False), place)
    search = Search(config, place, Subject(config, plan, gpu=False), find_hardware(place, "fp32"), enough=ALL)
    found = {each.layout.experts: each for each in search.run().layouts if each.layout.context == 1}
    assert found.keys() == {1, 2, 4}
    facts = search.subject.facts
    assert facts.visits == 2 * 4  # in each of four blocks
    for count, candidate in found.items():
        here = facts.parameters - facts.experts + facts.experts / count
        assert candidate.memory.parameters == 4 * here
        # A visit takes two trips in the forward and two for the gradients, except on the expert's own worker.
        tokens = 32 * candidate.layout.accumulation
        trips = 4 * facts.visits * tokens * 32 * 4 * (count - 1) / count
        assert candidate.timing.experts == pytest.approx(trips / (search.hardware.intra_node * GB))


MIXTURES = {
    "mixtral": {"num_local_experts": 6},
    "qwen3_moe": {"num_experts": 6, "mlp_only_layers": [1], "moe_intermediate_size": 32},
}


@pytest.fixture(params=by_default(["qwen3_moe"], MIXTURES))
def mixture(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The folder of a mixture from transformers. Not every block of the second has experts."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2, "pad_token_id": 0}
    AutoConfig.for_model(request.param, **sizes, **MIXTURES[request.param]).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.longer
def test_experts_of_an_architecture_are_divided_and_visited(mixture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"--pretrained-model-name-or-path {mixture} --seq-length 16 --world-size 4 --local-world-size 4"
    flags += " --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1 --device cpu"
    flags += " --no-checkpoint-activations --use-distributed-optimizer --micro-batch-size 1"
    monkeypatch.setenv("DEVICE_MEMORY_GB", "4")
    config, place, _ = plan_request(flags.split())
    subject = Subject(config, resolve(config, place), gpu=False)
    search = Search(config, place, subject, find_hardware(place, "fp32"), enough=ALL)
    assert {each.layout.experts for each in search.run().layouts} == {1, 2}  # six experts, four workers
    assert subject.facts.visits == _visits(mixture)


def _visits(folder: str) -> float:
    """Return how often a token calls experts, counted in a real forward."""
    visits = 0

    def count(experts: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        nonlocal visits
        visits += args[1].numel()

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(count)
    tokens = torch.arange(10)[None]
    model(tokens)
    return visits / tokens.numel()


@pytest.mark.parametrize(("more", "sizes"), [("", {None, 2}), ("--fsdp-shard-size 4", {4})])
def test_fsdp_is_tried_inside_of_nodes_too(more: str, sizes: set[int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"{TINY} --auto-strategy --world-size 4 --local-world-size 2 --device cpu --micro-batch-size 1 {more}"
    search = search_of(f"{flags} --fsdp-memory-optimization --no-checkpoint-activations", monkeypatch, 4)
    layouts = [
        candidate.layout for candidate in search.run().layouts if candidate.layout.world == candidate.layout.data
    ]
    assert {layout.shard_size for layout in layouts} == sizes
    for layout in layouts:
        (held,) = {held.parameters for held in states_by_worker(search.subject.shapes, layout)}
        whole = 4 * search.subject.facts.parameters
        assert held == pytest.approx(whole / (layout.shard_size or 4), rel=0.01)


def gpu(precision: str, tflops: float, attention: float, processors: int, **rates: float) -> Hardware:
    links = {"memory_bandwidth": 1e12, "intra_node": 200.0, "inter_node": 20.0, "host_link": 20.0, **rates}
    return Hardware("cuda", precision, 80.0, tflops, attention, processors, context_gb=1.5, sources={}, **links)


@pytest.mark.parametrize("sums", [1, 3])
@pytest.mark.parametrize("shard_size", [None, 2])
def test_groups_in_a_node_exchange_parameters_there(shard_size: int | None, sums: int) -> None:
    """Three micro batches gather 4 GB forward and backward, and one or all of them sum the gradients.

    Both workers of a node receive half of the 4 GB over the network. Or each receives half of them in its node, and
    sums its 2 GB with the other node, once. The first half of the parameters is gathered before anything computes.
    """
    layout = Layout(data=4, accumulation=3, partitioning="fsdp", shard_size=shard_size)
    hardware = gpu("fp32", 15.0, 15.0, 108)
    facts = CommunicationSizes(parameters=10**9, blocks=1, hidden=1, tokens=1)
    setting = MemoryOptions(reduces_each=sums > 1)
    seconds = predict_seconds(layout, setting, Trace(()), facts, hardware, local_world=2)
    within, between = (6.5 + sums) * 4e9 / 2, 2 * 2e9 / 2 / 20e9 if shard_size else 0.0
    assert seconds.data == pytest.approx(within / (200e9 if shard_size else 40e9) + between, rel=0.02)  # and delays
    assert seconds.hidden < 1e-3


def test_experts_that_no_other_worker_has_are_not_gathered() -> None:
    """Experts divided over all four workers have no copy. FSDP shards everything else over two."""
    layout = Layout(data=4, partitioning="fsdp", shard_size=2, experts=4)
    hardware = gpu("fp32", 15.0, 15.0, 108)

    def exchanged(experts: int) -> float:
        facts = CommunicationSizes(parameters=10**9 + experts, blocks=1, hidden=1, tokens=1, experts=experts)
        return predict_seconds(layout, MemoryOptions(), Trace(()), facts, hardware, local_world=4).data

    # Only the sum of the shards between the two groups counts all parameters.
    sums = [exchange_seconds(4 * size / 2, 2, 2, 4, hardware, ALL_REDUCE) for size in (3 * 10**9, 10**9)]
    assert exchanged(2 * 10**9) - exchanged(0) == pytest.approx(sums[0] - sums[1], rel=0.01)


def test_a_product_takes_as_long_as_its_waves_or_its_operands() -> None:
    hardware = gpu("bf16", 100.0, 50.0, 100, memory_bandwidth=1000.0)

    def seconds(rows: int, inner: int, columns: int) -> float:
        flops = 2 * rows * inner * columns
        return product_seconds(Product(1, rows, inner, columns, 2, 0, flops), hardware) - KERNEL_SECONDS

    full = seconds(2560, 8192, 1280)  # 100 tiles, one for each multiprocessor
    assert full == pytest.approx(2 * 2560 * 8192 * 1280 / 100e12)
    assert 1.3 * full < seconds(2561, 8192, 1280) < 2 * full  # a second wave, of smaller tiles
    matrix = replace(hardware, memory_bandwidth=100.0)
    row = product_seconds(Product(1, 1, 8192, 8192, 2, 0, 2 * 8192 * 8192), matrix)
    assert row == pytest.approx(8192 * 8192 * 2 / 100e9, rel=0.01)  # it reads the matrix
    attention = Product(1, 4096, 128, 4096, 2, 0, 10**12, is_attention=True)
    assert product_seconds(attention, hardware) == pytest.approx(10**12 / 50e12, rel=0.01)


def test_unaligned_heads_use_no_tensor_cores() -> None:
    """BLOOM's diary: with heads of 108 elements instead of 216, the same operations took a third longer."""
    found = find_hardware(Environment(device="cuda", device_kind="a100-80gb"), "fp16")
    hardware = replace(found, memory_bandwidth=1e9)

    def seconds(width: int, batch: int = 64) -> float:
        return product_seconds(Product(batch, 2048, width, 2048, 2, 0, 2 * batch * 2048**2 * width), hardware)

    slower = seconds(108) / seconds(104)
    # 108 elements are 4 % more than 104. Tensor cores have 16 times the peak of fp32 units.
    assert slower == pytest.approx(108 / 104 * 312 * 0.8 / (19.5 * 0.92), rel=0.02)
    assert seconds(108, batch=1) < 2 * seconds(104, batch=1)
    wide = Product(64, 2048, 108, 2048, 4, 0, 10**12)
    assert product_seconds(wide, hardware) == product_seconds(replace(wide, inner=104), hardware)  # no 16 bits


ON_AN_H200 = {
    # seconds of a step in docs/benchmarks.md, which nothing was fitted to
    "--model-type gpt2 --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024": (16, 0.0779),
    "--model-type bert --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 512": (32, 0.0507),
    "--model-type gpt2 --num-layers 24 --hidden-size 2048 --num-attention-heads 32 --seq-length 1024": (8, 0.222),
}


@pytest.mark.parametrize("model", by_default(list(ON_AN_H200)[:1], ON_AN_H200))
def test_a_step_of_one_gpu_takes_what_was_measured(model: str) -> None:
    batch, measured = ON_AN_H200[model]
    where = "--device-kind h200-141gb --world-size 1 --mixed-precision bf16 --tokens 1000000"
    told = planned(f"{model} {where} --micro-batch-size {batch} --no-checkpoint-activations")
    assert told["prediction"]["step_seconds"] == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(("divides", "states"), [(False, 4 * 3 + 16 * 3 / 4), (True, 20 * 3 / 4)])
def test_a_divided_sequence_has_fewer_hidden_states(divides: bool, states: float) -> None:
    """The 4 ends of products in a block are whole hidden states without it. 16 more are divided by the tensor size."""
    hardware = gpu("bf16", 100.0, 50.0, 0, memory_bandwidth=1000.0)
    tokens, hidden, tensor = 128, 64, 4
    state = tokens * hidden * 2
    ends = [(hidden, 3 * hidden // tensor), (hidden // tensor, hidden), (hidden, hidden), (hidden, hidden)]
    rest = state * 16 // tensor // 4
    products = tuple(Product(1, tokens, k, n, 2, state + rest, 1, times=3) for k, n in ends)
    sizes = {"peak_beside_earlier": 0, "end": 0}
    trace = Trace((Phase("forward", ("", 0), **sizes, products=products),))
    facts = CommunicationSizes(parameters=0, blocks=1, hidden=hidden, tokens=tokens)
    layout = Layout(tensor=tensor, sequence_parallel=divides)
    found = predict_seconds(layout, MemoryOptions("bf16", fuses=True), trace, facts, hardware, 4)
    assert found.memory == pytest.approx(1.9 * states * state / 1000e9)


def test_stages_wait_for_the_slowest() -> None:
    """The head of a large vocabulary belongs to the last stage, which then has fewer blocks."""
    hardware = gpu("bf16", 100.0, 50.0, 0)
    block = Product(1, 1, 1, 1, 2, 0, 10**12, times=8)
    sizes = {"peak_beside_earlier": 0, "end": 0}
    trace = Trace(
        (
            Phase("forward", ("", 0), **sizes, products=(block,)),
            Phase("head", None, **sizes, products=(replace(block, times=2),)),
        )
    )
    facts = CommunicationSizes(parameters=1, blocks=8, hidden=1, tokens=1)

    def seconds(stages: tuple[int, ...]) -> Timing:
        layout = Layout(pipeline=2, accumulation=4)
        return predict_seconds(layout, MemoryOptions("bf16"), trace, facts, hardware, 2, stages)

    equal, balanced = seconds((4, 4)), seconds((5, 3))
    assert equal.products == pytest.approx(4 * 6 * 0.01, rel=0.01)
    assert balanced.products == pytest.approx(4 * 5 * 0.01, rel=0.01)
    assert equal.bubble == pytest.approx(5 * 0.01, rel=0.01)  # the mean of both


@pytest.mark.parametrize("transfer", [0.05, 0.2])
@pytest.mark.parametrize("virtual", [1, 2, 4])
@pytest.mark.parametrize("pipeline", [4, 8])
def test_a_pipeline_takes_at_least_its_simulated_seconds(pipeline: int, virtual: int, transfer: float) -> None:
    """A step is at most a fifth shorter than predicted. Links that shared a group would make it longer."""
    hardware = gpu("bf16", 100.0, 50.0, 0)
    stages, microbatches = pipeline * virtual, 32
    second = Product(1, 1, 1, 1, 2, 0, 10**14 // virtual)  # of a worker's forward
    phases = (
        Phase(kind, ("", 0), peak_beside_earlier=0, end=0, products=(replace(second, times=times * stages),))
        for kind, times in (("forward", 1), ("backward", 2))
    )
    sent = int(transfer * hardware.intra_node * 1e9)
    facts = CommunicationSizes(parameters=1, blocks=stages, hidden=sent // 2, tokens=1)
    layout = Layout(pipeline=pipeline, accumulation=microbatches, virtual=virtual)
    predicted = predict_seconds(layout, MemoryOptions("bf16"), Trace(tuple(phases)), facts, hardware, pipeline).total
    simulated = {of: step_seconds(pipeline, virtual, microbatches, transfer, of) for of in (of_link, of_all)}
    assert simulated[of_link] <= predicted * 1.001 <= 1.2 * simulated[of_link]
    assert simulated[of_all] > (1.04 if virtual > 1 else 1.0) * simulated[of_link]


OFFLOADING = f"{TINY} --auto-strategy --device cuda --micro-batch-size 32 --no-checkpoint-activations"


@pytest.mark.longer
def test_activations_go_to_the_host_where_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    search = search_of(OFFLOADING, monkeypatch, 80)
    needed = {}
    for offload in (False, True):
        layout = Layout(micro_batch=32, offload=offload)
        setting = search._setting(layout)
        assert isinstance(setting, MemoryOptions)
        needed[offload] = search._needed_gb(predict(search.subject.shapes, layout, setting).total)
    assert needed[True] < needed[False]

    def found(flags: str, gigabytes: float) -> tuple[set[bool], set[bool]]:
        result = search_of(f"{OFFLOADING} {flags}", monkeypatch, gigabytes).run()
        lines = reasons(result, search.hardware) if result.layouts else []
        assert any("no layout fits without" in line for line in lines) is (
            bool(result.layouts) and gigabytes < needed[False] and not flags
        )
        return {c.layout.offload for c in result.layouts}, {r.layout.offload for r in result.rejected}

    assert found("", needed[False] * 1.001) == ({False}, set())
    assert found("", sum(needed.values()) / 2) == ({True}, {False})
    assert found("", needed[True] * 0.999) == (set(), {False, True})
    assert found("--no-offload-activations", sum(needed.values()) / 2) == (set(), {False})
    assert found("--offload-activations", 80) == ({True}, set())


@pytest.mark.longer
def test_what_the_user_gives_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"{TINY} --auto-strategy --world-size 4 --max-global-batch-size 8 --device cpu"
    given = "--micro-batch-size 2 --zero-1-memory-optimization --checkpoint-activations"
    found = search_of(f"{flags} {given}", monkeypatch, 4).run()
    assert found.layouts
    assert {(c.layout.micro_batch, c.layout.partitioning, c.layout.recompute) for c in found.layouts} == {
        (2, "zero-1", "full")
    }


@pytest.mark.longer
def test_layouts_stand_in_the_order_of_their_speed() -> None:
    layouts = of_four().layouts
    for better, worse in itertools.pairwise(layouts):
        assert better.samples_per_second * 1.031 > worse.samples_per_second
    plain = next(c for c in layouts if c.layout.partitioning == "none" and c.layout.recompute == "none")
    again = next(c for c in layouts if c.layout == Layout(**{**vars(plain.layout), "recompute": "full"}))
    some = next(c for c in layouts if c.layout == Layout(**{**vars(plain.layout), "recompute": "selective"}))
    assert again.samples_per_second < some.samples_per_second < plain.samples_per_second


@pytest.mark.longer
def test_a_published_job_gets_a_layout() -> None:
    model = "--model-type gpt2 --num-layers 48 --hidden-size 6144 --num-attention-heads 64 --seq-length 2048"
    workers = "--world-size 16 --local-world-size 8 --tensor-model-parallel-size 8"
    batch = "--max-global-batch-size 32 --micro-batch-size 1 --use-distributed-optimizer"
    flags = f"--auto-strategy --device cuda --mixed-precision bf16 {model} {workers} {batch}"
    told = planned(flags, 80)
    best = told["layouts"][0]
    assert best["tensor"] * best["pipeline"] * best["data"] == 16
    assert best["global_batch_size"] == 32
    assert best["memory_gb"]["needed"] <= 80
    kinds = ("parameters", "gradients", "optimizer", "buffers", "activations")
    assert sum(best["memory_gb"][kind] for kind in kinds) == pytest.approx(best["memory_gb"]["total"], abs=1e-4)
    piped = next(layout for layout in told["layouts"] if layout["pipeline"] == 2)
    assert piped["bubble"] == pytest.approx(1 / (piped["virtual"] * piped["accumulation"] + 1), abs=1e-6)
    assert told["assumed"]


def test_nothing_fits_is_said_with_its_reason(monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    monkeypatch.setenv("DEVICE_MEMORY_GB", "0.81")
    flags = f"{TINY} --auto-strategy --world-size 2 --device cpu"
    told = planned(flags, status=1)
    assert told["ok"] is False
    assert all("memory" in r["constraint"] or "RF" in r["constraint"] for r in told["rejected"])
    config, place, _ = plan_request(flags.split())
    with says(command.NothingFits):
        command.best_layout(config, place)


def test_a_memory_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    monkeypatch.setenv("DEVICE_MEMORY_GB", "much")
    says.command(f"plan --auto-strategy {TINY}")


@pytest.mark.longer
def test_what_is_not_predicted_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DEVICE_MEMORY_GB", "4")
    flags = f"{TINY} --auto-strategy --device cpu --micro-batch-size 1"
    told = {more: planned(f"{flags} {more}")["not_predicted"] for more in ("", "--torch-compile")}
    assert told[""] == []
    assert [(entry["switch"], *entry["kinds"]) for entry in told["--torch-compile"]] == [
        ("torch-compile", "activations"),
    ]
    config, place, _ = plan_request(f"{flags} --torch-compile".split())
    command.best_layout(config, place)
    assert "not predicted: torch-compile: activations: the compiler fuses" in capsys.readouterr().err
