"""``engine.compose`` and ``engine.backward``: the script's training loop around the steps of an engine.

Each call of the script is a part of a step:

1. The loader begins a step and yields the batch of its first micro batch.
2. The script calls the model and computes the loss.
3. ``backward`` runs the backward of the micro batch. The loader yields the next batch.
4. ``optimizer.step`` makes the update after the last micro batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from rapidformer_templates.data.loader import to_device
from rapidformer_templates.data.types import Batch
from rapidformer_templates.engines.loss import Recorder
from rapidformer_templates.engines.step import Step
from rapidformer_templates.errors import ConfigError, RapidformerError
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.plan import Sizes
from rapidformer_templates.run.session import Session, open_session
from rapidformer_templates.system.process_state import seeded
from rapidformer_templates.system.workers import Workers
from rapidformer_templates.trainer import Trainer, template_of_session

if TYPE_CHECKING:
    from rapidformer_templates.compat.rapidformer import RapidformerEngine

UNCOUNTED = "the loop's loss", "engine.compose(…, count_targets=function): from a batch to the number of its targets"
"""Parts of the error message for a batch whose number of targets is unknown."""

Call = tuple[tuple[object, ...], dict[str, object], bool]
"""Positional arguments, keyword arguments, and whether gradients are enabled."""


class OwnLoop:
    """The loader of the training batches, which also handles the script's calls to the model and the optimizer.

    Attributes:
        session: the session that makes the steps.
        model, optimizer, scheduler: the objects that replace those of the script.
    """

    def __init__(
        self,
        engine: RapidformerEngine,
        model: nn.Module,
        optimizer: Optimizer | None,
        scheduler_fn: Callable[[Optimizer], LRScheduler] | None,
        loader: object,
        count_targets: Callable[[Batch], float] | None,
    ) -> None:
        script_loader = checked_loader(loader)
        size = micro_batch_of(script_loader, engine.template_of_flags.config)
        count = count_targets or (lambda batch: checked_targets(template, batch, *UNCOUNTED))
        template = template_of_session(model, optimizer, self._repeat_call, count, engine.words, size)
        engine.template = template
        if optimizer is not None:
            template.build_optimizer()  # refuse an unusable optimizer before a worker starts
        if template.config.get("pipeline_model_parallel_size") != 1:
            message = "a pipeline has no output of the whole model to compute a loss from"
            hint = "write a Trainer with compute_loss(model, batch), or rapidformer_templates.compose()"
            raise ConfigError(message, where=template.config.origin("pipeline_model_parallel_size"), hint=hint)
        self.session: Session = open_session(template, None, None, reads_flags=True)
        self._script_loader = script_loader
        self._loader = SharedLoader(
            script_loader, self.session.workers, self.session.plan.sizes, template.config.training.seed
        )
        self._step: Step | None = None  # the current step, until its update
        self._step_context = ExitStack()
        self._model: nn.Module | Recorder  # computes the loss of the current batch
        self._is_open = False  # the script has a batch whose loss is missing
        self._call: Call | None = None  # the latest call of the model
        self.is_last = True  # this is the last micro batch of its step
        self.model, self.optimizer = ComposedModel(self), ComposedOptimizer(self)
        by_flags = scheduler_fn is None and optimizer is None
        self.scheduler = ComposedScheduler(self, scheduler_fn, by_flags=by_flags)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the script's loader, such as ``dataset``, ``batch_size`` or ``sampler``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._script_loader, name)

    def _repeat_call(self, model: Any, batch: Batch) -> Any:
        """Repeat the script's latest call for a batch that does not count. This is the engine's ``compute_loss``."""
        if self._call is None:
            return model(**batch).loss
        arguments, named, has_gradients = self._call
        with torch.set_grad_enabled(has_gradients):
            model(*arguments, **named)
        return None

    def __len__(self) -> int:
        """Return the number of batches that this worker sees in one epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        for batches in self._loader.steps():
            self._end_step()  # an older iterator may still be in a step
            try:
                yield from self._batches_of_step(batches)
            finally:
                self._end_step()

    def _batches_of_step(self, batches: list[Batch]) -> Iterator[Batch]:
        """Begin a step and yield the batches of this worker.

        Raises:
            RapidformerError: the script did not call ``backward``, or ``optimizer.step`` after the last micro batch.
        """
        step = self._step = self._step_context.enter_context(self.session.open_step(batches))
        for number, microbatch in enumerate(step.microbatches[: len(batches)], start=1):
            self._model, batch = step.forward(microbatch)
            self._is_open, self.is_last = True, number == len(batches)
            yield batch
            if self._is_open:
                message = "the loop took the next batch without engine.backward(loss)"
                raise RapidformerError(message, hint="call it once for each batch")
            if self._step is not None and self.is_last:
                sizes = self.session.plan.sizes
                raise RapidformerError(
                    "the loop took the next batch without optimizer.step(), after the "
                    f"{sizes.accumulation} micro batches of --global-batch-size {sizes.global_batch}",
                    hint="call optimizer.step() after every engine.backward(loss): it updates when a step is complete",
                )
            if self._step is not step:  # it is over, or has failed and the script continues
                return
        if not batches:  # the other workers need this one for the last step
            with self._part_of_step():
                step.accumulate()
            self.update()

    @contextmanager
    def _part_of_step(self) -> Iterator[Step]:
        """Context for a part of the current step. The step ends with an update or an error."""
        assert self._step is not None
        step, self._step = self._step, None
        with self._step_context.pop_all() as context:
            yield step
            if step.result is None:
                self._step, self._step_context = step, context.pop_all()

    def _end_step(self) -> None:
        """End an unfinished step and drop its gradients."""
        self._step, self._is_open, self.is_last = None, False, True
        self._step_context.close()

    def forward(self, *arguments: object, **named: object) -> Any:
        """Return the model's output. Outside of a batch of the loop, the forward has no gradients."""
        if not self._is_open:
            return self.session.forward(*arguments, **named)
        self._call = arguments, named, torch.is_grad_enabled()
        return self._model(*arguments, **named)

    def backward(self, loss: object) -> None:
        """Run the backward of the batch from the script's loss."""
        if not self._is_open:
            message = "engine.backward(loss) without a batch of the composed loader"
            raise RapidformerError(message, hint="call it once for each batch")
        self._is_open = False
        with self._part_of_step() as step:
            step.backward(loss)
            if self.is_last:
                step.accumulate()  # idle micro batches, if other workers have more

    def update(self) -> None:
        """Make the update once all micro batches of the step are done."""
        if not self.is_last:
            return  # more micro batches belong to this step
        if self._step is None or self._is_open:
            raise RapidformerError("optimizer.step() without engine.backward(loss)", hint="call backward before it")
        workers = self.session.workers
        with self._part_of_step() as step:
            # Rank 0 sees every step, so its rate counts.
            step.update(workers.sum(self.scheduler.share if workers.is_main else 0.0)[0])


