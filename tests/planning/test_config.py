"""Flags, YAML and defaults: values, origins, names of other trainers, mistakes, and which of exclusive flags acts."""

import itertools
import pickle
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates import Data
from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import ConfigError, Refused
from rapidformer_templates.planning.config import RunConfig, in_code
from rapidformer_templates.planning.flag_parser import build_parser, choices, equivalents, parse
from rapidformer_templates.planning.flag_values import Epochs, Interval
from rapidformer_templates.planning.flags import SECTIONS, flag
from rapidformer_templates.planning.registry import REGISTRY, switch_options
from rapidformer_templates.planning.resolve import choose_template, resolve, with_template_defaults
from tests.support import lines
from tests.support.lines import FLAGS
from tests.support.messages import Says
from tests.support.requests import CPU, codes


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
def test_dashes_and_underscores(flags: str, tmp_path: Path) -> None:
    assert read(flags).data.micro_batch_size == 4
    name = flags.split()[0].removeprefix("--").removesuffix("=4")
    assert read(yaml_file(tmp_path, f"{name}: 2")).data.micro_batch_size == 2


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
    "flags",
    [
        "--micro-batch-sise 4", "--xyzzy", "surplus", "--micro-batch-size 0", "--seed 4294967296", "--num-layers many",
        "--mixed-precision fp61", "--config missing.yaml", "--optimizer muon --optimizers lamb", "--fp16 --bf16",
        "--mixed-precision bf16 --fp16", "--recompute-granularity full --recompute-activations",
    ],
)  # fmt: skip
def test_wrong_flags(flags: str, says: Says) -> None:
    with says(ConfigError):
        read(flags)


@pytest.mark.parametrize(
    "text",
    [
        "\n\nlrr: 1", "epochs: 2.5", "epochs: true", "tf32: 3", "seed: 1\nlr_decay_style: linaer", "lr: -1",
        "- a\n- b", "a: [", "just text",
    ],
    ids=repr,
)  # fmt: skip
def test_wrong_yaml(tmp_path: Path, text: str, says: Says) -> None:
    with says(ConfigError):
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


@pytest.mark.parametrize(
    ("text", "size", "unit", "written"),
    [
        ("500", 500, "steps", "500"), (500, 500, "steps", "500"), ("500 steps", 500, "steps", "500"),
        ("20_000samples", 20000, "samples", "20000samples"), ("5e7tokens", 5e7, "tokens", "50000000tokens"),
        ("1token", 1, "tokens", "1tokens"), ("30min", 30, "minutes", "30minutes"),
        ("0.5 Minutes", 0.5, "minutes", "0.5minutes"), ("1epoch", 1, "epochs", "1epochs"),
        ("0.25epochs", 0.25, "epochs", "0.25epochs"),
        ("0.00001epochs", Fraction(1, 10**5), "epochs", "0.00001epochs"),
        (f"0.{'0' * 30}12min", Fraction(12, 10**32), "minutes", f"0.{'0' * 30}12minutes"),
        ("1e20tokens", 10**20, "tokens", "100000000000000000000tokens"),
    ],
)  # fmt: skip
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


def test_a_flag_says_what_it_takes(says: Says) -> None:
    for flags in (
        "--save-interval 3hours", "--train-iters 3hours", "--train-iters 0", "--train-iters 0epochs",
        "--train-iters=-1epochs", "--train-iters 3samples", "--train-iters epochs", "--train-iters 1e-3epochs",
    ):  # fmt: skip
        with says(ConfigError):
            read(flags)


@pytest.mark.parametrize(
    ("text", "written", "steps"),
    [
        ("3epochs", "3epochs", 39), ("1 Epoch", "1epochs", 13), ("0.5epochs", "0.5epochs", 7),
        ("0.1epochs", "0.1epochs", 2), ("1_000epochs", "1000epochs", 13000), ("0.00001epochs", "0.00001epochs", 1),
    ],
)  # fmt: skip
def test_a_length_in_epochs_is_that_many_passes_rounded_up(text: str, written: str, steps: int) -> None:
    length = parse([f"--train-iters={text}"], switch_options()).training.train_iters
    assert isinstance(length, Epochs)
    assert (str(length), length.steps(13)) == (written, steps)
    assert pickle.loads(pickle.dumps(length)) == length


