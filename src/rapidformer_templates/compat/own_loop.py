"""``engine.compose`` and ``engine.backward``: the script's training loop around an engine that makes whole steps.

An engine runs forward, backward and update itself and asks a hook for the loss. A script with its own loop computes
the loss itself. So the engine runs in a separate thread, and only one of the two threads runs at a time:

1. The engine asks for the loss of a batch.
2. The loader yields that batch to the script.
3. The script calls the model, and the engine runs the forward.
4. ``backward`` passes the loss to the engine.
5. ``optimizer.step`` lets the engine make the update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rapidformer_templates.compat.batches import SharedLoader, checked_loader, checked_targets, micro_batch_of
from rapidformer_templates.data.loader import to_device
from rapidformer_templates.data.types import Batch
from rapidformer_templates.errors import ConfigError, RapidformerError
from rapidformer_templates.run.session import Session, open_session
from rapidformer_templates.system import accelerator
from rapidformer_templates.trainer import template_of_session

if TYPE_CHECKING:
    from rapidformer_templates.compat.rapidformer import RapidformerEngine

STEP, FORWARD, LOSS, UPDATE, LEAVE = "step", "forward", "loss", "update", "leave"
"""Messages from the script to the engine."""
BATCH, OUTPUT, FAILED, READY, DONE, ERROR = "batch", "output", "failed", "ready", "done", "error"
"""Messages from the engine to the script: a batch whose loss it needs, the model's output, the model's error, all
gradients are ready, the step is done, the step failed."""

UNCOUNTED = "the loop's loss", "engine.compose(…, count_targets=function): from a batch to the number of its targets"
"""Parts of the error message for a batch whose number of targets is unknown."""

Call = tuple[tuple[Any, ...], dict[str, Any], bool]
"""Positional arguments, keyword arguments, and whether gradients are enabled."""


class _Ended(BaseException):
    """The script left its loop in the middle of a step."""


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
        template = template_of_session(model, optimizer, self._ask_for_loss, count, engine.words, size)
        engine.template = template
        if template.config.get("pipeline_model_parallel_size") != 1:
            raise ConfigError(
                "a pipeline has no output of the whole model to compute a loss from",
                where=template.config.origin("pipeline_model_parallel_size"),
                hint="write a Trainer with compute_loss(model, batch), or rapidformer_templates.compose()",
            )
        self.session: Session = open_session(template, None, None, reads_flags=True)
        self._script_loader = script_loader
        self._loader = SharedLoader(
            script_loader, self.session.workers, self.session.plan.sizes, template.config.training.seed
        )
        self._to_engine: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._to_script: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._real = 0  # micro batches of this step that the script has not seen yet
        self._call: Call | None = None  # the latest call of the model
        self._heard: tuple[str, Any] = (DONE, None)  # the engine's last message, after which it waits
        self._is_open = False  # the script has a batch whose loss is missing
        self._precision = ExitStack()  # the precision of the loss, while the batch is open
        self.is_last = True  # this is the last micro batch of its step
        threading.Thread(target=self._serve, name="engine", daemon=True).start()
        self.model, self.optimizer = ComposedModel(self), ComposedOptimizer(self)
        by_flags = scheduler_fn is None and optimizer is None
        self.scheduler = ComposedScheduler(self, scheduler_fn, by_flags=by_flags)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the script's loader, such as ``dataset``, ``batch_size`` or ``sampler``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._script_loader, name)

    # These methods run in the thread of the engine.

    def _serve(self) -> None:
        """Make one step after another. The script waits for each message of this thread."""
        accelerator.make_current(self.session.workers.device)
        while True:
            _, batches = self._to_engine.get()
            try:
                self._to_script.put((DONE, self.session.step(batches, share=self._ask_for_update)))
            except BaseException as error:
                self._to_script.put((ERROR, error))

    def _ask_for_loss(self, model: Any, batch: Batch) -> Any:
        """Return the script's loss of a batch. This is the engine's ``compute_loss`` hook."""
        if not self._real or not torch.is_grad_enabled():
            if self._call is None:
                return model(**batch).loss
            _answer(model, self._call)  # this batch does not count, and the script does not see it
            return None
        self._real -= 1
        self._to_script.put((BATCH, batch))
        while True:
            what, value = self._to_engine.get()
            if what == LOSS:
                return value
            if what != FORWARD:
                raise _Ended
            try:
                self._to_script.put((OUTPUT, _answer(model, value)))
            except Exception as error:  # raised in the script, which may catch it
                self._to_script.put((FAILED, error))

    def _ask_for_update(self) -> float:
        """Wait until the script asks for the update, and return the fraction of the peak learning rate.

        It is the fraction of rank 0, which sees every step.
        """
        self._to_script.put((READY, None))
        what, share = self._to_engine.get()
        if what != UPDATE:
            raise _Ended
        workers = self.session.workers
        return workers.sum(share if workers.is_main else 0.0)[0]

    # These methods run in the thread of the script.

    def _tell(self, what: str, value: Any = None) -> Any:
        """Send a message to the engine and return the value of its answer.

        Raises:
            Exception: the error of the engine or of the model.
        """
        self._to_engine.put((what, value))
        self._heard = self._to_script.get()
        if self._heard[0] in (FAILED, ERROR):
            raise self._heard[1]
        return self._heard[1]

    def __len__(self) -> int:
        """Return the number of batches that this worker sees in one epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        for batches in self._loader.steps():
            yield from self._stepping(batches)

    def _stepping(self, batches: list[Batch]) -> Iterator[Batch]:
        """Yield the batches of one step. The engine waits for the loss of each."""
        self._end_step()  # an older iterator may still be in a step
        self._real, self.is_last = len(batches), not batches
        try:
            self._tell(STEP, batches)
            for number in range(len(batches)):
                self._is_open, self.is_last = True, number == len(batches) - 1
                self._precision.enter_context(self.session.precision())
                yield self._heard[1]
                self._check_body()
            if not batches:  # the other workers need this one for the last step
                self.optimizer.step()
        finally:
            self._end_step()

    def _end_step(self) -> None:
        """End an unfinished step and drop its gradients."""
        self._precision.close()
        if self._heard[0] in (BATCH, OUTPUT, FAILED, READY):
            self._to_engine.put((LEAVE, None))
            while self._heard[0] not in (DONE, ERROR):
                self._heard = self._to_script.get()
        self._is_open, self.is_last = False, True

    def _check_body(self) -> None:
        """Check that the script called ``backward`` and, after a step's last micro batch, ``optimizer.step``.

        Raises:
            RapidformerError: one of the calls is missing.
        """
        if self._is_open:
            raise RapidformerError(
                "the loop took the next batch without engine.backward(loss)", hint="call it once for each batch"
            )
        if self._heard[0] == READY:
            sizes = self.session.plan.sizes
            raise RapidformerError(
                f"the loop took the next batch without optimizer.step(), after the {sizes.accumulation} micro batches "
                f"of --global-batch-size {sizes.global_batch}",
                hint="call optimizer.step() after every engine.backward(loss): it updates when a step is complete",
            )

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Return the model's output. Outside of a batch of the loop, the forward has no gradients."""
        if not self._is_open:
            return self.session.forward(*arguments, **named)
        self._call = arguments, named, torch.is_grad_enabled()
        return self._tell(FORWARD, self._call)

    def backward(self, loss: torch.Tensor) -> None:
        """Pass the loss of the batch to the engine."""
        if not self._is_open:
            raise RapidformerError(
                "engine.backward(loss) without a batch of the composed loader", hint="call it once for each batch"
            )
        self._is_open = False
        self._precision.close()
        self._tell(LOSS, loss)

    def update(self) -> None:
        """Let the engine make the update once all micro batches of the step are done."""
        if not self.is_last:
            return  # more micro batches belong to this step
        if self._heard[0] != READY:
            raise RapidformerError("optimizer.step() without engine.backward(loss)", hint="call backward before it")
        self._tell(UPDATE, self.scheduler.share)

    def evaluating(self, loader: Collection[Batch]) -> OnDevice:
        """Return the batches of an evaluation."""
        return OnDevice(loader, self.session)


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

    def __call__(self, *arguments: Any, **named: Any) -> Any:
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


def _answer(model: Any, call: Call) -> Any:
    """Run the model for a call that was made in another thread."""
    arguments, named, has_gradients = call
    with torch.set_grad_enabled(has_gradients):
        return model(*arguments, **named)
