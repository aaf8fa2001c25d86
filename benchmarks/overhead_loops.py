"""The loops of ``benchmarks overhead``: one tiny job, implemented with each library as its own documentation shows.

All loops do the same work: a batch of ready tensors from a loader, zero_grad, forward, loss, backward, clipping by the
global norm, a fused AdamW step and a step of a linear schedule. The losses are compared, so a loop that omits something
is detected.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers.modeling_outputs import SequenceClassifierOutput

from benchmarks.models import callbacks, trainer_arguments
from benchmarks.turns import StepDone
from rapidformer_templates.data.order import SampleOrder
from rapidformer_templates.data.types import Data
from rapidformer_templates.engines.contract import StepResult
from rapidformer_templates.engines.recipe import undecayed
from rapidformer_templates.trainer import Trainer

SAMPLES, LENGTH, BATCH, WIDTH = 1024, 16, 8, 32
LR, WEIGHT_DECAY, CLIP, SEED = 1e-3, 0.01, 1.0, 1234

Sample = dict[str, torch.Tensor]


class TinyClassifier(nn.Module):
    """Two transformer blocks of width 32, without dropout. A step takes about 2 ms on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(64, WIDTH)
        self.encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 3)
        self.last_loss = torch.zeros(())

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SequenceClassifierOutput:
        logits = self.head(self.encoder(self.embedding(input_ids)).mean(dim=1))
        loss = nn.functional.cross_entropy(logits, labels)
        self.last_loss = loss.detach()
        return SequenceClassifierOutput(loss=loss, logits=logits)


def tiny_model() -> TinyClassifier:
    """Build the model with the same weights each time, independent of the random state."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return TinyClassifier()


def samples() -> list[Sample]:
    draw = torch.Generator().manual_seed(SEED)
    ids = torch.randint(0, 64, (SAMPLES, LENGTH), generator=draw)
    return [{"input_ids": row, "labels": row.sum() % 3} for row in ids]


def stack(batch: list[Sample]) -> Sample:
    return {name: torch.stack([sample[name] for sample in batch]) for name in batch[0]}


def _loader(steps: int) -> DataLoader[Sample]:
    """Return a loader with the batches of this library's order, so every loop reads the same batches."""
    order = SampleOrder(SAMPLES, BATCH, SEED, by_epochs=False)
    batches = [order.step(step)[0].tolist() for step in range(steps)]
    return DataLoader(samples(), batch_sampler=batches, collate_fn=stack)  # type: ignore[arg-type]


def _optimizer(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, LambdaLR]:
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[not undecayed(name, parameter)].append(parameter)
    options: list[dict[str, Any]] = [{"params": groups[True]}, {"params": groups[False], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(options, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    return optimizer, LambdaLR(optimizer, lambda step: 1.0 - step / steps)


class Contender:
    """One library's loop for the tiny job.

    Attributes:
        name: Name of the library.
        module, package: The module and package that must be installed.
        model: The model. Its ``last_loss`` is the loss of the last step.
    """

    name = "plain PyTorch"
    module, package = "torch", "torch"

    def __init__(self, steps: int) -> None:
        """Set up for a run of ``steps`` steps, which is the length of the schedule."""
        self.steps = steps
        self.model = tiny_model()

    def run(self, step_done: StepDone) -> None:
        self._train(_loader(self.steps), self.model, *_optimizer(self.model, self.steps), step_done)

    def _train(
        self,
        loader: Any,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        step_done: StepDone,
        backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
        clip: Callable[[], Any] | None = None,
    ) -> None:
        """Run the loop of a library that leaves the loop to the user. ``backward`` and ``clip`` are the library's."""
        clip = clip or (lambda: nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        model.train()
        for batch in loader:
            loss = model(**batch).loss
            backward(loss)
            clip()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step_done()


class NullControl(Contender):
    name = "plain PyTorch again (null control)"


class Ours(Contender):
    name = "rapidformer_templates"
    module, package = "rapidformer_templates", "rapidformer_templates"

    def run(self, step_done: StepDone) -> None:
        model = self.model

        class Job(Trainer):
            def build_model(self) -> nn.Module:
                return model

            def build_data(self) -> Data:
                return Data(train=samples(), collate=stack)

            def on_step_end(self, step: int, result: StepResult) -> None:
                step_done()

        flags = f"--micro-batch-size {BATCH} --train-iters {self.steps} --lr {LR} --weight-decay {WEIGHT_DECAY}"
        job = Job([*flags.split(), "--clip-grad", f"{CLIP}", "--seed", f"{SEED}", "--device", "cpu", "--no-save"])
        with contextlib.redirect_stderr(io.StringIO()):  # hides the plan
            job.fit()


class Fabric(Contender):
    name = "Lightning Fabric"
    module, package = "lightning_fabric", "lightning-fabric"

    def run(self, step_done: StepDone) -> None:
        from lightning_fabric import Fabric as LightningFabric

        fabric = LightningFabric(accelerator="cpu", devices=1)
        optimizer, scheduler = _optimizer(self.model, self.steps)
        model, optimizer = fabric.setup(self.model, optimizer)
        loader: Any = fabric.setup_dataloaders(_loader(self.steps))
        clip = partial(fabric.clip_gradients, model, optimizer, max_norm=CLIP)
        self._train(loader, model, optimizer, scheduler, step_done, fabric.backward, clip)


class Accelerate(Contender):
    name = "accelerate"
    module, package = "accelerate", "accelerate"

    def run(self, step_done: StepDone) -> None:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        parts: Any = (self.model, *_optimizer(self.model, self.steps), _loader(self.steps))
        model, optimizer, scheduler, loader = accelerator.prepare(*parts)
        clip = lambda: accelerator.clip_grad_norm_(model.parameters(), CLIP)  # noqa: E731
        self._train(loader, model, optimizer, scheduler, step_done, accelerator.backward, clip)


class TransformersTrainer(Contender):
    name = "transformers' Trainer"
    module, package = "transformers", "transformers"

    def run(self, step_done: StepDone) -> None:
        import transformers

        class Job(transformers.Trainer):
            def get_train_dataloader(job) -> DataLoader[Sample]:  # noqa: N805
                return job.accelerator.prepare(_loader(self.steps))

        with tempfile.TemporaryDirectory(prefix="rapidformer-bench-") as folder:
            arguments = trainer_arguments(
                folder,
                per_device_train_batch_size=BATCH,
                max_steps=self.steps,
                max_grad_norm=CLIP,
                logging_strategy="no",
                save_strategy="no",
            )
            watch = callbacks(on_step_end=step_done)
            optimizers = _optimizer(self.model, self.steps)
            Job(self.model, arguments, train_dataset=samples(), optimizers=optimizers, callbacks=watch).train()


CONTENDERS: tuple[type[Contender], ...] = (NullControl, Ours, Fabric, Accelerate, TransformersTrainer)
