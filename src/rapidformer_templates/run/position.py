"""The progress of a run, which each checkpoint contains."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rapidformer_templates.data.types import Bookmark


@dataclass
class Position:
    """The progress of a run, saved with each checkpoint.

    Attributes:
        step: number of completed optimizer steps.
        samples, tokens: number consumed since the start of the run.
        best: step, metric and value of the best evaluation so far, if the run tracks one.
        best_loss: the loss of that evaluation. It decides between equal values of the metric.
        evaluations_since_best: number of evaluations since the metric was last better than before.
        data: everything that the order of the data depends on. A resumed run must match it.
        base: identity of the frozen weights under adapters, which are not in the checkpoint. None without adapters.
        stream: position in a stream of samples. None if the data is not a stream.
        callbacks: states of the callbacks by name.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    best: dict[str, Any] | None = None
    best_loss: float | None = None
    evaluations_since_best: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    base: str | None = None
    stream: Bookmark | None = None
    callbacks: dict[str, Any] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """Completed steps, samples and tokens: the units of an interval."""
        return {"steps": self.step, "samples": self.samples, "tokens": self.tokens}

    def to_state(self) -> dict[str, Any]:
        """Return the values for a checkpoint. ``waited`` is the key of the evaluations since the best one."""
        state = dataclasses.asdict(self)
        state["waited"] = state.pop("evaluations_since_best")
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Position:
        """Restore the values of a checkpoint. An older version saved fewer of them."""
        values = {**state, "evaluations_since_best": state.get("waited", 0)}
        return cls(**{name: values[name] for name in cls.__dataclass_fields__ if name in values})
