"""Every engine computes what a plain loop of torch does, or refuses it before the first step.

Parameters of unusual forms, losses that take derivatives through the model, and gradients of other backwards.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import get_total_norm

from rapidformer_templates import OptimizerSpec, RapidformerError, compose
from rapidformer_templates.engines.construction import LEAST_DIVIDED
from rapidformer_templates.errors import ModelError
from rapidformer_templates.run.building import check_memory
from tests.support import parity
from tests.support.jobs import CausalJob
from tests.support.parity import ENGINES
from tests.support.selection import by_default, selected
from tests.support.whole_batches import (
    FLAGS,
    RATE,
    WIDTH,
    WORDS,
    Batch,
    Net,
    TransformerJob,
    WholeBatchJob,
    assert_follows,
    in_plain_torch,
    under_engines,
)  # fmt: skip
from tests.support.worker_pool import run_in_workers

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
pytest.importorskip("fairscale", reason="needs fairscale: pip install 'rapidformer_templates[fairscale]'")
pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]


class ScaledNet(Net):
    """A parameter without dimensions, as CLIP's ``logit_scale``. It comes first, and some batches do not use it."""

    def add(self) -> None:
        self.logit_scale = nn.Parameter(torch.tensor(0.7))

    def change(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.logit_scale.exp()


class LazyNet(Net):
    """A layer that learns its size from a dry run. It is large enough to be divided."""

    def add(self) -> None:
        self.lazy, self.back = nn.LazyLinear(LEAST_DIVIDED // 4), nn.LazyLinear(WIDTH)
        self.change(torch.zeros(1, WIDTH))

    def change(self, hidden: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = hidden + self.back(self.lazy(hidden).tanh())
        return changed


class FactorsNet(Net):
    """Factors of a matrix, as views of the results of an SVD, and a matrix that is stored by columns."""

    def add(self) -> None:
        left, _, right = torch.linalg.svd(torch.randn(WIDTH, LEAST_DIVIDED), full_matrices=False)
        self.left, self.right = nn.Parameter(left[:, :4]), nn.Parameter(right[:4].T)
        matrix = self.blocks[0].up.weight.detach()  # type: ignore[union-attr]
        self.blocks[0].up.weight = nn.Parameter(matrix.T.contiguous().T)  # type: ignore[union-attr]

    def change(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + (hidden @ self.left @ self.right.T)[..., :WIDTH]


class WideNet(Net):
    """A layer in fp64 in a model in fp32."""

    def add(self) -> None:
        self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def change(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.wide(hidden.double()).to(hidden.dtype)


class ComplexNet(Net):
    """A filter of frequencies."""

    def add(self) -> None:
        self.filter = nn.Parameter(0.1 * torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def change(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.fft.irfft(torch.fft.rfft(hidden) * self.filter, n=WIDTH)


class EmptyNet(Net):
    """Parameters without elements."""

    def add(self) -> None:
        self.nothing, self.none = nn.Linear(WIDTH, 0), nn.Parameter(torch.empty(0))

    def change(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden, self.nothing(hidden)], -1) + self.none.sum()


class ScaledJob(WholeBatchJob):
    net = ScaledNet


class LazyJob(WholeBatchJob):
    net = LazyNet


class FactorsJob(WholeBatchJob):
    net = FactorsNet


class EmptyJob(WholeBatchJob):
    net = EmptyNet


class WideJob(WholeBatchJob):
    double, net = False, WideNet


class SharedJob(TransformerJob):
    """Two blocks with one memory for a weight of each, which another type would separate.

    Plain torch updates both on a CPU. FSDP, OSS, ZeRO and tensor parallelism would give each its own memory.
    """

    double = False

    def make(self) -> nn.Module:
        model: Any = super().make()
        first, second = (block.mlp.c_fc for block in model.transformer.h[:2])
        second.weight.data = first.weight.data
        return model


class ComplexJob(WholeBatchJob):
    double, net = False, ComplexNet

    def build_optimizer(self) -> OptimizerSpec:
        return OptimizerSpec(torch.optim.AdamW, {"lr": RATE, "weight_decay": 0.01})


class FusedComplexJob(ComplexJob):
    def build_optimizer(self) -> OptimizerSpec:
        return WholeBatchJob.build_optimizer(self)


class ScaledTransformerJob(TransformerJob):
    """A trained scale on logits, which tensor parallelism divides."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.scale = nn.Parameter(torch.tensor(0.7, dtype=next(model.parameters()).dtype))
        model.lm_head.register_forward_hook(lambda head, inputs, logits: logits * model.scale)
        return model


TABLE = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class AdversarialJob(TransformerJob):
    """Also trains on the inputs that are moved a little in the direction of a higher loss (FreeLB, one step)."""

    order = 1

    def at(self, inputs: torch.Tensor, model: Any, batch: Batch) -> torch.Tensor:
        return self.loss_of(model(inputs_embeds=inputs, attention_mask=batch["attention_mask"]).logits, batch)

    def compute_loss(self, model: Any, batch: Batch) -> Any:
        inputs = TABLE[batch["input_ids"]].to(torch.float64 if self.double else torch.float32).requires_grad_()
        loss = self.at(inputs, model, batch)
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=self.order > 1, retain_graph=True)
        more = gradient.square().sum() if self.order > 1 else self.at(inputs.detach() + 0.1 * gradient, model, batch)
        return loss + more, self.count_targets(batch)


class PenalizedJob(AdversarialJob):
    """A penalty on the gradient of the inputs, whose gradient is a second derivative."""

    order = 2


class AddingJob(TransformerJob):
    """Leaves gradients, as ``loss.backward()`` does."""

    def compute_loss(self, model: Any, batch: Batch) -> Any:
        loss, count = super().compute_loss(model, batch)
        loss.backward(retain_graph=True)
        return loss, count


class ProbedJob(TransformerJob):
    """Trains a probe on the hidden state. It is another model, with its own backward and optimizer."""

    def compute_loss(self, model: Any, batch: Batch) -> Any:
        if not hasattr(self, "probe"):
            torch.manual_seed(7)
            self.probe = nn.Linear(WORDS, 2)
        logits = self.logits(model, batch)
        self.probe(logits.detach().float()).square().mean().backward()
        self.probe_gradients = [p.grad for p in self.probe.parameters()]
        return self.loss_of(logits, batch), self.count_targets(batch)


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


JOBS: dict[str, type[WholeBatchJob]] = {
    "scaled": ScaledJob, "lazy": LazyJob, "factors": FactorsJob, "empty": EmptyJob, "wide": WideJob,
    "complex": ComplexJob, "transformer": ScaledTransformerJob, "first": AdversarialJob, "second": PenalizedJob,
    "probe": ProbedJob, "adds": AddingJob, "shared": SharedJob, "hook": HookJob, "built": BuiltJob,
}  # fmt: skip
DATA_PARALLEL = [engine for engine in ENGINES if engine not in ("tensor", "pipeline", "context")]
ZERO = ("zero-1", "zero-2", "zero-3")
FLAG = {
    **{f"zero-{stage}": f"ZeRO-{stage}" for stage in (1, 2, 3)},
    "pipeline": "--pipeline-model-parallel-size", "context": "--context-parallel-size",
    "fsdp": "--fsdp-memory-optimization", "tensor": "--tensor-model-parallel-size",
}  # fmt: skip
IN_LOSS, INSTEAD = "where  compute_loss(model, batch)", "--fsdp-memory-optimization"
NO, ONCE, ADDS = (
    "the loss takes a derivative through the model, which is not possible with",
    "a second derivative (create_graph=True) through the model, which is not possible with",
    "a backward in the loss adds to the gradients of the model",
)
ON_ONE_MEMORY = "h.0.mlp.c_fc.weight and transformer.h.1.mlp.c_fc.weight are two tensors on one memory"
REFUSED: dict[str, tuple[str, ...]] = {
    **{f"{job}-{engine}": ("OSS needs parameters of one type", INSTEAD)
       for job in ("wide", "complex") for engine in ("oss", "sdp")},
    **{f"wide-{engine}": ("this model trains float32 and float64", INSTEAD) for engine in ZERO},
    **{f"complex-{engine}": ("this model trains complex64 and float32", INSTEAD) for engine in ZERO},
    **{f"shared-{engine}": (ON_ONE_MEMORY,)
       for engine in ENGINES if engine not in ("sdp", "context")},
    **{f"empty-{engine}": ("none has no elements", INSTEAD) for engine in ZERO},
    **{f"first-{engine}": (f"{NO} {FLAG[engine]}", IN_LOSS) for engine in (*ZERO, "pipeline", "context")},
    **{f"second-{engine}": (f"{ONCE} {FLAG[engine]}", IN_LOSS) for engine in ("fsdp", "tensor")},
    **{f"adds-{engine}": (ADDS, IN_LOSS) for engine in ("ddp", "fsdp", "zero-2", "pipeline")},
}  # fmt: skip
"""What an engine refuses, with the message and where the reason is, or a way that works."""
FOLLOWS = {
    **dict.fromkeys(("scaled", "lazy", "factors", "empty", "wide", "complex", "built"), DATA_PARALLEL),
    "transformer": ["tensor", "context"],
    "first": ["ddp", "oss", "sdp", "fsdp", "distributed-optimizer", "tensor"],
    "second": ["ddp", "oss", "sdp", "distributed-optimizer"],
    "probe": ["fsdp", "zero-2", "zero-3", "pipeline"],
    "hook": [*DATA_PARALLEL, "tensor", "context"],
}
WORKS = [f"{job}-{engine}" for job, engines in FOLLOWS.items() for engine in engines]
WORKS = [case for case in WORKS if case not in REFUSED]
SHORT = ("scaled-fsdp", "factors-distributed-optimizer", "first-tensor", "second-sdp")
SHORT_REFUSED = ("first-pipeline", "adds-fsdp", "shared-ddp")


def _job_and_engine(case: str) -> tuple[type[WholeBatchJob], str]:
    job, _, engine = case.partition("-")
    return JOBS[job], engine


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The outcomes by rank. One group of workers trains all cases."""
    cases = selected(request, "case")
    found = run_in_workers(2, under_engines, [_job_and_engine(case) for case in cases])
    return [dict(zip(cases, of_rank, strict=True)) for of_rank in found]


@pytest.mark.parametrize("case", by_default(SHORT, WORKS))
def test_engine_follows_a_plain_loop(case: str, runs: Any) -> None:
    for run in runs:
        assert_follows(run[case], *_job_and_engine(case))


@pytest.mark.parametrize("case", by_default(SHORT_REFUSED, REFUSED))
def test_what_would_be_wrong_is_refused(case: str, runs: Any) -> None:
    for run in runs:
        assert all(text in run[case] for text in REFUSED[case]), run[case]


def test_a_fused_optimizer_refuses_complex_numbers() -> None:
    with pytest.raises(RapidformerError, match="filter has complex numbers, which fused optimizers do not update"):
        FusedComplexJob(FLAGS.split()).fit()


def _train(workers: Any, engine: str, steps: int, folder: str, *more: str) -> Any:
    kind = type("ScaledJob", (ScaledJob,), {"double": not engine.startswith("zero")})
    flags = FLAGS.replace("--train-iters 3", f"--train-iters {steps} --save-interval 1")
    return parity.trained(kind([*flags.split(), *ENGINES[engine].split(), "--save", folder, *more], no_save=False))


def _resumed(workers: Any, pairs: list[str], folder: str) -> dict[str, Any]:
    found = {}
    for pair in pairs:
        first, _, second = pair.partition(" → ")
        _train(workers, first, 2, f"{folder}/{pair}")
        found[pair] = _train(workers, second, 3, f"{folder}/{pair}", "--resume")
    return found


KINDS = ("fsdp", "zero-1", "zero-3", "distributed-optimizer")
PAIRS = [f"{first} → {second}" for first, second in zip(KINDS, [*KINDS[1:], KINDS[0]], strict=True)]


@pytest.fixture(scope="module")
def resumed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("runs")
    return run_in_workers(2, _resumed, selected(request, "pair"), str(folder))


@pytest.mark.parametrize("pair", by_default(["fsdp → zero-1"], PAIRS))
def test_a_parameter_without_dimensions_survives_a_resume(pair: str, resumed: Any) -> None:
    """Its moments have no dimensions either, like a count of steps."""
    wanted = in_plain_torch(ScaledJob)
    for run in resumed:
        torch.testing.assert_close(run[pair]["curve"], wanted["curve"][2:], rtol=1e-4, atol=1e-5)
        for name, weight in wanted["weights"].items():
            torch.testing.assert_close(run[pair]["weights"][name], weight, rtol=1e-3, atol=2e-3, msg=name)


AGAIN = "--checkpoint-activations"


def test_the_penalty_matters() -> None:
    """Otherwise it would be easy to follow."""
    first, plain = (in_plain_torch(kind)["curve"][0] for kind in (PenalizedJob, TransformerJob))
    assert abs(first[1] - plain[1]) > 0.1


@pytest.mark.parametrize("flags", by_default([AGAIN], [AGAIN, f"{AGAIN} --layerwise-lr-decay 0.9"]))
def test_measurements_before_the_first_step_end_at_the_backward(flags: str) -> None:
    """They keep no values for it. The receipts of recomputation must not need more of the loss."""
    job = AdversarialJob([*FLAGS.split(), *flags.split()])
    job.fit()
    if "layerwise" not in flags:
        torch.testing.assert_close(job.curve, in_plain_torch(AdversarialJob)["curve"], rtol=1e-9, atol=1e-9)


class UnusedDerivativeJob(CausalJob):
    """Takes a derivative of its loss and does not use it."""

    takes = True

    def compute_loss(self, model: Any, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        if self.takes and torch.is_grad_enabled():
            torch.autograd.grad(loss, next(self.model.parameters()), retain_graph=True)
        return loss


class SameLossJob(UnusedDerivativeJob):
    takes = False


@pytest.mark.parametrize("flags", ["--num-experts 2 --moe-loss-coeff 0.1", "--fused-linear-cross-entropy"])
def test_a_derivative_leaves_no_trace_in_losses_that_compute_their_gradient_themselves(flags: str) -> None:
    """A backward adds the balance loss of a mixture, and scales the gradients of the fused loss in place."""
    sizes = "--train-iters 2 --global-batch-size 4 --micro-batch-size 2 --lr 1e-3 --log-interval 1 --no-export-model"
    plain, found = (
        parity.trained(kind([*sizes.split(), *flags.split()])) for kind in (SameLossJob, UnusedDerivativeJob)
    )
    assert found["curve"] == plain["curve"]
    for line, wanted in zip(found["lines"], plain["lines"], strict=True):
        assert {key: line[key] for key in line if "loss" in key} == {
            key: wanted[key] for key in wanted if "loss" in key
        }


class InnerDerivativeJob(CausalJob):
    """Returns the norm of a gradient, which a mixture's balance loss must not change."""

    def compute_loss(self, model: Any, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        if torch.is_grad_enabled():
            parameters = [p for name, p in self.model.named_parameters() if "router" in name or "gate" in name]
            gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
            self.norms = [float(g.norm()) for g in gradients if g is not None]
        return loss


def test_a_derivative_in_the_loss_has_no_balance_loss() -> None:
    sizes = "--train-iters 1 --global-batch-size 4 --micro-batch-size 2 --lr 1e-3 --no-export-model --num-experts 2"
    jobs = [InnerDerivativeJob([*sizes.split(), "--moe-loss-coeff", coeff]) for coeff in ("0", "10")]
    for job in jobs:
        job.fit()
    assert jobs[0].norms
    assert jobs[0].norms == jobs[1].norms


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


@pytest.mark.parametrize("engine", by_default(["ddp"], DATA_PARALLEL))
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


class Pair(nn.Module):
    """Two linear layers of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


MEMORY = torch.randn(8, 8)
OVERLAPPING: dict[str, tuple[str, Callable[[Pair], object]]] = {
    "transposed": ("b.weight = a.weight", lambda pair: _take(pair, pair.a.weight.data, pair.a.weight.data.T)),
    "overlapping rows": ("b.weight = a.weight", lambda pair: _take(pair, MEMORY[:4, :4], MEMORY[2:6, :4])),
    "a view": ("register a copy", lambda pair: pair.register_buffer("first_row", pair.a.weight.data[0])),
}
APART: dict[str, Callable[[Pair], object]] = {
    "one parameter": lambda pair: setattr(pair.b, "weight", pair.a.weight),
    "columns": lambda pair: _take(pair, MEMORY[:4, :4], MEMORY[:4, 4:]),
    "rows": lambda pair: _take(pair, MEMORY[:4, :4], MEMORY[4:, :4]),
    "frozen": lambda pair: _take(pair.requires_grad_(False), MEMORY[:4, :4], MEMORY[:4, :4]),
}


def _take(pair: Pair, first: torch.Tensor, second: torch.Tensor) -> None:
    pair.a.weight.data, pair.b.weight.data = first, second


@pytest.mark.parametrize("name", OVERLAPPING)
def test_what_overlaps_is_refused(name: str) -> None:
    pair, (hint, share) = Pair(), OVERLAPPING[name]
    share(pair)
    with pytest.raises(ModelError) as caught:
        check_memory(pair)
    assert hint in str(caught.value)


@pytest.mark.parametrize("name", APART)
def test_what_does_not_is_trained(name: str) -> None:
    pair = Pair()
    APART[name](pair)
    check_memory(pair)


def test_moving_a_model_separates_them() -> None:
    """The reason to refuse them in one process as well."""
    pair = Pair()
    pair.b.weight.data = pair.a.weight.data
    pair.to(torch.float64)
    assert pair.a.weight.data_ptr() != pair.b.weight.data_ptr()
