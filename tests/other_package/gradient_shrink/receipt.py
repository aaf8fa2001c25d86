"""The measurement of the switch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gradient_shrink.transform import Shrunk
from rapidformer_templates.engines.contract import Engine, Probe, Receipt


class Ratio(Receipt):
    """``embedding_gradient_ratio``: gradient norm at the table over that at its output, in the first step."""

    def __init__(self) -> None:
        self._shrunk: Shrunk | None = None

    def before_step(self, probe: Probe) -> dict[str, Any]:
        model: Any = probe.engine.model
        forward = vars(model.get_input_embeddings() or object).get("forward")
        self._shrunk = forward if isinstance(forward, Shrunk) else None
        return {}

    @contextmanager
    def around_step(self) -> Iterator[None]:
        if self._shrunk:
            self._shrunk.watching = True
        yield
        if self._shrunk:
            self._shrunk.watching = False

    def after_step(self, engine: Engine) -> dict[str, Any]:
        norms = self._shrunk.norms if self._shrunk else []
        came, went = (sum(norm for kind, norm in norms if kind == which) for which in ("came", "went"))
        return {"embedding_gradient_ratio": went / came if came else None}
