"""Expert parallelism: each worker has a share of the experts, and tokens are sent to them and back.

An expert processes the tokens of all workers in its group, so its gradient is complete in this group. If there are
several groups, the gradient is summed over them (Lepikhin et al., 2020). Everything else is copied and averaged over
the workers as under DDP, or as the engine of 3D layouts does it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.engines.forwards import differentiable
from rapidformer_templates.engines.local import DDPEngine
from rapidformer_templates.engines.shards import COPIES, NO_COPIES, as_dtensor, copies_of, local_part
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.adapters import base_of
from rapidformer_templates.switches.mixture_of_experts import layer as mixture
from rapidformer_templates.switches.mixture_of_experts.transform import sparse_layers
from rapidformer_templates.system.workers import broadcast

_numbers = itertools.count()


def divide_experts(assembly: Assembly, building: Building[object]) -> None:
    """Keep this worker's share of the experts in every sparse layer."""
    model, workers, over = assembly.model, building.workers, building.plan.engine_options.experts_over
    if over == 1:
        return
    assembly.limit_derivatives(1, "--expert-parallel")  # the exchange of tokens is differentiated once
    native = mixture.own_experts(model)
    stacks = [*(base_of(layer.experts) for _, layer in sparse_layers(model)), *native]
    counts = {len(parameter) for stack in stacks for parameter in stack.parameters()}
    if uneven := [count for count in counts if count % over]:
        message = f"{uneven[0]} experts cannot be divided evenly over {over} workers"
        hint = "choose a size that divides the number of experts"
        raise ModelError(message, where="--expert-model-parallel-size", hint=hint)
    shape = (workers.pipeline, workers.copies // over, over, workers.tensor)
    mesh = workers.open_mesh(shape, ("pipeline", COPIES, "experts", "tensor"))
    ranks = np.moveaxis(np.arange(workers.world).reshape(shape), 2, -1).reshape(-1, over)
    # A separate process group, because the gradients of the rest are reduced at the same time.
    group = workers.open_groups(ranks.tolist())
    assert group is not None
    share, dispatcher = dist.get_rank(group), TokenDispatcher(group)
    for stack in stacks:
        for name, parameter in list(stack.named_parameters()):
            stack.register_parameter(name, _local_share(parameter, mesh[COPIES, "experts", "tensor"]))
    for _, layer in sparse_layers(model):
        experts = base_of(layer.experts)
        assert isinstance(experts, mixture.Experts)
        experts.share = share
        layer.set_submodule("experts", DividedExperts(layer.experts, dispatcher))
    if native:
        assert isinstance(model, PreTrainedModel)
        # Another model of this process has another dispatcher.
        implementation = f"{mixture.IMPLEMENTATION}_{next(_numbers)}"
        divided = partial(mixture.grouped_experts, dispatch=dispatcher.run, share=share)
        ALL_EXPERTS_FUNCTIONS.register(implementation, divided)
        model.set_experts_implementation(implementation)


def _local_share(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Return this worker's share of a stack of experts.

    If there are several copies, the first one's values are used.
    """
    features = parameter.placements if isinstance(parameter, DTensor) else (Replicate(),)  # from tensor parallelism
    parts = local_part(parameter).detach().chunk(mesh["experts"].size())
    values = parts[mesh.get_local_rank("experts")].clone()
    broadcast(values, group=mesh.get_group(COPIES))  # copies may have drawn different values
    share = as_dtensor(values, mesh, [Replicate(), Shard(0), *features], parameter)
    return nn.Parameter(share, requires_grad=parameter.requires_grad)


Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class DividedExperts(nn.Module):
    """The experts of a layer, some on this worker and the others on other workers."""

    def __init__(self, experts: mixture.Experts, dispatcher: TokenDispatcher) -> None:
        super().__init__()
        self.module = experts  # canonical names skip this name
        self._dispatcher = dispatcher

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor, *, all_routed: bool = True) -> torch.Tensor:
        """Do the same as :meth:`Experts.forward`, for this worker's tokens and the experts of all workers."""
        return self._dispatcher.run(tokens, counts, self.module, all_routed=all_routed)


class TokenDispatcher:
    """Sends tokens to the workers that have their experts, and the results back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @torch.compiler.disable(reason="how many tokens travel is known only from the data")
    def run(self, tokens: torch.Tensor, counts: torch.Tensor, experts: Compute, *, all_routed: bool) -> torch.Tensor:
        """Return the outputs of the experts on all workers for this worker's tokens, which are sorted by expert.

        Args:
            counts: [N], number of tokens of each expert.
            experts: computes the outputs of this worker's experts from tokens, sorted by expert, and their counts.
            all_routed: False if there may be tokens after those of the last expert, which no expert takes.
        """
        world = dist.get_world_size(self._group)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts, group=self._group)
        incoming = incoming.view(world, -1)  # [senders, experts on this worker]
        sent, received = self.rows(counts.view(world, -1), len(tokens)), self.rows(incoming, len(tokens))
        routed = sum(sent)
        local_tokens = self.exchange(tokens[:routed], sent, received)

        # The tokens arrive sorted by sender, and are regrouped by expert.
        local_experts = incoming.shape[1]
        experts_here = torch.arange(local_experts, device=tokens.device).repeat(world)
        expert_of_token = experts_here.repeat_interleave(incoming.flatten(), output_size=sum(received))
        grouped = mixture.group_by_expert(local_tokens, expert_of_token.unsqueeze(1), None, local_experts)
        outputs = experts(grouped.tokens, grouped.counts)
        outputs = mixture.ungroup(outputs, grouped, torch.ones_like(expert_of_token, dtype=outputs.dtype).unsqueeze(1))

        back = self.exchange(outputs, received, sent)
        return back if all_routed else torch.cat([back, back.new_zeros(len(tokens) - routed, back.shape[1])])

    def rows(self, counts: torch.Tensor, tokens: int) -> list[int]:
        """Return the number of tokens that go to each worker, or come from it.

        Args:
            counts: [workers, experts], numbers of tokens.
            tokens: number of tokens of this worker.
        """
        return counts.sum(1).tolist()

    def exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Send each worker its rows and receive those of the others. Gradients go in the other direction."""

        def exchange(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
            result = rows.new_empty(sum(received), rows.shape[1])
            dist.all_to_all_single(result, rows.contiguous(), received, sent, group=self._group)
            return result

        return differentiable(
            lambda x: exchange(x, sent, received), lambda gradient: exchange(gradient, received, sent), rows
        )


class ExpertParallelEngine(DDPEngine):
    """DDP for everything except the experts, which differ between the workers."""

    _divides_gradients = True

    def _distribute(self) -> nn.Module:
        self._divided_parameters = [p for p in self._parameters if isinstance(p, DTensor)]
        named = [(name, p) for name, p in self.model.named_parameters() if isinstance(p, DTensor)]
        # A single worker divides nothing.
        self._replica_group = copies_of(named[0][1], self.workers) if named else NO_COPIES
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, [name for name, _ in named])
        return super()._distribute()

    def _reduce(self) -> None:
        if self._replica_group.size > 1:
            has_gradient = torch.tensor([float(p.grad is not None) for p in self._divided_parameters])  # on the host
            dist.all_reduce(has_gradient, group=self._replica_group.group)
            for parameter, is_used in zip(self._divided_parameters, has_gradient.tolist(), strict=True):
                if is_used:
                    if parameter.grad is None:  # it has a gradient in another copy
                        parameter.grad = torch.zeros_like(parameter)
                    dist.all_reduce(local_part(parameter.grad), group=self._replica_group.group)
        for parameter in self._divided_parameters:
            if parameter.grad is not None:
                # The losses are weighted for an average over the workers, and these gradients are sums.
                local_part(parameter.grad).div_(self.workers.world)
