"""A receipt can fail: if a switch does not act, the run ends in its first step with an error that names the switch."""

import copy
import dataclasses
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest

from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.plan import Plan, Sizes
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.switch import Measured
from rapidformer_templates.run import loop
from rapidformer_templates.run.receipts import Receipts
from rapidformer_templates.run.run import Run
from tests.support import combinations
from tests.support.combinations import Combination, accepted
from tests.support.machine import why_no_nvme
from tests.support.selection import by_default
from tests.support.worker_pool import Failure, outcomes_in_workers

pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

COMPANY = {"cpu-offload": ("zero-2",), "nvme-offload": ("zero-3",), "deepspeed-config": ("zero-2",)}
"""Switches with which this switch has an effect here. For all other switches, the first that the rules accept."""

ELSEWHERE = {"tf32", "auto-strategy", "offload-activations"}
"""The first needs a GPU, the second a run without custom hooks. Both are tested below. The third needs a GPU or a
stand-in, and is tested with its own tests."""


def _in_company(name: str) -> Combination | None:
    others = [switch.name for switch in REGISTRY.switches if switch.name != name]
    tries = [(name, *COMPANY[name])] if name in COMPANY else [(name,), *((name, other) for other in others)]
    return next((found for names in tries if (found := accepted(names, 2))), None)


def _config(found: Combination) -> Any:
    return REGISTRY.complete(combinations.parsed((*combinations.STEPS.split(), *found.flags)))


LONGER = {
    "context-parallel", "cpu-offload", "deepspeed-config", "distributed-optimizer", "dynamic-shape", "expert-parallel",
    "flash-attention", "fsdp-options", "fused-linear-cross-entropy", "gradient-accumulation", "hybrid-sharding",
    "mixture-of-experts", "nvme-offload", "onnx-runtime", "optimizer", "oss", "sdp", "sequence-parallel",
    "tensor-parallel", "torch-compile", "zero-1", "zero-3",
}  # fmt: skip
"""For ``make test-longer``. Others of the same kind are forgotten in ``make test``."""


CASES = [switch.name for switch in REGISTRY.switches if switch.name not in ELSEWHERE]


def _broken(workers: Any, found: Combination, name: str) -> None:
    """Train without a switch. The receipts are compared with the complete plan."""
    asked = combinations.template(found.template, found.flags, size=found.size)

    def receipts(run: Run, order: Any) -> Receipts:
        complete = copy.copy(run)
        complete.plan, complete.config = asked.plan, asked.config
        return Receipts(complete, order)

    with mock.patch.object(loop, "Receipts", receipts):
        combinations.template(found.template, found.without(name), size=found.size).fit()


@pytest.mark.parametrize("name", by_default({*CASES} - LONGER, CASES))
def test_a_switch_that_does_nothing_ends_the_run(name: str) -> None:
    needed = REGISTRY[name].needs_package
    if needed and find_spec(needed) is None:
        pytest.skip(f"{name} needs {needed}")
    found = _in_company(name)
    assert found, f"the rules accept {name} nowhere"
    if name == "nvme-offload" and (why := why_no_nvme()):
        pytest.skip(why)
    for ended in outcomes_in_workers(found.world, _broken, found, name):
        assert isinstance(ended, Failure)
        assert ended.kind == "SwitchDidNothing"
        assert f"{name} did nothing in the first step" in ended.text


def test_every_switch_can_fail() -> None:
    """A switch without any measurement did nothing, except switches that may have nothing to do."""
    idle = {"cpu-offload", "nvme-offload", "deepspeed-config"}
    for switch in REGISTRY.switches:
        found = accepted((switch.name,), 2) or _in_company(switch.name)
        if found is not None and switch.name not in idle:
            assert switch.acted(Measured(found.plan, _config(found), [{}])), switch.name


def test_tf32_and_the_search_are_missed() -> None:
    config = REGISTRY.complete(RunConfig())
    plan = Plan("Trainer", values={"--tf32": {"value": True, "origin": "command line"}})
    assert "it is highest" in str(REGISTRY["tf32"].acted(Measured(plan, config, [{"matmul_precision": "highest"}])))
    assert REGISTRY["tf32"].acted(Measured(plan, config, [{"matmul_precision": "high"}])) is None
    searched = dataclasses.replace(plan, values={"--micro-batch-size": {"value": 1, "origin": "auto-strategy"}})
    acted, layout = REGISTRY["auto-strategy"].acted, [{"layout": [1, 1, 1]}]
    assert acted(Measured(searched, config, layout)) is None
    assert acted(Measured(plan, config, layout)) is not None
    assert acted(Measured(searched, config, [{"layout": [1, 2, 1]}])) is not None


@pytest.mark.parametrize(("second", "acted"), [(22_699_012, True), (22_714_371 + 11_720_448, False)])
def test_a_parameter_on_the_border_of_two_shares_is_whole_on_both_workers(second: int, acted: bool) -> None:
    """MiniLM under ZeRO-2: one embedding has half of its elements. The measurement comes from the first worker."""
    shares = {"trained_elements": 22_714_371, "updated_elements": 11_357_186, "largest_parameter": 11_720_448}
    ranks = [{**shares, "gradient_elements": count} for count in (11_736_192, second)]
    plan = Plan("Trainer", ("zero-2",), Sizes(world=2, data=2))
    assert (REGISTRY["zero-2"].acted(Measured(plan, RunConfig(), ranks)) is None) == acted
