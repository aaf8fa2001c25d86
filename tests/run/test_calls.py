"""``fit`` from Python: with several workers, exactly one call is run. Also, which call reads which command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rapidformer_templates import Callback, Finetuner, Trainer, flag
from rapidformer_templates.errors import ConfigError, Refused
from rapidformer_templates.system import launch
from tests.support.lines import FLAGS, Line
from tests.support.messages import Says

SCRIPT = """
import json, os, sys, time
from rapidformer_templates.errors import Interrupted, RapidformerError
from rapidformer_templates.run import scripts
from rapidformer_templates.system import launch

def note(what):
    with open(sys.argv[1], "a") as file:
        file.write(f"{what} {os.environ.get('RANK', 'first')}\\n")

def fit(name, count, **asked):
    def train():
        note(f"trains {name}")
        if name == "fails":
            raise RapidformerError("it cannot be trained")
        if name == "stops":
            raise Interrupted("asked", saved=False)
        return {"name": name, **asked}

    if not launch.is_worker():
        return scripts.record_outcome(
            lambda: scripts.train_in_new_workers("Job", asked, count) if count > 1 else train()
        )
    return scripts.train_in_this_worker("Job", asked, asked.update, train)

note("begins")
summaries = [fit("alone", 1), fit("one", 2, folder=f"runs/{time.time_ns()}")]
try:
    fit("fails", 2)
except RapidformerError as error:
    note(error.render())
try:
    fit("stops", 1)
except KeyboardInterrupt as stop:
    note(f"stopped {stop.exit_status} {stop.render()}")
