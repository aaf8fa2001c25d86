"""Memory that is predicted for a script's own model, data and loss, and for a frozen copy, compared with runs."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer_templates import Data, Trainer
from rapidformer_templates.engines.assembly import Assembly
from rapidformer_templates.engines.recipe import OptimizerSpec
from rapidformer_templates.errors import ConfigError, ModelError
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.deepspeed_file.settings import bucket_sizes
from rapidformer_templates.planning.environment import detect
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.run.planned_model import HookModel, engine_memory, planned_memory
from rapidformer_templates.switches.auto_strategy.layouts import (
    Layout,
    MasterWeights,
    MemoryOptions,
    layout_of,
    memory_options_of,
)
from rapidformer_templates.switches.auto_strategy.memory import predict, states_by_worker
from rapidformer_templates.switches.auto_strategy.model_of_flags import FlagModel, Subject
from rapidformer_templates.switches.auto_strategy.model_shapes import ModelShapes, Variant
from rapidformer_templates.switches.auto_strategy.state_bytes import StateBytes, StateOptions
from rapidformer_templates.switches.auto_strategy.tracing import LiveStorages
from rapidformer_templates.system.workers import Workers
from tests.support.messages import Says
from tests.support.preference_runs import make, pairs
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

WIDTH, LENGTH, WORDS = 64, 48, 300
STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.drop(self.down(functional.gelu(self.up(self.norm(hidden)))))


class Tagger(nn.Module):
    """A model that transformers does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.table(words)
        for block in self.blocks:
            hidden = block(hidden)
        scores: torch.Tensor = self.head(hidden)
        return scores


