"""The peers of the tables. Each uses the loop from its documentation. Everything else is as in this library."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from rapidformer_templates.commands.bench.tables import HAND_WRITTEN, HF_TRAINER
from rapidformer_templates.commands.bench.worker import (
    CLIP,
    LR,
    SEED,
    WEIGHT_DECAY,
    BenchConnection,
    BenchJob,
    PeerUnavailable,
    RandomTokens,
    build_model,
)

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
    from torch import Tensor, nn
    from torch.utils.data import DataLoader
    from transformers import TrainerControl, TrainerState, TrainingArguments

MicroBatchOfTokens = dict[str, "Tensor"]


def accelerate_ddp(job: BenchJob, line: BenchConnection) -> None:
    _accelerate(job, line, _accelerator(job))


def accelerate_fsdp(job: BenchJob, line: BenchConnection) -> None:
    """Run accelerate's FSDP2, which shards each block separately.

    Raises:
        PeerUnavailable: the device is a CPU.
    """
    from accelerate import DistributedType, FullyShardedDataParallelPlugin

    blocks = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"]
    )
    accelerator = _accelerator(job, blocks)
    if accelerator.distributed_type != DistributedType.FSDP:
        raise PeerUnavailable(
            f"accelerate turns its FSDP plugin into {accelerator.distributed_type.value} on this device"
        )
    _accelerate(job, line, accelerator)


def accelerate_zero(job: BenchJob, line: BenchConnection, zero_stage: int) -> None:
    os.environ.setdefault("DS_ACCELERATOR", job.device)
    from accelerate import DeepSpeedPlugin

    from rapidformer_templates.switches.zero.compiled_parts import leave_out_shm_comm

    if job.device == "cpu":
        leave_out_shm_comm()  # training does not use it, and it takes half a minute to compile
    plugin = DeepSpeedPlugin(
        zero_stage=zero_stage, gradient_accumulation_steps=job.accumulation, gradient_clipping=CLIP
    )
    _accelerate(job, line, _accelerator(job, zero=plugin))


def _accelerator(
    job: BenchJob, fsdp: FullyShardedDataParallelPlugin | None = None, zero: DeepSpeedPlugin | None = None
) -> Accelerator:
    from accelerate import Accelerator, InitProcessGroupKwargs

    on_cpu = job.device == "cpu"
    # With cpu=True, accelerate would ignore DeepSpeed. Without a backend, it would ignore the other workers.
    return Accelerator(
        cpu=on_cpu and zero is None,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if on_cpu and zero else None,
        mixed_precision="no" if job.precision == "fp32" else job.precision,
        gradient_accumulation_steps=job.accumulation,
        fsdp_plugin=fsdp,
        deepspeed_plugin=zero,
    )


def _accelerate(job: BenchJob, line: BenchConnection, accelerator: Accelerator) -> None:
    import torch

    if accelerator.num_processes != job.workers:
        raise PeerUnavailable(f"accelerate runs {accelerator.num_processes} worker of {job.workers} on this device")

    torch.manual_seed(SEED)
    line.before_model()
    model = build_model(job.sizes)
    model, optimizer, loader = accelerator.prepare(model, _adamw(model), _loader(job))
    model.train()
    line.training_starts()
    loss = torch.zeros((), device=accelerator.device)
    for batch in loader:
        with accelerator.accumulate(model):
            part = model(**batch).loss
            accelerator.backward(part)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        loss = loss + part.detach()
        if accelerator.sync_gradients:
            line.step_ends()
            last, loss = loss, torch.zeros_like(loss)
    line.end(float(accelerator.reduce(last, "mean")) / job.accumulation)
    accelerator.end_training()


def torch_fully_shard(job: BenchJob, line: BenchConnection) -> None:
    """Run a plain loop around torch's ``fully_shard``, as in its tutorial.

    Raises:
        PeerUnavailable: the precision is fp16, for which the tutorial has no loss scale.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from rapidformer_templates.system.workers import join

    if job.precision == "fp16":
        raise PeerUnavailable("a plain loop has no loss scale for fp16")
    with join(job.device) as workers:
        torch.manual_seed(SEED)
        line.before_model()
        model = build_model(job.sizes).to(workers.device)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if job.precision == "bf16" else None)
        for block in model.get_submodule("transformer.h").children():
            fully_shard(block, mp_policy=policy)
        sharded = fully_shard(model, mp_policy=policy)
        optimizer = _adamw(model)
        model.train()
        line.training_starts()
        for parts in _steps(job, workers.rank):
            loss = torch.zeros((), device=workers.device)
            for i, batch in enumerate(parts):
                sharded.set_requires_gradient_sync(i == len(parts) - 1)
                part = model(**{name: tensor.to(workers.device) for name, tensor in batch.items()}).loss / len(parts)
                part.backward()
                loss = loss + part.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            line.step_ends()
        dist.all_reduce(loss)
        line.end(float(loss) / workers.world)


