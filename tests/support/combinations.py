"""Combinations of switches that the rules accept, as runs; each beside one process with the same mathematics.

All is made from the registry: a new switch is among them as soon as its file lies in its folder.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer_templates import Data, Finetuner, Pretrainer, Trainer
from rapidformer_templates.models.blocks import find_blocks
from rapidformer_templates.planning.config import RunConfig, parse, spelling
from rapidformer_templates.planning.environment import Environment, find_cxx, installed_packages
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.request import build_request
from rapidformer_templates.planning.resolve import plan_of
from rapidformer_templates.switches.mixture_of_experts.convert import MixtureSizes, make_sparse
from tests.support import jobs, parity

LENGTH, SAMPLES, MICRO = 40, 160, 4
STEPS = "--train-iters 4 --lr 1e-3 --log-interval 1 --clip-grad 0.1 --weight-decay 0.1 --no-export-model --device cpu"
VARIANTS = ("plain", "branches", "targetless")
"""Ordinary samples; batches that reach different parameters; micro batches without a target."""

SUITED: dict[str, Any] = {
    "deepspeed_config": '{"zero_optimization": {"reduce_bucket_size": 300000}}',
    "torch_compile": "aot_eager",
}
"""What a test gives where the registry's own example names a file, or takes a compiler minutes."""

KNOWN_WRONG = ({"mixture-of-experts", "lora", "nvme-offload"}, {"mixed-precision", "lora", "nvme-offload"})
"""Accepted triples that do not follow one process yet: adapters that ZeRO-3 keeps on a disk. Remove them when they do.

With experts, DeepSpeed runs out of buffers.
With bf16, the first masters are rounded: losses differ by 1.1e-2, where 7.8e-3 is allowed.
"""

FOUR = {"hybrid-sharding"}
"""On fewer than four workers there is one group of two workers alone."""

IN_PLACE = {"num_experts": 4, "global_batch_size": 16}
"""Smaller than the registry's own examples."""

WITH = {"dynamic-shape": {"max_shapes": 2}}
"""Further values by switch: a compiler takes seconds for each shape."""


class Size(NamedTuple):
    """The size of a GPT-2.

    Attributes:
        width: of its hidden states. DeepSpeed swaps only large partitions to a disk.
        blocks: number of layers.
    """

    width: int
    blocks: int


SMALL = Size(width=16, blocks=2)


@dataclass(frozen=True)
class Combination:
    """A run that the rules accept.

    Attributes:
        names: the switches.
        template: of the library.
        flags: of the run.
        plan: what the rules make of it.
    """

    names: tuple[str, ...]
    template: str
    flags: tuple[str, ...]
    plan: Plan

    @property
    def world(self) -> int:
        """Workers."""
        return self.plan.sizes.world

    @property
    def size(self) -> Size:
        """The model for the run and for its reference. Each stage of a pipeline has two blocks."""
        return Size(
            width=256 if "nvme-offload" in self.names else SMALL.width,
            blocks=4 if "pipeline-parallel" in self.names else SMALL.blocks,
        )

    def __str__(self) -> str:
        return " + ".join(self.names) or "none"

    def without(self, name: str) -> tuple[str, ...]:
        """The flags with what belongs to one switch left out."""
        own = REGISTRY[name].fields or tuple(REGISTRY[name].on)
        given = {f: value for other in self.names for f, value in _values(other).items() if f not in own}
        return (*_spelled(given), "--micro-batch-size", str(MICRO))

    @property
    def reference(self) -> tuple[str, ...]:
        """The flags of one process with the same mathematics."""
        given = {field: value for name in self.names for field, value in _values(name).items()}
        changing = {f for name in self.plan.switches if REGISTRY[name].changes_result for f in REGISTRY[name].fields}
        flags = _spelled({field: value for field, value in given.items() if field in changing})
        sizes = self.plan.sizes
        # A step of dynamic shapes is a number of micro batches; any other is a number of samples.
        micro = sizes.micro_batch if "dynamic-shape" in self.names else sizes.global_batch
        return (*flags, "--micro-batch-size", str(micro), "--global-batch-size", str(sizes.global_batch))


