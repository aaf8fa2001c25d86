"""Variables of a launcher: a complete set makes a worker, and another one is ignored with a note, or refused."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest

from rapidformer_templates import Trainer
from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.environment import Launched, launched
from rapidformer_templates.run.early_checks import exit_on_mistakes_of_program
from rapidformer_templates.system import launch
from rapidformer_templates.system.workers import join
from tests.support.lines import FLAGS, Line

ALONE = [*FLAGS, "--train-iters", "2", "--no-save", "--device", "cpu"]
IGNORED = [
    {"WORLD_SIZE": "2"},
    {"WORLD_SIZE": ""},
    {"WORLD_SIZE": "two"},
    {"RANK": "0"},
    {"RANK": "3", "WORLD_SIZE": ""},
    {"RANK": "", "WORLD_SIZE": "2"},
    {"LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "8"},
    {"LOCAL_RANK": "x", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "none"},
]
IMPOSSIBLE = [
    {"RANK": "3", "WORLD_SIZE": "2"},
    {"RANK": "2", "WORLD_SIZE": "2"},
    {"RANK": "-1", "WORLD_SIZE": "2"},
    {"RANK": "0", "WORLD_SIZE": "two"},
    {"RANK": "first", "WORLD_SIZE": "2"},
    {"RANK": "0", "WORLD_SIZE": "0"},
    {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x"},
    {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
    {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "8"},
]


def in_words(variables: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("variables", IGNORED, ids=in_words)
def test_an_incomplete_set_is_ignored_with_a_note(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_all(monkeypatch, variables)
    job = Line(ALONE)
    assert job.fit()["steps"] == 2
    assert job.is_main
    assert (job.plan.sizes.world, job.plan.sizes.local_world) == (1, 1)
    names = ", ".join(name for name in variables if not name.startswith("MASTER"))
    note = f"note       {names}: ignored, because only RANK and WORLD_SIZE together make a worker"
    assert note in capsys.readouterr().err
    assert {name: os.environ[name] for name in variables} == variables


@pytest.mark.parametrize("variables", IMPOSSIBLE, ids=in_words)
def test_a_complete_but_impossible_set_is_refused(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_all(monkeypatch, variables)
    told = f"error: no launcher sets {in_words(variables)}\n  where  the environment\n  help   ranks count from 0"
    with pytest.raises(ConfigError, match="no launcher sets"):
        Line(ALONE).fit()
    for command in (["--task", "causal_lm", "--lr", "1"], ["plan", "--task", "causal_lm"]):
        assert main(command) == 2, command
        assert told in capsys.readouterr().err
    script = ModuleType("__main__")
    script.__file__ = __file__
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for program in (lambda: Line.main(epochs=1), exit_on_mistakes_of_program):
        with pytest.raises(SystemExit) as ended:
            program()
        assert ended.value.code == 2
        assert told in capsys.readouterr().err


def test_a_complete_set_makes_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, {"RANK": "5", "WORLD_SIZE": " 8"})
    assert launched() == Launched(rank=5, world=8, local_rank=0, local_world=8)
    set_all(monkeypatch, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    assert launched() == Launched(rank=5, world=8, local_rank=1, local_world=4)
    assert launch.is_worker()
    assert not launch.is_first_worker()


@pytest.mark.parametrize("port", ["", "none", "0", "70000"])
def test_an_address_that_is_none_is_refused(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    with pytest.raises(ConfigError, match="RANK is set, but MASTER_ADDR or MASTER_PORT is not"), join("cpu"):
        raise AssertionError("it joined")


@pytest.mark.parametrize(
    ("name", "launcher"),
    [("SLURM_STEP_NUM_TASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun"), ("PMI_SIZE", "mpiexec")],
)
def test_processes_of_a_launcher_that_connects_none_are_told_so(
    name: str, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count, is_told in (("4", True), ("1", False), ("many", False)):
        monkeypatch.setenv(name, count)
        notes = " ".join(Trainer([*ALONE, "--task", "causal_lm"]).plan.notes)
        assert (f"{launcher} has started {count} processes, and each trains alone" in notes) == is_told
    set_all(monkeypatch, {name: "4", "RANK": "0", "WORLD_SIZE": "4"})
    assert launcher not in " ".join(Trainer([*ALONE, "--task", "causal_lm"]).plan.notes)
