"""The search: the seconds of every layout that the workers allow, and the memory of the fastest until enough fit.

Everything that can be predicted is predicted, not decided by rule of thumb. The guidance of Megatron practice [M]
bounds the search: a tensor group stays inside a node, and the global batch is the largest allowed, because it lowers
the bubble. It also decides between layouts whose predicted speeds differ by less than the prediction's accuracy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, product, takewhile
from typing import TypeAlias, TypeVar

from rapidformer_templates.errors import ModelError
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.data_rules import rows_per_sample
from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.planning.registry import REGISTRY, Registry
from rapidformer_templates.planning.request import build_request, model_facts
from rapidformer_templates.planning.resolve import plan_of
from rapidformer_templates.planning.switch import FORECAST, ModelFacts, Request
from rapidformer_templates.switches.auto_strategy.layouts import (
    PARTITIONINGS,
    RECOMPUTED,
    Layout,
    MemoryOptions,
    memory_options_of,
)
from rapidformer_templates.switches.auto_strategy.memory import predict, states_alone, variant_of
from rapidformer_templates.switches.auto_strategy.model_of_flags import Subject
from rapidformer_templates.switches.auto_strategy.results import (
    ALLOWANCE,
    SHOWN,
    Candidate,
    Memory,
    ModelTotals,
    Rejected,
    SearchResult,
    SetupMemory,
    Unknown,
)
from rapidformer_templates.switches.auto_strategy.setup_memory import setup_memory
from rapidformer_templates.switches.auto_strategy.stage_balance import balance_memory
from rapidformer_templates.switches.auto_strategy.step_seconds import Timing, predict_seconds
from rapidformer_templates.switches.auto_strategy.timing import GB, Hardware
from rapidformer_templates.switches.auto_strategy.trace import Trace
from rapidformer_templates.switches.layout.declaration import AUTO_MEMORY

T = TypeVar("T", int, bool)

Tried: TypeAlias = tuple[list[Candidate], list[Rejected]]
"""The layouts that fit, and the others."""

DOUBT = 0.01
"""Share of the device's memory. A layout that is closer to the limit than this is traced exactly."""

VIRTUAL_SIZES = (1, 2, 4)
"""Stages per worker. With more, little of the bubble is left, and hidden states travel more and more often."""

LARGEST_MICRO_BATCH = 32
"""In samples. Beyond it, the matrix units are full, and accumulation costs nothing."""

TOLD_APART = 0.03
"""Speeds that differ by less than this count as equal: the time model is not more accurate."""

COMPARED = ("tensor", "pipeline", "virtual", "experts", "recompute", "partitioned")
"""Sizes of a family of layouts. The output also names the best layout with another value of each size."""

TRIES = 10
"""Families that are tried to find another value of a size, the fastest first."""


