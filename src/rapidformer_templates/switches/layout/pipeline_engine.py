"""Pipeline parallelism: micro batches run through the stages of the model, which are on different workers."""

from __future__ import annotations

import gc
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.engines.forwards import checkpointed_forward
from rapidformer_templates.engines.local import SingleEngine
from rapidformer_templates.engines.parallel.engine import ParallelEngine
from rapidformer_templates.engines.recipe import OptimizerSpec
from rapidformer_templates.engines.step import ComputeLoss, Step, seed_forward
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.switches.layout.pipeline import StageRunner
from rapidformer_templates.switches.layout.schedule import LEAVING, Action, Kind, with_transfers
from rapidformer_templates.system.phase_clock import BACKWARD, FORWARD
from rapidformer_templates.system.workers import Workers

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HEADER = 10  # numbers: type, dimensions, and up to eight lengths


class PendingRecv(NamedTuple):
    """A tensor that is being received or sent."""

    tensor: torch.Tensor
    work: dist.Work | None

    def unpack(self) -> torch.Tensor:
        """Wait for the transfer and return the tensor."""
        assert self.work is not None, "this worker is in the group"
        self.work.wait()
        return self.tensor


class Links:
    """Sends to and receives from the stages before and after each stage of this worker.

    Both ends of a link process the same micro batches. So they exchange the shape and type of a hidden state only if
    the shapes of a batch are new to the link.

    Each link has a process group for each direction. NCCL runs the transfers of a group one after the other, and in a
    group of all stages they would wait for transfers of other links (``tests/support/pipeline_time.py``).

    A tensor must be kept alive until it has arrived, and not every backend reports that. So a new transfer first waits
    for an earlier one in the same direction. By then, the neighbor has received that one, except for the first and last
    transfers of a step (``tests/…/test_stages.py`` simulates this).

    Args:
        workers: this process and its peers.
        parts: number of stages on each worker.
    """

    def __init__(self, workers: Workers, parts: int) -> None:
        self.workers = workers
        self.leaving = LEAVING * parts  # maximum number of pending transfers in each direction
        self._groups = _open_links(workers, is_ring=parts > 1)
        self._known: dict[tuple[int, Hashable], tuple[torch.dtype, tuple[int, ...]]] = {}
        self._on_their_way: dict[int, deque[PendingRecv]] = {1: deque(), -1: deque()}

    def _rank_of(self, stage: int) -> int:
        workers = self.workers
        pipeline_rank = stage % workers.pipeline
        return (pipeline_rank * workers.copies + workers.copy_rank) * workers.tensor + workers.tensor_rank

    def _send(self, tensor: torch.Tensor, stage: int, direction: int) -> None:
        before = self._on_their_way[direction]
        if len(before) == self.leaving:
            before.popleft().unpack()
        to, group = self._rank_of(stage + direction), self._group(min(stage, stage + direction), direction)
        before.append(PendingRecv(tensor, dist.isend(tensor, dst=to, group=group)))

    def _receive(self, tensor: torch.Tensor, stage: int, direction: int) -> PendingRecv:
        source = stage - direction
        group = self._group(min(stage, source), direction)
        return PendingRecv(tensor, dist.irecv(tensor, src=self._rank_of(source), group=group))

    def _group(self, stage: int, direction: int) -> dist.ProcessGroup:
        """Return the group of the transfers between a stage and the next one."""
        return self._groups[stage % self.workers.pipeline, direction]

    def send_forward(self, stage: int, key: Hashable, hidden: torch.Tensor) -> None:
        """Send the output of ``stage`` to the next stage.

        Args:
            stage: index in the whole model.
            key: the shapes of the micro batch.
            hidden: a tensor of any shape.

        Raises:
            RapidformerError: a batch of the same shapes had a hidden state of another shape before.
        """
        hidden = hidden.detach().contiguous()
        form = (hidden.dtype, tuple(hidden.shape))
        expected = self._known.setdefault((stage, key), form)
        if expected is form:
            lengths = [*hidden.shape, *[0] * (HEADER - 2 - hidden.ndim)]
            header = [DTYPES.index(hidden.dtype), hidden.ndim, *lengths]
            self._send(torch.tensor(header, device=hidden.device), stage, 1)
        elif expected != form:
            message = f"stage {stage} returned {form} for a batch that gave {expected} before"
            hint = "under a pipeline the hidden state's shape must follow from the batch's shapes"
            raise RapidformerError(message, hint=hint)
        self._send(hidden, stage, 1)

    def receive_forward(self, stage: int, key: Hashable) -> PendingRecv:
        """Receive the hidden state that ``stage`` needs as its input."""
        if (stage - 1, key) not in self._known:
            self._known[stage - 1, key] = self.receive_form(stage)
        return self._receive(self._empty(stage - 1, key), stage, 1)

    def receive_form(self, stage: int) -> tuple[torch.dtype, tuple[int, ...]]:
        """Receive the type and the shape of the hidden state that ``stage`` gets next."""
        header = torch.empty(HEADER, dtype=torch.int64, device=self.workers.device)
        kind, ndim, *lengths = self._receive(header, stage, 1).unpack().tolist()
        return DTYPES[kind], tuple(lengths[:ndim])

    def send_backward(self, stage: int, gradient: torch.Tensor) -> None:
        """Send the gradient of the input of ``stage`` to the previous stage."""
        self._send(gradient.contiguous(), stage, -1)

    def receive_backward(self, stage: int, key: Hashable) -> PendingRecv:
        """Receive the gradient of the output of ``stage`` for a batch of these shapes."""
        return self._receive(self._empty(stage, key), stage, -1)

    def _empty(self, stage: int, key: Hashable) -> torch.Tensor:
        """Allocate memory for the output of ``stage``, or for its gradient."""
        dtype, shape = self._known[stage, key]
        return torch.empty(shape, dtype=dtype, device=self.workers.device)

    def flush(self) -> None:
        """Wait until everything has been sent."""
        for before in self._on_their_way.values():
            while before:
                before.popleft().unpack()


