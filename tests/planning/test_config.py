"""Flags, YAML and defaults: values, their origins, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.config import RunConfig, in_code
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.flags import SECTIONS, flag
from rapidformer_templates.planning.registry import switch_options
from rapidformer_templates.planning.resolve import choose_template, with_template_defaults


@dataclass(frozen=True)
class MyFlags:
    """Mine"""

    margin: float = flag(0.5, "distance between classes", minimum=0)


def read(flags: str, **keywords: object) -> RunConfig:
    return parse(flags.split(), switch_options(), **keywords)  # type: ignore[arg-type]


def yaml_file(folder: Path, text: str) -> str:
    (folder / "run.yaml").write_text(text)
    return f"--config {folder / 'run.yaml'}"


def test_command_line_over_yaml_over_script_over_default(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "# a run\nlr: 1e-5\nseed: 3\nlog_interval: 7\n")
    config = read(f"{file} --lr 2e-5", in_code={"seed": (1, "train.py:9"), "epochs": (2, "train.py:9")})
    assert (config.training.lr, config.origin("lr")) == (2e-5, "command line")
    assert (config.training.seed, config.origin("seed")) == (3, "run.yaml:3")
    assert (config.training.epochs, config.origin("epochs")) == (2, "train.py:9")
    assert (config.data.micro_batch_size, config.origin("micro_batch_size")) == (1, "default")


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("--resume continues it", "resume=True continues it"),
        ("without --tf32 and --no-tf32", "without tf32=True and tf32=False"),
        ("--save DIR --micro-batch-size 4 --lr 1e-3", 'save="DIR", micro_batch_size=4, lr=1e-3'),
        ("--train-iters 1epochs without --epochs", 'train_iters="1epochs" without epochs'),
        ("--task causal_lm needs --seq-length", 'task="causal_lm" needs seq_length'),
        ("--metric-for-best mine (a.py:3), --lr (a.py:3)", 'metric_for_best="mine" (a.py:3), lr (a.py:3)'),
        ("a lower --lr, --clip-grad or bf16", "a lower lr, clip_grad or bf16"),
        ("--margin 2 is mine, --nothing is not", "margin=2 is mine, --nothing is not"),
        ("rapidformer evaluate RUN --save DIR; --resume", "rapidformer evaluate RUN --save DIR; resume=True"),
    ],
)
def test_flags_in_texts_are_spelled_as_arguments(text: str, spelled: str) -> None:
    assert in_code(text, (*SECTIONS.values(), *switch_options().values(), MyFlags)) == spelled


@pytest.mark.parametrize("flags", ["--micro-batch-size 4", "--micro_batch_size 4", "--micro_batch_size=4"])
def test_dashes_and_underscores(flags: str) -> None:
    assert read(flags).data.micro_batch_size == 4


@pytest.mark.parametrize("key", ["tensor-model-parallel-size", "tensor_model_parallel_size"])
def test_dashes_and_underscores_in_yaml(tmp_path: Path, key: str) -> None:
    assert read(yaml_file(tmp_path, f"{key}: 2")).get("tensor_model_parallel_size") == 2


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ("--mixed-precision", "mixed_precision", "auto"),
        ("--mixed-precision bf16", "mixed_precision", "bf16"),
        ("--mixed-precision --tf32", "mixed_precision", "auto"),
        ("--torch-compile", "torch_compile", "inductor"),
        ("--torch-compile aot_eager", "torch_compile", "aot_eager"),
        ("--recompute-activations", "recompute_granularity", "selective"),
        ("--no-tf32", "tf32", False),
        ("--data-path 0.3 A 0.7 B", "data_path", ("0.3", "A", "0.7", "B")),
    ],
)
def test_values(flags: str, name: str, value: object) -> None:
    assert read(flags).get(name) == value


def test_other_spellings_are_the_flag(tmp_path: Path) -> None:
    """They work on the command line, in a file and in code. The value from the highest place wins, in any spelling."""
    assert read("--optimizers lamb").get("optimizer") == "lamb"
    assert read("--fp16").get("mixed_precision") == read("--mixed-precision fp16").get("mixed_precision") == "fp16"
    assert read("--adam_beta1 0.8").training.adam_beta1 == 0.8
    file = yaml_file(tmp_path, "fp16: false\nbf16: true\noptimizers: lamb\n")
    config = read(file, in_code={"optimizers": ("muon", "train.py:9")})
    assert (config.get("mixed_precision"), config.origin("mixed_precision")) == ("bf16", "run.yaml:2")
    assert (config.get("optimizer"), config.origin("optimizer")) == ("lamb", "run.yaml:3")
    assert read(f"{file} --optimizer adafactor").get("optimizer") == "adafactor"
    assert read("--optimizer lamb --optimizers lamb").get("optimizer") == "lamb"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--optimizer muon --optimizers lamb", "--optimizer and --optimizers are the same flag, but have different"),
        ("--fp16 --bf16", "--fp16 and --bf16 are the same flag, but have different values"),
        ("--mixed-precision bf16 --fp16", "--mixed-precision and --fp16 are the same flag, but have different values"),
        ("--recompute-granularity full --recompute-activations", "are the same flag, but have different values"),
    ],
)
def test_spellings_that_say_different_things(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(flags)
    assert caught.value.where == "command line"


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("mixed_precision: true", "mixed_precision", "auto"),
        ("mixed_precision: false", "mixed_precision", None),
        ("recompute-activations: true", "recompute_granularity", "selective"),
        ("lr: 1e-5", "lr", 1e-5),  # YAML itself reads this as text
        ("data_path: [0.3, A, 0.7, B]", "data_path", ("0.3", "A", "0.7", "B")),
        ("data_path: corpus.txt", "data_path", ("corpus.txt",)),
        ("epochs:", "epochs", None),
    ],
)
def test_yaml_values(tmp_path: Path, text: str, name: str, value: object) -> None:
    assert read(yaml_file(tmp_path, text)).get(name) == value


def test_flags_of_the_user(tmp_path: Path) -> None:
    config = read(f"{yaml_file(tmp_path, 'margin: 0.7')} --lr 1e-4", user=MyFlags)
    assert (config.user.margin, config.origin("margin")) == (0.7, "run.yaml:1")
    assert read("--margin 0.1", user=MyFlags).get("margin") == 0.1


@pytest.mark.parametrize(
    ("flags", "message", "hint"),
    [
        ("--micro-batch-sise 4", "unknown flag --micro-batch-sise", "did you mean --micro-batch-size?"),
        ("--xyzzy", "unknown flag --xyzzy", "rapidformer --help-all lists every flag"),
        ("surplus", "unexpected argument 'surplus'", "rapidformer --help-all lists every flag"),
        ("--micro-batch-size 0", "--micro-batch-size must be at least 1, not 0", None),
        ("--seed 4294967296", "--seed must be at most 4294967295, not 4294967296", None),
        (
            "--mixed-precision fp61",
            "--mixed-precision cannot be 'fp61'",
            "did you mean fp16? choose from fp16, bf16",
        ),
        ("--config missing.yaml", "the configuration file missing.yaml does not exist", None),
    ],
)
def test_wrong_flags(flags: str, message: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        read(flags)
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_wrong_type_on_the_command_line() -> None:
    with pytest.raises(ConfigError, match=r"--num-layers.*'many'"):
        read("--num-layers many")


@pytest.mark.parametrize(
    ("text", "message", "where"),
    [
        ("\n\nlrr: 1", "unknown key 'lrr'", "run.yaml:3"),
        ("epochs: 2.5", "--epochs needs a value of type int, not 2.5", "run.yaml:1"),
        ("epochs: true", "--epochs needs a value of type int, not True", "run.yaml:1"),
        ("tf32: 3", "--tf32 must be true or false, not 3", "run.yaml:1"),
        ("seed: 1\nlr_decay_style: linaer", "--lr-decay-style cannot be 'linaer'", "run.yaml:2"),
        ("lr: -1", "--lr must be at least 0, not -1.0", "run.yaml:1"),
    ],
)
def test_wrong_yaml(tmp_path: Path, text: str, message: str, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(yaml_file(tmp_path, text))
    assert (caught.value.message, caught.value.where) == (message, where)


@pytest.mark.parametrize("text", ["- a\n- b", "a: [", "just text"])
def test_yaml_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        read(yaml_file(tmp_path, text))


@pytest.mark.parametrize(
    ("flags", "template", "reason"),
    [
        ("--task pretraining", "Pretrainer", "chosen for task pretraining"),
        ("--task causal_lm", "Finetuner", "chosen for task causal_lm"),
        ("--task causal_lm --train-iters 5 --fsdp-memory-optimization", "Finetuner", "chosen for task causal_lm"),
        ("--task pretraining --zero-2-memory-optimization", "Trainer", "chosen for zero-2"),
        ("--task causal_lm --tensor-model-parallel-size 2", "Trainer", "chosen for tensor-parallel"),
        ("--task causal_lm --data-iterator dynamic-shape", "Finetuner", "chosen for task causal_lm"),
        ("--task causal_lm --template Pretrainer", "Pretrainer", "command line"),
        ("", "Finetuner", "chosen because no task is given"),
    ],
)
def test_template_of_a_black_box_run(flags: str, template: str, reason: str) -> None:
    assert choose_template(read(flags)) == (template, reason)


def test_template_defaults_yield_to_every_given_value() -> None:
    assert with_template_defaults(read(""), "Pretrainer").get("task") == "pretraining"
    assert with_template_defaults(read(""), "Pretrainer").origin("task") == "Pretrainer"
    assert with_template_defaults(read("--task masked_lm"), "Pretrainer").get("task") == "masked_lm"
