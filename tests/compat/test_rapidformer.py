"""Scripts from PAI-Rapidformer's documentation train like our templates, and loops of scripts like plain torch."""

import copy
import os
import pickle
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, WeightedRandomSampler

from examples.pai_rapidformer import finetune, no_trainer, pretrain
from rapidformer_templates import Data, Finetuner, Pretrainer, RapidformerError
from rapidformer_templates.compat import rapidformer
from rapidformer_templates.compat.own_loop import SharedLoader
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.plan import Sizes
from rapidformer_templates.run.folder import read_metrics
from rapidformer_templates.run.log import Log
from tests.support.messages import Says
from tests.support.parity import trained
from tests.support.worker_pool import alone, run_in_workers

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


DRAW = torch.Generator().manual_seed(0)
ROWS = [{"x": torch.randn(6, generator=DRAW), "labels": i % 3} for i in range(11)]
HEAD = torch.randn(3, 3, generator=DRAW)
FLAGS = "--device cpu --clip-grad 0"


class Drawn(Sampler[int]):
    """Sample indices drawn with the global generator of the process."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(11), 11))

    def __len__(self) -> int:
        return 11


def loader_of(kind: str) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(3 + int(os.environ.get("RANK", 0)))  # each worker has a different generator
    options: dict[str, dict[str, Any]] = {
        "shuffled": {"shuffle": True, "generator": draw},
        "weighted": {"sampler": WeightedRandomSampler([float(i) for i in range(1, 12)], 11, generator=draw)},
        "drawn": {"sampler": Drawn()},
    }
    return DataLoader(ROWS, batch_size=2, **options[kind])  # type: ignore[arg-type]


def build_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(6, 3)


def composed(flags: str, loader: Any, **more: Any) -> tuple[Any, ...]:
    with given(flags):
        engine = rapidformer.RapidformerEngine()
        model = more.pop("model", None) or build_model()
        return engine, *engine.compose(model=model, train_dataloader=loader, **more)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["labels"])


def stopped(
    kind: str, flags: str = "", ends: Callable[[], None] | None = None, batch_size: int = 4
) -> dict[str, torch.Tensor]:
    """Return the weights after a pass that is stopped in its second step, followed by a complete pass."""
    made = build_model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5)
    engine, model, optimizer, batches = composed(
        f"{FLAGS} --global-batch-size {batch_size} {flags}", loader_of(kind), model=made, optimizer=optimizer
    )
    updates = 0
    try:
        for batch in batches:
            loss = loss_of(model, batch)
            if updates == 1:
                (ends or (lambda: None))()
                break
            engine.backward(loss)
            updates += batches.is_last
            optimizer.step()
    except KeyError:
        pass
    for batch in batches:
        if "zero-3" not in flags:  # zero-3 refuses a second forward
            loss_of(model, batch).detach()
        engine.backward(loss_of(model, batch))
        optimizer.step()
    weights = {name: value.detach().clone() for name, value in engine.session.model.state_dict().items()}
    engine.session.close()
    return weights


def torchs(kind: str) -> dict[str, torch.Tensor]:
    """Do the same in plain torch, with two batches per step."""
    model, loader = build_model(), loader_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for steps in (1, 3):
        batches = list(loader)
        for pair in [batches[first : first + 2] for first in range(0, 2 * steps, 2)]:
            loss_of(model, {name: torch.cat([batch[name] for batch in pair]) for name in ("x", "labels")}).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def _raises() -> None:
    raise KeyError("of the loop")


def _stopped_everywhere(workers: Any) -> dict[str, Any]:
    random.seed(workers.rank)
    return {
        "shuffled": stopped("shuffled"),
        "weighted": stopped("weighted", "--zero-2-memory-optimization"),
        "idle bf16": stopped("weighted", "--mixed-precision bf16", batch_size=8),
        "drawn": stopped("drawn", ends=_raises),
        "drawn bf16": stopped("drawn", "--mixed-precision bf16 --zero-3-memory-optimization", ends=_raises),
    }


@pytest.fixture(scope="module")
def stopped_in_workers() -> dict[str, Any]:
    found: dict[str, Any] = run_in_workers(2, _stopped_everywhere)[0]
    return found


@pytest.mark.distributed
def test_any_sampler_draws_once_for_all_workers(stopped_in_workers: dict[str, Any]) -> None:
    for kind in ("shuffled", "weighted"):
        torch.testing.assert_close(stopped_in_workers[kind], torchs(kind))
    # In the last step of a pass, each worker has one batch and repeats it, and the repeated one does not count.
    rounded = {name: value.float() for name, value in stopped_in_workers["idle bf16"].items()}
    torch.testing.assert_close(rounded, stopped("weighted", batch_size=8), atol=0.02, rtol=0.02)
    alone_drawn = stopped("drawn")
    torch.testing.assert_close(stopped_in_workers["drawn"], alone_drawn)
    rounded = {name: value.float() for name, value in stopped_in_workers["drawn bf16"].items() if value.numel()}
    torch.testing.assert_close(rounded, {name: alone_drawn[name] for name in rounded}, atol=0.02, rtol=0.02)


class Headed(Finetuner):
    """A run that computes its loss from the output of the model."""

    def build_data(self) -> Data:
        return Data(train=[TABLE])

    def build_model(self) -> nn.Module:
        return build_model()

    def compute_loss(self, model: Any, batch: Any) -> Any:
        return headed(model, batch)


TABLE = {"x": torch.stack([row["x"] for row in ROWS]), "labels": torch.tensor([row["labels"] for row in ROWS])}  # type: ignore[misc]


def headed(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy((model(batch["x"]) @ HEAD).flatten(0, 1), batch["labels"].flatten())


def test_the_loss_has_the_precision_and_the_rate_of_a_run() -> None:
    flags = "--device cpu --mixed-precision bf16 --lr 0.1 --train-iters 4 --lr-warmup-iters 2 --lr-decay-style cosine"
    run = trained(Headed([*flags.split(), "--log-interval", "1", "--no-save"]))
    wanted = [line["loss"] for line in run["lines"]]
    loader = DataLoader([TABLE])  # type: ignore[var-annotated, arg-type]
    engine, model, optimizer, batches, evaluated = composed(flags, loader, eval_dataloader=loader)
    assert (len(batches), len(evaluated), evaluated.dataset) == (1, 1, [TABLE])
    found = []
    for _ in range(4):
        for batch in batches:
            loss = headed(model, batch)
            engine.backward(loss)
            assert not torch.is_autocast_enabled("cpu")
            optimizer.step()
            found.append(loss.item())
    with torch.no_grad():
        assert [headed(model, batch).dtype for batch in evaluated] == [torch.float32]
    engine.session.close()
    assert found == wanted  # bit for bit
    assert not torch.is_autocast_enabled("cpu")


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


LOADERS: dict[str, tuple[Callable[[], Any], str]] = {
    "a stream": (lambda: DataLoader(Stream(), batch_size=2), ""),
    "no batches": (lambda: DataLoader(ROWS, batch_size=None), ""),  # type: ignore[arg-type]
    "a list": (lambda: ROWS, ""),
    "a sampler of a worker": (lambda: DataLoader(ROWS, sampler=DistributedSampler(ROWS, 2, 0)), ""),  # type: ignore[arg-type]
    "an endless sampler": (lambda: DataLoader(ROWS, sampler=Endless()), ""),  # type: ignore[arg-type]
    "another size": (lambda: DataLoader(ROWS, batch_size=2), "--micro-batch-size 4"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_that_cannot_be_cut_is_refused(name: str, says: Says) -> None:
    loader, flags = LOADERS[name]
    with says(ConfigError):
        composed(f"--device cpu --lr 0.1 {flags}", loader())


def test_batches_without_labels_need_their_counts(says: Says) -> None:
    rows = [{"x": row["x"], "y": row["labels"]} for row in ROWS]

    def losses_of(flags: str, **more: Any) -> list[float]:
        loader: Any = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
        engine, model, optimizer, batches = composed(f"--device cpu --lr 0.1 {flags}", loader, **more)
        losses = []
        try:
            for batch in batches:
                losses.append(nn.functional.cross_entropy(model(batch["x"]), batch["y"]))
                engine.backward(losses[-1])
                optimizer.step()
        finally:
            engine.session.close()
        return [loss.item() for loss in losses]

    assert len(losses_of("")) == 6  # with one batch per step, there is only one weight
    with says(RapidformerError):
        losses_of("--global-batch-size 4")
    assert len(losses_of("--global-batch-size 4", count_targets=lambda batch: len(batch["y"]))) == 6


STARTED = "started"


class Where(Dataset[torch.Tensor]):
    """Four samples that show what the process that loads them has received."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, getattr(torch, STARTED, -1), int(torch.randint(1 << 30, ()))])


