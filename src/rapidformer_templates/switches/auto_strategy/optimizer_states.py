"""Bytes of each optimizer's state by the shapes of what it updates; held against real optimizers in tests.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rapidformer_templates.planning.optimizers import CPU_ADAM, FUSED_ADAMW, LAMB, OPTIMIZERS, TORCH_ADAM

FP32, BF16, CODE = 4, 2, 1
"""Bytes of a number in fp32 and in bf16, and of a code of 8 bits."""

COUNTER = 4
"""Bytes of a tensor's count of steps, where it is a tensor itself."""

QUANTIZED_FROM = 4096
"""Elements: smaller parameters keep their moments in fp32."""


@dataclass(frozen=True)
class Facts:
    """A parameter of the model, or a part of one.

    Attributes:
        shape: of it.
        decays: whether it does; those that do not are a group of their own.
        is_table: whether it is read by row: an embedding, or the head that scores the words.
        is_expert: whether its first dimension counts experts, which expert parallelism divides.
        is_trained: whether it has a gradient and optimizer state.
        width: bytes of a number of it where it is not trained, and no engine converts it.
        depth: layers that it stands below the end of its stack.
        code_bytes: of numbers that lie in codes of fewer bits than a type's, the bytes of all; else none.
        narrows: whether 16 bits are enough for it, with an fp32 master.
    """

    shape: tuple[int, ...]
    decays: bool
    is_table: bool = False
    is_expert: bool = False
    is_trained: bool = True
    width: int = FP32
    depth: int = 0
    code_bytes: int = 0
    narrows: bool = False

    @property
    def frozen_bytes(self) -> int:
        """Bytes of it where it is not trained, and no engine converts it."""
        return self.code_bytes or self.width * self.count

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def among(self, workers: int) -> Facts:
        """What one of so many workers has of it, over which experts are divided."""
        return replace(self, shape=(self.shape[0] // workers, *self.shape[1:])) if self.is_expert else self


@dataclass(frozen=True)
class StateRule:
    """How large the state of an optimizer is, of parameters in fp32.

    Attributes:
        of_one: bytes that belong to one parameter.
        shared: bytes that those of at least ``QUANTIZED_FROM`` elements have in common: tables of codes.
        group_of: what tells groups of parameters apart, besides their decay.
    """

    of_one: Callable[[Facts], int]
    shared: int = 0
    group_of: Callable[[Facts], str] = lambda parameter: ""

    def bytes_of(self, parameters: Sequence[Facts]) -> int:
        """Of all parameters that one optimizer updates."""
        shared = self.shared if any(p.count >= QUANTIZED_FROM for p in parameters) else 0
        return sum(self.of_one(parameter) for parameter in parameters) + shared

    def with_average(self) -> StateRule:
        """The same with an average of the weights beside it."""
        return replace(self, of_one=lambda parameter: self.of_one(parameter) + FP32 * parameter.count)

    def with_rates(self) -> StateRule:
        """The same with a group for each layer, which has a learning rate of its own."""
        return replace(self, group_of=lambda parameter: f"{self.group_of(parameter)} {parameter.depth}")

    def groups_of(self, parameters: Sequence[Facts]) -> list[list[Facts]]:
        """The parameters as an optimizer's groups have them: in the order in which the model comes to each group."""
        groups: dict[tuple[bool, str], list[Facts]] = {}
        for parameter in parameters:
            groups.setdefault((parameter.decays, self.group_of(parameter)), []).append(parameter)
        return list(groups.values())


def part_of(size: int, rank: int, workers: int) -> int:
    """What one of several workers gets of a dimension: all alike, until the last ones get what is left."""
    whole = math.ceil(size / workers)
    return max(0, min(whole, size - rank * whole))


def runs(lengths: Sequence[int]) -> list[Facts]:
    """Flat pieces of parameters, as an optimizer of shards has them."""
    return [Facts((length,), decays=True) for length in lengths]


def _moments(width: float, counter: int = COUNTER) -> Callable[[Facts], int]:
    """Two moments of ``width`` bytes a number, and a count of steps."""
    return lambda parameter: int(2 * width * parameter.count) + counter


def _factored(parameter: Facts) -> int:
    """Adafactor: the means of the rows and of the columns of each matrix; of a vector each element's."""
    if len(parameter.shape) < 2:
        return FP32 * parameter.count + COUNTER
    *outer, rows, columns = parameter.shape
    return FP32 * math.prod(outer) * (rows + columns) + COUNTER


def _in_blocks(bits: int, block: int, *, table: int, counter: int, whole_blocks: bool) -> Callable[[Facts], int]:
    """Codes of so many bits, a scale for each block of them, and two tables of codes.

    Args:
        table: bytes of the tables that each parameter has for itself.
        whole_blocks: whether a parameter that is no multiple of a block stays in fp32.
    """
    plain = _moments(FP32, counter)

    def of_one(parameter: Facts) -> int:
        count = parameter.count
        if count < QUANTIZED_FROM or (whole_blocks and count % block):
            return plain(parameter)
        return 2 * (count * bits // 8 + FP32 * math.ceil(count / block)) + table + counter

    return of_one


def is_for_muon(parameter: Facts) -> bool:
    """Whether Muon updates it; AdamW has the rest."""
    return len(parameter.shape) == 2 and not parameter.is_table


def _momentum_or_adam(parameter: Facts) -> int:
    return FP32 * parameter.count if is_for_muon(parameter) else _moments(FP32)(parameter)


ADAMW = StateRule(_moments(FP32))
UNCOUNTED_ADAM = StateRule(_moments(FP32, counter=0))
"""Nvidia apex's and DeepSpeed's count steps in plain numbers."""

STATES: Mapping[str, StateRule] = {
    FUSED_ADAMW: ADAMW,
    **dict.fromkeys(TORCH_ADAM.values(), ADAMW),
    OPTIMIZERS["adamw_torch"].implementation: ADAMW,
    OPTIMIZERS["apex_adam"].implementation: UNCOUNTED_ADAM,
    OPTIMIZERS["apex_lamb"].implementation: UNCOUNTED_ADAM,
    CPU_ADAM: UNCOUNTED_ADAM,
    LAMB: ADAMW,
    OPTIMIZERS["adafactor"].implementation: StateRule(_factored),
    OPTIMIZERS["adamw_anyprecision"].implementation: StateRule(_moments(BF16)),
    OPTIMIZERS["muon"].implementation: StateRule(
        _momentum_or_adam, group_of=lambda parameter: "muon" if is_for_muon(parameter) else "adamw"
    ),
    OPTIMIZERS["adamw_bnb_8bit"].implementation: StateRule(
        _in_blocks(8, 256, table=0, counter=0, whole_blocks=False), shared=2 * 256 * FP32
    ),
    OPTIMIZERS["adamw_torch_8bit"].implementation: StateRule(
        _in_blocks(8, 256, table=2 * 256 * FP32, counter=COUNTER, whole_blocks=True)
    ),
    OPTIMIZERS["adamw_torch_4bit"].implementation: StateRule(
        _in_blocks(4, 128, table=2 * 16 * FP32, counter=COUNTER, whole_blocks=True)
    ),
}
"""By the class that makes the updates, as a plan names it."""
