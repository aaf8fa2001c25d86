"""Builds the order of a run's training samples from its flags and its data, and counts the steps of the run."""

from __future__ import annotations

from rapidformer_templates.data.loader import sample_lengths
from rapidformer_templates.data.order import Order, SampleOrder
from rapidformer_templates.data.streaming.samples import StreamOrder
from rapidformer_templates.data.types import Endless, SampleSet
from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.flag_values import Epochs
from rapidformer_templates.planning.registry import REGISTRY, load_object
from rapidformer_templates.run.run import Run
from rapidformer_templates.system.terminal import say


def build_order(run: Run, samples: SampleSet | Endless) -> Order:
    """Return the order of the training samples.

    Raises:
        ConfigError: a flag requests an order, but the samples have a fixed one.
        DataError: the samples cannot be batched by length.
    """
    training, group = run.config.training, run.config.data.group_by_length
    ordering = next((switch for name in run.plan.switches if (switch := REGISTRY[name]).order), None)
    in_order = getattr(samples, "in_order", False)
    if (group or ordering) and in_order:
        flag = next(iter(ordering.on)) if ordering else "group_by_length"
        raise ConfigError(
            "these samples have their own order",
            where=f"{spelling(flag)} ({run.config.origin(flag)})",
            hint="leave it out",
        )
    if ordering and ordering.order:
        order, line = load_object(ordering.order)(run, samples)
        say(run.workers, line)
        return order
    if isinstance(samples, Endless):
        return StreamOrder(samples, run.plan.sizes.global_batch, training.seed)
    if group is None:
        group = training.fine_tunes and not run.config.data.pack_sequences  # packed rows all have the same length
    return SampleOrder(
        len(samples),
        run.plan.sizes.global_batch,
        training.seed,
        by_epochs=training.epochs is not None,
        lengths=sample_lengths(samples, run.data, training=True) if group and not in_order else None,
        in_order=in_order,
        identity=getattr(samples, "identity", None),
    )


def count_steps(run: Run) -> int:
    """Return the optimizer steps of the run. A length in epochs is counted here, because it needs the data.

    Raises:
        ConfigError: a flag is in epochs, but the samples are a stream.
    """
    training, per_epoch = run.config.training, run.order.steps_per_epoch
    if training.in_epochs and not per_epoch:
        name = training.in_epochs[0]
        raise ConfigError(
            "the training samples are a stream without a length, so an epoch has no number of steps",
            where=f"{spelling(name)} ({run.config.origin(name)})",
            hint=f"give {'--train-iters' if name == 'epochs' else 'it'} as a number of steps",
        )
    if isinstance(training.train_iters, Epochs):
        steps = training.train_iters.steps(per_epoch)
        say(run.workers, f"note       --train-iters {training.train_iters}: {steps:,} steps, {per_epoch:,} per epoch")
        return steps
    return training.train_iters or per_epoch * (training.epochs or 1)
