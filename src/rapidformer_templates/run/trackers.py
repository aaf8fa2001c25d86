"""The trackers of ``--report-to``: how accelerate opens them, and how a resumed run finds its run there again."""

from __future__ import annotations

import re
import uuid
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

PROJECT = "rapidformer"
"""The default project."""

MAX_TAG = 5000
"""Characters that every version of mlflow accepts in a tag."""


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

    def arrived(self, sent: int) -> int:
        """Return the last step that has surely arrived, given the last one that was sent."""
        return sent

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


class TensorBoard(Tracker):
    """TensorBoard event files."""

    name = "tensorboard"

    @property
    def _events(self) -> Path:
        return self.folder / "tensorboard" / self.identity["name"].replace("/", "-")

    def _open(self) -> GeneralTracker:
        return _tracker("tensorboard", self._events.name, self._events.parent)

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

    def arrived(self, sent: int) -> int:
        """Return the newest step of the server. Offline it is 0: a killed process loses what it has not written yet."""
        run = self.tracker.tracker
        return 0 if run.offline else int(run.step) - 1

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

    @property
    def where(self) -> str:
        return f"trackio show --project {self.identity['project']}"


KINDS: Mapping[str, type[Tracker]] = {kind.name: kind for kind in (TensorBoard, WandB, MLflow, Trackio)}