def _open_links(workers: Workers, *, is_ring: bool) -> dict[tuple[int, int], dist.ProcessGroup]:
    """Open a group for each link and direction, and return those of this worker by (first worker of a link, direction).

    Args:
        is_ring: whether the last worker sends to the first one, too.
    """
    count, line = workers.pipeline, workers.copies * workers.tensor
    links = [(first, (first + 1) % count) for first in range(count if is_ring else count - 1)]
    odd_ring = [links.pop()] if is_ring and count % 2 else []
    groups = {}
    for direction in (1, -1):
        for apart in filter(None, (links[::2], links[1::2], odd_ring)):  # without common workers
            ranks = [[first * line + i, second * line + i] for first, second in apart for i in range(line)]
            group = workers.open_groups(ranks)
            own = (first for first, second in apart if workers.pipeline_rank in (first, second))
            if group is not None:
                groups[next(own), direction] = group
    return groups


class RunsStages(SingleEngine):
    """Each worker runs its stages of every micro batch, in 1F1B or interleaved 1F1B order.

    The loader gives every stage the whole micro batch, and every stage runs the user's loss function. On all stages
    except the last, it ends after the stage's last block. So the workers exchange only hidden states and their
    gradients. The class is the first base of an engine, whose other base has the states of a stage.

    Attributes:
        is_last: whether the gradients of a part are complete after its next backward.
    """

    is_last = False

    def _build(self, model: nn.Module, recipe: OptimizerSpec) -> None:
        gc.collect()  # modules of other stages are in reference cycles with their hooks
        super()._build(model, recipe)
        parts, workers = self.assembly.placement.parts, self.workers
        assert parts is not None, "the pipeline switch cuts the model"
        self.parts = len(parts)
        self.stage_runner = StageRunner(self.assembly, begins=workers.pipeline_rank == 0, ends=workers.ends_pipeline)
        self.links = Links(workers, self.parts)
        # Without recomputation of every block, the graphs of a step keep autocast's copies of weights.
        self.keeps_casts = any(checkpointed_forward(block) is None for block in self.assembly.blocks.values())

    def step(self, microbatches: Sequence[MicroBatch], targets: float) -> Step:
        return PipelineStep(self, microbatches, targets)

    def _backward(self, loss: torch.Tensor) -> None:
        self.backward_of_part(self.parts - 1, loss)

    def backward_of_part(
        self, part: int, output: torch.Tensor | GradientEdge | None, gradient: torch.Tensor | None = None
    ) -> None:
        """Run the backward of a local part, from the loss or from the gradient that the next stage sent.

        Args:
            output: None if everything before it is frozen.
        """
        raise NotImplementedError

    @property
    def last_stage(self) -> int:
        """Index of the last stage of the whole model."""
        return self.workers.pipeline * self.parts - 1

    @torch.no_grad()
    def eval_batch(self, microbatch: MicroBatch, compute_loss: ComputeLoss | None = None) -> tuple[torch.Tensor, Any]:
        """Evaluate a micro batch. Only the workers of the last stage return a result."""
        key = _shapes(microbatch.batch)
        evaluated: tuple[torch.Tensor, Any] = (torch.zeros(()), None)
        evaluate = partial(super().eval_batch, microbatch, compute_loss)
        for part in range(self.parts):
            stage = part * self.workers.pipeline + self.workers.pipeline_rank
            hidden = self.links.receive_forward(stage, key).unpack() if stage else None
            output = self.stage_runner.run(part, hidden, evaluate)
            if isinstance(output, torch.Tensor):
                self.links.send_forward(stage, key, output)
            else:
                evaluated = output
        return evaluated

    @contextmanager
    def measuring(self) -> Iterator[nn.Module]:
        """Prepare a forward through all blocks of this worker, with zeros in place of another stage's output."""
        with super().measuring() as model, self.stage_runner.measure():
            yield model