class TaggerJob(Trainer):
    """Batches are tuples, and the loss is a sum with its number of targets."""

    def build_data(self) -> Data:
        draw = torch.Generator().manual_seed(0)
        rows = torch.randint(WORDS, (32, LENGTH), generator=draw)
        return Data(train=list(rows), collate=lambda rows: (torch.stack(rows), torch.stack(rows).flip(1)))

    def build_model(self) -> nn.Module:
        return Tagger()

    def compute_loss(self, model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
        words, tags = batch
        loss = functional.cross_entropy(model(words).flatten(0, 1), tags.flatten(), reduction="sum")
        return loss, tags.numel()

    def count_targets(self, batch: tuple[torch.Tensor, torch.Tensor]) -> int:
        return batch[1].numel()


class MeasuredJob(TaggerJob):
    """Measures the peak of each step."""

    def build_data(self) -> Data:
        self.peaks: list[int] = []
        self.watching = ExitStack()
        self.live = self.watching.enter_context(LiveStorages())
        self.watching.enter_context(self.live.following_resizes())
        return super().build_data()

    def on_step_end(self, step: int, result: Any) -> None:
        self.peaks.append(self.live.peak)
        self.live.reset_peak()
        if step == STEPS:
            self.watching.close()


class OwnOptimizer(TaggerJob):
    def build_optimizer(self) -> OptimizerSpec:
        return OptimizerSpec(KeepsThree, {"lr": 1e-3})


class MeasuredOptimizer(OwnOptimizer, MeasuredJob):
    """Measures the peak of each step with this optimizer."""


class KeepsThree(torch.optim.Optimizer):
    """An optimizer that no table of the planner describes."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    for name in ("one", "two", "three"):
                        self.state[parameter].setdefault(name, torch.zeros_like(parameter))
                    parameter.add_(parameter.grad, alpha=-group["lr"])


def run(
    workers: Workers | None, words: list[str], kind: type[MeasuredJob] = MeasuredJob
) -> tuple[list[StateBytes], int]:
    """Return the states of each rank according to the receipts, and the usual peak of this worker."""
    job = kind(words)
    kinds = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes")
    held = job.fit()["receipts"]["held_bytes_by_rank"]
    return [StateBytes(*(rank[kind] for kind in kinds)) for rank in held], sorted(job.peaks[1:])[1]


SHARDED = (2, "--micro-batch-size 8 --use-distributed-optimizer")
CASES = [
    SHARDED,
    (1, "--micro-batch-size 4 --global-batch-size 8 --checkpoint-activations"),
    (1, "--micro-batch-size 8 --mixed-precision bf16 --keep-fp32-parameters"),
    (2, "--micro-batch-size 4 --global-batch-size 16 --pipeline-model-parallel-size 2"),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("workers", "flags"), by_default([SHARDED], CASES))
def test_a_run_of_own_hooks_needs_what_is_predicted(workers: int, flags: str) -> None:
    words = f"--device cpu --lr 1e-3 --train-iters {STEPS} --no-save {flags}".split()
    job = TaggerJob(words)
    plan = resolve(job.config, detect("Trainer", "test", device="cpu", world_size=workers))
    shapes = Subject(job.config, plan, gpu=False, source=HookModel(job, FlagModel)).shapes
    assert shapes.repeats  # three of the six blocks are traced
    layout, options = layout_of(plan), memory_options_of(plan, shapes.width)

    ranks = [run(None, words)] if workers == 1 else run_in_workers(workers, run, words)
    assert states_by_worker(shapes, layout, options) == ranks[0][0]
    assert predict(shapes, layout, options).total == pytest.approx(max(peak for _, peak in ranks), rel=0.005)


OWN_OPTIMIZERS = [
    SHARDED,
    (1, "--micro-batch-size 8 --mixed-precision bf16 --checkpoint-activations"),
    (2, "--micro-batch-size 4 --global-batch-size 16 --pipeline-model-parallel-size 2"),
    (2, "--micro-batch-size 4 --fsdp-memory-optimization"),
    (2, "--micro-batch-size 4 --oss-sdp-memory-optimization"),
]


@pytest.mark.longer
@pytest.mark.distributed
@pytest.mark.parametrize(("workers", "flags"), by_default([SHARDED], OWN_OPTIMIZERS))
def test_a_run_with_an_own_optimizer_needs_what_its_engine_needs_on_fake_tensors(workers: int, flags: str) -> None:
    words = f"--device cpu --lr 1e-3 --train-iters {STEPS} --no-save {flags}".split()
    job = OwnOptimizer(words)
    plan = resolve(job.config, detect("Trainer", "test", device="cpu", world_size=workers))
    memory = planned_memory(job, HookModel(job, FlagModel), "build_optimizer()", plan)

    kind = MeasuredOptimizer
    ranks = [run(None, words, kind)] if workers == 1 else run_in_workers(workers, run, words, kind)
    held = ranks[0][0]
    assert StateBytes(memory.parameters, memory.gradients, memory.optimizer) in held
    assert memory.total == pytest.approx(max(peak for _, peak in ranks), rel=0.01)


@pytest.mark.longer
@pytest.mark.parametrize("more", [[], ["--checkpoint-activations"]], ids=["", "recomputed"])
def test_the_engine_of_a_plan_for_gpus_uses_their_kernels(more: list[str], tmp_path: Path) -> None:
    """On a CPU, attention with dropout keeps its scores and masks. On a GPU it does not."""
    GPT2Config(n_layer=3, n_embd=WIDTH, n_head=4, vocab_size=WORDS).save_pretrained(tmp_path)
    job = LossJob(["--lr", "1", "--no-save", "--pretrained-model-name-or-path", str(tmp_path), *more])
    source = HookModel(job, FlagModel)
    peaks = {}
    for device in ("cpu", "cuda"):
        plan = resolve(job.config, detect("Trainer", "test", device=device, world_size=1))
        shapes = Subject(job.config, plan, gpu=device == "cuda", source=source).shapes
        peaks[device] = engine_memory(job, plan, source).peak
        expected = predict(shapes, layout_of(plan), memory_options_of(plan, shapes.width)).total
        assert peaks[device] == pytest.approx(expected, rel=0.001)
    assert peaks["cuda"] < 0.99 * peaks["cpu"]


def test_layouts_that_an_own_optimizer_cannot_be_planned_for_are_refused(says: Says) -> None:
    job = OwnOptimizer(["--device", "cpu", "--lr", "1", "--no-save", "--zero-2-memory-optimization"])
    plan = resolve(job.config, detect("Trainer", "test", device="cpu", world_size=2))
    with says(ConfigError):
        planned_memory(job, HookModel(job, FlagModel), "build_optimizer()", plan)


class LossJob(Trainer):
    """The model is the default one, and the batches and the loss are not."""

    def build_data(self) -> Data:
        rows = torch.zeros((32, LENGTH), dtype=torch.long)
        return Data(train=list(rows), collate=lambda rows: {"input_ids": torch.stack(rows)})

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).logits.square().mean()
        return loss


def test_a_default_model_needs_no_weights(tmp_path: Path) -> None:
    GPT2Config(n_layer=5, n_embd=WIDTH, n_head=4, vocab_size=WORDS).save_pretrained(tmp_path)
    job = LossJob(["--device", "cpu", "--pretrained-model-name-or-path", str(tmp_path)])
    subject = Subject(job.config, gpu=False, source=HookModel(job, FlagModel))
    assert subject.facts.tokens == LENGTH
    assert subject.shapes.parameters == Subject(job.config, gpu=False).shapes.parameters
    head = 2 * 2 * LENGTH * WORDS * WIDTH * 3  # logits of two samples, and their two products in the backward
    turn = [phase for phase in subject.shapes.trace(Variant(2)).phases if phase.name in ("head", "turn", "reduce")]
    assert sum(phase.flops for phase in turn) == head


class ValueJob(TaggerJob):
    def build_model(self) -> nn.Module:
        model = Tagger()
        nn.init.constant_(model.head.bias, float(model.head.weight.detach().mean()))
        return model


def test_a_hook_that_reads_values_is_named(says: Says) -> None:
    job = ValueJob(["--device", "cpu"])
    with says(ModelError):
        Subject(job.config, gpu=False, source=HookModel(job, FlagModel))


KEPT_WHOLE = "stage3_param_persistence_threshold"
MASTERS = MemoryOptions("bf16", masters=MasterWeights())
ENGINES: dict[str, tuple[tuple[str, ...], str, MemoryOptions]] = {
    "none": ((), "none", MemoryOptions()),
    "none, weights of 16 bits": (("--mixed-precision", "bf16"), "none", MASTERS),
    "fsdp": (("--fsdp-memory-optimization",), "fsdp", MemoryOptions()),
    "zero-3": (
        ("--zero-3-memory-optimization",),
        "zero-3",
        MemoryOptions(how=StateOptions(kept_whole=bucket_sizes(32, "cpu")[KEPT_WHOLE])),
    ),
}
"""By name: flags, and the partitioning and setting that the planner derives from them."""


def bytes_of(model: torch.nn.Module) -> int:
    """Return the local bytes of its parameters: whole parameters, shards, and partitions of ZeRO-3."""
    held = 0
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter.data
        held += local.nbytes + (parameter.ds_tensor.nbytes if hasattr(parameter, "ds_tensor") else 0)
    return held


def measured(workers: Any, flags: list[str]) -> dict[str, int]:
    found = {}
    for name, (more, _, _) in ENGINES.items():
        job = Trainer([*flags, *more, "--task", "preference", "--no-save"])
        job.fit()
        with job.task.reference(None) as copy:  # type: ignore[attr-defined]
            found[name] = bytes_of(copy)
    return found


@pytest.mark.longer
@pytest.mark.distributed
def test_the_copy_is_divided_as_it_is_predicted(gpt_folder: Path, tmp_path: Path) -> None:
    flags = make(tmp_path, gpt_folder, pairs(4))
    config = GPT2Config.from_pretrained(tmp_path / "model")
    assert config.n_embd == 32
    ranks: list[Mapping[str, int]] = run_in_workers(2, measured, [*flags, "--train-iters", "1"])
    alone, beside = (
        ModelShapes(lambda blocks: Assembly(GPT2LMHeadModel(config)), lambda samples: {}, has_copy=copied)
        for copied in (False, True)
    )
    for name, (_, partitioning, setting) in ENGINES.items():
        layout = Layout(1, 1, 2, partitioning=partitioning)
        more = zip(states_by_worker(beside, layout, setting), states_by_worker(alone, layout, setting), strict=True)
        assert [b.parameters - a.parameters for b, a in more] == [rank[name] for rank in ranks], name
        with_copy, without = (states_by_worker(model, layout, setting) for model in (beside, alone))
        assert [held.optimizer for held in with_copy] == [held.optimizer for held in without]


@pytest.mark.parametrize(
    ("flags", "copied", "rows"),
    [
        ({"task": "preference"}, True, 4),
        ({"task": "preference", "precompute_reference": True}, False, 4),
        ({"task": "preference", "preference_loss": "simpo"}, False, 4),
        ({"task": "preference", "preference_loss": "kto"}, True, 2),
        ({"task": "reward"}, False, 4),
        ({"task": "causal_lm"}, False, 2),
    ],
)
def test_the_planner_sees_what_a_task_needs(flags: dict[str, Any], copied: bool, rows: int) -> None:
    sizes = {"model_type": "gpt2", "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 8}
    subject = Subject(RunConfig().replace("command line", **flags, **sizes), gpu=False)
    assert subject.shapes.has_copy == copied
    assert len(subject.shapes.batch(2)["input_ids"]) == rows
