"""A model by its shapes: its parameters, its blocks, and what a micro batch of it takes. No data, no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import nn

from rapidformer_templates.engines.layerwise_rates import depth_of, depths_of
from rapidformer_templates.engines.parallel.narrowing import narrow, narrowed_parameters
from rapidformer_templates.engines.parallel.windows import Window, window_for, windows_of_kinds
from rapidformer_templates.models.blocks import bytes_of, canonical_name, lies_in_codes, shape_of
from rapidformer_templates.models.width import width_of
from rapidformer_templates.planning.balance import balanced_cut
from rapidformer_templates.switches.auto_strategy.answers import AnswersAboutData
from rapidformer_templates.switches.auto_strategy.fake_tensors import fake_tensors
from rapidformer_templates.switches.auto_strategy.in_processes import in_forks
from rapidformer_templates.switches.auto_strategy.layouts import RECOMPUTED
from rapidformer_templates.switches.auto_strategy.optimizer_states import BF16, FP32, Facts
from rapidformer_templates.switches.auto_strategy.tensor_shares import (
    divide,
    divide_sequences,
    ends_of,
    local_parameters,
    silent_group,
)
from rapidformer_templates.switches.auto_strategy.trace import (
    TRACED_BLOCKS,
    Batch,
    Trace,
    gradient_bytes,
    stacks_of,
    trace,
    without_warnings,
)
from rapidformer_templates.switches.mixture_of_experts.experts import Experts
from rapidformer_templates.switches.mixture_of_experts.transformers_mixtures import own_experts
from rapidformer_templates.switches.optimizer.muon import tables_of

TRACED_SAMPLES = (2, 4)
"""Micro batches that are traced where the exact one need not be. Not one sample: dimensions of one spare copies."""

COMPUTE_TYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SUM_TYPES = {FP32: torch.float32, BF16: torch.bfloat16}


@dataclass(frozen=True)
class Variant:
    """What the memory of a micro batch depends on besides the model.

    Attributes:
        micro_batch: samples.
        recompute: one of ``layouts.RECOMPUTED``.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        weights: ``fp32``; ``narrow``, of that type themselves, as ZeRO and FSDP have them; or ``masters``, of that
            type but for norms, beside fp32 masters.
        tensor: workers that share each block's matrices.
        sequence_parallel: whether they share the rest along the sequence.
        sums: with masters, bytes of a number of the sums of gradients.
        offload: whether what the blocks keep goes to the host.
        context: workers that share each sequence.
        context_kind: how attention sees it whole; None where the heads say so.
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
    context_kind: str | None = None


@dataclass(frozen=True)
class Coordinates:
    """A worker's part of a replica: its stage, and its rank among those who share each block's matrices.

    Attributes:
        parts: its runs of blocks, each from one number up to the other; several where stages are interleaved.
        experts: workers that have one copy of the experts together.
    """

    tensor: int
    pipeline: int
    stage: int
    parts: tuple[tuple[int, int], ...]
    peer: int = 0
    experts: int = 1


class _Kind(NamedTuple):
    """What parameters have in common that may lie in one window: see :class:`Exchanged`."""

    narrow: bool
    ends: frozenset[str]
    part: int
    over: int


