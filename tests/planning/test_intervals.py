"""Which intervals are allowed, and when a multiple of one has been passed."""

from __future__ import annotations

import pickle
from fractions import Fraction
from typing import Any

import pytest

from rapidformer_templates.errors import ConfigError, Refused
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.flag_values import Epochs, Interval
from rapidformer_templates.planning.registry import switch_options
from rapidformer_templates.planning.resolve import resolve
from tests.support.requests import CPU, codes, config_of


@pytest.mark.parametrize(
    ("text", "size", "unit", "written"),
    [
        ("500", 500, "steps", "500"),
        (500, 500, "steps", "500"),
        ("500 steps", 500, "steps", "500"),
        ("20_000samples", 20000, "samples", "20000samples"),
        ("5e7tokens", 5e7, "tokens", "50000000tokens"),
        ("1token", 1, "tokens", "1tokens"),
        ("30min", 30, "minutes", "30minutes"),
        ("0.5 Minutes", 0.5, "minutes", "0.5minutes"),
        ("1epoch", 1, "epochs", "1epochs"),
        ("0.25epochs", 0.25, "epochs", "0.25epochs"),
        ("0.00001epochs", Fraction(1, 10**5), "epochs", "0.00001epochs"),
        (f"0.{'0' * 30}12min", Fraction(12, 10**32), "minutes", f"0.{'0' * 30}12minutes"),
        ("1e20tokens", 10**20, "tokens", "100000000000000000000tokens"),
    ],
)
def test_what_it_is(text: object, size: float, unit: str, written: str) -> None:
    interval = Interval(text)
    assert (interval.size, interval.unit, str(interval)) == (size, unit, written)
    assert Interval(interval) == pickle.loads(pickle.dumps(interval)) == interval


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "1.5", "0.5samples", "5hours", "minutes", "1e", "ten", "0epochs", f"0.{'0' * 400}1epochs"]
)
def test_what_it_is_not(text: str) -> None:
    with pytest.raises(ValueError, match="a number of steps, or one with its unit"):
        Interval(text)


def test_a_flag_says_what_it_takes() -> None:
    with pytest.raises(ConfigError, match=r"--save-interval needs a number of steps, or .* 0.5epochs, not '3hours'"):
        config_of("--save-interval 3hours")
    with pytest.raises(ConfigError, match=r"--train-iters needs a number of .* data: 3epochs, not '3hours'"):
        config_of("--train-iters 3hours")


def _length(text: str) -> Any:
    return parse([f"--train-iters={text}"], switch_options()).training.train_iters


@pytest.mark.parametrize(
    ("text", "written", "steps"),
    [
        ("3epochs", "3epochs", 39),
        ("1 Epoch", "1epochs", 13),
        ("0.5epochs", "0.5epochs", 7),
        ("0.1epochs", "0.1epochs", 2),
        ("1_000epochs", "1000epochs", 13000),
        ("0.00001epochs", "0.00001epochs", 1),
    ],
)
def test_a_length_in_epochs_is_that_many_passes_rounded_up(text: str, written: str, steps: int) -> None:
    length = _length(text)
    assert isinstance(length, Epochs)
    assert (str(length), length.steps(13)) == (written, steps)
    assert pickle.loads(pickle.dumps(length)) == length


@pytest.mark.parametrize("text", ["0epochs", "-1epochs", "3samples", "epochs", "1e-3epochs"])
def test_what_no_length_is(text: str) -> None:
    with pytest.raises(ConfigError, match="--train-iters needs a number of steps, or of passes"):
        _length(text)


def test_a_fraction_that_floats_miss_is_exact() -> None:
    assert Epochs("0.07epochs").steps(100) == 7  # 0.07 * 100 is 7.000000000000001 in floats
    passed = [step for step in range(1, 31) if Interval("0.1epochs").passed(Fraction(step - 1, 30), Fraction(step, 30))]
    assert passed == [3, 6, 9, 12, 15, 18, 21, 24, 27, 30]


def test_a_number_of_steps_stays_a_number() -> None:
    assert config_of("--train-iters 100").training.train_iters == 100
    with pytest.raises(ConfigError, match="must be at least 1, not 0"):
        config_of("--train-iters 0")


def test_multiples() -> None:
    every = Interval("20samples")
    assert [done for done in range(8, 97, 8) if every.passed(done - 8, done)] == [24, 40, 64, 80]
    assert not every.passed(20, 20)


@pytest.mark.parametrize(
    ("flags", "works"),
    [
        ("--epochs 3", "--train-iters N without --epochs"),
        ("--train-iters 3epochs", "--train-iters N"),
        ("--train-iters 100 --eval-interval 1epochs", "--eval-interval N"),
        ("--train-iters 100 --save-interval 0.5epochs", "--save-interval N"),
        ("--epochs 3 --micro-batch-size 2 --global-batch-size 8", "--train-iters N without --epochs"),
    ],
)
def test_epochs_of_a_stream_are_refused(flags: str, works: str) -> None:
    with pytest.raises(Refused) as caught:
        resolve(config_of(f"--task causal_lm --streaming {flags}"), CPU)
    found = {diagnostic.rule: diagnostic for diagnostic in caught.value.diagnostics}
    assert found["RF151"].message == "a stream has no length, so an epoch has no number of steps"
    assert [suggestion.change for suggestion in found["RF151"].works] == [works]


def test_a_length_in_epochs_is_evaluated_often_enough_to_stop_early() -> None:
    stops = "--task causal_lm --early-stopping-patience 3"
    assert codes(f"{stops} --train-iters 20epochs") == []
    assert codes(f"{stops} --train-iters 20") == ["RF111"]
