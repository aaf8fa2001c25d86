"""Each record of an optimizer is compared with the class that it names."""

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rapidformer_templates.engines.optimizer_state import state_tensors
from rapidformer_templates.engines.recipe import GroupOptions, default_optimizer, name_of_rule, undecayed
from rapidformer_templates.planning.environment import installed_packages
from rapidformer_templates.planning.flags import TrainingFlags
from rapidformer_templates.planning.optimizer_states import QUANTIZED_FROM, ParameterShape
from rapidformer_templates.planning.optimizers import (
    CLASSES,
    ELEMENTWISE_OF_TORCH,
    OPTIMIZERS,
    OptimizerClass,
    updates_elementwise,
    updates_in_chunks,
)
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.registry import load_object

PAGE = Path(__file__).parents[3] / "docs/optimizers.md"
PACKAGES = {package.split(".")[0] for package in installed_packages()} | {"torch", "rapidformer_templates"}
NEEDED = {facts.implementation.path: facts.needs_package for facts in OPTIMIZERS.values()}


def _is_here(kind: OptimizerClass) -> bool:
    return {kind.path.split(".")[0], NEEDED.get(kind.path) or "torch"} <= PACKAGES


HERE = {path: kind for path, kind in CLASSES.items() if _is_here(kind)}
BUILT = {path: kind for path, kind in HERE.items() if not path.startswith("deepspeed.")}
"""DeepSpeed compiles its class for some minutes. Runs with offload test it."""


def _class(kind: OptimizerClass) -> type[torch.optim.Optimizer]:
    module = import_module(kind.path.partition(" ")[0].rpartition(".")[0])
    real: type[torch.optim.Optimizer] = getattr(module, kind.name)
    return real