def test_a_fraction_that_floats_miss_is_exact() -> None:
    assert Epochs("0.07epochs").steps(100) == 7  # 0.07 * 100 is 7.000000000000001 in floats
    passed = [step for step in range(1, 31) if Interval("0.1epochs").passed(Fraction(step - 1, 30), Fraction(step, 30))]
    assert passed == [3, 6, 9, 12, 15, 18, 21, 24, 27, 30]


def test_multiples() -> None:
    every = Interval("20samples")
    assert [done for done in range(8, 97, 8) if every.passed(done - 8, done)] == [24, 40, 64, 80]
    assert not every.passed(20, 20)


def test_a_length_in_epochs_is_evaluated_often_enough_to_stop_early() -> None:
    stops = "--task causal_lm --early-stopping-patience 3"
    assert codes(f"{stops} --train-iters 20epochs") == []
    assert codes(f"{stops} --train-iters 20") == ["RF111"]


KNOWN = {
    option: action
    for action in build_parser("", switch_options().values(), None, "")._actions
    for option in action.option_strings
}


@pytest.mark.parametrize("name", equivalents())
def test_what_is_suggested_is_a_flag_with_a_value_that_it_takes(name: str) -> None:
    assert f"--{name.replace('_', '-')}" not in KNOWN, "it is a flag of ours"
    flags, note = equivalents()[name]
    words = flags.split()
    assert words or note
    for word, following in zip(words, [*words[1:], "--"], strict=False):
        if not word.startswith("--"):
            continue
        if not following.startswith("--"):
            read(f"{word} {following}")
        elif KNOWN[word].nargs in (0, "?"):
            read(word)


def test_hints_on_the_command_line(says: Says) -> None:
    for flags in (
        "--learning-rate 1e-5", "--bf16-full-eval", "--fsdp full_shard", "--per-device-train-batch-size 8",
        "--per_device_train_batch_size=8", "--output-dir out", "--num-train-epochs 3", "--max-steps 3",
        "--deepspeed ds.json", "--gradient-checkpointing", "--data-parallel-shard-degree 8", "--tp 2",
        "--gradient-accumulation-steps 4", "--with-tracking", "--wandb-project mine", "--mixed-precison bf16",
        "--zero-3-memory-optimisation", "--train-iter 5", "--zigzag", "--banana", "--ema",
    ):  # fmt: skip
        with says(ConfigError):
            read(flags)


def test_hints_in_a_file_and_in_a_script(tmp_path: Path, says: Says) -> None:
    with says(ConfigError):
        read(yaml_file(tmp_path, "bf16_full_eval: true\n"))
    for name in ("bf16_full_eval", "learning_rate", "train_iter", "banana"):
        with says(ConfigError):
            read("", in_code={name: (1, "train.py:3")})


OF = "_memory_optimization"


class Line(lines.Line):
    built = False

    def build_data(self) -> Data:
        type(self).built = True
        return super().build_data()


def test_a_run_that_leaves_nothing_is_refused_before_it_begins(says: Says) -> None:
    with says(Refused):
        Line([*FLAGS, "--epochs", "1"]).fit()
    assert not Line.built


def test_a_run_that_leaves_nothing_can_be_asked_for(tmp_path: Path) -> None:
    assert Line([*FLAGS, "--epochs", "1", "--no-save"]).fit()["steps"] == 5
    assert Line([*FLAGS, "--epochs", "1"], no_save=True).fit()["steps"] == 5
    file = yaml_file(tmp_path, "no_save: true\n")
    assert Line([*FLAGS, "--epochs", "1", *file.split()]).fit()["steps"] == 5


