"""Runs of the switch combinations that the rules accept, each compared with one process that computes the same.

Everything is derived from the registry. A new switch is included as soon as its file is in its folder.
"""

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
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.environment import Environment, find_cxx, installed_packages
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.request import build_request
from rapidformer_templates.planning.resolve import plan_of
from rapidformer_templates.switches.mixture_of_experts.transform import MixtureSizes, make_sparse
from tests.support import jobs, parity

LENGTH, SAMPLES, MICRO = 40, 160, 4
STEPS = "--train-iters 4 --lr 1e-3 --log-interval 1 --clip-grad 0.1 --weight-decay 0.1 --no-export-model --device cpu"
VARIANTS = ("plain", "branches", "targetless")
"""The data: ordinary samples, batches that reach different parameters, and micro batches without a target."""

SUITED: dict[str, Any] = {
    "deepspeed_config": '{"zero_optimization": {"reduce_bucket_size": 300000}}',
    "torch_compile": "aot_eager",
}
"""Values that replace the registry's examples, which name a file or need minutes of compilation."""

KNOWN_WRONG = ({"mixed-precision", "lora", "nvme-offload"},)
"""Accepted triples that do not match one process yet. Remove a triple once it matches.

ZeRO-3 builds a model that it offloads to a disk in bf16. There, the few first values of adapters that round to the
upper bound of their range become the lower bound. So the adapters start from another draw, and Adam's first steps
differ.
"""

FP8 = "fp8-products"
"""The switch whose package, torchao, is not among the tests' own. ``make test-optional`` runs what has it."""

FOUR = {"hybrid-sharding"}
"""Switches that are tested on four workers. Fewer workers form only one group of two."""

IN_PLACE = {"num_experts": 4, "global_batch_size": 16}
"""Values that are smaller than the registry's examples."""

WITH = {"dynamic-shape": {"max_shapes": 2}}
"""Additional values by switch. A compiler takes seconds for each shape."""


class Size(NamedTuple):
    """The size of a GPT-2.

    Attributes:
        width: size of the hidden states. DeepSpeed swaps only large partitions to a disk, and each of two parts of a
            matrix has multiples of 16 rows for fp8.
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
        template: name of the template class.
        flags: flags of the run.
        plan: the plan that the rules derive from the flags.
    """

    names: tuple[str, ...]
    template: str
    flags: tuple[str, ...]
    plan: Plan

    @property
    def world(self) -> int:
        """Number of workers."""
        return self.plan.sizes.world

    @property
    def size(self) -> Size:
        """Size of the model in the run and in its reference. Every pipeline stage has two blocks."""
        return Size(
            width=256 if "nvme-offload" in self.names else 32 if FP8 in self.names else SMALL.width,
            blocks=4 if "pipeline-parallel" in self.names else SMALL.blocks,
        )

    def __str__(self) -> str:
        return " + ".join(self.names) or "none"

    def without(self, name: str) -> tuple[str, ...]:
        """Return the flags of this run without those of one switch."""
        own = REGISTRY[name].fields or tuple(REGISTRY[name].on)
        given = {f: value for other in self.names for f, value in _values(other).items() if f not in own}
        return (*_spelled(given), "--micro-batch-size", str(MICRO))

    @property
    def reference(self) -> tuple[str, ...]:
        """Flags of one process that computes the same."""
        given = {field: value for name in self.names for field, value in _values(name).items()}
        changing = {f for name in self.plan.switches if REGISTRY[name].changes_result for f in REGISTRY[name].fields}
        flags = _spelled({field: value for field, value in given.items() if field in changing})
        sizes = self.plan.sizes
        # With dynamic shapes a step is a number of micro batches. Otherwise it is a number of samples. The scales of
        # fp8 are those of a micro batch.
        micro = sizes.micro_batch if {"dynamic-shape", FP8} & set(self.names) else sizes.global_batch
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
    """Return this machine with ``world`` workers, each on a device of the kind ``device``."""
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
    """Return the run of these switches with as few workers as they need, or None if the rules refuse it."""
    return accepted(names, most=2) or accepted(names, most=4)


def accepted(names: Sequence[str], most: int = 4) -> Combination | None:
    """Return the run of these switches in the first template that accepts them, or None if the rules refuse it.

    Args:
        most: number of workers if the model is divided. Four workers hold two replicas of it, or divide it in both
            dimensions.
    """
    divided = {"tensor-parallel", "pipeline-parallel"} & set(names)
    shards = "sharding-strategy" in names and divided  # two workers with the same part
    return _accepted(names, world=4 if shards or FOUR & set(names) else most if divided else 2)