class PipelineEngine(RunsStages, ParallelEngine):
    """A pipeline whose replicas share updates as in the other 3D layouts."""

    def backward_of_part(
        self, part: int, output: torch.Tensor | GradientEdge | None, gradient: torch.Tensor | None = None
    ) -> None:
        self._sharded_gradients.begin_backward(part, last=self.is_last)
        if output is not None:
            torch.autograd.backward(output, gradient)
        self._sharded_gradients.end_backward()


@dataclass(init=False)
class _Passage:
    """A micro batch in one stage, from its arrival to the end of its backward. A field exists while it is needed."""

    incoming: PendingRecv  # the hidden state, and later the gradient of the output
    hidden: torch.Tensor  # the input of the stage
    output: torch.Tensor  # until it is sent, or the loss
    graph: GradientEdge | None
    gradient: torch.Tensor  # of the input, until it is sent
    recorded: object  # by the model's own losses


class PipelineStep(Step):
    """Runs the micro batches of one optimizer step through the local parts, in the order of the schedule."""

    def __init__(self, engine: RunsStages, microbatches: Sequence[MicroBatch], targets: float) -> None:
        super().__init__(engine, microbatches, targets)
        self.engine, self.links = engine, engine.links
        self._keys = [_shapes(microbatch.batch) for microbatch in microbatches]
        self._passages: defaultdict[tuple[int, int], _Passage] = defaultdict(_Passage)  # by stage and micro batch

    def accumulate(self) -> None:
        engine = self.engine
        cache: AbstractContextManager[object] = nullcontext()
        if engine.compute_type is not None and engine.keeps_casts:
            # Share autocast's copies of the weights between all micro batches. It drops them when its outermost context
            # ends, and each graph would keep separate ones. This context itself casts nothing.
            cache = torch.autocast(engine.workers.device.type, enabled=False)
        with cache:
            schedules = with_transfers(engine.workers.pipeline, engine.parts, len(self.microbatches))
            for action in schedules[engine.workers.pipeline_rank]:
                self.do(action)
        self.links.flush()
        self._complete_gradients()

    def do(self, action: Action) -> None:
        kind, stage, number = action
        passage, key = self._passages[stage, number], self._keys[number]
        if kind is Kind.FORWARD:
            self._forward_of_stage(stage, number, passage)
        elif kind is Kind.BACKWARD:
            self._backward_of_stage(stage, number, passage)
        elif kind is Kind.RECEIVE_FORWARD:
            passage.incoming = self.links.receive_forward(stage, key)
        elif kind is Kind.SEND_FORWARD:
            self.links.send_forward(stage, key, passage.output)
            del passage.output
        elif kind is Kind.RECEIVE_BACKWARD:
            passage.incoming = self.links.receive_backward(stage, key)
        else:
            self.links.send_backward(stage, passage.gradient)
            del self._passages[stage, number]

    def _forward_of_stage(self, stage: int, number: int, passage: _Passage) -> None:
        engine, microbatch = self.engine, self.microbatches[number]
        engine.workers.clock.enter(FORWARD)
        hidden = None
        if stage:
            hidden = passage.hidden = passage.incoming.unpack().requires_grad_()
            del passage.incoming

        def body() -> torch.Tensor:
            if stage == engine.last_stage:
                return self._end_forward(engine.compute_loss(*self._begin_forward(microbatch, stage)))
            seed_forward(microbatch, stage)
            with engine.forward(microbatch) as (_, batch):
                return engine.compute_loss(engine.model, batch)

        passage.output = engine.stage_runner.run(stage // engine.workers.pipeline, hidden, body)
        if engine.assembly.losses:
            passage.recorded = engine.assembly.losses.recorded()
        if stage != engine.last_stage:
            # The backward needs only the graph. The next stage has the values, unless the graph itself saves them.
            passage.graph = get_gradient_edge(passage.output) if passage.output.requires_grad else None

    def _backward_of_stage(self, stage: int, number: int, passage: _Passage) -> None:
        engine, part = self.engine, stage // self.engine.workers.pipeline
        engine.is_last = number == len(self.microbatches) - 1
        engine.workers.clock.enter(BACKWARD)
        losses = engine.assembly.losses  # auxiliary ones of the model. On the last stage, they follow the loss itself
        if losses:
            losses.recall(passage.recorded)
        if stage == engine.last_stage:
            self._begin_backward(passage.output, self.microbatches[number])
        else:
            if losses:
                scale = torch.as_tensor(engine.gradient_scale, device=engine.workers.device)
                losses.follow_without_loss(self.microbatches[number], scale * engine.gradient_divisor)
            engine.backward_of_part(part, passage.graph, passage.incoming.unpack())
        del self._passages[stage, number]
        if stage:
            gradient = passage.hidden.grad
            self._passages[stage, number].gradient = torch.zeros_like(passage.hidden) if gradient is None else gradient
        engine.micro_steps += part == 0


def _shapes(batch: object) -> Hashable:
    """Return the shapes of a batch's tensors. They determine the shapes of its hidden states."""
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))
