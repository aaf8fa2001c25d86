"""One run of a table: a solution of this library or of a peer, in separate worker processes.

``python -m rapidformer_templates.commands.bench.job JSON`` starts the workers. Each worker connects to the benchmark
and waits for a message before every turn of steps. After a turn it reports the seconds per step. At the end it reports
the bytes that it held and its peak memory.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from rapidformer_templates.commands.bench.job_peers import PEERS
from rapidformer_templates.commands.bench.tables import RUN, TABLES
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
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.system import launch
from rapidformer_templates.system.processes import wait_at_exit

if TYPE_CHECKING:
    from torch import nn

    from rapidformer_templates.data.types import Batch
    from rapidformer_templates.engines.contract import StepResult


def run_this_library(job: BenchJob, line: BenchConnection) -> None:
    """Run a solution of this library with its flags, as a user would give them. The added hooks only measure."""
    from rapidformer_templates.data.types import Data
    from rapidformer_templates.trainer import Trainer

    class MeasuredScript(Trainer):
        def build_data(self) -> Data:
            return Data(train=RandomTokens(job))

        def build_model(self) -> nn.Module:
            line.before_model()
            return build_model(job.sizes)

        def on_train_start(self) -> None:
            line.training_starts()

        def on_step_end(self, step: int, result: StepResult) -> None:
            self.loss = result.loss
            line.step_ends()

    template = MeasuredScript(flags_of(job))
    summary = template.fit()
    line.end(float(template.loss), summary["receipts"].get("held_bytes_by_rank"))


def flags_of(job: BenchJob) -> list[str]:
    """Return the command line for a run of this library."""
    words = list(TABLES[job.table].solutions[job.solution].flags)
    if words[-1:] == ["--nvme-path"]:
        words.append(job.nvme)
    if job.precision != "fp32":
        words += ["--mixed-precision", job.precision]
    flags = [
        *("--device", job.device, "--micro-batch-size", job.sizes.micro_batch),
        *("--global-batch-size", job.global_batch, "--train-iters", job.total_steps, "--log-interval", job.total_steps),
        *("--lr", LR, "--lr-decay-style", "constant", "--weight-decay", WEIGHT_DECAY),
        *("--clip-grad", CLIP, "--optimizer", "adamw_torch_fused", "--seed", SEED, "--no-save", *words),
    ]
    return [str(flag) for flag in flags]


def run_user_command(job: BenchJob, line: BenchConnection) -> None:
    """Run the user's training command with its model and data, for the number of steps that are measured.

    Its model FLOPs are counted for the shapes of the first batch.
    """
    from rapidformer_templates.commands.bench.flops import training_flops_of
    from rapidformer_templates.commands.train import template_of
    from rapidformer_templates.data.targets import samples_in

    class MeasuredCommand(template_of(job.words)):  # type: ignore[misc]
        flops: float | None = None

        def build_model(self) -> nn.Module:
            line.before_model()
            model: nn.Module = super().build_model()
            self.kind, self.settings = type(model), getattr(model, "config", None)
            return model

        def compute_loss(self, model: nn.Module, batch: Batch) -> Any:
            if self.flops is None:
                # Counted before the forward of the first warm-up step, for architectures of transformers only.
                self.flops = training_flops_of(self.kind, self.settings, batch) / max(samples_in(batch), 1)
            return super().compute_loss(model, batch)

        def on_train_start(self) -> None:
            line.training_starts()

        def on_step_end(self, step: int, result: StepResult) -> None:
            self.loss = result.loss
            line.step_ends()

    flags = ["--train-iters", str(job.total_steps), "--log-interval", str(job.total_steps), "--no-save"]
    template = MeasuredCommand([*job.words, *flags])
    summary = template.fit()
    sizes = template.plan.sizes
    line.end(
        float(template.loss),
        summary["receipts"].get("held_bytes_by_rank"),
        flops=(template.flops or 0.0) * sizes.global_batch,
        global_batch=sizes.global_batch,
        parameters=summary["parameters"],
        precision=template.plan.precision,
        switches=list(template.plan.switches),
    )


def run_job(job: BenchJob) -> None:
    """Run the job in one worker."""
    line = BenchConnection(job)
    try:
        (PEERS[job.peer] if job.peer else run_user_command if job.table == RUN else run_this_library)(job, line)
    except PeerUnavailable as error:
        line.absent(error.message)


def main() -> int:
    job = BenchJob(**json.loads(sys.argv[1]))
    if launch.is_worker():
        wait_at_exit()  # a peer may create the process group itself
        launch.report_errors(lambda: run_job(job))
        return 0
    try:
        launch.run_workers(launch.program_command(), job.workers)
    except RapidformerError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_status
    return 0


def command(job: BenchJob) -> list[str]:
    """Return the command that starts a run."""
    return [sys.executable, "-m", __name__, json.dumps(dataclasses.asdict(job))]


if __name__ == "__main__":
    sys.exit(main())
