"""One training job in this library and in its peers, each used as its own documentation shows.

Everything else is the same: the samples and their order, the parameter groups of a fused AdamW, a linear schedule,
clipping by the global norm. Each loop calls its callback with the loss of a step, so a loop that leaves something out
is found. A loop returns its memory in MB.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import torch
import transformers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Subset, default_collate

from benchmarks.models import callbacks, trainer_arguments
from benchmarks.workers import StepDone
from rapidformer_templates.commands.bench.models import BenchModel, Tokens
from rapidformer_templates.data.order import SampleOrder
from rapidformer_templates.data.types import Data
from rapidformer_templates.engines.contract import StepResult
from rapidformer_templates.engines.recipe import undecayed
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.models.blocks import find_blocks
from rapidformer_templates.run.performance import peak_memory_mb
from rapidformer_templates.system.process_state import resident_bytes
from rapidformer_templates.system.workers import join
from rapidformer_templates.trainer import Trainer

LR, WEIGHT_DECAY, CLIP, SEED, SAMPLES = 1e-4, 0.01, 1.0, 1234, 256

Result = dict[str, Any]


class Unavailable(RapidformerError):
    """A library does not offer the job here."""


@dataclass(frozen=True)
class Job:
    """A training job.

    Attributes:
        steps: Optimizer steps of the whole run.
        flags: Flags of this library that turn the solution on.
        workers: Worker processes.
        copies: Copies of the model. Several workers may share one.
        accumulation: Micro batches that each copy accumulates per step.
        device: ``cpu``, or torch's name of the accelerator.
        precision: ``fp32``, or the 16-bit type of the computation.
    """

    model: BenchModel
    steps: int
    flags: tuple[str, ...] = ()
    workers: int = 1
    copies: int = 1
    accumulation: int = 1
    device: str = "cpu"
    precision: str = "fp32"

    @property
    def global_batch(self) -> int:
        """Samples per step."""
        return self.copies * self.model.micro_batch * self.accumulation

    @property
    def words(self) -> list[str]:
        """The command line for this library."""
        sizes = f"--micro-batch-size {self.model.micro_batch} --global-batch-size {self.global_batch}"
        length = f"--train-iters {self.steps} --log-interval {self.steps} --no-save --device {self.device}"
        training = f"--lr {LR} --weight-decay {WEIGHT_DECAY} --clip-grad {CLIP} --seed {SEED}"
        narrow = f"--mixed-precision {self.precision}" if self.precision != "fp32" else ""
        return [*f"{sizes} {length} {training} --optimizer adamw_torch_fused {narrow}".split(), *self.flags]

    def samples(self) -> list[Tokens]:
        return [self.model.sample(index) for index in range(SAMPLES)]

    def loader(self, rank: int | None = None) -> DataLoader[Tokens]:
        """Return a loader of micro batches in the order of this library, for one rank or for all ranks in turn."""
        order = SampleOrder(SAMPLES, self.global_batch, SEED, by_epochs=False)
        samples = [sample for step in range(self.steps) for sample in order.step(step)[0].tolist()]
        own = samples if rank is None else samples[rank :: self.copies]
        # On a GPU, two processes copy the samples into pinned memory, as in this library.
        prefetched = {"num_workers": 0 if self.device == "cpu" else 2, "pin_memory": self.device != "cpu"}
        return DataLoader(Subset(self.samples(), own), self.model.micro_batch, **prefetched)  # type: ignore[arg-type]

    def steps_of(self, rank: int) -> Iterator[list[Tokens]]:
        """Yield the micro batches of one rank for each step."""
        batches = iter(self.loader(rank))
        while parts := list(islice(batches, self.accumulation)):
            yield parts

    def build(self) -> nn.Module:
        torch.manual_seed(SEED)
        return self.model.build().train()

    def optimizer(self, model: nn.Module) -> tuple[torch.optim.AdamW, LambdaLR]:
        """Return the optimizer and the schedule. Biases and norms have no weight decay."""
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in model.named_parameters():
            groups[not undecayed(name, parameter)].append(parameter)
        options: list[dict[str, Any]] = [{"params": groups[True]}, {"params": groups[False], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(options, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
        return optimizer, LambdaLR(optimizer, lambda step: 1 - step / self.steps)

    def narrow(self) -> Any:
        """Return the context in which a loop by hand computes in bf16."""
        if self.precision == "fp16":
            raise Unavailable("a loop by hand has no loss scale for fp16")
        return torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "bf16")


class Memory:
    """The memory of this process in MB: before the model, until the first step, and at the peak."""

    def __init__(self, job: Job) -> None:
        self.device = torch.device(job.device)
        self.before = resident_bytes("VmRSS") / 1e6 if job.device == "cpu" else 0.0

    def ready(self, step_done: StepDone) -> None:
        """End the setup. The next step is the first one."""
        self.setup = peak_memory_mb(self.device)
        step_done.begin()

    def result(self, **more: Any) -> Result:
        peak = peak_memory_mb(self.device)
        return {"before_mb": self.before, "setup_mb": self.setup, "peak_mb": peak, **more}


def ours(step_done: StepDone, job: Job) -> Result:
    """Train with the flags of a solution. The added hooks only measure."""
    memory: Memory

    class Measured(Trainer):
        def build_data(self) -> Data:
            return Data(train=job.samples(), collate=default_collate)

        def build_model(self) -> nn.Module:
            nonlocal memory
            memory = Memory(job)
            return job.model.build()

        def on_train_start(self) -> None:
            memory.ready(step_done)

        def on_step_end(self, step: int, result: StepResult) -> None:
            step_done(result.loss)

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        summary = Measured(job.words).fit()
    return memory.result(held=summary["receipts"].get("held_bytes_by_rank"))


def _train(
    step_done: StepDone,
    job: Job,
    forward: Callable[..., Any],
    optimizer: Any,
    scheduler: Any,
    *,
    device: torch.device,
    rank: int = 0,
    clip: Callable[[], Any],
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    before_part: Callable[[bool], None] = lambda is_last: None,
) -> None:
    """Run the loop of a library that leaves the loop to the user. ``backward`` and ``clip`` are the library's."""
    for parts in job.steps_of(rank):
        losses = []
        for number, batch in enumerate(parts, 1):
            before_part(number == len(parts))
            with job.narrow():
                loss = forward(**{name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}).loss
            loss = loss / len(parts) if len(parts) > 1 else loss
            backward(loss)
            losses.append(loss.detach())
        clip()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        step_done(losses[0] if len(losses) == 1 else torch.stack(losses).sum())


