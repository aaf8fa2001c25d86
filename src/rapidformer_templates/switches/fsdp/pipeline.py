"""FSDP inside the stages of a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.fsdp import FSDPModule

from rapidformer_templates.engines.local import Named
from rapidformer_templates.engines.parallel.engine import open_groups_of_stages, send_from_first_stage
from rapidformer_templates.engines.recipe import Differing, OptimizerSpec
from rapidformer_templates.engines.shards import local_part
from rapidformer_templates.models.blocks import canonical_name
from rapidformer_templates.switches.fsdp.engine import FSDPEngine
from rapidformer_templates.switches.layout.pipeline import LeaveStage
from rapidformer_templates.switches.layout.pipeline_engine import RunsStages


class PipelineFSDPEngine(RunsStages, FSDPEngine):
    """A pipeline whose stages shard their parameters over the workers that have copies of them.

    The units of a stage are its blocks, and the modules around them. Their gradients are complete after the last
    backward of their part. The modules around the blocks count as the first part, whose backward is the last one.
    """

    _adds_norms_in_fp64 = True  # a stage may have no gradients, whose type would be that of the norm

    def _shard(self, model: nn.Module) -> None:
        super()._shard(model)
        _HiddenState(model)

    def _build_optimizer(self, recipe: OptimizerSpec, trainable: Named, differing: Differing) -> torch.optim.Optimizer:
        if not trainable:  # only frozen blocks: optimizers reject an empty list
            trainable, differing = [("", nn.Parameter(torch.empty(0, 0, device=self.workers.device)))], {"": {}}
        return super()._build_optimizer(recipe, trainable, differing)

    def _distribute(self) -> nn.Module:
        model = super()._distribute()
        self._tied = open_groups_of_stages(self.assembly, self.workers)
        send_from_first_stage(self.assembly, self._tied)
        stages, whole_name = self.assembly.placement.stages, self.assembly.placement.whole_name
        names = {id(p): whole_name(canonical_name(name)) for name, p in model.named_parameters()}
        # The stages may have their parameters in another order: a tied head stands at the end, its embedding at the
        # beginning.
        by_name = sorted(range(len(self._parameters)), key=lambda index: names[id(self._parameters[index])])
        self._copied = {
            held: [index for index in by_name if stages.get(names[id(self._parameters[index])]) == held]
            for held in self._tied
        }
        parts = self.assembly.placement.parts or ()
        part_of = {block: part for part, blocks in enumerate(parts) for block in blocks.values()}
        self._in_forward = True
        self._units = [(unit, part_of.get(unit, 0)) for unit in model.modules() if isinstance(unit, FSDPModule)]
        return model

    def backward_of_part(
        self, part: int, output: torch.Tensor | GradientEdge | None, gradient: torch.Tensor | None = None
    ) -> None:
        self._prepare_backward(output)
        self._in_forward = True  # other micro batches are in their forwards
        if self.is_last and part == 0 and "whole_gradients_between" not in self.receipts:
            self._measure_gradients()
        for unit, own_part in self._units:
            is_complete = self.is_last and part == own_part
            sums = is_complete or (self._reduces_each and part == own_part)
            unit.set_requires_gradient_sync(sums, recurse=False)
            unit.set_requires_all_reduce(is_complete, recurse=False)
            unit.set_reshard_after_backward(is_complete or self.reshards, recurse=False)
        if output is not None:
            torch.autograd.backward(output, gradient)

    def _unused_here(self) -> Sequence[int]:
        return ()  # the stages have other parameters, see _reduce

    def _reduce(self) -> None:
        unused = set(super()._unused_here())
        flags = torch.tensor([float(index not in unused) for index in range(len(self._parameters))])  # on the host
        dist.all_reduce(flags, group=self.workers.copies_group)
        super()._reduce()
        for stages, group in self._tied.items():
            indices = self._copied[stages]
            uses = flags[indices]
            dist.all_reduce(uses, group=group)
            flags[indices] = uses
            for parameter in (self._parameters[index] for index in indices):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(local_part(parameter.grad), group=group)
        self._drop_unused([index for index, uses in enumerate(flags.tolist()) if uses == 0])
        self.end_forwards()  # also units that no backward has reached


class _HiddenState:
    """Lets a model return the hidden state with which its forward ends, so that FSDP's hook on it prepares a backward.

    A second hook then ends the forward.
    """

    def __init__(self, model: nn.Module) -> None:
        functools.update_wrapper(self, model.forward)
        self._forward, self._leaves = model.forward, False
        model.forward = self
        model.register_forward_hook(self._leave)  # runs after the hook of fully_shard

    def __call__(self, *args: object, **kwargs: object) -> object:
        self._leaves = False
        try:
            return self._forward(*args, **kwargs)
        except LeaveStage as leaving:
            self._leaves = True
            return leaving.hidden

    def _leave(self, model: nn.Module, args: object, output: torch.Tensor) -> None:
        if self._leaves:
            raise LeaveStage(output)
