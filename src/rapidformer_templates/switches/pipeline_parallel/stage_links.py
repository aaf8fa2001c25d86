"""Transfers of hidden states and their gradients between neighboring stages of a pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

import torch
import torch.distributed as dist

from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.switches.pipeline_parallel.schedule import LEAVING
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

    A tensor must be kept alive until it has arrived, and not every backend reports that. So a new transfer first waits
    for an earlier one in the same direction. By then, the neighbor has received that one, except for the first and last
    transfers of a step (``tests/…/test_stages.py`` simulates this).

    Args:
        workers: this process and its peers.
        leaving: maximum number of pending transfers in each direction.
    """

    def __init__(self, workers: Workers, leaving: int = LEAVING) -> None:
        assert workers.mesh is not None
        self.workers = workers
        self.leaving = leaving
        self.group = workers.mesh.get_group("pipeline")
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
        to = self._rank_of(stage + direction)
        before.append(PendingRecv(tensor, dist.isend(tensor, dst=to, group=self.group)))

    def _receive(self, tensor: torch.Tensor, stage: int) -> PendingRecv:
        return PendingRecv(tensor, dist.irecv(tensor, src=self._rank_of(stage), group=self.group))

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
            raise RapidformerError(
                f"stage {stage} returned {form} for a batch that gave {expected} before",
                hint="under a pipeline the hidden state's shape must follow from the batch's shapes",
            )
        self._send(hidden, stage, 1)

    def receive_forward(self, stage: int, key: Hashable) -> PendingRecv:
        """Receive the hidden state that ``stage`` needs as its input."""
        if (stage - 1, key) not in self._known:
            header = torch.empty(HEADER, dtype=torch.int64, device=self.workers.device)
            kind, ndim, *lengths = self._receive(header, stage - 1).unpack().tolist()
            self._known[stage - 1, key] = (DTYPES[kind], tuple(lengths[:ndim]))
        return self._receive(self._empty(stage - 1, key), stage - 1)

    def send_backward(self, stage: int, gradient: torch.Tensor) -> None:
        """Send the gradient of the input of ``stage`` to the previous stage."""
        self._send(gradient.contiguous(), stage, -1)

    def receive_backward(self, stage: int, key: Hashable) -> PendingRecv:
        """Receive the gradient of the output of ``stage`` for a batch of these shapes."""
        return self._receive(self._empty(stage, key), stage + 1)

    def _empty(self, stage: int, key: Hashable) -> torch.Tensor:
        """Allocate memory for the output of ``stage``, or for its gradient."""
        dtype, shape = self._known[stage, key]
        return torch.empty(shape, dtype=dtype, device=self.workers.device)

    def flush(self) -> None:
        """Wait until everything has been sent."""
        for before in self._on_their_way.values():
            while before:
                before.popleft().unpack()
