"""A script's own loop with any sampler, precision and end, compared with plain torch and with a run."""

from __future__ import annotations

import argparse
import copy
import os
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, WeightedRandomSampler

from rapidformer_templates import Data, Finetuner, RapidformerError
from rapidformer_templates.compat import rapidformer
from rapidformer_templates.compat.own_loop import SharedLoader
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.plan import Sizes
from tests.support.messages import Says
from tests.support.parity import trained
from tests.support.worker_pool import alone, run_in_workers

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
    with mock.patch("rapidformer_templates.system.launch.program_arguments", return_value=flags.split()):
        engine = rapidformer.RapidformerEngine()
        model = more.pop("model", None) or build_model()
        return engine, *engine.compose(model=model, train_dataloader=loader, **more)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["labels"])


def looped(
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


def _everywhere(workers: Any) -> dict[str, Any]:
    random.seed(workers.rank)
    return {
        "shuffled": looped("shuffled"),
        "weighted": looped("weighted", "--zero-2-memory-optimization"),
        "idle bf16": looped("weighted", "--mixed-precision bf16", batch_size=8),
        "drawn": looped("drawn", ends=_raises),
        "drawn bf16": looped("drawn", "--mixed-precision bf16 --zero-3-memory-optimization", ends=_raises),
    }


@pytest.fixture(scope="module")
def in_workers() -> dict[str, Any]:
    found: dict[str, Any] = run_in_workers(2, _everywhere)[0]
    return found


@pytest.mark.distributed
def test_any_sampler_draws_once_for_all_workers(in_workers: dict[str, Any]) -> None:
    for kind in ("shuffled", "weighted"):
        torch.testing.assert_close(in_workers[kind], torchs(kind))
    # In the last step of a pass, each worker has one batch and repeats it, and the repeated one does not count.
    rounded = {name: value.float() for name, value in in_workers["idle bf16"].items()}
    torch.testing.assert_close(rounded, looped("weighted", batch_size=8), atol=0.02, rtol=0.02)
    alone_drawn = looped("drawn")
    torch.testing.assert_close(in_workers["drawn"], alone_drawn)
    rounded = {name: value.float() for name, value in in_workers["drawn bf16"].items() if value.numel()}
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


def _more_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--words", type=int)
    return parser


def test_arguments_can_be_copied_and_listed() -> None:
    words = ["--lr", "1e-3", "--words", "7"]
    with mock.patch("rapidformer_templates.system.launch.program_arguments", return_value=words):
        rapidformer.RapidformerEngine(_more_flags)
    args = rapidformer.get_args()
    for same in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert vars(same) == vars(args)
        same.lr = 2.0  # the copy belongs to the script
    assert (args.lr, args.words, vars(args)["words"], "seed" in args) == (1e-3, 7, 7, True)
    assert "words=7" in repr(args)