def plain(step_done: StepDone, job: Job, compiled: bool = False) -> Result:
    """Train with a loop for one device that is written by hand and follows torch's tuning guide."""
    if job.workers > 1:
        raise Unavailable("the loop by hand is for one worker")
    memory = Memory(job)
    model = job.build().to(job.device)
    optimizer, scheduler = job.optimizer(model)
    forward = torch.compile(model) if compiled else model
    memory.ready(step_done)
    clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()), CLIP)
    _train(step_done, job, forward, optimizer, scheduler, device=torch.device(job.device), clip=clip)
    return memory.result()


def torchtitan(step_done: StepDone, job: Job) -> Result:
    """Train a causal language model as torchtitan does on one device: compiled blocks and loss, cuDNN's attention."""
    if job.workers > 1 or job.model.kind not in ("gpt", "llama"):
        raise Unavailable("the loop is for a causal language model on one worker")
    memory = Memory(job)
    model = job.build().to(job.device)
    optimizer, scheduler = job.optimizer(model)
    for name in find_blocks(model):
        model.get_submodule(name).compile()
    head = cast(nn.Module, model.get_output_embeddings())  # type: ignore[operator]
    loss_of = torch.compile(lambda logits, labels: cross_entropy(logits.flatten(0, 1).float(), labels.flatten()))

    def forward(input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = head(model.base_model(input_ids=input_ids).last_hidden_state)  # type: ignore[operator]
        return SimpleNamespace(loss=loss_of(logits[:, :-1], labels[:, 1:]))

    memory.ready(step_done)
    clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()), CLIP)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        _train(step_done, job, forward, optimizer, scheduler, device=torch.device(job.device), clip=clip)
    return memory.result()


