"""Receipt of the bytes that went to the host in the first step."""

from __future__ import annotations

from typing import Any

from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.receipt import Receipt
from rapidformer_templates.switches.offload_activations.offloader import Offloader


class Offloading(Receipt):
    """Reports ``offloaded_bytes``, ``offloaded_bytes_at_a_time`` and ``late_bytes`` of this worker."""

    def __init__(self) -> None:
        self._first: dict[str, int] | None = None

    def after_step(self, engine: Engine) -> dict[str, Any]:
        offloader = engine.assembly.find(Offloader)
        if offloader is not None and self._first is None:
            counts = offloader.counts
            self._first = {
                "offloaded_bytes": counts.sent,
                "offloaded_bytes_at_a_time": counts.most_offloaded,
                "late_bytes": counts.late,
            }
        return self._first or {}
