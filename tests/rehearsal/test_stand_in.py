"""The stand-in device itself: what it must refuse, so that rehearsals on it mean something. They show its other sides.

Every test runs in a separate process, because torch keeps computing on a device once it is registered.
"""

import ctypes
import faulthandler
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import stand_in
from tests.support.stand_in import host_reads, late
from tests.support.worker_pool import new_process, run_in_workers

pytestmark = [pytest.mark.accelerator, pytest.mark.slow, pytest.mark.skipif(**stand_in.missing())]
LATE = 0.02


def _on_the_device(function: Callable[[], Any]) -> Any:
    return run_in_workers(1, _call, function, device=stand_in.NAME)[0]


def _call(workers: Any, function: Callable[[], Any]) -> Any:
    return function()


def _die() -> None:
    faulthandler.disable()  # no stack trace is needed
    stand_in.load()
    tensor = torch.ones(4, device=stand_in.NAME)
    torch.accelerator.synchronize()
    ctypes.string_at(tensor.data_ptr(), 4)


def test_the_host_cannot_touch_its_memory() -> None:
    process = new_process(_die)
    process.start()
    process.join()
    assert process.exitcode == -11  # SIGSEGV


def _reads() -> tuple[list[str], list[str]]:
    tensor = torch.ones(4, device=stand_in.NAME)
    with host_reads() as none:
        (tensor * 2).sum()
        tensor.to("cpu", non_blocking=True)  # into page-locked memory
    with host_reads() as some:
        float(tensor[0])
        bool((tensor > 0).all())
        tensor.cpu()
        tensor.nonzero()
        str(tensor)
    return none, some


def test_what_the_host_reads_is_counted_with_its_line() -> None:
    none, some = _on_the_device(_reads)
    assert none == []
    assert len(some) >= 5
    assert all("test_stand_in.py" in where for where in some)
    assert [where.partition(": ")[0] for where in some[:4]] == ["item()", "item()", "copy to the host", "aten::nonzero"]


def _streams() -> dict[str, float]:
    """Read a product of a side stream on the computing stream, with and without waiting for it."""
    found = {}
    for waits in (True, False):
        source = torch.full((4,), 3.0, device=stand_in.NAME)
        side = torch.Stream(source.device)
        side.wait_stream(torch.accelerator.current_stream())
        with late(side=LATE):
            with side:
                made = source * 2
                event = side.record_event()
            if waits:
                torch.accelerator.current_stream().wait_event(event)
            read = made + 0
            found[f"waits {waits}"] = float(read.nan_to_num(-1)[0])
    return found


def test_who_does_not_wait_for_a_stream_reads_something_else() -> None:
    found = _on_the_device(_streams)
    assert found["waits True"] == 6.0
    assert found["waits False"] != 6.0


def _recorded() -> dict[str, float]:
    """A side stream reads a tensor that is freed meanwhile, while something else takes its memory."""
    found = {}
    for records in (True, False):
        source = torch.full((1000,), 3.0, device=stand_in.NAME)
        side = torch.Stream(source.device)
        side.wait_stream(torch.accelerator.current_stream())
        with late(side=LATE):
            with side:
                read = source * 2
            if records:
                source.record_stream(side)
            del source
            other = torch.full((1000,), 5.0, device=stand_in.NAME)
            torch.accelerator.synchronize()
            found[f"records {records}"] = float(read.nan_to_num(-1)[0])
        del other, read
    return found


def test_memory_is_taken_from_who_has_not_recorded_its_use() -> None:
    found = _on_the_device(_recorded)
    assert found["records True"] == 6.0
    assert found["records False"] != 6.0


def _pinned() -> tuple[float, float]:
    with late(main=LATE):
        buffer = torch.ones(4).pin_memory()
        there = buffer.to(stand_in.NAME, non_blocking=True)
        buffer.fill_(7.0)  # before the copy has been made
        early = float(there[0])
        buffer.fill_(1.0)
        there = buffer.to(stand_in.NAME, non_blocking=True)
        torch.accelerator.synchronize()
        buffer.fill_(7.0)
        return early, float(there[0])


def test_a_host_buffer_that_is_used_again_too_early_gives_other_numbers() -> None:
    assert _on_the_device(_pinned) == (7.0, 1.0)