class Model(nn.Module):
    """A table, matrices large and small enough for either form of a quantized state, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(24, 256)
        self.large = nn.Linear(256, QUANTIZED_FROM // 64)
        self.uneven = nn.Linear(67, 67)
        self.small = nn.Linear(6, 4)


def _optimizer(kind: OptimizerClass, model: nn.Module) -> torch.optim.Optimizer:
    """Build an optimizer as a run does."""
    groups = {facts.implementation: facts.groups for facts in OPTIMIZERS.values()}.get(kind)
    options: GroupOptions = load_object(groups)(model) if groups else undecayed
    plan = Plan("Trainer", optimizer_implementation=kind.path)
    recipe = default_optimizer(plan, TrainingFlags(lr=0.01, weight_decay=0.1), options)
    named = list(model.named_parameters())
    return recipe.build(named, recipe.differences(named))


def _draw_gradients(model: nn.Module, step: int) -> None:
    draw = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draw)


# The records


def test_the_page_about_optimizers_has_every_record() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("\n|---|")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[1:]]
    named = {name: (size, needs) for names, _, size, needs in rows for name in re.findall("`(.+?)`", names)}
    assert named.keys() == OPTIMIZERS.keys()
    for name, (size, needs) in named.items():
        facts = OPTIMIZERS[name]
        assert float(re.findall(r"[\d.]+", size)[0]) == pytest.approx(facts.state_bytes, abs=0.02), name
        assert bool(needs) == (facts.package is not None), name


# The classes


@pytest.mark.parametrize("path", HERE)
def test_a_class_has_the_name_and_the_options_of_its_record(path: str) -> None:
    kind = HERE[path]
    real = _class(kind)
    assert name_of_rule(real) == kind.rule
    assert issubclass(real, torch.optim.Optimizer)
    assert updates_in_chunks(f"{real.__module__}.{real.__qualname__}") == kind.per_parameter
    assert updates_elementwise(f"{real.__module__}.{real.__qualname__}") == kind.elementwise
    if isinstance(kind.l2, str):
        assert inspect.signature(real).parameters[kind.l2].default is True
    if isinstance(kind.l2, OptimizerClass):
        assert _class(kind.l2).__module__.split(".")[0] == real.__module__.split(".")[0]


@pytest.mark.parametrize("name", [name for name, facts in OPTIMIZERS.items() if facts.implementation.path in BUILT])
def test_the_default_betas_and_epsilon_are_those_of_the_class(name: str) -> None:
    facts, model = OPTIMIZERS[name], Model()
    optimizer = _optimizer(facts.implementation, model)
    betas = [group["betas"] for group in optimizer.param_groups if "betas" in group]
    assert set(map(tuple, betas)) == ({facts.betas} if facts.betas else set())
    epsilons = {group["eps"] for group in optimizer.param_groups if "betas" in group and "eps" in group}
    assert epsilons == ({facts.epsilon} if facts.epsilon else set())


@pytest.mark.parametrize("path", BUILT)
def test_the_state_has_the_bytes_of_the_record(path: str) -> None:
    kind, model = BUILT[path], Model()
    optimizer = _optimizer(kind, model)
    _draw_gradients(model, 0)
    optimizer.step()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state_tensors(optimizer)}
    parameters = [
        ParameterShape(tuple(p.shape), decays=p.ndim > 1, is_table=name.startswith("table"))
        for name, p in model.named_parameters()
    ]
    assert sum(storages.values()) == kind.state.bytes_of(parameters)


def _train(kind: OptimizerClass, step: Callable[[nn.Module, torch.optim.Optimizer], None]) -> list[torch.Tensor]:
    model = Model()
    optimizer = _optimizer(kind, model)
    for number in range(3):
        _draw_gradients(model, number)
        step(model, optimizer)
    return [parameter.detach() for parameter in model.parameters()]


def _at_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def _one_by_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    optimizer.zero_grad()
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
        optimizer.step()
        parameter.grad = None


@pytest.mark.parametrize("path", [path for path, kind in BUILT.items() if kind.per_parameter])
def test_one_parameter_at_a_time_makes_the_same_update(path: str) -> None:
    together, apart = _train(BUILT[path], _at_once), _train(BUILT[path], _one_by_one)
    assert all(torch.equal(*pair) for pair in zip(together, apart, strict=True))


def _trained_in_pieces(build: Callable[[list[nn.Parameter]], torch.optim.Optimizer], parts: int) -> torch.Tensor:
    """Train the numbers of one matrix, cut into flat pieces as an engine does that shards updates."""
    torch.manual_seed(0)
    whole = torch.randn(96, 128)
    pieces: Any = [nn.Parameter(piece.clone()) for piece in (whole.flatten().chunk(parts) if parts > 1 else [whole])]
    optimizer = build(pieces)
    for number in range(3):
        gradient = torch.randn(96, 128, generator=torch.Generator().manual_seed(number)) * torch.arange(1, 129)
        for piece, part in zip(pieces, gradient.flatten().chunk(parts), strict=True):
            piece.grad = part.view_as(piece).clone()
        optimizer.step()
    return torch.cat([piece.detach().flatten() for piece in pieces])


@pytest.mark.parametrize("path", BUILT)
def test_pieces_of_a_parameter_are_updated_alike_only_if_the_record_says_so(path: str) -> None:
    kind = BUILT[path]

    def build(pieces: list[nn.Parameter]) -> torch.optim.Optimizer:
        return _class(kind)(pieces, lr=0.01, weight_decay=0.1)  # type: ignore[call-arg]

    try:
        alike = torch.allclose(_trained_in_pieces(build, 1), _trained_in_pieces(build, 5), rtol=1e-5, atol=1e-6)
    except ValueError:  # Muon refuses a vector
        alike = False
    assert alike == kind.elementwise


@pytest.mark.parametrize("name", sorted(ELEMENTWISE_OF_TORCH))
def test_other_optimizers_of_torch_update_pieces_alike(name: str) -> None:
    def build(pieces: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(pieces, lr=0.01)
        return optimizer

    assert torch.allclose(_trained_in_pieces(build, 1), _trained_in_pieces(build, 5), rtol=1e-5, atol=1e-6)
