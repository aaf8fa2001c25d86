"""A model that is built in shares has the bits of one that is built whole, and a worker never holds much more."""

import copy
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rapidformer_templates import Trainer
from rapidformer_templates.commands.demo import demo_model_folder
from rapidformer_templates.engines.boxes import Parts
from rapidformer_templates.engines.construction import ModelUnderConstruction
from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.gather_on_use import divided_construction
from rapidformer_templates.models.loading import build_model
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.registry import load_object
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.system.workers import Workers
from tests.support.allocations import measured_allocations
from tests.support.combinations import place
from tests.support.jobs import JOBS, ClassJob, WideJob
from tests.support.machine import why_no_nvme
from tests.support.parity import Trained, reference, trained, weights_apart
from tests.support.requests import config_of
from tests.support.selection import by_default, few
from tests.support.worker_pool import run_in_workers

LEAST = 8 << 10
"""Bytes of the test models that may always be whole: less than one of their larger parameters."""


class Unusual(nn.Module):
    """Initializes its parameters in ways that models of users do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))
        nn.init.orthogonal_(self.layers[0].weight)
        with torch.no_grad():
            self.layers[1].weight[3].zero_()  # through a view
            self.layers[1].weight.mul_(2.0)
            self.layers[2].weight.copy_(self.layers[1].weight.t())
        self.layers[2].weight.data[:, 5] = 7.0
        self.layers[3].weight.data = torch.eye(48)  # another storage
        self.layers[0].weight.detach().numpy()[0, 0] = 3.0
        self.large = nn.Parameter(torch.randn(3, 48, 48) * 0.02)
        self.copied = copy.deepcopy(self.layers[1])
        self.tied = nn.Linear(48, 48, bias=False)
        self.tied.weight = self.copied.weight
        self.register_buffer("total", self.large.sum())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.copied, self.tied):
            inputs = torch.tanh(layer(inputs))
        return (inputs @ self.large[1] @ self.large[0]).sum()


def _gpt2() -> nn.Module:
    sizes = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": 257}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def _whole_bits(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _input_of(model: nn.Module) -> torch.Tensor:
    return torch.arange(24).reshape(2, 12) if hasattr(model, "config") else torch.ones(2, 48)


def _loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model(input_ids=inputs, labels=inputs).loss if hasattr(model, "config") else model(inputs)


def _build_both(workers: Workers, build: Callable[[], nn.Module]) -> tuple[int, int]:
    """Build a model in shares and whole, and compare weights, loss and gradients. Returns divisions and gathers."""
    torch.manual_seed(3)
    whole = build().eval()
    torch.manual_seed(3)
    construction = ModelUnderConstruction()
    construction.least_whole = LEAST
    with divided_construction(construction):
        model = build().eval()
        construction.divide_all()
        with construction.paused():  # otherwise a look at a storage gathers it
            divided = [p for p in model.parameters() if p.untyped_storage().nbytes() == 0]
        assert sum(p.numel() for p in divided) > 0.8 * sum(p.numel() for p in model.parameters())
        loss = _loss(model, _input_of(model))
        loss.backward()
        construction.finish()
    expected = _loss(whole, _input_of(whole))
    expected.backward()
    assert torch.equal(loss, expected)
    for (name, wanted), (other, got) in zip(_whole_bits(whole).items(), _whole_bits(model).items(), strict=True):
        assert name == other
        assert torch.equal(wanted, got), name
    for (name, wanted), got in zip(whole.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(cast(torch.Tensor, wanted.grad), cast(torch.Tensor, got.grad)), name
    return construction.divisions, construction.gathers


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("build", "world"),
    by_default([(Unusual, 3), (_gpt2, 2)], [(build, world) for build in (Unusual, _gpt2) for world in (2, 3)]),
)
def test_a_divided_model_has_the_bits_of_a_whole_one(build: Callable[[], nn.Module], world: int) -> None:
    counts = run_in_workers(world, _build_both, build)
    assert len(set(counts)) == 1  # the same collectives on every worker
    divisions, gathers = counts[0]
    assert min(divisions, gathers) > 0


PLACEMENTS: list[Placement] = [Shard(0), Shard(1), Shard(2), _StridedShard(1, split_factor=3), Replicate()]


def _parts_of(workers: Workers, shape: tuple[int, ...], *, is_whole: bool) -> int:
    """Compare this worker's parts with parts of a whole tensor. Returns the number of gathers."""
    torch.manual_seed(1)
    whole = torch.randn(shape)
    construction = ModelUnderConstruction()
    with divided_construction(construction):
        module = nn.Module()
        torch.manual_seed(1 + workers.rank)  # the first worker's values count
        module.weight = nn.Parameter(torch.randn(shape))
        if not is_whole:
            construction.divide_all()
        for placement in PLACEMENTS:
            parts = Parts((placement,), (workers.world,), tuple((rank,) for rank in range(workers.world)))
            part = construction.part_of(module.weight, parts)
            assert part is not None
            assert torch.equal(part, parts.take(whole, workers.rank)), placement
        row = module.weight[0]
        assert construction.part_of(row, Parts((Replicate(),), (1,), ((0,),) * workers.world)) is None
    return construction.gathers


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("is_whole", "world"),
    by_default([(False, 4), (True, 2)], [(is_whole, world) for is_whole in (False, True) for world in (2, 4)]),
)
def test_a_worker_gets_its_part_of_a_tensor_that_nobody_gathers(is_whole: bool, world: int) -> None:
    for shape in [(10, 36, 8), (3, 12, 100)]:  # the shares end inside rows
        assert run_in_workers(world, partial(_parts_of, is_whole=is_whole), shape) == [0] * world


