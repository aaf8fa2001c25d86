"""Hooks of templates and callbacks: events, states that survive the death of a run, and errors that name the hook."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, IterableDataset

from rapidformer_templates import Callback, Data, Finetuner, Trainer
from rapidformer_templates.errors import CheckpointError, ConfigError, ModelError, RapidformerError
from rapidformer_templates.run.hooks import checked_callbacks, states_of
from rapidformer_templates.run.log import Log
from rapidformer_templates.run.scripts import check_names
from rapidformer_templates.system.launch import run_workers
from tests.support.dropout_runs import FLAGS, Died, DropoutJob, assert_same
from tests.support.jobs import CausalJob, DeepJob
from tests.support.lines import FLAGS as LINE
from tests.support.lines import Line, Worsening
from tests.support.messages import Says
from tests.support.parity import EXACT, assert_follows, observed, reference, trained
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

SAMPLES = [{"x": np.ones(1, np.float32), "y": np.ones(1, np.float32)}] * 4
RUN = [*LINE, "--epochs", "1", "--no-save"]


class Stream(IterableDataset[Any]):
    """A data set that can only be iterated."""

    def __iter__(self) -> Any:
        return iter(SAMPLES)


def _adam(parameters: Any = None) -> Any:
    return torch.optim.AdamW(parameters or [torch.nn.Parameter(torch.ones(1))])


RETURNED: dict[str, list[Any]] = {
    "build_data": [
        SAMPLES, None, DataLoader(SAMPLES), Data(train=DataLoader(SAMPLES)), Data(train=Stream()),
        Data(train={"x": [1.0]}), Data(train=SAMPLES, valid=Stream()), Data(train=[]),
        Data(train=SAMPLES, collate="pad"), Data(train=SAMPLES, collate=lambda samples: None),
        Data(train=[{"x": np.ones(i + 1)} for i in range(4)]),
    ],
    "build_model": [None, (Line, None), Line, torch.nn.Linear(1, 1).requires_grad_(False)],
    "build_optimizer": [_adam(), torch.optim.AdamW],
    "build_scheduler": [schedulers.StepLR(_adam(), 1), schedulers.CosineAnnealingLR, lambda step: None],
    "count_targets": [None, "4", -1, torch.ones(2)],
    "compute_loss": [
        None, 0.5, (torch.ones(()), 4, {}), (None, 4), (torch.ones(2), 4), torch.ones(4, 1), torch.ones(()),
        (torch.ones((), requires_grad=True), 3),
    ],
    "read_outputs": [None, [1, 2, 3], ([1], [1])],
    "compute_metrics": [0.5, {"accuracy": [0.5, 0.7]}, {"accuracy": None}],
}  # fmt: skip
"""Return values of hooks that cannot be used."""


@pytest.mark.parametrize("hook", RETURNED)
def test_the_error_names_the_hook(hook: str, says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Line, "build_data", lambda self: Data(train=SAMPLES, valid=SAMPLES))
    for returned in RETURNED[hook]:
        with says(RapidformerError):
            type("Job", (Line,), {hook: lambda self, *arguments, returned=returned: returned})(RUN).fit()
        assert hook in says.said[-1] or "collate" in says.said[-1]


def test_an_optimizer_of_the_models_parameters_is_refused_without_a_stack(says: Says) -> None:
    with says(RapidformerError):
        type("Job", (Line,), {"build_optimizer": lambda self: _adam(self.model.parameters())})(RUN).fit()


class WithOutputs(CausalJob):
    """Returns what transformers' ``compute_loss`` returns with ``return_outputs``."""

    def compute_loss(self, model: Any, batch: Any) -> Any:
        outputs = model(**batch)
        return outputs.loss, outputs


@pytest.mark.longer
@pytest.mark.slow
def test_the_first_of_loss_and_outputs_is_the_mean_loss() -> None:
    flags = "--train-iters 2 --lr 1e-2 --global-batch-size 8 --micro-batch-size 2 --eval-interval 1"
    found, wanted = trained(WithOutputs(flags.split())), trained(CausalJob(flags.split()))
    assert found["curve"] == wanted["curve"]
    assert found["evaluations"] == wanted["evaluations"]


