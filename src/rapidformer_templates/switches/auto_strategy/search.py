"""The search: every layout that the workers allow, what each needs, and which of those that fit is fastest.

Nothing is decided by rule of thumb that can be predicted. The guidance of the Megatron practice [M] bounds the
search (a tensor group stays inside a node; the largest allowed global batch, because it lowers the bubble) and
decides between layouts whose predicted speeds differ by less than the prediction can tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

from rapidformer_templates.errors import ModelError
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.planning.registry import REGISTRY, Registry
from rapidformer_templates.planning.request import build_request, model_facts
from rapidformer_templates.planning.resolve import plan_of
from rapidformer_templates.planning.switch import FORECAST, ModelFacts, Request
from rapidformer_templates.switches.auto_strategy.hardware import GB, Hardware
from rapidformer_templates.switches.auto_strategy.layouts import PARTITIONINGS, RECOMPUTED, Layout
from rapidformer_templates.switches.auto_strategy.memory import Memory, predict, states_alone, variant_of
from rapidformer_templates.switches.auto_strategy.model_of_flags import Subject
from rapidformer_templates.switches.auto_strategy.setting import Setting, setting_of
from rapidformer_templates.switches.auto_strategy.stage_balance import balance_memory
from rapidformer_templates.switches.auto_strategy.timing import Timing, predict_seconds
from rapidformer_templates.switches.pipeline_parallel.declaration import AUTO_MEMORY

T = TypeVar("T", int, bool)

ALLOWANCE = 0.05
"""Share of the predicted memory that must be free beside it: fragments, and buffers that a transfer still holds."""

DOUBT = 0.01
"""Share of the device's memory: a layout that is closer to the limit than this is traced exactly."""

VIRTUAL_SIZES = (1, 2, 4)
"""Stages a worker; with more, little is left of the bubble, and hidden states travel more and more often."""

LARGEST_MICRO_BATCH = 32
"""Samples; beyond it the matrix units are full, and accumulation costs nothing."""

TOLD_APART = 0.03
"""Speeds that differ by less count as one: the time model is no better than that."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits.

    Attributes:
        needed_gb: predicted memory with the allowance and the context, which the device must have.
    """

    layout: Layout
    setting: Setting
    memory: Memory
    timing: Timing
    needed_gb: float

    @property
    def samples_per_second(self) -> float:
        return self.layout.global_batch / self.timing.total


@dataclass(frozen=True)
class Rejected:
    """A layout that does not do, and the constraint that failed."""

    layout: Layout
    constraint: str


@dataclass(frozen=True)
class Unknown:
    """What is predicted as if a switch were off.

    Attributes:
        switch: its name.
        kinds: of ``FORECAST``.
        why: the reason.
    """

    switch: str
    kinds: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class SearchResult:
    """All layouts: those that fit, best first, and the others; and what of the flags the numbers leave out."""

    layouts: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    not_predicted: tuple[Unknown, ...] = ()


