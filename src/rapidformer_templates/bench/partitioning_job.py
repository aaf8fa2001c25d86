"""One run of ``bench partitioning``: a solution of ours or of a peer, in worker processes of its own.

``python -m rapidformer_templates.bench.partitioning_job JSON`` starts the workers. Each of them connects to the
benchmark, waits for its word before every optimizer step, and tells how many seconds the step took; at the end it
tells what it held and its peak memory.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from rapidformer_templates import launch
from rapidformer_templates.bench.partitioning_solutions import SCALES, SOLUTIONS, Scale
from rapidformer_templates.errors import RapidformerError

LR, WEIGHT_DECAY, CLIP, SEED = 1e-4, 0.01, 1.0, 1234


@dataclass(frozen=True)
class Job:
    """What the workers of one run are to do.

    Attributes:
        solution: a key of ``SOLUTIONS``.
        peer: a key of :data:`PEERS`, or None for this library.
        scale: a key of ``SCALES``.
        workers: how many.
        steps: optimizer steps, those of the warm-up among them.
        device: ``cpu`` or ``cuda``.
        mixed: whether to compute in the device's narrow type.
        address: of the benchmark's socket.
        nvme: folder for what is offloaded to a disk.
    """

    solution: str
    peer: str | None
    scale: str
    workers: int
    steps: int
    device: str
    mixed: bool
    address: str
    nvme: str

    @property
    def sizes(self) -> Scale:
        return SCALES[self.scale]

    @property
    def global_batch(self) -> int:
        """Samples of a step; the micro batch is one sample."""
        return self.workers * self.sizes.accumulation


class Absent(RapidformerError):
    """The peer has no such thing here: a fact for the table, and not a failure."""


class Line:
    """A worker's line to the benchmark; it takes the time between the ends of two steps.

    Attributes:
        before_mb: memory of the process before it has a model: the interpreter and its libraries.
        setup_mb: peak memory until the first step.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._connection = Client(job.address)
        self._connection.send({"rank": int(os.environ["RANK"]), "pid": os.getpid()})
        self._mark = 0.0
        self._left = job.steps
        self.before_mb = self.setup_mb = 0.0

    def model_comes(self) -> None:
        """To be called before the model is built."""
        self.before_mb = resident_mb() if self._job.device == "cpu" else 0.0

    def training_starts(self) -> None:
        self.setup_mb = peak_mb(self._job.device)
        self._wait()

    def step_ends(self) -> None:
        if self._job.device == "cuda":
            import torch

            torch.cuda.synchronize()
        self._connection.send({"seconds": time.perf_counter() - self._mark})
        self._left -= 1
        if self._left:
            self._wait()

    def end(self, loss: float, receipts: dict[str, Any] | None) -> None:
        """Tell what came of it: the loss of the last step, and the receipts of a run of ours."""
        memory = {"peak_mb": peak_mb(self._job.device), "before_mb": self.before_mb, "setup_mb": self.setup_mb}
        held = (receipts or {}).get("held_bytes_by_rank")
        self._connection.send({"figures": {"loss": loss, **memory, "held": held}})

    def absent(self, why: str) -> None:
        self._connection.send({"absent": why})

    def _wait(self) -> None:
        self._connection.recv()  # EOFError: the benchmark is gone, and so are we
        self._mark = time.perf_counter()


def peak_mb(device: str) -> float:
    """Greatest memory so far, MB (10^6 bytes): allocated on the GPU, or resident on a CPU."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 1e6
    return _of_status("VmHWM")  # ru_maxrss would begin with the size of the process that started this one


def resident_mb() -> float:
    """Memory that this process takes now, MB."""
    return _of_status("VmRSS")


def _of_status(field: str) -> float:
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(rf"^{field}:\s*(\d+) kB", status.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return int(found[1]) * 1024 / 1e6
    import torch

    from rapidformer_templates.meter import peak_memory_mb

    return peak_memory_mb(torch.device("cpu"))


def build_model(scale: Scale) -> Any:
    """A GPT-2 without dropout, so that all solutions can be seen to compute the same loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_embd": scale.hidden, "n_layer": scale.layers, "n_head": scale.heads}
    dropouts: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens: dict[str, Any] = {"vocab_size": scale.vocabulary, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_positions=scale.length, use_cache=False, **sizes, **dropouts, **tokens))


