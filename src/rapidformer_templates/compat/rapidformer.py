"""Scripts written for Alibaba's PAI-Rapidformer, with one changed import.

    from rapidformer_templates.compat.rapidformer import Finetuner, PreTrainer, RapidformerEngine, get_args

The interface follows PAI-Rapidformer's published documentation. docs/pai-rapidformer.md lists what is equal and what
is refused.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, NoReturn, SupportsIndex

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerFast

from rapidformer_templates import finetuner, pretrainer
from rapidformer_templates.compat.own_loop import OnDevice, OwnLoop, checked_targets
from rapidformer_templates.data.collate import samples_in
from rapidformer_templates.data.loader import eval_requests, load, sample_lengths, to_device
from rapidformer_templates.data.types import Batch, Data, Sample, SampleSet
from rapidformer_templates.engines.forwards import evaluating
from rapidformer_templates.engines.optimizer_instances import as_recipe, as_schedule
from rapidformer_templates.engines.recipe import OptimizerSpec, Schedule
from rapidformer_templates.errors import ConfigError, RapidformerError
from rapidformer_templates.models.model_files import load_tokenizer
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.flags import SECTIONS
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.run.session import Session
from rapidformer_templates.system import launch
from rapidformer_templates.trainer import Trainer

INSTEAD = {
    "HuggingFaceTrainer": "write a Finetuner with train_valid_test_datasets_provider and run_forward_step",
    "GPTFinetuner": "write a Finetuner, or rapidformer --task causal_lm",
    "GPTPredictor": "rapidformer predict RUN",
    "build_pretrain_huggingface_bert_datasets": "rapidformer --task pretraining --data-path … makes them",
    "build_train_valid_test_datasets": "rapidformer --task pretraining --data-path … makes them",
}
"""Other names that scripts import from PAI-Rapidformer, and their replacements in this library."""

MEGATRON_EVAL_ITERS = 100
"""Batches per evaluation without ``--eval-iters``, for a provider that takes numbers of samples."""


def __getattr__(name: str) -> NoReturn:
    if name in INSTEAD:
        raise ConfigError(f"{name} of PAI-Rapidformer is not available", hint=INSTEAD[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class RapidformerEngine:
    """The engine of a PAI-Rapidformer script. It reads the command line.

    The engine that trains is chosen later, when a template or :meth:`compose` needs it.

    Args:
        extra_args_provider: function that adds the script's flags to an ``argparse`` parser.
    """

    current: ClassVar[RapidformerEngine | None] = None

    def __init__(self, extra_args_provider: ExtraArgs | None = None) -> None:
        script_values, self.words = split_script_flags(launch.program_arguments(), extra_args_provider)
        self.template: Trainer | None = None
        self.args = Arguments(self._config, script_values)
        self.timers = Timers()
        self._loop: OwnLoop | None = None
        RapidformerEngine.current = self

    def _config(self) -> RunConfig:
        return (self.template or self.template_of_flags).config

    @cached_property
    def template_of_flags(self) -> Trainer:
        """A template with the flags only, used before the script has created its template."""
        return Trainer(self.words)

    def compose(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        lr_scheduler_fn: Callable[[Optimizer], LRScheduler] | None = None,
        train_dataloader: Iterable[Batch] | None = None,
        eval_dataloader: Collection[Batch] | None = None,
        *,
        model_obj: nn.Module | None = None,
        count_targets: Callable[[Batch], float] | None = None,
    ) -> tuple[Any, ...]:
        """Prepare the given objects for your own loop with :meth:`backward`, and return them in the same order.

        The result always has an optimizer, because the loop's ``optimizer.step()`` makes the update. If you give none,
        it follows ``--optimizer`` and ``--lr``. If you also give no scheduler, its rate follows ``--train-iters`` and
        ``--lr-decay-style``.

        Args:
            count_targets: function from a batch to the number of targets that its loss averages over. The default
                counts the labels that are not -100.

        Raises:
            ConfigError: something that the loop needs is missing.
            Refused: the flags break rules.
        """
        model = model if model is not None else model_obj
        if model is None or train_dataloader is None:
            message = "engine.compose needs the model and the train_dataloader: a step is made of the loader's batches"
            hint = "engine.compose(model=…, optimizer=…, lr_scheduler_fn=…, train_dataloader=…)"
            raise ConfigError(message, hint=hint)
        self._loop = OwnLoop(self, model, optimizer, lr_scheduler_fn, train_dataloader, count_targets)
        parts = (self._loop.model, self._loop.optimizer, lr_scheduler_fn and self._loop.scheduler, self._loop)
        evaluates = None if eval_dataloader is None else OnDevice(eval_dataloader, self._loop.session)
        return tuple(part for part in (*parts, evaluates) if part is not None)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of the batch that the composed loader yielded last."""
        if self._loop is None:
            raise ConfigError("engine.backward(loss) comes after engine.compose(…)")
        self._loop.backward(loss)

    @property
    def session(self) -> Session:
        """The session behind your loop. Use it to save, load and export: ``engine.session.save(folder)``."""
        if self._loop is None:
            raise ConfigError("engine.session exists only after engine.compose(…)")
        return self._loop.session


