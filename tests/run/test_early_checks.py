"""Checks of a run before torch is imported: the user sees all mistakes at once, and none that is a guess."""

from __future__ import annotations

from pathlib import Path

import pytest

from rapidformer_templates.errors import ConfigError, DataError, Refused, SeveralMistakes
from rapidformer_templates.run.early_checks import refuse_mistakes


def lines_of(words: str) -> list[str]:
    """Return the lines that a command with several mistakes prints."""
    with pytest.raises(SeveralMistakes) as caught:
        refuse_mistakes(words.split())
    assert caught.value.exit_status == 2
    return caught.value.render().splitlines()


def test_three_wrong_keys_are_three_lines(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("task: causal_lm\nmicro_batch_sise: 3\nlearning_rate: 1e-3\nlr: fast\n")
    assert lines_of(f"--config {file}") == [
        "error: unknown key 'micro_batch_sise' (job.yaml:2): did you mean micro_batch_size?",
        "error: unknown key 'learning_rate' (job.yaml:3): did you mean lr?",
        "error: --lr needs a value of type float, not 'fast' (job.yaml:4)",
    ]


def test_unknown_flags_and_a_wrong_value_are_three_lines() -> None:
    """The words after an unknown flag are its values, and are not reported."""
    assert lines_of("--task causal_lm --foo 1 2 --learning-rate=3 --epochs none") == [
        "error: unknown flag --foo (command line): rapidformer --help-all lists every flag",
        "error: unknown flag --learning-rate (command line): did you mean --lr?",
        "error: --epochs needs a value of type int, not 'none' (command line)",
    ]


def test_flags_without_their_value_do_not_hide_other_mistakes() -> None:
    assert lines_of("words here --lr 1 --lr --epochs --sed 1 --no-save=3") == [
        "error: argument --lr: expected one argument: rapidformer --help-all lists every flag",
        "error: argument --epochs: expected one argument: rapidformer --help-all lists every flag",
        "error: argument --no-save: ignored explicit argument '3': rapidformer --help-all lists every flag",
        "error: unexpected argument 'words', and 1 more: rapidformer --help-all lists every flag",
        "error: unknown flag --sed (command line): did you mean --seed?",
    ]


def test_wrong_flags_and_missing_folders_are_reported_together(tmp_path: Path) -> None:
    lines = lines_of(
        f"--lrr 1 --data-dir {tmp_path}/data --load {tmp_path}/run --tokenizer-path {tmp_path}/words "
        f"--pretrained-model-name-or-path {tmp_path}/model --data-path {tmp_path}/text"
    )
    assert lines[0] == "error: unknown flag --lrr (command line): did you mean --lr?"
    places = ["(--pretrained-model-name-or-path)", "(--tokenizer-path)", "(--load)", "(--data-dir)", "(--data-path)"]
    assert len(lines) == 1 + len(places)
    assert all(place in line for place, line in zip(places, lines[1:], strict=True))


def test_nothing_is_missing_that_an_unknown_flag_may_have_meant(tmp_path: Path) -> None:
    """``--resum`` may mean ``--resume``. So the run in the folder is a mistake only if all flags are known."""
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match="unknown flag --resum") as caught:
        refuse_mistakes(f"--save {tmp_path} --resum".split())
    assert not isinstance(caught.value, SeveralMistakes)
    lines = lines_of(f"--save {tmp_path} --lr x")
    assert ["already holds a run" in line for line in lines] == [False, True]


def test_a_refused_plan_does_not_hide_missing_folders(tmp_path: Path) -> None:
    with pytest.raises(SeveralMistakes) as caught:
        refuse_mistakes(f"--task causal_lm --data-dir {tmp_path}/data --mask-prob 0.2 --split 9,1 --device cpu".split())
    errors = caught.value.errors
    assert [type(error) for error in errors if isinstance(error, Refused)] == [Refused]
    assert [error.where for error in errors if isinstance(error, DataError)] == ["--data-dir"]
    text = caught.value.render()
    assert "does not use --mask-prob" in text
    assert "does not use --split" in text
    assert text.index("--data-dir") < text.index("error[RF")


def test_a_single_mistake_keeps_its_three_lines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_mistakes(["--lrr", "1"])
    assert caught.value.render() == "error: unknown flag --lrr\n  where  command line\n  help   did you mean --lr?"


def test_a_weighted_corpus_names_the_missing_part(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "b.idx").write_text("")
    corpora = f"0.3 {tmp_path}/a.txt 0.3 {tmp_path}/b 0.4 {tmp_path}/c"
    lines = lines_of(f"--lrr 1 --data-path {corpora}")
    assert lines[1].startswith(f"error: {tmp_path}/c does not exist (--data-path)")
    assert len(lines) == 2
