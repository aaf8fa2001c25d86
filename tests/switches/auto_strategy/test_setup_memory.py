"""The predicted memory of building a model, compared with receipts of runs, and what the plan makes of it."""

import gc
import importlib.util
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate
from transformers import LlamaConfig, LlamaForCausalLM

from rapidformer_templates import Data, Trainer
from rapidformer_templates.engines.construction import ModelUnderConstruction
from rapidformer_templates.planning.environment import detect
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.registry import REGISTRY, load_object
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.switches.auto_strategy.layouts import layout_of, memory_options_of
from rapidformer_templates.switches.auto_strategy.model_of_flags import with_switches
from rapidformer_templates.switches.auto_strategy.model_shapes import ModelShapes
from rapidformer_templates.switches.auto_strategy.setup_memory import SetupMemory, setup_memory
from rapidformer_templates.system.process_state import return_freed_memory
from rapidformer_templates.system.workers import Workers, join
from tests.support.plans import planned
from tests.support.switch_cases import Case, case_of, words
from tests.support.worker_pool import end_pool, run_in_workers

LAYERS, WIDTH = 16, 1024  # 67 MB, 4 MB for each layer
SHARE, NOISE = 0.2, 20e6
"""Measured bytes may differ by this share, and exceed the prediction by the memory of libraries and by free memory that
the allocator keeps."""


class Layers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs


class LayersJob(Trainer):
    width = WIDTH

    def build_data(self) -> Data:
        return Data(train=[torch.ones(self.width)] * 16, collate=torch.stack)

    def build_model(self) -> nn.Module:
        return Layers(self.width)

    def compute_loss(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    def count_targets(self, batch: torch.Tensor) -> int:
        return len(batch)


class LlamaJob(Trainer):
    width = 512  # 135 MB, 17 MB for each block

    @classmethod
    def model(cls, blocks: int | None = None) -> Any:
        sizes: dict[str, Any] = {"hidden_size": cls.width, "intermediate_size": 4 * cls.width, "vocab_size": 128}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": blocks or 8}
        return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False)).train()

    @staticmethod
    def batch(samples: int) -> dict[str, torch.Tensor]:
        rows = torch.arange(16).expand(samples, -1)
        return {"input_ids": rows, "labels": rows}

    def build_data(self) -> Data:
        sample = {name: rows[0] for name, rows in self.batch(1).items()}
        return Data(train=[sample] * 32, collate=default_collate)

    def build_model(self) -> Any:
        return self.model()


def peaks(workers: Workers, job: type[Any], flags: list[str]) -> list[dict[str, int]]:
    """Return the receipts of a run. A small run comes first, because libraries need memory when they are first used."""
    small = type("Small", (job,), {"width": 32})
    small(flags).fit()
    gc.collect()
    return_freed_memory()  # a forked process begins with its parent's heap
    measured: list[dict[str, int]] = job(flags).fit()["receipts"]["setup_peak_bytes_by_rank"]
    return measured


def assert_predicted(predicted: SetupMemory, job: type[Any], workers: int, flags: list[str]) -> None:
    end_pool()  # free memory of earlier jobs would be used first
    try:
        (measured, *_) = run_in_workers(workers, peaks, job, flags)
    finally:
        end_pool()
    assert len(measured) == workers
    for peak in measured:
        assert peak["device"] == peak["host"]  # the same memory
        assert (1 - SHARE) * predicted.host <= peak["host"] <= (1 + SHARE) * predicted.host + NOISE


only_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")