FLAGS = "--train-iters 3 --global-batch-size 8"
EXPERTS, STAGES, TENSOR = "--num-experts 2", "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2"
LAYOUTS = {
    "fsdp": (2, "--micro-batch-size 1 --fsdp-memory-optimization"),
    "tensor": (2, f"--micro-batch-size 8 {TENSOR} --sequence-parallel"),
    "experts": (2, f"--micro-batch-size 4 {EXPERTS} --expert-model-parallel-size 2"),
    "stages": (2, f"--micro-batch-size 8 {STAGES} --pipeline-stages 1,1"),
    "stages with replicas": (4, f"--micro-batch-size 4 {STAGES} --pipeline-stages 1,1 --use-distributed-optimizer"),
    "stages with tensors": (4, f"--micro-batch-size 8 {STAGES} --pipeline-stages 1,1 {TENSOR}"),
    "stages with experts": (
        4,
        f"--micro-batch-size 4 {EXPERTS} {STAGES} --pipeline-stages 1,1 --expert-model-parallel-size 2",
    ),
}
"""World size and flags of each layout that divides parameters."""


def _trained_in_shares(workers: Workers, template: Trainer) -> tuple[Trained, int]:
    """Train with everything divided while it is built. Return also the number of divisions."""
    constructions: list[ModelUnderConstruction] = []
    create = ModelUnderConstruction.__init__

    def record(self: ModelUnderConstruction, *arguments: object) -> None:
        create(self, *arguments)  # type: ignore[arg-type]
        constructions.append(self)

    with (
        mock.patch.object(ModelUnderConstruction, "least_whole", LEAST),
        mock.patch.object(ModelUnderConstruction, "__init__", record),
    ):
        run = trained(template)
    return run, sum(one.divisions for one in constructions)


def _train(workers: Workers, job: str, flags: str) -> tuple[Trained, int]:
    kind = type(job, (JOBS[job],), {"double": True})
    return _trained_in_shares(workers, kind([*flags.split(), "--lr", "1e-3"]))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "job"),
    few([("fsdp", "causal")], [(layout, job) for layout in LAYOUTS for job in ("causal", "classifier")]),
)
def test_a_model_that_was_built_in_shares_trains_like_one_process(layout: str, job: str) -> None:
    world, flags = LAYOUTS[layout]
    experts = EXPERTS if EXPERTS in flags else ""
    wanted = reference(job, True, f"{FLAGS} --micro-batch-size 8 {experts}")
    for run, divisions in run_in_workers(world, _train, job, f"{FLAGS} {flags}"):
        assert divisions > 0
        assert [loss for loss, _ in run["curve"]] == pytest.approx([loss for loss, _ in wanted["curve"]], rel=1e-12)
        assert weights_apart(run["weights"], wanted["weights"]) < 1e-10


class UnusualJob(ClassJob):
    """Each worker draws other random numbers. The weights come from the first one."""

    def make(self) -> nn.Module:
        torch.manual_seed(3 + 100 * int(os.environ.get("RANK", 0)))
        return Unusual()

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(len(batch["labels"]), 48)) / 48
        return loss


