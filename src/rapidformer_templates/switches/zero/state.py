"""Weights and optimizer state under ZeRO: fragments of flattened parameters in flat partitions of fp32 masters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves

from rapidformer_templates.engines import optimizer_state as states
from rapidformer_templates.engines.assembly import Assembly
from rapidformer_templates.engines.backwards import ForwardSequenceCheck
from rapidformer_templates.engines.boxes import Index
from rapidformer_templates.engines.shards import (
    Copies,
    Shard,
    ShardKind,
    StateReader,
    check_names,
    load_weights,
    named_tensors,
    whole_shard,
)
from rapidformer_templates.models.blocks import canonical_name, shape_of
from rapidformer_templates.system import accelerator
from rapidformer_templates.system.workers import Workers

Masters = dict[str, tuple[int, torch.Tensor]]
"""Exact fp32 values of the trained parameters that are cast, by name. DeepSpeed would round them before it copies them.

Each is a run of the flattened parameter: its first element, and its values."""


@dataclass(frozen=True)
class Fragment:
    """This rank's part of a parameter.

    Attributes:
        name: canonical name of the parameter.
        shape: shape of the whole parameter.
        start: index of its first element in the flattened parameter.
        count: number of elements.
        offset: index of its first element in the flat partition.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    count: int
    offset: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.detach()[self.offset : self.offset + self.count]

    def shard(self, flat: torch.Tensor, key: str | None = None) -> Shard:
        """Return the shard of the parameter, or of an entry of its optimizer state, whose values are in ``flat``."""
        name = self.name if key is None else f"{self.name}/{key}"
        return Shard(name, self.shape, Index.whole(self.shape).run(self.start), self.of(flat))