class Search:
    """Searches the layouts of a model on a number of workers."""

    def __init__(
        self,
        config: RunConfig,
        environment: Environment,
        subject: Subject,
        hardware: Hardware,
        registry: Registry = REGISTRY,
        *,
        by_memory: bool = False,
        enough: int = SHOWN,
    ) -> None:
        """Set up a search.

        Args:
            by_memory: whether the blocks of each stage are chosen by predicted memory.
            enough: number of layouts that must fit before slower ones are left out.
        """
        self.by_memory = by_memory
        self.enough = enough
        self.config = registry.complete(config)
        self.environment = environment
        self.subject = subject
        self.hardware = hardware
        self.registry = registry
        self._model: ModelFacts = model_facts(config)
        self._setups: dict[Layout, SetupMemory] = {}

    def run(self) -> SearchResult:
        """Try the layouts, fastest first. Activations are offloaded to the host only if no other layout fits."""
        rejected: list[Rejected] = []
        best_first: list[Candidate] = []
        slower = 0
        keeps = self._allowed("offload_activations", [False] if self.environment.device == "cpu" else [False, True])
        # Unless the user sets the size of context parallelism, sequences are divided only if nothing else fits.
        context_sizes = [[1], _divisors(self.environment.world_size)[1:]]
        if "context_parallel_size" in self.config.origins:
            context_sizes = [[self.config.get("context_parallel_size")]]
        for contexts, offload in product(context_sizes, keeps):
            fitting, slower = self._fitting(contexts, offload, rejected)
            best_first = self._verified(fitting, rejected)
            if best_first:
                break
        return SearchResult(tuple(best_first), tuple(rejected), self.totals(), self.unknown(), slower)

    def unknown(self) -> tuple[Unknown, ...]:
        """Return what is not predicted of the switches that are on in every layout."""
        request = self._request(self.config)
        return tuple(
            Unknown(name, tuple(kind for kind in FORECAST if reasons.get(kind) == why), why)
            for name, switch in request.active.items()
            for reasons in [switch.predicts.unknown(request)]
            for why in dict.fromkeys(reasons.values())
        )

    def _fitting(self, contexts: Sequence[int], offload: bool, rejected: list[Rejected]) -> tuple[list[Candidate], int]:
        """Return layouts with these context sizes and this offloading that fit, and how many slower ones are left out.

        Families are tried in the order of their fastest layout, see :meth:`_is_wanted`. Layouts that do not fit are
        added to ``rejected``, in the order of their sizes.
        """
        settings: dict[Layout, MemoryOptions] = {}
        others: dict[Layout, list[Rejected]] = {}
        for family in self._families(contexts, offload):
            setting_or_rule = self._setting(family)
            if isinstance(setting_or_rule, str):
                others[family] = [Rejected(family, setting_or_rule)]
            else:
                settings[family], others[family] = setting_or_rule, []
        speeds = self._greatest_speeds(settings)
        fitting: list[Candidate] = []
        slower, tries = 0, Counter[str]()
        for family in sorted(speeds, key=lambda family: -speeds[family]):
            if self._is_wanted(family, speeds[family], fitting, tries):
                fitting_of_family, others[family] = self._of_family(family, settings[family])
                fitting += fitting_of_family
            else:
                slower += len(list(self._batches(family)))
        rejected += chain.from_iterable(others.values())
        return fitting, slower

    def _greatest_speeds(self, settings: Mapping[Layout, MemoryOptions]) -> dict[Layout, float]:
        """Return the samples per second of the fastest layout of each family, whether or not it fits.

        It is infinite if the states of a family do not fit, or if it cannot be traced: it is tried, and rejected.
        """
        speeds = dict.fromkeys(settings, math.inf)
        traced = {family: setting for family, setting in settings.items() if self._states_fit(family, setting)}
        self.subject.shapes.prepare({variant_of(family, setting) for family, setting in traced.items()})
        for family, setting in traced.items():
            with suppress(ModelError):
                speeds[family] = max(
                    layout.global_batch / self._timing(layout, setting, self._trace(layout, setting, exact=False)).total
                    for layout in self._batches(family)
                )
        return speeds

    def _states_fit(self, family: Layout, setting: MemoryOptions) -> bool:
        with suppress(ModelError):  # met again when the family is tried
            return self._needed_gb(states_alone(self.subject.shapes, family, setting).total) <= self.hardware.memory_gb
        return False

    def _is_wanted(self, family: Layout, speed: float, fitting: Sequence[Candidate], tries: Counter[str]) -> bool:
        """Whether a family may have one of the layouts to show.

        It may unless ``enough`` layouts fit that are faster than its fastest one. Then it may be compared with them, if
        it has another value of a size that all of them share.

        Args:
            tries: families that were tried for another value, by size.
        """
        if math.isinf(speed) or len(fitting) < self.enough:
            return True
        speeds = [candidate.samples_per_second for candidate in fitting]
        steps = _steps_below(max(speeds), speed)
        if sum(_steps_below(max(speeds), other) < steps for other in speeds) < self.enough:
            return True
        values = {name: {getattr(candidate.layout, name) for candidate in fitting} for name in COMPARED}
        new = [name for name, known in values.items() if len(known) == 1 and getattr(family, name) not in known]
        wanted = [name for name in new if tries[name] < TRIES]
        tries.update(wanted)
        return bool(wanted)

    def _of_family(self, family: Layout, setting: MemoryOptions) -> Tried:
        """Try the layouts of a family."""
        fitting: list[Candidate] = []
        rejected: list[Rejected] = []
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
        return fitting, rejected

    def _families(self, contexts: Sequence[int], offload: bool) -> Iterator[Layout]:
        """Yield layouts without their batch sizes."""
        recomputed, local = list(RECOMPUTED), self.environment.local_world_size
        if "checkpoint_activations" in self.config.origins:
            granularity = self.config.get("recompute_granularity") or "full"
            recomputed = [granularity if self.config.get("checkpoint_activations") else "none"]
        own_partitionings = [
            name for name, on in PARTITIONINGS.items() if on and all(self.config.get(f) == v for f, v in on.items())
        ]
        for tensor, context, pipeline, data in self._sizes(contexts):
            replicas = data * context
            every = [name for name in PARTITIONINGS if name != "sharding-strategy" or tensor * pipeline > 1]
            for partitioning in own_partitionings or (every if replicas > 1 else ["none"]):
                shards: list[int | None] = [None]
                if "fsdp_shard_size" in self.config.origins:
                    shards = [self.config.get("fsdp_shard_size")]
                elif partitioning == "fsdp" and 1 < local < replicas and replicas % local == 0:
                    shards = [None, local]
                sizes = (self._virtual_sizes(pipeline), self._expert_sizes(replicas))
                for recompute, shard_size, virtual, experts in product(recomputed, shards, *sizes):
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
        """Yield all (tensor, context, pipeline, data) whose product is the number of workers."""
        world, local = self.environment.world_size, self.environment.local_world_size
        tensors = self._allowed("tensor_model_parallel_size", _divisors(math.gcd(world, local)))
        pipelines = self._allowed("pipeline_model_parallel_size", _divisors(world))
        for tensor, context, pipeline in product(tensors, contexts, pipelines):
            data, rest = divmod(world, tensor * context * pipeline)
            if not rest:
                yield tensor, context, pipeline, data

    def _allowed(self, name: str, values: list[T]) -> list[T]:
        """Return the values of a field: only the user's, if there is one."""
        return [self.config.get(name)] if name in self.config.origins else values

    def _virtual_sizes(self, pipeline: int) -> list[int]:
        """Numbers of stages per worker that cut the blocks evenly. It is one if stages are cut by memory."""
        each, rest = divmod(self.subject.facts.blocks, pipeline)
        interleaves = pipeline > 1 and rest == 0 and not self.by_memory
        sizes = [size for size in VIRTUAL_SIZES if each % size == 0]
        return self._allowed("virtual_pipeline_size", sizes if interleaves else [1])

    def _expert_sizes(self, replicas: int) -> list[int]:
        """Numbers of replicas to try that share one copy of the experts."""
        if self.config.get("expert_parallel"):
            return [replicas]
        sizes = _divisors(math.gcd(self.subject.experts, replicas)) if self.subject.experts else [1]
        return self._allowed("expert_model_parallel_size", sizes)

    def _setting(self, layout: Layout) -> MemoryOptions | str:
        """Return what else a layout's memory depends on, or the first rule that the layout breaks."""
        values = replace(layout, micro_batch=1, accumulation=1).values()  # the batch sizes are chosen later
        if self.by_memory and layout.pipeline > 1:
            values["pipeline_stages"] = AUTO_MEMORY
        request = self._request(self.config.replace("auto-strategy", **values))
        refusal = next(iter(self.registry.refusals(request)), None)
        if refusal:
            return f"{refusal[0].code}: {refusal[1].message}"
        return memory_options_of(plan_of(request, self.registry), self.subject.shapes.width)

    def _request(self, config: RunConfig) -> Request:
        return build_request(config, self.environment, self.registry.switches, model=self._model)

    def _batches(self, family: Layout) -> Iterator[Layout]:
        """Yield a family with all its micro-batch sizes, smallest first. The global batch is the largest allowed."""
        most = self._greatest_batch(family)
        sizes = [2**power for power in range(LARGEST_MICRO_BATCH.bit_length())]
        for micro in self._allowed(
            "micro_batch_size", [size for size in sizes if size * family.data <= max(most, family.data)]
        ):
            yield replace(family, micro_batch=micro, accumulation=max(1, most // (micro * family.data)))

    def _greatest_batch(self, family: Layout) -> int:
        limit: int | None = self.config.data.global_batch_size or self.config.get("max_global_batch_size")
        return limit or family.data * LARGEST_MICRO_BATCH

    def _undivided(self, layout: Layout) -> str | None:
        batch, most = self.config.data.global_batch_size, self._greatest_batch(layout)
        step = layout.micro_batch * layout.data
        if batch and batch % step:
            return (
                f"RF030: global batch {batch} is not divisible by micro batch {layout.micro_batch} × data {layout.data}"
            )
        if step > most:
            return f"{layout.data} replicas need a global batch of at least {step}, at most {most} is allowed"
        return None

    def _try(self, layout: Layout, setting: MemoryOptions, *, exact: bool = False) -> Candidate | Rejected:
        """Return a layout with its prediction, or the reason why it does not fit."""
        shapes, whole = self.subject.shapes, self.hardware.memory_gb
        if self.by_memory and layout.pipeline > 1:
            layout = replace(layout, stages=balance_memory(shapes, layout, setting, exact=exact).sizes)
        setup = self._setup(layout, setting)
        if constraint := self.constraint(states_alone(shapes, layout, setting), setup, setting):
            return Rejected(layout, constraint)
        memory = predict(shapes, layout, setting, exact=exact)
        if not exact and abs(self._needed_gb(max(memory.total, setup.device)) - whole) < DOUBT * whole:
            return self._try(layout, setting, exact=True)
        if constraint := self.constraint(memory, setup, setting):
            return Rejected(layout, constraint)
        return self._timed(layout, setting, memory, setup, exact=exact)

    def predict(self, layout: Layout, setting: MemoryOptions, memory: Memory | None = None) -> Candidate:
        """Return a layout with its prediction, whether or not it fits.

        Args:
            memory: of training. None predicts it for the optimizer of the flags.
        """
        memory, setup = memory or predict(self.subject.shapes, layout, setting), self._setup(layout, setting)
        return self._timed(layout, setting, memory, setup, exact=True)

    def _trace(self, layout: Layout, setting: MemoryOptions, *, exact: bool) -> Trace:
        return self.subject.shapes.trace(variant_of(layout, setting), exact=exact)

    def _timed(
        self, layout: Layout, setting: MemoryOptions, memory: Memory, setup: SetupMemory, *, exact: bool
    ) -> Candidate:
        """Add the predicted seconds to the predicted memory of a layout."""
        trace = self._trace(layout, setting, exact=exact)
        timing = self._timing(layout, setting, trace)
        # The backward of a matrix product is two products of the same size.
        forward = sum(phase.flops for phase in takewhile(lambda phase: phase.name != "turn", trace.phases))
        needed_gb = self._needed_gb(max(memory.total, setup.device))
        host_gb = self._host_gb(memory, setup)
        step_flops = 3.0 * forward * layout.tensor * layout.replicas * layout.accumulation
        return Candidate(layout, memory, setup, timing, needed_gb, host_gb, step_flops)

    def _timing(self, layout: Layout, setting: MemoryOptions, trace: Trace) -> Timing:
        """Predict the seconds of a step. ``trace`` is a micro batch."""
        stages: Sequence[int] = layout.stages
        if layout.pipeline > 1 and not stages:
            stages = self.subject.shapes.stage_sizes(layout.pipeline * layout.virtual)
        local = self.environment.local_world_size
        return predict_seconds(layout, setting, trace, self.subject.facts, self.hardware, local, stages)

    def totals(self) -> ModelTotals:
        """Return the sizes of the model that do not depend on the layout."""
        shapes, plan = self.subject.shapes, plan_of(self._request(self.config), self.registry)
        optimizer = memory_options_of(plan, shapes.width).how.optimizer
        weights = sum(facts.stored_bytes for facts in shapes.all_parameters.values())
        return ModelTotals(
            tokens_per_sample=self.subject.facts.tokens * rows_per_sample(self.config),
            checkpoint_bytes=weights + optimizer.bytes_of(list(shapes.parameters.values())),
            is_trained_whole=len(shapes.parameters) == len(shapes.all_parameters),
            has_equal_batches=not any(self.registry[name].order for name in plan.switches),
        )

    def _needed_gb(self, size: int) -> float:
        return size * (1 + ALLOWANCE) / GB + self.hardware.context_gb

    def _host_gb(self, memory: Memory, setup: SetupMemory) -> float:
        training = memory.host if self.environment.device != "cpu" else memory.total
        return self.environment.local_world_size * max(setup.host, training) * (1 + ALLOWANCE) / GB

    def _setup(self, layout: Layout, setting: MemoryOptions) -> SetupMemory:
        family = layout.of_states
        if family not in self._setups:
            self._setups[family] = setup_memory(self.subject.shapes, family, setting)
        return self._setups[family]

    def constraint(self, memory: Memory, setup: SetupMemory, setting: MemoryOptions) -> str | None:
        """Return what these workers have too little of, or None."""
        device, node = self.hardware.memory_gb, self.hardware.host_gb
        digits = 1 if device >= 10 else 4  # on a small device, one digit would hide what is too much
        if self._needed_gb(memory.total) > device:
            parts = {name: value for name, value in vars(memory).items() if value and name != "host"}
            largest = max(parts, key=lambda name: parts[name])
            what = f"memory: {self._needed_gb(memory.total):.{digits}f} GB per worker of {device:g} GB"
            return f"{what} ({largest} alone {parts[largest] / GB:.{digits}f} GB)"
        if self._needed_gb(setup.device) > device:
            needed = f"{self._needed_gb(setup.device):.{digits}f} GB per worker of {device:g} GB"
            return f"memory: {needed} to build and load the model"
        needed_on_node = self._host_gb(memory, setup)
        if node is None or needed_on_node <= node:
            return None
        hint = ""
        if setup.host > memory.host and not setting.builds_in_shares:
            in_shares = ", ".join(switch.name for switch in self.registry.switches if switch.builds_in_shares)
            hint = f" (each worker builds the whole model; {in_shares} build it in shares)"
        return f"host memory: {needed_on_node:,.1f} GB needed on a node, {node:,g} GB there{hint}"

    def _verified(self, fitting: list[Candidate], rejected: list[Rejected]) -> list[Candidate]:
        """Sort the candidates, best first.

        Trace the first one exactly and reject it if it does not fit, until one fits.
        """
        best = max((c.samples_per_second for c in fitting), default=1.0)
        local = self.environment.local_world_size
        in_a_node = any(c.layout.tensor * c.layout.pipeline <= local for c in fitting)

        def key(candidate: Candidate) -> tuple[float, ...]:
            """Sort the fastest first, then the simplest layout, then by the guidance of [M]."""
            layout = candidate.layout
            return (
                _steps_below(best, candidate.samples_per_second),
                list(PARTITIONINGS).index(layout.partitioning),
                RECOMPUTED.index(layout.recompute),
                layout.pipeline,
                layout.virtual,
                layout.experts,
                layout.tensor if in_a_node else -layout.tensor,
                layout.micro_batch if not in_a_node else 0,
                candidate.needed_gb,
            )

        best_first = sorted(fitting, key=key)
        while best_first:
            setting = self._setting(best_first[0].layout)
            assert isinstance(setting, MemoryOptions)  # it has been tried before
            tried = self._try(best_first[0].layout, setting, exact=True)
            if isinstance(tried, Candidate):
                return [tried, *best_first[1:]]
            rejected.append(tried)
            best_first = best_first[1:]
        return best_first


def _steps_below(best: float, speed: float) -> int:
    """By how many steps of ``TOLD_APART`` a speed is below the best one."""
    return math.floor(math.log(best / speed) / math.log(1 + TOLD_APART))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
