"""Tensor and sequence parallelism as a transform of the model, and the measurements that show that it is divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from transformers.pytorch_utils import Conv1D

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.engines.boxes import Parts
from rapidformer_templates.engines.collectives import Peers
from rapidformer_templates.engines.construction import ModelUnderConstruction, take_part
from rapidformer_templates.engines.contract import Engine, Receipt
from rapidformer_templates.engines.shards import as_dtensor
from rapidformer_templates.errors import ModelError
from rapidformer_templates.switches.layout import tensor_layers, tensor_plan
from rapidformer_templates.switches.layout import tensor_styles as tensor_styles
from rapidformer_templates.switches.layout.sequence_shards import (
    OnWholeSequence,
    SequenceShards,
    Streams,
    draws_random_numbers,
)
from rapidformer_templates.switches.layout.tensor_layers import Regions, VocabularyHead
from rapidformer_templates.switches.layout.tensor_plan import TensorPlan
from rapidformer_templates.system.workers import broadcast

LAYERS: dict[str, Callable[..., tensor_layers.Divided]] = {
    **dict.fromkeys(tensor_styles.ROW, tensor_layers.Row),
    tensor_styles.SPLIT_ROW: tensor_layers.SplitRow,
    tensor_styles.GATHERED_COLUMN: tensor_layers.GatheredColumn,
    tensor_styles.EMBEDDING: tensor_layers.VocabularyEmbedding,
    tensor_styles.VOCABULARY_HEAD: VocabularyHead,
    tensor_styles.EXPERTS: tensor_layers.FeatureShardedExperts,
}
"""The forward that replaces that of a styled module. Column-parallel layers keep theirs."""


MIXED = "got mixed torch.Tensor and DTensor"
"""In torch's message for an operation between parameters that are replaced with DTensors and others."""


@dataclass
class TensorParallel:
    """How the transform has divided a model.

    Attributes:
        peers: the workers that share the model.
        head: the output layer for logits, if the model has one.
        shards: the shards of the sequence. None without sequence parallelism.
    """

    peers: Peers
    head: VocabularyHead | None
    shards: SequenceShards | None


def divide_matrices(assembly: Assembly, building: Building[object]) -> None:
    """Divide a model over the workers of its tensor-parallel group, with sequence parallelism if the plan has it.

    Afterwards, each parameter is a DTensor on ``mesh["tensor"]`` under its old name, and the model computes the same as
    before. Tied parameters are still one object. A backward leaves the gradient of the local shard in a divided
    parameter. In a whole parameter, it leaves the whole gradient, equal on all workers of the group: the workers sum
    their parts in the backward itself, so that an engine may use gradients as soon as they are ready. In training, the
    logits are :class:`~.divided_tensors.DividedLogits`.

    Raises:
        ModelError: the model has no tensor plan, or the plan is not supported.
    """
    model = assembly.model
    assembly.limit_derivatives(1, "--tensor-model-parallel-size")  # collectives are differentiated once
    assert building.workers.mesh is not None
    mesh = building.workers.mesh["tensor"]
    peers = Peers(mesh.get_group(), mesh.size(), building.workers.tensor_rank)
    plan = tensor_plan.tensor_plan_of(model)
    tensor_plan.check_sizes(model, plan, peers.size)
    streams = Streams(peers.rank, active=draws_random_numbers(model))
    shards = SequenceShards(peers, streams) if "sequence-parallel" in building.plan.switches else None
    blocks = block_lists(assembly)
    if shards is not None:
        assembly.require_blocks("sequence parallelism", "--sequence-parallel")
    if shards is not None and plan.is_user_plan:
        message = "sequence parallelism needs a plan of the architecture, but the model brings its own tensor_plan"
        raise ModelError(message, where="--sequence-parallel", hint="leave out --sequence-parallel")
    partial = plan.partial | (_computed_on_shards(model, plan, blocks) if shards else frozenset())
    head = _install(model, plan, Regions(peers, streams, shards), partial)
    if shards is not None:
        shards.install(model, blocks)
    options = building.plan.engine_options
    # FSDP takes its share of a part. Experts are divided before.
    postpones = options.shard_over_data == "parameters" and options.experts_over == 1
    _shard_parameters(model, plan, mesh, peers, building.construction, postpones=postpones)
    assembly.record(TensorParallel(peers, head, shards))
    model.forward = _explain_foreign_parameters(model.forward, type(model).__name__)


