"""Optimizers that keep values in their groups resume with these values, under every engine and across engines.

NVIDIA Apex runs only on a GPU. :class:`FusedAdam` makes its documented update and stores its count where Apex does.
"""

import json
import shutil
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from rapidformer_templates.engines.optimizer_state import HostOptimizer
from rapidformer_templates.engines.recipe import OptimizerSpec, undecayed
from rapidformer_templates.errors import CheckpointError
from tests.support.jobs import CausalJob
from tests.support.lines import Died
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

STEPS, SAVED = 4, 2
FLAGS = f"--train-iters {STEPS} --global-batch-size 8 --lr 1e-2 --log-interval 1 --no-export-model --weight-decay 0.1"


class FusedAdam(torch.optim.Optimizer):
    """AdamW with one step count per group, which exists from the first step on."""

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), count = group["betas"], group["step"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state |= {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
                state["exp_avg"].mul_(beta1).add_(parameter.grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).add_(parameter.grad * parameter.grad, alpha=1 - beta2)
                root = (state["exp_avg_sq"] / (1 - beta2**count)).sqrt().add_(group["eps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(state["exp_avg"] / (1 - beta1**count) / root * group["lr"])


class Estimating(torch.optim.Optimizer):
    """Adapts its rate like Prodigy and schedule-free, with numbers, flags, lists, tensors and a count in its groups."""

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float = 0.0) -> None:
        own = {"d": 1e-2, "k": 0, "warm": False, "betas": (0.9, 0.99), "weight_sum": torch.zeros(1)}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **own})
        for group in self.param_groups:
            group["weight_sum"] = torch.zeros(1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["step"] = group.get("step", 0) + 1
            group["d"] *= 1.1 if group["warm"] else 1.3
            group["warm"] = group["k"] >= 2
            group["betas"] = (group["betas"][0] * 0.95, 0.99)
            group["weight_sum"] += group["d"] ** 2
            pace = group["lr"] * group["d"] / float(group["weight_sum"]) ** 0.5 / (1 - 0.9 ** group["step"])
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].mul_(group["betas"][0]).add_(parameter.grad)
                parameter.sub_(state["momentum"] * pace)


RULES: dict[str, Any] = {"fused": FusedAdam, "torch": torch.optim.AdamW, "estimating": Estimating}


class _Job(CausalJob):
    rule: ClassVar[str]

    def build_optimizer(self) -> OptimizerSpec:
        return OptimizerSpec(RULES[self.rule], {"lr": 1e-2, "weight_decay": 0.1}, undecayed)


def _run(folder: str | None, rule: str, flags: str = "", dies_after: int | None = None) -> list[tuple[float, float]]:
    """Return the curve of a run, which can die after a step.

    Without a folder the run saves nothing.
    """
    kind = type("Job", (_Job,), {"rule": rule})
    files = f"--save {folder} --save-interval {SAVED} --keep-checkpoints 3".split() if folder else []
    job = kind([*FLAGS.split(), *files, *flags.split()])
    job.dies_after = dies_after
    with pytest.raises(Died) if dies_after else nullcontext():
        job.fit()
    curve: list[tuple[float, float]] = job.curve
    return curve


ALONE = "--micro-batch-size 8"


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["fused", "estimating"])
def test_a_resumed_run_is_the_uninterrupted_one(rule: str, tmp_path: Any) -> None:
    through = _run(None, rule, ALONE)
    _run(f"{tmp_path}/run", rule, ALONE, SAVED + 1)
    assert _run(f"{tmp_path}/run", rule, f"{ALONE} --resume") == through[SAVED:]


@pytest.fixture(scope="module")
def torchs() -> torch.Tensor:
    """The curve with torch's AdamW."""
    return torch.tensor(_run(None, "torch", ALONE))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), by_default([("fused", "torch")], [("fused", "torch"), ("torch", "fused")])
)
def test_one_adam_goes_on_for_another(before: str, after: str, torchs: torch.Tensor, tmp_path: Any) -> None:
    """Switch there and back: the count moves with the run, and neither rule's place for it becomes a second one."""
    _run(f"{tmp_path}/run", before, ALONE, SAVED + 1)
    halves = _run(f"{tmp_path}/run", after, f"{ALONE} --resume --save-interval 1", SAVED + 1)
    rest = _run(f"{tmp_path}/run", before, f"{ALONE} --resume")
    # The run that died in its first step had not saved that step.
    torch.testing.assert_close(torch.tensor(rest), torchs[STEPS - len(rest) :], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.tensor(halves), torchs[SAVED : SAVED + 1], rtol=1e-5, atol=1e-6)


