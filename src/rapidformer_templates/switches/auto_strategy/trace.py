"""The phases of a micro batch: which bytes are alive when, and how much is computed. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

TRACED_BLOCKS = 3
"""Blocks of each stack in a traced model: the first, one that is repeated, and the last."""


@dataclass(frozen=True)
class Phase:
    """A part of the step, such as the forward of one block.

    Attributes:
        name: ``begin``, a block's ``forward``, ``head``; then back: ``turn``, ``reduce`` (from the first
            finished gradient), a block's ``backward``, ``end``.
        stack: the list of blocks that contains the block, and the index in it; None outside of blocks.
        peak: peak bytes in the phase without the model's states, but with finished gradients.
        peak_without_gradients: the same without finished gradients.
        peak_beside_earlier: the same without gradients that were finished when the phase began.
        end: bytes alive at its end, without finished gradients.
        flops: operations of its matrix products.
        traffic: bytes that its other operations read and write.
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
    peak: int
    peak_without_gradients: int
    peak_beside_earlier: int
    end: int
    flops: int
    traffic: int
    after_first_gradient: bool = False
    finished: int = 0
    saved: int = 0
    casts: int = 0
    sent: int = 0
    blocks: int = 1
    kept_by_each: int = 0


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

    @property
    def traffic(self) -> int:
        return sum(phase.traffic for phase in self.phases)

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

        peaks = ("peak", "peak_without_gradients", "peak_beside_earlier")
        amounts = (*peaks, "end", "flops", "traffic", "saved", "casts", "sent")
        phases = [replace(a, **between(a, b, amounts)) for a, b in zip(self.phases, other.phases, strict=True)]
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
        alive = saved if last <= i <= backward[0] else 0
        finished = gradients if i > backward[1] else 0
        times = 1
        if i in (middle, backward[1]):  # this phase also represents the missing blocks
            alive, times = saved, 1 + missing
            finished = max(gradients - saved, 0) if i == backward[1] and missing > 0 else 0
        deeper.append(
            replace(
                phase,
                peak=phase.peak + alive + finished,
                peak_without_gradients=phase.peak_without_gradients + alive,
                peak_beside_earlier=phase.peak_beside_earlier + alive,
                end=phase.end + (alive if i < backward[0] else 0),
                finished=phase.finished + (gradients if i >= backward[1] else 0),
                flops=phase.flops * times,
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