class Exchanged(NamedTuple):
    """A window of gradients.

    Attributes:
        narrow: whether its parameters are of 16 bits, with masters.
        is_tied: whether other stages have copies of them.
        part: of the worker's parts the one whose backward completes it.
        over: workers that one copy of them is divided over.
    """

    window: Window
    narrow: bool
    is_tied: bool
    part: int
    over: int = 1

    @property
    def first(self) -> int:
        """The place of its first parameter in the model, the last to get its gradient."""
        return min(segment.parameter for segment in self.window.segments)

    def share_of(self, replica: int) -> int:
        """Elements that the worker of a replica sums and updates, with padding; neighbours share one copy."""
        return self.window.share_of(replica // self.over)


@dataclass
class ModelShapes:
    """What the planner knows of a model.

    Attributes:
        build: the model with so many blocks in each stack; None for all of them.
        batch: a micro batch of so many samples.
        gpu: whether it will run on a GPU.
        stages: blocks of each pipeline stage, where the user has said so.
        has_copy: whether a frozen copy of it stands beside it, divided as it is.
    """

    build: Callable[[int | None], nn.Module]
    batch: Callable[[int], Batch]
    gpu: bool = False
    stages: Sequence[int] | None = None
    has_copy: bool = False
    _traces: dict[Variant, Trace] = field(default_factory=dict)
    _whole_traces: dict[tuple[Variant, int | None, bool], Trace] = field(default_factory=dict)
    _gradients: dict[Variant, dict[str, int]] = field(default_factory=dict)
    _local: dict[tuple[int, int], dict[str, Facts]] = field(default_factory=dict)
    _sizes: dict[int, list[int]] = field(default_factory=dict)
    _stages: dict[Coordinates, dict[str, Facts]] = field(default_factory=dict)
    _windows: dict[tuple[Coordinates, int, bool, bool], list[Exchanged]] = field(default_factory=dict)
    _runs: dict[tuple[Coordinates, int, bool, bool, int], list[Facts]] = field(default_factory=dict)

    @cached_property
    def whole(self) -> nn.Module:
        """The model on the meta device."""
        with torch.device("meta"):
            return self.build(None)

    @cached_property
    def all_parameters(self) -> dict[str, Facts]:
        """Trained and frozen parameters by canonical name; tied ones once."""
        tables, experts, depths = tables_of(self.whole), _expert_parameters(self.whole), depths_of(self.whole)
        narrowed = narrowed_parameters(self.whole)
        return {
            name: Facts(
                shape_of(p),
                p.ndim >= 2,
                is_table=name in tables,
                is_expert=id(p) in experts,
                is_trained=p.requires_grad,
                width=p.element_size(),
                code_bytes=bytes_of(p) if lies_in_codes(p) else 0,
                depth=depth_of(name, depths),
                narrows=id(p) in narrowed,
            )
            for name, p in ((canonical_name(name), p) for name, p in self.whole.named_parameters())
        }

    @cached_property
    def parameters(self) -> dict[str, Facts]:
        """The trained ones."""
        return {name: facts for name, facts in self.all_parameters.items() if facts.is_trained}

    @cached_property
    def width(self) -> int:
        """What the sizes of buckets follow."""
        return width_of(self.whole)

    @cached_property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(tensor.nbytes for tensor in self.whole.buffers())

    @cached_property
    def blocks(self) -> dict[str, tuple[str, int]]:
        """The blocks by name: the stack that each stands in, and its number there."""
        return stacks_of(self.whole)

    @cached_property
    def depths(self) -> Mapping[str, int]:
        """How many blocks each stack has."""
        counts: dict[str, int] = {}
        for stack, _ in self.blocks.values():
            counts[stack] = counts.get(stack, 0) + 1
        return counts

    @cached_property
    def block_elements(self) -> dict[str, int]:
        """Elements of the parameters of each block; a parameter that two blocks share counts in the first."""
        return self._by_block(self.all_parameters)

    def _by_block(self, parameters: Mapping[str, Facts]) -> dict[str, int]:
        elements = dict.fromkeys(self.blocks, 0)
        for name, facts in parameters.items():
            home = self.block_of(name)
            if home:
                elements[home] += facts.count
        return elements

    def block_of(self, name: str) -> str | None:
        """The block that a parameter is in."""
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
        """Every name of a parameter, which may be tied."""
        return self._names.get(name, [name])

    @cached_property
    def _names(self) -> dict[str, list[str]]:
        names: dict[int, list[str]] = {}
        for name, parameter in self.whole.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(canonical_name(name))
        return {same[0]: same for same in names.values()}

    def largest_block(self, experts: int = 1) -> int:
        """Elements of the largest block, of its experts a share of those of so many workers."""
        return self._most_in_a_block(self.all_parameters, experts)

    def most_trained_in_a_block(self, experts: int = 1) -> int:
        """Trained elements of the block that has most of them."""
        return self._most_in_a_block(self.parameters, experts)

    def _most_in_a_block(self, parameters: Mapping[str, Facts], experts: int) -> int:
        here = {name: facts.among(experts) for name, facts in parameters.items()}
        return max(self._by_block(here).values(), default=0)

    @cached_property
    def outside_blocks(self) -> int:
        """Elements of what stands in no block: embeddings, last norm, head."""
        return sum(facts.count for facts in self.all_parameters.values()) - sum(self.block_elements.values())

    @cached_property
    def repeats(self) -> bool:
        """Whether the blocks of a stack are alike, so that three of them tell of all."""
        if not self.depths or min(self.depths.values()) <= TRACED_BLOCKS:
            return False
        kinds: dict[str, set[object]] = {}
        for name, (stack, number) in self.blocks.items():
            block = self.whole.get_submodule(name)
            shapes = tuple(tuple(p.shape) for p in block.parameters())
            # A first block may have more, such as the table of T5's relative positions.
            kinds.setdefault(stack, set()).update({(type(block), shapes)} if number else set())
        return all(len(alike) == 1 for alike in kinds.values())

    def trace(self, variant: Variant, blocks: int | None = None, *, exact: bool = True) -> Trace:
        """The phases of a micro batch through the whole model, or through one with so many blocks.

        Args:
            exact: whether the very micro batch is traced; otherwise it follows from ``TRACED_SAMPLES``.

        Raises:
            ModelError: the model cannot be divided over the tensor-parallel workers.
        """
        key = (variant, blocks, exact)
        if key not in self._whole_traces:
            traced = self._traced(variant) if exact else self._between(variant)
            if self.repeats or blocks:
                depths = self.depths if blocks is None else dict.fromkeys(self.depths, blocks)
                traced = traced.deepened(depths, self._gradients[_of_model(variant)])
            self._whole_traces[key] = traced
        return self._whole_traces[key]

    def prepare(self, variants: Iterable[Variant]) -> None:
        """Trace at one time what inexact predictions for these take; otherwise each is when it is asked for."""
        together = {replace(variant, micro_batch=TRACED_SAMPLES[0], recompute="none") for variant in variants}
        tasks = [partial(self._trace_apart, variant) for variant in together if variant not in self._traces]
        for traces, gradients in in_forks(tasks):
            self._traces.update(traces)
            self._gradients.update(gradients)

    def _trace_apart(self, variant: Variant) -> tuple[dict[Variant, Trace], dict[Variant, dict[str, int]]]:
        self._traced(variant)
        return self._traces, self._gradients

    def _between(self, variant: Variant) -> Trace:
        one, other = (self._traced(replace(variant, micro_batch=samples)) for samples in TRACED_SAMPLES)
        return one.at(variant.micro_batch, other, TRACED_SAMPLES)

    def _traced(self, variant: Variant) -> Trace:
        if variant not in self._traces:
            # Those that are compared with one another are traced on one model: to build and divide it takes as long.
            together = [replace(variant, micro_batch=n, recompute=r) for n in TRACED_SAMPLES for r in RECOMPUTED]
            self._trace(together if variant in together else [variant])
        return self._traces[variant]

    def _trace(self, variants: Sequence[Variant]) -> None:
        """Trace variants that differ in their batches and in recomputation only."""
        of_all = variants[0]
        compute_type = COMPUTE_TYPES[of_all.precision]
        with silent_group(of_all.tensor, of_all.context) as workers, fake_tensors():
            model = self.build(TRACED_BLOCKS if self.repeats else None).train()
            if compute_type is not None:
                _narrow(model, of_all.weights, compute_type)
            model = divide(model, workers, sequence_parallel=of_all.sequence_parallel)
            model = divide_sequences(model, workers, of_all.context_kind)
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
                )

    def local_parameters(self, tensor: int, peer: int = 0) -> dict[str, Facts]:
        """All parameters as ``tensor`` workers share them: those of one of the workers; the first has most.

        Raises:
            ModelError: the model cannot be divided so.
        """
        if (tensor, peer) not in self._local:
            self._local[tensor, peer] = local_parameters(self.whole, self.all_parameters, tensor, peer)
        return self._local[tensor, peer]

    def stage_sizes(self, pipeline: int) -> list[int]:
        """Blocks of each stage, as the engine cuts them: by the number of parameters.

        Raises:
            ModelError: the model cannot be cut into stages.
        """
        if self.stages is not None and len(self.stages) == pipeline:
            return list(self.stages)
        if pipeline not in self._sizes:
            self._sizes[pipeline] = balanced_cut(*self.stage_elements, pipeline)
        return self._sizes[pipeline]

    @cached_property
    def stage_elements(self) -> tuple[float, list[float], float]:
        """Elements of what only the first stage has, of each block, and of what only the last stage has.

        Raises:
            ModelError: the model cannot be cut into stages.
        """
        outside = [name for name in self.all_parameters if self.block_of(name) is None]
        front, back = (
            float(sum(self.all_parameters[name].count for name in outside if end in self.ends_of(name)))
            for end in ("first", "last")
        )
        return front, [float(count) for count in self.block_elements.values()], back

    def stage_parameters(self, coordinates: Coordinates) -> dict[str, Facts]:
        """What a worker of a stage has of the trained parameters, by name and in the model's order.

        Raises:
            ModelError: the model cannot be divided or cut so.
        """
        return {name: facts for name, facts in self._everything_of_stage(coordinates).items() if facts.is_trained}

    def stage_frozen(self, coordinates: Coordinates) -> list[Facts]:
        """What a worker of a stage has of the others."""
        return self.frozen_of(self._everything_of_stage(coordinates).values())

    def frozen_of(self, parameters: Iterable[Facts]) -> list[Facts]:
        """Those of some parameters that are not trained, and all of them in a frozen copy, if there is one."""
        mine = list(parameters)
        return [facts for facts in mine if not facts.is_trained] + (mine if self.has_copy else [])

    def _everything_of_stage(self, coordinates: Coordinates) -> dict[str, Facts]:
        if coordinates not in self._stages:
            self._stages[coordinates] = self._parameters_of_stage(coordinates)
        return self._stages[coordinates]

    def _parameters_of_stage(self, coordinates: Coordinates) -> dict[str, Facts]:
        whole = self.local_parameters(coordinates.tensor, coordinates.peer)
        local = {name: facts.among(coordinates.experts) for name, facts in whole.items()}
        if coordinates.pipeline == 1:
            return local
        rank = coordinates.stage
        end = "first" if rank == 0 else "last" if rank == coordinates.pipeline - 1 else "middle"

        def is_here(name: str) -> bool:
            if self.block_of(name) is None:
                return end in self.ends_of(name)
            return self._part_in(coordinates, name) is not None

        return {name: facts for name, facts in local.items() if is_here(name)}

    def _part_in(self, coordinates: Coordinates, name: str) -> int | None:
        """The part of a worker that a block's parameter is in."""
        block = self.block_of(name)
        number = None if block is None else self.blocks[block][1]
        parts = enumerate(coordinates.parts)
        return next((part for part, (begin, end) in parts if number is not None and begin <= number < end), None)

    def part_of(self, coordinates: Coordinates, name: str) -> int:
        """Of a worker's parts the one that has a parameter of this worker; the first of several."""
        if coordinates.pipeline > 1 and self.block_of(name) is None:
            return len(coordinates.parts) - 1 if self.ends_of(name) == {"last"} else 0
        return self._part_in(coordinates, name) or 0

    def windows(self, coordinates: Coordinates, data: int, *, masters: bool, whole: bool = False) -> list[Exchanged]:
        """What a worker of a stage exchanges at a time with the other replicas, in the order in which it leaves.

        Parameters that several stages have lie in windows of their own, and so do those of 16 bits, and experts.

        Args:
            masters: whether there are such, with fp32 masters.
            whole: whether each has one owner, as an update of whole parameters needs it.
        """
        key, limit = (coordinates, data, masters, whole), window_for(self.width)
        if key not in self._windows:
            own = list(self.stage_parameters(coordinates).items())
            kinds: dict[_Kind, list[tuple[int, int]]] = {}
            for index, (name, facts) in reversed(list(enumerate(own))):
                ends = self.ends_of(name) if coordinates.pipeline > 1 else frozenset[str]()
                shared = ends if len(ends) > 1 else frozenset[str]()
                over = coordinates.experts if facts.is_expert else 1
                kind = _Kind(masters and facts.narrows, shared, self.part_of(coordinates, name), over)
                if not self._is_unshared(facts, coordinates, data):
                    kinds.setdefault(kind, []).append((index, facts.count))
            for sizes in (sizes for kind, sizes in kinds.items() if kind.ends):
                sizes.sort(key=lambda size: own[size[0]][0])
            of_kinds = windows_of_kinds(
                kinds, limit, ranks=lambda kind: data // kind.over, whole=whole, is_tied=lambda kind: bool(kind.ends)
            )
            found = [
                Exchanged(window, kind.narrow, bool(kind.ends), kind.part, kind.over)
                for window, kind in of_kinds.items()
            ]
            self._windows[key] = sorted(found, key=lambda each: (each.is_tied, -each.first))
        return self._windows[key]

    def runs(
        self, coordinates: Coordinates, data: int, replica: int, *, masters: bool, whole: bool = False
    ) -> list[Facts]:
        """Each run that the optimizer of a replica updates, or whole parameter, if its state is shared out."""
        key = (coordinates, data, masters, whole, replica)
        if key not in self._runs:
            own = list(self.stage_parameters(coordinates).values())
            shared = [
                replace(own[run.parameter], narrows=each.narrow)
                if whole
                else Facts((run.length,), decays=True, narrows=each.narrow)
                for each in self.windows(coordinates, data, masters=masters, whole=whole)
                for run, _ in each.window.owned(replica // each.over)
            ]
            self._runs[key] = [*shared, *self.unshared(own, coordinates, data)]
        return self._runs[key]

    def unshared(self, trained: Iterable[Facts], coordinates: Coordinates, data: int) -> list[Facts]:
        """Of a worker's parameters those that no other replica has: experts that are divided over all."""
        return [facts for facts in trained if self._is_unshared(facts, coordinates, data)]

    @staticmethod
    def _is_unshared(facts: Facts, coordinates: Coordinates, data: int) -> bool:
        return facts.is_expert and 1 < coordinates.experts == data

    def ends_of(self, name: str) -> frozenset[str]:
        """The stages that have a parameter which is in no block, under any of its names."""
        return frozenset().union(*(self.ends.get(other, frozenset()) for other in self.names_of(name)))

    @cached_property
    def ends(self) -> dict[str, frozenset[str]]:
        """For each parameter that is in no block, by its every name, the stages that have it.

        Raises:
            ModelError: the model cannot be cut into stages.
        """
        with fake_tensors(), without_warnings():
            model = self.build(min(TRACED_BLOCKS, max(self.depths.values(), default=0))).train()
            with AnswersAboutData(dense=True):
                return ends_of(model, lambda model: model(**self.batch(1)).loss)


def _narrow(model: nn.Module, weights: str, dtype: torch.dtype) -> None:
    """Give a model parameters of 16 bits, as ``Variant.weights`` says."""
    if weights == "narrow":
        for parameter in (p for p in model.parameters() if p.is_floating_point()):
            narrow(parameter, dtype)
    if weights == "masters":
        narrowed = narrowed_parameters(model)
        for parameter in (p for p in model.parameters() if id(p) in narrowed):
            narrow(parameter, dtype)


def _of_model(variant: Variant) -> Variant:
    """What of it the bytes of gradients depend on."""
    return replace(variant, micro_batch=1, recompute="none", sequence_parallel=False)


def _expert_parameters(model: nn.Module) -> frozenset[int]:
    """Identities of what expert parallelism divides."""
    mixtures = (*(module for module in model.modules() if isinstance(module, Experts)), *own_experts(model))
    return frozenset(id(parameter) for mixture in mixtures for parameter in mixture.parameters())
