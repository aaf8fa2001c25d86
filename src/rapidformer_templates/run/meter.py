"""Measures throughput and memory during training. Evaluations and saves are excluded."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rapidformer_templates.system import accelerator

WARMUP = 3
"""Number of first steps that the summary excludes, because of allocations, caches and receipts."""


class Meter:
    """Measures steps, samples and tokens over time.

    A window covers the time from one logged step to the next. On a GPU a step counts as done when the host has queued
    it, a step or two before the device has computed it. The clock is accurate again when the host waits for the device,
    as logging does by reading the loss.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps = 0
        self.started = self._mark = self._last = time.perf_counter()
        self._window = [0, 0, 0]
        self._rates: list[tuple[float, int, int]] = []

    def step(self, samples: int, tokens: int) -> None:
        self.steps += 1
        now = time.perf_counter()
        if self.steps > WARMUP:
            self._rates.append((now - self._last, samples, tokens))
        self._last = now
        self._window = [self._window[0] + 1, self._window[1] + samples, self._window[2] + tokens]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside the context."""
        before = time.perf_counter()
        yield
        spent = time.perf_counter() - before
        self._mark += spent
        self._last += spent

    def window(self) -> dict[str, float]:
        """Return the rates since the last call."""
        now = time.perf_counter()
        seconds = max(now - self._mark, 1e-9)
        # The host has just waited for the device. That time belongs to the last step.
        if self._rates and accelerator.is_asynchronous(self.device):
            spent, samples, tokens = self._rates[-1]
            self._rates[-1] = (spent + now - self._last, samples, tokens)
            self._last = now
        steps, samples, tokens = self._window
        self._mark, self._window = now, [0, 0, 0]
        return {
            "samples_per_second": round(samples / seconds, 3),
            **_token_rate(tokens, seconds),
            "step_ms": round(seconds / max(steps, 1) * 1000, 3),
            "peak_memory_mb": peak_memory_mb(self.device),
        }

    def totals(self) -> dict[str, float]:
        """Return the throughput over all measured steps (mean and standard deviation) and wall time in seconds."""
        result: dict[str, float] = {
            "wall_seconds": round(time.perf_counter() - self.started, 3),
            "peak_memory_mb": peak_memory_mb(self.device),
            "measured_steps": len(self._rates),
        }
        if self._rates:
            seconds = sum(rate[0] for rate in self._rates)
            each = [samples / max(spent, 1e-9) for spent, samples, _ in self._rates]
            result |= {
                "samples_per_second": round(sum(rate[1] for rate in self._rates) / seconds, 3),
                "samples_per_second_sd": round(statistics.stdev(each), 3) if len(each) > 1 else 0.0,
                **_token_rate(sum(rate[2] for rate in self._rates), seconds),
                "step_ms": round(seconds / len(self._rates) * 1000, 3),
            }
        return result


def _token_rate(tokens: int, seconds: float) -> dict[str, float]:
    """Return the rate of tokens. It is left out if the batches do not show how many tokens they have."""
    return {"tokens_per_second": round(tokens / seconds, 1)} if tokens else {}


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak memory so far in MB (10^6 bytes): allocated on the accelerator, or resident."""
    allocated = accelerator.peak_bytes(device) if accelerator.is_asynchronous(device) else None
    if allocated is not None:
        return round(allocated / 1e6, 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak * (1 if sys.platform == "darwin" else 1024) / 1e6, 1)