def torch_fully_shard(step_done: StepDone, job: Job) -> Result:
    """Train with torch's ``fully_shard``, as in its tutorial."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if job.precision == "fp16":
        raise Unavailable("a loop by hand has no loss scale for fp16")
    with join(job.device) as workers:
        memory = Memory(job)
        model = job.build().to(workers.device)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if job.precision == "bf16" else None)
        for block in model.get_submodule("transformer.h").children():
            fully_shard(block, mp_policy=policy)
        sharded = fully_shard(model, mp_policy=policy)
        memory.ready(step_done)
        _train(
            step_done, job, model, *job.optimizer(model), device=workers.device, rank=workers.rank,
            clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), CLIP),
            before_part=sharded.set_requires_gradient_sync,
        )  # fmt: skip
        return memory.result()


def torch_two_levels(step_done: StepDone, job: Job) -> Result:
    """Train with torch's tensor parallelism, and ``fully_shard`` over the copies, as in its tutorials."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    with join(job.device) as workers:
        memory, tensor = Memory(job), job.workers // job.copies
        mesh = workers.open_mesh((job.copies, tensor), ("data", "tensor"))
        model = job.build().to(workers.device)
        plan: dict[str, Any] = {f"model.layers.*.*.{name}": ColwiseParallel() for name in columns}
        plan |= {f"model.layers.*.*.{name}": RowwiseParallel() for name in rows}
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tensor"], plan)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if job.precision == "bf16" else None)
        for block in model.get_submodule("model.layers").children():
            fully_shard(block, mesh=mesh["data"], mp_policy=policy)
        sharded = fully_shard(model, mesh=mesh["data"], mp_policy=policy)
        optimizer, scheduler = job.optimizer(model)  # the norms, which are not divided, form the second group

        def clip() -> None:
            of_groups = [[p.grad for p in group["params"]] for group in optimizer.param_groups]
            norms = [cast(DTensor, nn.utils.get_total_norm(gradients)).full_tensor() for gradients in of_groups]
            for group in optimizer.param_groups:
                nn.utils.clip_grads_with_norm_(group["params"], CLIP, torch.stack(norms).norm())

        memory.ready(step_done)
        _train(
            step_done, job, model, optimizer, scheduler, device=workers.device, rank=workers.rank // tensor, clip=clip,
            before_part=sharded.set_requires_gradient_sync,
        )  # fmt: skip
        return memory.result()


def fabric(step_done: StepDone, job: Job) -> Result:
    """Train with Lightning Fabric on one CPU."""
    from lightning_fabric import Fabric

    memory, own = Memory(job), Fabric(accelerator="cpu", devices=1)
    plain_model = job.build()
    plain_optimizer, scheduler = job.optimizer(plain_model)
    model, optimizer = own.setup(plain_model, plain_optimizer)
    clip = partial(own.clip_gradients, model, optimizer, max_norm=CLIP)
    memory.ready(step_done)
    cpu = torch.device("cpu")
    _train(step_done, job, model, optimizer, scheduler, device=cpu, clip=clip, backward=own.backward)
    return memory.result()