def _values(name: str) -> dict[str, Any]:
    on = {**REGISTRY[name].on, **WITH.get(name, {})}
    return {field: SUITED.get(field, IN_PLACE.get(field, value)) for field, value in on.items()}


def _spelled(values: dict[str, Any]) -> list[str]:
    words = []
    for field, value in values.items():
        flag = spelling(field)
        words += [flag] if value is True else [flag.replace("--", "--no-", 1)] if value is False else [flag, str(value)]
    return words


@cache
def place(world: int, template: str, device: str = "cpu") -> Environment:
    """This machine with that many workers, each on a device of that kind."""
    return Environment(
        template=template,
        template_origin="a test",
        world_size=world,
        local_world_size=world,
        device=device,
        compute_capability=torch.cuda.get_device_capability() if device == "cuda" else None,
        accelerator=None if device == "cpu" else device,
        packages=installed_packages(),
        cxx=find_cxx(),
    )


def smallest(names: Sequence[str]) -> Combination | None:
    """The run of these switches with the fewest workers that they need."""
    return accepted(names, most=2) or accepted(names, most=4)


def accepted(names: Sequence[str], most: int = 4) -> Combination | None:
    """The run of these switches, in the first template that takes them; None if the rules refuse it.

    Args:
        most: workers of a 3D layout: 4 have two replicas of a divided model, or its two dimensions.
    """
    divided = {"tensor-parallel", "pipeline-parallel"} & set(names)
    return _accepted(names, world=4 if FOUR & set(names) else most if divided else 2)


def accepted_on_one(names: Sequence[str], device: str) -> Combination | None:
    """The run of these switches in one process on a device of that kind; None if the rules refuse it."""
    return _accepted(names, world=1, device=device)


def _accepted(names: Sequence[str], world: int, device: str = "cpu") -> Combination | None:
    if "auto-strategy" in names or any(set(names) >= wrong for wrong in KNOWN_WRONG):
        return None  # auto-strategy chooses other switches, and they have runs already
    values = {field: value for name in names for field, value in _values(name).items()}
    micro = ("--micro-batch-size", str(MICRO))
    on_device = () if device == "cpu" else ("--device", device)
    flags = (*_spelled(values), *(() if "micro_batch_size" in values else micro), *on_device)
    config = REGISTRY.complete(parsed((*STEPS.split(), *flags, "--save", "run")))
    for template in ("Trainer", "Pretrainer", "Finetuner"):
        if any(template not in REGISTRY[name].templates for name in names):
            continue
        at = place(world, template, device)
        request = build_request(config, at, REGISTRY.switches, training=True)
        if REGISTRY.refusals(request):
            continue
        plan = plan_of(request, REGISTRY)
        if set(names) <= set(plan.switches):
            return Combination(tuple(names), template, flags, plan)
    return None


def parsed(flags: tuple[str, ...]) -> RunConfig:
    """The configuration of these flags."""
    return parse(list(flags), REGISTRY.options())


def all_accepted(size: int, most: int = 4) -> Iterator[Combination]:
    """All combinations of that many switches that the rules accept."""
    names = [switch.name for switch in REGISTRY.switches]
    for chosen in itertools.combinations(names, size):
        if found := accepted(chosen, most):
            yield found


# The runs.


def _samples(variant: str) -> list[dict[str, Any]]:
    """Sequences of very unequal lengths; of a sample, some tokens are targets, or none."""
    draw = np.random.default_rng(11)
    samples = []
    for i in range(SAMPLES):
        length = int(draw.integers(3, LENGTH + 1))
        ids = draw.integers(3, jobs.VOCABULARY, length)
        labels = np.where(draw.random(length) < 0.4, ids, -100)
        if variant == "targetless" and i % 4:
            labels[:] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def _pad(samples: list[dict[str, Any]], shape: tuple[int, int] | None = None) -> dict[str, torch.Tensor]:
    return jobs._pad(samples, shape or (len(samples), LENGTH), classes=False)


