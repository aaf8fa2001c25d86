"""The padding benchmark. The tests check what was done, and never how long it took."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import padding
from benchmarks.__main__ import main


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LONGEST": 256, "ROWS": 4, "BUDGET": 1024, "WARMUP": 1}.items():
        monkeypatch.setattr(padding, name, value)
    whole = padding.docstrings
    monkeypatch.setattr(padding, "docstrings", lambda longest: whole(longest, 600))


@pytest.mark.slow
def test_text_is_real_and_of_unequal_length() -> None:
    samples = padding.docstrings(256)
    assert len(samples) == 600
    assert samples.lengths.max() == 256
    assert len(np.unique(samples.lengths)) > 100
    bytes(samples[0]["input_ids"].astype(np.uint8)).decode()


@pytest.mark.longer
def test_every_way_has_the_budget_and_the_whole_text() -> None:
    samples = padding.docstrings(256)
    fills = {}
    for name, way in padding.ways(samples.lengths).items():
        contender = padding.Contender(samples, *way())
        shapes, fills[name] = contender.epoch()
        assert all(rows * length <= 1024 for rows, length in shapes)
        steps = range(contender.order.steps_per_epoch)
        assert sorted(i for step in steps for i in contender.order.step(step)[0]) == list(range(600))
        contender.advance(2)
        assert contender.useful[-1] == sum(samples.lengths[contender.order.step(step)[0]].sum() for step in range(2))
    assert fills[padding.MAXIMUM] == pytest.approx(samples.lengths.sum() / (150 * 1024)) == fills["1 shape"]
    rising = [fills[name] for name in ("1 shape", "2 shapes", "4 shapes", "8 shapes", "16 shapes", padding.UNCAPPED)]
    assert rising == sorted(rising)
    assert fills[padding.RANDOM] < min(fills[padding.GROUPED], fills[padding.UNCAPPED])


def test_ratios_are_those_of_the_rates() -> None:
    slow, fast = np.array([[2.0, 10], [2.0, 30]]), np.array([[1.0, 20], [1.0, 40]])
    value, low, high = padding._over(fast, slow)
    assert value == 3
    assert low == pytest.approx(40 / 15, abs=1e-3)  # the second round drawn twice
    assert high == pytest.approx(4)  # the first round drawn twice


@pytest.mark.longer
def test_the_command_writes_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["padding", "--rounds", "1", "--steps", "1", "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "padding.json").read_text())
    assert [row["name"] for row in result["ways"]] == list(padding.ways(padding.docstrings(256).lengths))
    assert all(row["tokens_per_second"] > 0 for row in result["ways"])
    shapes = {row["name"]: row["shapes"] for row in result["ways"]}
    assert all(shapes[f"{cap} shapes"] <= cap for cap in (2, 4, 8, 16))
    assert (tmp_path / "padding.png").stat().st_size > 0
    assert "goal: without a cap a fill of 0.97" in capsys.readouterr().out