@pytest.mark.parametrize("task", ["sequence_classification", "token_classification"])
def test_the_default_model_of_labels_needs_the_task_s_data(task: str, says: Says) -> None:
    own = type("Own", (Finetuner,), {"build_data": lambda self: Data(train=SAMPLES)})
    sizes = "--model-type bert --num-layers 1 --hidden-size 8 --num-attention-heads 1 --max-position-embeddings 8"
    with says(ModelError):
        own(["--task", task, *sizes.split(), *RUN]).fit()


def test_a_port_that_there_is_not_or_that_is_kept(says: Says) -> None:
    for port in ("0", "65536"):
        with says(ConfigError):
            Line([*RUN, "--master-port", port])
    with mock.patch("socket.socket.bind", side_effect=PermissionError(13, "Permission denied")), says(ConfigError):
        run_workers(["true"], 2, 80)


SHARDED = {
    "fsdp": "--fsdp-memory-optimization",
    "sdp": "--oss-sdp-memory-optimization",
    "ddp": "",
    "oss": "--oss-memory-optimization",
    "distributed optimizer": "--use-distributed-optimizer",
}


@pytest.mark.distributed
@pytest.mark.parametrize("layout", by_default(["fsdp", "sdp"], SHARDED))
def test_what_hooks_freeze_stays_so_under_every_engine(layout: str) -> None:
    flags = "--train-iters 6 --eval-interval 3 --global-batch-size 8 --micro-batch-size"
    expected = reference("freezing", True, f"{flags} 8")
    assert_follows(observed(2, "freezing", True, f"{flags} 4 {SHARDED[layout]}")[0], expected, *EXACT)


def _method(self: Any, *arguments: Any) -> None:
    """A placeholder for a hook."""


HERE = f"test_hooks.py:{_method.__code__.co_firstlineno}"
MISSPELT = "compute_los computeLoss build_optimiser build_models count_target read_output on_epoch_ends on_step_start"


def _with(name: str, value: Any = _method, base: Any = Trainer, **others: Any) -> type[Trainer]:
    kind: type[Trainer] = type("Mine", (base,), {name: value, **others})
    return kind


@pytest.mark.parametrize("template", [Trainer, Finetuner])
def test_a_name_that_is_nearly_a_hook_is_refused(template: Any, says: Says) -> None:
    for name in [*MISSPELT.split(), "on_train_begin"]:
        with says(ConfigError, HERE=HERE):
            _with(name, base=template)(RUN)


@pytest.mark.parametrize("value", [staticmethod(_method), classmethod(_method), property(_method)], ids=["s", "c", "p"])
def test_any_kind_of_method_counts(value: Any) -> None:
    with pytest.raises(ConfigError, match="compute_los is not a hook"):
        check_names(_with("compute_los", value))


def test_a_mixin_of_hooks_counts_and_any_other_does_not() -> None:
    other = type("Other", (), {"on_epoch_ends": _method})
    hooks = type("Hooks", (), {"on_epoch_ends": _method, "on_step_end": _method})
    check_names(type("Mine", (other, Trainer), {}))
    with pytest.raises(ConfigError, match=r"Hooks\.on_epoch_ends is not a hook"):
        check_names(type("Mine", (hooks, Trainer), {}))


OWN_NAMES = "_compute_los loss build_dataset on_gpu tokenize build metrics data_path predictor"


def test_names_of_ones_own() -> None:
    for name in OWN_NAMES.split():
        check_names(_with(name))
    check_names(_with("compute_losses", compute_loss=_method))  # a helper that has nearly the name of its hook
    check_names(_with("count_target", 3))  # a value would never be called anyway


@pytest.mark.parametrize(
    "template",
    [
        _with("compute_metrics", lambda self, eval_pred: {}),
        _with("on_step_end", lambda self, trainer, step, result: None),
        _with("compute_loss", staticmethod(lambda model: model)),
    ],
)
def test_a_hook_that_cannot_be_called_is_refused(template: Any) -> None:
    with pytest.raises(ConfigError, match="does not take the arguments of its hook"):
        template([])


