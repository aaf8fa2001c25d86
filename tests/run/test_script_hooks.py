"""A script's own hooks: misspelt names are refused, and flags that the hooks make ineffective are reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from rapidformer_templates import Data, Finetuner, Trainer
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.run.scripts import check_names, hooks_of
from tests.support.texts import WORDS, write_jsonl

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
        ("training_step", "compute_loss"),
        ("configure_optimizers", "build_optimizer"),
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
    check_names(_with("training_step", _method, compute_loss=_method))
    check_names(_with("count_target", 3))  # a value would never be called anyway


class _Own(Trainer):
    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def build_data(self) -> Data:
        return Data(train=[1])


class _Reading(_Own):
    def build_model(self) -> nn.Module:
        return nn.Linear(self.config.model.hidden_size or 1, self._layers())

    def _layers(self) -> int:
        return int(self.config.get("num_layers"))


class _Changing(_Own):
    def build_model(self) -> nn.Module:
        return super().build_model().half()


def _idle(template: type[Trainer], flags: str) -> list[str]:
    notes = template([*FLAGS, *flags.split()]).plan.notes
    return [note for note in notes if " acts in the default " in note]


def test_flags_that_own_hooks_make_idle_are_told() -> None:
    assert _idle(_Own, "--num-layers 99 --data-dir x --micro-batch-size 1") == [
        "--num-layers (command line) acts in the default build_model; the build_model of _Own does not name it",
        "--data-dir (command line) acts in the default build_data; the build_data of _Own does not name it",
    ]
    for template, silent in (
        (_Reading, "--num-layers 2 --hidden-size 3"),
        (_Changing, "--num-layers 2"),
        (Trainer, ""),
    ):
        assert _idle(template, silent) == []
    (told,) = _idle(_Reading, "--num-attention-heads 2")
    assert told.startswith("--num-attention-heads")


def test_schedule_and_optimizer() -> None:
    both = _with("build_scheduler", lambda self, total: lambda step: 1.0, build_optimizer=lambda self: None)
    notes = _idle(both, "--lr-decay-style cosine --weight-decay 0.3 --optimizer adamw_torch")
    assert [note.split()[0] for note in notes] == ["--lr", "--optimizer", "--weight-decay", "--lr-decay-style"]
    # The default model still reads flags that the script's own data do not use.
    assert _idle(_with("build_data", _method), "--seq-length 8 --model-type gpt2") == []


# Compare the flags that the defaults read with the declared flags.


class _Recording:
    """A section of the configuration, or the plan, that records which attributes are read."""

    def __init__(self, section: Any, asked: set[str]) -> None:
        self._section, self._asked = section, asked

    def __getattr__(self, name: str) -> Any:
        self._asked.add(name)
        return getattr(self._section, name)


@pytest.fixture
def asked_by(tmp_path: Path, bert_folder: Path) -> Callable[[str], set[str]]:
    rows = [
        {"text": f"The {' '.join(WORDS[i : i + 5])}. A {' '.join(WORDS[:4])}. It is.", "label": "ab"[i % 2]}
        for i in range(30)
    ]
    write_jsonl(tmp_path / "train.jsonl", rows)
    sizes = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16"
    common = f"{sizes} --tokenizer-path {bert_folder} --lr 0.1 --train-iters 2 --no-save"
    files = f"--data-dir {tmp_path} --data-name train"
    corpus = f"--data-path {tmp_path / 'train.jsonl'} --data-cache-dir {tmp_path / 'cache'}"
    scenarios = [
        f"--task causal_lm --model-type gpt2 {files}",
        f"--task causal_lm --model-type gpt2 {files} --streaming",
        f"--task sequence_classification --model-type bert {files}",
        f"--task pretraining --model-type gpt2 {corpus}",
        f"--task pretraining --model-type bert {corpus}",
        f"--task pretraining --model-type t5 {corpus} --lr-decay-style warmup_stable_decay",
    ]

    def runs() -> Iterator[tuple[str, Trainer, set[str]]]:
        for flags in scenarios:
            asked: set[str] = set()
            job = Trainer([*common.split(), *flags.split()])
            vars(job)["plan"] = _Recording(job.plan, asked)
            sections = {name: _Recording(getattr(job.config, name), asked) for name in ("model", "data", "training")}
            job.config = dataclasses.replace(job.config, **sections)
            yield flags, job, asked

    def ask(hook: str) -> set[str]:
        found: set[str] = set()
        for flags, job, asked in runs():
            if hook == "build_model" and "classification" in flags:
                continue  # it needs the labels of the data first
            if hook == "build_data" and "t5" in flags:
                continue  # it needs a different tokenizer
            getattr(job, hook)(*([10] if hook == "build_scheduler" else []))
            found |= asked
        return found

    return ask


BESIDES = {
    # It builds the model's configuration to get the maximum sample length. Only the number of positions matters.
    "build_data": {"num_layers", "hidden_size", "num_attention_heads", "dropout"},
    # Creating the task reads the flags of its objective.
    "build_model": {"keep_documents_apart", "mask_prob", "mean_span_length", "short_seq_prob", "whole_word_mask"},
    # It computes the ratio of --min-lr to the peak rate.
    "build_scheduler": {"lr"},
    "build_optimizer": set(),
}

BY_THE_PLAN = {"build_optimizer": {"optimizer", "adam_beta1", "adam_beta2", "adam_epsilon"}}
"""Fields that a default reads from the plan: the optimizer and its options."""


@pytest.mark.parametrize("hook", BESIDES)
def test_each_hook_declares_what_its_default_reads(hook: str, asked_by: Callable[[str], set[str]]) -> None:
    declared = hooks_of(Trainer)
    of_any = frozenset[str]().union(*declared.values())
    # The files of a tokenizer, and the code and revision of a folder, are read only if there is such a folder.
    conditional = {"vocab_file", "merge_file", "trust_remote_code", "pretrained_model_name_or_path", "revision"}
    read = asked_by(hook) & of_any | BY_THE_PLAN.get(hook, set())
    assert read - BESIDES[hook] - conditional == declared[hook] - conditional
