"""A step begins without the gradients of other backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import get_total_norm

from rapidformer_templates import RapidformerError, compose
from tests.support.selection import by_default, selected
from tests.support.whole_batches import ENGINES, WORDS, TransformerJob, WholeBatchJob, assert_follows, under_engines
from tests.support.worker_pool import run_in_workers

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
pytest.importorskip("fairscale", reason="needs fairscale: pip install 'rapidformer_templates[fairscale]'")
pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]

WORDS_OF_HOOKS = torch.arange(3, 9)[None]


class HookJob(TransformerJob):
    """A callback runs another backward, for example to measure something."""

    def on_step_end(self, step: int, result: Any) -> None:
        super().on_step_end(step, result)
        self.model(input_ids=WORDS_OF_HOOKS).logits.square().mean().backward()


class BuiltJob(WholeBatchJob):
    """A backward in ``build_model``, as an initialization may need it."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model(WORDS_OF_HOOKS % WORDS, None).square().mean().backward()
        return model


JOBS: dict[str, type[WholeBatchJob]] = {"hook": HookJob, "built": BuiltJob}
DATA_PARALLEL = [engine for engine in ENGINES if engine not in ("tensor", "pipeline", "context")]
CASES = [f"hook-{engine}" for engine in (*DATA_PARALLEL, "tensor", "context")]
CASES += [f"built-{engine}" for engine in DATA_PARALLEL]
SHORT = ("hook-fsdp", "hook-zero-3", "hook-distributed-optimizer", "built-ddp", "built-zero-2")


def _job_and_engine(case: str) -> tuple[type[WholeBatchJob], str]:
    job, _, engine = case.partition("-")
    return JOBS[job], engine


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    cases = selected(request, "case")
    found = run_in_workers(2, under_engines, [_job_and_engine(case) for case in cases])
    return [dict(zip(cases, of_rank, strict=True)) for of_rank in found]


@pytest.mark.parametrize("case", by_default(SHORT, CASES))
def test_gradients_of_other_backwards_do_not_count(case: str, runs: Any) -> None:
    for run in runs:
        assert_follows(run[case], *_job_and_engine(case))


def _net(inputs: int, outputs: int, seed: int, *, double: bool) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))
    return net.double() if double else net


def _batch(step: int, *, double: bool) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    batch = {"real": torch.randn(8, 3, generator=draw) + 1, "noise": torch.randn(8, 2, generator=draw)}
    return {name: value.double() if double else value for name, value in batch.items()}


def _judge(discriminator: Any, real: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    scores = discriminator(torch.cat([real, made]))
    return (F.softplus(-scores[: len(real)]) + F.softplus(scores[len(real) :])).mean()


def _deceive(discriminator: Any, made: torch.Tensor) -> torch.Tensor:
    return F.softplus(-discriminator(made)).mean()


RATE = 1e-2


def _plain_gan(*, double: bool) -> list[float]:
    generator, discriminator = _net(2, 3, 0, double=double), _net(3, 1, 1, double=double)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=0) for net in (discriminator, generator)]
    values = []
    for step in range(4):
        batch = _batch(step, double=double)
        for net, optimizer in zip((discriminator, generator), optimizers, strict=True):
            optimizer.zero_grad()
            made = generator(batch["noise"])
            judges = net is discriminator
            loss = _judge(net, batch["real"], made.detach()) if judges else _deceive(discriminator, made)
            loss.backward()
            values += [float(loss.detach()), float(get_total_norm([p.grad for p in net.parameters()]))]
            optimizer.step()
    return values


def _gan(workers: Any, engine: str) -> list[float]:
    """Train a GAN with two sessions. The loss of the generator leaves gradients in the discriminator."""
    double = not engine.startswith("zero")
    flags: Any = {"argv": ENGINES[engine].split(), "lr": RATE, "weight_decay": 0.0, "clip_grad": 0.0, "device": "cpu",
                  "micro_batch_size": 2, "global_batch_size": 8}  # fmt: skip

    def judge(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return _judge(model, batch["real"], generator.model(batch["noise"]).detach())

    def deceive(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return _deceive(discriminator.model, model(batch["noise"]))

    values = []
    with (
        compose(lambda: _net(2, 3, 0, double=double), torch.optim.AdamW, deceive, **flags) as generator,
        compose(lambda: _net(3, 1, 1, double=double), torch.optim.AdamW, judge, **flags) as discriminator,
    ):
        for step in range(4):
            batch = _batch(step, double=double)
            own = {name: value.chunk(2)[workers.rank].chunk(2) for name, value in batch.items()}
            parts = [{name: value[part] for name, value in own.items()} for part in range(2)]
            for session in (discriminator, generator):
                result = session.step(parts)
                values += [float(result.loss), float(result.grad_norm)]
    return values


def _gans(workers: Any, engines: list[str]) -> dict[str, list[float]]:
    return {engine: _gan(workers, engine) for engine in engines}


@pytest.fixture(scope="module")
def gans(request: pytest.FixtureRequest) -> list[dict[str, list[float]]]:
    return run_in_workers(2, _gans, selected(request, "engine"))


@pytest.mark.parametrize("engine", by_default(("ddp", "fsdp", "zero-2"), DATA_PARALLEL))
def test_a_gan_of_two_sessions_follows_a_plain_loop(engine: str, gans: Any) -> None:
    exact = not engine.startswith("zero")
    wanted = _plain_gan(double=exact)
    for found in gans:
        assert found[engine] == pytest.approx(wanted, rel=1e-12 if exact else 1e-5)


def test_a_loop_that_calls_backward_itself_is_told_to_call_that_of_the_step() -> None:
    batch = _batch(0, double=False)
    with compose(lambda: _net(2, 3, 0, double=False), lr=RATE, device="cpu", micro_batch_size=8) as session:
        with session.open_step([batch]) as step:
            model, inputs = step.forward(step.microbatches[0])
            loss = model(inputs["noise"]).square().mean()
            with pytest.raises(RapidformerError, match="adds to the gradients") as error:
                loss.backward()
        assert "step.backward(loss)" in str(error.value.hint)
