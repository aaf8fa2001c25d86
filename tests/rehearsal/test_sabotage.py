"""Remove each line that an accelerator needs for correct numbers, and check that the rehearsed run notices.

Streams are late: those that copy or those that compute, depending on the ones that the line waits for.
"""

import importlib
import inspect
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import reduce
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from rapidformer_templates.data.loader import on_device
from rapidformer_templates.system import process_state
from rapidformer_templates.system.accelerator import HostCopy
from tests.support import stand_in
from tests.support.parity import Trained, weights_apart
from tests.support.stand_in import late
from tests.support.stand_in.runs import CASES, rehearsed, train_silently
from tests.support.worker_pool import WorkerError, run_in_workers

pytestmark = [pytest.mark.accelerator, pytest.mark.slow, pytest.mark.skipif(**stand_in.missing())]


@contextmanager
def without(module: str, line: str, instead: str = "pass") -> Iterator[None]:
    """Run with one line of the source replaced.

    Args:
        module: module whose source contains the line, in a function of the module or of a class.
        line: the line as it is in the source, without its indentation. It must occur exactly once.
        instead: the replacement.

    Raises:
        ValueError: the line does not occur, or it occurs more than once.
    """
    live = importlib.import_module(module)
    source = Path(live.__file__ or "").read_text(encoding="utf-8")
    if sum(text.strip() == line for text in source.splitlines()) != 1:
        raise ValueError(f"{module} has not one line '{line}'")
    changed = [text.replace(line, instead) if text.strip() == line else text for text in source.splitlines()]
    number = next(i for i, text in enumerate(source.splitlines(), 1) if text.strip() == line)
    code = compile("\n".join(changed), str(live.__file__), "exec")
    name, other = _outermost(code, number)
    function: Any = reduce(getattr, name.split("."), live)
    function = inspect.unwrap(function)  # torch wraps the steps of optimizers, some of them twice
    kept = function.__code__
    function.__code__ = other
    try:
        yield
    finally:
        function.__code__ = kept


def _outermost(code: CodeType, number: int) -> tuple[str, CodeType]:
    """Return the qualified name and the code of the outermost function that contains the line."""
    for part in (constant for constant in code.co_consts if isinstance(constant, CodeType)):
        lines = [line for _, _, line in part.co_lines() if line]
        nested = [line for inner in _inside(part) for _, _, line in inner.co_lines() if line]
        if number in (*lines, *nested):
            is_class = not part.co_flags & 0x2  # only functions have the flag CO_NEWLOCALS
            return _outermost(part, number) if is_class else (part.co_qualname, part)
    raise ValueError(f"line {number} is in no function")


