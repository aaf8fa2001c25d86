"""A script's own hooks: misspelt names are refused."""

from __future__ import annotations

from typing import Any

import pytest

from rapidformer_templates import Finetuner, Trainer
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.run.scripts import check_names

pytestmark = pytest.mark.usefixtures("offline")

FLAGS = ["--lr", "0.1", "--train-iters", "2", "--no-save"]


def _with(name: str, value: Any, base: Any = Trainer, **others: Any) -> type[Trainer]:
    kind: type[Trainer] = type("Mine", (base,), {name: value, **others})
    return kind


def _method(self: Any, *arguments: Any) -> None:
    """A placeholder for a hook."""


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("compute_los", "compute_loss"),
        ("computeLoss", "compute_loss"),
        ("compute_metric", "compute_metrics"),
        ("build_optimiser", "build_optimizer"),
        ("build_schedule", "build_scheduler"),
        ("build_models", "build_model"),
        ("count_target", "count_targets"),
        ("read_output", "read_outputs"),
        ("on_epoch_ends", "on_epoch_end"),
        ("on_step_start", "on_train_start"),
        ("on_train_begin", "on_train_end"),
    ],
)
@pytest.mark.parametrize("template", [Trainer, Finetuner])
def test_a_name_that_is_nearly_a_hook_is_refused(name: str, meant: str, template: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        _with(name, _method, template)(FLAGS)
    assert caught.value.message == f"Mine.{name} is not a hook, so nothing would call it"
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(f"did you mean {meant}?")
    assert caught.value.hint.endswith(f"_{name}")
    assert caught.value.where == f"test_script_hooks.py:{_method.__code__.co_firstlineno}"


@pytest.mark.parametrize("value", [staticmethod(_method), classmethod(_method), property(_method)], ids=["s", "c", "p"])
def test_any_kind_of_method_counts(value: Any) -> None:
    with pytest.raises(ConfigError, match="compute_los is not a hook"):
        check_names(_with("compute_los", value))


def test_a_mixin_of_hooks_counts_and_any_other_does_not() -> None:
    other = type("Other", (), {"on_epoch_ends": _method})
    hooks = type("Hooks", (), {"on_epoch_ends": _method, "on_step_end": _method})
    check_names(type("Mine", (other, Trainer), {}))
    with pytest.raises(ConfigError, match=r"Hooks\.on_epoch_ends is not a hook"):
        check_names(type("Mine", (hooks, Trainer), {}))


@pytest.mark.parametrize(
    "name",
    ["_compute_los", "loss", "build_dataset", "on_gpu", "tokenize", "build", "metrics", "data_path", "predictor"],
)
def test_names_of_ones_own(name: str) -> None:
    check_names(_with(name, _method))


def test_a_helper_beside_the_hook_that_it_is_like() -> None:
    check_names(_with("compute_losses", _method, compute_loss=_method))
    check_names(_with("count_target", 3))  # a value would never be called anyway
