"""Declarations about pairs: flags that act only with another flag, and switches that exclude each other."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rapidformer_templates.errors import Refused
from rapidformer_templates.planning.checks import PARTITIONING, TOGETHER_REVERSED, Side, clash
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.request import build_request
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.planning.switch import Resource
from tests.support.requests import CPU, GPUS, codes, config_of, on, with_switches

COMPANIONS = [
    (declared, *declared.metadata["only_with"])
    for declared in REGISTRY.complete(RunConfig()).fields()
    if declared.metadata.get("only_with")
]


def _value(declared: dataclasses.Field[Any]) -> Any:
    """Return a value of the field that is not its default."""
    if declared.default is False:
        return True
    words = {"pipeline_stages": "1,1", "lora_target_modules": "q_proj", "lora_modules_to_save": "head"}
    words |= {"lora_variant": "dora", "quantize_base": "half"}
    return words.get(declared.name) or {None: 1, 1: 2, 3: 4, 0.0: 0.5, "fp32": "bf16"}[declared.default]


@pytest.mark.parametrize(("declared", "other", "value"), COMPANIONS, ids=lambda x: getattr(x, "name", ""))
def test_flag_that_acts_only_with_another_is_refused_alone(
    declared: dataclasses.Field[Any], other: str, value: Any
) -> None:
    alone = REGISTRY.complete(RunConfig()).replace("test", **{declared.name: _value(declared)})
    with pytest.raises(Refused) as refused:
        resolve(alone, CPU)
    [found] = [each for each in refused.value.diagnostics if each.rule == "RF034"]
    assert found.message == f"{spelling(declared.name)} has no effect without {spelling(other)}"
    assert "RF034" not in codes(alone.replace("test", **{other: value}), CPU)


def test_one_expert_is_a_mixture() -> None:
    assert codes("--num-experts 1 --moe-top-k 1", CPU) == []


@pytest.mark.parametrize(
    ("one", "other", "message", "asked"),
    [
        ("tf32", "fsdp", "tf32 does not work together with fsdp", "--tf32 (test)"),
        ("tf32", PARTITIONING, "tf32 does not work together with fsdp", "--tf32 (test)"),
        ("tf32", Resource.PARAMETERS, "tf32 does not work together with fsdp", "--tf32 (test)"),
        ("tf32", ("oss", "fsdp"), "tf32 does not work together with fsdp", "--tf32 (test)"),
        ("tf32", {"fsdp": "cuts"}, "tf32 does not work together with fsdp, which cuts", "--tf32 (test)"),
        (lambda switch: switch.name == "fsdp", "tf32", "fsdp does not work together with tf32", None),
    ],
)
def test_pairs_of_both_sides_are_found(one: Side, other: Side, message: str, asked: str | None) -> None:
    request = build_request(with_switches(["tf32", "fsdp"]), on(GPUS, template="Trainer"), REGISTRY.switches)
    [found] = clash(request, one, other)
    assert found.message == message
    assert asked is None or found.asked[0] == asked
    assert set(found.switches) == {"tf32", "fsdp"}


def test_pair_may_be_named_the_other_way_round_and_needs_both() -> None:
    request = build_request(with_switches(["tf32", "fsdp"]), GPUS, REGISTRY.switches)
    [found] = clash(request, "tf32", "fsdp", message=TOGETHER_REVERSED)
    assert found.message == "fsdp does not work together with tf32"
    assert found.switches == ("tf32", "fsdp")
    alone = build_request(REGISTRY.complete(config_of("--tf32")), GPUS, REGISTRY.switches)
    assert clash(alone, "tf32", "fsdp") == []
