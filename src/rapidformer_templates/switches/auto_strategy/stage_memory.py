"""Memory of a worker in a 3D layout: its stage's share of the model, and the micro batches in flight."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from rapidformer_templates.engines.parallel.buckets import update_chunks
from rapidformer_templates.planning.optimizer_states import BF16, FP32, ParameterShape
from rapidformer_templates.planning.plan import shards_of_experts
from rapidformer_templates.switches.auto_strategy.layouts import Layout, MasterWeights, MemoryOptions
from rapidformer_templates.switches.auto_strategy.model_shapes import Coordinates, GradientBucket, ModelShapes, Variant
from rapidformer_templates.switches.auto_strategy.state_bytes import StateBytes, in_parts, rows_of_worker
from rapidformer_templates.switches.auto_strategy.trace import Pass, PhaseSegment, StagePart, largest_passes


@dataclass(frozen=True)
class MemorySnapshot:
    """Bytes at one moment, without parameters and optimizer state."""

    activations: int
    gradients: int
    buffers: int

    @property
    def total(self) -> int:
        return self.activations + self.gradients + self.buffers


def peak_stage_candidates(model: ModelShapes, layout: Layout, setting: MemoryOptions) -> list[Stage]:
    """Return the stages that can have the highest peak. Among equal stages, the first holds most micro batches.

    Raises:
        ModelError: the model cannot be cut in this way.
    """
    return _peak_stage_candidates(model, layout.of_states, setting)


@lru_cache(maxsize=4096)  # layouts that differ in their batches have equal stages
def _peak_stage_candidates(model: ModelShapes, layout: Layout, setting: MemoryOptions) -> list[Stage]:
    stages = [kind_of_stage(layout)(model, layout, rank, setting) for rank in range(layout.pipeline)]
    middle = {stage.blocks: stage for stage in reversed(stages[1:-1])}
    return [stages[0], *middle.values(), *stages[1:][-1:]]


@lru_cache(maxsize=4096)
def stage_of_blocks(
    model: ModelShapes, layout: Layout, rank: int, setting: MemoryOptions, blocks: tuple[int, int]
) -> Stage:
    """Return a stage with other blocks than the layout has. ``layout`` has no batch sizes, see ``of_states``."""
    return kind_of_stage(layout)(model, layout, rank, setting, blocks=blocks)


def kind_of_stage(layout: Layout) -> type[Stage]:
    """Return the class with the rules of the engine that trains a layout."""
    return ShardedStage if layout.shards_stages else Stage


@lru_cache(maxsize=4096)  # layouts that partition their states differently have equal parts
def _stage_part(
    model: ModelShapes,
    variant: Variant,
    blocks: int | None,
    is_first: bool,
    is_last: bool,
    tied_bytes: int,
    *,
    exact: bool,
) -> StagePart:
    """Return a part of a stage. ``blocks`` is None for the whole model, which is not cut into stages."""
    shares_casts = blocks is not None and variant.recompute == "none"
    trace = model.trace(variant, blocks, exact=exact)
    return StagePart(trace, is_first, is_last, tied_bytes, shares_casts, variant.offload)


@dataclass(frozen=True)
class GradientTraffic:
    """Windows of a part's gradients that go to other replicas, in the order in which they become complete.

    Attributes:
        complete: for each bucket that no other stage shares, bytes of gradients that a trace has finished when the
            bucket is complete.
        sums, shares: cumulative bytes of no bucket, the first, the first two, and so on: of the whole buckets, and of
            a replica's shares.
        largest: for each of these counts, the packed bytes of the two largest buckets.
    """

    complete: tuple[int, ...]
    sums: tuple[int, ...]
    shares: tuple[int, ...]
    largest: tuple[tuple[int, ...], ...]


class Stage:
    """The part of the model on a pipeline rank, as its tensor-parallel group shares it.

    Attributes:
        rank: pipeline rank, from 0.
        coordinates: position of the worker. Among workers that share the blocks' matrices, the first has most.
    """

    def __init__(
        self,
        model: ModelShapes,
        layout: Layout,
        rank: int,
        setting: MemoryOptions,
        peer: int = 0,
        blocks: tuple[int, int] | None = None,
    ) -> None:
        """``blocks`` are the first block and the end. By default, the layout determines them.

        The batch sizes and the recomputation of the layout have no effect.
        """
        self.model, self.layout, self.rank, self.setting = model, layout, rank, setting
        if blocks:
            parts = [blocks]
        elif layout.pipeline == 1:
            parts = [(0, sum(model.depths.values()))]
        else:
            sizes = layout.stages or model.stage_sizes(layout.pipeline * layout.virtual)
            ends = list(accumulate(sizes))
            parts = [(ends[i] - sizes[i], ends[i]) for i in range(rank, len(sizes), layout.pipeline)]
        self.coordinates = Coordinates(layout.tensor, layout.pipeline, rank, tuple(parts), peer, layout.experts)
        self._states: dict[int, StateBytes] = {}

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.layout.pipeline - 1

    @property
    def parameters(self) -> dict[str, ParameterShape]:
        """Trained parameters by name.

        Raises:
            ModelError: the model cannot be cut or divided in this way.
        """
        return self.model.stage_parameters(self.coordinates)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Number of blocks in each part of this stage."""
        return tuple(end - begin for begin, end in self.coordinates.parts)

    def _passes(self, accumulation: int) -> tuple[Pass, ...]:
        return largest_passes(self.layout.pipeline, self.rank, self.layout.virtual, accumulation)

    def states(self, replica: int | None = None) -> StateBytes:
        """States of a replica's worker (default: the largest one).

        Gradients are those at the end of the last backward.
        """
        replica = self.largest_replica if replica is None else replica
        if replica not in self._states:
            self._states[replica] = self._states_of(replica)
        return self._states[replica]

    def _states_of(self, replica: int) -> StateBytes:
        shapes = list(self.parameters.values())
        if self._is_sharded:
            shapes = self._runs_of(replica)
        parameters, optimizer = self._parameter_bytes, self._optimizer_bytes(shapes)
        gradients = self._share(replica) if self._is_sharded else sum(self._sums)
        if not self.setting.offload:
            return StateBytes(parameters, gradients, optimizer)
        # copies of weights and gradients for the update on the host
        copies = 2 * FP32 * sum(part.count for part in shapes)
        return StateBytes(parameters, gradients, optimizer, on_host=(0, 0, optimizer), host_copies=copies)

    @cached_property
    def least_states(self) -> StateBytes:
        """The mean states of the replicas' workers. The largest one has at least as much. It is fast to compute."""
        shares = self.layout.replicas if self._is_sharded else 1
        optimizer = self._optimizer_bytes(list(self.parameters.values())) // shares
        on_host = (0, 0, optimizer if self.setting.offload else 0)
        return StateBytes(self._parameter_bytes, sum(self._sums) // shares, optimizer, on_host=on_host)

    @property
    def _parameter_bytes(self) -> int:
        """Bytes of the trained and the frozen parameters."""
        return self._narrow_bytes + sum(p.stored_bytes for p in self.model.stage_frozen(self.coordinates))

    def _optimizer_bytes(self, updated: Sequence[ParameterShape]) -> int:
        """Bytes of the optimizer's state for these parameters, and of their masters."""
        masters = FP32 * sum(part.count for part in updated if part.has_master) if self._has_masters else 0
        return self.setting.how.optimizer.bytes_of(updated) + masters

    @cached_property
    def largest_replica(self) -> int:
        """The replica that updates most. If runs are sharded, it is the first one, whose shares have no padding."""
        if not self._is_sharded or self.setting.updates_elementwise:
            return 0
        counts = [sum(part.count for part in self._runs_of(replica)) for replica in range(self.layout.replicas)]
        return counts.index(max(counts))

    def _runs_of(self, replica: int) -> list[ParameterShape]:
        whole = not self.setting.updates_elementwise
        return self.model.runs(self.coordinates, self.layout.replicas, replica, masters=self._has_masters, whole=whole)

    @property
    def _has_masters(self) -> bool:
        return self.setting.masters is not None

    @property
    def _types(self) -> MasterWeights:
        return self.setting.masters or MasterWeights()

    def _width(self, narrows: bool, width: int) -> int:
        """Bytes per element: ``width`` for a 16-bit parameter, else those of fp32."""
        return width if narrows and self._has_masters else FP32

    def _bytes_of(self, trained: Iterable[ParameterShape], width: int) -> int:
        """Bytes of parameters or of their gradients. 16-bit ones take ``width`` bytes per element."""
        return sum(self._width(facts.has_master, width) * facts.count for facts in trained)

    @cached_property
    def _narrow_bytes(self) -> int:
        """Bytes of all parameters, and of their gradients as the backward produces them."""
        return self._bytes_of(self.parameters.values(), BF16)

    @cached_property
    def _sums(self) -> list[int]:
        """Per part, bytes of its accumulated gradients."""
        return [self._bytes_of(trained, self._types.accumulate) for trained in self._parameters_of_parts]

    @cached_property
    def _parameters_of_parts(self) -> list[list[ParameterShape]]:
        parts: list[list[ParameterShape]] = [[] for _ in self.blocks]
        for name, facts in self.parameters.items():
            parts[self.model.part_of(self.coordinates, name)].append(facts)
        return parts

    @property
    def _is_sharded(self) -> bool:
        """Whether each replica keeps the optimizer state of its share only."""
        return self.layout.partitioning != "none" and self.layout.replicas > 1

    @property
    def _sums_early(self) -> bool:
        """Whether gradients go to their owners in each backward (ZeRO-2)."""
        early = self.setting.sums_early or self.layout.partitioning == "zero-2"
        return early and self.layout.replicas > 1

    def moments(self, parts: Sequence[StagePart], accumulation: int) -> list[MemorySnapshot]:
        """Memory beyond the states in the phases of the forwards and backwards of a step, and after them.

        Passes that differ only in the other micro batches in flight are equal except for the bytes of these. The pass
        with the highest number of bytes is enough.
        """
        most: dict[tuple[object, ...], tuple[int, Pass]] = {}
        for each in self._passes(accumulation):
            kind = (each.part, each.is_forward, each.is_last, each.added, each.summed)
            others = self._beside(parts, each)
            if kind not in most or others > most[kind][0]:
                most[kind] = (others, each)
        snapshots: list[MemorySnapshot] = []
        for others, each in most.values():
            moments_of = self._exchanging if self._exchanges(each) else self._computing
            snapshots += moments_of(parts[each.part], each, others, self._added_up_elsewhere(each))
        after = self._after
        if self._sums_early:
            after = [replace(after[0], activations=max(others for others, _ in most.values())), *after[1:]]
        return [*snapshots, *after]

    def sent(self, parts: Sequence[StagePart], accumulation: int) -> int:
        """Peak bytes of this stage's micro batches on the host."""
        if not self.setting.offloads_activations:
            return 0
        most = 0
        for each in self._passes(accumulation):
            alive = dict(each.others)
            alive[each.part] = alive.get(each.part, 0) + 1
            # then the last block's activations are sent, too, when another forward follows
            several = sum(alive.values()) > 1
            of_parts = (parts[part].trace.sent + several * parts[part].kept_by_last for part in alive)
            most = max(most, sum(count * sent for count, sent in zip(alive.values(), of_parts, strict=True)))
        return most

    def parts(self, variant: Variant, *, exact: bool) -> list[StagePart]:
        """Return a micro batch's parts on this stage. See :meth:`ModelShapes.trace` for ``exact``."""
        cut = self.layout.pipeline > 1
        return [
            _stage_part(
                self.model,
                variant,
                blocks if cut else None,
                self.is_first and number == 0,
                self.is_last and number == len(self.blocks) - 1,
                self._tied_bytes,
                exact=exact,
            )
            for number, blocks in enumerate(self.blocks)
        ]

    def _beside(self, parts: Sequence[StagePart], each: Pass) -> int:
        """Bytes of other micro batches in flight during a pass, and of tensors that travel between stages."""
        waiting = sum(count * parts[part].saved for part, count in each.others)
        if each.newest is not None:  # the last blocks of the others are on the host
            sent = sum(count * parts[part].kept_by_last for part, count in each.others)
            waiting -= sent - parts[each.newest].kept_by_last
        waiting += sum(parts[part].casts for part in each.begun - {each.part})
        return waiting + each.travelling * parts[0].trace.hidden

    @cached_property
    def _tied_bytes(self) -> int:
        """Bytes of tied gradients.

        In an undivided model they wait for the embedding's. Here, stages have a copy each.
        """
        if self.layout.pipeline == 1:
            return 0
        everything = self.model.local_parameters(self.layout.tensor, self.coordinates.peer)
        shared = (name for name, facts in everything.items() if facts.is_trained and len(self.model.names_of(name)) > 1)
        tied = (everything[name] for name in shared if len(self.model.ends_of(name)) > 1)
        return self._bytes_of(tied, BF16)

    def _computing(self, part: StagePart, each: Pass, others: int, added_up: int) -> Iterator[MemorySnapshot]:
        """Yield candidates for the peak of a pass that exchanges no gradients.

        Args:
            others: bytes of the activations of other micro batches.
            added_up: bytes of gradients that other parts have from earlier micro batches.
        """
        own = self._added_up(each.part, each) if each.part in each.added else None
        for segment in part.segments(forward=each.is_forward, largest=True):
            gradients = self._unfinished(segment) if own is None else own
            yield self._beside_states(segment.peak + others, added_up + gradients, 0)

    def _exchanging(self, part: StagePart, each: Pass, others: int, added_up: int) -> Iterator[MemorySnapshot]:
        """Yield candidates for the peak of a backward whose gradients go to other replicas. See :meth:`_computing`."""
        traffic, unshared, adds = self._leaving[each.part], self._unshared[each.part], each.part in each.added
        summed = adds and not self._sums_early
        sent_before = [size for other in each.summed for size in self._leaving[other].largest[-1]]
        early_shares, narrow = adds and self._sums_early, (self._narrow_bytes, sum(self._sums))

        def moment(activations: int, finished: int, packed: int, leaving: int, flights: int) -> MemorySnapshot:
            gradients = self._sums[each.part] if summed else finished
            if self._is_sharded:  # packed gradients are freed, and gradients without an earlier sum have 16 bits
                waiting = max(0, gradients - traffic.sums[packed] - unshared)
                waiting = waiting if summed else waiting * narrow[0] // narrow[1]
                gradients = waiting + traffic.shares[-1 if early_shares else leaving] + unshared
            flying = self._on_their_way((*traffic.largest[leaving], *sent_before), flights)
            return self._beside_states(activations + others, added_up + gradients, flying)

        left = highest = 0  # buckets that were complete before, and the largest bytes so far
        room = traffic.shares[-1] + unshared + self._on_their_way((*traffic.largest[-1], *sent_before), 2)
        for segment in part.segments(forward=False):
            finished, leaving = self._unfinished(segment), bisect_right(traffic.complete, segment.finished)
            if segment.peak + (self._sums[each.part] if summed else finished) + room > highest:
                moments = [moment(segment.peak, finished, leaving, leaving, 1 if leaving or each.summed else 0)]
                if leaving > left:  # they are packed at its begin
                    moments.append(moment(segment.begin, finished, left, leaving, 2 if left or each.summed else 1))
                highest = max(highest, *(one.total - others - added_up for one in moments))
                yield from moments
            left = leaving

    def _unfinished(self, segment: PhaseSegment) -> int:
        """Bytes of the gradients that a segment has finished, if they have no earlier sum."""
        if self.coordinates.experts == 1:
            return segment.finished
        own, everything = self._elements  # a trace has all experts
        return segment.finished * own // everything

    @cached_property
    def _elements(self) -> tuple[int, int]:
        """Elements of the trained parameters: with this worker's experts, and with all experts."""
        whole = self.model.stage_parameters(replace(self.coordinates, experts=1)).values()
        return sum(facts.count for facts in self.parameters.values()), sum(facts.count for facts in whole)

    def _exchanges(self, each: Pass) -> bool:
        """Whether the gradients of a pass go to other replicas while it runs."""
        return not each.is_forward and (self._sums_early or (each.is_last and self.layout.replicas > 1))

    def _added_up_elsewhere(self, each: Pass) -> int:
        """Bytes of other parts' gradients from earlier micro batches during a pass."""
        return sum(self._added_up(part, each) for part in each.added - {each.part})

    def _added_up(self, part: int, each: Pass) -> int:
        """Bytes of a part's gradients from earlier micro batches: only shares if they have already been reduced."""
        if self._is_sharded and (self._sums_early or part in each.summed):
            return self._leaving[part].shares[-1] + self._unshared[part]
        return self._sums[part]

    @cached_property
    def _after(self) -> list[MemorySnapshot]:
        """Memory after the last gradient of a pass and in the update, without activations of other micro batches."""
        tied = [each for each in self._buckets if each.is_tied]
        sums, copied = sum(self._sums), self._copied_for_update()
        largest = [self._packed(each) for each in self._buckets]
        waiting = self._on_their_way(largest, 2) if self.layout.replicas > 1 or tied else 0
        if not self._is_sharded:
            copies_elsewhere = sum(self._packed(each) for each in tied)
            return [self._beside_states(0, sums, max(waiting + copies_elsewhere, copied))]
        shares, late = self._share(self.largest_replica), sum(self._sum_of(each) for each in tied)
        sent = self._beside_states(0, shares + late, waiting)
        gathered = 0  # in addition to the weights while the updated ones of a bucket are sent
        for each in self._buckets:
            elements = each.bucket.packed + (each.bucket.share if each.bucket.owner is None else 0)
            gathered = max(gathered, self._width(each.has_masters, BF16) * elements)
        return [sent, self._beside_states(0, shares, max(copied, gathered))]

    def _copied_for_update(self) -> int:
        """Bytes of 16-bit gradients that exist in fp32 at the same time, because the optimizer reads them in fp32."""
        if self._types.accumulate == FP32:
            return 0
        if self._is_sharded:
            sizes = [each.has_masters * each.share_of(self.largest_replica) for each in self._buckets]
        else:
            facts = list(self.parameters.values())
            parts = update_chunks([each.count for each in facts], self.model.bucket_size)
            sizes = [sum(facts[place].has_master * facts[place].count for place in part) for part in parts]
        return FP32 * (max(sizes, default=0) if self.setting.updates_in_chunks else sum(sizes))

    def _beside_states(self, activations: int, gradients: int, buffers: int) -> MemorySnapshot:
        """Build a moment in which gradients beyond those that the update needs count as buffers."""
        counted_gradients = min(gradients, self._gradient_bytes)
        return MemorySnapshot(activations, counted_gradients, buffers + gradients - counted_gradients)

    @cached_property
    def _gradient_bytes(self) -> int:
        return self.states().gradients

    # Exchange with the other replicas.

    @cached_property
    def _buckets(self) -> list[GradientBucket]:
        whole = self._is_sharded and not self.setting.updates_elementwise
        return self.model.buckets(self.coordinates, self.layout.replicas, masters=self._has_masters, whole=whole)

    @cached_property
    def _leaving(self) -> list[GradientTraffic]:
        """Per part, the buckets that it sends to its replicas."""
        traffic = []
        for part in range(len(self.blocks)):
            buckets = [each for each in self._buckets if each.part == part]
            largest: list[tuple[int, ...]] = [()]
            for each in buckets:
                largest.append(tuple(sorted((*largest[-1], self._packed(each)))[-2:]))
            finished = accumulate(self._sum_of(each) * each.over for each in buckets if not each.is_tied)
            sums = accumulate(map(self._sum_of, buckets), initial=0)
            shares = accumulate((self._share_of(each, self.largest_replica) for each in buckets), initial=0)
            traffic.append(GradientTraffic(tuple(finished), tuple(sums), tuple(shares), tuple(largest)))
        return traffic

    def _packed(self, each: GradientBucket) -> int:
        """Bytes of a bucket's gradients in flight."""
        return self._width(each.has_masters, self._types.reduce) * each.bucket.packed

    def _sum_of(self, each: GradientBucket) -> int:
        """Bytes of a bucket's accumulated gradients."""
        return self._width(each.has_masters, self._types.accumulate) * each.bucket.length

    def _share_of(self, each: GradientBucket, replica: int) -> int:
        """Bytes of a replica's share of a summed bucket, including padding."""
        return self._width(each.has_masters, self._types.accumulate) * each.share_of(replica)

    def _share(self, replica: int) -> int:
        """Bytes of a replica's shares of all summed buckets, plus gradients that replicas do not share."""
        return sum(self._share_of(each, replica) for each in self._buckets) + sum(self._unshared)

    @cached_property
    def _unshared(self) -> list[int]:
        """Per part, bytes of the gradients of experts that no other replica has."""
        width, data = self._types.accumulate, self.layout.replicas
        alone = (self.model.unshared(trained, self.coordinates, data) for trained in self._parameters_of_parts)
        return [self._bytes_of(experts, width) for experts in alone]

    def _on_their_way(self, begun: Iterable[int], count: int) -> int:
        """Bytes of the ``count`` largest buckets in flight, and of the shares that they produce."""
        largest = sorted(begun, reverse=True)[:count]
        shares = self._sums_early and self.setting.updates_elementwise  # else a whole parameter's owner sums in place
        return sum(size + (size // self.layout.replicas if shares else 0) for size in largest)


class ShardedStage(Stage):
    """A stage whose parameters FSDP shards over the replicas.

    The states are exact. The rest is estimated: the whole parameters and gradients are counted as if all of them were
    there at once, or those of two blocks if they are freed in between. A run of the engine says it exactly
    (``--engine-memory``).
    """

    def _states_of(self, replica: int) -> StateBytes:
        over = self.layout.experts
        shards = shards_of_experts(self.layout.replicas, self.layout.shares, over)
        states, frozen = (
            rows_of_worker(parameters, replica, self.layout.shares, over=over, shards=shards)
            for parameters in (self.parameters.values(), self.model.stage_frozen(self.coordinates))
        )
        (trained,), (others,) = (in_parts([rows], self.setting.how) for rows in (states, frozen))
        return trained.with_frozen(others)

    @cached_property
    def least_states(self) -> StateBytes:
        return self.states()

    @cached_property
    def largest_replica(self) -> int:
        return 0

    def moments(self, parts: Sequence[StagePart], accumulation: int) -> list[MemorySnapshot]:
        width = BF16 if self.setting.precision != "fp32" else FP32
        here = self.model.everything_of_stage(self.coordinates)
        sizes = {name: facts.bytes_in(width) for name, facts in here.items()}
        of_blocks = self.model.by_block(sizes).values()
        block, gathered = max(of_blocks, default=0), sum(sizes.values())
        if self.setting.reshards:
            gathered += 2 * block - sum(of_blocks)
        leaving = 2 * block * FP32 // width
        sums = sum(FP32 * facts.count for facts in self.parameters.values())
        shards = self._gradient_bytes
        kept = shards if accumulation == 1 or self.setting.reduces_each else sums
        snapshots: list[MemorySnapshot] = []
        for each in self._passes(accumulation):
            others = self._beside(parts, each)
            gradients = kept if each.part in each.added or not each.is_forward else 0
            flying = gathered + (0 if each.is_forward else leaving)
            buffers = flying + max(gradients - shards, 0)
            segments = parts[each.part].segments(forward=each.is_forward, largest=True)
            snapshots += [MemorySnapshot(segment.peak + others, shards, buffers) for segment in segments]
        return snapshots
