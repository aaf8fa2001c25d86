"""An optimizer, a scheduler and a state from a user's own loop: they act as in plain torch, or are refused."""

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as schedulers

from rapidformer_templates import OptimizerSpec, RapidformerError, Trainer, compose
from rapidformer_templates.engines.optimizer_instances import as_recipe, as_schedule
from rapidformer_templates.errors import CheckpointError, ConfigError
from rapidformer_templates.run import fit
from tests.support.messages import Says
from tests.support.worker_pool import run_in_workers

STEPS = 10


class Net(nn.Module):
    """Two layers, the first of them after a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.frozen, self.inner, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.inner(torch.tanh(self.frozen(x)))))
        return out


class Signed(Optimizer):
    """An optimizer of another package. It uses the sign of the gradient plus a fraction of the previous gradient, and
    passes its options to the base class.
    """

    def __init__(self, params: Any, lr: float = 1e-2, **kwargs: Any) -> None:
        super().__init__(params, {"lr": lr, "keep": 0.0, **kwargs})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                before = state.get("before", torch.zeros_like(parameter))
                state["before"] = parameter.grad.detach().clone()
                parameter.data.add_((parameter.grad + group["keep"] * before).sign(), alpha=-group["lr"])


class Told(Signed):
    """An optimizer with declared arguments, and with an option that is not one of its defaults."""

    def __init__(self, params: Any, lr: float = 1e-2, keep: float = 0.0, scale: float = 1.0) -> None:
        super().__init__(params, lr * scale, keep=keep)
        self.scale = scale


class Halves(SGD):
    """An optimizer that changes the options of its groups."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.defaults = {"lr": lr}
        for group in self.param_groups:
            group["lr"] /= 2


class Forgets(SGD):
    """An optimizer that does not store one of its arguments."""

    def __init__(self, params: Any, lr: float = 1e-2, secret: int = 1) -> None:
        super().__init__(params, lr)


