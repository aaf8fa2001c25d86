"""Run a recipe unchanged, in this process or in workers, and record the batches of its model."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from rapidformer_templates import Callback, Trainer
from rapidformer_templates.run.folder import read_metrics
from tests.support.programs import one_thread, run_script
from tests.support.recipes import FOLDER
from tests.support.worker_pool import run_in_workers


@dataclass
class Watched(Callback):
    """The record of a run in this process.

    Attributes:
        folder: where it ran.
        losses: of each step.
        weights: exported ones, by name.
        metrics: lines of ``metrics.jsonl``.
        start, end: the weights before the first step, and after the last one.
        trained: the micro batches of the training, as the model got them.
        evaluated: those of the evaluations.
    """

    folder: Path
    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    start: dict[str, Tensor] = field(default_factory=dict)
    end: dict[str, Tensor] = field(default_factory=dict)
    trained: list[dict[str, Tensor]] = field(default_factory=list)
    evaluated: list[dict[str, Tensor]] = field(default_factory=list)

    def on_train_start(self, trainer: Trainer) -> None:
        self.start = _copied(trainer.model)
        trainer.model.register_forward_pre_hook(self._note, with_kwargs=True)

    def on_train_end(self, trainer: Trainer, summary: Mapping[str, Any]) -> None:
        self.end = _copied(trainer.model)

    def _note(self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, Any]) -> None:
        batches = self.trained if model.training else self.evaluated
        batches.append({name: value.clone() for name, value in kwargs.items() if isinstance(value, Tensor)})


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train(recipe: str, folder: Path, *words: str) -> Watched:
    """Run ``python RECIPE WORDS`` in this process. Its working directory is ``folder``, and the run is in ``run``."""
    watched = Watched(folder)
    fit = Trainer.fit

    def fit_watched(template: Trainer, workers: int | None = None) -> dict[str, Any]:
        template.callbacks = (*template.callbacks, watched)
        return fit(template, workers)

    with mock.patch.object(Trainer, "fit", fit_watched):
        _run(recipe, folder, words)
    return _results(watched)


def train_in_workers(recipe: str, folder: Path, *words: str) -> Watched:
    """Run a recipe as each of two workers. The batches are not noted."""
    run_in_workers(2, _as_worker, recipe, folder, words)
    return _results(Watched(folder))


def _as_worker(workers: object, recipe: str, folder: Path, words: tuple[str, ...]) -> None:
    _run(recipe, folder, words)


def _run(recipe: str, folder: Path, words: tuple[str, ...]) -> None:
    with contextlib.chdir(folder), one_thread():
        common = ["--device", "cpu", "--log-interval", "1", "--save", "run", "--overwrite"]
        assert run_script(FOLDER / f"{recipe}.py", *words, *common) == 0


def _results(watched: Watched) -> Watched:
    watched.metrics = [dict(line) for line in read_metrics(watched.folder / "run/metrics.jsonl")]
    watched.losses = [line["loss"] for line in watched.metrics if "loss" in line]
    for file in (watched.folder / "run/export").glob("*.safetensors"):
        watched.weights |= load_file(file)
    return watched


def largest_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Return the largest difference between two models with the same names of weights.

    Train both with ``--adam-epsilon 1e-6``. With 1e-8, Adam makes long steps of rounding errors, such as the gradients
    of the biases of keys, on which attention does not depend.
    """
    assert left.keys() == right.keys()
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left)


def train_alike(recipe: str, folder: Path, flags: list[str], layout: str) -> tuple[Watched, Watched]:
    """Run a recipe in this process, and in two workers in a layout. Assert that losses and weights are equal."""
    for name in ("alone", "workers"):
        (folder / name).mkdir()
    single = train(recipe, folder / "alone", *flags)
    found = train_in_workers(recipe, folder / "workers", *flags, *layout.split())
    assert found.losses == pytest.approx(single.losses, abs=1e-5)
    assert largest_difference(found.weights, single.weights) < 1e-5
    return single, found


class _Reference(transformers.Trainer):
    """The ``Trainer`` of transformers on given micro batches, in their order. Notes the loss of each."""

    def __init__(self, batches: list[dict[str, Tensor]], **more: Any) -> None:
        super().__init__(**more)
        self.batches, self.losses = batches, list[float]()

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(float(loss))
        return loss


def reference(
    model: nn.Module, batches: list[dict[str, Tensor]], folder: Path, *, accumulation: int = 1, **arguments: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Train a model with the ``Trainer`` of transformers, on the batches of a watched run.

    Args:
        batches: micro batches, ``accumulation`` of them per step.
        arguments: of ``TrainingArguments``.

    Returns:
        The loss of each step, and the weights as transformers saves them.
    """
    settings = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
        max_steps=len(batches) // accumulation, gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=len(batches[0]["labels"]), **arguments,
    )  # fmt: skip
    trainer = _Reference(batches, model=model, args=settings)
    with one_thread():
        trainer.train()
    parts = torch.tensor(trainer.losses).reshape(-1, accumulation)
    trainer.save_model(str(folder / "model"))
    return parts.sum(1).tolist(), load_file(folder / "model/model.safetensors")
