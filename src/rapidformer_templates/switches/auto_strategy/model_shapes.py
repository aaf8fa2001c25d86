"""Shapes of a model: its parameters, its blocks, and the memory of a micro batch. It has no data and no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import nn

from rapidformer_templates.engines.assembly import Assembly
from rapidformer_templates.engines.parallel.buckets import Bucket, bucket_size_for, buckets_by_key
from rapidformer_templates.engines.parallel.replicas import cast_to_compute_dtype, parameters_with_masters
from rapidformer_templates.engines.recipe import depth_of, depths_of, undecayed
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.blocks import bytes_of, canonical_name, is_quantized, shape_of, tables_of, width_of
from rapidformer_templates.planning.balance import balanced_cut
from rapidformer_templates.planning.optimizer_states import BF16, FP32, ParameterShape
from rapidformer_templates.planning.plan import ContextKind
from rapidformer_templates.switches.auto_strategy.layouts import RECOMPUTED
from rapidformer_templates.switches.auto_strategy.stand_ins import (
    FakeDataReads,
    divide,
    divide_sequences,
    ends_of,
    fake_tensors,
    local_parameters,
    silent_group,
)
from rapidformer_templates.switches.auto_strategy.trace import TRACED_BLOCKS, Trace
from rapidformer_templates.switches.auto_strategy.tracing import (
    Batch,
    MeanLoss,
    gradient_bytes,
    in_forks,
    loss_of_model,
    stacks_of,
    trace,
    without_warnings,
)
from rapidformer_templates.switches.mixture_of_experts.layer import Experts, own_experts

TRACED_SAMPLES = (2, 4)
"""Micro-batch sizes to trace if the exact one is not needed. Not 1, because dimensions of size 1 save copies."""

COMPUTE_TYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SUM_TYPES = {FP32: torch.float32, BF16: torch.bfloat16}


@dataclass(frozen=True)
class Variant:
    """Everything that the memory of a micro batch depends on, except the model.

    Attributes:
        micro_batch: samples.
        recompute: one of ``layouts.RECOMPUTED``.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        weights: ``fp32``, ``narrow`` or ``masters``. With ``narrow``, all parameters have the type of ``precision``, as
            ZeRO and FSDP have them. With ``masters``, all parameters except norms have that type, plus fp32 masters.
        tensor: workers that share each block's matrices.
        sequence_parallel: whether these workers divide the other activations along the sequence.
        sums: with masters, bytes per element of the gradient sums.
        offload: whether activations that the blocks keep go to the host.
        context: workers that share each sequence.
        context_kind: how attention covers the whole sequence. None: the number of heads decides.
    """

    micro_batch: int
    recompute: str = "none"
    precision: str = "fp32"
    weights: str = "fp32"
    tensor: int = 1
    sequence_parallel: bool = False
    sums: int = FP32
    offload: bool = False
    context: int = 1
    context_kind: ContextKind | None = None


@dataclass(frozen=True)
class Coordinates:
    """Position of a worker in a replica: its stage, and its rank among the workers that share each block's matrices.

    Attributes:
        parts: runs of blocks of this worker, each as (first block, end). Interleaved stages have several.
        experts: number of workers that hold one copy of the experts together.
    """

    tensor: int
    pipeline: int
    stage: int
    parts: tuple[tuple[int, int], ...]
    peer: int = 0
    experts: int = 1


class _GradientKey(NamedTuple):
    """Key of parameters that may share a bucket. See :class:`GradientBucket` for the fields."""

    has_masters: bool
    ends: frozenset[str]
    part: int
    over: int


class GradientBucket(NamedTuple):
    """A bucket of gradients that replicas exchange.

    Attributes:
        has_masters: whether its parameters have 16 bits and fp32 masters.
        is_tied: whether other stages have copies of its parameters.
        part: the part of the worker whose backward completes it.
        over: number of workers that one copy of its parameters is divided over.
    """

    bucket: Bucket
    has_masters: bool
    is_tied: bool
    part: int
    over: int = 1

    @property
    def first(self) -> int:
        """Index of its first parameter in the model, which is the last to get its gradient."""
        return min(segment.parameter for segment in self.bucket.segments)

    def share_of(self, replica: int) -> int:
        """Elements that the worker of a replica sums and updates, including padding.

        ``over`` neighbours share one copy.
        """
        return self.bucket.share_of(replica // self.over)


@dataclass(eq=False)  # stages and states are stored by model
class ModelShapes:
    """Everything that the planner knows about a model.

    Attributes:
        build: builds the model with the given number of blocks in each stack, or with all of them for None.
        batch: builds a micro batch with the given number of samples.
        gpu: whether the model will run on a GPU.
        stages: blocks of each pipeline stage, if the user has set them.
        has_copy: whether there is also a frozen copy of the model, divided in the same way.
        compute_loss: computes the loss of a micro batch.
    """

    build: Callable[[int | None], Assembly]
    batch: Callable[[int], Batch]
    gpu: bool = False
    stages: Sequence[int] | None = None
    has_copy: bool = False
    compute_loss: MeanLoss = loss_of_model
    _traces: dict[Variant, Trace] = field(default_factory=dict)
    _whole_traces: dict[tuple[Variant, int | None, bool], Trace] = field(default_factory=dict)
    _gradients: dict[Variant, dict[str, int]] = field(default_factory=dict)
    _local: dict[tuple[int, int], dict[str, ParameterShape]] = field(default_factory=dict)
    _sizes: dict[int, list[int]] = field(default_factory=dict)
    _stages: dict[Coordinates, dict[str, ParameterShape]] = field(default_factory=dict)
    _buckets: dict[tuple[Coordinates, int, bool, bool], list[GradientBucket]] = field(default_factory=dict)
    _runs: dict[tuple[Coordinates, int, bool, bool, int], list[ParameterShape]] = field(default_factory=dict)

    @cached_property
    def whole(self) -> nn.Module:
        """The full model on the meta device."""
        with torch.device("meta"):
            return self.build(None).model

    @cached_property
    def all_parameters(self) -> dict[str, ParameterShape]:
        """Trained and frozen parameters by canonical name. Tied parameters appear once."""
        own_mixtures = (module for module in self.whole.modules() if isinstance(module, Experts))
        mixtures = [*own_mixtures, *own_experts(self.whole)]
        experts = {id(parameter) for mixture in mixtures for parameter in mixture.parameters()}
        tables, depths = tables_of(self.whole), depths_of(self.whole)
        with_masters = parameters_with_masters(self.whole)
        return {
            name: ParameterShape(
                shape_of(p),
                not undecayed(name, p),
                is_table=name in tables,
                is_expert=id(p) in experts,
                is_trained=p.requires_grad,
                width=p.element_size(),
                code_bytes=bytes_of(p) if is_quantized(p) else 0,
                depth=depth_of(name, depths),
                has_master=id(p) in with_masters,
            )
            for name, p in ((canonical_name(name), p) for name, p in self.whole.named_parameters())
        }

    @cached_property
    def parameters(self) -> dict[str, ParameterShape]:
        """Trained parameters by canonical name."""
        return {name: facts for name, facts in self.all_parameters.items() if facts.is_trained}

    @cached_property
    def width(self) -> int:
        """Width of the model. Bucket sizes depend on it."""
        return width_of(self.whole)

    @property
    def bucket_size(self) -> int:
        """Elements of a bucket of gradients."""
        return bucket_size_for(self.width, "accelerator" if self.gpu else "cpu")

    @cached_property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(tensor.nbytes for tensor in self.whole.buffers())

    @cached_property
    def blocks(self) -> dict[str, tuple[str, int]]:
        """Stack and index in the stack of each block, by block name."""
        return stacks_of(self.whole)

    @cached_property
    def depths(self) -> Mapping[str, int]:
        """Number of blocks in each stack."""
        counts: dict[str, int] = {}
        for stack, _ in self.blocks.values():
            counts[stack] = counts.get(stack, 0) + 1
        return counts

    @cached_property
    def block_elements(self) -> dict[str, int]:
        """Elements of the parameters of each block. A parameter that two blocks share counts in the first one."""
        return self.by_block({name: facts.count for name, facts in self.all_parameters.items()})

    def by_block(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Sum the sizes of parameters by block."""
        sums = dict.fromkeys(self.blocks, 0)
        for name, size in sizes.items():
            home = self.block_of(name)
            if home:
                sums[home] += size
        return sums

    def block_of(self, name: str) -> str | None:
        """Return the block that contains a parameter, or None."""
        return self._block_of.get(name)

    @cached_property
    def _block_of(self) -> dict[str, str]:
        homes = {}
        for name in self.all_parameters:
            parts = name.split(".")
            outer = (".".join(parts[:depth]) for depth in range(1, len(parts)))
            home = next((block for block in outer if block in self.blocks), None)
            if home:
                homes[name] = home
        return homes

    def names_of(self, name: str) -> list[str]:
        """Return all names of a parameter, which may be tied."""
        return self._names.get(name, [name])

    @cached_property
    def _names(self) -> dict[str, list[str]]:
        names: dict[int, list[str]] = {}
        for name, parameter in self.whole.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(canonical_name(name))
        return {same[0]: same for same in names.values()}

    def most_in_a_block(self, parameters: Mapping[str, ParameterShape], experts: int, width: int) -> int:
        """Return the highest number of bytes of these parameters in a block.

        Args:
            experts: number of workers that the experts are divided over.
            width: bytes per element, except of codes.
        """
        local = {name: facts.among(experts).bytes_in(width) for name, facts in parameters.items()}
        return max(self.by_block(local).values(), default=0)

    def outside_blocks(self, width: int) -> int:
        """Return the bytes outside the blocks, with ``width`` bytes per element: embeddings, last norm, head."""
        return sum(facts.bytes_in(width) for name, facts in self.all_parameters.items() if not self.block_of(name))

    @cached_property
    def repeats(self) -> bool:
        """Whether the blocks of each stack are equal, so that a trace of three blocks is enough."""
        if not self.depths or min(self.depths.values()) <= TRACED_BLOCKS:
            return False
        kinds: dict[str, set[object]] = {}
        for name, (stack, number) in self.blocks.items():
            block = self.whole.get_submodule(name)
            shapes = tuple(tuple(p.shape) for p in block.parameters())
            # The first block may have more, such as T5's table of relative positions.
            kinds.setdefault(stack, set()).update({(type(block), shapes)} if number else set())
        return all(len(alike) == 1 for alike in kinds.values())

    def trace(self, variant: Variant, blocks: int | None = None, *, exact: bool = True) -> Trace:
        """Return the phases of a micro batch through the whole model, or through a model with ``blocks`` blocks.

        Args:
            exact: whether to trace exactly this micro batch. Otherwise, derive it from traces of ``TRACED_SAMPLES``.

        Raises:
            ModelError: the model cannot be divided over the tensor-parallel workers.
        """
        key = (variant, blocks, exact)
        if key not in self._whole_traces:
            traced = self._traced(variant) if exact else self._between(variant)
            if self.repeats or blocks:
                depths = self.depths if blocks is None else dict.fromkeys(self.depths, blocks)
                traced = traced.with_depths(depths, self._gradients[_of_model(variant)])
            self._whole_traces[key] = traced
        return self._whole_traces[key]

    def prepare(self, variants: Iterable[Variant]) -> None:
        """Trace in parallel what inexact predictions for these variants need. Other variants are traced on demand."""
        together = {replace(variant, micro_batch=TRACED_SAMPLES[0], recompute="none") for variant in variants}

        def traced_apart(variant: Variant) -> tuple[dict[Variant, Trace], dict[Variant, dict[str, int]]]:
            known = set(self._traces)
            self._traced(variant)
            return {each: self._traces[each] for each in self._traces if each not in known}, self._gradients

        missing = sorted(together - set(self._traces), key=lambda variant: variant.tensor)
        tasks = [partial(traced_apart, variant) for variant in missing]
        for traces, gradients in in_forks(tasks):
            self._traces.update(traces)
            self._gradients.update(gradients)

    def _between(self, variant: Variant) -> Trace:
        one, other = (self._traced(replace(variant, micro_batch=samples)) for samples in TRACED_SAMPLES)
        return one.at(variant.micro_batch, other, TRACED_SAMPLES)

    def _traced(self, variant: Variant) -> Trace:
        if variant not in self._traces:
            # Trace variants that are compared with one another on one model: building and dividing it takes as long.
            together = [replace(variant, micro_batch=n, recompute=r) for n in TRACED_SAMPLES for r in RECOMPUTED]
            self._trace(together if variant in together else [variant])
        return self._traces[variant]

    def _trace(self, variants: Sequence[Variant]) -> None:
        """Trace variants that differ only in micro-batch size and recomputation."""
        of_all = variants[0]
        compute_type = COMPUTE_TYPES[of_all.precision]
        with silent_group(of_all.tensor, of_all.context) as workers, fake_tensors():
            assembly = self.build(TRACED_BLOCKS if self.repeats else None)
            model = assembly.model.train()
            if compute_type is not None and of_all.weights != "fp32":
                with_masters = parameters_with_masters(model)
                for parameter in model.parameters():
                    is_narrow = of_all.weights == "narrow" and parameter.is_floating_point()
                    if is_narrow or (of_all.weights == "masters" and id(parameter) in with_masters):
                        cast_to_compute_dtype(parameter, compute_type)
            divide(assembly, workers, sequence_parallel=of_all.sequence_parallel)
            divide_sequences(assembly, workers, of_all.context_kind)
            sum_type = SUM_TYPES[of_all.sums] if of_all.weights == "masters" else None
            self._gradients[_of_model(of_all)] = gradient_bytes(model, sum_type)
            for variant in variants:
                self._traces[variant] = trace(
                    model,
                    self.batch(variant.micro_batch),
                    compute_type=compute_type,
                    sum_type=sum_type,
                    recompute=variant.recompute,
                    offload=variant.offload,
                    gpu=self.gpu,
                    compute_loss=self.compute_loss,
                )

    def local_parameters(self, tensor: int, peer: int = 0) -> dict[str, ParameterShape]:
        """Return all parameters as worker ``peer`` of ``tensor`` workers has them.

        The first worker has the largest shares.

        Raises:
            ModelError: the model cannot be divided in this way.
        """
        if (tensor, peer) not in self._local:
            self._local[tensor, peer] = local_parameters(self.whole, self.all_parameters, tensor, peer)
        return self._local[tensor, peer]

    def stage_sizes(self, pipeline: int) -> list[int]:
        """Return the number of blocks of each stage.

        The engine balances stages by parameters unless the user sets them.

        Raises:
            ModelError: the model cannot be cut into stages.
        """
        if self.stages is not None and len(self.stages) == pipeline:
            return list(self.stages)
        if pipeline not in self._sizes:
            front, blocks, back = self.stage_elements
            if pipeline > len(blocks):
                raise ModelError(f"{len(blocks)} blocks cannot be cut into {pipeline} stages")
            self._sizes[pipeline] = balanced_cut(front, blocks, back, pipeline)
        return self._sizes[pipeline]

    @cached_property
    def stage_elements(self) -> tuple[float, list[float], float]:
        """Elements that only the first stage has, elements of each block, and elements that only the last stage has.

        Raises:
            ModelError: the model cannot be cut into stages.
        """
        outside = [name for name in self.all_parameters if self.block_of(name) is None]
        front, back = (
            float(sum(self.all_parameters[name].count for name in outside if end in self.ends_of(name)))
            for end in ("first", "last")
        )
        return front, [float(count) for count in self.block_elements.values()], back

    def stage_parameters(self, coordinates: Coordinates) -> dict[str, ParameterShape]:
        """Return the trained parameters of a worker of a stage, by name and in the model's order.

        Raises:
            ModelError: the model cannot be divided or cut in this way.
        """
        return {name: facts for name, facts in self.everything_of_stage(coordinates).items() if facts.is_trained}

    def stage_frozen(self, coordinates: Coordinates) -> list[ParameterShape]:
        """Return the frozen parameters of a worker of a stage."""
        return self.frozen_of(self.everything_of_stage(coordinates).values())

    def frozen_of(self, parameters: Iterable[ParameterShape]) -> list[ParameterShape]:
        """Return the frozen ones of some parameters, plus all of them again if there is a frozen copy of the model."""
        shapes = list(parameters)
        return [facts for facts in shapes if not facts.is_trained] + (shapes if self.has_copy else [])

    def everything_of_stage(self, coordinates: Coordinates) -> dict[str, ParameterShape]:
        rank = coordinates.stage
        end = "first" if rank == 0 else "last" if rank == coordinates.pipeline - 1 else "middle"

        def is_here(name: str) -> bool:
            if coordinates.pipeline == 1:
                return True
            if self.block_of(name) is None:
                return end in self.ends_of(name)
            return self._part_in(coordinates, name) is not None

        if coordinates not in self._stages:
            whole = self.local_parameters(coordinates.tensor, coordinates.peer)
            local = {name: facts.among(coordinates.experts) for name, facts in whole.items() if is_here(name)}
            self._stages[coordinates] = local
        return self._stages[coordinates]

    def _part_in(self, coordinates: Coordinates, name: str) -> int | None:
        """Return the worker's part that contains a block's parameter."""
        block = self.block_of(name)
        number = None if block is None else self.blocks[block][1]
        parts = enumerate(coordinates.parts)
        return next((part for part, (begin, end) in parts if number is not None and begin <= number < end), None)

    def part_of(self, coordinates: Coordinates, name: str) -> int:
        """Return the index of the first of the worker's parts that has a parameter."""
        if coordinates.pipeline > 1 and self.block_of(name) is None:
            return len(coordinates.parts) - 1 if self.ends_of(name) == {"last"} else 0
        return self._part_in(coordinates, name) or 0

    def buckets(
        self, coordinates: Coordinates, data: int, *, masters: bool, whole: bool = False
    ) -> list[GradientBucket]:
        """Return the buckets that a worker of a stage exchanges with other replicas, in sending order.

        Parameters that several stages have, 16-bit parameters and experts are in separate buckets.

        Args:
            masters: whether some parameters have 16 bits and fp32 masters.
            whole: whether each parameter has a single owner, as an update of whole parameters needs.
        """
        key, limit = (coordinates, data, masters, whole), self.bucket_size
        if key not in self._buckets:
            own = list(self.stage_parameters(coordinates).items())
            kinds: dict[_GradientKey, list[tuple[int, int]]] = {}
            for index, (name, facts) in reversed(list(enumerate(own))):
                ends = self.ends_of(name) if coordinates.pipeline > 1 else frozenset[str]()
                shared = ends if len(ends) > 1 else frozenset[str]()
                over = coordinates.experts if facts.is_expert else 1
                kind = _GradientKey(masters and facts.has_master, shared, self.part_of(coordinates, name), over)
                if not self._is_unshared(facts, coordinates, data):
                    kinds.setdefault(kind, []).append((index, facts.count))
            for sizes in (sizes for kind, sizes in kinds.items() if kind.ends):
                sizes.sort(key=lambda size: own[size[0]][0])
            of_kinds = buckets_by_key(
                kinds, limit, ranks=lambda kind: data // kind.over, whole=whole, is_tied=lambda kind: bool(kind.ends)
            )
            buckets = [
                GradientBucket(bucket, kind.has_masters, bool(kind.ends), kind.part, kind.over)
                for bucket, kind in of_kinds.items()
            ]
            self._buckets[key] = sorted(buckets, key=lambda each: (each.is_tied, -each.first))
        return self._buckets[key]

    def runs(
        self, coordinates: Coordinates, data: int, replica: int, *, masters: bool, whole: bool = False
    ) -> list[ParameterShape]:
        """Return the pieces, or whole parameters, that the optimizer of a replica updates if its state is sharded."""
        key = (coordinates, data, masters, whole, replica)
        if key not in self._runs:
            own = list(self.stage_parameters(coordinates).values())
            shared = [
                replace(own[run.parameter], has_master=each.has_masters)
                if whole
                else ParameterShape((run.length,), decays=True, has_master=each.has_masters)
                for each in self.buckets(coordinates, data, masters=masters, whole=whole)
                for run, _ in each.bucket.owned(replica // each.over)
            ]
            self._runs[key] = [*shared, *self.unshared(own, coordinates, data)]
        return self._runs[key]

    def unshared(self, trained: Iterable[ParameterShape], coordinates: Coordinates, data: int) -> list[ParameterShape]:
        """Return the parameters that no other replica has: experts that are divided over all workers."""
        return [facts for facts in trained if self._is_unshared(facts, coordinates, data)]

    @staticmethod
    def _is_unshared(facts: ParameterShape, coordinates: Coordinates, data: int) -> bool:
        return facts.is_expert and 1 < coordinates.experts == data

    def ends_of(self, name: str) -> frozenset[str]:
        """Return the stages that have a parameter outside the blocks, under any of its names."""
        return frozenset().union(*(self.ends.get(other, frozenset()) for other in self.names_of(name)))

    @property
    def ends(self) -> dict[str, frozenset[str]]:
        """Stages that have each parameter outside the blocks. Each of its names is a key.

        Raises:
            ModelError: the model cannot be cut into stages.
        """
        if isinstance(self._ends, ModelError):
            raise self._ends.with_traceback(None)
        return self._ends

    @cached_property
    def _ends(self) -> dict[str, frozenset[str]] | ModelError:
        with fake_tensors(), without_warnings():
            model = self.build(min(TRACED_BLOCKS, max(self.depths.values(), default=0))).model.train()
            with FakeDataReads(dense=True):
                try:
                    return ends_of(model, lambda model: self.compute_loss(model, self.batch(1)))
                except ModelError as error:
                    return error


def _of_model(variant: Variant) -> Variant:
    """Reduce a variant to the fields that the bytes of gradients depend on."""
    return replace(variant, micro_batch=1, recompute="none", sequence_parallel=False)
