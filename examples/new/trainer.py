"""Training of any module with custom hooks. It runs in seconds on a CPU: the data are generated.

    python my_task.py
    python my_task.py --train-iters 500 --nproc-per-node 2 --mixed-precision bf16 --save runs/longer

It takes every flag: python my_task.py --help-all. To see what a run would do: rapidformer plan --user-script my_task.py
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer_templates import Data, OptimizerSpec, Trainer, flag


@dataclass(frozen=True)
class MyFlags:
    """My task"""

    width: int = flag(64, "hidden units of the network", minimum=1)


class MyTask(Trainer):
    """Train a network to draw a sine."""

    Flags = MyFlags

    def build_data(self) -> Data:
        points = torch.linspace(-3, 3, 1200)[torch.randperm(1200, generator=torch.Generator().manual_seed(0))]
        samples = [{"x": x.reshape(1), "y": x.sin().reshape(1)} for x in points]
        return Data(train=samples[:1000], valid=samples[1000:])

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, self.flags.width), nn.Tanh(), nn.Linear(self.flags.width, 1))

    def compute_loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])

    def build_optimizer(self) -> OptimizerSpec:
        return OptimizerSpec(torch.optim.AdamW, {"lr": self.config.training.lr, "weight_decay": 0.0})

    def on_evaluate(self, step: int, metrics: Any) -> None:
        print(f"step {step}: {metrics['eval_loss']:.4f} on points that it was not trained on")


if __name__ == "__main__":
    MyTask.main(train_iters=200, lr=1e-2, micro_batch_size=32, eval_interval=100, log_interval=20, save="runs/my_task")