class RandomTokens:
    """Samples that are drawn when they are asked for; each is the same one every time."""

    def __init__(self, job: Job) -> None:
        self._sizes = job.sizes
        self._count = job.steps * job.global_batch

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        if not 0 <= index < self._count:
            raise IndexError(index)
        draw = torch.Generator().manual_seed(SEED + index)
        tokens = torch.randint(self._sizes.vocabulary, (self._sizes.length,), generator=draw)
        return {"input_ids": tokens, "labels": tokens}


def ours(job: Job, line: Line) -> None:
    """The solution's flags, as a user gives them; what is added only looks on."""
    from rapidformer_templates import Data, Trainer

    class Measured(Trainer):
        def build_data(self) -> Data:
            return Data(train=RandomTokens(job))  # type: ignore[arg-type]

        def build_model(self) -> Any:
            line.model_comes()
            return build_model(job.sizes)

        def on_train_start(self) -> None:
            line.training_starts()

        def on_step_end(self, step: int, result: Any) -> None:
            self.loss = result.loss
            line.step_ends()

    template = Measured(flags_of(job))
    summary = template.fit()
    line.end(float(template.loss), summary["receipts"])


def flags_of(job: Job) -> list[str]:
    """The command line of a run of ours."""
    own = list(SOLUTIONS[job.solution].flags)
    if own[-1:] == ["--nvme-path"]:
        own.append(job.nvme)
    if job.mixed and "--mixed-precision" not in own:
        own.append("--mixed-precision")
    flags = [
        *("--device", job.device, "--micro-batch-size", 1, "--global-batch-size", job.global_batch),
        *("--train-iters", job.steps, "--lr", LR, "--lr-decay-style", "constant", "--weight-decay", WEIGHT_DECAY),
        *("--clip-grad", CLIP, "--optimizer", "adamw_torch_fused", "--seed", SEED, *own),
    ]
    return [str(flag) for flag in flags]


# The peers: the loops of their own documentation.


def accelerate_ddp(job: Job, line: Line) -> None:
    from accelerate import Accelerator

    _accelerate(job, line, Accelerator(**_options(job)))


def accelerate_fsdp(job: Job, line: Line) -> None:
    """FSDP2, a block at a time.

    Raises:
        Absent: on a CPU.
    """
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    blocks = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"]
    )
    accelerator = Accelerator(fsdp_plugin=blocks, **_options(job))
    if accelerator.distributed_type != DistributedType.FSDP:
        raise Absent(f"accelerate makes {accelerator.distributed_type.value} of its FSDP plugin on this device")
    _accelerate(job, line, accelerator)


def accelerate_zero(job: Job, line: Line, stage: int) -> None:
    os.environ.setdefault("DS_ACCELERATOR", job.device)
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    from rapidformer_templates.deepspeed_parts import leave_out_shm_comm

    if job.device == "cpu":
        leave_out_shm_comm()  # half a minute of compiling for what training does not use, here as in ours
    plugin = DeepSpeedPlugin(
        zero_stage=stage, gradient_accumulation_steps=job.sizes.accumulation, gradient_clipping=CLIP
    )
    options = _options(job)
    if job.device == "cpu":
        # With cpu=True it would leave DeepSpeed out, and without a backend the other workers.
        options |= {"cpu": False, "kwargs_handlers": [InitProcessGroupKwargs(backend="gloo")]}
    _accelerate(job, line, Accelerator(deepspeed_plugin=plugin, **options))


def _options(job: Job) -> dict[str, Any]:
    precision: dict[str, Any] = {"mixed_precision": "bf16"} if job.mixed else {}
    return precision | {"cpu": job.device == "cpu", "gradient_accumulation_steps": job.sizes.accumulation}


