"""``fit`` from Python, where several workers run one call, checks before torch is imported, and plans of scripts."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rapidformer_templates import Callback, Finetuner, Trainer, flag
from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import ConfigError, Refused, SeveralMistakes
from rapidformer_templates.run.early_checks import refuse_mistakes
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


@pytest.mark.longer
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


@pytest.fixture
def mistakes(says: Says, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Return a function that adds the lines of a command with several mistakes to the messages of the test."""
    monkeypatch.setenv("HF_DATASETS_CACHE", "CACHE")

    def lines_of(words: str) -> list[str]:
        with pytest.raises(SeveralMistakes) as caught:
            refuse_mistakes(words.split())
        assert caught.value.exit_status == 2
        says.text(caught.value.render())
        return caught.value.render().splitlines()

    return lines_of


def test_each_mistake_is_one_line(tmp_path: Path, mistakes: Callable[[str], list[str]]) -> None:
    """In files and on the command line. The words after an unknown flag are its values, and are not reported."""
    file = tmp_path / "job.yaml"
    file.write_text("task: causal_lm\nmicro_batch_sise: 3\nlearning_rate: 1e-3\nlr: fast\n")
    assert len(mistakes(f"--config {file}")) == 3
    assert len(mistakes("--task causal_lm --foo 1 2 --learning-rate=3 --epochs none")) == 3
    assert len(mistakes("words here --lr 1 --lr --epochs --sed 1 --no-save=3")) == 5


def test_wrong_flags_and_missing_folders_together(tmp_path: Path, mistakes: Callable[[str], list[str]]) -> None:
    here = str(tmp_path)
    mistakes(
        f"--lrr 1 --data-dir {here}/data --load {here}/run --tokenizer-path {here}/words "
        f"--pretrained-model-name-or-path {here}/model --data-path {here}/text"
    )


def test_an_unknown_flag_may_mean_what_is_missing(
    tmp_path: Path, mistakes: Callable[[str], list[str]], says: Says
) -> None:
    """``--resum`` may mean ``--resume``. So the run in the folder is a mistake only if all flags are known."""
    (tmp_path / "plan.json").write_text("{}")
    with says(ConfigError):  # a single mistake keeps its three lines
        refuse_mistakes(f"--save {tmp_path} --resum".split())
    mistakes(f"--save {tmp_path} --lr x")


def test_a_refused_plan_does_not_hide_missing_folders(tmp_path: Path, mistakes: Callable[[str], list[str]]) -> None:
    mistakes(f"--task causal_lm --data-dir {tmp_path}/data --mask-prob 0.2 --split 9,1 --device cpu")


def test_a_weighted_corpus_names_the_missing_part(tmp_path: Path, mistakes: Callable[[str], list[str]]) -> None:
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "b.idx").write_text("")
    assert len(mistakes(f"--lrr 1 --data-path 0.3 {tmp_path}/a.txt 0.3 {tmp_path}/b 0.4 {tmp_path}/c")) == 2


EXAMPLES = Path(__file__).parents[2] / "examples"

PLANNED = """
from dataclasses import dataclass
from rapidformer_templates import Trainer, flag

@dataclass(frozen=True)
class Own:
    \"\"\"Own\"\"\"
    shade: str = flag("red", "a colour")

class Mine(Trainer):
    Flags = Own

    def compute_loss(self, model, batch):
        raise AssertionError("nothing is computed")

print("before")
{last}
"""


def write(folder: Path, last: str) -> str:
    file = folder / "mine.py"
    file.write_text(PLANNED.replace("{last}", last))
    return str(file)


