"""Batch norms under engines that divide the data: an evaluation uses the statistics that the export has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rapidformer_templates import Data, Trainer
from tests.support.worker_pool import run_in_workers

FLAGS = "--train-iters 6 --micro-batch-size 8 --global-batch-size 16 --lr 1e-2 --device cpu --eval-interval 6"


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def samples(seed: int) -> list[dict[str, torch.Tensor]]:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(seed))
    return [{"x": row, "y": row.sum() ** 2} for row in x]


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in ("x", "y")}


def loss_of(network: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(network(batch["x"]).squeeze(-1), batch["y"])


class _Regression(Trainer):
    def build_model(self) -> nn.Module:
        return model()

    def build_data(self) -> Data:
        return Data(train=samples(0), valid=samples(1), collate=collate)

    def compute_loss(self, network: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss_of(network, batch)


def _train(workers: Any, folder: str, flags: str) -> dict[str, Any]:
    return _Regression([*FLAGS.split(), *flags.split(), "--save", folder]).fit()


@pytest.mark.distributed
@pytest.mark.parametrize(
    "flags",
    ["", "--fsdp-memory-optimization", "--use-distributed-optimizer"]
    + [pytest.param(f"--zero-{n}-memory-optimization", marks=pytest.mark.deepspeed) for n in (2, 3)],
)
def test_an_evaluation_has_the_statistics_of_the_export(flags: str, tmp_path: Path) -> None:
    summary, _ = run_in_workers(2, _train, str(tmp_path / "run"), flags)
    exported = model()
    exported.load_state_dict(load_file(tmp_path / "run/export/model.safetensors"))
    with torch.no_grad():
        expected = loss_of(exported.eval(), collate(samples(1)))
    assert summary["metrics"]["eval_loss"] == pytest.approx(float(expected), rel=1e-5)
