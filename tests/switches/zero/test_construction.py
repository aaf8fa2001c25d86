"""A model that is built in partitions starts with the same weights as one that is built whole."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import nn

from rapidformer_templates.models.loading import build_model
from rapidformer_templates.planning.config import RunConfig
from tests.support.jobs import CausalJob, ClassJob, MaskedJob
from tests.support.worker_pool import run_in_workers

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]

ZERO_3 = {"stage": 3, "memory_efficient_linear": False, "override_module_apply": False}
CONFIG = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "zero_optimization": ZERO_3}


class Unruly(nn.Module):
    """Changes its parameters after construction in all the ways that occur in practice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.embedding = nn.Embedding(9, 5, padding_idx=0)
        self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.embedding.weight  # tied
        self.own = nn.Parameter(torch.randn(3, 3))
        self.blocks = nn.ModuleList([nn.Linear(5, 5) for _ in range(2)])
        self.register_buffer("table", torch.arange(4.0))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))
                module.weight.data.mul_(1 / math.sqrt(module.weight.shape[1]))
                if module.bias is not None:
                    module.bias.data = torch.ones_like(module.bias)
        with torch.no_grad():
            self.embedding.weight[0].fill_(3.0)
            row = self.embedding.weight[1]
            self.first.weight.add_(1)
            row.zero_()  # a view that is still alive after another parameter was used
            self.blocks[0].weight.copy_(self.blocks[1].weight)
        self.apply(lambda m: nn.init.normal_(m.bias) if getattr(m, "bias", None) is not None else None)
        assert self.first.weight.shape == (7, 5)
        assert self.first.weight.numel() == 35


def build(kind: str) -> nn.Module:
    jobs = {"causal": CausalJob, "masked": MaskedJob, "classifier": ClassJob}
    if kind == "unruly":
        return Unruly()
    if kind in ("pretrained", "new head"):
        from transformers import AutoModel

        from rapidformer_templates.commands.demo import demo_model_folder

        folder = demo_model_folder()
        if kind == "pretrained":
            return AutoModel.from_pretrained(folder)
        config = RunConfig().replace("command line", pretrained_model_name_or_path=str(folder))
        return build_model(config, "AutoModelForSequenceClassification", num_labels=3)
    return jobs[kind](["--lr", "1e-3"]).make()  # type: ignore[no-any-return]


KINDS = ("unruly", "causal", "masked", "classifier", "pretrained", "new head")


def _named(kind: type) -> type:
    """A decorator like the one of transformers for its experts."""
    init = kind.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def named(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.name = "decorated"

    kind.__init__ = named  # type: ignore[misc]
    return kind


def _imported_meanwhile() -> type[nn.Module]:
    @_named
    class Late(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)

    return Late


def _build_all(workers: Any) -> dict[str, Any]:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    from rapidformer_templates.switches.zero.construction import partitioned_construction
    from rapidformer_templates.switches.zero.engine import _init_communication

    _init_communication(workers, loud=False)
    found: dict[str, Any] = {}
    for kind in KINDS:
        torch.manual_seed(3 + 100 * workers.rank)  # only the random numbers of the first worker count
        with partitioned_construction(CONFIG):
            model = build(kind)
        held = sum(p.ds_tensor.numel() for p in model.parameters())
        whole = sum(p.ds_numel for p in model.parameters())
        uncut = sum(p.numel() for p in model.parameters())
        with GatheredParameters(list(model.parameters())):
            weights = {name: tensor.detach().clone() for name, tensor in model.state_dict(keep_vars=True).items()}
        found[kind] = (weights, held / whole, uncut)
    with partitioned_construction(CONFIG):
        late = _imported_meanwhile()
        partitioned = late()
    after = late()
    found["late"] = [(module.name, module.weight.numel()) for module in (partitioned, after)]
    return found


@pytest.fixture(scope="module")
def built() -> list[dict[str, Any]]:
    return run_in_workers(2, _build_all)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_a_model_that_is_built_whole(kind: str, built: Any) -> None:
    torch.manual_seed(3)
    expected = build(kind).state_dict()
    for weights, share, uncut in (rank[kind] for rank in built):
        assert weights.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(weights[name], weight), name
        assert 0.5 <= share < 0.53  # half, plus a little for odd sizes
        assert uncut == 0  # every parameter is partitioned


def test_a_class_that_is_imported_meanwhile_keeps_its_decorators(built: Any) -> None:
    for rank in built:
        assert rank["late"] == [("decorated", 0), ("decorated", 16)]