class Widened(AdamW):
    """An optimizer that passes all its arguments to its base class."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)


def compute_loss(model: Any, batch: Any) -> tuple[torch.Tensor, float]:
    """Return the sum over the elements of a batch, and their number."""
    return (model(batch["x"]) - batch["y"]).square().sum(), float(batch["y"].numel())


def count(batch: Any) -> float:
    return float(batch["y"].numel())


def batch_of(step: int, rows: slice = slice(None)) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    x, y = torch.randn(6, 4, generator=made), torch.randn(6, 4, generator=made)
    return {"x": x[rows], "y": y[rows]}


def in_groups(model: Net) -> list[dict[str, Any]]:
    """Return two groups, the first with the frozen layer."""
    return [
        {"params": [*model.frozen.parameters(), *model.inner.parameters()], "weight_decay": 0.2, "name": "lower"},
        {"params": model.head.parameters(), "lr": 3e-2, "betas": (0.7, 0.8)},
    ]


def adamw(model: Net) -> AdamW:
    return AdamW(in_groups(model), lr=1e-2, betas=(0.8, 0.9), amsgrad=True)


Make = Callable[[Net], Optimizer]
Schedules = Callable[[Optimizer], Any]


def by_torch(
    make: Make, schedule: Schedules | None = None, steps: int = STEPS
) -> tuple[list[float], list[list[float]]]:
    """Train with plain torch. Returns (losses, learning rates of the groups)."""
    model = Net()
    optimizer = make(model)
    scheduler = schedule(optimizer) if schedule else None
    losses, rates = [], []
    for step in range(steps):
        total, numbers = compute_loss(model, batch_of(step))
        loss = total / numbers
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        losses.append(float(loss.detach()))
    return losses, rates


def composed(make: Make, schedule: Schedules | None = None, **flags: Any) -> Any:
    model = Net()
    optimizer = make(model)
    flags = {"device": "cpu", "micro_batch_size": 6, "count_targets": count, **flags}
    return compose(model, optimizer, compute_loss, schedule=schedule(optimizer) if schedule else None, **flags)


def by_session(make: Make, schedule: Schedules | None = None) -> tuple[list[float], list[list[float]]]:
    losses, rates = [], []
    with composed(make, schedule) as session:
        for step in range(STEPS):
            losses.append(float(session.step([batch_of(step)]).loss))
            rates.append(sorted(float(group["lr"]) for group in session.param_groups))
            session.evaluate(batch_of(90))
    return losses, rates


@pytest.mark.parametrize(
    "make",
    [
        adamw,
        lambda model: Signed(model.parameters(), lr=1e-2, keep=0.5),
        lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.5, 0.6), fused=True),
    ],
    ids=["groups", "another-package", "fused"],
)
def test_an_optimizer_is_the_one_of_plain_torch(make: Make) -> None:
    assert by_session(make)[0] == pytest.approx(by_torch(make)[0], abs=1e-6)


def _all_of_torch() -> Iterator[type[Optimizer]]:
    for kind in vars(torch.optim).values():
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind not in (Optimizer, torch.optim.LBFGS):
            yield kind


def test_each_class_of_torch_can_be_made_anew() -> None:
    for kind in _all_of_torch():
        model = nn.Linear(3, 3, bias=False)
        optimizer = kind(model.parameters(), lr=0.5)  # type: ignore[call-arg]
        recipe = as_recipe(optimizer, model, {})
        again = recipe.build(model.named_parameters(), recipe.differences(model.named_parameters()))
        assert again.defaults == optimizer.defaults


def _hooked(model: Net) -> Optimizer:
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def _stepped(model: Net) -> Optimizer:
    optimizer = AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return optimizer


LOST: list[Callable[[Net], Any]] = [
    lambda model: Widened(model.parameters(), lr=2e-2),
    lambda model: Told(model.parameters(), lr=1e-2, scale=2.0),
    lambda model: Halves(model.parameters()),
    lambda model: Forgets(model.parameters(), secret=2),
    lambda model: AdamW([model.head.weight]),
    lambda model: AdamW(nn.Linear(2, 2).parameters()),
    lambda model: "adam",
    _hooked,
    _stepped,
]


def test_what_would_be_lost_is_refused(says: Says) -> None:
    for make in LOST:
        model = Net()
        with says(ConfigError):
            as_recipe(make(model), model, {})


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: schedulers.LambdaLR(o, lambda step: 0.7**step),
        lambda o: schedulers.OneCycleLR(o, [0.02, 0.06], total_steps=STEPS, cycle_momentum=False),
        lambda o: schedulers.CyclicLR(o, [0.01, 0.03], [0.02, 0.06], step_size_up=3, cycle_momentum=False),
        lambda o: schedulers.SequentialLR(
            o, [schedulers.LinearLR(o, 0.1, total_iters=4), schedulers.CosineAnnealingLR(o, 6)], [4]
        ),
        lambda o: schedulers.ChainedScheduler([schedulers.ConstantLR(o, 0.5, 3), schedulers.ExponentialLR(o, 0.9)]),
        lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.95),
        lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4),
    ],
    ids=["lambda", "one-cycle", "cyclic", "sequential", "chained", "multiplicative", "restarts"],
)
def test_a_scheduler_gives_the_rates_of_plain_torch(schedule: Schedules) -> None:
    losses, rates = by_session(adamw, schedule)
    wanted, its_rates = by_torch(adamw, schedule)
    assert [row[0] for row in rates] == pytest.approx([min(row) for row in its_rates], rel=1e-9)
    assert [row[-1] for row in rates] == pytest.approx([max(row) for row in its_rates], rel=1e-9)
    assert losses == pytest.approx(wanted, abs=1e-6)


UNUSABLE: list[tuple[Schedules, int | None]] = [
    (lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=9), None),
    (lambda o: schedulers.CyclicLR(o, 0.1, 0.2), None),
    (lambda o: schedulers.CyclicLR(o, 0.0, 0.2, cycle_momentum=False), None),
    (lambda o: schedulers.LambdaLR(o, [lambda s: 1.0, lambda s: 0.5**s]), None),
    (lambda o: schedulers.LambdaLR(o, [lambda s: 1.0, lambda s: 1.0 if s < 5 else 0.5]), 9),
    (lambda o: schedulers.ReduceLROnPlateau(o), None),
]


def test_a_scheduler_that_is_no_share_of_a_rate_is_refused(says: Says) -> None:
    for schedule, steps in UNUSABLE:
        with says(ConfigError):
            as_schedule(schedule(adamw(Net())), steps)


@pytest.mark.parametrize("optimizer", [OptimizerSpec(SGD, {"lr": 0.1}), AdamW], ids=["recipe", "class"])
def test_flags_of_the_own_optimizer_beside_a_given_one_are_refused(optimizer: Any, says: Says) -> None:
    refused: list[dict[str, Any]] = [
        {"adam_beta1": 0.5},
        {"layerwise_lr_decay": 0.5},
        {"argv": ["--optimizer", "adamw_torch"]},
    ]
    for flags in [*refused, {"weight_decay": 0.1}] if optimizer is not AdamW else refused:
        with says(ConfigError, HERE=f"test_given_optimizers.py:{sys._getframe().f_lineno + 1}"):
            compose(Net, optimizer, compute_loss, device="cpu", **flags)


def test_a_state_that_would_not_come_back_is_refused_before_anything_is_written(tmp_path: Path, says: Says) -> None:
    with composed(adamw) as session:
        session.step([batch_of(0)])
        for state in ({"a": [{"b": tmp_path}]}, {"epochs": {1: 2.0}}, {"loss": torch.ones(1)}):
            with says(CheckpointError):
                session.save(tmp_path / "run", state)
        assert not (tmp_path / "run").exists()
        session.save(tmp_path / "run", {"epoch": 1, "rates": (0.5, None), "best": math.inf, "of": {"a": True}})
        assert session.load(tmp_path / "run") == {"epoch": 1, "rates": [0.5, None], "best": math.inf, "of": {"a": True}}


def test_a_step_that_raises_leaves_nothing_for_the_next() -> None:
    """No gradients remain. If the step has too few batches, its batch does not remain either."""
    wanted = by_torch(adamw, steps=3)[0]
    with composed(adamw, micro_batch_size=3, global_batch_size=6) as session:
        losses = []
        for step in range(3):
            with pytest.raises(KeyError):
                session.step([batch_of(step), {"y": batch_of(50)["y"]}])
            halves = [batch_of(step)] if step == 1 else [batch_of(step, slice(5)), batch_of(step, slice(5, None))]
            losses.append(float(session.step(halves).loss))
            session.evaluate(batch_of(90, slice(2)))
        assert session.steps == 3
        stand_in: Any = session._placeholder
        assert torch.equal(stand_in["x"], batch_of(2)["x"][5:])
    assert losses == pytest.approx(wanted, abs=1e-6)


def test_workers_of_a_call_are_not_those_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    template = Trainer([], lr=1.0)
    asked: list[int | None] = []

    def ask(template: Trainer, *then: object) -> tuple[None, None]:
        asked.append(template.config.launch.nproc_per_node)
        return None, None

    monkeypatch.setattr(fit, "fit", ask)
    for workers in (2, None, 3):
        template.fit(workers)
    assert asked == [2, None, 3]
    assert template.config.origin("nproc_per_node") == "default"


LAYOUTS: dict[str, dict[str, Any]] = {"ddp": {}, "zero-3": {"zero_3_memory_optimization": True}}


def _everywhere(workers: Any, folder: str) -> dict[str, Any]:
    """Return the losses in each layout, with uneven shares. The second half of a run uses the next layout."""
    found: dict[str, Any] = {}
    names = [*LAYOUTS]
    for place, name in enumerate(names):
        with _session(LAYOUTS[name]) as session:
            first = [_step(session, step, workers.rank) for step in range(2)]
            session.evaluate(batch_of(90))
            found["refused"] = _refusal(session, f"{folder}/{name}", workers.rank)
            session.save(f"{folder}/{name}", {"at": 2})
        with _session(LAYOUTS[names[place - 1]]) as session:
            assert session.load(f"{folder}/{name}") == {"at": 2}
            found[name] = first + [_step(session, step, workers.rank) for step in range(2, 4)]
    return found


def _session(flags: dict[str, Any]) -> Any:
    decays = lambda o: schedulers.ExponentialLR(o, 0.8)  # noqa: E731
    return composed(adamw, decays, micro_batch_size=4, global_batch_size=16, **flags)


def _step(session: Any, step: int, rank: int) -> float:
    """The first worker has one micro batch with one row. The second has two, with five rows in total."""
    shares = [slice(1, 5), slice(5, None)] if rank else [slice(1)]
    return float(session.step([batch_of(step, rows) for rows in shares]).loss)


def _refusal(session: Any, folder: str, rank: int) -> str:
    try:
        session.save(folder, {"mine": Path(folder)} if rank else {"mine": 1})  # the state is not that of rank 0
    except RapidformerError as error:
        return error.message
    return "accepted"


@pytest.mark.longer
@pytest.mark.distributed
def test_two_workers_train_as_plain_torch_does_and_go_on_in_another_layout(tmp_path: Path) -> None:
    wanted = by_torch(adamw, lambda o: schedulers.ExponentialLR(o, 0.8), steps=4)[0]
    for found in run_in_workers(2, _everywhere, str(tmp_path)):
        for name in LAYOUTS:
            assert found[name] == pytest.approx(wanted, abs=1e-5), name
        assert "state['mine'], of type" in found["refused"]