summaries.append(fit("two", 2, earlier=summaries[1]["folder"]))
note("ends")
print(json.dumps(summaries))
"""


def run(tmp_path: Path, text: str, **how: Any) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    script, notes = tmp_path / "script.py", tmp_path / "notes"
    script.write_text(text)
    words = [] if "input" in how else [str(script), str(notes)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=False, **how)
    return done, sorted(notes.read_text().splitlines()) if notes.exists() else []


@pytest.mark.slow
def test_workers_run_one_call_and_nothing_after_it(tmp_path: Path) -> None:
    done, notes = run(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr
    trained = [line for line in notes if line.startswith("trains")]
    assert [line for line in trained if "fails" not in line] == [  # the first of these ends the other worker
        "trains alone first", "trains one 0", "trains one 1", "trains stops first", "trains two 0", "trains two 1"
    ]  # fmt: skip
    assert [line for line in notes if line.startswith("stopped")] == [
        "stopped 130 asked 0", "stopped 130 asked 1", "stopped 130 asked first"
    ]  # fmt: skip
    assert [line for line in notes if line.startswith("ends")] == ["ends first"]
    assert sum(line.startswith("error: it cannot be trained first") for line in notes) == 1
    alone, one, two = json.loads(done.stdout)
    assert alone == {"name": "alone"}
    assert two == {"name": "two", "earlier": one["folder"]}  # the first process's folder, not a worker's


def test_a_worker_that_comes_to_no_call_is_an_error(tmp_path: Path) -> None:
    elsewhere = SCRIPT.replace('note("begins")', "if launch.is_worker(): sys.exit(0)")
    done, _ = run(tmp_path, elsewhere)
    assert done.returncode == 1
    assert "the workers ended without reaching this call of Job.fit()" in done.stderr


def test_a_script_on_standard_input_starts_no_workers(tmp_path: Path) -> None:
    text = f"import sys; sys.argv = ['-', {str(tmp_path / 'notes')!r}]\n" + SCRIPT
    done, notes = run(tmp_path, text, input=text)
    assert done.returncode == 1
    assert "error: workers can only be started from a script or the command line" in done.stderr
    assert [line for line in notes if line.startswith("trains")] == ["trains alone first"]


@dataclass(frozen=True)
class Colour:
    """Own"""

    colour: str = flag("blue", "a colour")


class Coloured(Line):
    """A template with an additional flag."""

    Flags = Colour


@pytest.fixture
def in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel-1.json"])


def cell() -> type[Line]:
    """Return a class as defined in a notebook cell, without source code."""
    return type("Cell", (Line,), {"__module__": "__main__", "__qualname__": "Cell"})


@pytest.mark.usefixtures("in_a_notebook")
def test_a_class_of_a_notebook_trains_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = cell()([*FLAGS, "--epochs", "1", "--save", str(tmp_path / "run")])
    assert job.plan.values["template"] == {"value": "Trainer", "origin": "in code"}
    assert job.fit()["steps"] == 5
    assert launch.program_arguments() == []
    assert cell()().config.training.lr is None
    with pytest.raises(SystemExit):
        cell().main(epochs=1, no_save=True)
    assert "--lr is missing" in capsys.readouterr().err


def made_by_the_script(template: type[Trainer], *arguments: Any) -> Trainer:
    """Create a template in the code of the running script, instead of in code that it imports."""
    made: Trainer = eval("template(*arguments)", {"__name__": "__main__", "template": template, "arguments": arguments})
    return made


@pytest.mark.parametrize("name", ["-", "-c"])
def test_a_program_in_no_file_has_a_command_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setattr(sys, "argv", [name, "--lr", "0.5"])
    assert made_by_the_script(cell()).config.training.lr == 0.5


def test_who_reads_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ModuleType("__main__")
    script.__file__ = __file__
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.5"])
    assert made_by_the_script(Finetuner).config.training.lr == 0.5
    assert made_by_the_script(Finetuner, []).config.training.lr is None
    assert Finetuner().config.training.lr is None  # in a module: the command line belongs to another program
    assert Finetuner(epochs=2).config.training.lr is None
    assert Finetuner(callbacks=[Callback()]).config.training.lr is None
    seen: list[float | None] = []
    monkeypatch.setattr(Trainer, "fit", lambda self: seen.append(self.config.training.lr))
    Line.main(epochs=2)
    assert seen == [0.5]


WRONG: list[dict[str, Any]] = [
    {"epoch": 3}, {"learning_rate": 3}, {"colours": 3}, {"lr": "fast"}, {"epochs": 2.5}, {"epochs": True},
    {"save": ["a", "b"]}, {"tf32": 1}, {"task": "translation"},
]  # fmt: skip


@pytest.mark.parametrize("flags", WRONG, ids=str)
def test_keyword_arguments_that_are_none(flags: dict[str, Any], says: Says) -> None:
    with says(ConfigError, HERE=f"test_calls.py:{sys._getframe().f_lineno + 1}"):
        Coloured(**flags)


def test_errors_speak_of_arguments_if_flags_are_arguments(tmp_path: Path, says: Says) -> None:
    (tmp_path / "plan.json").touch()
    words = f"--epochs 1 --lr 0.1 --save {tmp_path}".split()
    for run in (
        lambda: Line(epochs=1, lr=0.1, save=str(tmp_path)).fit(),
        lambda: Line(words).fit(),
        lambda: Line(epochs=1, lr=0.1).fit(),
        lambda: Line(lr=-1),
    ):
        with pytest.raises((ConfigError, Refused)) as caught:
            run()
        says.text(re.sub(r"test_calls\.py:\d+", "HERE", str(caught.value)))


def test_keyword_arguments_of_any_kind_and_those_of_the_first_process() -> None:
    config = Coloured(micro_batch_size=2, colour="red", save=Path("runs/a"), **{"train-iters": 3}).config
    assert (config.data.micro_batch_size, config.user.colour) == (2, "red")
    assert Coloured(["--lr", "0.1"], lr=0.5).config.training.lr == 0.1
    assert (config.training.save, config.training.train_iters) == ("runs/a", 3)
    job = Line(["--lr", "0.1", "--data-path", "a"])
    job.override_flags({"save": "runs/12:00", "data_path": ["0.3", "b", "0.7", "c"]})
    assert job.config.training.save == "runs/12:00"
    assert job.config.data.data_path == ("0.3", "b", "0.7", "c")