def _inside(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inside(constant)


PACKAGE = "rapidformer_templates."


class Line(NamedTuple):
    """A line of the product, and a run that needs it.

    Attributes:
        module, line, instead: see :func:`without`.
        run: name of the run in :data:`CASES`.
        main, side: delay of the streams in seconds.
    """

    module: str
    line: str
    instead: str = "pass"
    run: str = ""
    main: float = 0.0
    side: float = 0.0


READ_TOO_EARLY = "NonFiniteLoss|is out of bounds for dimension|negative dimension"
"""Errors of runs that read values, ids or sizes before they had arrived. Other runs end with wrong numbers."""
OFFLOADED = "offloaded activations"
HALF = "fp16"
LINES = {
    "tensors are made before they are sent": Line(
        "switches.offload_activations.transform",
        "stream.wait_stream(torch.accelerator.current_stream(self._device))",
        run=OFFLOADED,
        main=0.002,
    ),
    "copies are waited for": Line(
        "switches.offload_activations.transform",
        "return lambda: torch.accelerator.current_stream(self._device).wait_event(copied)",
        "return lambda: None",
        OFFLOADED,
        side=0.01,
    ),
    "a checkpoint's copy is waited for": Line(
        "run.checkpoint.async_save",
        "accelerator.synchronize(self._workers.device)",
        run="saved during training",
        main=0.002,
    ),
    "gradients on the host are waited for": Line(
        "engines.optimizer_state", "event.synchronize()", run="offloaded state", side=0.01
    ),
    "gradients are computed before they go to the host": Line(
        "engines.optimizer_state",
        "self._side.wait_stream(torch.accelerator.current_stream(self._side.device))",
        run="offloaded state",
        main=0.002,
    ),
    "gradients are divided by the loss scale": Line(
        "engines.local",
        "divisor = self.loss_scale.scale if self.loss_scale is not None else None",
        "divisor = None",
        HALF,
    ),
    "their norm is divided by the loss scale": Line(
        "engines.local", "return norm if self.loss_scale is None else norm / self.loss_scale.scale", "return norm", HALF
    ),
    "summed gradients are waited for": Line(  # those of each micro batch, which are added to the earlier ones
        "engines.parallel.replicas", "work.wait()", run="context, all to all × zero-2", side=0.01
    ),
    "updated weights are waited for": Line(
        "engines.parallel.replicas", "gathering.wait()", run="context, all to all × zero-2", side=0.01
    ),
    "hidden states of other stages are waited for": Line(
        "switches.layout.pipeline_engine", "self.work.wait()", run="pipeline", side=0.01
    ),
    "keys and values in a ring are waited for": Line(
        "switches.layout.context_attention", "work.wait()", run="context, in a ring", side=0.01
    ),
}
"""Lines by their purpose."""


def _sabotaged(workers: Any, name: str) -> Trained:
    line = LINES[name]
    untried = mock.patch(PACKAGE + "switches.layout.context.can_be_tried", return_value=False)
    with untried, late(main=line.main, side=line.side), without(PACKAGE + line.module, line.line, line.instead):
        return train_silently(CASES[line.run])


@pytest.mark.parametrize("name", LINES)
def test_a_run_without_it_is_another(name: str) -> None:
    case = CASES[LINES[name].run]
    wanted = rehearsed(case)
    found, error = None, ""
    try:
        found = run_in_workers(case.devices, _sabotaged, name, device=stand_in.NAME)[0]
    except WorkerError as ended:
        error = str(ended)
    if found is None:
        assert re.search(READ_TOO_EARLY, error), error
        return
    curves = [torch.tensor(run["curve"], dtype=torch.float64).nan_to_num(1e9) for run in (wanted, found)]
    apart = weights_apart(found["weights"], wanted["weights"])
    assert not torch.allclose(*curves, rtol=1e-4, atol=0) or math.isnan(apart) or apart > 1e-4


def _sums() -> Any:
    """Return the sums of batches that are freed as soon as the host has requested their sums."""
    batches = [SimpleNamespace(batch={"x": torch.full((1000,), float(i)).pin_memory()}) for i in range(4)]
    moved: Any = on_device(batches, torch.device(stand_in.NAME, 0), ahead=1)  # type: ignore[arg-type]
    return torch.stack([(microbatch.batch.pop("x") * 2).sum() for microbatch in moved]).nan_to_num(-1).tolist()


def _read() -> Any:
    return HostCopy(torch.full((3,), 2.0, device=stand_in.NAME) * 2).values()


def _drawn_again() -> Any:
    """Return whether a restored generator draws the same numbers on the device."""
    tensors, text = process_state.capture()
    first = torch.rand(4, device=stand_in.NAME)
    process_state.restore(tensors, text)
    return torch.equal(first.cpu(), torch.rand(4, device=stand_in.NAME).cpu())


RECORD = "leaf.record_stream(computes)  # the side stream owns its memory and must not reuse it too early"
HEARD = "self._event.synchronize()"
RESTORED = "accelerator.set_random_state(device, tensors[device.type])"
SUMS = [2000.0 * i for i in range(4)]
DIRECT = {
    "batches are waited for": (_sums, SUMS, Line("data.loader", "computes.wait_event(copy_event)", side=0.1)),
    "memory of batches is kept": (_sums, SUMS, Line("data.loader", RECORD, main=0.05)),
    "values on the host are waited for": (_read, [4.0] * 3, Line("system.accelerator", HEARD, main=0.1)),
    "the device's random numbers are put back": (_drawn_again, True, Line("system.process_state", RESTORED)),
}
"""In runs as small as these, the values that such a line waits for have always arrived already."""


def _with_and_without(workers: Any, name: str) -> list[Any]:
    asked, _, line = DIRECT[name]
    asked()  # the first call takes long
    found = []
    for out in (nullcontext(), without(PACKAGE + line.module, line.line)):
        with late(main=line.main, side=line.side), out:
            found.append(asked())
    return found


@pytest.mark.parametrize("name", DIRECT)
def test_values_without_it_are_others(name: str) -> None:
    _, wanted, _ = DIRECT[name]
    found, sabotaged = run_in_workers(1, _with_and_without, name, device=stand_in.NAME)[0]
    assert found == wanted
    assert sabotaged != wanted