def _engine() -> RapidformerEngine:
    if RapidformerEngine.current is None:
        raise ConfigError("there are no arguments before RapidformerEngine() has read them")
    return RapidformerEngine.current


def get_args() -> Arguments:
    """Return the flags of the command line, as attributes."""
    return _engine().args


def get_timers() -> Timers:
    """Return the timers of this process."""
    return _engine().timers


def get_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of ``--tokenizer-type`` or of the pretrained model."""
    return load_tokenizer(_engine()._config())


class mpu:  # noqa: N801 - the module of that name
    """The functions of Megatron's parallel state that scripts call. Every worker has its batch already."""

    @staticmethod
    def broadcast_data(
        keys: Sequence[str], data: Mapping[str, torch.Tensor], datatype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Return the tensors ``keys`` of ``data``, cast to ``datatype``."""
        return {key: data[key].to(datatype) for key in keys}

    @staticmethod
    def get_data_parallel_rank() -> int:
        return _template().engine.workers.data_rank

    @staticmethod
    def get_data_parallel_world_size() -> int:
        return _template().plan.sizes.data


def _template() -> Trainer:
    template = _engine().template
    if template is None:
        raise ConfigError("there are no workers before trainer.train()")
    return template


class _OneBatch(dict[str, Any]):
    """A batch that is also an iterator with one item. Scripts write ``data["text"]`` as well as ``next(data)``."""

    is_consumed = False

    def __next__(self) -> dict[str, Any]:
        if self.is_consumed:
            message = "run_forward_step takes a second batch"
            raise RapidformerError(message, hint="one call is one micro batch: --global-batch-size")
        self.is_consumed = True
        return dict(self)


class _Models(list[nn.Module]):
    """The model in a list, as PAI-Rapidformer's templates have it. The list can be called like the model."""

    def __call__(self, *arguments: object, **named: object) -> object:
        return self[0](*arguments, **named)

    def __getattr__(self, name: str) -> object:
        return getattr(self[0], name)


class _Template:
    """The hooks of PAI-Rapidformer's templates, on top of a template of this library."""

    template_class: ClassVar[type[Trainer]]

    def __init__(self, engine: RapidformerEngine) -> None:
        self.engine = engine
        self._shows = True  # the current evaluation batch is not a repeated one that keeps an idle worker busy
        # The hooks of the template call those of this script.
        hooks: dict[str, object] = {"__module__": type(self).__module__}
        if self._has("train_valid_test_datasets_provider"):
            hooks["build_data"] = lambda template: self._data(template)
        if self._has("model_optimizer_lr_scheduler_provider"):
            hooks["build_model"] = lambda template: self._provided_model[0]
            hooks["build_optimizer"] = lambda template: (
                self._provided_model[1] or self.template_class.build_optimizer(template)
            )
            hooks["build_scheduler"] = lambda template, total: self._schedule(template, total)
        if self._has("run_forward_step"):
            hooks["compute_loss"] = lambda template, model, batch: self._loss(batch, model)
        if self._has("count_targets"):
            hooks["count_targets"] = lambda template, batch: self.count_targets(batch)  # type: ignore[attr-defined]
        elif self._has("run_forward_step"):
            hooks["count_targets"] = lambda template, batch: self._count(template, batch)
        if self._has("run_compute_metrics"):
            hooks["read_outputs"] = lambda template, outputs, batch: ([None] * samples_in(batch),) * 2
            hooks["compute_metrics"] = lambda template, predictions, references: self._metrics(template)
        instance: Trainer = type(type(self).__name__, (self.template_class,), hooks)(self.engine.words)
        if self._has("run_compute_metrics") and instance.config.get("pipeline_model_parallel_size") != 1:
            message = "run_compute_metrics calls the whole model, which no stage of a pipeline has"
            hint = "write a Trainer with read_outputs(outputs, batch) and compute_metrics(predictions, references)"
            raise ConfigError(message, where=instance.config.origin("pipeline_model_parallel_size"), hint=hint)
        engine.template = instance

    def train(self) -> dict[str, Any]:
        """Train, and return the content of ``summary.json``.

        If ``--nproc-per-node`` asks for workers, this process starts them first.
        """
        assert self.engine.template is not None
        return self.engine.template.fit()

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate a tensor of an evaluated batch over all workers. Each sample occurs once."""
        template = _template()
        workers = template.engine.workers
        local = tensor.detach().cpu() if self._shows and workers.is_replica_leader else tensor.detach().cpu()[:0]
        return torch.cat(workers.gather(local))

    def _has(self, name: str) -> bool:
        return callable(getattr(self, name, None))

    def _data(self, template: Trainer) -> Data:
        provider: Callable[..., Iterable[Any]] = self.train_valid_test_datasets_provider  # type: ignore[attr-defined]
        counts = _counts(template) if inspect.signature(provider).parameters else None
        parts = tuple(provider() if counts is None else provider(counts))
        if len(parts) not in (3, 4):
            hint = "return the training, validation and test set, and a collate function if there is one"
            raise RapidformerError(f"train_valid_test_datasets_provider returned {len(parts)} values", hint=hint)
        train, valid, test = parts[:3]
        if counts is not None and train is not None:
            # A provider that takes numbers of samples returns them in their final order, as Megatron's data sets do.
            train = _Sequential(train)
        return Data(train=train, valid=valid, test=test, collate=parts[3] if len(parts) == 4 else None)

    @cached_property
    def _provided_model(self) -> tuple[nn.Module, OptimizerSpec | None, LRScheduler | None]:
        provided = self.model_optimizer_lr_scheduler_provider()  # type: ignore[attr-defined]
        model, optimizer, scheduler = provided if isinstance(provided, tuple) else (provided, None, None)
        if optimizer is None and scheduler is not None:
            message = "model_optimizer_lr_scheduler_provider returned a scheduler without its optimizer"
            raise RapidformerError(message, hint="return both, or None for both and --lr-decay-style")
        # Switches replace some parameters, so the recipe is made now, from those that the optimizer was created for.
        return model, optimizer and as_recipe(optimizer, model, {}), scheduler

    def _schedule(self, template: Trainer, total: int) -> Schedule:
        scheduler = self._provided_model[2]
        if scheduler is None:
            return self.template_class.build_scheduler(template, total)
        return as_schedule(scheduler, total)

    def _loss(self, batch: Batch, model: nn.Module) -> object:
        step: Callable[..., object] = self.run_forward_step  # type: ignore[attr-defined]
        first = next(iter(inspect.signature(step).parameters))
        if "iter" in first:
            argument = _OneBatch(batch) if isinstance(batch, Mapping) else iter([batch])
        else:
            argument = copy.copy(batch)  # scripts remove the labels from it
        result = step(argument, model)
        if isinstance(result, tuple) and callable(result[1]):  # as in Megatron: (output, function of the output)
            result = result[1](result[0])
        return result[0] if isinstance(result, tuple) else result

    def _count(self, template: Trainer, batch: Batch) -> float:
        hint = "write count_targets(self, batch): the number of targets, such as batch['loss_mask'].sum()"
        return checked_targets(template, batch, "the loss of run_forward_step", hint)

    def _metrics(self, template: Trainer) -> Mapping[str, float]:
        compute: Callable[..., float | Mapping[str, float]] = self.run_compute_metrics  # type: ignore[attr-defined]
        engine = template.engine
        with evaluating(engine.model), engine.averaged(), engine.measuring() as model, torch.no_grad():
            result = compute(_Models([model]), _Batches(self, template))
        return result if isinstance(result, Mapping) else {"metric": result}


class _Batches:
    """The validation set as a script sees it: the micro batches of this worker, on its device."""

    def __init__(self, script: _Template, template: Trainer) -> None:
        self.script, self.template = script, template
        samples, sizes, workers = template.data.valid, template.plan.sizes, template.engine.workers
        assert samples is not None
        assert not isinstance(samples, Mapping)
        self.samples = samples
        limit = template.config.training.eval_iters
        self.size = min(len(samples), limit * sizes.global_batch) if limit else len(samples)
        self._requests = eval_requests(
            sample_lengths(samples, template.data, training=False), self.size, template.config.training.seed,
            rank=workers.data_rank, data_size=sizes.data, micro_batch=sizes.micro_batch,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Batch]:
        data, device = self.template.data, self.template.engine.workers.device
        for microbatch in load(self.samples, data, self._requests, workers=0, pin_memory=False):
            self.script._shows = not microbatch.idle
            yield to_device(microbatch.batch, device)
        self.script._shows = True


class _Sequential:
    """Samples that are read in their own order, epoch after epoch."""

    in_order = True

    def __init__(self, samples: SampleSet) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index % len(self.samples)]


def _counts(template: Trainer) -> list[int]:
    """Return the numbers of samples for training, evaluation and test, in the order of Megatron's templates."""
    training, batch = template.config.training, template.plan.sizes.global_batch
    if not isinstance(training.train_iters, int):
        raise ConfigError(
            "train_valid_test_datasets_provider needs the number of samples, which a length in epochs does not give",
            hint="give --train-iters as a number of steps, or write the hook without that argument",
        )
    evaluated = (training.eval_iters or MEGATRON_EVAL_ITERS) * batch
    return [training.train_iters * batch, evaluated, evaluated]


class Finetuner(_Template):
    """Fine-tuning, with the hooks of PAI-Rapidformer's ``Finetuner``."""

    template_class = finetuner.Finetuner


class PreTrainer(_Template):
    """Pretraining, with the hooks of PAI-Rapidformer's ``PreTrainer``."""

    template_class = pretrainer.Pretrainer


ExtraArgs = Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]