def plain_pytorch(job: BenchJob, line: BenchConnection, *, compiled: bool = False) -> None:
    """Run a hand-written loop for one device, which follows all of torch's tuning guide.

    Raises:
        PeerUnavailable: the precision is fp16, for which the loop has no loss scale, or there are several workers.
    """
    import torch

    if job.precision == "fp16" or job.workers > 1:
        raise PeerUnavailable("the hand-written loop is for one worker, and has no loss scale for fp16")
    torch.manual_seed(SEED)
    line.before_model()
    model = build_model(job.sizes).to(job.device).train()
    optimizer = _adamw(model)
    forward = torch.compile(model) if compiled else model
    line.training_starts()
    autocast = torch.autocast(job.device, dtype=torch.bfloat16, enabled=job.precision == "bf16")
    for parts in _steps(job, 0):
        loss = torch.zeros((), device=job.device)
        for batch in parts:
            on_device = {name: tensor.to(job.device, non_blocking=True) for name, tensor in batch.items()}
            with autocast:
                part = forward(**on_device).loss / len(parts)
            part.backward()
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        line.step_ends()
    line.end(float(loss))


def transformers_trainer(job: BenchJob, line: BenchConnection, *, compiled: bool = False) -> None:
    """Run transformers' Trainer with its best options: a 16-bit type, a fused optimizer, prefetching loaders.

    Raises:
        PeerUnavailable: there are several workers.
    """
    import tempfile

    import torch
    import transformers

    if job.workers > 1:
        raise PeerUnavailable("only compared on one worker")

    class Watch(transformers.TrainerCallback):
        def on_train_begin(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: object
        ) -> None:
            line.training_starts()

        def on_step_end(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: object
        ) -> None:
            line.step_ends()

    class InOurOrder(transformers.Trainer):
        losses: list[Tensor]

        def get_train_dataloader(self) -> DataLoader[MicroBatchOfTokens]:
            loader: DataLoader[MicroBatchOfTokens] = self.accelerator.prepare(_loader(job, 0))
            return loader

        def training_step(
            self, model: nn.Module, inputs: MicroBatchOfTokens, num_items_in_batch: Tensor | int | None = None
        ) -> Tensor:
            part = super().training_step(model, inputs, num_items_in_batch)
            self.losses = [*self.losses, part][-job.accumulation :]
            return part

    torch.manual_seed(SEED)
    line.before_model()
    model = build_model(job.sizes)
    with tempfile.TemporaryDirectory(prefix="rapidformer-bench-") as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=job.sizes.micro_batch,
            gradient_accumulation_steps=job.accumulation,
            max_steps=job.total_steps,
            max_grad_norm=CLIP,
            learning_rate=LR,
            lr_scheduler_type="constant",
            use_cpu=job.device == "cpu",
            bf16=job.precision == "bf16",
            fp16=job.precision == "fp16",
            torch_compile=compiled,
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
        )
        optimizer, data = _adamw(model.to(job.device)), RandomTokens(job)
        trainer = InOurOrder(model, arguments, train_dataset=data, optimizers=(optimizer, None), callbacks=[Watch()])
        trainer.losses = []
        trainer.train()
        line.end(float(sum(trainer.losses)))


def _steps(job: BenchJob, rank: int) -> Iterator[list[MicroBatchOfTokens]]:
    """Yield the micro batches of one rank for each step."""
    batches = iter(_loader(job, rank))
    while parts := list(islice(batches, job.accumulation)):
        yield parts


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return a fused AdamW with this library's parameter groups: no weight decay for biases and norms."""
    import torch

    decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups: list[dict[str, object]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)


def _loader(job: BenchJob, rank: int | None = None) -> DataLoader[MicroBatchOfTokens]:
    """Return a loader of micro batches in the order of this library, for one rank or for all ranks in turn."""
    from torch.utils.data import DataLoader, Subset

    from rapidformer_templates.data.order import SampleOrder

    tokens = RandomTokens(job)
    order = SampleOrder(len(tokens), job.global_batch, SEED, by_epochs=False)
    samples = [sample for step in range(job.total_steps) for sample in order.step(step)[0].tolist()]
    own_samples = samples if rank is None else samples[rank :: job.workers]
    # On a GPU, two processes draw the samples into pinned memory, as in this library.
    on_cpu = job.device == "cpu"
    return DataLoader(
        Subset(tokens, own_samples),  # type: ignore[arg-type]
        batch_size=job.sizes.micro_batch,
        num_workers=0 if on_cpu else 2,
        pin_memory=not on_cpu,
    )


PEERS: dict[str, Callable[[BenchJob, BenchConnection], None]] = {
    "accelerate DDP": accelerate_ddp,
    "accelerate FSDP": accelerate_fsdp,
    "torch fully_shard": torch_fully_shard,
    "accelerate ZeRO-1": partial(accelerate_zero, zero_stage=1),
    "accelerate ZeRO-2": partial(accelerate_zero, zero_stage=2),
    "accelerate ZeRO-3": partial(accelerate_zero, zero_stage=3),
    HAND_WRITTEN: plain_pytorch,
    f"{HAND_WRITTEN}, compiled": partial(plain_pytorch, compiled=True),
    HF_TRAINER: transformers_trainer,
    f"{HF_TRAINER}, mixed": transformers_trainer,
    f"{HF_TRAINER}, compiled": partial(transformers_trainer, compiled=True),
}
