"""Checks of a run before torch is imported: the user sees all mistakes at once, and none that is a guess."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rapidformer_templates.errors import ConfigError, SeveralMistakes
from rapidformer_templates.run.early_checks import refuse_mistakes
from tests.support.messages import Says


@pytest.fixture
def mistakes(says: Says, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Return a function that adds the lines of a command with several mistakes to the messages of the test."""
    monkeypatch.setenv("HF_DATASETS_CACHE", "CACHE")

    def lines_of(words: str) -> list[str]:
        with pytest.raises(SeveralMistakes) as caught:
            refuse_mistakes(words.split())
        assert caught.value.exit_status == 2
        says.text(caught.value.render())
        return caught.value.render().splitlines()

    return lines_of


def test_each_mistake_is_one_line(tmp_path: Path, mistakes: Callable[[str], list[str]]) -> None:
    """In files and on the command line. The words after an unknown flag are its values, and are not reported."""
    file = tmp_path / "job.yaml"
    file.write_text("task: causal_lm\nmicro_batch_sise: 3\nlearning_rate: 1e-3\nlr: fast\n")
    assert len(mistakes(f"--config {file}")) == 3
    assert len(mistakes("--task causal_lm --foo 1 2 --learning-rate=3 --epochs none")) == 3
    assert len(mistakes("words here --lr 1 --lr --epochs --sed 1 --no-save=3")) == 5


def test_wrong_flags_and_missing_folders_together(tmp_path: Path, mistakes: Callable[[str], list[str]]) -> None:
    here = str(tmp_path)
    mistakes(
        f"--lrr 1 --data-dir {here}/data --load {here}/run --tokenizer-path {here}/words "
        f"--pretrained-model-name-or-path {here}/model --data-path {here}/text"
    )


def test_an_unknown_flag_may_mean_what_is_missing(
    tmp_path: Path, mistakes: Callable[[str], list[str]], says: Says
) -> None:
    """``--resum`` may mean ``--resume``. So the run in the folder is a mistake only if all flags are known."""
    (tmp_path / "plan.json").write_text("{}")
    with says(ConfigError):  # a single mistake keeps its three lines
        refuse_mistakes(f"--save {tmp_path} --resum".split())
    mistakes(f"--save {tmp_path} --lr x")


def test_a_refused_plan_does_not_hide_missing_folders(tmp_path: Path, mistakes: Callable[[str], list[str]]) -> None:
    mistakes(f"--task causal_lm --data-dir {tmp_path}/data --mask-prob 0.2 --split 9,1 --device cpu")


def test_a_weighted_corpus_names_the_missing_part(tmp_path: Path, mistakes: Callable[[str], list[str]]) -> None:
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "b.idx").write_text("")
    assert len(mistakes(f"--lrr 1 --data-path 0.3 {tmp_path}/a.txt 0.3 {tmp_path}/b 0.4 {tmp_path}/c")) == 2