def test_a_checkpoint_without_a_count_is_no_stack_trace(tmp_path: Any) -> None:
    """Earlier versions wrote such checkpoints."""
    _run(f"{tmp_path}/run", "fused", f"{ALONE} --train-iters {SAVED}")
    with (
        mock.patch("rapidformer_templates.run.checkpoint.format.Reader.names", _without_counts),
        pytest.raises(CheckpointError, match="no count of steps"),
    ):
        _run(f"{tmp_path}/run", "torch", f"{ALONE} --resume")


def _without_counts(reader: Any, kind: str) -> dict[str, tuple[int, ...]]:
    names = {name: tuple(entry["shape"]) for name, entry in reader.index[kind].items()}
    return {name: shape for name, shape in names.items() if not name.endswith("/step")}


def test_in_host_memory_the_values_move_as_on_the_device() -> None:
    on_device = [("weight", torch.nn.Parameter(torch.ones(3, 2)))]
    plain = Estimating([torch.nn.Parameter(torch.ones(3, 2))], lr=0.1)
    host = HostOptimizer(OptimizerSpec(Estimating, {"lr": 0.1}), on_device, {"weight": {}})
    for _ in range(4):
        for optimizer in (plain, host):
            optimizer.param_groups[0]["params"][0].grad = torch.full((3, 2), 0.5)
            optimizer.step()
    for key in ("k", "d", "step", "warm", "betas", "weight_sum"):
        assert host.param_groups[0][key] == plain.param_groups[0][key], key
    assert torch.equal(on_device[0][1], plain.param_groups[0]["params"][0])


# A parameter group is updated in several parts.
IN_PARTS = {"zero_optimization": {"stage": 3, "sub_group_size": 2000, "stage3_param_persistence_threshold": 40}}
ENGINES = {
    "plain": "",
    "fsdp": "--fsdp-memory-optimization",
    "oss": "--oss-memory-optimization",
    "sdp": "--oss-sdp-memory-optimization",
    "zero-2": "--zero-2-memory-optimization",
    "zero-3": f"--deepspeed-config {json.dumps(IN_PARTS, separators=(',', ':'))}",
    "parallel": "--use-distributed-optimizer",
}
NAMES = list(ENGINES)


PAIRS = list(zip(NAMES, [*NAMES[1:], NAMES[0]], strict=True))
"""(name, source): an engine, and the one whose checkpoint it loads."""
LOADED = {f"{name} from {source}": (name, source) for name, source in PAIRS}


def _train_all(workers: Any, root: str, resumed: list[str], pairs: list[tuple[str, str]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name in [n for n in NAMES if n == "plain" or n in resumed or n in dict(pairs).values()]:
        found[name] = _run(f"{root}/{name}", "estimating", f"--micro-batch-size 2 {ENGINES[name]}")
        if workers.is_main:  # as if the run had died after its first checkpoint
            shutil.rmtree(f"{root}/{name}/checkpoints/step-{STEPS}")
        workers.barrier()
    for name, source in pairs:
        flags = f"--micro-batch-size 2 {ENGINES[name]}"
        load = f"--load {root}/{source}/checkpoints/step-{SAVED}"
        found[name, source] = _run(f"{root}/{name}-{source}", "estimating", f"{flags} {load}")
    for name in resumed:
        flags = f"--micro-batch-size 2 {ENGINES[name]} --resume"
        found[name, name] = _run(f"{root}/{name}", "estimating", flags)
    return found


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
    pytest.importorskip("fairscale", reason="needs fairscale: pip install 'rapidformer_templates[fairscale]'")
    folder, pairs = str(tmp_path_factory.mktemp("runs")), [LOADED[case] for case in selected(request, "loaded")]
    found: dict[Any, Any] = run_in_workers(2, _train_all, folder, selected(request, "name"), pairs)[0]
    return found


@pytest.mark.deepspeed
@pytest.mark.distributed
@pytest.mark.parametrize("name", by_default(["fsdp"], NAMES))
def test_every_engine_goes_on_with_what_its_groups_had(name: str, runs: Any) -> None:
    torch.testing.assert_close(torch.tensor(runs[name]), torch.tensor(runs["plain"]), rtol=1e-5, atol=1e-6)
    assert runs[name, name] == runs[name][SAVED:]


@pytest.mark.deepspeed
@pytest.mark.distributed
@pytest.mark.parametrize("loaded", by_default(["plain from fsdp"], LOADED))
def test_another_engine_goes_on_with_them(loaded: str, runs: Any) -> None:
    whole = torch.tensor(runs["plain"])[SAVED:]
    torch.testing.assert_close(torch.tensor(runs[LOADED[loaded]]), whole, rtol=1e-5, atol=1e-6)
