"""What a switch measures of a run, to show that it acted: what its ``receipt_hooks`` name is one of these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from rapidformer_templates.data.loader import MicroBatch, to_device
from rapidformer_templates.engines.contract import Engine


@dataclass(frozen=True)
class Probe:
    """A run before its first step.

    Attributes:
        engine: what trains.
        microbatch: the first of this worker.
    """

    engine: Engine
    microbatch: MicroBatch

    def forward(self) -> None:
        """The loss of the micro batch, in a forward that leaves no trace."""
        batch = to_device(self.microbatch.batch, self.engine.workers.device)
        with self.engine.measuring() as model:
            self.engine.compute_loss(model, batch)


class Receipt:
    """What one switch measures; each part does nothing by default.

    Values are plain ones, by the names of the switch's ``receipt``; a worker that does not have one leaves it out, or
    gives None. They are looked at by the switch's ``acted`` and stand in ``summary.json``.

    Attributes:
        compiles: whether modules become parts of graphs, into which hooks on them would be compiled, too.
    """

    compiles = False

    def before_step(self, probe: Probe) -> Mapping[str, Any]:
        """Measurements of forwards before the first step; workers that share a model's weights must all make them."""
        return {}

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Around the first step."""
        yield

    def after_step(self, engine: Engine) -> Mapping[str, Any]:
        """Measurements of the engine after the first step, and again at the end of the run."""
        return {}

    def hides_parts(self, module: nn.Module) -> bool:
        """Whether a module runs as a graph, and its parts are not called."""
        return False