@pytest.mark.longer
@only_linux
@pytest.mark.distributed
@pytest.mark.parametrize("flags", ["", "--fsdp-memory-optimization"], ids=["ddp", "fsdp"])
def test_the_predicted_peak_is_measured(flags: str) -> None:
    given = f"--device cpu --lr 1e-3 --train-iters 1 --no-save {flags}".split()
    plan = resolve(LayersJob(given).config, detect("Trainer", "test", device="cpu", world_size=2))
    of_model = ModelShapes(lambda _: with_switches(Layers(WIDTH), LayersJob(given).config, plan), dict)
    predicted = setup_memory(of_model, layout_of(plan), memory_options_of(plan, of_model.width))
    whole = LAYERS * WIDTH**2 * 4
    # DDP has the model and draws one layer. FSDP has its share and 16 MiB of whole layers.
    assert predicted.host == (whole // 2 + 4 * 2**22 if flags else whole + whole // LAYERS)
    assert_predicted(predicted, LayersJob, 2, given)


def engines() -> dict[str, tuple[Case, Plan]]:
    """Return a case for each engine and each way in which it builds, from the registry."""
    found: dict[str, tuple[Case, Plan]] = {}
    for switch in REGISTRY.switches:
        package = switch.needs_package
        if switch.engine is None or (package and importlib.util.find_spec(package) is None):
            continue
        case = case_of(switch)
        _, world, template, values = case
        config = REGISTRY.complete(LlamaJob([]).config).replace("test", micro_batch_size=2, **values)
        plan = resolve(config, detect(template, "test", device="cpu", world_size=world))
        found.setdefault(f"{plan.engine.partition(':')[2]}, {switch.name}", (case, plan))
    return found


ENGINES = engines()


@only_linux
@pytest.mark.longer
@pytest.mark.distributed
@pytest.mark.parametrize("engine", ENGINES)
def test_the_predicted_peak_of_every_engine_is_measured(engine: str, tmp_path: Path) -> None:
    (name, workers, _, values), plan = ENGINES[engine]
    flags = [*words(values, str(tmp_path / name)), "--overwrite"]
    config = LlamaJob(flags).config
    of_model = ModelShapes(lambda blocks: with_switches(LlamaJob.model(blocks), config, plan), LlamaJob.batch)
    predicted = setup_memory(of_model, layout_of(plan), memory_options_of(plan, of_model.width))
    assert_predicted(predicted, LlamaJob, workers, flags)


def are_divided(workers: Workers, plans: dict[str, Plan]) -> dict[str, bool]:
    """Return for each engine whether a worker gives back the memory of a parameter while others are built."""
    divided = {}
    for name, plan in plans.items():
        with join("cpu", plan.sizes) as own, mock.patch.object(ModelUnderConstruction, "least_whole", 8192):
            engine = load_object(plan.engine)(plan, own, clip_grad=0.0)
            with engine.construction():
                layers = [nn.Linear(64, 64, bias=False) for _ in range(4)]
                with torch._C.DisableTorchFunction():  # otherwise a look at a storage gathers it
                    divided[name] = layers[0].weight.untyped_storage().nbytes() == 0
    return divided


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 4])
def test_a_plan_knows_how_its_engine_builds(world: int) -> None:
    plans = {name: plan for name, (case, plan) in ENGINES.items() if case[1] == world}
    expected = {name: plan.builds_in_shares for name, plan in plans.items()}
    for divided in run_in_workers(world, are_divided, plans):
        assert divided == expected
    assert world == 4 or set(expected.values()) == {False, True}


@pytest.mark.longer
def test_a_layout_that_a_node_cannot_build_is_rejected() -> None:
    model = "--model-type gpt2 --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 16"
    model += " --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1"
    flags = f"--auto-strategy {model} --world-size 4 --device cuda --micro-batch-size 1 --no-checkpoint-activations"
    free, bounded = planned(flags, 40), planned(f"{flags} --host-memory-gb 1.2", 40)
    assert any("unknown and not checked" in line for line in free["assumed"])
    assert "host memory 1.2 GB per node (--host-memory-gb)" in bounded["assumed"]
    needed = {layout["partitioning"]: layout["memory_gb"]["node_host"] for layout in free["layouts"]}
    assert {layout["partitioning"] for layout in bounded["layouts"]} == {
        name for name, gigabytes in needed.items() if gigabytes <= 1.2
    }
    (of_fsdp,) = (layout["memory_gb"] for layout in bounded["layouts"] if layout["partitioning"] == "fsdp")
    assert of_fsdp["node_host"] == pytest.approx(4 * 1.05 * of_fsdp["setup_host"], abs=1e-3)
    told = [rejected["constraint"] for rejected in bounded["rejected"] if rejected["partitioning"] == "none"]
    assert told == [f"host memory: {needed['none']:,.1f} GB needed on a node, 1.2 GB there ({IN_SHARES})"]


IN_SHARES = (
    "each worker builds the whole model; pipeline-parallel, tensor-parallel, expert-parallel, fsdp, zero-3 build it in "
    "shares"
)
