"""Measures the performance of a run: throughput and memory of all steps, and a profile of a few.

With ``--profile``, a few steps are recorded as a Chrome trace, a readable table and JSON. On a GPU, idle time is time
without a running kernel. On a CPU, it is time outside torch operators: waiting for data, waiting for other workers, and
Python.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.system import accelerator
from rapidformer_templates.system.files import write_json
from rapidformer_templates.system.process_state import peak_bytes

if TYPE_CHECKING:
    from rapidformer_templates.run.run import Run

WARMUP = 3
"""Number of first steps of a process that are not measured: they contain allocations, receipts and compilation."""

SHARES = 10
"""Number of equal shares of the time whose rates are compared."""


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
        """Return the throughput over all measured steps and wall time in seconds.

        The standard deviation is between ten equal shares of the time. Their mean is the throughput. Single steps have
        no such rate: on a GPU, most of them are only queued before the host waits for one of them.
        """
        result = {"wall_seconds": round(time.perf_counter() - self.started, 3)}
        result |= {"peak_memory_mb": peak_memory_mb(self.device), "measured_steps": len(self._rates)}
        if self._rates:
            ends, done = (np.cumsum([0, *values]) for values in list(zip(*self._rates, strict=True))[:2])
            seconds = max(float(ends[-1]), 1e-9)
            shares = np.diff(np.interp(np.linspace(0, seconds, SHARES + 1), ends, done)) / (seconds / SHARES)
            result |= {
                "samples_per_second": round(sum(rate[1] for rate in self._rates) / seconds, 3),
                **({"samples_per_second_sd": round(float(shares.std(ddof=1)), 3)} if len(self._rates) > 1 else {}),
                **_token_rate(sum(rate[2] for rate in self._rates), seconds),
                "step_ms": round(seconds / len(self._rates) * 1000, 3),
            }
        return result


def _token_rate(tokens: int, seconds: float) -> dict[str, float]:
    """Return the rate of tokens. It is left out if the batches do not show how many tokens they have."""
    return {"tokens_per_second": round(tokens / seconds, 1)} if tokens else {}


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak memory so far in MB (10^6 bytes): allocated on the accelerator, or resident."""
    return round(peak_bytes(device) / 1e6, 1)


STEP, DATA, EXCHANGE, TRAIN, REST = (f"rapidformer: {part}" for part in ("step", "data", "exchange", "train", "rest"))
"""Names in the trace for the parts of a training step."""

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")
"""Calls in which the host waits for a device. The third one keeps the host from running too far ahead."""

ROWS = 25

Interval = tuple[float, float]
"""(start, end) in microseconds."""


ProfileSummary = dict[str, Any]
"""A recording in milliseconds per step: see :func:`summary`."""


class Profile:
    """Records ``steps`` steps after a warm-up, then writes the results to ``folder``. Without steps it does nothing."""

    def __init__(self, folder: Path, steps: int, device: torch.device) -> None:
        self.folder = folder
        self.steps = steps
        self._device = device
        self._seen = 0
        self._recorder: profile | None = None
        self._step: AbstractContextManager[object] = nullcontext()

    def part(self, name: str) -> AbstractContextManager[object]:
        """Mark a part of a step, if steps are being recorded."""
        return record_function(name) if self._recorder else nullcontext()

    def step_begins(self) -> None:
        """Call this before the first part of each step."""
        if self.steps and self._seen == WARMUP:
            self._recorder = profile(activities=[ProfilerActivity.CPU, *_device_activities(self._device)])
            self._recorder.start()
        if self._recorder:
            self._step = record_function(STEP)
            self._step.__enter__()

    def step_ends(self) -> None:
        """Call this after the last part of each step. After the last step, the profile is written."""
        self._seen += 1
        recorder = self._recorder
        if recorder is None:
            return
        self._step.__exit__(None, None, None)
        if self._seen < WARMUP + self.steps:
            return
        self._recorder = None
        accelerator.synchronize(self._device)
        recorder.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        recorder.export_chrome_trace(str(self.folder / "trace.json"))
        measured = summary(list(recorder.events() or []), self.steps)
        write_json(self.folder / "summary.json", measured)
        by = "self_device_time_total" if _device_activities(self._device) else "self_cpu_time_total"
        table = recorder.key_averages().table(sort_by=by, row_limit=ROWS, max_name_column_width=60)
        (self.folder / "table.txt").write_text(f"{describe(measured)}\n\n{table}\n", encoding="utf-8")


