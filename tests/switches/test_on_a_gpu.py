"""Every switch that one GPU accepts follows a CPU: each alone, and with others in a row of the covering table."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from rapidformer_templates.planning.environment import installed_packages
from rapidformer_templates.planning.registry import REGISTRY
from tests.support import covering
from tests.support.combinations import FP8, Combination, Size, accepted_on, distance, train
from tests.support.worker_pool import end_pool, run_in_workers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.deepspeed,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none here"),
]

ROUNDING = {"fp32": 1e-4, "tf32": 2**-8, "bf16": 2**-6, "fp16": 2**-8}
"""Allowed distance between a GPU and a CPU by the type of the matrix products. A GPU sums in another order."""

WIDTH = 32
"""Width of the hidden states. In 16 bits the attention kernels need heads with at least 8 values."""

CHOICES = 0.05
"""Allowed distance for mixtures in 16 bits: a token with two nearly equal best experts can go to the other one."""


@cache
def _accepted_alone() -> list[str]:
    absent = set() if "torchao" in installed_packages() else {FP8}
    names = [switch.name for switch in REGISTRY.switches if switch.name not in absent]
    return [name for name in names if accepted_on("cuda", [name])]


def _runs() -> Iterator[Combination]:
    """Yield each switch alone, and for each row the switches that one GPU accepts together."""
    alone = _accepted_alone()
    seen = set()
    for names in (*([name] for name in alone), *covering.table()["rows"]):
        taken = [name for name in names if name in alone]
        while taken and not accepted_on("cuda", taken):
            taken.pop()
        found = accepted_on("cuda", taken)
        if found and found.names and found.names not in seen:
            seen.add(found.names)
            yield found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Find the runs only if there is a GPU."""
    if "run" in metafunc.fixturenames:
        metafunc.parametrize("run", [*_runs()] if torch.cuda.is_available() else [], ids=str)


@cache
def _on_the_cpu(template: str, flags: tuple[str, ...], size: Size) -> dict[str, Any]:
    return train(None, template, flags, size=size)


def test_a_gpu_follows_a_cpu(run: Combination, record_property: Any) -> None:
    in_tf32 = "tf32" in run.plan.switches
    reference = tuple(flag for flag in run.reference if flag != "--tf32")
    size = Size(max(run.size.width, WIDTH), run.size.blocks)
    (found,) = run_in_workers(1, train, run.template, run.flags, "plain", size, device="cuda")
    if in_tf32:
        end_pool()  # otherwise the next run would also use tf32
    apart = distance(found, _on_the_cpu(run.template, reference, size))
    precision = "tf32" if in_tf32 else run.plan.precision
    record_property(precision, apart.worst)
    flips = "mixture-of-experts" in run.plan.switches and precision != "fp32"
    assert apart.worst <= (CHOICES if flips else ROUNDING[precision]), str(apart)


def test_most_switches_run_on_one_gpu() -> None:
    """The others need several workers, a file or a package."""
    assert len(_accepted_alone()) >= len(REGISTRY.switches) / 2
