"""The trackers of ``--report-to``: how accelerate opens each, how a run is found again, and what it was told.

What a tracker was told is asked of the tracker's own store: a process that is killed does not know what of it arrived.
"""

from __future__ import annotations

import re
import uuid
import warnings
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import Any, ClassVar

import torch

from rapidformer_templates.run.wandb_file import rows

PROJECT = "rapidformer"
"""The project of a run that names none."""

WasTold = Callable[[str, int], bool]
"""Whether a value of this name was told for this step."""


@dataclass(frozen=True)
class Called:
    """What a run is called in its trackers.

    Attributes:
        run: its name.
        project: what several runs share; None leaves it to the tracker's environment.
    """

    run: str
    project: str | None


class Curve(ABC):
    """One run in one tracker.

    Args:
        folder: for its files, in the run folder.
        called: names for a run that is new to the tracker.
        known: the identity of one that goes on; empty of a new one.
    """

    name: ClassVar[str]
    project_variable: ClassVar[str] = ""

    def __init__(self, folder: Path, called: Called, known: Mapping[str, str]) -> None:
        self.folder = folder
        project = known.get("project") or called.project or environ.get(self.project_variable) or PROJECT
        self.identity: dict[str, str] = {"project": project, "name": called.run, **known}
        _prepare_accelerate()
        self.tracker = self._open()
        self.tracker.main_process_only = False  # there is none on other workers, and nobody is to be asked
        self.tracker.start()
        self._started()

    @abstractmethod
    def _open(self) -> Any:
        """accelerate's tracker of this run, before it is started."""

    def _started(self) -> None:  # noqa: B027 - some have nothing to add
        """Note what the tracker has called the run, and where it is."""

    @abstractmethod
    def told(self) -> WasTold:
        """What it was told so far, by its own store."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Where the curves are, for people."""

    def configure(self, values: Mapping[str, Any]) -> None:
        self.tracker.store_init_configuration(dict(values))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.tracker.log(dict(values), step=step)

    def summarise(self, values: Mapping[str, float], step: int) -> None:
        """Tell what is known at the end; where a tracker has no place for that, as values of the last step."""
        self.log(values, step)

    def finish(self) -> None:
        self.tracker.finish()


def _tracker(name: str, /, *arguments: Any, **keywords: Any) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    return LOGGER_TYPE_TO_CLASS[name](*arguments, **keywords)


def _prepare_accelerate() -> None:
    """Let accelerate look at the worker that it runs in, which it insists on, and change nothing of it."""
    from accelerate.state import PartialState

    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it sets the threads of workers on CPUs, and says so
        PartialState(cpu=True)  # a GPU is no business of a tracker
    torch.set_num_threads(threads)


def _by_name(told: Iterable[tuple[str, int]]) -> WasTold:
    steps: dict[str, set[int]] = defaultdict(set)
    for name, step in told:
        steps[name].add(step)
    return lambda name, step: step in steps[name]


class TensorBoard(Curve):
    """Files of events."""

    name = "tensorboard"

    @property
    def _events(self) -> Path:
        return self.folder / "tensorboard" / self.identity["name"].replace("/", "-")

    def _open(self) -> Any:
        return _tracker("tensorboard", self._events.name, self._events.parent)

    def told(self) -> WasTold:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(self._events), size_guidance={"scalars": 0})
        events.Reload()
        return _by_name((tag, event.step) for tag in events.Tags()["scalars"] for event in events.Scalars(tag))

    @property
    def where(self) -> str:
        return f"tensorboard --logdir {self._events.parent}"


class WandB(Curve):
    """Files, which wandb sends where it is online."""

    name = "wandb"
    project_variable = "WANDB_PROJECT"

    def _open(self) -> Any:
        self.identity.setdefault("id", uuid.uuid4().hex[:8])
        asked = {"id": self.identity["id"], "name": self.identity["name"], "dir": str(self.folder)}
        return _tracker("wandb", self.identity["project"], resume="allow", **asked)

    def told(self) -> WasTold:
        """A server knows its newest step; without one it is what the files hold."""
        run = self.tracker.tracker
        if not run.offline:
            newest = run.step
            return lambda name, step: step < newest
        files = sorted((self.folder / "wandb").glob(f"*run-*-{self.identity['id']}/*.wandb"))
        told = (row for path in files for row in rows(path))
        return _by_name((name, row["_step"]) for row in told if "_step" in row for name in row)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.tracker.log(dict(values), step=step, commit=True)  # or it would wait for the next step

    def summarise(self, values: Mapping[str, float], step: int) -> None:
        self.tracker.tracker.summary.update(dict(values))

    @property
    def where(self) -> str:
        run = self.tracker.tracker
        return f"wandb sync {self.folder / 'wandb'}/offline-run-*" if run.offline else str(run.url)


class MLflow(Curve):
    """A store of mlflow: that of ``MLFLOW_TRACKING_URI``, else the one that mlflow makes in the working folder."""

    name = "mlflow"
    project_variable = "MLFLOW_EXPERIMENT_NAME"

    def _open(self) -> Any:
        import mlflow

        if "uri" in self.identity:
            mlflow.set_tracking_uri(self.identity["uri"])
        tracker = _tracker("mlflow", run_name=self.identity["name"])
        # Set here, because accelerate prefers what stands in the environment.
        tracker.experiment_name, tracker.run_id = self.identity["project"], self.identity.get("id")
        return tracker

    def _started(self) -> None:
        import mlflow

        self.identity |= {"id": self.tracker.tracker.info.run_id, "uri": mlflow.get_tracking_uri()}

    def told(self) -> WasTold:
        import mlflow

        client, run = mlflow.MlflowClient(), self.identity["id"]
        names = client.get_run(run).data.metrics
        told = _by_name((name, metric.step) for name in names for metric in client.get_metric_history(run, name))
        return lambda name, step: told(_allowed(name), step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        super().log({_allowed(name): value for name, value in values.items()}, step)

    @property
    def where(self) -> str:
        return f"mlflow ui --backend-store-uri {self.identity['uri']}"


def _allowed(name: str) -> str:
    """A name as mlflow takes it."""
    return re.sub(r"[^\w\-. :/]", "_", name)


class Trackio(Curve):
    """A store of trackio, in ``TRACKIO_DIR`` or the user's cache. It knows runs by their names alone."""

    name = "trackio"
    project_variable = "TRACKIO_PROJECT"

    def _open(self) -> Any:
        from trackio.sqlite_storage import SQLiteStorage

        if "id" not in self.identity:
            taken = self.identity["name"] in SQLiteStorage.get_runs(self.identity["project"])
            self.identity["id"] = self.identity["name"] + (f"-{uuid.uuid4().hex[:8]}" if taken else "")
        return _tracker("trackio", self.identity["project"], name=self.identity["id"], resume="allow")

    def told(self) -> WasTold:
        from trackio.sqlite_storage import SQLiteStorage

        logs = SQLiteStorage.get_logs(self.identity["project"], self.identity["id"])
        return _by_name((name, row["step"]) for row in logs for name in row)

    @property
    def where(self) -> str:
        return f"trackio show --project {self.identity['project']}"


KINDS: Mapping[str, type[Curve]] = {kind.name: kind for kind in (TensorBoard, WandB, MLflow, Trackio)}
