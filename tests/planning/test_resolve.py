"""The content of an accepted plan."""

from __future__ import annotations

import json

import pytest

from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.planning.plan import Sizes
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.resolve import resolve
from tests.support.requests import CPU, GPUS, config_of, on


def test_plain_run() -> None:
    plan = resolve(RunConfig(), Environment())
    assert plan.switches == ("optimizer",)
    assert plan.engine == "rapidformer_templates.engines.local:SingleEngine"
    assert plan.precision == "fp32"
    assert plan.sizes == Sizes()
    assert plan.values == {"template": {"value": "Trainer", "origin": "default"}}


@pytest.mark.parametrize(
    ("flags", "workers", "engine"),
    [
        ("", 1, "engines.local:SingleEngine"),
        ("", 2, "engines.local:DDPEngine"),
        ("--fsdp-memory-optimization", 2, "switches.fsdp.engine:FSDPEngine"),
        ("--fsdp-memory-optimization", 1, "switches.fsdp.engine:FSDPEngine"),
    ],
)
def test_engine(flags: str, workers: int, engine: str) -> None:
    assert resolve(config_of(flags), Environment(world_size=workers)).engine == f"rapidformer_templates.{engine}"


def test_sizes_of_a_3d_layout() -> None:
    flags = (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 24"
    )
    sizes = resolve(config_of(flags), GPUS, REGISTRY).sizes
    assert sizes == Sizes(
        world=8, local_world=8, tensor=2, pipeline=2, data=2, micro_batch=4, global_batch=24, accumulation=3
    )


def test_accumulation_is_a_switch_that_no_flag_names() -> None:
    plan = resolve(config_of("--micro-batch-size 2 --global-batch-size 16"), CPU)
    assert plan.sizes.accumulation == 4
    assert "gradient-accumulation" in plan.switches


@pytest.mark.parametrize(
    ("flags", "place", "precision"),
    [
        ("--mixed-precision", CPU, "bf16"),
        ("--mixed-precision", GPUS, "fp16"),
        ("--mixed-precision bf16", GPUS, "bf16"),
        ("--mixed-precision fp16", CPU, "fp16"),
        ("--tf32", GPUS, "fp32"),
    ],
)
def test_precision(flags: str, place: Environment, precision: str) -> None:
    plan = resolve(config_of(flags), place)
    assert plan.precision == precision
    chosen = any(note.startswith("--mixed-precision without a type") for note in plan.notes)
    assert chosen == (flags == "--mixed-precision")


@pytest.mark.parametrize(
    ("flags", "place", "implementation"),
    [
        ("", CPU, "torch.optim.AdamW (fused)"),
        ("", GPUS, "torch.optim.AdamW (fused)"),
        ("--optimizer apex_adam", CPU, "torch.optim.AdamW (fused)"),
        ("--optimizer apex_adam", on(CPU, packages={"apex": "1"}), "torch.optim.AdamW (fused)"),
        ("--optimizer apex_adam", GPUS, "apex.optimizers.FusedAdam"),
        ("--optimizer apex_adam --fsdp-memory-optimization", GPUS, "torch.optim.AdamW (fused)"),
        ("--optimizer apex_lamb", CPU, "rapidformer_templates.switches.optimizer.updates.Lamb"),
        ("--optimizer apex_lamb", GPUS, "apex.optimizers.FusedLAMB"),
        ("--optimizer adafactor", CPU, "torch.optim.Adafactor"),
        (
            "--optimizer adamw_bnb_8bit",
            GPUS,
            "rapidformer_templates.switches.optimizer.bitsandbytes_adamw.BitsAndBytesAdamW8bit",
        ),
        ("--optimizer muon", CPU, "rapidformer_templates.switches.optimizer.updates.Muon"),
        ("--optimizer lion", CPU, "rapidformer_templates.switches.optimizer.updates.Lion"),
    ],
)
def test_stand_ins_are_noted(flags: str, place: Environment, implementation: str) -> None:
    plan = resolve(config_of(flags), place)
    assert plan.optimizer_implementation == implementation
    noted = any(f"{implementation} is used instead" in note for note in plan.notes)
    assert noted == (plan.optimizer.startswith("apex") and not implementation.startswith("apex"))


@pytest.mark.parametrize("place", [CPU, GPUS])
def test_a_plan_without_an_optimizer_does_not_mention_apex(place: Environment) -> None:
    plan = resolve(config_of("--task causal_lm"), place)
    assert plan.optimizer == "adamw"
    assert "apex" not in json.dumps(plan.to_json())


def test_notes_for_sizes_that_act_as_none_or_badly() -> None:
    plan = resolve(config_of("--fsdp-memory-optimization --micro-batch-size 12"), Environment())
    assert "fsdp: one worker, so there is nothing to shard" in plan.notes
    assert (
        "micro batch 12: multiples of 8 suit the matrix units better (single-GPU guide of Transformers)" in plan.notes
    )
    assert resolve(config_of("--micro-batch-size 16"), GPUS).notes == ()


def test_an_unseen_gpu_is_noted() -> None:
    notes = resolve(config_of("--device cuda --tf32"), on(GPUS, compute_capability=None)).notes
    assert any(note.startswith("no GPU is visible here") for note in notes)


def test_switches_stand_in_the_order_of_application() -> None:
    flags = "--fsdp-memory-optimization --mixed-precision --checkpoint-activations --tf32 --global-batch-size 16"
    assert resolve(config_of(flags), GPUS).switches == (
        "gradient-accumulation",
        "tf32",
        "checkpoint-activations",
        "mixed-precision",
        "optimizer",
        "fsdp",
    )


def test_values_and_rules_are_written_down() -> None:
    plan = resolve(config_of("--tf32 --lr 3e-5 --data-path 0.3 A 0.7 B"), GPUS)
    assert plan.values["--lr"] == {"value": 3e-5, "origin": "command line"}
    assert "RF018" in plan.rules
    assert "RF002" not in plan.rules, "the rules of switches that are off have nothing to say"
    assert json.loads(json.dumps(plan.to_json()))["values"]["--data-path"]["value"] == ["0.3", "A", "0.7", "B"]


def test_switches_say_how_they_act() -> None:
    for switch in REGISTRY.switches:
        if switch.name != "auto-strategy":  # it acts before the run: the plan contains what it chose
            assert switch.receipt, f"{switch.name} leaves no receipt"
