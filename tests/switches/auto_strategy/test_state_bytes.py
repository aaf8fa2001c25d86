"""Formulas of the bytes that each worker holds, compared with counts by hand."""

from __future__ import annotations

import dataclasses

from rapidformer_templates.planning.optimizer_states import ParameterShape
from rapidformer_templates.switches.auto_strategy.state_bytes import (
    StateBytes,
    divided_groups,
    divided_groups_on_host,
    divided_in_rows,
    each_divided,
    each_divided_on_disk,
    each_divided_on_host,
    owned,
    owned_with_gradients,
    replicated,
    replicated_with_masters,
)

FEW = [
    ParameterShape((10, 4), True),
    ParameterShape((3,), False),
    ParameterShape((5, 4), True),
    ParameterShape((5,), False),
]
"""60 elements with weight decay, 8 without."""


def test_ddp_holds_16_bytes_a_parameter_on_every_worker() -> None:
    assert replicated(FEW, 2, 4) == [StateBytes(4 * 68, 4 * 68, 8 * 68 + 4 * 4)] * 2


def test_masters_stand_beside_weights_of_16_bits() -> None:
    some = [dataclasses.replace(facts, has_master=facts.decays) for facts in FEW]
    assert replicated_with_masters(some, 2, 2) == [StateBytes(2 * 60 + 4 * 8, 4 * 68, 8 * 68 + 4 * 4 + 4 * 60)] * 2


def test_oss_gives_each_parameter_to_whoever_has_fewest() -> None:
    # The first worker owns 40 elements. The second owns 20, 3 and 5.
    assert owned(FEW, 2, 4) == [StateBytes(272, 272, 8 * 40 + 4), StateBytes(272, 272, 8 * 28 + 12)]
    assert owned_with_gradients(FEW, 2, 4) == [StateBytes(272, 160, 8 * 40 + 4), StateBytes(272, 112, 8 * 28 + 12)]


def test_fsdp_fills_up_what_cannot_be_halved() -> None:
    # Halves: 10 rows of four, 3 numbers, 5 rows of four, 5 numbers. Each worker has room for the larger half, and
    # states of its half.
    first, second = 20 + 2 + 12 + 3, 20 + 1 + 8 + 2
    assert divided_in_rows(FEW, 2, 4) == [StateBytes(4 * first, 4 * first, 8 * count + 16) for count in (first, second)]


def test_zero_1_and_2_hold_masters_beside_whole_parameters() -> None:
    # Groups of 60 and 8 elements have parts of 30 and 4. The first parameter of each group is cut. Both workers have
    # its complete gradient.
    first = StateBytes(272, 4 * (40 + 3 + 5), 12 * 34 + 8)
    second = StateBytes(272, 4 * (40 + 20 + 5), 12 * 34 + 8)
    assert divided_groups(FEW, 2, 4) == [first, second]
    assert divided_groups_on_host(FEW, 2, 4) == [StateBytes(272, 4 * 34, 12 * 34)] * 2
    assert divided_groups(FEW, 2, 2)[0].parameters == 2 * 68


def test_zero_3_cuts_everything_and_keeps_what_is_small() -> None:
    share = 20 + 2 + 10 + 3
    assert each_divided(FEW, 2, 4) == [StateBytes(4 * (share + 68), 4 * share, 12 * share + 8)] * 2
    assert each_divided_on_host(FEW, 2, 4) == [StateBytes(4 * (share + 68), 8 * share, 12 * share)] * 2
    assert each_divided(FEW, 2, 2) == [StateBytes(2 * (share + 68), 2 * share, 12 * share + 8)] * 2
    large = [ParameterShape((1000, 1000), True)]
    assert each_divided(large, 4, 4)[0].parameters == 1_000_000


def test_nvme_leaves_small_groups_in_memory() -> None:
    large, small = ParameterShape((1024, 1024), True), ParameterShape((512,), False)
    # The 524,288 elements of the first group are on the disk. The 256 elements of the second are not.
    assert (
        each_divided_on_disk([large, small], 2, 4)
        == [StateBytes(4 * (524_544 + 512), 4 * (524_544 + 256), 12 * 256)] * 2
    )
