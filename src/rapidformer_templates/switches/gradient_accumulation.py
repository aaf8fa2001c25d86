"""Gradient accumulation: several micro batches an optimizer step, computed from the two batch sizes."""

from __future__ import annotations

from dataclasses import dataclass

from rapidformer_templates.switches._changes import add, replace
from rapidformer_templates.switches._switch import Example, Finding, Request, Rule, Stage, Switch


@dataclass(frozen=True)
class GradientAccumulationFlags:
    """Acceleration"""  # it has no flag of its own


def _only_by_iterations(request: Request) -> list[Finding]:
    sizes = request.sizes
    if request.config.training.epochs is None:
        return []
    per_worker, rest = divmod(sizes.global_batch, sizes.data)
    same_batch = [] if rest else [replace({"micro_batch_size": per_worker}, "the same global batch in one forward")]
    return [
        Finding(
            f"gradient accumulation ({sizes.accumulation} micro batches a step) needs --train-iters, not --epochs",
            request.asked("micro_batch_size", "global_batch_size", "epochs"),
            changes=(
                add({"train_iters": 1000, "epochs": None}, "in place of --epochs; choose your own number"),
                *same_batch,
                replace({"global_batch_size": sizes.micro_batch * sizes.data}, "no accumulation"),
            ),
        )
    ]


SWITCH = Switch(
    name="gradient-accumulation",
    summary="Several micro batches an optimizer step: global batch / (micro batch × data-parallel size).",
    source="[R, S]",
    stage=Stage.DATA,
    options=GradientAccumulationFlags,
    active=lambda options, sizes: sizes.accumulation > 1,
    on={"global_batch_size": 16},
    off={"global_batch_size": None},
    receipt=("micro_steps",),
    rules=(
        Rule(
            "RF006",
            "Gradient accumulation only in iteration-based runs.",
            "an epoch need not hold a whole number of accumulated steps",
            "[R]",
            _only_by_iterations,
            Example("--epochs 3 --micro-batch-size 4 --global-batch-size 16"),
        ),
    ),
)