def _start(number: int) -> None:
    setattr(torch, STARTED, number)


def test_the_options_of_a_loader_are_kept() -> None:
    theirs: DataLoader[Any] = DataLoader(
        Where(), batch_size=2, num_workers=2, worker_init_fn=_start, persistent_workers=True, prefetch_factor=3
    )
    shared = SharedLoader(theirs, alone(), Sizes(micro_batch=2), seed=5)
    passes = [torch.cat([batch for step in shared.steps() for batch in step]) for _ in range(2)]
    assert [found[:, 0].tolist() for found in passes] == [[0, 1, 2, 3]] * 2
    assert [found[:, 1].tolist() for found in passes] == [[0, 0, 1, 1]] * 2
    assert len({int(number) for found in passes for number in found[:, 2]}) == 8  # the same processes continue to draw
    fresh: DataLoader[Any] = DataLoader(Where(), batch_size=2, num_workers=2)
    draws, state = [], torch.get_rng_state()
    for seed in (5, 5, 6):
        shared = SharedLoader(fresh, alone(), Sizes(micro_batch=2), seed)
        draws += [torch.cat([batch for step in shared.steps() for batch in step])[:, 2].tolist() for _ in range(2)]
    assert torch.equal(state, torch.get_rng_state())  # so workers that share a replica continue with the same state
    assert draws[:2] == draws[2:4]
    assert len({tuple(draw) for draw in draws}) == 3  # they depend on the pass and on the seed


def test_arguments_can_be_copied_and_listed() -> None:
    with given("--lr 1e-3 --words 7"):
        rapidformer.RapidformerEngine(extra_args_provider=finetune.get_tasks_args)
    args = rapidformer.get_args()
    for same in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert vars(same) == vars(args)
        same.lr = 2.0  # the copy belongs to the script
    assert (args.lr, args.words, vars(args)["words"], "seed" in args) == (1e-3, 7, 7, True)
    assert "words=7" in repr(args)
