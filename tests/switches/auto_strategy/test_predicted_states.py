"""Predicted states of every switch, compared with the receipts of a run with the switch: equal to the byte."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rapidformer_templates import Data, Pretrainer, Trainer
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.environment import detect
from rapidformer_templates.planning.optimizers import OPTIMIZERS
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.request import build_request
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.planning.switch import FORECAST
from rapidformer_templates.switches.auto_strategy.layouts import layout_of, memory_options_of
from rapidformer_templates.switches.auto_strategy.memory import states_by_worker
from rapidformer_templates.switches.auto_strategy.model_of_flags import with_switches
from rapidformer_templates.switches.auto_strategy.model_shapes import ModelShapes
from rapidformer_templates.switches.auto_strategy.state_bytes import StateBytes
from tests.support.machine import why_no_nvme
from tests.support.switch_cases import Case, case_of, words
from tests.support.worker_pool import run_in_workers

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
pytest.importorskip("fairscale", reason="needs fairscale: pip install 'rapidformer_templates[fairscale]'")
STATE_KINDS = ("parameters", "gradients", "optimizer")
VOCABULARY, LENGTH, BLOCKS = 131, 16, 4
"""Not all sizes divide. Some parameters have more than 4,096 elements, from which states are quantized."""


def model(blocks: int | None = None) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "num_hidden_layers": BLOCKS if blocks is None else blocks}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY, use_cache=False)).train()


def _collate(samples: list[Any], shape: tuple[int, int] | None = None) -> dict[str, torch.Tensor]:
    rows, length = shape or (len(samples), LENGTH)
    batch = torch.zeros(rows, length, dtype=torch.long)
    batch[: len(samples), :LENGTH] = torch.stack([sample["input_ids"] for sample in samples])
    return {"input_ids": batch, "labels": batch.where(batch > 0, -100)}


class Job(Trainer):
    def build_data(self) -> Data:
        draw = torch.Generator().manual_seed(0)
        tokens = torch.randint(VOCABULARY, (32, LENGTH), generator=draw)
        return Data(train=[{"input_ids": row, "labels": row} for row in tokens], collate=_collate)

    def build_model(self) -> Any:
        return model()


class PretrainedJob(Job, Pretrainer):
    """Uses the template that dynamic shapes need."""


JOBS: dict[str, type[Job]] = {"Trainer": Job, "Pretrainer": PretrainedJob}


def shapes(config: RunConfig, plan: Any) -> ModelShapes:
    def batch(samples: int) -> dict[str, torch.Tensor]:
        rows = torch.zeros((samples, LENGTH), dtype=torch.long)
        return {"input_ids": rows, "labels": rows}

    return ModelShapes(lambda blocks: with_switches(model(blocks), config, plan), batch)


# The runs. Values by field, and a number of workers for each.

NO_RUN = {
    "auto-strategy": "it chooses among the others",
    "tf32": "it needs a GPU",
    "offload-activations": "it needs a device with separate memory, and does not move the states",
    "onnx-runtime": "its first step takes half a minute, and the states are the engine's",
}


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


SWITCHES = [
    case_of(switch)
    for switch in REGISTRY.switches
    if switch.name not in NO_RUN and (not switch.needs_package or _installed(switch.needs_package))
]
PARTITIONED = ("zero-1", "zero-2", "zero-3", "fsdp", "oss", "oss-sdp", "distributed-optimizer")
AVAILABLE = [
    name
    for name, facts in OPTIMIZERS.items()
    if not facts.needs_cuda and (facts.needs_package is None or _installed(facts.needs_package))
]
BY_OPTIMIZER = [(f"{name}, alone", 1, "Trainer", {"optimizer": name}) for name in AVAILABLE] + [
    (f"{name}, {how}", 2, "Trainer", {"optimizer": name, **REGISTRY[how].on})
    for name in ("adamw_anyprecision", "muon", "adafactor", "adamw_torch_8bit", "adamw_bnb_8bit")
    for how in PARTITIONED
    if name in AVAILABLE and how not in OPTIMIZERS[name].not_under
]
ZERO_3 = {"zero_3_memory_optimization": True}
TENSOR = {"tensor_model_parallel_size": 2}
HALF = {"quantize_base": "half"} if _installed("peft") else {}
LORA = {"lora_rank": 3} if _installed("peft") else {"freeze": "mlp"}
CODED = {"lora_rank": 3, "quantize_base": "int8"} if _installed("peft") else LORA
FOUR_BITS = CODED | ({"quantize_base": "int4"} if _installed("peft") else {})
NF4 = FOUR_BITS | ({"quantize_base": "nf4"} if _installed("peft") and _installed("bitsandbytes") else {})
AVERAGE = {"ema_decay": 0.9, "layerwise_lr_decay": 0.5}
PIPELINE = {"pipeline_model_parallel_size": 2, "global_batch_size": 8}
INTERLEAVED = {**PIPELINE, "virtual_pipeline_size": 2}
NARROW = {"mixed_precision": "bf16"}
SHARDED = {"use_distributed_optimizer": True}
DIVIDED = {"num_experts": 4, "expert_parallel": True}
CONTEXT = {"context_parallel_size": 2}
IN_GROUPS = {"num_experts": 4, "expert_model_parallel_size": 2}
SHARING_COPIES = ("zero-1", "zero-2", "distributed-optimizer")
MASTERS: list[Case] = [
    ("masters, alone", 1, "Trainer", NARROW),
    ("masters, 16-bit sums", 1, "Trainer", {**NARROW, "grad_accum_dtype": "bf16"}),
    ("masters, none", 2, "Trainer", NARROW),
    ("masters, none, micro batches", 2, "Trainer", {**NARROW, "global_batch_size": 8}),
    ("masters, distributed optimizer", 2, "Trainer", {**NARROW, **SHARDED}),
    ("masters, distributed optimizer, 16-bit sums, micro batches", 2, "Trainer",
     {**NARROW, **SHARDED, "grad_accum_dtype": "bf16", "grad_reduce_dtype": "bf16", "global_batch_size": 8}),
    ("masters, tensor", 2, "Trainer", {**NARROW, **TENSOR}),
    ("masters, pipeline", 2, "Trainer", {**NARROW, **PIPELINE}),
    ("masters, bf16 moments, distributed optimizer", 2, "Trainer",
     {**NARROW, **SHARDED, "optimizer": "adamw_anyprecision"}),
    ("masters, average, distributed optimizer", 2, "Trainer", {**NARROW, **SHARDED, **AVERAGE}),
    ("masters, tensor, pipeline", 4, "Trainer", {**NARROW, **TENSOR, **PIPELINE}),
    ("masters, pipeline, zero-1", 4, "Trainer", {**NARROW, **PIPELINE, "zero_1_memory_optimization": True}),
    ("masters, pipeline, zero-2", 4, "Trainer", {**NARROW, **PIPELINE, "zero_2_memory_optimization": True}),
    ("masters, tensor, zero-2", 4, "Trainer", {**NARROW, **TENSOR, "zero_2_memory_optimization": True}),
    ("masters, interleaved", 2, "Trainer", {**NARROW, **INTERLEAVED}),
    ("masters, interleaved, zero-2", 4, "Trainer", {**NARROW, **INTERLEAVED, "zero_2_memory_optimization": True}),
]  # fmt: skip
"""16-bit weights with fp32 masters."""

TOGETHER: list[Case] = [
    ("zero-2, one worker", 1, "Trainer", {"zero_2_memory_optimization": True}),
    ("zero-1, bf16", 2, "Trainer", {"zero_1_memory_optimization": True, "mixed_precision": "bf16"}),
    ("zero-3, bf16, small ones cut", 2, "Trainer",
     {**ZERO_3, "mixed_precision": "bf16", "zero_3_param_persistence_threshold": 1000}),
    ("zero-2, offload", 2, "Trainer", {"zero_2_memory_optimization": True, "cpu_offload": True}),
    ("zero-3, offload, bf16 moments", 2, "Trainer", {**ZERO_3, "cpu_offload": True, "optimizer": "adamw_anyprecision"}),
    ("zero-3, sub-groups", 2, "Trainer",
     {"deepspeed_config": '{"zero_optimization": {"stage": 3, "sub_group_size": 5000}}'}),
    ("lamb, distributed-optimizer", 2, "Trainer", {**SHARDED, "optimizer": "lamb"}),
    ("adafactor, pipeline, zero-2", 4, "Trainer",
     {**PIPELINE, "zero_2_memory_optimization": True, "optimizer": "adafactor"}),
    ("masters, muon, pipeline, zero-1", 4, "Trainer",
     {**NARROW, **PIPELINE, "zero_1_memory_optimization": True, "optimizer": "muon"}),
    ("experts, oss", 2, "Trainer", {"num_experts": 4, "oss_memory_optimization": True}),
    ("experts, fsdp", 2, "Trainer", {"num_experts": 3, "fsdp_memory_optimization": True}),
    ("experts in groups", 4, "Trainer", {"num_experts": 4, "expert_model_parallel_size": 2}),
    *((f"divided experts, {how}", 2, "Trainer", {**DIVIDED, **REGISTRY[how].on}) for how in SHARING_COPIES),
    *((f"experts in groups, {how}", 4, "Trainer", {**IN_GROUPS, **REGISTRY[how].on})
      for how in SHARING_COPIES),
    ("divided experts, fsdp", 2, "Trainer", {**DIVIDED, **REGISTRY["fsdp"].on}),
    ("experts in groups, fsdp", 4, "Trainer", {**IN_GROUPS, **AVERAGE, **REGISTRY["fsdp"].on}),
    ("experts in groups, hybrid", 4, "Trainer", {**IN_GROUPS, **REGISTRY["hybrid-sharding"].on}),
    ("divided experts, hybrid", 4, "Trainer", {**DIVIDED, **REGISTRY["hybrid-sharding"].on}),
    ("experts in groups, context, fsdp", 4, "Trainer", {**IN_GROUPS, **CONTEXT, **REGISTRY["fsdp"].on}),
    ("divided experts, context", 2, "Trainer", {**DIVIDED, **CONTEXT}),
    ("experts in groups, context, zero-2", 4, "Trainer", {**IN_GROUPS, **CONTEXT, **REGISTRY["zero-2"].on}),
    *((f"masters, experts in groups, {how}", 4, "Trainer", {**IN_GROUPS, **NARROW, **REGISTRY[how].on})
      for how in SHARING_COPIES),
    ("masters, divided experts, zero-2, 16-bit sums, micro batches", 2, "Trainer",
     {**DIVIDED, **NARROW, **REGISTRY["zero-2"].on, "grad_accum_dtype": "bf16", "global_batch_size": 8}),
    ("divided experts, average, zero-1", 2, "Trainer", {**DIVIDED, **AVERAGE, **REGISTRY["zero-1"].on}),
    ("divided experts, tensor", 4, "Trainer", {**DIVIDED, **TENSOR, "sequence_parallel": True}),
    ("divided experts, tensor, zero-2", 4, "Trainer", {**DIVIDED, **TENSOR, **REGISTRY["zero-2"].on}),
    ("divided experts, pipeline", 4, "Trainer", {**DIVIDED, **PIPELINE}),
    ("masters, divided experts, pipeline, distributed optimizer", 4, "Trainer",
     {**DIVIDED, **PIPELINE, **NARROW, **SHARDED}),
    ("divided experts, offload", 2, "Trainer", {**DIVIDED, "cpu_offload": True}),
    ("divided experts, zero-2, offload", 2, "Trainer", {**DIVIDED, **REGISTRY["zero-2"].on, "cpu_offload": True}),
    ("experts, pipeline, sharded over data", 4, "Trainer",
     {"num_experts": 4, **PIPELINE, "use_distributed_optimizer": True}),
    ("experts, tensor, pipeline", 4, "Trainer", {"num_experts": 4, **TENSOR, **PIPELINE, "sequence_parallel": True}),
    ("experts, context, tensor, zero-2", 4, "Trainer",
     {"num_experts": 4, "context_parallel_size": 2, **TENSOR, "zero_2_memory_optimization": True}),
    ("experts, muon", 1, "Trainer", {"num_experts": 4, "optimizer": "muon"}),
    ("experts, adafactor", 1, "Trainer", {"num_experts": 4, "optimizer": "adafactor"}),
    ("pipeline, adafactor", 2, "Trainer", {**PIPELINE, "optimizer": "adafactor"}),
    ("tensor, sharded over data", 4, "Trainer", {**TENSOR, "zero_1_memory_optimization": True}),
    ("pipeline, sharded over data", 4, "Trainer",
     {**PIPELINE, "zero_2_memory_optimization": True, "optimizer": "adamw_anyprecision"}),
    *((f"lora, {how}", 2, "Trainer", {**LORA, **REGISTRY[how].on}) for how in PARTITIONED),
    *((f"average, {how}", 2, "Trainer", {**AVERAGE, **REGISTRY[how].on}) for how in PARTITIONED),
    ("average, zero-2, offload", 2, "Trainer", {**AVERAGE, "zero_2_memory_optimization": True, "cpu_offload": True}),
    ("average, pipeline, adafactor", 2, "Trainer", {**AVERAGE, **PIPELINE, "optimizer": "adafactor"}),
    ("lora, zero-3, bf16, small ones cut", 2, "Trainer",
     {**ZERO_3, **LORA, "mixed_precision": "bf16", "zero_3_param_persistence_threshold": 1000}),
    ("lora, zero-2, offload", 2, "Trainer", {**LORA, "zero_2_memory_optimization": True, "cpu_offload": True}),
    ("lora, zero-3, offload", 2, "Trainer", {**LORA, **ZERO_3, "cpu_offload": True}),
    ("lora, tensor, sharded over data", 4, "Trainer", {**LORA, **TENSOR, "zero_1_memory_optimization": True}),
    ("lora, pipeline, sharded over data", 4, "Trainer", {**LORA, **PIPELINE, "zero_2_memory_optimization": True}),
    ("lora, tensor, pipeline", 4, "Trainer", {**LORA, **TENSOR, **PIPELINE}),
    ("dora, fsdp", 2, "Trainer", {**LORA, "lora_variant": "dora", "fsdp_memory_optimization": True}),
    ("lora, half, alone", 1, "Trainer", {**LORA, **HALF, "mixed_precision": "bf16"}),
    ("lora, half, oss", 2, "Trainer", {**LORA, **HALF, "mixed_precision": "bf16", "oss_memory_optimization": True}),
    ("lora, half, tensor", 2, "Trainer", {**LORA, **HALF, **TENSOR, "mixed_precision": "bf16"}),
    ("lora, int8, alone", 1, "Trainer", CODED),
    ("lora, nf4, alone", 1, "Trainer", {**NF4, "mixed_precision": "bf16"}),
    ("lora, int4, zero-2, bf16", 2, "Trainer",
     {**FOUR_BITS, "zero_2_memory_optimization": True, "mixed_precision": "bf16"}),
    ("lora, int8, pipeline", 2, "Trainer", {**CODED, **PIPELINE}),
    ("lora, int8, fsdp", 2, "Trainer", {**CODED, **REGISTRY["fsdp"].on}),
    ("lora, nf4, hybrid, bf16", 4, "Trainer", {**NF4, **REGISTRY["hybrid-sharding"].on, "mixed_precision": "bf16"}),
    ("lora, int8, zero-3", 2, "Trainer", {**CODED, **ZERO_3, "zero_3_param_persistence_threshold": 1000}),
    ("lora, int4, zero-3, offload, bf16", 2, "Trainer",
     {**FOUR_BITS, **ZERO_3, "cpu_offload": True, "mixed_precision": "bf16"}),
    ("lora, half, fsdp", 2, "Trainer", {**LORA, **HALF, **REGISTRY["fsdp"].on, "mixed_precision": "bf16"}),
    ("experts, average, hybrid", 4, "Trainer",
     {"num_experts": 3, **AVERAGE, "fsdp_memory_optimization": True, "fsdp_shard_size": 2}),
    ("frozen, fsdp", 2, "Trainer", {"freeze": "mlp", "fsdp_memory_optimization": True}),
    ("frozen, zero-2", 2, "Trainer", {"freeze": "mlp", "zero_2_memory_optimization": True}),
    ("tensor, pipeline", 4, "Trainer", {**TENSOR, **PIPELINE, "sequence_parallel": True}),
    ("interleaved, adafactor, zero-1", 4, "Trainer",
     {**INTERLEAVED, "zero_1_memory_optimization": True, "optimizer": "adafactor"}),
]  # fmt: skip
CASES = [*SWITCHES, *BY_OPTIMIZER, *TOGETHER, *MASTERS]
QUICK = {
    *(case[0] for case in SWITCHES if case[0] != "torch-compile"),  # half a minute of imports
    *(case[0] for case in CASES if case[1] == 1),
    *("zero-3, bf16, small ones cut", "zero-2, offload", "muon, oss", "experts in groups, fsdp"),
    *("lora, int8, pipeline", "masters, muon, pipeline, zero-1", "masters, alone", "masters, tensor, zero-2"),
    "average, zero-2",
}
"""Cases that ``make test`` runs."""
LONGER = {
    *(case[0] for case in MASTERS),
    *("lora, int8, fsdp", "lora, nf4, hybrid, bf16", "lora, half, fsdp"),
    *("lora, int8, zero-3", "lora, int4, zero-3, offload, bf16"),
    *("experts, fsdp", "lora, int4, zero-2, bf16", "adafactor, pipeline, zero-2"),
    "lora, pipeline, sharded over data",
    *("average, oss", "lora, fsdp", "lora, zero-2", "lora, tensor, sharded over data"),
}
"""Cases that ``make test-longer`` runs as well."""


def _marked(case: Case) -> Any:
    mark = pytest.mark.longer if case[0] in LONGER else pytest.mark.exhaustive
    return pytest.param(case, id=case[0], marks=() if case[0] in QUICK else mark)


PARAMETERS = list(map(_marked, CASES))


def run(case: Case, folder: str) -> list[StateBytes]:
    """Return the bytes that each rank holds according to the receipts."""
    name, _, template, values = case
    summary = JOBS[template](words(values, str(Path(folder) / name.replace(" ", "-")))).fit()
    kinds = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes")
    return [StateBytes(*(rank[kind] for kind in kinds)) for rank in summary["receipts"]["held_bytes_by_rank"]]


def run_all(workers: Any, folder: str, names: list[str]) -> dict[str, list[StateBytes]]:
    return {case[0]: run(case, folder) for case in CASES if case[0] in names}


def predicted(case: Case) -> list[StateBytes]:
    _, workers, template, values = case
    job = JOBS[template]([*words(values, "run"), "--nproc-per-node", str(workers)])
    plan = resolve(job.config, detect(template, "test", device="cpu", world_size=workers))
    of_model = shapes(job.config, plan)
    return states_by_worker(of_model, layout_of(plan), memory_options_of(plan, of_model.width))


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[StateBytes]]:
    """Measure the selected cases, with one group of workers for each number of workers."""
    folder = str(tmp_path_factory.mktemp("runs"))
    asked = {item.callspec.id for item in request.session.items if hasattr(item, "callspec")}
    if why_no_nvme():
        asked -= {"nvme-offload"}
    found: dict[str, list[StateBytes]] = {}
    for count in (1, 2, 4):
        names = [name for name, workers, *_ in CASES if workers == count and name in asked]
        if names:
            found |= run_all(None, folder, names) if count == 1 else run_in_workers(count, run_all, folder, names)[0]
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("case", PARAMETERS)
def test_a_run_holds_what_is_predicted(case: Case, measured: dict[str, list[StateBytes]]) -> None:
    if case[0] not in measured:
        why = why_no_nvme()
        assert why, f"{case[0]} was not run"
        pytest.skip(why)
    assert measured[case[0]] == predicted(case)


def test_every_switch_says_what_the_planner_makes_of_it() -> None:
    for switch in REGISTRY.switches:
        values = switch.on if switch.name in NO_RUN else case_of(switch)[3]
        config = REGISTRY.complete(RunConfig()).replace("test", **values)
        unknown = switch.predicts.unknown(build_request(config, detect("Trainer", "test"), REGISTRY.switches))
        assert {*switch.predicts.predicted, *unknown} <= set(FORECAST), switch.name
        assert unknown.keys().isdisjoint(STATE_KINDS), f"{switch.name}: its states are held against runs above"
        assert not switch.predicts.traced or switch.transform, switch.name
        assert all([*switch.predicts.predicted.values(), *unknown.values()]), switch.name


def test_what_is_not_run_here_is_named() -> None:
    named = {case[0] for case in SWITCHES} | NO_RUN.keys()
    missing = [switch for switch in REGISTRY.switches if switch.name not in named]
    assert all(switch.needs_package and not _installed(switch.needs_package) for switch in missing)
