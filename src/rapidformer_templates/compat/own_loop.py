"""``engine.compose`` and ``engine.backward``: a loop of the script's own around an engine that owns its steps.

An engine runs forward, backward and update by itself, and asks for a loss. The script has the loop, and gives one. So
the engine works in a thread of its own, and only one of the two goes on at a time: the engine asks for the loss of a
batch; the loader yields that batch to the script; its call of the model is answered by the engine; ``backward`` hands
the loss over; and ``optimizer.step`` lets the engine make the update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LRScheduler

from rapidformer_templates.compat.shared_loader import SharedLoader, checked_loader, micro_batch_of
from rapidformer_templates.compat.targets import checked_targets
from rapidformer_templates.data.loader import to_device
from rapidformer_templates.data.types import Batch
from rapidformer_templates.errors import ConfigError, RapidformerError
from rapidformer_templates.run.session import Session, open_session
from rapidformer_templates.system import accelerator
from rapidformer_templates.trainer import composed

if TYPE_CHECKING:
    from rapidformer_templates.compat.rapidformer import RapidformerEngine

STEP, FORWARD, LOSS, UPDATE, LEAVE = "step", "forward", "loss", "update", "leave"
"""What the script tells the engine."""
BATCH, OUTPUT, FAILED, READY, DONE, ERROR = "batch", "output", "failed", "ready", "done", "error"
"""What the engine tells the script: a batch whose loss it wants, the model's output or its error, that all gradients
are there, that the step is made, or that it is not."""

UNCOUNTED = "the loop's loss", "engine.compose(…, count_targets=function): from a batch to the number of its targets"
"""What is said where nothing tells the weight of a batch."""

Call = tuple[tuple[Any, ...], dict[str, Any], bool]
"""Arguments, named ones, and whether gradients are wanted."""


class _Ended(BaseException):
    """The script has left its loop in the middle of a step."""


class OwnLoop:
    """The loader of the training batches, and what the script's calls come to.

    Attributes:
        session: that makes the steps.
        model, optimizer, scheduler: what the script has in the place of its own.
    """

    def __init__(
        self,
        engine: RapidformerEngine,
        model: nn.Module,
        optimizer: Any,
        scheduler_fn: Callable[[Any], LRScheduler] | None,
        loader: Any,
        count_targets: Callable[[Batch], float] | None,
    ) -> None:
        size = micro_batch_of(checked_loader(loader), engine.template_of_flags.config)
        count = count_targets or (lambda batch: checked_targets(template, batch, *UNCOUNTED))
        template = composed(model, optimizer, self._ask_for_loss, count, engine.words, size)
        engine.template = template
        if template.config.get("pipeline_model_parallel_size") != 1:
            raise ConfigError(
                "a pipeline has no output of the whole model to make a loss of",
                where=template.config.origin("pipeline_model_parallel_size"),
                hint="write a Trainer with compute_loss(model, batch), or rapidformer_templates.compose()",
            )
        self.session: Session = open_session(template, None, None, reads_flags=True)
        self._theirs = loader
        self._loader = SharedLoader(
            loader, self.session.workers, self.session.plan.sizes, template.config.training.seed
        )
        self._to_engine: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._to_script: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._real = 0  # micro batches of this step that the script has still to see
        self._call: Call | None = None  # the newest of the model
        self._heard: tuple[str, Any] = (DONE, None)  # the engine's last word, which it waits after
        self._is_open = False  # the script has a batch whose loss is wanted
        self._precision = ExitStack()  # that of the loss, while the batch is open
        self.is_last = True  # of the micro batches of its step
        threading.Thread(target=self._serve, name="engine", daemon=True).start()
        self.model, self.optimizer = ComposedModel(self), ComposedOptimizer(self)
        by_flags = scheduler_fn is None and optimizer is None
        self.scheduler = ComposedScheduler(self, scheduler_fn, by_flags=by_flags)

    def __getattr__(self, name: str) -> Any:
        """As of the loader that was given: ``dataset``, ``batch_size``, ``sampler``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._theirs, name)

    # In the thread of the engine.

    def _serve(self) -> None:
        """Make one step after another; the script waits for each word of this thread."""
        accelerator.make_current(self.session.workers.device)
        while True:
            _, batches = self._to_engine.get()
            try:
                self._to_script.put((DONE, self.session.step(batches, share=self._ask_for_update)))
            except BaseException as error:
                self._to_script.put((ERROR, error))

    def _ask_for_loss(self, model: Any, batch: Batch) -> Any:
        """The hook of the engine: the script's loss of a batch."""
        if not self._real or not torch.is_grad_enabled():
            if self._call is None:
                return model(**batch).loss
            _answer(model, self._call)  # of a batch that counts for nothing, and that no loop sees
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
            except Exception as error:  # it is the script's to catch
                self._to_script.put((FAILED, error))

    def _ask_for_update(self) -> float:
        """The share of the peak rate, once the script asks for the update; that of rank 0, which sees every step."""
        self._to_script.put((READY, None))
        what, share = self._to_engine.get()
        if what != UPDATE:
            raise _Ended
        workers = self.session.workers
        return workers.sum(share if workers.is_main else 0.0)[0]

    # In the thread of the script.

    def _tell(self, what: str, value: Any = None) -> Any:
        """Let the engine go on, and hear what it comes to.

        Raises:
            Exception: what it has failed with.
        """
        self._to_engine.put((what, value))
        self._heard = self._to_script.get()
        if self._heard[0] in (FAILED, ERROR):
            raise self._heard[1]
        return self._heard[1]

    def __len__(self) -> int:
        """Batches that this worker sees in a pass."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        for batches in self._loader.steps():
            yield from self._stepping(batches)

    def _stepping(self, batches: list[Batch]) -> Iterator[Batch]:
        """The batches of one step, each while the engine waits for its loss."""
        self._leave()  # an iterator that somebody still holds
        self._real, self.is_last = len(batches), not batches
        try:
            self._tell(STEP, batches)
            for number in range(len(batches)):
                self._is_open, self.is_last = True, number == len(batches) - 1
                self._precision.enter_context(self.session.precision())
                yield self._heard[1]
                self._check_body()
            if not batches:  # the others need this worker for the last step
                self.optimizer.step()
        finally:
            self._leave()

    def _leave(self) -> None:
        """End a step that is not done: its gradients are dropped."""
        self._precision.close()
        if self._heard[0] in (BATCH, OUTPUT, FAILED, READY):
            self._to_engine.put((LEAVE, None))
            while self._heard[0] not in (DONE, ERROR):
                self._heard = self._to_script.get()
        self._is_open, self.is_last = False, True

    def _check_body(self) -> None:
        """Whether the script has done with its batch what a step needs."""
        if self._is_open:
            raise RapidformerError(
                "the loop took the next batch without engine.backward(loss)", hint="call it once for each batch"
            )
        if self._heard[0] == READY:
            sizes = self.session.plan.sizes
            raise RapidformerError(
                f"the loop took the next batch without optimizer.step(), after the {sizes.accumulation} micro batches "
                f"of --global-batch-size {sizes.global_batch}",
                hint="call optimizer.step() after every engine.backward(loss): it acts where a step is complete",
            )

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """The model's output: of the engine for a batch of the loop, else in a forward without gradients."""
        if not self._is_open:
            return self.session.forward(*arguments, **named)
        self._call = arguments, named, torch.is_grad_enabled()
        return self._tell(FORWARD, self._call)

    def backward(self, loss: torch.Tensor) -> None:
        """Hand the loss of the batch over."""
        if not self._is_open:
            raise RapidformerError(
                "engine.backward(loss) without a batch of the composed loader", hint="call it once for each batch"
            )
        self._is_open = False
        self._precision.close()
        self._tell(LOSS, loss)

    def update(self) -> None:
        """Let the engine make the update, if all micro batches of the step are done."""
        if not self.is_last:
            return  # more micro batches belong to this step
        if self._heard[0] != READY:
            raise RapidformerError("optimizer.step() without engine.backward(loss)", hint="call backward before it")
        self._tell(UPDATE, self.scheduler.share)

    def evaluating(self, loader: Any) -> OnDevice:
        """The batches of an evaluation."""
        return OnDevice(loader, self.session)


