"""The order of a run's training samples, from its flags and its data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rapidformer_templates.data.collate import check_pads_to_shape
from rapidformer_templates.data.loader import sample_lengths
from rapidformer_templates.data.order import Order, SampleOrder
from rapidformer_templates.data.shapes import choose_shapes
from rapidformer_templates.errors import ConfigError, DataError
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.run.console import say
from rapidformer_templates.switches.dynamic_shape import declaration as dynamic_shape
from rapidformer_templates.switches.dynamic_shape.batches import DynamicOrder
from rapidformer_templates.system.workers import Workers

if TYPE_CHECKING:
    from rapidformer_templates.run.template import Template


def build_order(template: Template, samples: Any, workers: Workers) -> Order:
    """The order of the training samples.

    Raises:
        ConfigError: a flag asks for an order where the samples have one of their own.
        DataError: the samples cannot be batched by length.
    """
    training, group = template.config.training, template.config.data.group_by_length
    dynamic = "dynamic-shape" in template.plan.switches
    in_order = getattr(samples, "in_order", False)
    if (group or dynamic) and in_order:
        flag = "data_iterator" if dynamic else "group_by_length"
        raise ConfigError(
            "these samples come in an order of their own",
            where=f"{spelling(flag)} ({template.config.origin(flag)})",
            hint="leave it out",
        )
    if dynamic:
        return _dynamic_order(template, samples, workers)
    if group is None:
        group = training.fine_tunes and not template.config.data.pack_sequences  # packed rows have one length
    return SampleOrder(
        len(samples),
        template.plan.sizes.global_batch,
        training.seed,
        by_epochs=training.epochs is not None,
        lengths=sample_lengths(samples, template.data, training=True) if group and not in_order else None,
        in_order=in_order,
        identity=getattr(samples, "identity", None),
    )


def _dynamic_order(template: Template, samples: Any, workers: Workers) -> DynamicOrder:
    config, sizes = template.config, template.plan.sizes
    check_pads_to_shape(template.data.collate)
    lengths = sample_lengths(samples, template.data, training=True)
    if lengths is None or len(lengths) != len(samples):
        count = "no" if lengths is None else f"{len(lengths):,}"
        raise DataError(
            f"there are {count} lengths for {len(samples):,} training samples",
            where="--data-iterator dynamic-shape",
            hint="give the length of each in Data.lengths: build_data()",
        )
    options = config.switches["dynamic-shape"]
    longest = template.task.seq_length if template.uses_task else config.model.seq_length or int(lengths.max())
    budget = options.tokens_per_batch or sizes.micro_batch * longest
    shapes = choose_shapes(lengths, budget, dynamic_shape.max_shapes(options), dynamic_shape.multiple(options))
    order = DynamicOrder(
        lengths,
        shapes,
        sizes.data * sizes.accumulation,
        config.training.seed,
        by_epochs=config.training.epochs is not None,
    )
    shown = ", ".join(f"{shape.rows} × {shape.length}" for shape in shapes[:16]) + (", …" if len(shapes) > 16 else "")
    say(workers, f"shapes     {len(shapes)} (rows × tokens): {shown}; {order.fill:.1%} of the tokens are not padding")
    return order
