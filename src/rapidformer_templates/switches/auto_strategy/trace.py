"""The phases of a micro batch through a model and through each part of a pipeline worker. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from operator import attrgetter
from typing import Any, NamedTuple

from rapidformer_templates.planning.optimizer_states import FP32
from rapidformer_templates.switches.layout.schedule import LEAVING, Action, Kind, with_transfers

FP8_MULTIPLE = 16
"""Sizes of a matrix that fp8 multiplies are multiples of it. Others stay in bf16."""

TRACED_BLOCKS = 3
"""Blocks of each stack in a traced model: the first, one that is repeated, and the last."""


@dataclass(frozen=True)
class Product:
    """A matrix product, or the products of an attention kernel.

    Attributes:
        batch: number of products: of a batched product, or the heads of all samples in attention.
        rows, inner, columns: sizes of each product. In attention: queries, width of a head, keys.
        width: bytes of an element.
        moved: bytes of the activations that one call reads and writes. Weights and their gradients do not count.
        flops: operations of one call. Attention counts only those under a causal mask.
        is_attention: whether a kernel computes attention without storing the scores.
        times: number of calls.
    """

    batch: int
    rows: int
    inner: int
    columns: int
    width: int
    moved: int
    flops: int
    is_attention: bool = False
    times: int = 1

    @property
    def may_use_fp8(self) -> bool:
        """Whether it multiplies one matrix, with sizes that the kernels of fp8 accept."""
        is_aligned = all(size % FP8_MULTIPLE == 0 for size in (self.rows, self.inner, self.columns))
        return self.batch == 1 and not self.is_attention and is_aligned

    @property
    def operands(self) -> tuple[int, int]:
        """Elements of the two matrices that it multiplies."""
        return self.rows * self.inner, self.inner * self.columns


@dataclass(frozen=True)
class PhaseSegment:
    """A part of a phase, from one finished gradient to the next.

    Attributes:
        begin: bytes alive at its begin, without finished gradients.
        peak: highest number of these bytes.
        finished: bytes of finished gradients.
    """

    begin: int
    peak: int
    finished: int

    def with_more(self, alive: int, finished: int = 0) -> PhaseSegment:
        """Return this segment with more bytes alive, and with more gradients finished before."""
        return PhaseSegment(self.begin + alive, self.peak + alive, self.finished + finished)


@dataclass(frozen=True)
class Phase:
    """A part of the step, such as the forward of one block.

    Attributes:
        name: ``begin``, a block's ``forward``, ``head``; then back: ``turn``, ``reduce`` (from the first
            finished gradient), a block's ``backward``, ``end``.
        stack: the list of blocks that contains the block, and the index in it; None outside of blocks.
        peak_beside_earlier: peak bytes in the phase, without the model's states and without gradients that were
            finished when it began.
        end: bytes alive at its end, without finished gradients.
        segments: its parts between finished gradients, in order.
        products: its matrix products and attention kernels, in order.
        launches: number of its other operations.
        traffic: bytes that they read from memory and write to it.
        after_first_gradient: whether a parameter has its gradient when the phase begins.
        finished: bytes of finished gradients at its end.
        saved: bytes made in it that are alive when the backward begins.
        casts: the part of ``saved`` that is autocast copies of weights.
        sent: bytes of earlier blocks that are sent to the host in it.
        blocks: number of equal blocks that it represents.
        kept_by_each: bytes that each of these blocks keeps for its backward.
    """

    name: str
    stack: tuple[str, int] | None
    peak_beside_earlier: int
    end: int
    segments: tuple[PhaseSegment, ...] = field(default=(), hash=False)
    products: tuple[Product, ...] = ()
    launches: int = 0
    traffic: int = 0
    after_first_gradient: bool = False
    finished: int = 0
    saved: int = 0
    casts: int = 0
    sent: int = 0
    blocks: int = 1
    kept_by_each: int = 0

    @cached_property
    def peak(self) -> int:
        """Peak bytes without the model's states, but with finished gradients."""
        return max((segment.peak + segment.finished for segment in self.segments), default=0)

    @cached_property
    def peak_without_gradients(self) -> int:
        """Peak bytes without the model's states and finished gradients."""
        return max((segment.peak for segment in self.segments), default=0)

    @property
    def flops(self) -> int:
        return sum(product.flops * product.times for product in self.products)


