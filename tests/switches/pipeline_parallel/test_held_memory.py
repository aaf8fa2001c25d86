"""Memory of a stage with micro batches in flight: one of four stages runs in this process, the others are silent."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.engines.forwards import Checkpointed
from rapidformer_templates.engines.recipe import OptimizerSpec
from rapidformer_templates.models.blocks import find_blocks
from rapidformer_templates.planning.plan import Plan, Sizes
from rapidformer_templates.switches.auto_strategy.layouts import Layout, MemoryOptions
from rapidformer_templates.switches.auto_strategy.memory import of_stage, variant_of
from rapidformer_templates.switches.auto_strategy.stage_memory import Stage
from rapidformer_templates.switches.auto_strategy.tracing import LiveStorages
from rapidformer_templates.switches.layout import pipeline_engine
from rapidformer_templates.switches.layout.pipeline import cut_into_stages
from rapidformer_templates.switches.layout.pipeline_engine import PipelineEngine
from rapidformer_templates.switches.layout.schedule import Kind
from rapidformer_templates.system.workers import Workers
from tests.support.model_shapes import LENGTH, MODELS, batch, shapes

pytestmark = pytest.mark.longer

STAGES, BLOCKS, SAMPLES, WIDTH = 4, 8, 8, 32


class _Transfer:
    """A transfer like gloo's: only a wait shows whether it has ended."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return False


@contextmanager
def silent_neighbours(rank: int) -> Iterator[Workers]:
    """Set up a pipeline worker whose other workers do not exist. It receives random numbers."""
    draw = torch.Generator().manual_seed(0)

    def receive(tensor: torch.Tensor, **_: Any) -> _Transfer:
        tensor.normal_(generator=draw)
        return _Transfer()

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=STAGES)
    try:
        mesh = init_device_mesh("cpu", (STAGES, 1, 1), mesh_dim_names=("pipeline", "copies", "tensor"))
        silent = SimpleNamespace(isend=lambda tensor, **_: _Transfer(), irecv=receive)
        with mock.patch.object(pipeline_engine, "dist", silent):
            yield Workers(rank, rank, STAGES, torch.device("cpu"), 1, STAGES, mesh)
    finally:
        dist.destroy_process_group()


class Held:
    """Two steps of one stage, measured in the second.

    Attributes:
        peak: peak of live bytes.
        after_forwards: live bytes after each forward.
        gradients: gradients of its parameters by name.
    """

    def __init__(
        self, name: str, rank: int, precision: str = "fp32", recompute: str = "none", microbatches: int = 8
    ) -> None:
        torch.manual_seed(1)
        self.after_forwards: list[int] = []
        self.gradients: dict[str, torch.Tensor] = {}
        rows = [MicroBatch(batch(SAMPLES), list(range(SAMPLES)), SAMPLES * LENGTH) for _ in range(microbatches)]
        with silent_neighbours(rank) as workers, LiveStorages() as live:
            engine = _engine(name, workers, precision, recompute)
            if rank:
                engine.links._known[rank - 1, pipeline_engine._shapes(rows[0].batch)] = (
                    torch.float32,
                    (SAMPLES, LENGTH, WIDTH),
                )
            engine.step(rows, 1e9).run(1.0)
            live.reset_peak()
            engine.before_update.append(lambda: self._keep_gradients(engine))
            with self._watching_forwards(live):
                engine.step(rows, 1e9).run(1.0)
        self.peak = live.peak

    @contextmanager
    def _watching_forwards(self, live: LiveStorages) -> Iterator[None]:
        do = pipeline_engine.PipelineStep.do

        def watched(step: Any, action: Any) -> None:
            do(step, action)
            if action.kind is Kind.SEND_FORWARD:
                self.after_forwards.append(live.live)

        with mock.patch.object(pipeline_engine.PipelineStep, "do", watched):
            yield

    def _keep_gradients(self, engine: PipelineEngine) -> None:
        self.gradients = {name: p.grad.clone() for name, p in engine.model.named_parameters() if p.grad is not None}


def _engine(name: str, workers: Workers, precision: str, recompute: str) -> PipelineEngine:
    plan = Plan("Trainer", precision=precision, sizes=Sizes(world=STAGES, pipeline=STAGES))
    model = MODELS[name](BLOCKS)
    model.loss_type = "ForCausalLM"
    options = SimpleNamespace(virtual_pipeline_size=1, pipeline_stages=None)
    building = Building(options, plan, workers, lambda model: model(**batch(1)).loss)
    assembly = Assembly(model)
    cut_into_stages(assembly, building)
    for block in assembly.blocks.values() if recompute != "none" else ():
        block.forward = Checkpointed(block.forward, selective=recompute == "selective")
    engine = PipelineEngine(plan, workers, clip_grad=1.0)
    engine.setup(assembly, OptimizerSpec(torch.optim.AdamW, {"lr": 1e-6}), lambda model, rows: model(**rows).loss)
    return engine


same_shapes = cache(shapes)
"""The shapes of a model, with the traces of all ranks."""


def predicted(name: str, rank: int, precision: str, recompute: str) -> int:
    layout = Layout(pipeline=STAGES, micro_batch=SAMPLES, accumulation=8, recompute=recompute)
    setting, model = MemoryOptions(precision), same_shapes(name, BLOCKS)
    stage = Stage(model, layout, rank, setting)
    return of_stage(stage, variant_of(layout, setting), layout.accumulation, exact=True).total


@pytest.mark.parametrize(("precision", "recompute"), [("fp32", "none"), ("bf16", "none"), ("bf16", "full")])
def test_a_stage_holds_what_the_planner_predicts(precision: str, recompute: str) -> None:
    for rank in (0, 1, STAGES - 1):
        held = Held("llama", rank, precision, recompute).peak
        assert predicted("llama", rank, precision, recompute) == pytest.approx(held, rel=0.03), rank


@pytest.mark.parametrize("rank", [1, STAGES - 1])
def test_transfers_do_not_pile_up(rank: int) -> None:
    few, many = (Held("gpt2", rank, microbatches=count).peak for count in (8, 20))
    own_loss = 4 if rank == STAGES - 1 else 0  # kept until the step is known to be finite
    assert many - few == 12 * (batch(SAMPLES)["input_ids"].nbytes + own_loss)


def test_micro_batches_share_the_copies_of_the_weights() -> None:
    """Four micro batches in flight each had their own copy. They compute the same with one shared copy."""
    shared = Held("llama", 0, "bf16")
    with mock.patch.object(pipeline_engine, "checkpointed_forward"):
        apart = Held("llama", 0, "bf16")
    blocks = find_blocks(MODELS["llama"](BLOCKS // STAGES)).values()
    weights = sum(p.numel() for block in blocks for p in block.parameters() if p.ndim == 2)
    assert apart.peak - shared.peak == pytest.approx((STAGES - 1) * 2 * weights, rel=0.2)
    assert any(gradient.any() for gradient in shared.gradients.values())
    for name, gradient in apart.gradients.items():
        torch.testing.assert_close(shared.gradients[name], gradient, rtol=0, atol=0)