class OnDevice:
    """The batches of an evaluation. Each worker gets all of them, and computes in the precision of the run."""

    def __init__(self, loader: Collection[Batch], session: Session) -> None:
        self.loader, self.session = loader, session

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            with self.session.precision():
                yield to_device(batch, self.session.workers.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class ComposedModel:
    """The script's model. Within a step, the engine runs its forward."""

    def __init__(self, loop: OwnLoop) -> None:
        self._loop = loop

    def __call__(self, *arguments: object, **named: object) -> Any:
        return self._loop.forward(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop.session.model, name)


class ComposedOptimizer:
    """The script's optimizer. ``step`` is the engine's update, which also zeroes the gradients."""

    def __init__(self, loop: OwnLoop) -> None:
        self._loop = loop

    def step(self) -> None:
        """Make the update if this is the last micro batch of a step."""
        self._loop.update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing. The engine zeroes the gradients."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._loop.session.param_groups

    def state_dict(self) -> NoReturn:
        """Raise a ConfigError, because the state is divided over the workers."""
        raise ConfigError("the optimizer's state is divided over the workers", hint="engine.session.save(folder)")

    load_state_dict = state_dict


class ComposedScheduler:
    """The script's scheduler, over a dummy optimizer. Only its fraction of the peak learning rate is used."""

    def __init__(self, loop: OwnLoop, make: Callable[[Optimizer], LRScheduler] | None, *, by_flags: bool) -> None:
        self._loop, self._by_flags = loop, by_flags
        self._scheduler = None if make is None else make(SGD([nn.Parameter(torch.zeros(1))], lr=1.0))

    @property
    def share(self) -> float:
        """Fraction of the peak learning rate after the calls of ``step`` so far.

        Without a scheduler it is 1, or the flags' schedule if the optimizer also comes from the flags.
        """
        if self._scheduler is not None:
            return float(self._scheduler.get_last_lr()[0])
        return self._loop.session.share if self._by_flags else 1.0

    def step(self) -> None:
        """Advance to the rate of the next step. The micro batches of one step count once."""
        if self._scheduler is not None and self._loop.is_last:
            self._scheduler.optimizer.step()
            self._scheduler.step()

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [float(group["lr"]) for group in self._loop.session.param_groups]


WHERE = "engine.compose(train_dataloader=…)"


class SharedLoader:
    """Divides the batches of a loader, so that each worker sees different ones.

    Rank 0 draws from the samplers, so that any sampler works. The draws depend on ``seed`` and the epoch, or on the
    sampler's own generator. They do not depend on the number of workers.
    """

    def __init__(self, loader: DataLoader[Batch], workers: Workers, sizes: Sizes, seed: int) -> None:
        self._script_loader, self._workers, self._seed, self._passes = loader, workers, seed, 0
        self._in_a_step = sizes.data * sizes.accumulation
        self._own_batches: list[list[object]] = []
        # A copy has every option of the original. `vars` is the only way to set the batch sampler of a loader.
        self._our_loader, self._generator = copy.copy(loader), torch.Generator()
        vars(self._our_loader).update(batch_sampler=self._own_batches, generator=self._generator, _iterator=None)

    def __len__(self) -> int:
        """Return the number of batches that this worker sees in one epoch."""
        return len(range(self._workers.data_rank, len(self._script_loader), self._workers.data))

    def steps(self) -> Iterator[list[Batch]]:
        """Yield this worker's micro batches for each step of one epoch. The last step may have fewer or none."""
        workers, many = self._workers, self._in_a_step
        drawn = workers.broadcast(self._drawn() if workers.is_main else None)
        assert drawn is not None  # by rank 0
        seed, batches = drawn
        self._passes += 1
        self._own_batches[:] = batches[workers.data_rank :: workers.data]
        self._generator.manual_seed(seed + workers.data_rank)  # each worker's loader processes draw different numbers
        iterator = iter(self._our_loader)
        for first in range(0, len(batches), many):
            yield list(islice(iterator, len(range(workers.data_rank, min(many, len(batches) - first), workers.data))))

    def _drawn(self) -> tuple[int, list[list[object]]]:
        """Return (seed of the loader's processes, samples of each batch), drawn in the same order as torch's loader."""
        sampler = self._script_loader.batch_sampler
        assert sampler is not None  # :func:`checked_loader`
        with seeded(self._seed + self._passes):
            batches = iter(sampler)
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=self._script_loader.generator))
            return seed, [list(batch) for batch in batches]