class Arguments:
    """Flag values as attributes. The values of the library's flags cannot be changed.

    ``vars`` returns all of them. A copy or a pickle is a plain namespace with the values at that time.
    """

    __slots__ = ("_config", "_own")

    def __init__(self, config: Callable[[], RunConfig], script_values: argparse.Namespace) -> None:
        object.__setattr__(self, "_config", config)
        object.__setattr__(self, "_own", script_values)

    @property
    def __dict__(self) -> dict[str, object]:  # type: ignore[override]
        config = self._config()
        return {name: config.get(name) for name in sorted(_library_flags())} | vars(self._own)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[argparse.Namespace], tuple[()], dict[str, object]]:
        return argparse.Namespace, (), vars(self)

    def __contains__(self, name: str) -> bool:
        return name in vars(self)

    def __repr__(self) -> str:
        return repr(argparse.Namespace(**vars(self)))

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._own, name):
            return getattr(self._own, name)
        if name in _library_flags():
            return self._config().get(name)
        raise AttributeError(
            f"there is no flag {spelling(name)}: add it with RapidformerEngine(extra_args_provider=…), "
            "or look for its name here with rapidformer --help-all"
        )

    def __setattr__(self, name: str, value: object) -> None:
        if name in _library_flags() and value != self._config().get(name):
            message = f"args.{name} = {value!r} would change nothing: flags are read before the script sets it"
            raise ConfigError(message, hint=f"give {spelling(name)} on the command line")
        setattr(self._own, name, value)