class PretrainedJob(ClassJob):
    """Reads the weights of a folder, and draws those of a new head."""

    def build_model(self) -> nn.Module:
        config = self.config.replace("command line", pretrained_model_name_or_path=str(demo_model_folder()))
        return build_model(config, "AutoModelForSequenceClassification", num_labels=3)


KINDS = JOBS | {"unusual": UnusualJob, "pretrained": PretrainedJob, "wide": WideJob}
UNCHANGED = "--lr 0 --train-iters 1 --global-batch-size 4 --micro-batch-size 1"
ENGINES = {
    "fsdp": "--fsdp-memory-optimization",
    "zero-3": "--zero-3-memory-optimization --zero-3-param-persistence-threshold 0",
}
HALF = "--mixed-precision bf16"
STARTS = [
    (kind, workers, engine, more)
    for engine in ENGINES
    for kind in KINDS
    if kind != "wide"
    for workers in (1, 2, 4)
    for more in ("", HALF)
]
STARTS.append(("wide", 2, "zero-3", f"--nvme-path FOLDER {HALF}"))


def _start(workers: Workers, kind: str, flags: str) -> tuple[Trained, int]:
    return _trained_in_shares(workers, KINDS[kind]([*UNCHANGED.split(), *flags.split()]))


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "world", "engine", "more"), few([("unusual", 2, "fsdp", "")], STARTS))
def test_initial_weights_have_the_bits_of_one_process(
    kind: str, world: int, engine: str, more: str, tmp_path: Path
) -> None:
    flags = f"{ENGINES[engine]} {more}"
    if "nvme" in flags and (why := why_no_nvme()):
        pytest.skip(why)
    if "zero" in flags:
        pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
    torch.manual_seed(RunConfig().training.seed)
    expected = KINDS[kind](UNCHANGED.split()).build_model().state_dict()
    for run, divisions in run_in_workers(world, _start, kind, flags.replace("FOLDER", str(tmp_path))):
        assert divisions > 0 or world == 1
        assert run["weights"].keys() <= expected.keys()
        for name, weight in run["weights"].items():
            assert torch.equal(weight, expected[name].double()), name


def _buffer_after_sharding(workers: Workers) -> bool:
    """Return whether a buffer in the memory of a parameter keeps its values when FSDP shards the parameter."""
    plan = resolve(config_of(ENGINES["fsdp"]), place(workers.world, "Trainer"))
    engine: Engine = load_object(plan.engine)(plan, workers, clip_grad=0.0)
    torch.manual_seed(1)
    values = nn.Linear(64, 64, bias=False).weight.detach().clone()
    with mock.patch.object(ModelUnderConstruction, "least_whole", LEAST), engine.construction():
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        first = cast(nn.Linear, model[0])
        first.register_buffer("values", first.weight.data)
        engine.frozen(model)
    return torch.equal(cast(torch.Tensor, first.values), values)


@pytest.mark.distributed
def test_a_buffer_in_the_memory_of_a_parameter_keeps_its_values() -> None:
    assert all(run_in_workers(2, _buffer_after_sharding))


LAYERS, WIDTH = 16, 1024  # 64 MB, 4 MB for each layer


def _peak_of_building(workers: Workers, flags: str) -> float:
    """Return how many MB of tensors this process had at most while it built and divided a model."""
    plan = resolve(config_of(flags), place(workers.world, "Trainer"))
    engine: Engine = load_object(plan.engine)(plan, workers, clip_grad=0.0)
    with engine.construction():
        engine.frozen(nn.Linear(2, 2))  # what is imported and opened once does not count
    small = mock.patch.object(ModelUnderConstruction, "least_whole", 4 << 20)
    with small, engine.construction(), measured_allocations() as allocations:
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        for layer in model:
            nn.init.normal_(cast(nn.Linear, layer).weight)
        engine.frozen(model)
    return allocations.peak / 2**20


@pytest.mark.distributed
@pytest.mark.parametrize("name", by_default(["fsdp"], ENGINES))
def test_a_worker_needs_its_share_and_little_more(name: str) -> None:
    if name == "zero-3":
        pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
    for peak in run_in_workers(2, _peak_of_building, ENGINES[name]):
        # The shard of a unit is copied before the whole unit is freed.
        assert 32 + 4 + 2 <= peak < 1.01 * (32 + 4 + 2)