def checked_loader(loader: object) -> DataLoader[Batch]:
    """Return the loader if its batches can be divided among workers.

    Raises:
        ConfigError: its samples are unknown or already divided, or its length is unknown.
    """
    is_stream = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    if is_stream or not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        of = " over an IterableDataset" if is_stream else ""
        raise ConfigError(
            f"the train_dataloader is of type {type(loader).__name__}{of}, so the samples of its batches are unknown",
            where=WHERE,
            hint=f"give a torch DataLoader over a data set with a length, of {spelling('micro_batch_size')} samples; "
            "for batches that each worker makes itself, use rapidformer_templates.compose() (docs/own-loop.md)",
        )
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise ConfigError(
            "the train_dataloader has a DistributedSampler, which divides the samples, but engine.compose "
            "divides them already",
            where=WHERE,
            hint="DataLoader(…, shuffle=True), or without a sampler: every worker then sees its own batches",
        )
    try:
        len(loader)
    except TypeError:
        message = "the length of a pass is unknown: the sampler of the train_dataloader has no __len__"
        hint = "write __len__(self) for the sampler: the number of samples, or of batches, that it draws"
        raise ConfigError(message, where=WHERE, hint=hint) from None
    return loader


def micro_batch_of(loader: DataLoader[Batch], config: RunConfig) -> dict[str, int]:
    """Return the micro batch size of the loader as a flag, unless the flag is given already.

    Raises:
        ConfigError: the flag and the loader have different sizes.
    """
    if loader.batch_size is None:  # only the batch sampler knows it
        return {}
    name = "micro_batch_size"
    if name in config.origins and config.get(name) != loader.batch_size:
        raise ConfigError(
            f"the train_dataloader makes batches of {loader.batch_size} samples, and {spelling(name)} says "
            f"{config.get(name)}",
            where=config.origin(name),
            hint="DataLoader(…, batch_size=get_args().micro_batch_size), or leave the flag out",
        )
    return {} if name in config.origins else {name: loader.batch_size}


def checked_targets(template: Trainer, batch: Batch, loss: str, hint: str) -> float:
    """Return the number of labels of a batch that count.

    Args:
        loss: name of the loss, for the error message.
        hint: hint of the error message.

    Raises:
        RapidformerError: the batch has no labels, and a step has other micro batches, so that it needs a weight.
    """
    named = isinstance(batch, Mapping) or hasattr(batch, "get")
    sizes = template.plan.sizes
    if not (named and "labels" in batch) and sizes.data * sizes.accumulation > 1:
        raise RapidformerError(
            f"cannot tell what {loss} is a mean over: the batch has no 'labels'",
            where=f"{sizes.data * sizes.accumulation} micro batches per step, which must be weighted",
            hint=hint,
        )
    return Trainer.count_targets(template, batch)
