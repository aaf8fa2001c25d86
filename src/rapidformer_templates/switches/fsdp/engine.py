"""FSDP: torch's ``fully_shard``, over all workers or inside groups of them, and the receipt of the groups' copies."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.utils._pytree import tree_leaves

from rapidformer_templates.engines.assembly import GatheredInFewerBits
from rapidformer_templates.engines.backwards import Derivatives, ForwardSequenceCheck
from rapidformer_templates.engines.boxes import SHARDS, Parts
from rapidformer_templates.engines.construction import take_part
from rapidformer_templates.engines.contract import Engine, Receipt, bytes_by_kind, sum_of_bits
from rapidformer_templates.engines.local import SingleEngine
from rapidformer_templates.engines.shards import (
    COPIES,
    Shard,
    ShardKind,
    StateReader,
    as_dtensor,
    local_part,
    zero_gradient,
)
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.models.blocks import canonical_name, find_blocks, is_quantized, note_shape, shape_of
from rapidformer_templates.planning.plan import Plan, expert_shard_dim, shards_of_experts
from rapidformer_templates.system import accelerator
from rapidformer_templates.system.workers import Workers, broadcast, open_group_alone

EXPERTS = "experts"
VIEW_WARNING = r"FSDP2-wrapped module \(.*\) returned a view tensor"
REDUCE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Owners = list[tuple[nn.Module, str]]
"""The modules that have a parameter, with its name in each."""


class FSDPEngine(SingleEngine):
    """Shards parameters, gradients and optimizer state over the workers, block by block.

    With a shard size of N, they are sharded inside groups of N neighboring workers (hybrid sharding). Each group has a
    copy of all of them, and workers with the same shard sum its gradient. Experts that are already divided are sharded
    over the workers that have the same ones. Parameters that tensor parallelism has divided are sharded over the
    workers with the same part, along the first dimension of the part.

    Attributes:
        group: number of workers that share one copy.
        receipts: measurements of the first step. ``parameter_bytes_in_backward`` is the bytes of parameters, whole or
            in shards, on this rank when a backward begins. ``whole_in_backward`` is the fraction of them that is whole.
            ``gradients_summed_in`` lists the types of the gradient sums. ``whole_gradients_between`` is the number of
            elements of whole gradients that the last micro batch finds.
    """

    _divides_gradients = True
    _derivatives_in_loss = Derivatives(1, "--fsdp-memory-optimization")  # it gathers parameters for one backward

    def __init__(self, plan: Plan, workers: Workers, *, clip_grad: float) -> None:
        super().__init__(plan, workers, clip_grad=clip_grad)
        # Models of transformers return views, too. A view that is changed in place is an error in _check_views.
        warnings.filterwarnings("ignore", message=VIEW_WARNING, category=UserWarning)
        sharding = plan.engine_options.parameter_sharding
        self.group = sharding.shard_size or workers.copies
        self._experts_over = plan.engine_options.experts_over
        self.reshards = sharding.reshard_after_forward
        self._reduces_each = sharding.reduce_every_micro_batch
        self._in_forward = False
        self._used: set[int] = set()  # ids of the parameters that got a gradient in this step on this worker
        self._views: list[tuple[torch.Tensor, int, nn.Module]] = []
        self.reduce_type = REDUCE_TYPES[sharding.reduce_dtype or "fp32"]

    def _shard(self, model: nn.Module) -> None:
        # None reshards everything except the root, whose parameters the backward needs first.
        self._apply_fully_shard(model, self.assembly.blocks, None if self.reshards else False)
        if fewer := self.assembly.find(GatheredInFewerBits):
            self._extend_gathering(model, fewer)

    def _extend_gathering(self, model: nn.Module, fewer: GatheredInFewerBits) -> None:
        """Let torch gather weights in fewer bits. It finds the methods of its extension on a worker's rows.

        A weight whose rows differ in number among the workers is gathered as usual: torch would have to pad them.
        """
        senders = []
        for weight in (weight for group in self._all_groups for weight in group.fsdp_params):
            place, rows = weight._module_info, weight._sharded_local_tensor
            is_even = len(weight.sharded_param) % self.group == 0
            if place.module in fewer.layers and place.param_name == "weight" and is_even:
                senders.append(sender := fewer.sender(rows))
                rows.fsdp_pre_all_gather = sender.fsdp_pre_all_gather
                rows.fsdp_post_all_gather = sender.fsdp_post_all_gather
                weight._init_extensions()
        # It comes before FSDP's own hook, which gathers the first weights.
        model.register_forward_pre_hook(lambda *_: fewer.before_forward(senders), prepend=True)

    def frozen(self, model: nn.Module) -> nn.Module:
        model.requires_grad_(False).eval()
        # Without a backward, the root's parameters are not needed again.
        self._apply_fully_shard(model, find_blocks(model), True)
        return model

    def _apply_fully_shard(self, model: nn.Module, of_model: Mapping[str, nn.Module], reshard: bool | None) -> None:
        """Shard a model in place, unit by unit."""
        # Parameters are gathered in the compute type. Gradients are summed in fp32, or in a type that the user chooses.
        reduce_type = self.reduce_type if self.compute_type is not None else None
        policy = MixedPrecisionPolicy(param_dtype=self.compute_type, reduce_dtype=reduce_type)
        for module in list(model.modules()):
            if any(_has_mesh_dimension(p, EXPERTS) for p in module.parameters(recurse=False)):
                accelerator.move(module, self.workers.device)
                self._shard_expert_stacks(module, policy, reshard)
        # Shards are other tensors, without the notes of their parameters.
        shapes_of_codes = {name: shape_of(p) for name, p in model.named_parameters() if is_quantized(p)}
        whole = self._keep_whole(model)
        for unit in (*_units_of(model, list(of_model.values())), model):
            self._shard_unit(unit, whole, policy, reshard)
        accelerator.move(model, self.workers.device)  # the buffers
        for buffer in model.buffers() if self.workers.copies > 1 else ():
            broadcast(buffer.detach(), group=self.workers.copies_group)
        for name, shape in shapes_of_codes.items():
            note_shape(model.get_parameter(name), shape)

    def _keep_whole(self, model: nn.Module) -> set[nn.Parameter]:
        """Move the parameters that ``fully_shard`` cannot divide to the device, and return them.

        These have no dimensions or no elements, or another type than most of the trained elements.
        """
        owners_of, sizes, kept = _owners(model), Counter[torch.dtype](), set[nn.Parameter]()
        for parameter in owners_of:
            sizes[parameter.dtype] += parameter.numel() * parameter.requires_grad
        usual = max(sizes, key=sizes.__getitem__, default=None)
        for parameter, owners in owners_of.items():
            is_usual = parameter.dtype == usual or not parameter.requires_grad
            if not (is_usual and parameter.ndim and parameter.numel()):
                part = _like(parameter, self._part_of(parameter, Replicate()), self._mesh_of_states)
                whole = nn.Parameter(part, requires_grad=parameter.requires_grad)
                kept.add(whole)
                for module, key in owners:
                    module.register_parameter(key, whole)
        return kept

    def _shard_unit(
        self, unit: nn.Module, whole: set[nn.Parameter], policy: MixedPrecisionPolicy, reshard: bool | None
    ) -> None:
        """Shard a unit in place. ``fully_shard`` gets parameters without memory, and then each gets its own rows."""
        rows = self._take_rows(unit, whole)
        sharded_unit: FSDPModule = fully_shard(
            unit, mesh=self._mesh, mp_policy=policy, reshard_after_forward=reshard, ignored_params=whole
        )
        for owners, values in rows:
            module, key = owners[0]
            spec = module.get_parameter(key)
            assert isinstance(spec, DTensor)
            shard = as_dtensor(values, spec.device_mesh, spec.placements, spec)
            parameter = nn.Parameter(shard, requires_grad=spec.requires_grad)
            for module, key in owners:
                module.register_parameter(key, parameter)
        for group in _groups(sharded_unit):
            for sharded in group.fsdp_params:
                sharded.reset_sharded_param()

    def _take_rows(self, unit: nn.Module, kept: set[nn.Parameter]) -> list[tuple[Owners, torch.Tensor]]:
        """Return this worker's rows of each parameter of a unit and leave the parameters without memory."""
        owners_of, rows = {p: owners for p, owners in _owners(unit).items() if p not in kept}, []
        while owners_of:  # the dictionary must not keep a parameter whose rows are taken
            whole = next(iter(owners_of))
            owners = owners_of.pop(whole)
            rows.append((owners, self._part_of(whole, ShardPlacement(0))))
            # empty_like would count as a use of the parameter and gather it.
            memoryless = torch.empty(local_part(whole).shape, dtype=whole.dtype, device="meta")
            empty = nn.Parameter(_like(whole, memoryless, self._mesh_of_states), requires_grad=whole.requires_grad)
            for module, key in owners:
                module.register_parameter(key, empty)
            del whole
            if self._construction:
                self._construction.forget_freed()
        return rows

    def _part_of(self, parameter: nn.Parameter, placement: Placement) -> torch.Tensor:
        """Return this worker's part of a parameter on the device, divided as ``fully_shard`` does it."""
        workers, construction = self.workers, self._construction
        of_stage = workers.copies * workers.tensor
        ranks = tuple((worker // workers.tensor % self.group,) for worker in range(of_stage))
        is_divided = isinstance(parameter, DTensor) and not (construction and construction.is_postponed(parameter))
        return take_part(
            local_part(parameter) if is_divided else parameter,
            Parts((placement,), (self.group,), ranks),
            workers.rank % of_stage,
            construction=None if is_divided else construction,
            group=workers.copies_group,
            device=workers.device,
        )

    def _shard_expert_stacks(self, stack: nn.Module, policy: MixedPrecisionPolicy, reshard: bool | None) -> None:
        """Shard this worker's experts over the workers of its group that have the same experts."""
        mesh = self._mesh_of_experts
        shard_mesh = mesh[(COPIES, SHARDS) if mesh[COPIES].size() > 1 else SHARDS]
        division = (EXPERTS, "tensor") if self.workers.tensor > 1 else (EXPERTS,)
        for name, parameter in list(stack.named_parameters(recurse=False)):
            assert isinstance(parameter, DTensor)
            placements = parameter.placements[1 : 1 + len(division)]  # without that of the copies
            share = as_dtensor(local_part(parameter).detach(), mesh[division], placements, parameter)
            stack.register_parameter(name, nn.Parameter(share, requires_grad=parameter.requires_grad))
        shards = mesh[SHARDS].size()

        def placement(parameter: nn.Parameter) -> ShardPlacement:
            return ShardPlacement(expert_shard_dim(local_part(parameter).shape, shards))

        fully_shard(
            stack, mesh=shard_mesh, mp_policy=policy, reshard_after_forward=reshard, shard_placement_fn=placement
        )

    @cached_property
    def _mesh(self) -> DeviceMesh:
        """The mesh of the workers with the same part, by copy and shard if there are copies."""
        return self._mesh_of_states[(COPIES, SHARDS) if self.workers.copies > self.group else SHARDS]

    @cached_property
    def _mesh_of_states(self) -> DeviceMesh:
        """All workers by pipeline stage, copy, shard and tensor-parallel part, without dimensions of one worker.

        Neighbors share a copy and are on the same node.
        """
        workers = self.workers
        open_group_alone(workers.device)
        dimensions = {
            "pipeline": workers.pipeline,
            COPIES: workers.copies // self.group,
            SHARDS: self.group,
            "tensor": workers.tensor,
        }
        sizes = {name: size for name, size in dimensions.items() if size > 1 or name == SHARDS}
        return workers.open_mesh(tuple(sizes.values()), tuple(sizes))

    @cached_property
    def _mesh_of_experts(self) -> DeviceMesh:
        """The mesh of workers by stage, copy, shard, experts and tensor-parallel part. Neighbors have other experts."""
        workers, over = self.workers, self._experts_over
        same, shards = workers.copies // over, shards_of_experts(workers.copies, self.group, over)
        shape = (workers.pipeline, same // shards, shards, over, workers.tensor)
        return workers.open_mesh(shape, ("pipeline", COPIES, SHARDS, EXPERTS, "tensor"))

    def _distribute(self) -> nn.Module:
        units: dict[str, Any] = {n: m for n, m in self.model.named_modules() if isinstance(m, FSDPModule)}
        names = {id(p): canonical_name(n) for n, p in self.model.named_parameters()}
        trained: dict[str, list[str]] = {}
        for name, unit in units.items():
            groups = _groups(unit)
            parameters = [p.sharded_param for group in groups for p in group.fsdp_params]
            trained[name] = [names[id(p)] for p in parameters if p.requires_grad]
            for group in groups:
                group.post_backward = _reduce_all(group, self._used)
            unit.register_forward_hook(self._record_views)
        self._whole_parameters = [p for p in self._parameters if not _is_sharded(p)]
        # The stages of a pipeline have other units, and its engine checks that each runs all of its blocks.
        compares = self.workers.world > 1 and self.workers.pipeline == 1
        self._sequence_check = ForwardSequenceCheck(units, trained, self.workers, "FSDP") if compares else None
        return self.model

    @property
    def gradient_divisor(self) -> float:
        return float(self.workers.data)

    def _record_views(self, unit: nn.Module, inputs: Any, outputs: Any) -> None:
        """Record the version of each view that a unit returns, until the backward begins."""
        if self._in_forward and torch.is_grad_enabled():
            tensors = (one for one in tree_leaves(outputs) if isinstance(one, torch.Tensor) and one.requires_grad)
            self._views += [(view, view._version, unit) for view in tensors if view._base is not None]

    def _check_views(self) -> None:
        """Raise an error if a view has been changed in place. FSDP's hook on it is lost, and with it the gradients."""
        views, self._views, self._in_forward = self._views, [], False
        for view, version, unit in views:
            if view._version != version:
                name = type(unit).__name__.removeprefix("FSDP")
                raise RapidformerError(
                    f"the output of {name} is a view and was changed in place: its gradients would be lost under FSDP",
                    hint="write out = out + y instead of out += y, or change a clone of it",
                )

    def drop(self) -> None:
        super().drop()
        self._used.clear()
        for group in self._all_groups:
            group._partial_reduce_output = None  # sums of earlier micro batches inside a group of workers
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter.unsharded_param.grad = None

    def _unused_here(self) -> Sequence[int]:
        for parameter in self._whole_parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                self._used.add(id(parameter))
        return [index for index, p in enumerate(self._parameters) if id(p) not in self._used]

    def _parameters_in_graph(self) -> Iterable[torch.Tensor]:
        sharded = [p for group in self._all_groups for p in group.fsdp_params]
        return [*self.model.parameters(), *(p.unsharded_param for p in sharded if hasattr(p, "_unsharded_param"))]

    def accumulation(self, *, last: bool) -> AbstractContextManager[object]:
        self._views, self._in_forward = [], True
        if last and self.receipts and "whole_gradients_between" not in self.receipts:
            self._measure_gradients()
        self._callable.set_requires_gradient_sync(last or self._reduces_each)  # type: ignore[operator]
        self._callable.set_requires_all_reduce(last)  # type: ignore[operator] # the sum over copies, once
        if not self.reshards:
            # Parameters stay whole from the first micro batch to the last: without resharding there is memory for them.
            self._callable.set_reshard_after_backward(last)  # type: ignore[operator]
        return self._sequence_check.checked() if self._sequence_check else nullcontext()

    def _prepare_backward(self, loss: torch.Tensor | GradientEdge | None) -> None:
        self._check_views()
        if not self.receipts:
            self._measure_first_backward()
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            # FSDP finds the tensors of an output in standard containers only. With others it would reduce nothing.
            root: Any = self.model
            state = root._get_fsdp_state()
            loss.register_hook(lambda _: state._register_root_post_backward_final_callback())

    def _backward(self, loss: torch.Tensor) -> None:
        self._prepare_backward(loss)
        if self._sequence_check:
            self._sequence_check.forward_done()
        super()._backward(loss)

    def _wrong_leaves(self) -> Iterable[torch.Tensor]:
        # The gradient of a shard would be this worker's, and not a sum over the workers.
        return [*super()._wrong_leaves(), *(p for p in self.model.parameters() if _is_sharded(p))]

    def _reduce(self) -> None:
        for parameter in self._whole_parameters if self.workers.copies > 1 else ():
            if parameter.grad is not None:
                dist.all_reduce(local_part(parameter.grad), group=self.workers.copies_group)
                local_part(parameter.grad).div_(self.workers.copies)
        for parameter in self._parameters:
            if parameter.grad is not None and _has_mesh_dimension(parameter, EXPERTS):
                # These gradients are sums over the workers that sent tokens, averaged over the workers that have the
                # expert.
                local_part(parameter.grad).div_(self._experts_over)

    def _measure_first_backward(self) -> None:
        parameters = list(self.model.parameters())
        sizes = [(p.numel(), _has_mesh_dimension(p, SHARDS)) for p in parameters]
        groups = self._all_groups
        # None means no cast: gradients are summed in their own type, which is the compute type.
        types = {group._reduce_dtype or self.compute_type or group._orig_dtype for group in groups}
        self.receipts["parameter_bytes_in_backward"] = bytes_by_kind({"parameters": parameters})["parameters"]
        whole = sum(count for count, divided in sizes if not divided)
        self.receipts["kept_whole"] = sum(p.numel() for p in self._whole_parameters)
        self.receipts["whole_in_backward"] = whole / sum(count for count, _ in sizes)
        buffers = (buffer for group in groups for p in group.fsdp_params for buffer in p.all_gather_outputs)
        self.receipts["gathered_in_8_bits"] = sum(buffer.numel() for buffer in buffers if buffer.element_size() == 1)
        self.receipts["gradients_summed_in"] = [name for name, dtype in REDUCE_TYPES.items() if dtype in types]

    def _measure_gradients(self) -> None:
        """Count the elements of whole gradients that earlier micro batches of the first step have left."""
        found = 0
        for parameter in (parameter for group in self._all_groups for parameter in group.fsdp_params):
            kept = parameter.unsharded_accumulated_grad  # a sum in another type than the gradients
            if kept is None and hasattr(parameter, "_unsharded_param"):
                kept = parameter.unsharded_param.grad
            found += 0 if kept is None else kept.numel()
        self.receipts["whole_gradients_between"] = found

    @cached_property
    def _all_groups(self) -> list[Any]:
        """Return torch's ``FSDPParamGroup`` of each unit."""
        return [group for unit in self.model.modules() if isinstance(unit, FSDPModule) for group in _groups(unit)]

    def end_forwards(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _exchange_averages(self) -> None:
        self.end_forwards()
        super()._exchange_averages()

    def local_tensors(self) -> dict[str, list[torch.Tensor]]:
        self.end_forwards()
        return super().local_tensors()

    def shards(self, kind: ShardKind) -> Iterator[Shard]:
        if kind == "weights":
            self.end_forwards()
        return super().shards(kind)

    def load(self, reader: StateReader, *, optimizer: bool) -> None:
        self.end_forwards()
        super().load(reader, optimizer=optimizer)


def _reduce_all(group: Any, used: set[int]) -> Callable[..., None]:
    """Return a ``post_backward`` of a group that reduces all trained parameters, with zeros where no gradient is.

    torch calls ``post_backward`` once all gradients of the unit are computed: from the backward of the unit's inputs
    (``RegisterPostBackwardFunction``), or at the end of the whole backward if no input needs a gradient or the unit was
    not reached (``_root_post_backward_final_callback``). Its own reduces only parameters that have a gradient. Workers
    with different graphs would then sum gradients of different parameters, or wait for one another forever.

    Args:
        group: the parameters that a unit gathers and reduces together (torch's ``FSDPParamGroup``).
        used: gets the ids of the parameters that have a gradient on this worker.
    """
    post_backward = group.post_backward

    def reduce(*unused: object) -> None:
        if group.reduce_grads:
            trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
            accumulated = any(p.unsharded_accumulated_grad is not None for p in trained)
            for parameter in trained:
                unsharded = parameter.unsharded_param
                if parameter.unsharded_accumulated_grad is not None:
                    used.add(id(parameter.sharded_param))
                    continue
                if unsharded.grad is not None:
                    used.add(id(parameter.sharded_param))
                else:
                    unsharded.grad = zero_gradient(unsharded)
                if accumulated:  # in the same type as the others
                    parameter.to_accumulated_grad_if_needed()
        post_backward(*unused)

    return reduce


def _groups(unit: FSDPModule) -> list[Any]:
    """Return torch's ``FSDPParamGroup`` of a unit, or several."""
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _owners(unit: nn.Module) -> dict[nn.Parameter, Owners]:
    """Return the owners of each parameter of a unit that is not sharded yet."""
    owners: dict[nn.Parameter, Owners] = {}
    for module in unit.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not _is_sharded(parameter):
                owners.setdefault(parameter, []).append((module, key))
    return owners


def _units_of(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the units of a model: its blocks, and the largest modules that several blocks share.

    None has a parameter in common with a module outside of it. The root has the parameters of those that do.
    """
    users_of = Counter(module for block in blocks for module in block.modules() if module is not block)
    shared = [module for module, count in users_of.items() if count > 1 and any(True for _ in module.parameters())]
    inner = {part for module in shared for part in module.modules() if part is not module}
    units = [*(module for module in shared if module not in inner), *blocks]
    unit_of = {module: unit for unit in reversed(units) for module in unit.modules()}
    users: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, set()).add(unit_of.get(module, model))
    tied = {unit for of_parameter in users.values() if len(of_parameter) > 1 for unit in of_parameter}
    return [unit for unit in units if unit not in tied]


def _is_sharded(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is sharded here, or one of a worker's own experts."""
    return _has_mesh_dimension(parameter, SHARDS) or _has_mesh_dimension(parameter, EXPERTS)


def _like(parameter: nn.Parameter, local: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return a worker's part of a parameter with the division of the parameter, if tensor parallelism has divided it.

    Args:
        mesh: has all dimensions. ``fully_shard`` combines two meshes of one.
    """
    if not isinstance(parameter, DTensor):
        return local
    return as_dtensor(local, mesh["tensor"], parameter.placements, parameter)


def _has_mesh_dimension(parameter: nn.Parameter, dimension: str) -> bool:
    """Return whether a parameter is placed on a mesh with this dimension."""
    return isinstance(parameter, DTensor) and dimension in (parameter.device_mesh.mesh_dim_names or ())


class ShardCopies(Receipt):
    """Reports the number of copies of the trained parameters, and whether they are equal bit for bit."""

    def after_step(self, engine: Engine) -> dict[str, object]:
        trained = [p for group in engine.optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)]
        if not trained:
            return {}
        sums = engine.workers.gather([int(sum_of_bits(parameter)) for parameter in trained])
        copies = [_copies_of(parameter) for parameter in trained]
        equal = all(
            len({sums[rank][index] for rank in same}) == 1 for index, parts in enumerate(copies) for same in parts
        )
        return {"copies": max(len(same) for parts in copies for same in parts), "copies_equal": equal}


def _copies_of(parameter: DTensor) -> list[list[int]]:
    """Return the ranks that have each part of a parameter."""
    mesh, placements = parameter.device_mesh.mesh, parameter.placements
    dividing = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    together = [dim for dim, placement in enumerate(placements) if placement.is_replicate()]
    count = math.prod(mesh.shape[dim] for dim in dividing)
    return mesh.permute(*dividing, *together).reshape(count, -1).tolist()
