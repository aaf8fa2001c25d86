"""The trackers of ``--report-to``: how accelerate opens them, and how a resumed run finds its earlier values.

Logged values are looked up in the tracker's own store, because a killed process does not know what arrived there.
"""

from __future__ import annotations

import json
import re
import struct
import uuid
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

PROJECT = "rapidformer"
"""The default project."""

MAX_TAG = 5000
"""Characters that every version of mlflow accepts in a tag."""

IsLogged = Callable[[str, int], bool]
"""Returns whether a value with this name was logged for this step."""


class Tracker(ABC):
    """One run in one tracker.

    Args:
        folder: directory for its files, inside the run folder.
        name: name of a run that is new to the tracker.
        project: name that several runs share. None uses the tracker's environment variable.
        known: identity of a run that is resumed. Empty for a new run.

    Attributes:
        has_summary: whether a run has single values that are not curves.
        sends_later: whether values may be lost if the process dies. The parameters are then sent at each start.
    """

    name: ClassVar[str]
    has_summary: ClassVar[bool] = False
    sends_later: ClassVar[bool] = False
    project_variable: ClassVar[str] = ""

    def __init__(self, folder: Path, name: str, project: str | None, known: Mapping[str, str]) -> None:
        from accelerate.state import PartialState

        self.folder = folder
        project = project or environ.get(self.project_variable) or PROJECT
        self.identity: dict[str, str] = {"project": project, "name": name, **known}
        # Initialize accelerate's state, which its trackers require, without any change to this worker.
        threads = torch.get_num_threads()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it sets the threads of CPU workers, and warns about it
            PartialState(cpu=True)  # a tracker must not use a GPU
        torch.set_num_threads(threads)
        self.tracker = self._open()
        self.tracker.main_process_only = False  # other workers have no tracker, so there is nothing to synchronize
        self.tracker.start()
        self._started()

    @abstractmethod
    def _open(self) -> GeneralTracker:
        """Return accelerate's tracker of this run, not yet started."""

    def _started(self) -> None:  # noqa: B027 - some have nothing to add
        """Store the name and location that the tracker has chosen for the run."""

    @abstractmethod
    def logged(self) -> IsLogged:
        """Return a function that looks up logged values in the tracker's own store."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Where users find the curves."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.tracker.log(dict(values), step=step)

    def summarise(self, values: Mapping[str, float | str], step: int) -> None:
        """Store the final values and texts. A tracker without a summary logs them at the last step."""
        self.tracker.log(dict(values), step=step)


def _tracker(name: str, /, *arguments: object, **keywords: object) -> GeneralTracker:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    return LOGGER_TYPE_TO_CLASS[name](*arguments, **keywords)


def _is_among(entries: Iterable[tuple[str, int]]) -> IsLogged:
    logged = set(entries)
    return lambda name, step: (name, step) in logged


class TensorBoard(Tracker):
    """TensorBoard event files."""

    name = "tensorboard"

    @property
    def _events(self) -> Path:
        return self.folder / "tensorboard" / self.identity["name"].replace("/", "-")

    def _open(self) -> GeneralTracker:
        return _tracker("tensorboard", self._events.name, self._events.parent)

    def logged(self) -> IsLogged:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(self._events), size_guidance={"scalars": 0})
        events.Reload()
        tags = events.Tags()
        logged = [(tag, event.step) for tag in tags["scalars"] for event in events.Scalars(tag)]
        for tag in tags["tensors"]:
            logged += [(tag.removesuffix("/text_summary"), event.step) for event in events.Tensors(tag)]
        return _is_among(logged)

    @property
    def where(self) -> str:
        return f"tensorboard --logdir {self._events.parent}"


class WandB(Tracker):
    """Weights & Biases: local files, which wandb uploads if it is online."""

    name = "wandb"
    has_summary = True
    sends_later = True
    project_variable = "WANDB_PROJECT"

    def _open(self) -> GeneralTracker:
        self.identity.setdefault("id", uuid.uuid4().hex[:8])
        options = {"id": self.identity["id"], "name": self.identity["name"], "dir": str(self.folder)}
        return _tracker("wandb", self.identity["project"], resume="allow", **options)

    def logged(self) -> IsLogged:
        """Look up logged values. A server only knows its newest step. Offline, the local files list all values."""
        run = self.tracker.tracker
        if not run.offline:
            newest = run.step
            return lambda name, step: step < newest
        files = sorted((self.folder / "wandb").glob(f"*run-*-{self.identity['id']}/*.wandb"))
        entries = (row for path in files for row in rows(path))
        return _is_among((name, row["_step"]) for row in entries if "_step" in row for name in row)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.tracker.log(dict(values), step=step, commit=True)  # otherwise it would wait for the next step

    def summarise(self, values: Mapping[str, float | str], step: int) -> None:
        self.tracker.tracker.summary.update(dict(values))

    @property
    def where(self) -> str:
        run = self.tracker.tracker
        return f"wandb sync {self.folder / 'wandb'}/offline-run-*" if run.offline else str(run.url)


class MLflow(Tracker):
    """An mlflow store: that of ``MLFLOW_TRACKING_URI``, or the default in the working directory."""

    name = "mlflow"
    has_summary = True
    project_variable = "MLFLOW_EXPERIMENT_NAME"

    def _open(self) -> GeneralTracker:
        import mlflow

        if "uri" in self.identity:
            mlflow.set_tracking_uri(self.identity["uri"])
        tracker = _tracker("mlflow", run_name=self.identity["name"])
        # Set here because accelerate gives precedence to the environment.
        tracker.experiment_name, tracker.run_id = self.identity["project"], self.identity.get("id")
        return tracker

    def _started(self) -> None:
        import mlflow

        self.identity |= {"id": self.tracker.tracker.info.run_id, "uri": mlflow.get_tracking_uri()}

    def logged(self) -> IsLogged:
        import mlflow

        client, run = mlflow.MlflowClient(), self.identity["id"]
        history = {name: client.get_metric_history(run, name) for name in client.get_run(run).data.metrics}
        is_logged = _is_among((name, metric.step) for name, metrics in history.items() for metric in metrics)
        return lambda name, step: is_logged(_allowed(name), step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        super().log({_allowed(name): value for name, value in values.items()}, step)

    def summarise(self, values: Mapping[str, float | str], step: int) -> None:
        """Log numbers as metrics, and texts as tags."""
        import mlflow

        self.log({name: value for name, value in values.items() if not isinstance(value, str)}, step)
        mlflow.set_tags({name: value[:MAX_TAG] for name, value in values.items() if isinstance(value, str)})

    @property
    def where(self) -> str:
        return f"mlflow ui --backend-store-uri {self.identity['uri']}"


def _allowed(name: str) -> str:
    """Replace characters that mlflow does not allow in a name."""
    return re.sub(r"[^\w\-. :/]", "_", name)


class Trackio(Tracker):
    """A trackio store, in ``TRACKIO_DIR`` or the user's cache. It identifies runs only by their names."""

    name = "trackio"
    sends_later = True
    project_variable = "TRACKIO_PROJECT"

    def _open(self) -> GeneralTracker:
        from trackio.sqlite_storage import SQLiteStorage

        if "id" not in self.identity:
            is_taken = self.identity["name"] in SQLiteStorage.get_runs(self.identity["project"])
            self.identity["id"] = self.identity["name"] + (f"-{uuid.uuid4().hex[:8]}" if is_taken else "")
        return _tracker("trackio", self.identity["project"], name=self.identity["id"], resume="allow")

    def logged(self) -> IsLogged:
        from trackio.sqlite_storage import SQLiteStorage

        logs = SQLiteStorage.get_logs(self.identity["project"], self.identity["id"])
        return _is_among((name, row["step"]) for row in logs for name in row)

    @property
    def where(self) -> str:
        return f"trackio show --project {self.identity['project']}"


KINDS: Mapping[str, type[Tracker]] = {kind.name: kind for kind in (TensorBoard, WandB, MLflow, Trackio)}


HEAD = 7
"""Bytes before the first block, and before each piece of an entry."""

BLOCK = 32768
WHOLE, FIRST, LAST = 1, 2, 4


def entries(path: Path) -> Iterator[bytes]:
    """Yield the complete entries. The file of a killed run may end anywhere."""
    data = path.read_bytes()
    position, entry = HEAD, b""
    while position + HEAD <= len(data):
        room = BLOCK - position % BLOCK
        if room < HEAD:
            position += room  # the rest of a block has no room for a header
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        piece = data[position + HEAD : position + HEAD + length]
        if len(piece) < length or kind == 0:
            return
        position += HEAD + length
        entry = piece if kind in (WHOLE, FIRST) else entry + piece
        if kind in (WHOLE, LAST):
            yield entry


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the logged values of each step, in the order in which they were logged. ``_step`` is the step."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    for entry in entries(path):
        record = Record()
        record.ParseFromString(entry)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