def accelerate(step_done: StepDone, job: Job, sharding: str = "") -> Result:
    """Train with accelerate.

    Args:
        sharding: ``fsdp`` (FSDP2, which shards each block separately), a ZeRO stage of DeepSpeed, or "" for DDP.
    """
    os.environ.setdefault("DS_ACCELERATOR", job.device)
    from accelerate import Accelerator, DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin
    from accelerate import InitProcessGroupKwargs as Group

    from rapidformer_templates.switches.zero.compiled_parts import leave_out_shm_comm

    on_cpu, zero, fsdp = job.device == "cpu", None, None
    if sharding == "fsdp":
        fsdp = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"]
        )
    elif sharding:
        if on_cpu:
            leave_out_shm_comm()  # training does not use it, and it takes half a minute to compile
        zero = DeepSpeedPlugin(
            zero_stage=int(sharding), gradient_accumulation_steps=job.accumulation, gradient_clipping=CLIP
        )
    # With cpu=True, accelerate would ignore DeepSpeed. Without a backend, it would ignore the other workers.
    own = Accelerator(
        cpu=on_cpu and zero is None,
        kwargs_handlers=[Group(backend="gloo")] if on_cpu and zero else None,
        mixed_precision="no" if job.precision == "fp32" else job.precision,
        gradient_accumulation_steps=job.accumulation,
        fsdp_plugin=fsdp,
        deepspeed_plugin=zero,
    )
    if fsdp and own.distributed_type != DistributedType.FSDP:
        raise Unavailable(f"accelerate turns its FSDP plugin into {own.distributed_type.value} on this device")
    if own.num_processes != job.workers:
        raise Unavailable(f"accelerate runs {own.num_processes} worker of {job.workers} on this device")
    memory = Memory(job)
    plain_model = job.build()
    plain_optimizer, scheduler = job.optimizer(plain_model)  # a prepared schedule would step once per worker
    prepared: Any = own.prepare(plain_model, plain_optimizer, job.loader())
    model, optimizer, loader = prepared
    memory.ready(step_done)
    losses = []
    for batch in loader:
        with own.accumulate(model):
            loss = model(**batch).loss
            own.backward(loss)
            if own.sync_gradients:
                own.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        if own.sync_gradients:
            scheduler.step()
            step_done(losses[0] if len(losses) == 1 else torch.stack(losses).mean())
            losses = []
    own.end_training()
    return memory.result()


def hf_trainer(step_done: StepDone, job: Job, compiled: bool = False) -> Result:
    """Train with transformers' Trainer and its best options: a 16-bit type, a fused optimizer, prefetching loaders."""
    if job.workers > 1:
        raise Unavailable("only compared on one worker")
    losses: list[torch.Tensor] = []

    class InOurOrder(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(job.loader(0))

        def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
            losses.append(super().training_step(*arguments, **named))
            return losses[-1]

    def step_ends() -> None:
        step_done(losses[0] if len(losses) == 1 else torch.stack(losses).sum())
        losses.clear()

    memory = Memory(job)
    model = job.build().to(job.device)
    with tempfile.TemporaryDirectory(prefix="rapidformer-bench-") as folder:
        arguments = trainer_arguments(
            folder,
            use_cpu=job.device == "cpu",
            per_device_train_batch_size=job.model.micro_batch,
            gradient_accumulation_steps=job.accumulation,
            max_steps=job.steps,
            max_grad_norm=CLIP,
            bf16=job.precision == "bf16",
            fp16=job.precision == "fp16",
            torch_compile=compiled,
            logging_strategy="no",
            save_strategy="no",
        )
        watch = callbacks(on_train_begin=lambda: memory.ready(step_done), on_step_end=step_ends)
        optimizers = job.optimizer(model)
        InOurOrder(model, arguments, train_dataset=job.samples(), optimizers=optimizers, callbacks=watch).train()
    return memory.result()


HAND_WRITTEN, HF_TRAINER, TORCHTITAN = "plain PyTorch", "transformers' Trainer", "torchtitan's loop"

LOOPS: dict[str, Callable[..., Result]] = {
    "rapidformer_templates": ours,
    HAND_WRITTEN: plain,
    f"{HAND_WRITTEN} compiled": partial(plain, compiled=True),
    "Lightning Fabric": fabric,
    "accelerate": accelerate,
    "accelerate DDP": accelerate,
    "accelerate FSDP": partial(accelerate, sharding="fsdp"),
    TORCHTITAN: torchtitan,
    "torch fully_shard": torch_fully_shard,
    "torch parallelize_module + fully_shard": torch_two_levels,
    **{f"accelerate ZeRO-{stage}": partial(accelerate, sharding=str(stage)) for stage in (1, 2, 3)},
    HF_TRAINER: hf_trainer,
    f"{HF_TRAINER} compiled": partial(hf_trainer, compiled=True),
}


def train(step_done: StepDone, name: str, job: Job) -> Result:
    """Train a job with the loop of a library."""
    return LOOPS[name](step_done, job)
