"""The overhead benchmark. The tests check what was done, and never how long it took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from benchmarks.__main__ import main
from benchmarks.contest import why_absent
from benchmarks.overhead import measure_overhead
from benchmarks.overhead_loops import CONTENDERS, Contender, NullControl, tiny_model
from benchmarks.turns import StepDone
from rapidformer_templates.errors import RapidformerError


class Lazy(Contender):
    """A loop that claims steps which it does not take."""

    name = "lazy"

    def run(self, step_done: StepDone) -> None:
        while True:
            step_done()


@pytest.mark.longer
@pytest.mark.parametrize("kind", CONTENDERS)
def test_a_loop_does_the_work_of_the_plain_one(kind: type[Contender]) -> None:
    """``measure_overhead`` compares the losses after its warm-up."""
    reason = why_absent(kind.module, kind.package)
    if reason:
        pytest.skip(reason)
    (row,) = measure_overhead(rounds=2, steps=3, kinds=(kind,))
    assert row["name"] == kind.name
    assert row["step_ms"] > 0
    assert row["low_ms"] <= row["extra_ms"] <= row["high_ms"]


@pytest.mark.longer
def test_a_loop_that_does_less_is_found_out() -> None:
    with pytest.raises(RapidformerError, match="they do different work"):
        measure_overhead(rounds=1, steps=1, kinds=(Lazy,))


def test_every_loop_starts_with_the_same_weights() -> None:
    first, second = (nn.utils.parameters_to_vector(tiny_model().parameters()) for _ in range(2))
    assert first.equal(second)


@pytest.mark.slow
def test_the_command_writes_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import overhead

    monkeypatch.setattr(overhead, "CONTENDERS", (NullControl, overhead.Ours, overhead.Fabric))
    monkeypatch.setattr(overhead.Fabric, "module", "no_such_module")
    assert main(["overhead", "--rounds", "1", "--steps", "1", "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "overhead.json").read_text())
    assert [row["name"] for row in result["loops"]] == [NullControl.name, overhead.Ours.name]
    assert result["absent"] == {"Lightning Fabric": "lightning-fabric is not installed (pip install lightning-fabric)"}
    assert {"python", "torch"} <= result["versions"].keys()
    assert (tmp_path / "overhead.png").stat().st_size > 0
    assert "absent: Lightning Fabric" in capsys.readouterr().out
