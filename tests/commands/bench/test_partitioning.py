"""Ways to partition the model state, with a few thousand parameters. The tests never check how long anything took."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates.commands.bench import measure
from rapidformer_templates.commands.bench.cli import main
from rapidformer_templates.commands.bench.measure import facts_of
from rapidformer_templates.commands.bench.report import Report, deviation
from rapidformer_templates.commands.bench.runs import MeasuredRun
from rapidformer_templates.commands.bench.tables import PARTITIONING
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

has_fairscale = importlib.util.find_spec("fairscale") is not None


def test_the_paper_s_model_is_the_published_one() -> None:
    assert sum(parameter.count for parameter in facts_of(PARTITIONING.scales["paper"])) == 1_313_722_368


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


def test_each_partitioning_approaches_its_share() -> None:
    """Bytes per parameter on N workers, for the model in the table."""
    model, workers = facts_of(PARTITIONING.scales["small"]), 2
    count = sum(parameter.count for parameter in model)
    shares = {
        "none": (4, 4, 8),
        "mixed": (2, 4, 12),
        "fsdp": (4 / workers, 4 / workers, 8 / workers),
        "zero-2-offload": (4, 4 / workers, 12 / workers),
        "zero-3": (4 / workers, 4 / workers, 12 / workers),
    }
    for name, expected in shares.items():
        for held in PARTITIONING.solutions[name].formula(model, workers, 4):
            assert held.per_parameter(count) == pytest.approx(expected, rel=0.01), name
    for name in ("oss", "oss-sdp"):
        by_rank = PARTITIONING.solutions[name].formula(model, workers, 4)
        assert sum(held.optimizer for held in by_rank) == 8 * count + 4 * len(model)


def test_the_deviation_is_the_greatest_one() -> None:
    assert deviation(
        [StateBytes(4, 4, 8), StateBytes(4, 4, 8)], [StateBytes(4, 4, 8), StateBytes(4, 5, 8)]
    ) == pytest.approx(0.2)


def test_ratios_are_of_steps_that_were_made_in_turns() -> None:
    report = Report(PARTITIONING, "tiny", 2, "cpu", global_batch=4)
    report.runs = {"none": [MeasuredRun([1.0, 2.0, 10.0])], "accelerate DDP": [MeasuredRun([2.0, 4.0, 10.0])]}
    assert report.ratios("none", "accelerate DDP") == [2.0]
    assert report.samples_per_second("none") == pytest.approx(12 / 13)


def test_who_computes_another_loss_is_found_out() -> None:
    report = Report(PARTITIONING, "tiny", 2, "cpu", global_batch=4, precision=dict.fromkeys(("none", "fsdp"), "fp32"))
    losses = {"none": 4.0, "fsdp": 4.0, "accelerate DDP": 4.1}
    report.runs = {name: [MeasuredRun([1.0], [{"loss": loss}])] for name, loss in losses.items()}
    measure._check_losses(report)
    assert set(report.runs) == {"none", "fsdp"}
    assert report.absent == {
        "accelerate DDP": "its loss is 4.1000, and that of the others 4.0000: it does different work"
    }
    assert report.failed == []


def test_the_paper_s_scale_needs_its_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partitioning", "--scale", "paper", "--device", "cpu"]) == 2
    assert "4 workers with a GPU each; there are 0 GPUs" in capsys.readouterr().err


def test_solutions_that_do_not_exist_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partitioning", "--solutions", "none,zero-4"]) == 2
    assert "there is no solution zero-4" in capsys.readouterr().err


def _result(folder: Path, *words: str) -> Any:
    arguments = ["partitioning", "--scale", "tiny", "--device", "cpu", "--repeats", "1", "--steps", "2"]
    assert main([*arguments, "--output", str(folder), *words]) == 0
    return json.loads((folder / "partitioning.json").read_text())


@pytest.mark.longer
@pytest.mark.distributed
def test_solutions_and_a_peer_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["none", "oss-sdp"] if has_fairscale else ["none", "fsdp"]
    result = _result(tmp_path, "--solutions", ",".join(names))
    rows = result["solutions"]
    assert {*names, "accelerate DDP"} <= rows.keys()
    for row in rows.values():
        assert row["samples_per_second"] > 0
        assert row["peak_mb"] >= row["setup_mb"] >= row["before_mb"] > 100  # torch alone takes as much
        assert [len(seconds) for seconds in row["seconds"]] == [2]
    for name in names:
        assert rows[name]["held"] == rows[name]["expected"]
    assert rows["none"]["loss"] == pytest.approx(rows["accelerate DDP"]["loss"], rel=1e-5)
    assert result["ratios"]["accelerate DDP"][0] > 0
    assert (tmp_path / "partitioning.png").stat().st_size > 0
    shown = capsys.readouterr().out
    assert "× accelerate DDP; goal 1.0 ×" in shown
    assert "17,113" in shown or not has_fairscale