@dataclass(frozen=True)
class Trace:
    """The phases of one micro batch, in order.

    Attributes:
        hidden: bytes of a block's output.
        kept_output: bytes of the last block's output that are alive when the backward begins.
    """

    phases: tuple[Phase, ...]
    hidden: int = 0
    kept_output: int = 0

    @property
    def peak(self) -> int:
        """Peak bytes, including finished gradients."""
        return max(phase.peak for phase in self.phases)

    @property
    def peak_without_gradients(self) -> int:
        """Peak bytes if finished gradients are stored elsewhere: in buckets, in shards, or in existing sums."""
        return max(phase.peak_without_gradients for phase in self.phases)

    @property
    def flops(self) -> int:
        return sum(phase.flops for phase in self.phases)

    def fp8_casts(self, *, fuses: bool) -> int:
        """Return the bytes of the largest casts to fp8: of both operands of a product, while it is computed.

        Args:
            fuses: whether a compiler fuses them. Otherwise, an operand is scaled and clamped in fp32 on its way.
        """
        products = [p for phase in self.phases if phase.stack for p in phase.products if p.may_use_fp8]
        scaled = 0 if fuses else 2 * FP32
        return max((sum(p.operands) + scaled * max(p.operands) for p in products), default=0)

    @property
    def saved(self) -> int:
        """Bytes that the forward keeps for the backward, up to the last block."""
        return sum(phase.saved for phase in self._up_to_last_block)

    @property
    def casts(self) -> int:
        """The part of ``saved`` that is autocast copies of weights."""
        return sum(phase.casts for phase in self._up_to_last_block)

    @property
    def _up_to_last_block(self) -> Sequence[Phase]:
        forwards = [i for i, phase in enumerate(self.phases) if phase.name == "forward"]
        return self.phases[: forwards[-1] + 1] if forwards else ()

    @property
    def sent(self) -> int:
        """Bytes sent to the host: the activations that all blocks except the last one keep."""
        return sum(phase.sent for phase in self.phases)

    @property
    def kept_by_last(self) -> int:
        """Bytes that the last block keeps on the device. They would go to the host if another forward followed."""
        forwards = [phase for phase in self.phases if phase.name == "forward"]
        return max(forwards[-1].saved - forwards[-2].saved, 0) if len(forwards) > 1 else 0

    def at(self, micro_batch: int, other: Trace, traced: tuple[int, int]) -> Trace:
        """Return the trace of another micro-batch size, from this trace and ``other``.

        All amounts are affine in the samples.

        Args:
            traced: samples of this trace and of ``other``.
        """
        first, second = traced

        def between(one: object, other: object, names: Sequence[str]) -> dict[str, Any]:
            pairs = {name: (getattr(one, name), getattr(other, name)) for name in names}
            return {name: a + (b - a) * (micro_batch - first) // (second - first) for name, (a, b) in pairs.items()}

        amounts = ("peak_beside_earlier", "end", "saved", "casts", "sent", "traffic")
        sizes = ("batch", "rows", "inner", "columns", "moved", "flops")

        def products_between(a: Phase, b: Phase) -> tuple[Product, ...]:
            return tuple(replace(x, **between(x, y, sizes)) for x, y in zip(a.products, b.products, strict=True))

        def segments_between(a: Phase, b: Phase) -> tuple[PhaseSegment, ...]:
            pairs = zip(a.segments, b.segments, strict=True)
            return tuple(replace(x, **between(x, y, ("begin", "peak"))) for x, y in pairs)

        phases = [
            replace(a, segments=segments_between(a, b), products=products_between(a, b), **between(a, b, amounts))
            for a, b in zip(self.phases, other.phases, strict=True)
        ]
        return replace(self, phases=tuple(phases), **between(self, other, ("hidden", "kept_output")))

    def with_depths(self, depths: Mapping[str, int], gradients: Mapping[str, int]) -> Trace:
        """Return this trace with more blocks: ``depths`` gives the number of blocks in each stack.

        The added blocks are equal to the middle one of the three traced blocks. From their forward to
        their backward, they hold what a block keeps for its backward. After that, they hold their finished
        gradients.

        Args:
            gradients: bytes of the gradients of a block, by stack.
        """
        phases = self.phases
        for stack, depth in depths.items():
            phases = _deepened(phases, stack, depth, gradients[stack])
        return replace(self, phases=phases)


def _deepened(phases: tuple[Phase, ...], stack: str, depth: int, gradients: int) -> tuple[Phase, ...]:
    forward = [i for i, p in enumerate(phases) if p.name == "forward" and p.stack and p.stack[0] == stack]
    backward = [i for i, p in enumerate(phases) if p.name == "backward" and p.stack and p.stack[0] == stack]
    missing = depth - len(forward)
    if missing == 0 or len(forward) < TRACED_BLOCKS:
        return phases
    first, middle, last = forward
    turn = next(i for i, phase in enumerate(phases) if phase.name == "turn")
    # Autocast's copies of weights live until the forward ends, even if the backward does not need them.
    in_forward = missing * (phases[middle].end - phases[first].end)
    in_backward = missing * phases[middle].saved
    gradients *= missing
    deeper = []
    for i, phase in enumerate(phases):
        saved = in_forward if i < turn else in_backward
        alive = saved if middle <= i <= backward[1] else 0
        finished = gradients if i > backward[1] else 0
        times = 1 + missing if i in (middle, backward[1]) else 1  # these also represent the missing blocks
        segments = [segment.with_more(alive, finished) for segment in phase.segments]
        if i == backward[1] and missing > 0:  # and the last of the blocks that it represents
            segments += [segment.with_more(0, gradients) for segment in phase.segments]
        deeper.append(
            replace(
                phase,
                peak_beside_earlier=phase.peak_beside_earlier + alive,
                end=phase.end + (alive if i < backward[0] else 0),
                segments=tuple(segments),
                finished=phase.finished + (gradients if i >= backward[1] else 0),
                products=tuple(replace(product, times=times) for product in phase.products),
                launches=phase.launches * times,
                traffic=phase.traffic * times,
                saved=phase.saved * times,
                casts=phase.casts * times,
                # a block is sent during the forward of the next one
                sent=phase.sent * (1 + missing if i == last else 1),
                blocks=times,
                kept_by_each=phases[middle].saved,
            )
        )
    return tuple(deeper)


ENOUGH_ROUNDS = 4
"""Rounds of one micro batch per worker. More rounds only repeat the same passes."""


class Pass(NamedTuple):
    """A forward or backward of a micro batch through one of a worker's parts.

    Attributes:
        part: index of the part.
        is_forward: True for a forward, False for a backward.
        others: pairs of a part and its number of other micro batches whose activations wait for their backwards.
        newest: part of the newest of these micro batches.
        travelling: tensors that have arrived from other workers for later passes, or that may still be in flight.
        begun: parts that have had a forward.
        added: parts with gradients of earlier micro batches.
        summed: parts whose last backward is over.
        is_last: whether this is the part's last backward.
    """

    part: int
    is_forward: bool
    others: tuple[tuple[int, int], ...]
    newest: int | None
    travelling: int
    begun: frozenset[int]
    added: frozenset[int]
    summed: frozenset[int]
    is_last: bool


def passes(workers: int, rank: int, per_worker: int, microbatches: int) -> tuple[Pass, ...]:
    """Return the different passes of a step on one worker.

    Args:
        workers: workers of the pipeline. 1 means no pipeline.
        rank: rank of this worker in the pipeline.
        per_worker: parts of each worker. With more than one, they are interleaved.
        microbatches: micro batches of the step.
    """
    if per_worker == 1 or microbatches % workers == 0:
        microbatches = min(microbatches, ENOUGH_ROUNDS * workers)
    return _passes(workers, rank, per_worker, microbatches)


@cache
def largest_passes(workers: int, rank: int, per_worker: int, microbatches: int) -> tuple[Pass, ...]:
    """Return the passes of :func:`passes` without those that never hold more than another one."""
    largest: list[Pass] = []
    for each in passes(workers, rank, per_worker, microbatches):
        if not any(_holds_as_much(other, each) for other in largest):
            largest = [*(other for other in largest if not _holds_as_much(each, other)), each]
    return tuple(largest)


def _holds_as_much(one: Pass, other: Pass) -> bool:
    kind = attrgetter("part", "is_forward", "newest", "added", "summed", "is_last")
    if kind(one) != kind(other):
        return False
    counts = dict(one.others)
    is_at_least = all(count <= counts.get(part, 0) for part, count in other.others)
    return is_at_least and other.travelling <= one.travelling and other.begun <= one.begun


@cache
def _passes(workers: int, rank: int, per_worker: int, microbatches: int) -> tuple[Pass, ...]:
    passes_seen: dict[Pass, None] = {}
    alive: list[Action] = []
    come: Counter[tuple[int, int]] = Counter()
    sent: Counter[Kind] = Counter()
    begun, added, summed = (frozenset[int]() for _ in range(3))
    for action in with_transfers(workers, per_worker, microbatches)[rank]:
        kind, stage, number = action
        part, place = stage // workers, (stage, number)
        if kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
            come[place] += 1
        if kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            sent[kind] = min(sent[kind] + 1, LEAVING * per_worker)
        if kind not in (Kind.FORWARD, Kind.BACKWARD):
            continue
        come[place] = 0
        alive = [other for other in alive if (other.stage, other.microbatch) != place]
        others = Counter(other.stage // workers for other in alive)
        passes_seen[
            Pass(
                part,
                kind is Kind.FORWARD,
                tuple(sorted(others.items())),
                alive[-1].stage // workers if alive else None,
                come.total() + sent.total(),
                begun,
                added,
                summed,
                kind is Kind.BACKWARD and number == microbatches - 1,
            )
        ] = None
        if kind is Kind.FORWARD:
            alive.append(action)
            begun |= {part}
        else:
            added |= {part}
            summed |= {part} if number == microbatches - 1 else set()
    return tuple(passes_seen)


BACKWARD = ("reduce", "backward", "end")
"""Phases of the backward, after ``turn``."""


@dataclass(frozen=True)
class StagePart:
    """All blocks of a worker, or one of its runs of blocks if stages are interleaved.

    Attributes:
        trace: trace of a micro batch through a whole model with this number of blocks.
        is_first, is_last: whether it is the model's first or last part. The first has everything before the blocks,
            the last has head and loss.
        tied_bytes: gradients that wait for the embedding's in an undivided model. Here, stages have a copy each.
        shares_casts: whether all micro batches of a step share one autocast copy of the weights.
        offloads: whether activations that the blocks keep go to the host.
    """

    trace: Trace
    is_first: bool
    is_last: bool
    tied_bytes: int
    shares_casts: bool
    offloads: bool

    @cached_property
    def saved(self) -> int:
        """Bytes that a micro batch keeps here until its backward."""
        trace = self.trace
        bytes_kept = trace.saved - self.casts
        if not self.is_last:
            bytes_kept -= trace.kept_output  # the stage does not keep the values that it sends
        if not self.is_first:
            bytes_kept += trace.hidden - trace.phases[0].saved
        return bytes_kept

    @cached_property
    def casts(self) -> int:
        """Bytes of autocast copies that all micro batches of a step share."""
        return self.trace.casts if self.shares_casts else 0

    @cached_property
    def kept_by_last(self) -> int:
        """Bytes of the newest micro batch here that have not gone to the host."""
        return self.trace.kept_by_last if self.offloads else 0

    @cached_property
    def head_gradients(self) -> int:
        """Bytes of gradients that the trace finishes before those of this part: the gradients of the head."""
        phases = self.trace.phases
        if self.is_last:
            return 0
        first = next((i for i, phase in enumerate(phases) if phase.name == "backward"), 0)
        return phases[first - 1].finished if first else 0

    def segments(self, *, forward: bool, largest: bool = False) -> Sequence[PhaseSegment]:
        """Return the segments of its forwards or backwards. Their gradients are only those of this part.

        Args:
            largest: leave out those with a lower peak than a segment with as many finished gradients or more.
        """
        return self._largest_segments[forward] if largest else self._segments[forward]

    @cached_property
    def _segments(self) -> dict[bool, list[PhaseSegment]]:
        own = self._own_segments
        return {way: [segment for is_forward, segment in own if is_forward is way] for way in (True, False)}

    @cached_property
    def _largest_segments(self) -> dict[bool, list[PhaseSegment]]:
        largest: dict[bool, list[PhaseSegment]] = {True: [], False: []}
        for way, segments in self._segments.items():
            for segment in sorted(segments, key=attrgetter("finished", "peak"), reverse=True):
                if not largest[way] or segment.peak > largest[way][-1].peak:
                    largest[way].append(segment)
        return largest

    @cached_property
    def _own_segments(self) -> list[tuple[bool, PhaseSegment]]:
        """The segments of this part. The first value is whether a segment belongs to the forward."""
        own: list[tuple[bool, PhaseSegment]] = []
        phases, input_bytes, released_casts = self.trace.phases, 0, 0
        if not self.is_first:
            input_bytes = self.trace.hidden  # it arrives in place of the embedding
            # without offloading, the embedding's output is no longer there
            input_bytes -= 0 if self.offloads else phases[0].end
        casts_by_stack = {phase.stack: phase.casts for phase in phases if phase.name == "forward"}
        for number, phase in enumerate(phases):
            is_forward = phase.name in ("begin", "forward", "head")
            if self._has(number):
                alive = input_bytes + released_casts - (self.tied_bytes if phase.name in BACKWARD else 0)
                finished = 0 if is_forward else -self.head_gradients
                own += [(is_forward, segment.with_more(alive, finished)) for segment in phase.segments]
            if phase.name == "backward" and self.shares_casts:
                released_casts += casts_by_stack[phase.stack]
        return own

    def _has(self, number: int) -> bool:
        """Whether this part has a phase of the whole model. Only the last part has head and loss."""
        phases = self.trace.phases
        name = phases[number].name
        if name in ("begin", "end"):
            return self.is_first
        if name in ("head", "turn"):
            return self.is_last
        backwards = [index for index, phase in enumerate(phases) if phase.name == "backward"]
        return self.is_last or name != "reduce" or not backwards or number > backwards[0]
