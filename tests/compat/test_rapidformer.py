"""Scripts from PAI-Rapidformer's documentation. After changing one line, they train like our templates."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from examples.pai_rapidformer import finetune, no_trainer, pretrain
from rapidformer_templates import Data, Finetuner, Pretrainer, RapidformerError
from rapidformer_templates.compat import rapidformer
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.run.folder import read_metrics
from rapidformer_templates.run.log import Log
from tests.support.messages import Says
from tests.support.worker_pool import run_in_workers

EXAMPLES = Path(finetune.__file__).parent
RATES = ("per_second", "step_ms", "memory")
OF_A_RUN = "--device cpu --lr 1e-2 --log-interval 1"
FINETUNING = f"{OF_A_RUN} --epochs 2 --clip-grad 0.1"
PRETRAINING = f"{OF_A_RUN} --train-iters 6 --eval-iters 3 --eval-interval 3 --global-batch-size 8"
LOOP = "--device cpu --lr 1e-2 --lr-warmup-iters 2 --clip-grad 0"


def given(words: str) -> Any:
    """Set the arguments of the command line."""
    return mock.patch("rapidformer_templates.system.launch.program_arguments", return_value=words.split())


def recorded(train: Callable[[], object]) -> list[dict[str, Any]]:
    """Return the lines that runs write to ``metrics.jsonl`` in a folder, without fields that depend on the clock."""
    lines: list[dict[str, Any]] = []
    record = Log.record

    def record_too(log: Log, line: Mapping[str, Any]) -> None:
        lines.append({k: v for k, v in line.items() if not any(word in k for word in RATES)})
        record(log, line)

    with mock.patch.object(Log, "record", record_too):
        train()
    return lines


def finetuned(flags: str) -> list[dict[str, Any]]:
    with given(flags):
        engine = rapidformer.RapidformerEngine(extra_args_provider=finetune.get_tasks_args)
        return recorded(finetune.MyFinetuner(engine=engine).train)


def pretrained(flags: str) -> list[dict[str, Any]]:
    with given(flags):
        return recorded(pretrain.MyBertPreTrainer(engine=rapidformer.RapidformerEngine()).train)


def looped(flags: str) -> tuple[list[float], float]:
    with given(flags):
        found = no_trainer.main()
        rapidformer._engine().session.close()
    return found


@pytest.mark.parametrize("script", ["finetune", "pretrain", "no_trainer"])
def test_one_line_is_another(script: str) -> None:
    source = (EXAMPLES / f"{script}.py").read_text(encoding="utf-8")
    (before,) = re.findall(r"^# from rapidformer import (.*)$", source, re.MULTILINE)
    (after,) = re.findall(r"^from rapidformer_templates\.\S+ import (.*)$", source, re.MULTILINE)
    assert set(before.split(", ")) == set(after.split(", "))


class OursFinetuned(Finetuner):
    """The fine-tuning script as one of our templates."""

    def build_data(self) -> Data:
        theirs: Any = finetune.MyFinetuner.train_valid_test_datasets_provider
        train, valid, _, collate = theirs(None)
        return Data(train=train, valid=valid, collate=collate)

    def build_model(self) -> nn.Module:
        theirs: Any = finetune.MyFinetuner.model_optimizer_lr_scheduler_provider
        model: nn.Module = theirs(None)[0]
        return model

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        return model(**batch).loss

    def read_outputs(self, outputs: Any, batch: dict[str, torch.Tensor]) -> tuple[list[int], list[int]]:
        return outputs.logits.argmax(-1).tolist(), batch["labels"].tolist()

    def compute_metrics(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": sum(p == r for p, r in zip(predictions, references, strict=True)) / len(references)}


class OursPretrained(Pretrainer):
    """The pretraining script as one of our templates."""

    def build_data(self) -> Data:
        train: Any = rapidformer._Sequential(pretrain.MaskedWords(48, self.config.training.seed))
        valid: Any = pretrain.MaskedWords(24, self.config.training.seed + 1)
        return Data(train=train, valid=valid)

    def build_model(self) -> nn.Module:
        theirs: Any = pretrain.MyBertPreTrainer.model_optimizer_lr_scheduler_provider
        model: nn.Module = theirs(None)[0]
        return model

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        return model(**batch).loss


def torchs_own_loop(batch_size: int) -> list[float]:
    """Run the script with its own loop without an engine: plain torch, the whole batch in one process."""
    model: Any = no_trainer.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = no_trainer.get_linear_schedule_with_warmup(optimizer, 2, 30)
    losses = []
    for _ in range(2):
        for first in range(0, 44, batch_size):
            loss = model(**no_trainer.collate_fn(no_trainer.WORDS[first : min(44, first + batch_size)])).loss
            loss.backward()
            scheduler.step()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def _everywhere(workers: Any) -> dict[str, Any]:
    return {
        "finetune": finetuned(f"{FINETUNING} --micro-batch-size 2 --no-save"),
        "pretrain": pretrained(f"{PRETRAINING} --micro-batch-size 4 --no-save"),
        "loop": looped(f"{LOOP} --micro-batch-size 4 --global-batch-size 8"),
        "zero": looped(f"{LOOP} --micro-batch-size 8 --zero-3-memory-optimization"),
        "tensor": looped(f"{LOOP} --micro-batch-size 8 --global-batch-size 16 --tensor-model-parallel-size 2"),
    }


@pytest.fixture(scope="module")
def in_workers() -> list[dict[str, Any]]:
    return run_in_workers(2, _everywhere)


CASES: dict[str, tuple[Any, Any, str]] = {
    "finetune": (finetuned, OursFinetuned, f"{FINETUNING} --micro-batch-size 4"),
    "pretrain": (pretrained, OursPretrained, f"{PRETRAINING} --micro-batch-size 8"),
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_scripts_train_as_our_templates_do(name: str, in_workers: list[dict[str, Any]], tmp_path: Path) -> None:
    script, kind, flags = CASES[name]
    with given(""):
        rapidformer.RapidformerEngine(extra_args_provider=finetune.get_tasks_args)  # needed for get_args()
        wanted = recorded(kind([*flags.split(), "--no-save"]).fit)
    found = script(f"{flags} --no-export-model --save {tmp_path}")
    assert found == wanted  # bit for bit
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [line["step"] for line in wanted]
    assert any("eval_loss" in line for line in wanted)
    assert name == "pretrain" or any("accuracy" in line for line in wanted)
    for line, other in zip(in_workers[0][name], wanted, strict=True):
        assert line == pytest.approx(other, rel=2e-5, abs=1e-6)


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:Detected call")  # the documented order, in plain torch
def test_a_loop_of_ones_own_is_that_of_torch(in_workers: list[dict[str, Any]]) -> None:
    wanted = torchs_own_loop(8)
    losses, accuracy = looped(f"{LOOP} --micro-batch-size 8")
    assert losses == pytest.approx(wanted, abs=1e-6)
    accumulated, same = looped(f"{LOOP} --micro-batch-size 4 --global-batch-size 8")
    assert (len(accumulated), same) == (22, accuracy)
    assert (accumulated[0] + accumulated[1]) / 2 == pytest.approx(wanted[0], abs=1e-6)
    # With two workers, each sees half of the batches of a step. The second of the eleven in a pass has one less.
    first, second = (worker["loop"] for worker in in_workers)
    pairs = [*zip(first[0][:5], second[0][:5], strict=True), (first[0][5],)]
    pairs += [*zip(first[0][6:11], second[0][5:], strict=True), (first[0][11],)]
    assert [sum(pair) / len(pair) for pair in pairs] == pytest.approx(wanted, abs=1e-6)
    of_16 = torchs_own_loop(16)
    zero = [(a + b) / 2 for a, b in zip(in_workers[0]["zero"][0][:5], in_workers[1]["zero"][0], strict=False)]
    assert zero[:2] == pytest.approx(of_16[:2], abs=1e-6)
    tensor = in_workers[0]["tensor"][0]
    assert [(a + b) / 2 for a, b in zip(tensor[::2], tensor[1::2], strict=False)][:2] == pytest.approx(
        of_16[:2], abs=1e-6
    )
    assert first[1] == second[1] == in_workers[0]["zero"][1] == in_workers[1]["tensor"][1]


def _body(**changed: Callable[..., Any]) -> None:
    """Run the own loop with a different backward or step."""
    with given(f"{LOOP} --micro-batch-size 8"):
        engine = rapidformer.RapidformerEngine()
        loader = torch.utils.data.DataLoader(no_trainer.WORDS[:24], batch_size=8, collate_fn=no_trainer.collate_fn)
        made = no_trainer.build_model()
        model, optimizer, batches = engine.compose(
            model=made, optimizer=torch.optim.AdamW(made.parameters()), train_dataloader=loader
        )
        try:
            for batch in batches:
                changed.get("backward", engine.backward)(model(**batch).loss)
                changed.get("step", optimizer.step)()
        finally:
            batches = None
            engine.session.close()


def test_a_body_without_its_parts_is_told_so(says: Says) -> None:
    none: dict[str, Callable[..., Any]] = {"backward": lambda loss: None, "step": lambda: None}
    for changed in (none, {"step": none["step"]}, {"backward": none["backward"]}):
        with says(RapidformerError):
            _body(**changed)


def test_get_args_knows_flags_and_their_own(says: Says) -> None:
    with given("--lr 1e-3 --train-iters 5 --words 7 --seed 9"):
        rapidformer.RapidformerEngine(extra_args_provider=finetune.get_tasks_args)
    args = rapidformer.get_args()
    assert (args.lr, args.train_iters, args.words, args.seed, args.micro_batch_size) == (1e-3, 5, 7, 9, 1)
    args.iteration = 3
    assert args.iteration == 3
    with says(ConfigError):
        args.train_iters = 1
    with says(AttributeError):
        _ = args.nothing
    with given(""), says(ConfigError):
        rapidformer.RapidformerEngine(extra_args_provider=lambda parser: parser.add_argument("--lr"))


class Unlabelled(rapidformer.PreTrainer):
    """Returns a loss as Megatron does. The batch does not show what the loss averages over."""

    def train_valid_test_datasets_provider(self) -> Any:
        return [torch.arange(i, i + 4) % 9 for i in range(8)], None, None, lambda rows: {"text": torch.stack(rows)}

    def model_optimizer_lr_scheduler_provider(self, pre_process: bool = True, post_process: bool = True) -> Any:
        model = nn.Embedding(9, 9)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def run_forward_step(self, data_iterator: Any, model: Any) -> Any:
        tokens = data_iterator["text"]
        return model(tokens[:, :-1]), lambda output: (
            nn.functional.cross_entropy(output.flatten(0, 1), tokens[:, 1:].flatten()),
            {"lm loss": 0.0},
        )


class Counted(Unlabelled):
    """The same with the hook that the error message names."""

    def count_targets(self, batch: Any) -> int:
        return int(batch["text"][:, 1:].numel())


def test_what_cannot_be_told_apart_names_the_hook(says: Says) -> None:
    flags = f"{OF_A_RUN} --train-iters 3 --micro-batch-size 2 --global-batch-size 4 --no-save"
    with given(flags), says(RapidformerError):
        Unlabelled(engine=rapidformer.RapidformerEngine()).train()
    with given(flags):
        lines = recorded(Counted(engine=rapidformer.RapidformerEngine()).train)
    assert [line["lr"] for line in lines] == [0.1, 0.05, 0.025]  # the scheduler of the script
    for length in ("--epochs 1", "--train-iters 1epochs"):
        with given(f"--device cpu --lr 1e-2 {length} --no-save"), says(ConfigError):
            pretrain.MyBertPreTrainer(engine=rapidformer.RapidformerEngine()).train()
    with says(ConfigError):
        _ = rapidformer.GPTPredictor
    batch = rapidformer._OneBatch(text=1)
    assert next(batch) == {"text": 1}
    with says(RapidformerError):
        next(batch)