def accepted_on(device: str, names: Sequence[str], world: int = 1) -> Combination | None:
    """Return the run of these switches on devices of that kind, or None if the rules refuse it."""
    return _accepted(names, world, device)


def _accepted(names: Sequence[str], world: int, device: str = "cpu") -> Combination | None:
    if "auto-strategy" in names or any(set(names) >= wrong for wrong in KNOWN_WRONG):
        return None  # auto-strategy chooses other switches, which have runs already
    values = {field: value for name in names for field, value in _values(name).items()}
    micro = ("--micro-batch-size", str(MICRO))
    on_device = () if device == "cpu" else ("--device", device)
    flags = (*_spelled(values), *(() if "micro_batch_size" in values else micro), *on_device)
    config = REGISTRY.complete(parsed((*STEPS.split(), *flags, "--save", "run")))
    for template in ("Trainer", "Pretrainer", "Finetuner"):
        if any(template not in REGISTRY[name].templates for name in names):
            continue
        at = place(world, template, device)
        if FP8 in names:
            at = dataclasses.replace(at, packages={"torchao": "0.18", **at.packages})
        request = build_request(config, at, REGISTRY.switches, training=True)
        if REGISTRY.refusals(request):
            continue
        plan = plan_of(request, REGISTRY)
        if set(names) <= set(plan.switches):
            return Combination(tuple(names), template, flags, plan)
    return None


def parsed(flags: tuple[str, ...]) -> RunConfig:
    """Parse flags into a configuration."""
    return parse(list(flags), REGISTRY.options())


def all_accepted(size: int, most: int = 4) -> Iterator[Combination]:
    """Yield every combination of ``size`` switches that the rules accept."""
    names = [switch.name for switch in REGISTRY.switches]
    for chosen in itertools.combinations(names, size):
        if found := accepted(chosen, most):
            yield found


# Runs.


def _samples(variant: str) -> list[dict[str, Any]]:
    """Return sequences of very different lengths. Each has some target tokens or none."""
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
    """A GPT-2 that adds one of several embeddings, chosen by a sample's first token.

    A batch reaches only the embeddings of its samples.
    """

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
        heads = 4  # divisible by 2 × 2
        sizes = {"n_positions": 64, "n_embd": self.size.width, "n_layer": self.size.blocks, "n_head": heads}
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(vocab_size=jobs.VOCABULARY, **sizes, **dropouts)
        model = (Branches if self.variant == "branches" else GPT2LMHeadModel)(config)
        flags: Any = self.config  # type: ignore[attr-defined]
        if flags.get("lora_rank") and flags.get("num_experts"):  # LoRA is added to a model that already has experts
            make_sparse(model, find_blocks(model), MixtureSizes(flags.get("num_experts"), 2))
        return model

    def on_step_end(self, step: int, result: Any) -> None:
        self.curve = [*getattr(self, "curve", []), (float(result.loss), float(result.grad_norm))]


TEMPLATES: dict[str, type[Trainer]] = {c.__name__: c for c in (Trainer, Pretrainer, Finetuner)}


def template(name: str, flags: Sequence[str], variant: str = "plain", size: Size = SMALL) -> Trainer:
    """Return the template of a run whose model has that size."""
    kind = type("Combined", (_Job, TEMPLATES[name]), {"variant": variant, "size": size})
    return kind([*STEPS.split(), *flags, "--no-save"])


def train(workers: Any, name: str, flags: Sequence[str], variant: str = "plain", size: Size = SMALL) -> dict[str, Any]:
    """Train a model of that size. Return :class:`parity.Trained` with other losses and expert metrics in ``others``."""
    found = parity.trained(template(name, flags, variant, size))
    lines = [line for line in found["lines"] if "loss" in line]
    others = {key for line in lines for key in line if key.endswith("_loss") or key.startswith("expert_")}
    return {**found, "others": {key: [line[key] for line in lines] for key in sorted(others)}}


@dataclass(frozen=True)
class Distance:
    """The greatest relative differences between a run and its reference."""

    curve: float
    others: float
    weights: float

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:.1e}" for name, value in dataclasses.asdict(self).items())

    @property
    def worst(self) -> float:
        return max(self.curve, self.others, self.weights)


def distance(found: dict[str, Any], wanted: dict[str, Any]) -> Distance:
    """Compare losses and norms one by one, and weights by their norm, because Adam turns rounding errors into steps."""
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
