"""The content of an accepted plan."""

from __future__ import annotations

import json

import pytest

from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.resolve import resolve
from tests.support.requests import CPU, GPUS, config_of, on


@pytest.mark.parametrize(
    ("flags", "place", "precision"),
    [
        ("--mixed-precision", CPU, "bf16"), ("--mixed-precision", GPUS, "fp16"),
        ("--mixed-precision bf16", GPUS, "bf16"), ("--mixed-precision fp16", CPU, "fp16"), ("--tf32", GPUS, "fp32"),
    ],
)  # fmt: skip
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


def test_values_and_rules_are_written_down() -> None:
    plan = resolve(config_of("--tf32 --lr 3e-5 --data-path 0.3 A 0.7 B"), GPUS)
    assert "RF018" in plan.rules
    assert "RF002" not in plan.rules, "the rules of switches that are off have nothing to say"
    assert json.loads(json.dumps(plan.to_json()))["values"]["--data-path"]["value"] == ["0.3", "A", "0.7", "B"]


def test_switches_say_how_they_act() -> None:
    for switch in REGISTRY.switches:
        if switch.name != "auto-strategy":  # it acts before the run: the plan contains what it chose
            assert switch.receipt, f"{switch.name} leaves no receipt"
