"""The picture of the curves: a single point is visible, and there is no empty panel."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from rapidformer_templates.run.console import LEAST_SMOOTHED, RATE, SPEED, curves_of, draw_curves, smoothed
from rapidformer_templates.run.folder import RunFolder

BLUE, GREEN = (31, 119, 180), (44, 160, 44)
"""The colors of the training loss and of the throughput."""


def picture(folder: Path, lines: Sequence[Mapping[str, Any]]) -> np.ndarray[Any, Any]:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw_curves(RunFolder(folder))
    return np.round(255 * imread(folder / "curves.png")[..., :3]).astype(int)


def pixels(image: np.ndarray[Any, Any], color: tuple[int, int, int]) -> int:
    return int((image == color).all(axis=-1).sum())


def train_line(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 2.0 / step, "samples_per_second": 100.0}


def test_a_single_point_is_visible(tmp_path: Path) -> None:
    image = picture(tmp_path, [train_line(1)])
    # A marker is a disk with a diameter of about 9 pixels at 110 dpi. The throughput has no legend.
    assert pixels(image, GREEN) > 30
    assert pixels(image[: len(image) // 2], BLUE) > pixels(image, GREEN)


@pytest.mark.parametrize(
    ("lines", "panels"),
    [
        ([], {}),
        ([{"step": 4, "test/loss": 0.1}], {}),
        ([{"step": 4, "accuracy": 0.5}], {}),
        (
            [train_line(1), train_line(2)],
            {"loss": {"training": [(1, 2.0), (2, 1.0)]}, SPEED: {SPEED: [(1, 100.0), (2, 100.0)]}},
        ),
        ([{"step": 4, "eval_loss": 0.5, "accuracy": 1.0}], {"loss": {"validation": [(4, 0.5)]}}),
        ([{"step": 4, "eval_loss": None}, {"step": 8, "hard/loss": 0.5}], {"loss": {"hard": [(8, 0.5)]}}),
        (
            [{"step": 4, "loss": None, "samples_per_second": 9.0}],
            {SPEED: {SPEED: [(4, 9.0)]}},
        ),
    ],
)
def test_curves_and_panels_without_points_are_left_out(
    lines: Sequence[Mapping[str, Any]], panels: Mapping[str, Any], tmp_path: Path
) -> None:
    assert curves_of(lines) == panels
    if panels:
        assert len(picture(tmp_path, lines)) == 330 * len(panels)  # 3 inches each
    else:
        (tmp_path / "metrics.jsonl").touch()
        draw_curves(RunFolder(tmp_path))
        assert not (tmp_path / "curves.png").exists()


def test_the_picture_has_title_best_step_rate_metric_and_a_smooth_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: Any, **named: Any) -> None:
        figures.append(figure)
        save(figure, *args, **named)

    monkeypatch.setattr(Figure, "savefig", keep)
    lines: list[dict[str, Any]] = [{**train_line(step), "lr": 1e-3} for step in range(1, LEAST_SMOOTHED + 1)]
    lines += [{"step": step, "eval_loss": 1.0, "accuracy": 1 / step} for step in (10, 20)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw_curves(RunFolder(tmp_path), {"step": 10, "metric": "accuracy", "value": 0.1})
    (figure,) = figures
    assert figure.get_suptitle() == f"{tmp_path.name}: best accuracy 0.1 at step 10"
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "accuracy", RATE, SPEED]
    curves = [[list(line.get_ydata()) for line in axes.get_lines()] for axes in figure.axes]
    losses = [line["loss"] for line in lines if "loss" in line]
    raw, smooth, validation = curves[0][:3]
    assert raw == losses
    np.testing.assert_allclose(smooth, pd.Series(losses).ewm(alpha=0.1).mean(), rtol=1e-12)
    assert validation == [1.0, 1.0]
    assert curves[1][0] == [0.1, 0.05]
    assert curves[2][0] == [1e-3] * LEAST_SMOOTHED
    for axes in figure.axes:
        assert list(axes.get_lines()[-1].get_xdata()) == [10, 10]
    assert (tmp_path / "curves.png").exists()


def test_few_points_are_drawn_as_they_are() -> None:
    assert smoothed([(3, 2.0)]) == [(3, pytest.approx(2.0))]
    lines = [{"step": 4, "eval_loss": 0.5, "mine/loss": 0.4}]
    assert list(curves_of(lines, "mine/loss")) == ["loss"]
    assert curves_of([*lines, {"step": 8, "bleu": 3.0}], "bleu")["bleu"] == {"bleu": [(8, 3.0)]}