def planned(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    "last",
    [
        "Mine.main(train_iters=7, micro_batch_size=3)",
        "import sys; Mine(sys.argv[1:], train_iters=7, micro_batch_size=3).fit()",
        "try:\n    Mine.main(train_iters=7, micro_batch_size=3)\nexcept Exception:\n    pass",
    ],
    ids=["main", "fit", "in a try"],
)
def test_own_values_and_flags_are_planned(last: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = list(sys.argv)
    words = "--shade blue --world-size 4 --zero_1_memory_optimization --lr=1e-3 --device cpu --no-save"
    found = planned(capsys, *words.split(), "--user-script", write(tmp_path, last))
    plan = found["plan"]
    assert plan["template"] == "Trainer"
    assert plan["sizes"]["world"] == 4
    assert plan["sizes"]["micro_batch"] == 3
    assert "zero-1" in plan["switches"]
    values = {flag: (entry["value"], entry["origin"]) for flag, entry in plan["values"].items()}
    assert values["--shade"] == ("blue", "command line")
    assert values["--train-iters"][0] == 7
    assert values["--train-iters"][1].startswith("mine.py:")
    assert values["template"][1] == "mine.py:10"
    assert found["script"]["template"] == "Mine"
    assert found["script"]["hooks"] == ["compute_loss"]
    assert sys.argv == before


def test_a_script_s_refusal_is_the_plan_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(tmp_path, "Mine.main(zero_1_memory_optimization=True, fsdp_memory_optimization=True)")
    told = planned(capsys, "--user-script", script, "--world-size", "2", status=2)
    assert told["ok"] is False
    assert "mine.py:" in " ".join(told["errors"][0]["asked"])


def test_the_text_names_the_script_and_its_hooks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(tmp_path, "Mine.main()")
    assert main(["plan", f"--user_script={script}"]) == 0
    out, err = capsys.readouterr()
    assert f"script: {script}: Mine, own hooks: compute_loss" in out
    assert "before" in err


OWN_HOOKS = """
import torch
from rapidformer_templates import Data, Trainer

class Own(Trainer):
    def build_model(self):
        return torch.nn.Sequential(*(torch.nn.Linear({width}, {width}) for _ in range(5)))

    def build_data(self):
        return Data(train=[torch.ones({width})] * 4, collate=torch.stack)

    def compute_loss(self, model, batch):
        return model(batch).square().mean()

    {more}

Own.main()
"""


@pytest.mark.longer
@pytest.mark.slow
def test_plans_of_own_hooks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEVICE_MEMORY_GB", "4")
    script = tmp_path / "own.py"
    words = ["--device", "cpu", "--world-size", "1", "--micro-batch-size", "2", "--user-script", str(script)]
    for width in (80, 160):  # the flags are equal, so a stored result would be the same
        script.write_text(OWN_HOOKS.replace("{width}", str(width)).replace("{more}", ""))
        (best, *_) = planned(capsys, *words, "--auto-strategy")["layouts"]
        one = planned(capsys, *words, "--no-save", "--lr", "1", "--tokens", "1M")["prediction"]
        for memory in (best["memory_gb"], one["memory_gb"]):
            assert memory["parameters"] == round(5 * (width * width + width) * 4 / 1e9, 6)


OWN_OPTIMIZER = """def build_optimizer(self):
        from rapidformer_templates import OptimizerSpec
        return OptimizerSpec(torch.optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.9})
"""


@pytest.mark.longer
@pytest.mark.slow
def test_one_plan_with_an_own_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str], says: Says) -> None:
    script = tmp_path / "own.py"
    script.write_text(OWN_HOOKS.replace("{width}", "80").replace("{more}", OWN_OPTIMIZER))
    words = ["--device", "cpu", "--world-size", "2", "--micro-batch-size", "2", "--no-save", "--tokens", "1M"]
    prediction = planned(capsys, *words, "--use-distributed-optimizer", "--user-script", str(script))["prediction"]
    elements = 5 * (80 * 80 + 80)
    assert prediction["memory_gb"]["parameters"] == round(elements * 4 / 1e9, 6)
    assert prediction["memory_gb"]["optimizer"] == pytest.approx(elements * 3 * 4 / 2 / 1e9, abs=2e-6)
    assert prediction["not_predicted"][-1]["switch"] == "build_optimizer()"
    says.command(f"plan --auto-strategy --device cpu --user-script {script}")


MISTAKES = ("pass", "x = 1\nx.nothing", "def (", "Mine.main(train_itres=4)", "raise SystemExit(0)")


def test_a_script_s_mistake_is_a_user_s(tmp_path: Path, says: Says) -> None:
    for last in MISTAKES:
        says.command(f"plan --user-script {write(tmp_path, last)}")
        assert "Traceback" not in says.said[-1]


def test_the_example_is_planned_without_reading_its_corpus(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--vocab-size 400 --world-size 2 --device cpu"
    found = planned(capsys, "--user-script", str(EXAMPLES / "pretrain_gpt.py"), *flags.split())
    assert found["plan"]["template"] == "Pretrainer"
    assert found["plan"]["sizes"]["micro_batch"] == 8
    assert found["plan"]["values"]["--vocab-size"]["value"] == 400
    assert found["script"]["hooks"] == ["build_data"]


@pytest.mark.parametrize(
    "last",
    ["", "import sys; sys.exit(0); Mine.main()", "Mine(lr=0.1, no_save=True).fit()"],
    ids=["no call", "an earlier exit", "a call that reads no flags"],
)
def test_scripts_that_ignore_their_flags(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    monkeypatch.setattr(sys, "argv", ["rapidformer"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    for command in ("", "plan "):
        says.command(f"{command}--user-script {write(tmp_path, last)} --fsdp-memory-optimization --lr 7")
    says.command("plan --user-script nowhere.py")


def test_scripts_that_use_a_template_in_another_way_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute with a model that is not trained here, or read the flags themselves."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["rapidformer"])
    script = tmp_path / "uses.py"
    for line in ("job = Line(sys.argv[1:])", "rate = float(sys.argv[2]); job = Line(lr=rate)"):
        uses = "job.predict([]); assert job.config.training.lr == 0.1; sys.exit(0)"
        script.write_text(f"import sys\nfrom tests.support.lines import Line\n{line}\n{uses}\n")
        with pytest.raises(SystemExit) as ended:
            main(["--user-script", str(script), "--lr", "0.1"])
        assert ended.value.code == 0
