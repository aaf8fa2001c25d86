"""The overhead benchmark. The tests check what was done, and never how long it took."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from benchmarks import loops, overhead
from benchmarks.__main__ import main
from benchmarks.contest import why_absent
from benchmarks.loops import Job
from benchmarks.overhead import CONTENDERS, OURS, PACKAGES, measure_overhead
from benchmarks.workers import StepDone
from rapidformer_templates.errors import RapidformerError

CONTROL, *_ = CONTENDERS


@pytest.mark.longer
@pytest.mark.parametrize("name", CONTENDERS)
def test_a_loop_does_the_work_of_the_plain_one(name: str) -> None:
    """``measure_overhead`` compares the losses after its warm-up."""
    if reason := why_absent(*PACKAGES.get(name, ("torch", "torch"))):
        pytest.skip(reason)
    (row,) = measure_overhead(rounds=2, steps=3, contenders={name: CONTENDERS[name]})
    assert row["name"] == name
    assert row["step_ms"] > 0
    assert row["low_ms"] <= row["extra_ms"] <= row["high_ms"]


def _lazy(step_done: StepDone, job: Job) -> None:
    step_done.begin()
    for _ in itertools.count():
        step_done(1.0)


@pytest.mark.slow
def test_a_loop_that_does_less_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loops.LOOPS, "lazy", _lazy)
    monkeypatch.setattr(overhead, "WARMUP", 2)
    with pytest.raises(RapidformerError, match="they do different work"):
        measure_overhead(rounds=1, steps=1, contenders={"lazy": "lazy"})


@pytest.mark.slow
def test_the_command_writes_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (CONTROL, OURS, overhead.FABRIC)
    monkeypatch.setattr(overhead, "CONTENDERS", {name: CONTENDERS[name] for name in names})
    monkeypatch.setattr(overhead, "PACKAGES", {overhead.FABRIC: ("no_such_module", "lightning-fabric")})
    assert main(["overhead", "--rounds", "1", "--steps", "1", "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "overhead.json").read_text())
    assert [row["name"] for row in result["loops"]] == [CONTROL, OURS]
    assert result["absent"] == {"Lightning Fabric": "lightning-fabric is not installed (pip install lightning-fabric)"}
    assert {"python", "torch"} <= result["versions"].keys()
    assert (tmp_path / "overhead.png").stat().st_size > 0
    assert "absent: Lightning Fabric" in capsys.readouterr().out