class OnDevice:
    """The batches of an evaluation, all of them on each worker; a loss of theirs has the precision of a run's."""

    def __init__(self, loader: Any, session: Session) -> None:
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
    """The script's model; its forward in a step is the engine's."""

    def __init__(self, loop: OwnLoop) -> None:
        self._loop = loop

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._loop.forward(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop.session.model, name)


class ComposedOptimizer:
    """The script's optimizer: ``step`` is the engine's update, which zeroes the gradients itself."""

    def __init__(self, loop: OwnLoop) -> None:
        self._loop = loop

    def step(self) -> None:
        """Make the update."""
        self._loop.update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the engine has done so."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._loop.session.param_groups

    def state_dict(self) -> NoReturn:
        """Raise: the state is divided over the workers."""
        raise ConfigError("the optimizer's state is divided over the workers", hint="engine.session.save(folder)")

    load_state_dict = state_dict


class ComposedScheduler:
    """The script's scheduler, over an optimizer of no meaning: what counts is its share of the peak rate."""

    def __init__(self, loop: OwnLoop, make: Callable[[Any], LRScheduler] | None, *, by_flags: bool) -> None:
        self._loop, self._by_flags = loop, by_flags
        self._scheduler = None if make is None else make(SGD([nn.Parameter(torch.zeros(1))], lr=1.0))

    @property
    def share(self) -> float:
        """Of the peak rate, after as many ``step`` as there were; of the flags' optimizer alone, by the flags."""
        if self._scheduler is not None:
            return float(self._scheduler.get_last_lr()[0])
        return self._loop.session.share if self._by_flags else 1.0

    def step(self) -> None:
        """The next step's rate; it counts once for the micro batches of a step."""
        if self._scheduler is not None and self._loop.is_last:
            self._scheduler.optimizer.step()
            self._scheduler.step()

    def get_last_lr(self) -> list[float]:
        """The rate of each group."""
        return [float(group["lr"]) for group in self._loop.session.param_groups]


def _answer(model: Any, call: Call) -> Any:
    """What the model puts out for a call that was made in another thread."""
    arguments, named, has_gradients = call
    with torch.set_grad_enabled(has_gradients):
        return model(*arguments, **named)
