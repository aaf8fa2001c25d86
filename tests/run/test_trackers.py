"""Trackers log each step once, by their own stores: after a kill -9 and a resume, and if one of them fails."""

import json
import math
import signal
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rapidformer_templates.run import log as log_module
from rapidformer_templates.run.folder import is_test_line, read_metrics
from rapidformer_templates.run.trackers import KINDS, TensorBoard
from tests.support.requests import config_of
from tests.support.selection import by_default, selected
from tests.support.tracked import Tracked, train
from tests.support.worker_pool import FSYNC, new_process, run_in_workers

KILLED_AT, STEPS = 7, 10
QUIET = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "MLFLOW_TRACKING_URI": ""}
Tracker = list[tuple[str, int, float]]
"""(name, step, value) of all values that a store has for a run."""


def events_of_tensorboard(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()


def of_tensorboard(run: Path) -> Tracker:
    events = events_of_tensorboard(run / "trackers" / "tensorboard" / "run")
    return [(tag, e.step, e.value) for tag in events.Tags()["scalars"] for e in events.Scalars(tag)]


def run_of_mlflow(run: Path) -> tuple[Any, Any]:
    """Return mlflow's client and the run."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.parent}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'rapidformer'")
    (one,) = client.search_runs([experiment.experiment_id])
    assert one.info.run_name == "run"
    return client, one


def of_mlflow(run: Path) -> Tracker:
    client, one = run_of_mlflow(run)
    histories = [client.get_metric_history(one.info.run_id, name) for name in one.data.metrics]
    return [(metric.key, metric.step, metric.value) for history in histories for metric in history]


def records_of_wandb(run: Path, *, newest: bool = False) -> Iterator[Any]:
    """Read the store with a second reader of LevelDB's log, which looks for every record and has no state."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted((run / "trackers" / "wandb").glob("offline-run-*/*.wandb"))[-1 if newest else 0 :]:
        data, entry = path.read_bytes(), b""
        blocks = [data[i : i + 32768] for i in range(0, len(data), 32768)]
        for number, block in enumerate(blocks):
            at = 7 if number == 0 else 0
            while len(block) - at > 7 and (length := struct.unpack_from("<H", block, at + 4)[0]) <= len(block) - at - 7:
                kind, piece = block[at + 6], block[at + 7 : at + 7 + length]
                entry, at = (b"" if kind in (1, 2) else entry) + piece, at + 7 + length
                if kind in (1, 4):
                    yield Record.FromString(entry)


def values_of_wandb(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def of_wandb(run: Path) -> Tracker:
    """Read the files of the newest process, which repeats the whole curve."""
    rows = [values_of_wandb(record.history.item) for record in records_of_wandb(run, newest=True)]
    return [(name, row["_step"], value) for row in rows for name, value in row.items() if not name.startswith("_")]


Results = tuple[dict[str, Any], dict[str, str]]
"""Numbers and texts at the end of a run."""


def apart(values: Mapping[str, Any]) -> Results:
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    return {name: value for name, value in values.items() if name not in texts}, texts


def results_of_tensorboard(run: Path) -> Results:
    events = events_of_tensorboard(run / "trackers" / "tensorboard" / "run")
    texts = {}
    for tag in events.Tags()["tensors"]:
        (event,) = events.Tensors(tag)
        texts[tag.removesuffix("/text_summary")] = bytes(event.tensor_proto.string_val[0]).decode()
    return {name: value for name, step, value in of_tensorboard(run) if step == STEPS}, texts


def results_of_wandb(run: Path) -> Results:
    values: dict[str, Any] = {}
    for record in records_of_wandb(run):
        values |= values_of_wandb(record.summary.update)
    return apart(values)


def parameters_of_tensorboard(run: Path) -> dict[str, Any]:
    from tensorboard.plugins.hparams import metadata

    (path,) = (run / "trackers" / "tensorboard" / "run").glob("*/events.*")
    content = events_of_tensorboard(path.parent).SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    values = metadata.parse_session_start_info_plugin_data(content).hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in values.items()}


def parameters_of_wandb(run: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for record in records_of_wandb(run):
        values |= values_of_wandb([*record.run.config.update, *record.config.update])
    return values


READERS = {"tensorboard": of_tensorboard, "mlflow": of_mlflow, "wandb": of_wandb}
RESULTS: dict[str, Callable[[Path], Results]] = {
    "tensorboard": results_of_tensorboard,
    "mlflow": lambda run: (run_of_mlflow(run)[1].data.metrics, run_of_mlflow(run)[1].data.tags),
    "wandb": results_of_wandb,
}
PARAMETERS = {
    "tensorboard": parameters_of_tensorboard,
    "mlflow": lambda run: run_of_mlflow(run)[1].data.params,
    "wandb": parameters_of_wandb,
}
NEEDED = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy", "alembic"), "wandb": ("wandb",)}
ABSENT = {tracker: [name for name in names if find_spec(name) is None] for tracker, names in NEEDED.items()}
"""Packages of each tracker that are not installed."""
needs_tensorboard = pytest.mark.skipif(bool(ABSENT["tensorboard"]), reason="needs tensorboard: pip install tensorboard")


@pytest.fixture(scope="module")
def killed_and_resumed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was killed after step 7 and resumed from its checkpoint of step 4.

    It has the trackers that the selected tests read.
    """
    folder = tmp_path_factory.mktemp("tracked")
    trackers = [tracker for tracker in selected(request, "tracker") if not ABSENT[tracker]]
    flags = ["--report-to", ",".join(trackers), "--train-iters", str(STEPS)]
    for more, dies_after, ends in (([], KILLED_AT, -signal.SIGKILL), (["--resume"], None, 0)):
        process = new_process(train, str(folder), [*flags, *more], QUIET, dies_after)
        with mock.patch("os.fsync", FSYNC):  # this tests a death, like the tests marked durable
            process.start()
        process.join()
        assert process.exitcode == ends
    return folder / "run"


def metric_rows(run: Path) -> Iterator[tuple[str, int, float]]:
    """Yield the values that must be logged, from metrics.jsonl."""
    for line in read_metrics(run / "metrics.jsonl"):
        numbers = {name: v for name, v in line.items() if isinstance(v, int | float) and not is_test_line(line)}
        yield from ((NAMES[name], line["step"], float(value)) for name, value in numbers.items() if name != "step")


OF_TRAINING = (
    "epoch loss grad_norm lr samples tokens samples_per_second tokens_per_second step_ms peak_memory_mb skipped"
)
NAMES = {name: f"train/{name}" for name in OF_TRAINING.split()}
NAMES |= {name: f"eval/{name}" for name in ("near/loss", "far/loss", "near/samples@1", "far/samples@1")}
"""The name in the trackers of each name in metrics.jsonl."""

CLOCKS = ("train/samples_per_second", "train/tokens_per_second", "train/step_ms", "train/peak_memory_mb")


@pytest.fixture
def tracker(request: pytest.FixtureRequest) -> str:
    if ABSENT[request.param]:
        pytest.skip(f"needs {', '.join(ABSENT[request.param])}: pip install 'rapidformer_templates[trackers]'")
    name: str = request.param
    return name


of_trackers = pytest.mark.parametrize("tracker", by_default(["tensorboard"], READERS), indirect=True)


@pytest.mark.slow
@of_trackers
def test_each_step_is_told_once_over_a_kill_and_a_resume(tracker: str, killed_and_resumed: Path) -> None:
    held = READERS[tracker](killed_and_resumed)
    assert [which for which, times in Counter((name, step) for name, step, _ in held).items() if times > 1] == []
    assert sorted(step for name, step, _ in held if name == "train/loss") == list(range(1, STEPS + 1))
    curves = {(name.replace("@", "_"), step): value for name, step, value in held}
    wanted = {(name.replace("@", "_"), step): value for name, step, value in metric_rows(killed_and_resumed)}
    assert wanted.keys() <= curves.keys()
    assert {name for name, _ in curves.keys() - wanted.keys() if not name.startswith(("summary/", "test/"))} == set()
    for (name, step), value in wanted.items():
        if name not in CLOCKS:  # for a step that was trained twice, these are from the first time
            assert curves[name, step] == pytest.approx(value, rel=1e-6), (name, step)
    assert {(name, step) for name, step in wanted if name == "eval/near/samples_1"} == {
        ("eval/near/samples_1", step) for step in (4, 8, 10)
    }


@pytest.mark.slow
@of_trackers
def test_the_summary_and_the_test_part_are_told_at_the_end(tracker: str, killed_and_resumed: Path) -> None:
    summary = json.loads((killed_and_resumed / "summary.json").read_text())
    assert summary["trackers"][tracker]["failed"] is None
    values, texts = RESULTS[tracker](killed_and_resumed)
    assert values["test/loss"] == pytest.approx(summary["metrics"]["test/loss"], rel=1e-6)
    if tracker == "tensorboard":  # it can only draw curves
        where = f"tensorboard --logdir {killed_and_resumed}/trackers/tensorboard"
        assert summary["trackers"]["tensorboard"]["where"] == where
        assert [name for name in values if name.startswith("summary")] == []
        assert "| parameters | 2 |" in texts["summary"].splitlines()
    else:
        assert values["summary/parameters"] == 2
    assert [name for name in values if "receipts" in name] == []
    optimizer = summary["receipts"]["optimizer_class"]
    assert f"| optimizer_class | {optimizer} |" in texts["receipts"].splitlines()
    assert len(texts["receipts"].splitlines()) == 2 + len(summary["receipts"])
    (line,) = [line for line in read_metrics(killed_and_resumed / "metrics.jsonl") if is_test_line(line)]
    assert line == {"step": STEPS, "test/loss": summary["metrics"]["test/loss"], "test/samples@1": 3.0}


@pytest.mark.slow
@of_trackers
def test_every_flag_is_a_parameter_of_the_run(tracker: str, killed_and_resumed: Path) -> None:
    fields = {field.name.replace("_", "-") for field in config_of("").fields()}
    parameters = {name: str(value) for name, value in PARAMETERS[tracker](killed_and_resumed).items()}
    assert fields - parameters.keys() == set()
    assert [float(parameters[name]) for name in ("lr", "seed", "weight-decay")] == [0.1, 1234, 0.01]
    assert [parameters[name] for name in ("optimizer", "run-name", "precision")] == ["adamw", "None", "fp32"]


@needs_tensorboard
@pytest.mark.distributed
def test_only_one_of_several_workers_tells(tmp_path: Path) -> None:
    run_in_workers(2, tracked_by_two, str(tmp_path))
    steps = [step for name, step, _ in of_tensorboard(tmp_path / "run") if name == "train/loss"]
    assert steps == list(range(1, 5))
    assert len(list((tmp_path / "run/trackers/tensorboard/run").glob("events.*"))) == 1


def tracked_by_two(workers: Any, folder: str) -> None:
    threads = torch.get_num_threads()
    train(folder, ["--report-to", "tensorboard", "--train-iters", "4"], QUIET)
    assert torch.get_num_threads() == threads


class Fails(TensorBoard):
    """A tracker whose disk is full from step 3 on."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        if step == 3:
            raise OSError(28, "No space left on device")
        super().log(values, step)


@needs_tensorboard
def test_a_tracker_that_fails_ends_no_run_and_catches_up_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--lr 0.1 --micro-batch-size 4 --log-interval 1 --report-to tensorboard --run-name run --save"
    with monkeypatch.context() as patched:
        patched.setattr(log_module, "KINDS", {**KINDS, "tensorboard": Fails})
        summary = Tracked([*flags.split(), str(tmp_path), "--train-iters", "5"]).fit()
    reason = "[Errno 28] No space left on device"
    assert summary["trackers"] == {"tensorboard": {"where": None, "failed": f"{reason} (at step 3)"}}
    err = capsys.readouterr().err
    assert err.count("tensorboard failed") == 1
    assert f"warning: tensorboard failed: {reason}; the run continues without it" in err
    Tracked([*flags.split(), str(tmp_path), "--train-iters", "6", "--resume"]).fit()
    assert [step for name, step, _ in of_tensorboard(tmp_path) if name == "train/loss"] == [1, 2, 3, 4, 5, 6]
    held = of_tensorboard(tmp_path)
    Tracked([*flags.split(), str(tmp_path), "--train-iters", "6", "--resume"]).fit()  # nothing is left to train
    assert of_tensorboard(tmp_path) == held
    assert results_of_tensorboard(tmp_path)[1].keys() == {"summary", "receipts"}


@needs_tensorboard
def test_a_step_is_told_before_the_next_with_its_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, bool]] = []

    class Notes(TensorBoard):
        def log(self, values: Mapping[str, float], step: int) -> None:
            told.append((step, "eval/near/loss" in values))

    class Looks(Tracked):
        def on_step_end(self, step: int, result: Any) -> None:
            assert [number for number, _ in told] == list(range(1, step))

    monkeypatch.setattr(log_module, "KINDS", {"tensorboard": Notes})
    flags = "--lr 0.1 --train-iters 4 --eval-interval 2 --log-interval 1 --report-to tensorboard --save"
    Looks([*flags.split(), str(tmp_path)]).fit()
    assert told[:4] == [(1, False), (2, True), (3, False), (4, True)]


@needs_tensorboard
def test_a_tracker_that_does_not_open_ends_no_run(tmp_path: Path) -> None:
    flags = ["--lr", "0.1", "--train-iters", "2", "--report-to", "tensorboard", "--save", str(tmp_path)]
    no_network = ConnectionError("no route to host\nand many lines more")
    with mock.patch.object(TensorBoard, "_open", side_effect=no_network):
        summary = Tracked(flags).fit()
    assert summary["trackers"]["tensorboard"]["failed"] == "no route to host (at step 0)"
    assert math.isfinite(summary["metrics"]["near/loss"])
