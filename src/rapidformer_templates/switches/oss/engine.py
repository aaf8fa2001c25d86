"""OSS and OSS + SDP: fairscale's sharded optimizer, and its reduction of gradients to their owners.

Each parameter has one owner, which stores its optimizer state, updates it and sends it to the other workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim import OSS
from torch import nn
from torch.autograd import Variable

from rapidformer_templates.engines.backwards import GradientSequence
from rapidformer_templates.engines.local import DDPEngine, Named, SingleEngine
from rapidformer_templates.engines.recipe import OptimizerSpec
from rapidformer_templates.engines.shards import NO_COPIES, Copies, Shard, ShardKind
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.system.workers import Workers, broadcast


class _ShardedState(SingleEngine):
    """Optimizer state sharded by whole parameters.

    ``optimizer`` is the inner optimizer of OSS. It has the parameters that this rank owns, and their state. A single
    worker has nothing to shard and gets the plain engine.
    """

    _oss: OSS

    def __new__(cls, plan: Plan, workers: Workers, *, clip_grad: float) -> SingleEngine:  # type: ignore[misc]
        return object.__new__(cls) if workers.world > 1 else SingleEngine(plan, workers, clip_grad=clip_grad)

    def _build_optimizer(
        self, recipe: OptimizerSpec, trainable: Named, differing: Mapping[str, Mapping[str, object]]
    ) -> torch.optim.Optimizer:
        types = sorted({str(parameter.dtype).removeprefix("torch.") for _, parameter in trainable})
        if len(types) > 1:
            message = f"OSS needs parameters of one type, this model has {' and '.join(types)}"
            hint = "convert the model to one type, or shard it with --fsdp-memory-optimization"
            raise RapidformerError(message, where="build_model()", hint=hint)
        self._oss = replace(recipe, cls=partial(OSS, optim=recipe.cls)).build(trainable, differing)
        return self._oss.optim

    def _update(self) -> None:
        # At the start of a step, OSS copies the options of its groups to the inner groups.
        for oss_group, group in zip(self._oss.param_groups, self.optimizer.param_groups, strict=True):
            oss_group.update({name: value for name, value in group.items() if name != "params"})
        self._oss.step()

    def _weights_were_set(self) -> None:
        for owner, groups in enumerate(self._oss.partition_parameters()):
            for parameter in (p for group in groups for p in group["params"]):
                broadcast(parameter.data, source=owner)

    def shards(self, kind: ShardKind) -> Iterator[Shard]:
        for shard in super().shards(kind):
            yield replace(shard, copies=NO_COPIES) if kind == "optimizer" else shard


class OSSEngine(_ShardedState, DDPEngine):
    """DDP with the optimizer state sharded over the workers."""


class SDPEngine(_ShardedState):
    """Shards optimizer state and gradients over the workers. Each gradient is summed on its owner."""

    _divides_gradients = True

    def _distribute(self) -> nn.Module:
        self._sdp = SequencedSDP(self.model, self._oss)
        return self._sdp

    def _gradient_copies(self, shard: Shard) -> Copies:
        return NO_COPIES

    def accumulation(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self._sdp.no_sync()

    def _unused_here(self) -> Sequence[int]:
        return [position for position, p in enumerate(self._parameters) if id(p) in self._sdp.unreached]


class SequencedSDP(ShardedDataParallel):
    """fairscale's ShardedDataParallel with the same order of reductions on all workers.

    fairscale reduces each gradient as soon as this worker's backward has computed it. Workers with different graphs (an
    idle micro batch, a skipped layer) would sum gradients of different parameters, or wait for one another forever.
    Here, a gradient waits for those before it. At the end of the backward, gradients that this worker's loss did not
    reach are filled with zeros.

    Small gradients are not gathered in fairscale's buckets, because those stay whole on every worker.

    Attributes:
        unreached: ids of the parameters that had no gradient in this step on this worker.
    """

    _bucket_flush_callback_set: bool  # whether a callback for the end of this backward is already queued

    def __init__(self, module: nn.Module, optimizer: OSS) -> None:
        super().__init__(module, optimizer, reduce_buffer_size=0)
        self.unreached: set[int] = set()
        self._reducers: dict[int, Callable[..., None]] = {}
        self._sequence = GradientSequence(0, self._reduce)
        self.refresh_trainable()

    def _setup_backward_hooks(self) -> None:
        indices = {parameter: index for index, parameter in enumerate(self._trainable_params)}
        self._indices = [indices[p] for p in self.module.parameters() if p in indices]
        self._positions = {index: position for position, index in enumerate(self._indices)}
        self._sequence = GradientSequence(len(self._indices), self._reduce)
        super()._setup_backward_hooks()

    def _clear_counters(self) -> None:
        super()._clear_counters()
        self.unreached = set()
        self._sequence.begin()

    def _get_reduce_fn(self, index: int, param: torch.Tensor, dst_rank: int) -> Callable[..., None]:
        self._reducers[index] = super()._get_reduce_fn(index, param, dst_rank)

        def ready(*_: object) -> None:
            if self._should_accumulate_grads:
                return
            if not self._bucket_flush_callback_set:
                self._bucket_flush_callback_set = True
                Variable._execution_engine.queue_callback(self._flush_reduce_calls)
            self._sequence.add(self._positions[index])

        return ready

    def _reduce(self, position: int) -> None:
        parameter = self._trainable_params[self._indices[position]]
        if parameter.grad is None:
            self.unreached.add(id(parameter))
            parameter.grad = torch.zeros_like(parameter)
        self._reducers[self._indices[position]]()

    def _flush_reduce_calls(self) -> None:
        """Finish the sequence at the end of the backward, when no more gradients become ready."""
        self._sequence.finish()
        super()._flush_reduce_calls()
