"""Errors of the device itself: a failed kernel, or a lost device."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rapidformer_templates.errors import DeviceFailed, is_out_of_memory

TORCH = str(Path(torch.__file__).parent)


@contextmanager
def locate_errors(step: Callable[[], int], hint: str = "") -> Iterator[None]:
    """Context for steps. It adds to a device error the step after which the host received it.

    The host runs ahead of a device and receives its errors late, so the line that raises is not the one that failed.

    Args:
        step: returns the number of completed steps.
        hint: how to resume.

    Raises:
        DeviceFailed: replaces the device's error.
    """
    try:
        yield
    except torch.AcceleratorError as error:
        if is_out_of_memory(error):
            raise
        message = (str(error).splitlines() or [type(error).__name__])[0]
        raise DeviceFailed(
            f"after step {step()} the device failed: {message}",
            where=f"raised in {_line_of(error)}; devices report errors late, so it may be from an earlier step",
            hint="; ".join(filter(None, ["with --device cpu a wrong operation fails at its own line", hint])),
        ) from error


def _line_of(error: BaseException) -> str:
    """Return the last line outside torch in the traceback of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if not frame.filename.startswith(TORCH)), frames[-1])
    return f"{frame.filename}:{frame.lineno}"
