"""The interface between the training loop and an engine, and the receipts of switches. The unit is one optimizer step.

A receipt has measurements with which a switch shows that it acted. The ``receipt_hooks`` of a switch name a class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import nn

from rapidformer_templates.data.loader import MicroBatch, to_device
from rapidformer_templates.data.types import Batch
from rapidformer_templates.engines.assembly import Assembly
from rapidformer_templates.engines.construction import ModelUnderConstruction
from rapidformer_templates.engines.recipe import OptimizerSpec
from rapidformer_templates.engines.shards import Shard, ShardKind, StateReader, local_part
from rapidformer_templates.models.blocks import bytes_of, canonical_name, shape_of
from rapidformer_templates.system.workers import Workers

if TYPE_CHECKING:
    from rapidformer_templates.engines.step import Step

ComputeLoss = Callable[[Any, Batch], Any]
"""The user's hook. It returns the mean loss of the batch, (sum of losses, number of targets) or (mean, output)."""


@dataclass
class StepResult:
    """The result of an optimizer step, the same on every rank.

    Attributes:
        loss: mean over the targets of the global batch, a scalar tensor.
        grad_norm: global norm of the gradient of that loss, before clipping.
        skipped: whether the update was skipped because the scaled gradient overflowed (fp16).
        measured: further values for the metrics, such as the model's auxiliary losses.

    On a GPU these values are computed asynchronously. Reading one waits for the device.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    skipped: bool | torch.Tensor = False
    measured: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Engine(Protocol):
    """Trains a model. The engine owns synchronization, precision, loss scale, clipping, the update and zeroing.

    Attributes:
        assembly: the model with the facts about it.
        model: the model as built, with its parameters as the engine has changed them.
        optimizer: the optimizer of those parameters.
        compute_loss: the user's hook.
        workers: this process and its peers.
        micro_steps: number of backward passes so far.
        update_rule: the optimizer class that computes the updates, regardless of where its state is stored.
        receipts: measurements that the engine itself has taken.
        before_update: functions that are called between the last backward and the update, while the gradients exist.
    """

    assembly: Assembly
    model: nn.Module
    optimizer: torch.optim.Optimizer
    compute_loss: ComputeLoss
    workers: Workers
    micro_steps: int
    update_rule: type[torch.optim.Optimizer]
    receipts: Mapping[str, object]
    before_update: list[Callable[[], None]]

    def construction(self) -> AbstractContextManager[ModelUnderConstruction | None]:
        """Return the context from before ``build_model`` runs until the model is set up, or frozen.

        An engine that divides parameters keeps a worker's memory at its share of the model and its largest module.
        """

    def setup(self, assembly: Assembly, optimizer: OptimizerSpec, compute_loss: ComputeLoss) -> None:
        """Wrap or shard the model and build the optimizer."""

    def step(self, microbatches: Sequence[MicroBatch], targets: float) -> Step:
        """Begin an optimizer step. ``step(…).run(lr_factor)`` makes it.

        Args:
            microbatches: the micro batches of this rank.
            targets: number of targets in the global batch, over all ranks and micro batches.

        Raises:
            NonFiniteLoss: an earlier step, which the host only reads now, was not finite. The weights are as before
                that step.
        """

    def raise_pending_errors(self) -> None:
        """Check all steps so far, before their results are written or saved. Raises like :meth:`step`."""

    def eval_batch(self, microbatch: MicroBatch, compute_loss: ComputeLoss | None = None) -> tuple[torch.Tensor, Any]:
        """Compute (sum of the losses over the targets, model output) without gradients.

        The sum stays on the device, so that the host need not wait.

        Args:
            compute_loss: replaces the user's hook.
        """

    def frozen(self, model: nn.Module) -> nn.Module:
        """Prepare a second model that is never trained. It is sharded like the trained model."""

    def precision(self) -> AbstractContextManager[object]:
        """Return the context for calls of ``compute_loss``: autocast if the engine computes in 16 bits."""

    def measuring(self) -> AbstractContextManager[nn.Module]:
        """Yield the model for a forward without side effects: random state, buffers and gradients are preserved."""

    def local_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors on this rank: ``parameters``, ``gradients``, ``optimizer`` state and send ``buckets``."""

    def keep_average(self, decay: float) -> None:
        """Keep an exponential moving average of the weights. Call this after :meth:`setup`."""

    def averaged(self) -> AbstractContextManager[None]:
        """Use the averaged weights, if they are kept, inside the context. Every rank must enter it."""

    def end_forwards(self) -> None:
        """Free what forwards without a backward have gathered. Hooks get the parameters that are trained again."""

    def shards(self, kind: ShardKind) -> Iterator[Shard]:
        """Yield this worker's part of all ``weights``, of the ``optimizer`` state or of the ``gradients``.

        A shard of weights or optimizer state may be valid only until the next one is taken. Gradients exist between the
        last backward of a step and its update. They are multiplied by :attr:`gradient_scale`.
        """

    @property
    def gradient_scale(self) -> float | torch.Tensor:
        """The loss scale of fp16, which the gradients contain until the update. 1 in other types."""

    def load(self, reader: StateReader, *, optimizer: bool) -> None:
        """Load the weights and, if requested, the optimizer state from a checkpoint.

        Raises:
            CheckpointError: names, shapes or the kind of optimizer differ. Nothing has been changed.
        """

    def state(self) -> dict[str, Any]:
        """Return the remaining state for a checkpoint as plain values for JSON."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state` returned."""

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole weight) on the host of rank 0 for the export, one at a time. Other ranks yield nothing.

        Every rank must iterate to the end. A tensor is valid until the next one is taken, and must not be changed.
        """


T = TypeVar("T")


@dataclass(frozen=True)
class Probe:
    """A run before its first step.

    Attributes:
        engine: the engine that trains.
        microbatch: the first micro batch of this worker.
    """

    engine: Engine
    microbatch: MicroBatch

    def forward(self) -> None:
        """Compute the loss of the micro batch, in a forward without side effects."""
        batch = to_device(self.microbatch.batch, self.engine.workers.device)
        with self.engine.measuring() as model:
            self.engine.compute_loss(model, batch)


class Receipt:
    """Measurements of one switch. Each method does nothing by default.

    Values are plain and have the names in the switch's ``receipt``. A worker without a value omits it or returns None.
    The switch's ``acted`` checks them, and ``summary.json`` shows them.

    Attributes:
        compiles: whether modules are compiled to graphs, which would include hooks on them.
    """

    compiles = False

    def before_step(self, probe: Probe) -> Mapping[str, object]:
        """Measure forwards before the first step. Workers that share a model's weights must run the same ones."""
        return {}

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Context for the first step."""
        yield

    def after_step(self, engine: Engine) -> Mapping[str, object]:
        """Measure the engine after the first step, and again at the end of the run."""
        return {}

    def hides_parts(self, module: nn.Module) -> bool:
        """Whether a module runs as a graph, so that its submodules are not called."""
        return False


def storage_elements(tensors: Sequence[torch.Tensor]) -> int:
    """Count the elements in the storages of these tensors on this rank. A shared storage counts once."""
    storages = {part.untyped_storage().data_ptr(): part for part in map(local_part, tensors)}
    return sum(part.untyped_storage().nbytes() // part.element_size() for part in storages.values())


def bytes_by_kind(tensors_by_kind: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, int]:
    """Return bytes of the storages on this rank, by kind. A shared storage counts once, for its first kind."""
    storages: set[int] = set()
    sizes = dict.fromkeys(tensors_by_kind, 0)
    for kind, tensors in tensors_by_kind.items():
        for tensor in tensors:
            storage = local_part(tensor).untyped_storage()
            if storage.nbytes() and storage._cdata not in storages:
                storages.add(storage._cdata)
                sizes[kind] += storage.nbytes()
    return sizes


WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by bytes per element."""


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a checksum of the local values that changes if the last bit of any element changes.

    The bits are summed in place, read as integers. A copy would double the memory.
    """
    local = local_part(tensor).detach()
    return local.view(WHOLE_NUMBERS[local.element_size()]).sum(dtype=torch.int64)


class TrainedAndFrozen(Receipt):
    """Elements and bytes of the trained and of the frozen parameters, in full size and over all pipeline stages."""

    def after_step(self, engine: Engine) -> dict[str, int]:
        whole_name = engine.assembly.placement.whole_name
        local = {
            whole_name(canonical_name(name)): (p.requires_grad, math.prod(shape_of(p)), bytes_of(p))
            for name, p in engine.model.named_parameters()
        }
        parameters = merge_by_name(engine, local).values()
        return {
            "trained_parameters": sum(count for trained, count, _ in parameters if trained),
            "trained_bytes": sum(size for trained, _, size in parameters if trained),
            "frozen_parameters": sum(count for trained, count, _ in parameters if not trained),
            "frozen_bytes": sum(size for trained, _, size in parameters if not trained),
        }


def merge_by_name(engine: Engine, local: dict[str, T]) -> dict[str, T]:
    """Merge the reports of all workers, by name in the whole model. The first worker that has a part counts."""
    merged: dict[str, T] = {}
    for of_worker in reversed(engine.workers.gather(local)):
        merged |= of_worker
    return merged