def test_hooks_with_more_arguments_are_taken() -> None:
    _with("compute_metrics", lambda self, predictions, references, extra=None: {})([])
    _with("compute_loss", staticmethod(lambda model, batch: model))([])


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


class Logging(DeepJob):
    """Logs the loss of each micro batch, and some steps only on one worker."""

    def compute_loss(self, model: Any, batch: Any) -> Any:
        loss = super().compute_loss(model, batch)
        self.log({"own": loss, "none": torch.nan})
        return loss

    def on_step_end(self, step: int, result: Any) -> None:
        if self.is_main:
            self.log({"step of one": step})


def logged(workers: Any, flags: str) -> list[dict[str, Any]]:
    words = f"--lr 1e-3 --train-iters 6 --micro-batch-size 2 --global-batch-size 8 --eval-interval 1 {flags}".split()
    with mock.patch.object(Log, "record", autospec=True) as record:
        Logging(words).fit()
    return [call.args[1] for call in record.call_args_list if "loss" in call.args[1]]


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["", "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2"])
def test_numbers_that_hooks_log_are_means_over_micro_batches_and_workers(layout: str) -> None:
    """Those of all micro batches alone. The one without a target has no loss."""
    each, alone = (logged(None, f"--log-interval {interval}") for interval in (1, 2))
    pairs = zip(each[::2], each[1::2], strict=True)
    assert [line["step of one"] for line in alone] == [(one["step"] + two["step"]) / 2 for one, two in pairs]
    assert all(np.isnan(line["none"]) and "own" in line for line in each)
    for interval, lines in ((1, each), (2, alone)):
        for found in run_in_workers(2, logged, f"--log-interval {interval} {layout}"):
            for name in ("own", "step of one", "loss"):
                assert [line[name] for line in found] == pytest.approx([line[name] for line in lines], rel=1e-4), name


@pytest.mark.parametrize("values", [{"phase": "warm-up"}, {"lr": 0.5}], ids=["text", "name"])
def test_numbers_that_cannot_be_logged(values: dict[str, Any], says: Says) -> None:
    job = type("Job", (Line,), {"on_step_end": lambda self, step, result: self.log(values)})
    with says(RapidformerError):
        job(RUN).fit()


class Misspelt(Callback):
    """A callback with a method that would never be called."""

    def on_epoch_ends(self, trainer: Any, epoch: int) -> None:
        """Never called."""


@pytest.mark.parametrize(
    "callbacks", [Kept(), [Kept], [Kept(), print], [Misspelt()]], ids=["one", "class", "function", "name"]
)
def test_what_is_no_callback_is_refused(callbacks: Any, says: Says) -> None:
    with says(ConfigError, HERE=f"test_hooks.py:{Misspelt.on_epoch_ends.__code__.co_firstlineno}"):
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


class _InHalf(CausalJob):
    def make(self) -> torch.nn.Module:
        return super().make().bfloat16()


def test_a_norm_of_another_16_bit_type_than_its_input_is_explained(says: Says) -> None:
    with says(ModelError):
        _InHalf(["--train-iters", "1", "--lr", "1e-5", "--mixed-precision", "fp16", "--device", "cpu"]).fit()


@pytest.mark.parametrize(
    ("kind", "flags", "is_told"),
    [(_InHalf, "", True), (_InHalf, "--mixed-precision bf16", True), (CausalJob, "--mixed-precision bf16", False)],
)
def test_trained_parameters_in_16_bits_are_told(
    kind: type[CausalJob], flags: str, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """An update of 1e-5 is less than half of the distance between numbers of bf16 from 0.008 on."""
    job = kind(["--train-iters", "1", "--lr", "1e-5", "--weight-decay", "0", "--clip-grad", "0", *flags.split()])
    weights = trained(job)["weights"]
    torch.manual_seed(job.config.training.seed)
    start = kind([]).build_model().state_dict()
    moved = [(weight != start[name].double()) & (start[name].abs() > 0.008) for name, weight in weights.items()]
    assert any(bool(each.any()) for each in moved) is not is_told
    assert ("lose small updates by rounding" in capsys.readouterr().err) is is_told