@pytest.mark.parametrize("flag", ["--overwrite", "--async-save", "--save-interval 5", "--resume", "--keep-best"])
def test_what_belongs_to_a_folder_is_refused_without_one(flag: str) -> None:
    assert set(codes(f"--no-save {flag} --lr 1 --epochs 1", training=True)) <= {"RF034", "RF100"}
    assert codes(f"--no-save {flag} --lr 1 --epochs 1", training=True)
    assert codes(f"--save DIR {flag} --lr 1 --epochs 1", training=True) == []


def test_a_plan_may_leave_open_where_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert codes("--lr 1 --epochs 1", training=False) == []
    assert codes("--save DIR --no-save", training=False) == ["RF100"]
    assert main(["plan", "--lr", "1", "--epochs", "1"]) == 0


def read_with(tmp_path: Path, yaml: str, flags: str, **in_code: Any) -> RunConfig:
    values = {name: (value, "train.py:9") for name, value in in_code.items()}
    return read(f"{yaml_file(tmp_path, yaml)} {flags}", in_code=values)


def test_the_command_lines_iterations_win_over_epochs_from_elsewhere(tmp_path: Path) -> None:
    config = read_with(tmp_path, "epochs: 3\n", "--train-iters 5 --lr 1 --save run")
    assert (config.training.train_iters, config.training.epochs) == (5, None)
    assert config.origin("epochs") == "default"
    plan = resolve(config, CPU, training=True)
    assert "--train-iters 5 (command line) replaces --epochs 3 (run.yaml:1)" in plan.notes
    config = read_with(tmp_path, "", "--epochs 2", train_iters=5)
    assert (config.training.train_iters, config.training.epochs) == (None, 2)


def test_a_file_wins_over_a_script(tmp_path: Path) -> None:
    config = read_with(tmp_path, "epochs: 3\n", "", train_iters=5)
    assert (config.training.train_iters, config.training.epochs) == (None, 3)


def test_of_one_source_they_exclude_each_other(tmp_path: Path) -> None:
    assert codes("--epochs 3 --train-iters 5") == ["RF015"]
    assert codes(read_with(tmp_path, "epochs: 3\ntrain_iters: 5\n", "")) == ["RF015"]
    assert codes(read_with(tmp_path, "epochs: 3\ntrain_iters: 5\n", "--epochs 2")) == []


@pytest.mark.parametrize(
    ("yaml", "flags", "kept", "gone"),
    [
        ("lr_warmup_iters: 5", "--lr-warmup-fraction 0.1", "lr_warmup_fraction", "lr_warmup_iters"),
        ("no_save: true", "--save run", "save", "no_save"),
        ("save: run", "--no-save", "no_save", "save"),
        (f"fsdp{OF}: true", "--zero-2-memory-optimization", f"zero_2{OF}", f"fsdp{OF}"),
        ("use_distributed_optimizer: true", "--oss-memory-optimization", f"oss{OF}", "use_distributed_optimizer"),
        ("torch_compile: true", "--onnx-runtime-training", "onnx_runtime_training", "torch_compile"),
        ("cpu_offload: true", "--nvme-path /disk", "nvme_path", "cpu_offload"),
    ],
)
def test_one_alternative_takes_the_place_of_another(
    tmp_path: Path, yaml: str, flags: str, kept: str, gone: str
) -> None:
    config = read_with(tmp_path, yaml, flags)
    assert config.get(kept)
    assert not config.get(gone)
    assert "replaces" in config.replaced[0]


def test_turning_one_off_chooses_none(tmp_path: Path) -> None:
    config = read_with(tmp_path, "fsdp_memory_optimization: true", "--no-zero-2-memory-optimization")
    assert config.get("fsdp_memory_optimization")
    assert config.replaced == ()


def test_switches_that_stand_for_one_another_are_one_choice() -> None:
    """A new switch of a family must declare this at its flag, too."""
    of_flag = choices([*SECTIONS.values(), *switch_options().values()])
    for one, other in itertools.permutations(REGISTRY.switches, 2):
        if one.family and one.family == other.family:
            assert set(other.on) & of_flag[next(iter(one.on))], (one.name, other.name)
