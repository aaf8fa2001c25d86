"""The model of a run, or of a transformers folder, with the task that it was trained for.

Functions that only inspect the folder import no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.config import COMMAND_LINE, RunConfig, settable_by_files
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.request import config_file
from rapidformer_templates.planning.tasks import tasks_with
from rapidformer_templates.run.folder import RunFolder
from rapidformer_templates.system.files import JSON_ERRORS

if TYPE_CHECKING:
    from rapidformer_templates.data.tasks import Task

OF_THE_SAMPLES = ("task", "problem_type", "seq_length", "text_column", "pair_column", "label_column", "tools_column")
"""Fields of a run that also determine how its model reads inputs after training."""

DECISIONS = {"columns": dict, "labels": list, "problem": str, "may_be_null": bool, "longest_target": int}
"""Types of what the data of a run decide: all names in ``state_fields`` of the tasks."""

DESCRIPTION = "task.json"
"""File in ``model/`` of a run folder with its :class:`TaskDescription`."""


class TaskDescription(TypedDict, total=False):
    """The task of a run, as its folder describes it.

    Attributes:
        hooks: names of the hooks that its script overrides.
        decisions: what its data have decided, such as the labels.
    """

    hooks: list[str]
    decisions: dict[str, Any]


@dataclass(frozen=True)
class SavedModel:
    """The location of a saved model, and how it was trained.

    Attributes:
        folder: folder with the weights, in the format of ``from_pretrained``.
        run: the run folder that contains it. None if the folder does not belong to a run.
        values: each flag that was given to the run, by field name, with its origin.
    """

    folder: Path
    run: Path | None
    values: Mapping[str, tuple[object, str]]

    def config(self, names: Sequence[str] = OF_THE_SAMPLES, user: type | None = None, **overrides: object) -> RunConfig:
        """Return the flags for using the model: those of the run with these names, and the given ones.

        Args:
            user: a dataclass of additional flags that a command declares.

        Raises:
            ConfigError: the task of the model is unknown, or a value is invalid.
        """
        run_values = {name: value for name, value in self.values.items() if name in names}
        run_values["pretrained_model_name_or_path"] = (str(self.folder), "RUN")
        now = {name: (value, COMMAND_LINE) for name, value in overrides.items() if value is not None}
        if "task" not in run_values | now:
            file = config_file(self.folder)
            try:
                kind = str((json.loads(file.read_text(encoding="utf-8")).get("architectures") or [""])[0])
            except JSON_ERRORS as error:
                raise ConfigError(f"{file} cannot be read: {error}", where="RUN") from error
            tasks = tasks_with(lambda task: kind.endswith(task.model_classes))
            if not tasks:
                what = f"{self.folder} holds {f'a {kind}' if kind else 'a model without a head'}"
                raise ConfigError(f"{what}, and does not say what it is for", where="RUN", hint="add --task")
            run_values["task"] = (tasks[0], "the folder")
        return REGISTRY.merge_files(parse([], REGISTRY.options(), user=user, in_code={**run_values, **now}))

    @property
    def evaluated_samples(self) -> int | None:
        """Number of samples of each validation set in an evaluation of the run. None means all."""
        iterations, _ = self.values.get("eval_iters", (None, ""))
        if self.run is None or not isinstance(iterations, int):
            return None
        try:
            plan = json.loads((self.run / "plan.json").read_text(encoding="utf-8"))
            return iterations * int(plan["sizes"]["global_batch"])
        except JSON_ERRORS as error:
            raise ConfigError(f"{self.run / 'plan.json'} cannot be read: {error}", where="RUN") from error

    def decisions(self, task: str | None) -> dict[str, Any]:
        """Return what the data of the run has decided. Empty if the model is used for another task."""
        is_of_task = self.values.get("task", (None, ""))[0] == task
        return self.described().get("decisions", {}) if is_of_task else {}

    def described(self) -> TaskDescription:
        """Return the run's description of its task. Empty without one."""
        file = RunFolder(self.run).model / DESCRIPTION if self.run else None
        if file is None or not file.is_file():
            return {}
        try:
            description: TaskDescription = json.loads(file.read_text(encoding="utf-8"))
            decisions = description.get("decisions", {})
            texts = [*description.get("hooks", ()), *decisions.get("labels", ())]
            wrong = [name for name, value in decisions.items() if not isinstance(value, DECISIONS[name])]
            if wrong or not all(isinstance(text, str) for text in texts):
                raise TypeError(f"{wrong[0] if wrong else 'a label or a hook'} is not of the right type")
        except JSON_ERRORS as error:
            hint = "export the run again from a checkpoint: rapidformer export RUN --output FOLDER"
            raise ConfigError(f"it does not describe a task: {error}", where=str(file), hint=hint) from error
        return description


def find_saved(path: str | Path) -> SavedModel:
    """Find the exported model of a run folder, or a transformers folder.

    Raises:
        ConfigError: the folder does not exist, or nothing was exported yet.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"{folder} does not exist", where="RUN", hint="name the --save folder of a run, or a model")
    if (folder / "plan.json").is_file():
        if not (folder / "export").is_dir():
            hint = f"rapidformer export {folder} writes one from its newest checkpoint"
            raise ConfigError(f"{folder} holds no exported model", where="RUN", hint=hint)
        return SavedModel(folder / "export", folder, values_of(folder))
    if (folder / "manifest.json").is_file():
        run, step = folder.parent.parent, folder.name.removeprefix("step-")
        hint = f"rapidformer export {run} --step {step} writes its model"
        raise ConfigError(f"{folder} is a checkpoint", where="RUN", hint=hint)
    if not config_file(folder).is_file():
        hint = "name the --save folder of a run, or a transformers folder with config.json and its weights"
        raise ConfigError(f"{folder} is neither a run folder nor a model", where="RUN", hint=hint)
    return exported_model(folder)


def exported_model(folder: Path) -> SavedModel:
    """Return a model in a folder of transformers. ``RUN/export`` and ``RUN/merged`` belong to the run around them."""
    parent = folder.resolve().parent
    run_of = parent if (parent / "plan.json").is_file() else None
    return SavedModel(folder, run_of, values_of(run_of) if run_of else {})


def values_of(run: Path, kinds: Iterable[type] | None = None) -> dict[str, tuple[object, str]]:
    """Return the flags of a run by field name, each with its origin.

    Flags that only the command line may set are left out, because anyone can have written the file.

    Args:
        kinds: dataclasses of flags. The default leaves out those that the user's script declares.

    Raises:
        ConfigError: the plan of the run cannot be read.
    """
    try:
        values = json.loads((run / "plan.json").read_text(encoding="utf-8"))["values"]
        named = {n.removeprefix("--").replace("-", "_"): (v["value"], v["origin"]) for n, v in values.items()}
    except JSON_ERRORS as error:
        raise ConfigError(f"{run / 'plan.json'} cannot be read: {error}", where="RUN") from error
    known = settable_by_files(kinds or parse([], REGISTRY.options()).kinds())
    return {name: value for name, value in named.items() if name in known}


def load_saved_task(config: RunConfig, saved: SavedModel) -> Task:
    """Load the task of a saved model with the decisions of its data. This does not read the weights.

    Raises:
        RapidformerError: the folder cannot be used for the task.
    """
    from rapidformer_templates.data.tasks import load_task

    task = load_task(config)
    task.load_label_state(saved.decisions(config.training.task))
    return task
