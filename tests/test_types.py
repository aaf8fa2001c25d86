"""The interface as an editor sees it: a user's script with type annotations, checked by pyright."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RIGHT = '''# pyright: strict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer_templates import Data, Finetuner, OptimizerSpec, Pretrainer, RapidformerError, Trainer, flag


@dataclass(frozen=True)
class MyFlags:
    """Mine"""

    temperature: float = flag(1.0, "what the logits are divided by", minimum=0)


class MyTask(Finetuner):
    Flags = MyFlags
    flags: MyFlags
    uses_task = True

    def build_model(self) -> nn.Module:
        return nn.Linear(2, 2)

    def build_data(self) -> Data:
        rows = [{"x": torch.zeros(2), "labels": torch.zeros(())}]
        return Data(train=rows, valid=rows)

    def compute_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = model(batch["x"]) / self.flags.temperature
        return logits.mean()

    def count_targets(self, batch: dict[str, Tensor]) -> int:
        return len(batch["labels"])

    def build_optimizer(self) -> OptimizerSpec:
        return OptimizerSpec(torch.optim.AdamW, {"lr": self.config.training.lr})

    def read_outputs(self, outputs: Tensor, batch: dict[str, Tensor]) -> tuple[list[int], list[int]]:
        return [0], [1]

    def compute_metrics(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        return {"accuracy": 0.5}

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        print(step, metrics["eval_loss"])

    def on_checkpoint(self, step: int, folder: Path) -> None:
        print(folder.name)

    def on_train_end(self, summary: Mapping[str, Any]) -> None:
        print(self.plan.sizes.world, self.data.train, self.model)


class Other(Trainer): ...


class Another(Pretrainer): ...


def train() -> float:
    try:
        summary = MyTask(epochs=1, lr=1e-3, save="runs/x").fit()
    except RapidformerError as error:
        print(error.render(), error.exit_status)
        return 0.0
    return float(summary["eval_loss"])


MyTask.main(epochs=3)
'''
WRONG = """# pyright: strict
from torch import Tensor, nn

from rapidformer_templates import Data, Finetuner, OptimizerSpec, RapidformerError
from rapidformer_templates import Trainr  # reportAttributeAccessIssue


class MyTask(Finetuner):
    def build_model(self) -> str:  # reportIncompatibleMethodOverride
        return "bert"

    def build_data(self) -> Data:
        return Data(train=[], valdi=[])  # reportCallIssue

    def compute_loss(self, model: nn.Module) -> Tensor:  # reportIncompatibleMethodOverride
        raise RapidformerError("no", were="here")  # reportCallIssue

    def build_optimizer(self) -> OptimizerSpec:
        return OptimizerSpec("adamw", {"lr": self.config.training.lr})  # reportArgumentType

    def on_step_end(self, step: str, result: object) -> None:  # reportIncompatibleMethodOverride
        print(self.config.training.learning_rate)  # reportAttributeAccessIssue

    def on_train_start(self) -> None:
        self.modle.train()  # reportAttributeAccessIssue


class Other(Trainr): ...


MyTask(3).fit()  # reportArgumentType
Data(train=3)  # reportArgumentType
MyTask().fit().steps  # reportAttributeAccessIssue
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[tuple[int, str]]]:
    """Return the line and the rule of each error that pyright finds, by file."""
    pyright = shutil.which("basedpyright", path=str(Path(sys.executable).parent))
    if pyright is None:
        pytest.skip("basedpyright is not installed")
    folder = tmp_path_factory.mktemp("types")
    (folder / "right.py").write_text(RIGHT, encoding="utf-8")
    (folder / "wrong.py").write_text(WRONG, encoding="utf-8")
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(ROOT / "src")]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    words = [pyright, "--pythonpath", sys.executable, "--project", str(folder), "--outputjson"]
    report: dict[str, Any] = json.loads(subprocess.run(words, capture_output=True, text=True, check=False).stdout)
    errors: dict[str, set[tuple[int, str]]] = {file.name: set() for file in folder.glob("*.py")}
    for error in report["generalDiagnostics"]:
        place = error["range"]["start"]["line"] + 1, str(error.get("rule"))
        errors[Path(error["file"]).name].add(place)
    assert report["summary"]["filesAnalyzed"] == len(errors)
    return errors


@pytest.mark.longer
def test_a_right_script_has_no_error_under_strict_rules(found: dict[str, set[tuple[int, str]]]) -> None:
    assert found["right.py"] == set()


@pytest.mark.longer
def test_each_mistake_is_found(found: dict[str, set[tuple[int, str]]]) -> None:
    lines = enumerate(WRONG.splitlines(), 1)
    mistakes = {(number, line.partition("  # ")[2]) for number, line in lines if "  # report" in line}
    assert len(mistakes) == 12
    assert mistakes - found["wrong.py"] == set()
