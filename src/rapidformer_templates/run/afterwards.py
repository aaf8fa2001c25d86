"""What a program does with a template after, or without, a training: one plain model in this very process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from rapidformer_templates.data.finetuning.tables import Raw
from rapidformer_templates.data.generation import Generation
from rapidformer_templates.data.loader import eval_requests, load
from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.local import SingleEngine
from rapidformer_templates.errors import ConfigError, DataError
from rapidformer_templates.planning.plan import Plan, Sizes
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.run.building import build_engine
from rapidformer_templates.run.evaluation import Evaluator, Validation, evaluating
from rapidformer_templates.run.fit import build_data
from rapidformer_templates.run.hooks import checked_count, checked_predictions
from rapidformer_templates.run.predictions import part_of_samples, predict_samples
from rapidformer_templates.system import launch
from rapidformer_templates.system.process_state import kept_process_state
from rapidformer_templates.system.workers import Workers

if TYPE_CHECKING:
    from rapidformer_templates.run.template import Template

Weights = Mapping[str, torch.Tensor]


def whole_weights(engine: Engine) -> Weights | None:
    """The weights that a run exports, on the host of rank 0; None elsewhere. Every rank must call it."""
    with engine.averaged():
        weights = engine.full_weights()
        return None if weights is None else {name: tensor.clone() for name, tensor in weights.items()}


def is_plain(engine: Engine, template: Template) -> bool:
    """Whether the model of an engine is whole, in this process, and has the weights that are exported."""
    return type(engine) is SingleEngine and template.config.training.ema_decay is None


def build_alone(template: Template, weights: Weights | None) -> Engine:
    """The model in this process, whole and without what divides or wraps it.

    Args:
        weights: trained ones; None leaves those of ``build_model``.
    """
    if launch.is_worker():
        raise ConfigError(
            "this process is one of several workers, and none of them has the model alone",
            where=f"{type(template).__name__}",
            hint="evaluate and predict in a program of one process, or with rapidformer evaluate and predict",
        )
    with kept_process_state(), _planned_alone(template):
        workers = _alone(template.plan)
        build_data(template, workers)
        engine = build_engine(template, workers)
    if weights is not None:
        engine.load(_InMemory(weights), optimizer=False)
    engine.model.eval()
    return engine


def evaluate(template: Template, engine: Engine, data: Any = None) -> dict[str, float]:
    """The metrics of a model on the validation part, or on other data.

    Args:
        data: a data set like ``Data.valid``; of a task also rows of its columns, with what they are measured by.

    Raises:
        DataError: there are no data, or a row cannot be used.
    """
    samples = template.data.validation_sets() if data is None else _samples_of(template, data)
    if samples is None or not len(samples):
        raise DataError(
            "there are no data to evaluate on",
            where="evaluate()",
            hint="hand them over: evaluate(data), or give the template a validation part",
        )
    with kept_process_state(), _planned_alone(template):
        if data is None:
            return Validation(template, engine, engine.workers).evaluate()
        return Evaluator(template, engine, samples, engine.workers).evaluate()


def predict(
    template: Template, engine: Engine, samples: Sequence[Any], batch_size: int, generation: Generation
) -> list[Any]:
    """What a model predicts of samples: a record each of a task, else what ``read_outputs`` makes of them.

    Raises:
        DataError: a sample cannot be used.
        ConfigError: nothing says how the model's outputs are read.
    """
    if template.uses_task:
        with kept_process_state():
            return list(predict_samples(template.task, engine.model, samples, batch_size, generation))
    with kept_process_state(), _planned_alone(template), evaluating(engine):
        return _read(template, engine, samples, batch_size)


def _read(template: Template, engine: Engine, samples: Sequence[Any], batch_size: int) -> list[Any]:
    """What ``read_outputs`` makes of samples in the form of the template's own data."""
    requests = eval_requests(None, len(samples), 0, rank=0, data_size=1, micro_batch=batch_size)
    told: dict[int, Any] = {}
    for microbatch in load(samples, template.data, requests, workers=0, pin_memory=False):
        microbatch.targets = checked_count(template.count_targets(microbatch.batch))
        _, outputs = engine.eval_batch(microbatch)
        read, _ = checked_predictions(template.read_outputs(outputs, microbatch.batch), len(microbatch.samples))
        told |= dict(zip(microbatch.samples, read, strict=True))
    predictions = [told[place] for place in range(len(samples))]
    if predictions and all(prediction is None for prediction in predictions):
        raise ConfigError(
            "nothing says how predictions are read of what the model puts out",
            where=f"{type(template).__name__}.predict()",
            hint="override read_outputs(self, outputs, batch), or call the model itself: .model",
        )
    return predictions


def _samples_of(template: Template, data: Any) -> Any:
    """Data as the evaluation takes them; rows of a task's columns are read as those of its files are."""
    is_of_rows = isinstance(data, list | tuple) and all(isinstance(row, Mapping) for row in data)
    if not (is_of_rows and template.uses_task):
        return data
    task, part = template.task, part_of_samples(data)
    decided = type(task)(task.config)
    decided.take_decisions(task.decisions())
    decided.read_rows = lambda: Raw(train=part, valid=part)  # type: ignore[method-assign]
    return decided.build_data().valid


@contextmanager
def _planned_alone(template: Template) -> Iterator[None]:
    """In the body the plan is that of one process; what makes other models of it than the user's alone is kept."""
    plan, held = template.plan, vars(template)
    held["plan"] = Plan(
        template=plan.template,
        switches=tuple(name for name in plan.switches if REGISTRY[name].exported),
        sizes=Sizes(micro_batch=plan.sizes.micro_batch, global_batch=plan.sizes.micro_batch),
        device=plan.device,
        precision=plan.precision,
        values=plan.values,
    )
    try:
        yield
    finally:
        held["plan"] = plan


def _alone(plan: Plan) -> Workers:
    device = torch.device("cuda", 0) if plan.device == "cuda" else torch.device("cpu")
    return Workers(rank=0, local_rank=0, world=1, device=device)


@dataclasses.dataclass(frozen=True)
class _InMemory:
    """Weights as a checkpoint is read."""

    weights: Weights

    def names(self, kind: str) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.weights.items() if kind == "weights"}

    def read(self, kind: str, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        box = tuple(slice(begin, begin + length) for begin, length in zip(offset, shape, strict=True))
        return self.weights[name][box]