def _explain_foreign_parameters(forward: Callable[..., object], name: str) -> Callable[..., object]:
    """Explain torch's error for a module that computes with the parameters of another one, as some mixers do."""

    @wraps(forward)
    def explained(*args: object, **kwargs: object) -> object:
        try:
            return forward(*args, **kwargs)
        except RuntimeError as error:
            if MIXED not in str(error):
                raise
            message = f"a module of {name} computes with parameters of another module, which are divided"
            hint = "leave it out for this model"
            raise ModelError(message, where="--tensor-model-parallel-size", hint=hint) from error

    return explained


def block_lists(assembly: Assembly) -> list[list[nn.Module]]:
    """Return the lists of blocks of a model. In a pipeline, there is one list per stage on this worker."""
    if assembly.placement.parts is not None:
        return [list(part.values()) for part in assembly.placement.parts]
    lists: dict[str, list[nn.Module]] = {}
    for name, block in assembly.blocks.items():
        lists.setdefault(name.rpartition(".")[0], []).append(block)
    return list(lists.values())


def _install(model: nn.Module, plan: TensorPlan, regions: Regions, partial: frozenset[str]) -> VocabularyHead | None:
    """Replace the forwards of all modules that have parameters or are at the edge of a region."""
    for name, module in model.named_modules():
        keys = [key for key, parameter in module._parameters.items() if parameter is not None]
        if keys:
            parts = [key for key in keys if f"{name}.{key}" in partial]
            module.forward = tensor_layers.OnLocalParameters(module, module.forward, parts, regions.peers)
    modules = dict(model.named_modules())
    head = _install_layers(modules, plan, regions)
    # The modules whose inputs go into column-parallel layers.
    columns = {name for name, style in plan.styles.items() if name in modules and style in tensor_styles.COLUMN}
    for name in sorted({plan.adapted.get(column, column).rpartition(".")[0] for column in columns}):
        region = modules[name]
        _check_region(model, plan, name, region)
        for size in plan.local_sizes:
            if hasattr(region, size):
                setattr(region, size, getattr(region, size) // regions.peers.size)
        kind = tensor_layers.AroundColumns if plan.is_user_plan else tensor_layers.Region
        region.forward = kind(region, region.forward, regions)
    if regions.shards is not None:
        for name in plan.undivided:
            modules[name].forward = OnWholeSequence(modules[name].forward, regions.shards)
    return head


def _install_layers(modules: dict[str, nn.Module], plan: TensorPlan, regions: Regions) -> VocabularyHead | None:
    """Replace the forwards of the layers that have a style. Return the head, if it is one of them."""
    head: VocabularyHead | None = None
    for name, style in plan.styles.items():
        module = modules.get(name)  # None for a parameter that a plan names directly
        if module is not None and style in LAYERS:
            module.forward = layer = LAYERS[style](module, module.forward, regions)
            head = layer if isinstance(layer, VocabularyHead) else head
        elif module is not None and style in tensor_styles.COLUMN:
            if isinstance(module, Conv1D):
                module.nf //= regions.peers.size
            if plan.is_user_plan:
                module.forward = tensor_layers.EnteringColumn(module, module.forward, regions)
    return head


def _check_region(model: nn.Module, plan: TensorPlan, name: str, region: nn.Module) -> None:
    """Check that the plan covers every parameter in a region. Others would get a partial gradient on each worker."""
    covered, inside = plan.divisions.keys() | plan.partial, [f"{name}.{key}" for key, _ in region.named_parameters()]
    others = [p for p in inside if p not in covered and p.rpartition(".")[0] not in plan.styles]
    if others:
        message = f"the tensor plan divides layers of {name} but does not mention {', '.join(others[:4])} among them"
        hint = "give each parameter next to column-parallel layers a style"
        raise ModelError(message, where=type(model).__name__, hint=hint)


def _computed_on_shards(model: nn.Module, plan: TensorPlan, lists: Sequence[Sequence[nn.Module]]) -> frozenset[str]:
    """Return the names of whole parameters that see a part of the sequence: all in the blocks that do not run whole.

    Raises:
        ModelError: one of them is a matrix. Parts of a block that are not divided must process each token separately,
            as norms and biases do. Attention without a plan does not.
    """
    whole = {id(p) for name in plan.undivided for p in model.get_submodule(name).parameters()}
    inside = {id(p) for blocks in lists for block in blocks for p in block.parameters()} - whole
    named = dict(model.named_parameters(remove_duplicate=False))
    partial = {name for name, p in named.items() if id(p) in inside and name not in plan.divisions}
    matrices = sorted(n for n in partial if named[n].ndim > 1 and n.rpartition(".")[0] not in plan.adapted)
    if matrices:
        message = f"the tensor plan leaves {', '.join(matrices[:3])} whole, which may need the whole sequence"
        raise ModelError(message, where="--sequence-parallel", hint="leave out --sequence-parallel for this model")
    return frozenset(partial)


def _shard_parameters(
    model: nn.Module,
    plan: TensorPlan,
    mesh: DeviceMesh,
    peers: Peers,
    construction: ModelUnderConstruction | None,
    *,
    postpones: bool,
) -> None:
    """Replace all parameters with DTensors. The values come from the first worker.

    Args:
        postpones: whether an engine takes a share of each part, which has no values until then.
    """
    sharded: dict[int, nn.Parameter] = {}
    names = {id(p): name for name, p in model.named_parameters()}
    ranks, worker = [(peers.rank,)], 0
    if construction is not None:  # other workers may have replicas of the same parts
        ranks, worker = ranks * construction.world, construction.rank
        dist.all_gather_object(ranks, (peers.rank,), group=construction.group)
    for buffer in model.buffers():
        broadcast(buffer, group=peers.group)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in sharded:
                division = plan.divisions.get(names[id(parameter)])
                placement = Replicate() if division is None else division.placement
                parts, device = Parts((placement,), (peers.size,), tuple(ranks)), parameter.device
                waits = postpones and construction is not None and construction.find(parameter) is not None
                if waits:
                    shape = parts.index(tuple(parameter.shape), worker).local
                    part = torch.empty(shape, dtype=parameter.dtype, device="meta")
                else:
                    part = take_part(
                        parameter, parts, worker, construction=construction, group=peers.group, device=device
                    )
                shard = as_dtensor(part, mesh, [placement], torch.empty(parameter.shape, device="meta"))
                sharded[id(parameter)] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
                if waits and construction is not None:
                    construction.postpone(sharded[id(parameter)], parameter, parts)
            module._parameters[key] = sharded[id(parameter)]
        if construction is not None:
            construction.forget_freed()


class TensorDivision(Receipt):
    """Reports ``tensor_parallel_size``, ``logits_columns`` and ``sequence_tokens``.

    The last two are [on this worker, in total] in the latest forward. They are None if this worker has no head or does
    not divide sequences.
    """

    def after_step(self, engine: Engine) -> dict[str, object]:
        applied = engine.assembly.find(TensorParallel)
        if applied is None:
            return {}
        head, shards = applied.head, applied.shards
        return {
            "tensor_parallel_size": applied.peers.size,
            "logits_columns": head and head.columns,
            "sequence_tokens": shards and shards.shard_sizes,
        }