def _accelerate(job: Job, line: Line, accelerator: Any) -> None:
    import torch

    if accelerator.num_processes != job.workers:
        raise Absent(f"accelerate runs {accelerator.num_processes} worker of {job.workers} on this device")

    torch.manual_seed(SEED)
    line.model_comes()
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
    line.end(float(accelerator.reduce(last, "mean")) / job.sizes.accumulation, None)
    accelerator.end_training()


def torch_fully_shard(job: Job, line: Line) -> None:
    """A plain loop around torch's ``fully_shard``, as its tutorial has it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from rapidformer_templates.workers import join

    with join(job.device) as workers:
        torch.manual_seed(SEED)
        line.model_comes()
        model = build_model(job.sizes).to(workers.device)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if job.mixed else MixedPrecisionPolicy()
        for block in model.transformer.h:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = _adamw(model)
        model.train()
        line.training_starts()
        for parts in _steps(job, workers.rank):
            loss = torch.zeros((), device=workers.device)
            for i, batch in enumerate(parts):
                model.set_requires_gradient_sync(i == len(parts) - 1)
                part = model(**{name: tensor.to(workers.device) for name, tensor in batch.items()}).loss / len(parts)
                part.backward()
                loss = loss + part.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            line.step_ends()
        dist.all_reduce(loss)
        line.end(float(loss) / workers.world, None)


def _steps(job: Job, rank: int) -> Iterator[list[dict[str, Any]]]:
    """The micro batches of one rank, step by step."""
    batches = list(_loader(job, rank))
    for first in range(0, len(batches), job.sizes.accumulation):
        yield batches[first : first + job.sizes.accumulation]


def _adamw(model: Any) -> Any:
    """Fused AdamW with the groups of this library: biases and norms do not decay."""
    import torch

    groups: dict[bool, list[Any]] = {True: [], False: []}
    for parameter in model.parameters():
        groups[parameter.ndim >= 2].append(parameter)
    options: list[dict[str, Any]] = [{"params": groups[True]}, {"params": groups[False], "weight_decay": 0.0}]
    return torch.optim.AdamW(options, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)


def _loader(job: Job, rank: int | None = None) -> Any:
    """Micro batches in the order of this library, of all ranks one after another or of one of them."""
    from torch.utils.data import DataLoader, Subset

    from rapidformer_templates.data.order import SampleOrder

    tokens = RandomTokens(job)
    order = SampleOrder(len(tokens), job.global_batch, SEED, by_epochs=False)
    samples = [sample for step in range(job.steps) for sample in order.step(step)[0].tolist()]
    mine = samples if rank is None else samples[rank :: job.workers]
    return DataLoader(Subset(tokens, mine), batch_size=1)  # type: ignore[arg-type]


PEERS: dict[str, Callable[[Job, Line], None]] = {
    "accelerate DDP": accelerate_ddp,
    "accelerate FSDP": accelerate_fsdp,
    "torch fully_shard": torch_fully_shard,
    "accelerate ZeRO-1": partial(accelerate_zero, stage=1),
    "accelerate ZeRO-2": partial(accelerate_zero, stage=2),
    "accelerate ZeRO-3": partial(accelerate_zero, stage=3),
}


def work(job: Job) -> None:
    """One worker's part."""
    line = Line(job)
    try:
        (PEERS[job.peer] if job.peer else ours)(job, line)
    except Absent as error:
        line.absent(error.message)


def main() -> int:
    job = Job(**json.loads(sys.argv[1]))
    if launch.is_worker():
        launch.report_errors(lambda: work(job))
        return 0
    try:
        launch.run_workers(launch.this_command(), job.workers)
    except RapidformerError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_status
    return 0


def command(job: Job) -> list[str]:
    """What starts a run."""
    return [sys.executable, "-m", __name__, json.dumps(dataclasses.asdict(job))]


if __name__ == "__main__":
    sys.exit(main())
