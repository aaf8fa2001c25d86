"""Parameters of unusual forms: each engine trains them as a plain loop does, or refuses them before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rapidformer_templates import OptimizerSpec
from rapidformer_templates.engines.construction import LEAST_DIVIDED
from rapidformer_templates.errors import RapidformerError
from tests.support.parity import trained
from tests.support.selection import by_default, selected
from tests.support.whole_batches import (
    ENGINES,
    FLAGS,
    RATE,
    WIDTH,
    Net,
    TransformerJob,
    WholeBatchJob,
    assert_follows,
    in_plain_torch,
    under_engines,
)
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
    def make(self) -> nn.Module:
        return ScaledNet()


class LazyJob(WholeBatchJob):
    def make(self) -> nn.Module:
        return LazyNet()


class FactorsJob(WholeBatchJob):
    def make(self) -> nn.Module:
        return FactorsNet()


class EmptyJob(WholeBatchJob):
    def make(self) -> nn.Module:
        return EmptyNet()


class WideJob(WholeBatchJob):
    double = False

    def make(self) -> nn.Module:
        return WideNet()


class ComplexJob(WholeBatchJob):
    double = False

    def make(self) -> nn.Module:
        return ComplexNet()

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


JOBS: dict[str, type[WholeBatchJob]] = {
    "scaled": ScaledJob,
    "lazy": LazyJob,
    "factors": FactorsJob,
    "empty": EmptyJob,
    "wide": WideJob,
    "complex": ComplexJob,
    "transformer": ScaledTransformerJob,
}
DATA_PARALLEL = [engine for engine in ENGINES if engine not in ("tensor", "pipeline", "context")]
ZERO = ("zero-1", "zero-2", "zero-3")
MESSAGES = {
    **{
        f"{job}-{engine}": "OSS needs parameters of one type"
        for job in ("wide", "complex")
        for engine in ("oss", "sdp")
    },
    **{f"wide-{engine}": "this model trains float32 and float64" for engine in ZERO},
    **{f"complex-{engine}": "this model trains complex64 and float32" for engine in ZERO},
    **{f"empty-{engine}": "none has no elements" for engine in ZERO},
}
WORKS = [f"{job}-{engine}" for job in JOBS for engine in DATA_PARALLEL if job != "transformer"]
WORKS = [case for case in WORKS if case not in MESSAGES] + ["transformer-tensor", "transformer-context"]
SHORT = (
    *("scaled-fsdp", "scaled-zero-1", "scaled-zero-3", "lazy-fsdp", "lazy-zero-3", "factors-fsdp", "factors-zero-2"),
    *("factors-distributed-optimizer", "empty-fsdp", "wide-fsdp", "complex-fsdp", "transformer-tensor"),
)
SHORT_REFUSED = ("wide-zero-3", "complex-zero-1", "empty-zero-2")


def _job_and_engine(case: str) -> tuple[type[WholeBatchJob], str]:
    job, _, engine = case.partition("-")
    return JOBS[job], engine


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    cases = selected(request, "case")
    found = run_in_workers(2, under_engines, [_job_and_engine(case) for case in cases])
    return [dict(zip(cases, of_rank, strict=True)) for of_rank in found]


@pytest.mark.parametrize("case", by_default(SHORT, WORKS))
def test_engine_follows_a_plain_loop(case: str, runs: Any) -> None:
    for run in runs:
        assert_follows(run[case], *_job_and_engine(case))


@pytest.mark.parametrize("case", by_default(SHORT_REFUSED, MESSAGES))
def test_what_an_engine_cannot_join_is_refused(case: str, runs: Any) -> None:
    for run in runs:
        assert MESSAGES[case] in run[case]
        assert "--fsdp-memory-optimization" in run[case]  # a way that works


def test_a_fused_optimizer_refuses_complex_numbers() -> None:
    with pytest.raises(RapidformerError, match="filter has complex numbers, which fused optimizers do not update"):
        FusedComplexJob(FLAGS.split()).fit()


def _train(workers: Any, engine: str, steps: int, folder: str, *more: str) -> Any:
    kind = type("ScaledJob", (ScaledJob,), {"double": not engine.startswith("zero")})
    flags = FLAGS.replace("--train-iters 3", f"--train-iters {steps} --save-interval 1")
    return trained(kind([*flags.split(), *ENGINES[engine].split(), "--save", folder, *more], no_save=False))


def _resumed(workers: Any, pairs: list[str], folder: str) -> dict[str, Any]:
    found = {}
    for pair in pairs:
        first, _, second = pair.partition(" → ")
        _train(workers, first, 2, f"{folder}/{pair}")
        found[pair] = _train(workers, second, 3, f"{folder}/{pair}", "--resume")
    return found


KINDS = ("fsdp", "zero-1", "zero-3", "distributed-optimizer")
PAIRS = [f"{first} → {second}" for first in KINDS for second in KINDS]


@pytest.fixture(scope="module")
def resumed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("runs")
    return run_in_workers(2, _resumed, selected(request, "pair"), str(folder))


@pytest.mark.parametrize("pair", by_default(("zero-3 → zero-3", "fsdp → zero-1"), PAIRS))
def test_a_parameter_without_dimensions_survives_a_resume(pair: str, resumed: Any) -> None:
    """Its moments have no dimensions either, like a count of steps."""
    wanted = in_plain_torch(ScaledJob)
    for run in resumed:
        torch.testing.assert_close(run[pair]["curve"], wanted["curve"][2:], rtol=1e-4, atol=1e-5)
        for name, weight in wanted["weights"].items():
            torch.testing.assert_close(run[pair]["weights"][name], weight, rtol=1e-3, atol=2e-3, msg=name)
