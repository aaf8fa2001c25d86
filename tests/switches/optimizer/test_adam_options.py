"""Adam's decays and epsilon: the flags reach the update of every optimizer that has these options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rapidformer_templates.engines.recipe import OptimizerSpec
from rapidformer_templates.planning.deepspeed_file.settings import merge_file
from rapidformer_templates.planning.environment import installed_packages
from rapidformer_templates.planning.optimizers import OPTIMIZERS
from rapidformer_templates.planning.resolve import resolve
from tests.support.jobs import CausalJob
from tests.support.parity import Trained, assert_close, assert_follows, observed, reference, train, trained
from tests.support.requests import CPU, config_of, on
from tests.support.selection import by_default

STEPS = "--train-iters 4 --global-batch-size 8 --log-interval 1 --no-export-model --lr 1e-2"
BETAS, EPSILON = (0.6, 0.95), 1e-3
DECAYS = f"--adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]}"
ADAM = f"{DECAYS} --adam-epsilon {EPSILON}"
HERE = [
    name
    for name, facts in OPTIMIZERS.items()
    if facts.betas and not facts.needs_cuda and facts.needs_package in (None, *installed_packages())
]
PARTITIONING = {"ddp": "", "fsdp": "--fsdp-memory-optimization", "distributed": "--use-distributed-optimizer"}
if "deepspeed" in installed_packages():
    PARTITIONING |= {"zero-2": "--zero-2-memory-optimization", "zero-3": "--zero-3-memory-optimization"}


class ByHook(CausalJob):
    """The reference: torch's class with its own arguments."""

    def build_optimizer(self) -> OptimizerSpec:
        return OptimizerSpec(torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.01, "betas": BETAS, "eps": EPSILON})


@pytest.fixture(scope="module")
def by_hook() -> Trained:
    return trained(ByHook(f"{STEPS} --micro-batch-size 8".split()))


@pytest.mark.slow
def test_a_run_with_the_flags_is_torchs_with_its_options(by_hook: Trained) -> None:
    flags = f"{STEPS} --micro-batch-size 8 --optimizer adamw_torch"
    found = train("causal", False, f"{flags} {ADAM}", lr=None)
    assert_follows(found, by_hook, 0, 0)
    plain = reference("causal", False, flags, lr=None)
    assert abs(plain["curve"][-1][0] - by_hook["curve"][-1][0]) > 0.01  # nats


@pytest.mark.parametrize("name", by_default(["muon", "adamw_torch_4bit", "lion"], HERE))
def test_every_optimizer_that_has_them_takes_them(name: str) -> None:
    has_epsilon = OPTIMIZERS[name].epsilon is not None
    job = CausalJob(f"{STEPS} --micro-batch-size 8 --optimizer {name} {ADAM if has_epsilon else DECAYS}".split())
    seen: list[dict[str, Any]] = []

    def look() -> None:
        recipe, named = job.build_optimizer(), list(job.model.named_parameters())
        seen.extend(recipe.build(named, recipe.differences(named)).param_groups)

    job.on_train_start = look  # type: ignore[method-assign]
    job.fit()
    losses = [loss for loss, _ in job.curve]
    adam = [group for group in seen if group.get("rule") != "muon"]
    assert adam
    assert all(tuple(group["betas"]) == BETAS for group in adam)
    assert not has_epsilon or all(group["eps"] == EPSILON for group in adam)
    assert all(group["eps"] != EPSILON for group in seen if group.get("rule") == "muon")
    plain = reference("causal", False, f"{STEPS} --micro-batch-size 8 --optimizer {name}", lr=None)["curve"]
    assert losses[0] == plain[0][0]
    assert losses[-1] != plain[-1][0]


def test_one_beta_leaves_the_other_as_it_was() -> None:
    plan = resolve(config_of("--adam-beta2 0.95"), on(CPU, packages={}))
    assert plan.optimizer_options == {"betas": (0.9, 0.95)}
    assert resolve(config_of(""), CPU).optimizer_options == {}


@pytest.mark.distributed
@pytest.mark.parametrize("name", by_default(["distributed", "zero-2"], PARTITIONING))
def test_two_workers_follow_torchs_adam_of_one(name: str, by_hook: Trained) -> None:
    flags = f"{STEPS} --micro-batch-size 4 {PARTITIONING[name]} {ADAM}"
    for found in observed(2, "causal", False, flags, lr=None):
        assert_close(found["curve"], by_hook["curve"])


@pytest.mark.slow
def test_a_resumed_run_takes_new_ones_and_keeps_the_moments(tmp_path: Path) -> None:
    """Compare with torch's class, whose groups change between two steps."""
    flags = f"{STEPS} --micro-batch-size 8 --optimizer adamw_torch"
    first = CausalJob([*flags.split(), "--save-interval", "2", "--save", str(tmp_path / "first")])
    first.fit()
    resumed = CausalJob(f"{flags} {ADAM} --load {tmp_path}/first/checkpoints/step-2".split())
    resumed.fit()

    class Midway(CausalJob):
        """The groups of torch's optimizer get the new values before the third step."""

        def on_step_end(self, step: int, result: Any) -> None:
            super().on_step_end(step, result)
            if step == 2:
                for group in self.optimizer.param_groups:
                    group.update(betas=BETAS, eps=EPSILON)

        def build_optimizer(self) -> OptimizerSpec:
            def make(*arguments: Any, **options: Any) -> torch.optim.Optimizer:
                self.optimizer = torch.optim.AdamW(*arguments, **options)
                return self.optimizer

            return OptimizerSpec(make, {"lr": 1e-2, "weight_decay": 0.01})

    midway = Midway(f"{STEPS} --micro-batch-size 8".split())
    midway.fit()
    assert resumed.curve == midway.curve[2:]
    assert resumed.curve != first.curve[2:]


def test_auto_of_a_deepspeed_file_is_filled_from_the_flags(tmp_path: Path) -> None:
    def options(params: Mapping[str, Any], flags: str = "") -> Mapping[str, Any]:
        content = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": params}}
        (tmp_path / "ds.json").write_text(json.dumps(content))
        asked = config_of(f"--deepspeed-config {tmp_path / 'ds.json'} {flags}")
        return resolve(merge_file(asked), on(CPU, packages={"deepspeed": "any"})).optimizer_options

    auto = {"betas": "auto", "eps": "auto"}
    assert options(auto) == {}
    assert options(auto, ADAM) == options({}, ADAM) == {"betas": BETAS, "eps": EPSILON}
    assert options({"betas": list(BETAS), "eps": EPSILON}) == {"betas": BETAS, "eps": EPSILON}
    assert options({"betas": list(BETAS), "eps": "auto"}, ADAM) == {"betas": BETAS, "eps": EPSILON}
