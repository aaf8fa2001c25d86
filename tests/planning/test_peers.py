"""Flag names of other trainers, and misspelt names: every suggestion exists, and nothing else is suggested."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning import peers
from rapidformer_templates.planning.flag_parser import build_parser, parse
from rapidformer_templates.planning.peers import equivalents
from rapidformer_templates.planning.registry import switch_options

KNOWN = {
    option: action
    for action in build_parser("", switch_options().values(), None, "")._actions
    for option in action.option_strings
}


def hint_of(flags: str) -> str | None:
    with pytest.raises(ConfigError, match="unknown flag") as caught:
        parse(flags.split(), switch_options())
    return caught.value.hint


@pytest.mark.parametrize("name", equivalents())
def test_what_is_suggested_is_a_flag_with_a_value_that_it_takes(name: str) -> None:
    assert f"--{name.replace('_', '-')}" not in KNOWN, "it is a flag of ours"
    here = equivalents()[name]
    words = here.flags.split()
    assert words or here.note
    for word, following in zip(words, [*words[1:], "--"], strict=False):
        if not word.startswith("--"):
            continue
        action = KNOWN[word]
        if not following.startswith("--"):
            parse([word, following], switch_options())
        elif action.nargs in (0, "?"):
            parse([word], switch_options())


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ("--learning-rate 1e-5", "did you mean --lr?"),
        ("--bf16-full-eval", "did you mean --mixed-precision bf16?"),
        ("--fsdp full_shard", "did you mean --fsdp-memory-optimization?"),
        ("--per-device-train-batch-size 8", "did you mean --micro-batch-size?"),
        ("--per_device_train_batch_size=8", "did you mean --micro-batch-size?"),
        ("--output-dir out", "did you mean --save?"),
        ("--num-train-epochs 3", "did you mean --epochs?"),
        ("--max-steps 3", "did you mean --train-iters?"),
        ("--deepspeed ds.json", "did you mean --deepspeed-config? or a switch: --zero-2-memory-optimization …"),
        ("--gradient-checkpointing", "did you mean --checkpoint-activations?"),
        ("--data-parallel-shard-degree 8", "did you mean --fsdp-shard-size? with --fsdp-memory-optimization"),
        ("--tp 2", "did you mean --tensor-model-parallel-size?"),
        (
            "--gradient-accumulation-steps 4",
            "did you mean --global-batch-size? accumulation steps are computed: "
            "global batch / (micro batch × data-parallel workers)",
        ),
        ("--with-tracking", "did you mean --report-to tensorboard?"),
        ("--wandb-project mine", "did you mean --project-name? with --report-to"),
        ("--mixed-precison bf16", "did you mean --mixed-precision?"),
        ("--zero-3-memory-optimisation", "did you mean --zero-3-memory-optimization?"),
        ("--train-iter 5", "did you mean --train-iters?"),
        ("--zigzag", "rapidformer --help-all lists every flag"),
        ("--banana", "rapidformer --help-all lists every flag"),
        ("--ema", "rapidformer --help-all lists every flag"),
    ],
)
def test_hints_on_the_command_line(flags: str, hint: str) -> None:
    assert hint_of(flags) == hint


def test_hints_in_a_file_and_in_a_script(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("bf16_full_eval: true\n")
    with pytest.raises(ConfigError, match="unknown key 'bf16_full_eval'") as caught:
        parse(["--config", str(tmp_path / "run.yaml")], switch_options())
    assert caught.value.hint == "did you mean mixed_precision: bf16?"
    for name, hint in (
        ("bf16_full_eval", 'did you mean mixed_precision="bf16"?'),
        ("learning_rate", "did you mean lr?"),
        ("train_iter", "did you mean train_iters?"),
        ("banana", None),
    ):
        with pytest.raises(ConfigError, match=f"unknown flag '{name}'") as caught:
            parse([], switch_options(), in_code={name: (1, "train.py:3")})
        assert caught.value.hint == hint


def test_each_name_stands_in_one_line() -> None:
    table = tomllib.loads(Path(peers.__file__).with_name("peers.toml").read_text())["equivalents"]
    names = [name.replace("-", "_") for line in table for name in line[0].split()]
    assert len(names) == len(set(names))
