"""The result of a search: layouts with their predictions, and the constraints of the others. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rapidformer_templates.switches.auto_strategy.layouts import Layout
from rapidformer_templates.switches.auto_strategy.step_seconds import Timing
from rapidformer_templates.switches.auto_strategy.whole_training import ModelTotals

ALLOWANCE = 0.05
"""Share of the predicted memory that must also be free: for fragmentation, and for buffers a transfer still holds."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker at its peak.

    Attributes:
        parameters, gradients, optimizer: the states. Gradients are those at the start of the update.
        buffers: what an engine holds in addition: buckets, whole parameters of active blocks.
        activations: everything else that is alive at the peak. If the peak comes before the gradients
            exist, activations use their memory, and only the rest counts here.
        host: offloaded states and activations in the host memory of a GPU worker. It is not part of the total.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    host: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.activations


@dataclass(frozen=True)
class SetupMemory:
    """Bytes of one worker at its peak before the first step. On a CPU both are the same memory.

    Attributes:
        device: on the accelerator.
        host: in the memory of its node.
    """

    device: int
    host: int


@dataclass(frozen=True)
class Candidate:
    """A layout that fits.

    Attributes:
        memory: at the peak of training.
        setup: at the peak before the first step.
        needed_gb: memory that the device must have: the higher peak plus the allowance and the context.
        host_gb: memory that a node must have for all of its workers: the higher peak plus the allowance.
        step_flops: operations of the model's matrix products in an optimizer step of all workers. Recomputation does
            not count.
    """

    layout: Layout
    memory: Memory
    setup: SetupMemory
    timing: Timing
    needed_gb: float
    host_gb: float
    step_flops: float

    @property
    def samples_per_second(self) -> float:
        return self.layout.global_batch / self.timing.total


@dataclass(frozen=True)
class Rejected:
    """A layout that does not work, and the constraint that failed."""

    layout: Layout
    constraint: str


@dataclass(frozen=True)
class Unknown:
    """Quantities that are predicted as if a switch were off.

    Attributes:
        switch: name of the switch.
        kinds: the affected kinds of ``FORECAST``.
        why: the reason.
    """

    switch: str
    kinds: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class SearchResult:
    """All layouts of a number of workers.

    Attributes:
        layouts: those that fit, best first.
        rejected: the others.
        totals: sizes of the model that do not depend on the layout.
        not_predicted: effects of flags that the numbers leave out.
        file: the file that the result was read from, or None if it was searched for.
    """

    layouts: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    totals: ModelTotals
    not_predicted: tuple[Unknown, ...] = ()
    file: Path | None = field(default=None, compare=False)
