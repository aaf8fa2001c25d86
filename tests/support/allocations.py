"""The memory that torch's allocator gave on the CPU, which does not depend on the holes that earlier tests left."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile


@dataclass
class Allocations:
    """The most bytes of new tensors that existed at the same time inside the context. Set when the context ends."""

    peak: int = 0


@contextmanager
def measured_allocations() -> Iterator[Allocations]:
    """Measure the tensors of the body with torch's profiler."""
    found = Allocations()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        yield found
    changes = [(e.start_ns(), e.nbytes()) for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = 0
    for _, size in sorted(changes):
        alive += size
        found.peak = max(found.peak, alive)
