"""Choices: whether a run saves anything, and which of several mutually exclusive flags was given last."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates import Data
from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import Refused
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.flag_parser import choices, parse
from rapidformer_templates.planning.flags import SECTIONS
from rapidformer_templates.planning.registry import REGISTRY, switch_options
from rapidformer_templates.planning.resolve import resolve
from tests.support import lines
from tests.support.lines import FLAGS
from tests.support.messages import Says
from tests.support.requests import CPU, codes

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
    (tmp_path / "run.yaml").write_text("no_save: true\n")
    assert Line([*FLAGS, "--epochs", "1", "--config", str(tmp_path / "run.yaml")]).fit()["steps"] == 5


@pytest.mark.parametrize("flag", ["--overwrite", "--async-save", "--save-interval 5", "--resume", "--keep-best"])
def test_what_belongs_to_a_folder_is_refused_without_one(flag: str) -> None:
    assert set(codes(f"--no-save {flag} --lr 1 --epochs 1", training=True)) <= {"RF034", "RF100"}
    assert codes(f"--no-save {flag} --lr 1 --epochs 1", training=True)
    assert codes(f"--save DIR {flag} --lr 1 --epochs 1", training=True) == []


def test_a_plan_may_leave_open_where_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert codes("--lr 1 --epochs 1", training=False) == []
    assert codes("--save DIR --no-save", training=False) == ["RF100"]
    assert main(["plan", "--lr", "1", "--epochs", "1"]) == 0


def read(tmp_path: Path, yaml: str, flags: str, **in_code: Any) -> RunConfig:
    (tmp_path / "run.yaml").write_text(yaml)
    words = f"--config {tmp_path / 'run.yaml'} {flags}".split()
    return parse(words, switch_options(), in_code={name: (value, "train.py:9") for name, value in in_code.items()})


def test_the_command_lines_iterations_win_over_epochs_from_elsewhere(tmp_path: Path) -> None:
    config = read(tmp_path, "epochs: 3\n", "--train-iters 5 --lr 1 --save run")
    assert (config.training.train_iters, config.training.epochs) == (5, None)
    assert config.origin("epochs") == "default"
    plan = resolve(config, CPU, training=True)
    assert "--train-iters 5 (command line) replaces --epochs 3 (run.yaml:1)" in plan.notes
    config = read(tmp_path, "", "--epochs 2", train_iters=5)
    assert (config.training.train_iters, config.training.epochs) == (None, 2)


def test_a_file_wins_over_a_script(tmp_path: Path) -> None:
    config = read(tmp_path, "epochs: 3\n", "", train_iters=5)
    assert (config.training.train_iters, config.training.epochs) == (None, 3)


def test_of_one_source_they_exclude_each_other(tmp_path: Path) -> None:
    assert codes("--epochs 3 --train-iters 5") == ["RF015"]
    assert codes(read(tmp_path, "epochs: 3\ntrain_iters: 5\n", "")) == ["RF015"]
    assert codes(read(tmp_path, "epochs: 3\ntrain_iters: 5\n", "--epochs 2")) == []


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
    config = read(tmp_path, yaml, flags)
    assert config.get(kept)
    assert not config.get(gone)
    assert "replaces" in config.replaced[0]


def test_turning_one_off_chooses_none(tmp_path: Path) -> None:
    config = read(tmp_path, "fsdp_memory_optimization: true", "--no-zero-2-memory-optimization")
    assert config.get("fsdp_memory_optimization")
    assert config.replaced == ()


def test_switches_that_stand_for_one_another_are_one_choice() -> None:
    """A new switch of a family must declare this at its flag, too."""
    of_flag = choices([*SECTIONS.values(), *switch_options().values()])
    for one, other in itertools.permutations(REGISTRY.switches, 2):
        if one.family and one.family == other.family:
            assert set(other.on) & of_flag[next(iter(one.on))], (one.name, other.name)