class Branches(GPT2LMHeadModel):
    """A sample's first token decides which of several embeddings is added; a batch reaches those of its samples."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.branches = torch.nn.ModuleList(torch.nn.Embedding(4, config.n_embd) for _ in range(8))

    def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
        hidden = self.transformer.wte(input_ids)
        for key, branch in enumerate(self.branches):
            rows = input_ids[:, 0] % len(self.branches) == key
            if rows.any():
                hidden = hidden + branch(input_ids % 4) * rows[:, None, None]
        return super().forward(inputs_embeds=hidden, **others)


class _Job:
    variant = "plain"
    size = SMALL

    def build_data(self) -> Data:
        samples = _samples(self.variant)
        return Data(train=samples, collate=_pad, lengths=[len(sample["input_ids"]) for sample in samples])

    def build_model(self) -> torch.nn.Module:
        heads = 4  # to divide by 2 × 2
        sizes = {"n_positions": 64, "n_embd": self.size.width, "n_layer": self.size.blocks, "n_head": heads}
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(vocab_size=jobs.VOCABULARY, **sizes, **dropouts)
        model = (Branches if self.variant == "branches" else GPT2LMHeadModel)(config)
        flags: Any = self.config  # type: ignore[attr-defined]
        if flags.get("lora_rank") and flags.get("num_experts"):  # adapters stand beside experts that are there already
            make_sparse(model, find_blocks(model), MixtureSizes(flags.get("num_experts"), 2))
        return model

    def on_step_end(self, step: int, result: Any) -> None:
        self.curve = [*getattr(self, "curve", []), (float(result.loss), float(result.grad_norm))]


TEMPLATES: dict[str, type[Trainer]] = {c.__name__: c for c in (Trainer, Pretrainer, Finetuner)}


def template(name: str, flags: Sequence[str], variant: str = "plain", size: Size = SMALL) -> Trainer:
    """A run of a model of that size."""
    kind = type("Combined", (_Job, TEMPLATES[name]), {"variant": variant, "size": size})
    return kind([*STEPS.split(), *flags, "--no-save"])


def train(workers: Any, name: str, flags: Sequence[str], variant: str = "plain", size: Size = SMALL) -> dict[str, Any]:
    """Train a model of that size and return what :class:`parity.Trained` has, with the other numbers of the metrics."""
    found = parity.trained(template(name, flags, variant, size))
    lines = [line for line in found["lines"] if "loss" in line]
    others = {key for line in lines for key in line if key.endswith("_loss") or key.startswith("expert_")}
    return {**found, "others": {key: [line[key] for line in lines] for key in sorted(others)}}


@dataclass(frozen=True)
class Distance:
    """How far a run is from its reference: greatest relative differences."""

    curve: float
    others: float
    weights: float

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:.1e}" for name, value in dataclasses.asdict(self).items())

    @property
    def worst(self) -> float:
        return max(self.curve, self.others, self.weights)


def distance(found: dict[str, Any], wanted: dict[str, Any]) -> Distance:
    """Losses and norms one by one; the weights by their norm, because Adam makes steps out of rounding."""
    assert found["weights"].keys() == wanted["weights"].keys()
    assert found["others"].keys() == wanted["others"].keys()
    pairs = [(found["others"][name], values) for name, values in wanted["others"].items()]
    return Distance(
        _apart(found["curve"], wanted["curve"]),
        max((_apart(*pair) for pair in pairs), default=0.0),
        parity.weights_apart(found["weights"], wanted["weights"]),
    )


def _apart(found: Any, wanted: Any) -> float:
    a, b = torch.tensor(found, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)
    assert a.shape == b.shape, f"{len(found)} steps, {len(wanted)} in the reference"
    return float(((a - b).abs() / b.abs().clamp(min=1e-3)).max())