def open_profile(run: Run, steps_left: int) -> Profile:
    """Return the profile of a run. It records on the main worker only, and not if a resumed run has no steps left.

    Raises:
        ConfigError: the run has too few steps.
    """
    steps, device = run.config.training.profile, run.workers.device
    if not steps or not steps_left or run.folder is None:
        return Profile(Path(), 0, device)
    if steps_left < WARMUP + steps:
        message = f"--profile {steps} needs {WARMUP + steps} steps, this run has {steps_left}"
        hint = f"the first {WARMUP} are a warm-up; train for more steps, or record fewer of them"
        raise ConfigError(message, where=run.config.origin("profile"), hint=hint)
    return Profile(run.folder.profile, steps if run.workers.is_main else 0, device)


def _device_activities(device: torch.device) -> list[ProfilerActivity]:
    """Return the profiler activities of an accelerator, in addition to the host's."""
    own = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU, "mtia": ProfilerActivity.MTIA}
    return [own[device.type]] if device.type in own else []


def summary(events: Sequence[FunctionEvent], steps: int) -> ProfileSummary:
    """Summarize a recording, in milliseconds per step.

    ``operators_ms`` is the time in torch operators, and ``outside_operators_share`` the fraction outside of them.
    ``host_waits_a_step`` is how often the host waits for the device, by the name of the call. Only on a GPU,
    ``device_busy_ms`` is the time with a running kernel, and ``device_idle_share`` the fraction without one.

    Args:
        events: ``FunctionEvent`` objects of torch: name, time range (µs), device.
        steps: number of recorded steps.
    """
    host = [event for event in events if event.device_type == DeviceType.CPU]
    whole = [_interval(event) for event in host if event.name == STEP]
    operators = _union(_interval(e) for e in host if e.name.startswith(("aten::", "c10d::")))
    parts = {name: [_interval(e) for e in host if e.name == name] for name in (DATA, EXCHANGE, TRAIN)}
    wall = _length(whole)
    outside = {name: _length(times) - _length(_intersection(operators, times)) for name, times in parts.items()}
    in_operators = _length(_intersection(operators, whole))
    rest = wall - in_operators - sum(outside.values())
    result: ProfileSummary = {
        "steps": steps,
        "step_ms": _ms(wall, steps),
        "operators_ms": _ms(in_operators, steps),
        "waiting_for_data_ms": _ms(outside[DATA], steps),
        "exchange_between_workers_ms": _ms(outside[EXCHANGE], steps),
        "python_ms": _ms(outside[TRAIN] + rest, steps),
        "outside_operators_share": round(1 - in_operators / wall, 4) if wall else 0.0,
        "host_waits_a_step": {name: sum(e.name == name for e in host) / steps for name in WAITS},
    }
    # Profilers also project our marks onto the device's timeline.
    marks = ("rapidformer: ", "ProfilerStep", "Optimizer.")
    on_device = (e for e in events if e.device_type == DeviceType.CUDA)
    kernels = _union(_interval(e) for e in on_device if not str(e.name).startswith(marks))
    if kernels:
        span = kernels[-1][1] - kernels[0][0]
        result["device_busy_ms"] = _ms(_length(kernels), steps)
        result["device_idle_share"] = round(1 - _length(kernels) / span, 4) if span else 0.0
    return result


def describe(measured: ProfileSummary) -> str:
    """Format the summary as readable text."""
    waits = ", ".join(f"{name} {count:g}" for name, count in measured["host_waits_a_step"].items() if count) or "none"
    lines = [
        f"{measured['steps']} steps of {measured['step_ms']} ms",
        f"  in operators             {measured['operators_ms']:>10} ms",
        f"  waiting for data         {measured['waiting_for_data_ms']:>10} ms",
        f"  exchange between workers {measured['exchange_between_workers_ms']:>10} ms",
        f"  Python and the rest      {measured['python_ms']:>10} ms",
        f"  outside of operators     {measured['outside_operators_share']:>10.1%}",
        f"  host reads and waits per step: {waits}",
    ]
    if "device_idle_share" in measured:
        lines.insert(1, f"  device busy              {measured['device_busy_ms']:>10} ms")
        lines.insert(2, f"  device idle              {measured['device_idle_share']:>10.1%}")
    return "\n".join(lines)


def _interval(event: FunctionEvent) -> Interval:
    return float(event.time_range.start), float(event.time_range.end)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge overlapping intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _intersection(intervals: Sequence[Interval], frames: Sequence[Interval]) -> list[Interval]:
    """Return the parts of ``intervals`` inside ``frames``. Neither list may contain overlaps."""
    return [(max(a, x), min(b, y)) for a, b in intervals for x, y in frames if min(b, y) > max(a, x)]


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _ms(microseconds: float, steps: int) -> float:
    return round(microseconds / 1000 / steps, 3)