class ZeroState(ABC):
    """The common part of the ZeRO stages. Stages 1 and 2 partition a flattened group of parameters, 3 each parameter.

    Attributes:
        fragments: the fragments of each flat partition, in its order.
        hook: DeepSpeed's method that reduces a gradient.
    """

    hook: ClassVar[str]

    def __init__(self, optimizer: Any, assembly: Assembly, workers: Workers) -> None:
        self.optimizer = optimizer
        self.assembly, self.model = assembly, assembly.model
        self.workers = workers
        self.names = {id(p): canonical_name(n) for n, p in self.model.named_parameters()}
        self.fragments: list[list[Fragment]] = []

    # The differences between the stages.

    @property
    @abstractmethod
    def masters(self) -> list[Any]:
        """The flat partitions, which are empty if they are on a disk."""

    @abstractmethod
    def partition(self, index: int, *, write: bool) -> AbstractContextManager[torch.Tensor]:
        """Bring a flat partition of masters and its optimizer state into memory. ``write`` stores changes to it."""

    @abstractmethod
    def _group(self, index: int) -> int:
        """Return the index of the optimizer's parameter group that a partition belongs to."""

    @abstractmethod
    def _gradients_of(self, index: int) -> Mapping[str, torch.Tensor]:
        """Return the gradients of a partition's fragments by parameter, between the last backward and the update."""

    @abstractmethod
    def _copy_to_model(self) -> None:
        """Copy the values of the masters to the model."""

    @abstractmethod
    def _gather_trained(self, parameter: Any) -> torch.Tensor:
        """Gather a trained parameter in fp32. This is a collective operation."""

    def _gather_unpartitioned(self, tensor: Any, *, write: bool = False) -> AbstractContextManager[torch.Tensor]:
        """Gather a tensor that is in no partition: a frozen parameter or a buffer."""
        return nullcontext(tensor)

    @abstractmethod
    def _reduce(self, parameter: Any, reduce: Callable[..., None]) -> None:
        """Let DeepSpeed's hook reduce the gradient of a parameter, or a zero gradient if there is none."""

    def sequence_check(self) -> ForwardSequenceCheck | None:
        """Return the module sequence that every micro batch must follow, or None if no parameters are gathered."""
        return None

    def forget_forward(self) -> None:  # noqa: B027 - only stage 3 remembers
        """Discard what DeepSpeed has recorded in a forward without a backward."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Forget the gradients of backwards without an update, as DeepSpeed does if they overflow."""

    # Methods that all stages share.

    def hook_gradients(self, parameters: Sequence[Any], on_ready: Callable[[int], None]) -> Callable[[int], None]:
        """Replace DeepSpeed's gradient hooks. They call ``on_ready`` with the index of each parameter with a gradient.

        Returns:
            A function that runs DeepSpeed's original hook for an index, with a zero gradient if there is none.
        """
        reduce = getattr(self.optimizer, self.hook)
        indices = {id(parameter): index for index, parameter in enumerate(parameters)}
        setattr(self.optimizer, self.hook, lambda parameter, *_: on_ready(indices[id(parameter)]))
        return lambda index: self._reduce(parameters[index], reduce)

    def local_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors that this rank holds: see :meth:`Engine.local_tensors`."""
        optimizer, parameters, masters = self.optimizer, list(self.model.parameters()), list(self.masters)
        of_model = [(p.grad, getattr(p, "grad_accum", None)) for p in parameters]
        reduced = [*optimizer.averaged_gradients.values(), getattr(optimizer, "grad_partitions_flat_buffer", None)]
        found = {
            "parameters": [*parameters, [vars(p).get("ds_tensor") for p in parameters]],
            "gradients": [of_model, reduced, [master.grad for master in masters]],
            "optimizer": [*masters, [list(entry.values()) for entry in optimizer.optimizer.state.values()]],
            "buckets": [bucket.buffer for bucket in optimizer.ipg_buckets.values()],
        }
        return {kind: [t for t in tree_leaves(each) if isinstance(t, torch.Tensor)] for kind, each in found.items()}

    def shards(self, kind: ShardKind) -> Iterator[Shard]:
        """Yield this rank's part of all ``weights``, of the ``optimizer`` state or of the ``gradients``."""
        if kind == "gradients":
            for index, fragments in enumerate(self.fragments):
                gradients = self._gradients_of(index)
                for fragment in fragments:
                    yield replace(fragment, offset=0).shard(gradients[fragment.name])
            return
        for index, fragments in enumerate(self.fragments):
            with self.partition(index, write=False) as flat:
                state = dict(self.optimizer.optimizer.state.get(flat, {}))
                state |= states.group_entries(self.optimizer.optimizer, self._group(index), state)
                for fragment in fragments:
                    if kind == "weights":
                        yield fragment.shard(flat)
                    else:
                        yield from self._state_shards(fragment, flat, state)
        if kind == "weights":
            copies = Copies(self.workers.world, self.workers.rank)
            for name, tensor in self._unpartitioned_tensors():
                with self._gather_unpartitioned(tensor) as whole:
                    yield whole_shard(name, whole.detach().clone(), copies)

    def _state_shards(self, fragment: Fragment, flat: torch.Tensor, state: Mapping[str, Any]) -> Iterator[Shard]:
        for key, value in sorted(state.items()):
            if isinstance(value, torch.Tensor) and value.shape == flat.shape:
                yield fragment.shard(value, key)
            elif fragment.start == 0 and value is not None:  # a step count, written by the rank with the first element
                # Store float32, as torch's optimizers do. DeepSpeed's count in plain integers.
                exact = key.startswith(states.PREFIX)
                count = torch.as_tensor(value).to(None if exact else torch.float32, copy=True)
                yield whole_shard(f"{fragment.name}/{key}", count)

    def _unpartitioned_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the frozen parameters and persistent buffers."""
        return [(n, t) for n, t in named_tensors(self.assembly).items() if not t.requires_grad]

    def load(self, reader: StateReader, *, optimizer_state: bool) -> None:
        """Load masters, model and optionally the optimizer from a checkpoint. Each rank reads only its part.

        Raises:
            CheckpointError: the checkpoint does not fit. Nothing was changed.
        """
        check_names(self.assembly, reader, self.workers, optimizer=optimizer_state)
        for index, fragments in enumerate(self.fragments):
            with self.partition(index, write=True) as flat:
                if optimizer_state:
                    self.optimizer.optimizer.state[flat] = self._read_state(flat, fragments, reader)
                    optimizer, group = self.optimizer.optimizer, self._group(index)
                    values = states.read_group(optimizer, group, [f.name for f in fragments], reader)
                    optimizer.param_groups[group].update(values)
                load_weights((fragment.shard(flat) for fragment in fragments), reader)
        for name, tensor in self._unpartitioned_tensors():
            with self._gather_unpartitioned(tensor, write=True) as whole:
                load_weights([whole_shard(name, whole.detach())], reader)
        self._copy_to_model()

    def restore_masters(self, masters: Masters) -> None:
        """Copy the exact values into DeepSpeed's masters, which it has made from the cast parameters."""
        for index, fragments in enumerate(self.fragments if masters else ()):
            with self.partition(index, write=True) as flat:
                for fragment in fragments:
                    if fragment.name in masters:
                        first, values = masters[fragment.name]
                        fragment.of(flat).copy_(values[fragment.start - first :][: fragment.count])

    def exchange_averages(self) -> None:
        """Swap the averages with the masters, and update the model."""
        for index in range(len(self.fragments)):
            with self.partition(index, write=True) as flat:
                states.exchange_with_average(flat, self.optimizer.optimizer.state.get(flat, {}))
        self._copy_to_model()

    def _read_state(self, flat: torch.Tensor, fragments: list[Fragment], reader: StateReader) -> dict[str, Any]:
        """Read the optimizer state of a flat partition. Existing tensors are overwritten in place."""
        saved, state = reader.names("optimizer"), dict(self.optimizer.optimizer.state.get(flat, {}))
        names, weights = {f.name for f in fragments}, reader.names("weights")
        parts = {entry: entry.rpartition("/") for entry in saved}
        keys = {key for name, _, key in parts.values() if name in names}
        # One number for a parameter, and not one for each of its elements.
        scalars = {key for entry, (name, _, key) in parts.items() if saved[entry] == () and weights.get(name)}
        per_parameter, _ = states.split_keys(self.optimizer.optimizer, sorted(keys))
        states.check_count(self.optimizer.optimizer, ", ".join(sorted(names)[:2]), sorted(keys))
        for key in per_parameter:
            saved_fragments = [f for f in fragments if f"{f.name}/{key}" in saved]
            if key == states.COUNT or key in scalars:
                # Each parameter has this value, but a flat partition has it only once.
                hint = "ZeRO has one for many parameters; continue without ZeRO, or freeze what is not always trained"
                count = states.read_shared_value(reader, key, [f.name for f in saved_fragments], hint)
                # DeepSpeed's own optimizers count in plain integers, torch's in tensors.
                state[key] = int(count) if type(self.optimizer.optimizer).__module__.startswith("deepspeed") else count
                continue
            if key not in state:
                state[key] = torch.zeros_like(flat, requires_grad=False)
            for f in saved_fragments:
                f.shard(state[key]).fill(partial(reader.read, "optimizer", f"{f.name}/{key}"))
            if key == states.AVERAGE:  # a parameter that no step has updated equals its average
                load_weights((f.shard(state[key]) for f in fragments if f not in saved_fragments), reader)
        return state

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole weight) on the host of rank 0. Other ranks only take part in the gathering."""
        for name, tensor in named_tensors(self.assembly).items():
            trained = tensor.requires_grad
            with nullcontext(self._gather_trained(tensor)) if trained else self._gather_unpartitioned(tensor) as whole:
                if self.workers.is_main:
                    yield name, whole.detach().cpu()


class FlatGroups(ZeroState):
    """ZeRO-1 and ZeRO-2: each group of parameters is flattened and divided into one part per worker."""

    hook = "process_gradients"

    def __init__(self, optimizer: Any, assembly: Assembly, workers: Workers) -> None:
        super().__init__(optimizer, assembly, workers)
        self._group_of = {id(p): number for number, group in enumerate(optimizer.bit16_groups) for p in group}
        for group in optimizer.bit16_groups:
            mapped = [(p, p._hp_mapping) for p in group if p._hp_mapping is not None]
            parts = [(p, m.lp_fragment_address, m.hp_fragment_address.start) for p, m in mapped]
            self.fragments.append(
                [Fragment(self.names[id(p)], tuple(p.shape), at.start, at.numel, offset) for p, at, offset in parts]
            )

    @property
    def masters(self) -> list[Any]:
        return self.optimizer.single_partition_of_fp32_groups

    def partition(self, index: int, *, write: bool) -> AbstractContextManager[torch.Tensor]:
        return nullcontext(self.masters[index])

    def _group(self, index: int) -> int:
        return index

    def _gradients_of(self, index: int) -> Mapping[str, torch.Tensor]:
        if self.optimizer.cpu_offload:
            accelerator.synchronize(self.workers.device)  # the copies to the host may still run
            flat = self.masters[index].grad
            return {fragment.name: fragment.of(flat) for fragment in self.fragments[index]}
        # Put end to end, these tensors and their padding have the layout of the flat partition.
        gradients = self.optimizer.averaged_gradients[index]
        offsets = accumulate((gradient.numel() for gradient in gradients), initial=0)
        by_offset = dict(zip(offsets, gradients, strict=False))
        return {fragment.name: by_offset[fragment.offset].flatten() for fragment in self.fragments[index]}

    def drop_gradients(self) -> None:
        from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

        self.optimizer.zero_grad()
        self.optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
        if self.optimizer.cpu_offload:
            self.optimizer.reset_cpu_buffers()
            return
        for gradients in (self.optimizer.averaged_gradients, self.optimizer.all_grad_tensors):
            for group in gradients:
                gradients[group] = None

    def _copy_to_model(self) -> None:
        self.optimizer.update_lp_params()

    def _reduce(self, parameter: Any, reduce: Callable[..., None]) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        reduce(parameter, self._group_of[id(parameter)])

    def _gather_trained(self, parameter: Any) -> torch.Tensor:
        return parameter.get_full_hp_param()


class PartitionedParameters(ZeroState):
    """ZeRO-3: each flattened parameter is divided into one part per worker. A part may be stored on a disk."""

    hook = "reduce_ready_partitions_and_remove_grads"

    def __init__(self, optimizer: Any, assembly: Assembly, workers: Workers) -> None:
        super().__init__(optimizer, assembly, workers)
        states.step_once(optimizer)
        for group in optimizer.fp16_groups:
            fragments, offset = [], 0
            for parameter in group:
                size = parameter.partition_numel()
                start = min(workers.rank * size, parameter.ds_numel)
                count = min(size, parameter.ds_numel - start)
                if count:
                    shape = shape_of(parameter)
                    fragments.append(Fragment(self.names[id(parameter)], shape, start, count, offset))
                offset += size
            self.fragments.append(fragments)

    @property
    def masters(self) -> list[Any]:
        return self.optimizer.fp32_partitioned_groups_flat

    @contextmanager
    def partition(self, index: int, *, write: bool) -> Iterator[torch.Tensor]:
        optimizer = self.optimizer
        on_disk = optimizer._swappable_optimizer_subgroup(index)
        if on_disk:
            optimizer._optimizer_states_and_gradient_swap_in(index)
        try:
            yield self.masters[index]
            if write:
                optimizer._reassign_or_swap_out_partitioned_parameters(index)
        finally:
            if on_disk and write:
                optimizer._optimizer_states_and_gradient_swap_out(index)
            elif on_disk:
                optimizer._release_swap_buffers(index)

    def _group(self, index: int) -> int:
        return int(self.optimizer.sub_group_to_group_id[index])

    def _gradients_of(self, index: int) -> Mapping[str, torch.Tensor]:
        from deepspeed.utils import safe_get_local_grad

        return {self.names[id(p)]: safe_get_local_grad(p) for p in self.optimizer.fp16_groups[index]}

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad()  # the next gradients replace these
        if self.optimizer.offload_optimizer:
            self.optimizer.reset_cpu_buffers()

    def forget_forward(self) -> None:
        # DeepSpeed records in which order a step uses parameters, and derives when to release each. From a forward
        # without a backward, it would derive that no parameter is needed again. It caches this by module and position,
        # keeps it after the record proves wrong, and then gathers every parameter twice.
        coordinator = self.optimizer.parameter_offload.get_param_coordinator()
        if coordinator.is_record_trace():
            coordinator._invalidate_trace()

    def shards(self, kind: ShardKind) -> Iterator[Shard]:
        if not self.optimizer.swap_optimizer:
            yield from super().shards(kind)
            return
        for shard in super().shards(kind):  # the next partition from the disk reuses this memory
            yield replace(shard, values=shard.values.clone())

    def _copy_to_model(self) -> None:
        kept_whole = self.optimizer.persistent_parameters
        self.optimizer.parameter_offload.partition_all_parameters()  # a forward may have left old values whole
        if kept_whole:
            kept_whole[0].partition(kept_whole, has_been_updated=False)
            kept_whole[0].all_gather(kept_whole)

    def _reduce(self, parameter: Any, reduce: Callable[..., None]) -> None:
        if parameter.grad is not None:
            reduce(parameter)
            return
        share = parameter.data
        parameter.data = share.new_zeros(parameter.ds_shape)  # a gradient must have the size of its parameter
        parameter.grad = parameter.data.clone()
        reduce(parameter)
        parameter.data = share

    def sequence_check(self) -> ForwardSequenceCheck | None:
        if self.workers.world == 1:
            return None
        from deepspeed.utils import z3_leaf_module

        within = {part: m for m in self.model.modules() if z3_leaf_module(m) for part in m.modules() if part is not m}
        modules, trained = {}, {}
        for name, module in self.model.named_modules():
            parameters = dict(module.named_parameters(recurse=z3_leaf_module(module)))
            if parameters and module not in within:
                modules[name] = module
                trained[name] = [canonical_name(f"{name}.{n}") for n, p in parameters.items() if p.requires_grad]
        return ForwardSequenceCheck(modules, trained, self.workers, "ZeRO-3")

    def _gather_trained(self, parameter: Any) -> torch.Tensor:
        return self.optimizer.get_full_hp_param(parameter)

    @contextmanager
    def _gather_unpartitioned(self, tensor: Any, *, write: bool = False) -> Iterator[torch.Tensor]:
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        with GatheredParameters([tensor], modifier_rank=0 if write else None, enabled=hasattr(tensor, "ds_id")):
            yield tensor
