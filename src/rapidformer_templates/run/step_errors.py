"""Errors that torch raises in a step: a failed kernel, a lost device, or an index beyond a table."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from rapidformer_templates.errors import DataError, DeviceFailed, is_out_of_memory
from rapidformer_templates.run.index_limits import list_samples

TORCH = str(Path(torch.__file__).parent)


@contextmanager
def locate_device_errors(step: Callable[[], int], hint: str = "") -> Iterator[None]:
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


@contextmanager
def locate_index_errors(samples: Sequence[int], name: str) -> Iterator[None]:
    """Context for forwards on a CPU. An index error of torch becomes an error that names the samples.

    It serves models whose tables are unknown to :class:`IndexLimits`.

    Raises:
        DataError: replaces an :class:`IndexError` that a function of torch has raised.
    """
    try:
        yield
    except IndexError as error:
        if not traceback.extract_tb(error.__traceback__)[-1].filename.startswith(TORCH):
            raise
        raise DataError(
            f"a number of the batch is beyond the table that it indexes: {error}",
            where=f"{name} {list_samples(samples)}, {_line_of(error)}",
            hint="compare the largest token id and the largest label with the sizes of the embedding and of the head",
        ) from error


def _line_of(error: BaseException) -> str:
    """Return the last line outside torch in the traceback of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if not frame.filename.startswith(TORCH)), frames[-1])
    return f"{frame.filename}:{frame.lineno}"