class Search:
    """Layouts of a model on some workers."""

    def __init__(
        self,
        config: RunConfig,
        environment: Environment,
        subject: Subject,
        hardware: Hardware,
        registry: Registry = REGISTRY,
        *,
        by_memory: bool = False,
    ) -> None:
        """``by_memory``: whether the blocks of each stage are chosen by the memory that the stages need."""
        self.by_memory = by_memory
        self.config = registry.complete(config)
        self.environment = environment
        self.subject = subject
        self.hardware = hardware
        self.registry = registry
        self._model: ModelFacts = model_facts(config)

    def run(self) -> SearchResult:
        """Try all layouts; those whose activations lie on the host, only where no other one fits."""
        rejected: list[Rejected] = []
        best_first: list[Candidate] = []
        keeps = self._allowed("offload_activations", self._ways_to_keep())
        for contexts, offload in product(self._contexts(), keeps):
            best_first = self._verified(self._fitting(contexts, offload, rejected), rejected)
            if best_first:
                break
        return SearchResult(tuple(best_first), tuple(rejected), self._not_predicted())

    def _contexts(self) -> list[list[int]]:
        """Sizes of context parallelism: where none is given, sequences are divided only if nothing fits otherwise."""
        if "context_parallel_size" in self.config.origins:
            return [[self.config.get("context_parallel_size")]]
        return [[1], _divisors(self.environment.world_size)[1:]]

    def _ways_to_keep(self) -> list[bool]:
        """Whether activations may be offloaded: not from a CPU, whose memory is the host's."""
        return [False] if self.environment.device == "cpu" else [False, True]

    def _fitting(self, contexts: Sequence[int], offload: bool, rejected: list[Rejected]) -> list[Candidate]:
        """The layouts with such sizes, with activations on the host or without, that fit; ``rejected`` takes others."""
        fitting: list[Candidate] = []
        families = {family: self._setting(family) for family in self._families(contexts, offload)}
        self._prepare({family: setting for family, setting in families.items() if isinstance(setting, Setting)})
        for family, setting in families.items():
            if isinstance(setting, str):
                rejected.append(Rejected(family, setting))
                continue
            too_large: str | None = None
            for layout in self._batches(family):
                constraint = too_large or self._undivided(layout)
                if constraint:
                    rejected.append(Rejected(layout, constraint))
                    continue
                try:
                    tried = self._try(layout, setting)
                except ModelError as error:
                    rejected.append(Rejected(layout, error.message))
                    break
                if isinstance(tried, Candidate):
                    fitting.append(tried)
                else:
                    too_large = f"{tried.constraint} with micro batch {layout.micro_batch}"
                    rejected.append(tried)
        return fitting

    def _not_predicted(self) -> tuple[Unknown, ...]:
        """By switch and reason, of the switches that are on in every layout."""
        request = self._request(self.config)
        return tuple(
            Unknown(name, tuple(kind for kind in FORECAST if reasons.get(kind) == why), why)
            for name, switch in request.active.items()
            for reasons in [switch.predicts.unknown(request)]
            for why in dict.fromkeys(reasons.values())
        )

    def _prepare(self, families: Mapping[Layout, Setting]) -> None:
        """Have traced what the families need whose states alone do fit."""
        shapes, variants = self.subject.shapes, set()
        for family, setting in families.items():
            with suppress(ModelError):  # it is told when the family is tried
                if self._needed_gb(states_alone(shapes, family, setting)) <= self.hardware.memory_gb:
                    variants.add(variant_of(family, setting))
        shapes.prepare(variants)

    def _families(self, contexts: Sequence[int], offload: bool) -> Iterator[Layout]:
        """Layouts without their batches."""
        for tensor, context, pipeline, data in self._sizes(contexts):
            replicas = data * context
            for partitioning in self._partitionings(replicas):
                for recompute, shard_size, virtual, experts in product(
                    self._recomputed(),
                    self._shard_sizes(partitioning, replicas),
                    self._virtual_sizes(pipeline),
                    self._expert_sizes(replicas),
                ):
                    yield Layout(
                        tensor,
                        pipeline,
                        data,
                        partitioning=partitioning,
                        recompute=recompute,
                        sequence_parallel=tensor > 1,
                        shard_size=shard_size,
                        context=context,
                        offload=offload,
                        virtual=virtual,
                        experts=experts,
                    )

    def _sizes(self, contexts: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """Tensor, context, pipeline and data: all that multiply to the workers."""
        world, local = self.environment.world_size, self.environment.local_world_size
        tensors = self._allowed("tensor_model_parallel_size", _divisors(math.gcd(world, local)))
        pipelines = self._allowed("pipeline_model_parallel_size", _divisors(world))
        for tensor, context, pipeline in product(tensors, contexts, pipelines):
            data, rest = divmod(world, tensor * context * pipeline)
            if not rest:
                yield tensor, context, pipeline, data

    def _recomputed(self) -> list[str]:
        if "checkpoint_activations" not in self.config.origins:
            return list(RECOMPUTED)
        asked = self.config.get("recompute_granularity") or "full"
        return [asked if self.config.get("checkpoint_activations") else "none"]

    def _allowed(self, name: str, values: list[T]) -> list[T]:
        """The values of a field: the user's, if there is one."""
        return [self.config.get(name)] if name in self.config.origins else values

    def _partitionings(self, replicas: int) -> list[str]:
        asked = [name for name, flag in PARTITIONINGS.items() if flag and self.config.get(flag)]
        if asked:
            return asked
        return list(PARTITIONINGS) if replicas > 1 else ["none"]

    def _shard_sizes(self, partitioning: str, data: int) -> list[int | None]:
        """FSDP over all replicas, and inside of each node."""
        if "fsdp_shard_size" in self.config.origins:
            return [self.config.get("fsdp_shard_size")]
        local = self.environment.local_world_size
        in_nodes = partitioning == "fsdp" and 1 < local < data and data % local == 0
        return [None, local] if in_nodes else [None]

    def _virtual_sizes(self, pipeline: int) -> list[int]:
        """Stages of each worker, which cut the blocks evenly; one, where they are to be cut by memory."""
        each, rest = divmod(self.subject.facts.blocks, pipeline)
        interleaves = pipeline > 1 and rest == 0 and not self.by_memory
        sizes = [size for size in VIRTUAL_SIZES if each % size == 0]
        return self._allowed("virtual_pipeline_size", sizes if interleaves else [1])

    def _expert_sizes(self, replicas: int) -> list[int]:
        """Replicas that share one copy of the experts."""
        if self.config.get("expert_parallel"):
            return [replicas]
        sizes = _divisors(math.gcd(self.subject.experts, replicas)) if self.subject.experts else [1]
        return self._allowed("expert_model_parallel_size", sizes)

    def _setting(self, layout: Layout) -> Setting | str:
        """What else a layout's memory depends on, or the first rule that the layout breaks."""
        request = self._request(self._asking_for(layout))
        refusal = next(iter(self.registry.refusals(request)), None)
        if refusal:
            return f"{refusal[0].code}: {refusal[1].message}"
        return setting_of(plan_of(request, self.registry), self.subject.shapes.width)

    def _asking_for(self, layout: Layout) -> RunConfig:
        """The configuration with this layout, whatever its batches are."""
        values = replace(layout, micro_batch=1, accumulation=1).values()
        if self.by_memory and layout.pipeline > 1:
            values["pipeline_stages"] = AUTO_MEMORY
        return self.config.replace("auto-strategy", **values)

    def _request(self, config: RunConfig) -> Request:
        return build_request(config, self.environment, self.registry.switches, model=self._model)

    def _batches(self, family: Layout) -> Iterator[Layout]:
        """A family with all its micro batches, from the smallest; the global batch is the largest allowed."""
        most = self._greatest_batch(family)
        sizes = [2**power for power in range(LARGEST_MICRO_BATCH.bit_length())]
        for micro in self._allowed(
            "micro_batch_size", [size for size in sizes if size * family.data <= max(most, family.data)]
        ):
            yield replace(family, micro_batch=micro, accumulation=max(1, most // (micro * family.data)))

    def _greatest_batch(self, family: Layout) -> int:
        asked: int | None = self.config.data.global_batch_size or self.config.get("max_global_batch_size")
        return asked or family.data * LARGEST_MICRO_BATCH

    def _undivided(self, layout: Layout) -> str | None:
        asked, most = self.config.data.global_batch_size, self._greatest_batch(layout)
        step = layout.micro_batch * layout.data
        if asked and asked % step:
            return (
                f"RF030: global batch {asked} is not divisible by micro batch {layout.micro_batch} × data {layout.data}"
            )
        if step > most:
            return f"{layout.data} replicas need a global batch of at least {step}, at most {most} is allowed"
        return None

    def _try(self, layout: Layout, setting: Setting, *, exact: bool = False) -> Candidate | Rejected:
        """A layout with its prediction, or why it does not fit."""
        shapes, whole = self.subject.shapes, self.hardware.memory_gb
        if self.by_memory and layout.pipeline > 1:
            layout = replace(layout, stages=balance_memory(shapes, layout, setting, exact=exact).sizes)
        states = states_alone(shapes, layout, setting)
        if self._needed_gb(states) > whole:
            return Rejected(layout, self._too_large(states))
        memory = predict(shapes, layout, setting, exact=exact)
        needed = self._needed_gb(memory)
        if not exact and abs(needed - whole) < DOUBT * whole:
            return self._try(layout, setting, exact=True)
        if needed > whole:
            return Rejected(layout, self._too_large(memory))
        trace = shapes.trace(variant_of(layout, setting), exact=exact)
        local = self.environment.local_world_size
        timing = predict_seconds(layout, setting, trace, self.subject.facts, self.hardware, local)
        return Candidate(layout, setting, memory, timing, needed)

    def _needed_gb(self, memory: Memory) -> float:
        return memory.total * (1 + ALLOWANCE) / GB + self.hardware.context_gb

    def _too_large(self, memory: Memory) -> str:
        what = f"memory: {self._needed_gb(memory):.1f} GB a worker of {self.hardware.memory_gb:g} GB"
        return f"{what} ({_largest(memory)})"

    def _verified(self, fitting: list[Candidate], rejected: list[Rejected]) -> list[Candidate]:
        """The candidates in their order; the best is traced as it is, until one holds what it promises."""
        best_first = sorted(fitting, key=self._sort_key(fitting))
        while best_first:
            tried = self._try(best_first[0].layout, best_first[0].setting, exact=True)
            if isinstance(tried, Candidate):
                return [tried, *best_first[1:]]
            rejected.append(tried)
            best_first = best_first[1:]
        return best_first

    def _sort_key(self, fitting: list[Candidate]) -> Callable[[Candidate], tuple[float, ...]]:
        """Fastest first; among equals the one with the least machinery, and the guidance of [M]."""
        best = max((c.samples_per_second for c in fitting), default=1.0)
        local = self.environment.local_world_size
        in_a_node = any(c.layout.tensor * c.layout.pipeline <= local for c in fitting)

        def key(candidate: Candidate) -> tuple[float, ...]:
            layout = candidate.layout
            slower = math.floor(math.log(best / candidate.samples_per_second) / math.log(1 + TOLD_APART))
            return (
                slower,
                list(PARTITIONINGS).index(layout.partitioning),
                RECOMPUTED.index(layout.recompute),
                layout.pipeline,
                layout.virtual,
                layout.experts,
                layout.tensor if in_a_node else -layout.tensor,
                layout.micro_batch if not in_a_node else 0,
                candidate.needed_gb,
            )

        return key


def _largest(memory: Memory) -> str:
    parts = {name: value for name, value in vars(memory).items() if value and name != "host"}
    largest = max(parts, key=lambda name: parts[name])
    return f"{largest} alone {parts[largest] / GB:.1f} GB"


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
