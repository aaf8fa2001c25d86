"""Bytes of each optimizer's state, from the shapes of its parameters. Tests compare them with real optimizers.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

FP32, BF16, CODE = 4, 2, 1
"""Bytes per element in fp32, in bf16, and as an 8-bit code."""

COUNTER = 4
"""Bytes of a step counter that is a tensor."""

QUANTIZED_FROM = 4096
"""In elements. Smaller parameters keep their moments in fp32."""


@dataclass(frozen=True)
class ParameterShape:
    """A parameter of the model, or a part of one.

    Attributes:
        shape: its shape.
        decays: whether it has weight decay. Parameters without it are in a separate group.
        is_table: whether it is read by row: an embedding, or the head that scores the words.
        is_expert: whether its first dimension counts experts, which expert parallelism divides.
        is_trained: whether it has a gradient and optimizer state.
        width: bytes per element if no engine converts it.
        depth: number of layers between it and the end of its stack.
        code_bytes: total bytes if its numbers are stored as codes with fewer bits than a type's, else 0.
        has_master: whether 16 bits are enough for it, with an fp32 master.
    """

    shape: tuple[int, ...]
    decays: bool
    is_table: bool = False
    is_expert: bool = False
    is_trained: bool = True
    width: int = FP32
    depth: int = 0
    code_bytes: int = 0
    has_master: bool = False

    @property
    def stored_bytes(self) -> int:
        """Its bytes if no engine converts it."""
        return self.bytes_in(self.width)

    def bytes_in(self, width: int) -> int:
        """Return its bytes in a type with ``width`` bytes per element. Codes have no other type."""
        return self.code_bytes or width * self.count

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def among(self, workers: int) -> ParameterShape:
        """Return the share of one of ``workers`` workers that experts are divided over. Only experts are divided."""
        return replace(self, shape=(self.shape[0] // workers, *self.shape[1:])) if self.is_expert else self


@dataclass(frozen=True)
class StateRule:
    """Size of an optimizer's state for fp32 parameters.

    Attributes:
        of_one: bytes that belong to one parameter.
        shared: bytes that all parameters of at least ``QUANTIZED_FROM`` elements share: tables of codes.
        group_of: key that separates groups of parameters, in addition to weight decay.
    """

    of_one: Callable[[ParameterShape], int]
    shared: int = 0
    group_of: Callable[[ParameterShape], str] = lambda parameter: ""

    def bytes_of(self, parameters: Sequence[ParameterShape]) -> int:
        """Return the bytes of state for all parameters that one optimizer updates."""
        shared = self.shared if any(p.count >= QUANTIZED_FROM for p in parameters) else 0
        return sum(self.of_one(parameter) for parameter in parameters) + shared

    def with_average(self) -> StateRule:
        """Return this rule plus an average of the weights."""
        return replace(self, of_one=lambda parameter: self.of_one(parameter) + FP32 * parameter.count)

    def with_rates(self) -> StateRule:
        """Return this rule with one parameter group and learning rate per layer."""
        return replace(self, group_of=lambda parameter: f"{self.group_of(parameter)} {parameter.depth}")

    def groups_of(self, parameters: Sequence[ParameterShape]) -> list[list[ParameterShape]]:
        """Return the parameters by optimizer group. Groups are in the order of their first parameter in the model."""
        groups: dict[tuple[bool, str], list[ParameterShape]] = {}
        for parameter in parameters:
            groups.setdefault((parameter.decays, self.group_of(parameter)), []).append(parameter)
        return list(groups.values())


def part_of(size: int, rank: int, workers: int) -> int:
    """Return the elements of a dimension that a rank gets. All ranks get equally many, until the last get the rest."""
    whole = math.ceil(size / workers)
    return max(0, min(whole, size - rank * whole))


def runs(lengths: Sequence[int]) -> list[ParameterShape]:
    """Return flat pieces of parameters, as an optimizer of shards has them."""
    return [ParameterShape((length,), decays=True) for length in lengths]


def _moments(width: float, counter: int = COUNTER) -> Callable[[ParameterShape], int]:
    """Two moments of ``width`` bytes per element, and a step counter."""
    return lambda parameter: int(2 * width * parameter.count) + counter


def _factored(parameter: ParameterShape) -> int:
    """Adafactor: the means of rows and columns for a matrix, or of each element for a vector."""
    if len(parameter.shape) < 2:
        return FP32 * parameter.count + COUNTER
    *outer, rows, columns = parameter.shape
    return FP32 * math.prod(outer) * (rows + columns) + COUNTER


def _in_blocks(
    bits: int, block: int, *, table: int, counter: int, whole_blocks: bool
) -> Callable[[ParameterShape], int]:
    """Codes of ``bits`` bits, a scale per block of codes, and two tables of codes.

    Args:
        table: bytes of the tables that each parameter has for itself.
        whole_blocks: whether a parameter stays in fp32 if its size is not a multiple of the block.
    """
    plain = _moments(FP32, counter)

    def of_one(parameter: ParameterShape) -> int:
        count = parameter.count
        if count < QUANTIZED_FROM or (whole_blocks and count % block):
            return plain(parameter)
        return 2 * (count * bits // 8 + FP32 * math.ceil(count / block)) + table + counter

    return of_one


def is_for_muon(parameter: ParameterShape) -> bool:
    """Whether Muon updates the parameter. AdamW updates the rest."""
    return len(parameter.shape) == 2 and not parameter.is_table


ONE_MOMENT = StateRule(lambda parameter: FP32 * parameter.count)
TWO_MOMENTS = StateRule(_moments(FP32))
UNCOUNTED_MOMENTS = StateRule(_moments(FP32, counter=0))
"""NVIDIA apex and DeepSpeed count steps in plain numbers, not in tensors."""

BF16_MOMENTS = StateRule(_moments(BF16))
FACTORED = StateRule(_factored)
MATRIX_MOMENTUM = StateRule(
    lambda parameter: FP32 * parameter.count if is_for_muon(parameter) else _moments(FP32)(parameter),
    group_of=lambda parameter: "muon" if is_for_muon(parameter) else "adamw",
)
"""Muon: one moment of a matrix, and AdamW's two of each other parameter."""

CODES_WITH_SHARED_TABLES = StateRule(_in_blocks(8, 256, table=0, counter=0, whole_blocks=False), shared=2 * 256 * FP32)
CODES_OF_8_BITS = StateRule(_in_blocks(8, 256, table=2 * 256 * FP32, counter=COUNTER, whole_blocks=True))
CODES_OF_4_BITS = StateRule(_in_blocks(4, 128, table=2 * 16 * FP32, counter=COUNTER, whole_blocks=True))