def _library_flags() -> set[str]:
    options = (*SECTIONS.values(), *REGISTRY.options().values())
    return {field.name for kind in options for field in dataclasses.fields(kind)}


def split_script_flags(words: Sequence[str], provider: ExtraArgs | None) -> tuple[argparse.Namespace, list[str]]:
    """Return (the flags that a script has added, the remaining words for the library).

    Raises:
        ConfigError: a flag has the name of one of the library's flags.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    if provider is not None:
        provider(parser)
    reserved = sorted({action.dest for action in parser._actions} & _library_flags())
    if reserved:
        message = f"{spelling(reserved[0])} is a flag of the library"
        raise ConfigError(message, where="extra_args_provider", hint="leave it out there")
    return parser.parse_known_args(list(words))


class Timers:
    """The named timers of ``get_timers()``: ``timers("name").start()``, ``.stop()``, ``timers.log(["name"])``."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str, log_level: int = 0) -> Timer:
        return self._timers.setdefault(name, Timer())

    def log(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> None:
        """Print the times of these timers in milliseconds, divided by ``normalizer``."""
        texts = (f"{name}: {self(name).elapsed(reset) * 1000 / normalizer:.2f}" for name in names)
        print("time (ms) | " + " | ".join(texts), flush=True)


class Timer:
    """One timer. It adds up the time between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self._seconds, self._since = 0.0, None

    _since: float | None

    def start(self, barrier: bool = False) -> None:
        self._since = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
        self._since = None

    def elapsed(self, reset: bool = True) -> float:
        """Return the seconds so far."""
        seconds = self._seconds + (time.perf_counter() - self._since if self._since is not None else 0.0)
        if reset:
            self._seconds = 0.0
        return seconds
