"""``--profile``: profile a few steps. Writes a Chrome trace, a readable table and JSON.

On a GPU, idle time is time without a running kernel. On a CPU, it is time outside torch operators: waiting for data,
waiting for other workers, and Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.run.run import Run
from rapidformer_templates.system import accelerator
from rapidformer_templates.system.files import write_json

WARMUP = 3
"""Steps of this process before the first recorded one. They contain allocations, receipts and compilation."""

STEP, DATA, EXCHANGE, TRAIN, REST = (f"rapidformer: {part}" for part in ("step", "data", "exchange", "train", "rest"))
"""Names in the trace for the parts of a training step."""

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")
"""Calls in which the host waits for a device. The third one keeps the host from running too far ahead."""

ROWS = 25

Interval = tuple[float, float]
"""(start, end) in microseconds."""


class Profile:
    """Records ``steps`` steps after a warm-up, then writes the results to ``folder``."""

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
        if self._seen == WARMUP:
            activities = [ProfilerActivity.CPU, *(_device_activities(self._device))]
            self._recorder = profile(activities=activities, record_shapes=False)
            self._recorder.start()
        if self._recorder:
            self._step = record_function(STEP)
            self._step.__enter__()

    def step_ends(self) -> bool:
        """Call this after the last part of each step. Returns whether the profile is complete and written."""
        self._seen += 1
        if self._recorder is None:
            return False
        self._step.__exit__(None, None, None)
        if self._seen < WARMUP + self.steps:
            return False
        accelerator.synchronize(self._device)
        self._recorder.stop()
        self._write(self._recorder)
        return True

    def _write(self, recorder: profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        recorder.export_chrome_trace(str(self.folder / "trace.json"))
        measured = summary(list(recorder.events() or []), self.steps)
        write_json(self.folder / "summary.json", measured)
        by = "self_device_time_total" if _device_activities(self._device) else "self_cpu_time_total"
        table = recorder.key_averages().table(sort_by=by, row_limit=ROWS, max_name_column_width=60)
        (self.folder / "table.txt").write_text(f"{describe(measured)}\n\n{table}\n", encoding="utf-8")


def open_profile(run: Run, steps_left: int) -> Profile | None:
    """Return the profile of a run, on its main worker only. None if it is off or the resumed run has no steps left.

    Raises:
        ConfigError: the run has too few steps.
    """
    steps = run.config.training.profile
    if not steps or not steps_left or run.folder is None:
        return None
    if steps_left < WARMUP + steps:
        raise ConfigError(
            f"--profile {steps} needs {WARMUP + steps} steps, this run has {steps_left}",
            where=run.config.origin("profile"),
            hint=f"the first {WARMUP} are a warm-up; train for more steps, or record fewer of them",
        )
    return Profile(run.folder.profile, steps, run.workers.device) if run.workers.is_main else None


def _device_activities(device: torch.device) -> list[ProfilerActivity]:
    """Return the profiler activities of an accelerator, in addition to the host's."""
    own = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU, "mtia": ProfilerActivity.MTIA}
    return [own[device.type]] if device.type in own else []


def summary(events: Sequence[FunctionEvent], steps: int) -> dict[str, Any]:
    """Summarize a recording, in milliseconds per step.

    Args:
        events: ``FunctionEvent`` objects of torch: name, time range (µs), device.
        steps: number of recorded steps.
    """
    host = [event for event in events if event.device_type == DeviceType.CPU]
    whole = [_interval(event) for event in host if event.name == STEP]
    operators = _union(_interval(e) for e in host if e.name.startswith(("aten::", "c10d::")))
    parts = {name: [_interval(e) for e in host if e.name == name] for name in (DATA, EXCHANGE, TRAIN)}
    wall = _length(whole)
    outside = {
        name: _length(intervals) - _length(_intersection(operators, intervals)) for name, intervals in parts.items()
    }
    in_operators = _length(_intersection(operators, whole))
    rest = wall - in_operators - sum(outside.values())
    result: dict[str, Any] = {
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


def describe(measured: dict[str, Any]) -> str:
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


def read_summary(folder: Path) -> dict[str, Any]:
    """Read the summary that a run has written."""
    run_summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return run_summary


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
