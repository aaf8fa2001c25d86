"""Gradient accumulation: several micro batches per optimizer step, computed from the two batch sizes."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rapidformer_templates.data.finetuning.locating import steps_of
from rapidformer_templates.errors import counted
from rapidformer_templates.planning.changes import add, replace
from rapidformer_templates.planning.checks import shown
from rapidformer_templates.planning.config import COMMAND_LINE, spelling
from rapidformer_templates.planning.flag_values import Epochs
from rapidformer_templates.planning.switch import Finding, Measured, Precedence, Prediction, Request, RuleList, Switch


@dataclass(frozen=True)
class GradientAccumulationFlags:
    """Acceleration"""  # it has no flag itself


RULES = RuleList()


@RULES.add("RF006", "[R]", "--epochs 3 --micro-batch-size 4 --global-batch-size 16")
def _only_by_iterations(request: Request) -> Iterator[Finding]:
    """Gradient accumulation needs an iteration-based run.

    Why: an epoch need not hold a whole number of accumulated steps.
    """
    config, sizes, epochs = request.config, request.sizes, request.config.training.epochs
    if epochs is None:
        return
    # Suggest --train-iters with these epochs, and show the number of steps if the samples can be counted.
    in_epochs = Epochs(f"{epochs}epochs")
    is_counted = not any(switch.order for switch in request.active.values())
    steps = steps_of(config, in_epochs, sizes.global_batch) if is_counted else None
    note = f"in place of --epochs {epochs}" + (f": {counted(steps, 'step')}" if steps else "")
    changes = [add({"train_iters": in_epochs, "epochs": None}, note)]
    if config.origin("epochs") == COMMAND_LINE and not request.environment.white_box:
        changes = [dataclasses.replace(changes[0], describe=_command(request, changes[0].values))]
    per_worker, rest = divmod(sizes.global_batch, sizes.data)
    if not rest:
        changes.append(replace({"micro_batch_size": per_worker}, "the same global batch in one forward"))
    changes.append(replace({"global_batch_size": sizes.micro_batch * sizes.data}, "no accumulation"))
    message = f"gradient accumulation ({sizes.accumulation} micro batches per step) needs --train-iters, not --epochs"
    yield Finding(message, request.asked("micro_batch_size", "global_batch_size", "epochs"), changes=tuple(changes))


def _command(request: Request, values: Mapping[str, object]) -> str:
    """Return the whole command line with other values, ready to copy."""
    config, world = request.config, request.environment.world_size
    words = ["rapidformer"] if request.training else ["rapidformer", "plan"]
    if not request.training and world > 1:
        words += ["--world-size", str(world)]
    given: dict[str, object] = {n: config.get(n) for n, origin in config.origins.items() if origin == COMMAND_LINE}
    for name, value in {**given, **values}.items():
        if value is False:
            words.append(spelling(f"no_{name}"))
        elif value is not None:
            own = value if isinstance(value, tuple) else () if value is True else (value,)
            words += [spelling(name), *map(str, own)]
    return shlex.join(words)


def _acted(measured: Measured) -> str | None:
    expected, actual = measured.plan.sizes.accumulation, measured.all("micro_steps")
    if actual and set(actual) == {expected}:
        return None
    return f"{expected} micro batches per step were expected; the workers had {shown(actual)}"


SWITCHES = (
    Switch(
        name="gradient-accumulation",
        summary="Several micro batches per optimizer step: global batch / (micro batch × data-parallel size).",
        source="[R, S]",
        precedence=Precedence.DATA,
        options=GradientAccumulationFlags,
        active=lambda options, sizes: sizes.accumulation > 1,
        on={"global_batch_size": 16},
        off={"global_batch_size": None},
        predicts=Prediction(
            {"gradients": "kept from the first micro batch to the last", "time": "more micro batches per step"}
        ),
        receipt=("micro_steps",),
        acted=_acted,
        rules=tuple(RULES),
    ),
)
