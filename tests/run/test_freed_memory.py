"""Host memory that training on a CPU frees: it is kept for the next step, unless a switch changes this."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from rapidformer_templates.planning.environment import OPTIONAL_PACKAGES
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.run.building import choose_allocation
from rapidformer_templates.system.process_state import freed_memory, use_default_allocator
from tests.support.requests import CPU, config_of, on

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")

WITH_PACKAGES = on(CPU, packages=dict.fromkeys(OPTIONAL_PACKAGES, "any"))
ZERO_3 = "--zero-3-memory-optimization"
KEPT = ("", "--oss-sdp-memory-optimization")
GIVEN_BACK = ("--fsdp-memory-optimization", ZERO_3, f"{ZERO_3} --cpu-offload", "--cpu-offload")
AS_USUAL = ("--zero-1-memory-optimization", "--use-distributed-optimizer", "--zero-2-memory-optimization")
WAYS = {**dict.fromkeys(KEPT, "kept"), **dict.fromkeys(GIVEN_BACK, "given back"), **dict.fromkeys(AS_USUAL, "as usual")}


@pytest.fixture(autouse=True)
def as_usual() -> Iterator[None]:
    yield
    use_default_allocator()
    assert freed_memory() == "as usual"


def _choose(flags: str, device: str = "cpu") -> str:
    use_default_allocator()
    choose_allocation(replace(resolve(config_of(flags), WITH_PACKAGES), device=device))
    return freed_memory()


def test_switches_say_what_becomes_of_it() -> None:
    assert {flags: _choose(flags) for flags in WAYS} == WAYS


def test_on_a_gpu_the_host_is_left_alone() -> None:
    assert _choose("", "cuda") == "as usual"


FAULTS = """
import resource, sys, torch
from rapidformer_templates.system import process_state

for way, of in ((process_state.keep_freed_memory, min), (process_state.give_freed_memory_back, max)):
    way()
    shares = []
    for step in range(12):  # glibc does not find every hole at once, and the system may give large pages
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(2**22)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        shares.append(faults * resource.getpagesize() / 2**24)
    print(of(shares))
    process_state.use_default_allocator()
"""


@pytest.mark.longer
@pytest.mark.slow
def test_only_what_is_given_back_must_be_asked_for_again() -> None:
    """Measured by the share of a tensor's pages that the system has to provide, in a separate process."""
    told = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True).stdout
    kept, given_back = map(float, told.split())
    assert kept < 0.1
    assert 0.9 < given_back < 1.1
