"""Predicted states of every switch, compared with the receipts of a run with the switch: equal to the byte."""

import importlib.util
import itertools
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rapidformer_templates import Data, Pretrainer, Trainer
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.environment import detect
from rapidformer_templates.planning.optimizer_states import ParameterShape
from rapidformer_templates.planning.optimizers import OPTIMIZERS
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.request import build_request
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.planning.switch import FORECAST
from rapidformer_templates.switches.auto_strategy.layouts import layout_of, memory_options_of
from rapidformer_templates.switches.auto_strategy.memory import states_by_worker
from rapidformer_templates.switches.auto_strategy.model_of_flags import with_switches
from rapidformer_templates.switches.auto_strategy.model_shapes import ModelShapes
from rapidformer_templates.switches.auto_strategy.state_bytes import StateBytes, each_divided_on_disk
from tests.support import mixtures
from tests.support.machine import why_no_nvme
from tests.support.selection import by_default, selected
from tests.support.switch_cases import case_of, words
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


JOBS: dict[str, type[Any]] = {"Trainer": Job, "Pretrainer": PretrainedJob, "mixtral": mixtures.WideJob}


def shapes(template: str, config: RunConfig, plan: Any) -> ModelShapes:
    make = model if template != "mixtral" else lambda blocks: mixtures.tiny("mixtral", blocks or BLOCKS)

    def batch(samples: int) -> dict[str, torch.Tensor]:
        rows = torch.zeros((samples, LENGTH), dtype=torch.long)
        return {"input_ids": rows, "labels": rows}

    return ModelShapes(lambda blocks: with_switches(make(blocks), config, plan), batch)


# The runs. Values by field, and a number of workers for each.

NO_RUN = {
    "auto-strategy": "it chooses among the others",
    "tf32": "it needs a GPU",
    "offload-activations": "it needs a device with separate memory, and does not move the states",
    "onnx-runtime": "its first step takes half a minute, and the states are the engine's",
}


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


SWITCHES = {
    switch.name: case_of(switch)
    for switch in REGISTRY.switches
    if switch.name not in NO_RUN and (not switch.needs_package or _installed(switch.needs_package))
}
OPTIMIZERS_HERE = [
    f"--optimizer {name}"
    for name, facts in OPTIMIZERS.items()
    if not facts.needs_cuda and (facts.needs_package is None or _installed(facts.needs_package))
]
RUNS = tomllib.loads(Path(__file__).with_name("runs.toml").read_text(encoding="utf-8"))
NEEDS = {"lora": "peft", "nf4": "bitsandbytes"}
TOGETHER = dict.fromkeys(OPTIMIZERS_HERE, 1) | {
    flags: int(workers)
    for runs in RUNS.values()
    for workers, several in runs.items()
    for flags in several
    if all(word not in flags or _installed(package) for word, package in NEEDS.items())
}
"""Number of workers by the flags of a run."""
DEFAULT = {
    *("distributed-optimizer", "fsdp", "hybrid-sharding", "lora", "oss-sdp", "tensor-parallel", "zero-3"),
    *("--optimizer adafactor", "--optimizer muon"),
    *itertools.chain(*RUNS["default"].values()),
}


def _words(name: str, folder: str) -> tuple[int, str, list[str]]:
    """Return (workers, template, words) of a run by the name of its switch or by its flags."""
    if name not in SWITCHES:
        flags = name.removeprefix("mixtral ")
        return TOGETHER[name], "Trainer" if flags == name else "mixtral", [*words({}, folder), *flags.split()]
    _, workers, template, values = SWITCHES[name]
    return workers, template, words(values, folder)


def run(name: str, folder: str) -> list[StateBytes]:
    """Return the bytes that each rank holds according to the receipts."""
    _, template, flags = _words(name, str(Path(folder) / str([*SWITCHES, *TOGETHER].index(name))))
    summary = JOBS[template](flags).fit()
    kinds = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes")
    return [StateBytes(*(rank[kind] for kind in kinds)) for rank in summary["receipts"]["held_bytes_by_rank"]]


def run_all(workers: Any, folder: str, names: list[str]) -> dict[str, list[StateBytes]]:
    return {name: run(name, folder) for name in names}


def predicted(name: str) -> list[StateBytes]:
    workers, template, flags = _words(name, "run")
    job = JOBS[template]([*flags, "--nproc-per-node", str(workers)])
    kind = template.replace("mixtral", "Trainer")
    plan = resolve(job.config, detect(kind, "test", device="cpu", world_size=workers))
    of_model = shapes(template, job.config, plan)
    return states_by_worker(of_model, layout_of(plan), memory_options_of(plan, of_model.width))


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[StateBytes]]:
    """Measure the selected runs, with one group of workers for each number of workers."""
    folder = str(tmp_path_factory.mktemp("runs"))
    asked = {*selected(request, "name")} - ({"nvme-offload"} if why_no_nvme() else set())
    found: dict[str, list[StateBytes]] = {}
    for count in (1, 2, 4):
        names = [name for name in asked if _words(name, "")[0] == count]
        if names:
            found |= run_all(None, folder, names) if count == 1 else run_in_workers(count, run_all, folder, names)[0]
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("name", by_default(DEFAULT, [*SWITCHES, *TOGETHER]))
def test_a_run_holds_what_is_predicted(name: str, measured: dict[str, list[StateBytes]]) -> None:
    if name == "nvme-offload" and (why := why_no_nvme()):
        pytest.skip(why)
    assert measured[name] == predicted(name)


def test_nvme_leaves_small_groups_in_memory() -> None:
    """Compare with counts by hand, because few machines can train with DeepSpeed's offload to disks."""
    large, small = ParameterShape((1024, 1024), True), ParameterShape((512,), False)
    # The 524,288 elements of the first group are on the disk. The 256 elements of the second are not.
    found = each_divided_on_disk([large, small], 2, 4)
    assert found == [StateBytes(4 * (524_544 + 512), 4 * (524_544 + 256), 12 * 256)] * 2


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
    named = SWITCHES.keys() | NO_RUN.keys()
    missing = [switch for switch in REGISTRY.switches if switch.name not in named]
    assert all(switch.needs_package and not _installed(switch.needs_package) for switch in missing)
