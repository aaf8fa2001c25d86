"""Callbacks as objects: the events that they receive, and a state that survives the death of a run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates import Callback
from rapidformer_templates.errors import CheckpointError, ConfigError
from rapidformer_templates.run.hooks import checked_callbacks, states_of
from tests.support.dropout_runs import FLAGS, Died, DropoutJob, assert_same
from tests.support.lines import FLAGS as LINE
from tests.support.lines import Worsening
from tests.support.messages import Says


class Events(Callback):
    """Records the events that it receives."""

    def __init__(self) -> None:
        self.seen: list[list[Any]] = []

    def note(self, event: str, value: Any) -> None:
        self.seen.append([event, value])

    def on_train_start(self, trainer: Any) -> None:
        self.note("start", trainer.config.training.train_iters)

    def on_step_end(self, trainer: Any, step: int, result: Any) -> None:
        self.note("step", [step, float(result.loss)])

    def on_epoch_end(self, trainer: Any, epoch: int) -> None:
        self.note("epoch", epoch)

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        self.note("evaluate", [step, metrics["eval_loss"]])

    def on_checkpoint(self, trainer: Any, step: int, folder: Path) -> None:
        self.note("checkpoint", [step, folder.name])

    def on_train_end(self, trainer: Any, summary: Mapping[str, Any]) -> None:
        self.note("end", summary["steps"])


class Kept(Events):
    """Saves what it has seen in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = list(state["seen"])


def job(folder: Path, *callbacks: Callback, flags: str = "", dies_after: int | None = None) -> DropoutJob:
    made = DropoutJob([*FLAGS.split(), "--eval-interval", "4", "--save", str(folder), *flags.split()],
                      callbacks=list(callbacks))  # fmt: skip
    made.dies_after = dies_after
    return made


def test_state_of_a_run_that_died_is_that_of_the_whole_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, first, second, other = Kept(), Kept(), Kept(), Events()
    job(tmp_path / "whole", whole, other).fit()
    assert whole.seen == other.seen
    assert [event for event, _ in whole.seen][:5] == ["start", "step", "step", "step", "checkpoint"]
    assert {event for event, _ in whole.seen} == {"start", "step", "evaluate", "checkpoint", "end"}
    with pytest.raises(Died):
        job(tmp_path / "run", first, dies_after=8).fit()  # the template's own hook comes first
    job(tmp_path / "run", second, Events(), flags="--resume").fit()
    assert_same(tmp_path / "whole", tmp_path / "run")
    steps = [value for event, value in second.seen if event in ("step", "evaluate")]
    assert steps == [value for event, value in whole.seen if event in ("step", "evaluate")]
    state = json.loads((tmp_path / "run/checkpoints/step-12/state.json").read_text())
    assert list(state["callbacks"]) == ["Kept"]
    assert "warning" not in capsys.readouterr().err

    class New(Kept):
        """A callback that did not exist when the checkpoint was saved."""

    job(tmp_path / "run", New(), flags="--resume --train-iters 13").fit()
    err = capsys.readouterr().err
    assert "the checkpoint has a state of Kept, which this run does not have: it is lost" in err
    assert "the checkpoint has no state of test_state_of" in err


def test_events_come_in_order_and_the_templates_hooks_first(tmp_path: Path) -> None:
    one, two = Kept(), Kept()
    calls: list[Any] = []

    def hook(name: str) -> Any:
        return lambda self, *values: calls.append([name, *values[:1]] if name != "on_train_end" else [name])

    names = ("on_train_start", "on_step_end", "on_evaluate", "on_epoch_end", "on_checkpoint", "on_train_end")
    kind = type("Called", (Worsening,), {name: hook(name) for name in names})
    one.note = lambda event, value: calls.append(event)  # type: ignore[method-assign]
    flags = [*LINE, "--epochs", "2", "--micro-batch-size", "10", "--save", str(tmp_path / "run")]
    kind(flags, callbacks=[one, two]).fit()
    each = [
        [["on_step_end", step], "step"] if step % 2 else
        [["on_step_end", step], "step", ["on_evaluate", step], "evaluate", ["on_epoch_end", step // 2], "epoch",
         ["on_checkpoint", step], "checkpoint"]
        for step in range(1, 5)
    ]  # fmt: skip
    assert calls == [["on_train_start"], "start", *itertools.chain(*each), ["on_train_end"], "end"]
    assert set(states_of([one, two])) == {"Kept", "Kept-2"}


class Misspelt(Callback):
    """A callback with a method that would never be called."""

    def on_epoch_ends(self, trainer: Any, epoch: int) -> None:
        """Never called."""


@pytest.mark.parametrize(
    "callbacks", [Kept(), [Kept], [Kept(), print], [Misspelt()]], ids=["one", "class", "function", "name"]
)
def test_what_is_no_callback_is_refused(callbacks: Any, says: Says) -> None:
    with says(ConfigError, HERE=f"test_callbacks.py:{Misspelt.on_epoch_ends.__code__.co_firstlineno}"):
        checked_callbacks(callbacks)


@pytest.mark.parametrize(
    "state", [{"at": Path("x")}, {1: "a"}, {"pair": (1, 2)}, ["a"]], ids=["kind", "key", "tuple", "list"]
)
def test_a_state_that_would_change_is_told_before_the_first_step(state: Any, tmp_path: Path, says: Says) -> None:
    callback = Kept()
    callback.state_dict = lambda: state  # type: ignore[method-assign]
    with says(CheckpointError):
        job(tmp_path / "run", callback).fit()
    assert [event for event, _ in callback.seen] == ["start"]
