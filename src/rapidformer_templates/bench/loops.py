"""Training loops that do the same work, each library's as its own documentation shows it.

All of them do the same: a batch of ready tensors from a loader, zero_grad, forward, loss, backward, clipping by
the global norm, a fused AdamW step and a step of a linear schedule. The losses are compared, so a loop that
left something out would be found out.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from rapidformer_templates.bench.turns import StepDone
from rapidformer_templates.bench.works import CLIP, LR, SEED, WEIGHT_DECAY, Sample, Work, stack
from rapidformer_templates.data.order import SampleOrder
from rapidformer_templates.data.types import Data
from rapidformer_templates.engines.base import StepResult
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.optimizer import undecayed
from rapidformer_templates.trainer import Trainer


def _loader(work: Work, steps: int) -> DataLoader[Sample]:
    """The batches of this library's order, so that every loop sees the same ones."""
    order = SampleOrder(len(work.samples), work.batch, SEED, by_epochs=False)
    batches = [order.step(step)[0].tolist() for step in range(steps)]
    on_gpu: dict[str, Any] = {"num_workers": 2, "pin_memory": True} if work.device == "cuda" else {}
    return DataLoader(work.samples, batch_sampler=batches, collate_fn=stack, **on_gpu)  # type: ignore[arg-type]


def _optimizer(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, LambdaLR]:
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[not undecayed(name, parameter)].append(parameter)
    options: list[dict[str, Any]] = [{"params": groups[True]}, {"params": groups[False], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(options, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    return optimizer, LambdaLR(optimizer, lambda step: 1.0 - step / steps)


class Contender:
    """One library's loop.

    Attributes:
        name: of the library.
        module, package: what must be installed.
        model: as it stands; its ``last_loss`` is that of the last step.
    """

    name = "plain PyTorch"
    module, package = "torch", "torch"

    def __init__(self, work: Work, steps: int) -> None:
        """``steps``: the length of the run that the schedule is made for."""
        self.work = work
        self.steps = steps
        self.model: Any = work.model()

    def _precision(self) -> AbstractContextManager[Any]:
        if self.work.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.work.device, dtype=torch.bfloat16)

    def run(self, step_done: StepDone) -> None:
        self.model.to(self.work.device).train()
        optimizer, scheduler = _optimizer(self.model, self.steps)
        model = torch.compile(self.model) if self.work.compiled else self.model
        for batch in _loader(self.work, self.steps):
            moved = {name: tensor.to(self.work.device, non_blocking=True) for name, tensor in batch.items()}
            with self._precision():
                loss = model(**moved).loss
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step_done()

    def check_against(self, plain: Contender, allowed: float) -> None:
        """Compare the last losses.

        Raises:
            RapidformerError: they differ by more than ``allowed``, as a share.
        """
        expected, actual = float(plain.model.last_loss), float(self.model.last_loss)
        if abs(actual - expected) > allowed * abs(expected):
            raise RapidformerError(
                f"{self.name} reached the loss {actual}, {plain.name} {expected}: not the same work", where="bench"
            )


class NullControl(Contender):
    name = "plain PyTorch again (null control)"


class Ours(Contender):
    name = "rapidformer_templates"
    module, package = "rapidformer_templates", "rapidformer_templates"

    def run(self, step_done: StepDone) -> None:
        model, work = self.model, self.work

        class Job(Trainer):
            def build_model(self) -> nn.Module:
                return model

            def build_data(self) -> Data:
                return Data(train=work.samples, collate=stack)

            def on_step_end(self, step: int, result: StepResult) -> None:
                step_done()

        flags = f"--micro-batch-size {work.batch} --train-iters {self.steps} --lr {LR} --weight-decay {WEIGHT_DECAY}"
        flags += f" --clip-grad {CLIP} --seed {SEED} --device {work.device}"
        if work.precision != "fp32":
            flags += f" --mixed-precision {work.precision}"
        if work.compiled:
            flags += " --torch-compile"
        job = Job(flags.split())
        with contextlib.redirect_stderr(io.StringIO()):  # the plan
            job.fit()


class Fabric(Contender):
    name = "Lightning Fabric"
    module, package = "lightning_fabric", "lightning-fabric"

    def run(self, step_done: StepDone) -> None:
        from lightning_fabric import Fabric as LightningFabric

        fabric = LightningFabric(accelerator="cpu", devices=1)
        optimizer, scheduler = _optimizer(self.model, self.steps)
        model, optimizer = fabric.setup(self.model, optimizer)
        loader: Any = fabric.setup_dataloaders(_loader(self.work, self.steps))
        model.train()
        for batch in loader:
            loss = model(**batch).loss
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step_done()


class Accelerate(Contender):
    name = "accelerate"
    module, package = "accelerate", "accelerate"

    def run(self, step_done: StepDone) -> None:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        parts: Any = (self.model, *_optimizer(self.model, self.steps), _loader(self.work, self.steps))
        model, optimizer, scheduler, loader = accelerator.prepare(*parts)
        model.train()
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step_done()


class TransformersTrainer(Contender):
    name = "transformers' Trainer"
    module, package = "transformers", "transformers"

    def run(self, step_done: StepDone) -> None:
        import transformers

        class Pause(transformers.TrainerCallback):
            def on_step_end(self, *unused: Any, **also_unused: Any) -> None:
                step_done()

        class Job(transformers.Trainer):
            def get_train_dataloader(job) -> DataLoader[Sample]:  # noqa: N805
                return job.accelerator.prepare(_loader(self.work, self.steps))

        work = self.work
        with tempfile.TemporaryDirectory(prefix="rapidformer-bench-") as folder:
            arguments = transformers.TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=work.batch,
                max_steps=self.steps,
                max_grad_norm=CLIP,
                use_cpu=work.device == "cpu",
                bf16=work.precision == "bf16",
                torch_compile=work.compiled,
                disable_tqdm=True,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
            )
            optimizers = _optimizer(self.model.to(work.device), self.steps)
            Job(self.model, arguments, train_dataset=work.samples, optimizers=optimizers, callbacks=[Pause()]).train()


CONTENDERS: tuple[type[Contender], ...] = (NullControl, Ours, Fabric, Accelerate, TransformersTrainer)
