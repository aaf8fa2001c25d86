"""Expert parallelism: each worker holds a share of the experts, and tokens travel to them and back.

An expert sees the tokens of all workers of its group, so its gradient is complete there, and is summed over the
groups, if there are several. (Lepikhin et al., 2020.) What is not an expert is copied and averaged over the workers as
under DDP, or as the engine of 3D layouts has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rapidformer_templates.engines.local import DDPEngine
from rapidformer_templates.engines.model_building import Building
from rapidformer_templates.engines.parallel.copies import COPIES, NONE, copies_of
from rapidformer_templates.engines.pieces import local_part
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.adapters import base_of
from rapidformer_templates.switches.mixture_of_experts.convert import sparse_layers
from rapidformer_templates.switches.mixture_of_experts.experts import SHARE, Experts
from rapidformer_templates.switches.mixture_of_experts.layer import group_by_expert, ungroup
from rapidformer_templates.switches.mixture_of_experts.transformers_mixtures import own_experts


def divide_experts(model: nn.Module, building: Building) -> nn.Module:
    """Leave each worker its share of the experts of every sparse layer."""
    workers, over = building.workers, int(building.plan.engine_options["experts_over"])
    if over == 1:
        return model
    stacks = [*(base_of(layer.experts) for _, layer in sparse_layers(model)), *own_experts(model)]
    _check(stacks, over)
    shape = (workers.pipeline, workers.copies // over, over, workers.tensor)
    mesh = init_device_mesh(workers.device.type, shape, mesh_dim_names=("pipeline", COPIES, "experts", "tensor"))
    # Their own: the gradients of the rest travel at the same time.
    group, _ = dist.new_subgroups_by_enumeration(mesh.mesh.movedim(2, -1).reshape(-1, over).tolist())
    for stack in stacks:
        setattr(stack, SHARE, dist.get_rank(group))
        for name, parameter in list(stack.named_parameters()):
            stack.register_parameter(name, _share(parameter, mesh[COPIES, "experts", "tensor"]))
    for _, layer in sparse_layers(model):
        layer.set_submodule("experts", DividedExperts(layer.experts, TokenDispatcher(group)))
    for experts in own_experts(model):
        experts.token_dispatcher = TokenDispatcher(group)
    return model


def _check(stacks: Sequence[nn.Module], over: int) -> None:
    counts = {len(parameter) for stack in stacks for parameter in stack.parameters()}
    uneven = [count for count in counts if count % over]
    if uneven:
        raise ModelError(
            f"{uneven[0]} experts cannot be shared out evenly over {over} workers",
            where="--expert-model-parallel-size",
            hint="choose a size that divides the number of experts",
        )


def _share(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """What this worker has of a stack of experts; of several copies the first one's values count."""
    features = parameter.placements if isinstance(parameter, DTensor) else (Replicate(),)  # by tensor parallelism
    here = local_part(parameter).detach().chunk(mesh["experts"].size())
    values = here[mesh.get_local_rank("experts")].clone()
    dist.broadcast(values, group=mesh.get_group(COPIES), group_src=0)  # however they were drawn
    share = DTensor.from_local(
        values,
        mesh,
        [Replicate(), Shard(0), *features],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(share, requires_grad=parameter.requires_grad)


Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class DividedExperts(nn.Module):
    """The experts of a layer, some here and the others on other workers."""

    def __init__(self, experts: Experts, dispatcher: TokenDispatcher) -> None:
        super().__init__()
        self.module = experts  # a name that canonical names leave out
        self._dispatcher = dispatcher

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor, *, all_taken: bool = True) -> torch.Tensor:
        """As :meth:`Experts.forward`, for tokens of this worker and the experts of all."""
        return self._dispatcher.run(tokens, counts, self.module, all_taken=all_taken)


class TokenDispatcher:
    """The way of tokens to the workers that have their experts, and back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @torch.compiler.disable(reason="how many tokens travel is known only from the data")
    def run(self, tokens: torch.Tensor, counts: torch.Tensor, experts: Compute, *, all_taken: bool) -> torch.Tensor:
        """What the experts of all workers make of this worker's tokens, which stand by expert.

        Args:
            counts: [N], tokens of each expert.
            experts: those of this worker: from tokens, by expert, and their counts to outputs.
            all_taken: False if behind the last expert's tokens there may be some that none takes.
        """
        world = dist.get_world_size(self._group)
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=self._group)
        coming = coming.view(world, -1)  # by the worker that sends, and by expert
        sent, received = counts.view(world, -1).sum(1).tolist(), coming.sum(1).tolist()
        taken = sum(sent)
        arrived: torch.Tensor = Exchange.apply(tokens[:taken], sent, received, self._group)

        # By sender they have come, by expert they are computed.
        here = coming.shape[1]
        visited = torch.arange(here, device=tokens.device).repeat(world).repeat_interleave(coming.flatten())
        grouped = group_by_expert(arrived, visited.unsqueeze(1), None, here)
        outputs = experts(grouped.tokens, grouped.counts)
        outputs = ungroup(outputs, grouped, torch.ones_like(visited, dtype=outputs.dtype).unsqueeze(1))

        back: torch.Tensor = Exchange.apply(outputs, received, sent, self._group)
        return back if all_taken else torch.cat([back, back.new_zeros(len(tokens) - taken, back.shape[1])])


class Exchange(torch.autograd.Function):
    """Sends each worker its rows and takes those that the others send; the backward goes the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes = sent, received
        ctx.group = group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sent, received = ctx.sizes
        return _exchange(gradients[0], received, sent, ctx.group), None, None, None


def _exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    result = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result


class ExpertParallelEngine(DDPEngine):
    """DDP for all but the experts, of which each worker has its own."""

    def _distribute(self) -> nn.Module:
        self._divided = [p for p in self._parameters if isinstance(p, DTensor)]
        self._copied = [p for p in self._parameters if not isinstance(p, DTensor)]
        named = [(name, p) for name, p in self.model.named_parameters() if isinstance(p, DTensor)]
        self._sharers = copies_of(named[0][1], self.workers) if named else NONE  # a worker alone has nothing divided
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, [name for name, _ in named])
        return super()._distribute()

    def _reduce(self) -> None:
        if self._sharers.size > 1:
            self._sum_over_copies()
        for parameter in self._divided:
            if parameter.grad is not None:
                # The losses are weighted for an average over the workers; these gradients are sums.
                local_part(parameter.grad).div_(self.workers.world)

    def _sum_over_copies(self) -> None:
        there = torch.tensor([float(p.grad is not None) for p in self._divided], device=self.workers.device)
        dist.all_reduce(there, group=self._sharers.group)
        for parameter, reached in zip(self._divided, there.tolist(), strict=True):
            if reached:
                if parameter.grad is None:  # a loss has reached it in another copy
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(local_part(parameter.grad), group=self._sharers.group)

    def _grad_norm(self) -> torch.Tensor:
        divided = [local_part(p.grad) for p in self._divided if p.grad is not None]
        copied = [p.grad for p in self._copied if p.grad is not None]
        own = get_total_norm(divided).to(self.workers.device, torch.float64)
        others = self.workers.sum_tensor(own.square()) / self._sharers.size
        norm = get_total_norm(copied)
        norm = (norm.double().square() + others).sqrt().to(norm.dtype)
        return norm if self.loss_scale is None else norm / self.loss_scale.scale

    def _clip(self, norm: torch.Tensor) -> None:
        for parameters in (self._copied, self._divided):
            clip_grads_with_norm_(parameters, self.clip_grad, norm)
