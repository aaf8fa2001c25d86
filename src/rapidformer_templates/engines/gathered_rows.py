"""Gathers rows of all replicas inside a loss that compares samples with each other, such as a contrastive one."""

from __future__ import annotations

from typing import Any

import torch

from rapidformer_templates.engines.current_batch import note_gathered
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.system import workers as collectives
from rapidformer_templates.system.workers import Workers


def gather_rows(rows: torch.Tensor, workers: Workers) -> torch.Tensor:
    """Return the rows of the current micro batch of each replica, those of this worker first.

    The step adds the losses of all replicas. So the gradient of a row is the sum of its gradients on all of them, which
    the backward brings back to the replica that the row comes from. The rows of an idle micro batch are left out.

    Args:
        rows: (any number of rows, …). All other dimensions are the same on all workers.

    Raises:
        RapidformerError: workers share each sequence. Each would then count the rows of its peers.
    """
    if workers.copies == 1:
        return rows
    if workers.context > 1:
        what = "rows of workers that share each sequence cannot be gathered"
        hint = "leave out --context-parallel-size, or compare the samples of one worker only"
        raise RapidformerError(what, where="gather()", hint=hint)
    group, size, own = workers.copies_group, workers.copies, workers.copy_rank
    numbers = torch.zeros(size, dtype=torch.int64)  # of rows of each replica, on the host. Negative if it is idle
    collectives.all_gather(numbers, torch.tensor([len(rows) if note_gathered() else -len(rows)]), group=group)
    step = int(numbers.abs().max())
    padded = torch.cat([rows, rows.new_zeros(step - len(rows), *rows.shape[1:])])
    whole: torch.Tensor = _Gather.apply(padded, workers)
    # An empty part, too, belongs to the graph: the backward of every worker must take part in the exchange.
    others = [whole[rank * step :][: max(int(numbers[rank]), 0)] for rank in range(size) if rank != own]
    return torch.cat([rows, *others])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, workers: Workers) -> torch.Tensor:
        ctx.workers = workers
        whole = rows.new_empty(workers.copies * len(rows), *rows.shape[1:])
        collectives.all_gather(whole, rows.contiguous(), group=workers.copies_group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        kind = gradient.dtype
        if gradient.is_cpu and kind in (torch.float16, torch.bfloat16):
            gradient = gradient.float()  # gloo reduce-scatters 32 and 64 bits only
        share = gradient.new_empty(len(gradient) // ctx.workers.copies, *gradient.shape[1:])
        collectives.reduce_scatter(share, gradient.contiguous(), group=ctx.workers.copies_group)
        return share.to(kind), None
