"""``rapidformer plan --user-script``: the run of a script is planned, and nothing is trained."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates.commands.main import main
from tests.support.messages import Says

EXAMPLES = Path(__file__).parents[2] / "examples"

SCRIPT = """
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
    file.write_text(SCRIPT.replace("{last}", last))
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
