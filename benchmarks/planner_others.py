"""Memory estimates of other tools for a layout, for the table of ``benchmarks planner``."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from typing import Any

from rapidformer_templates.switches.auto_strategy.layouts import Layout
from rapidformer_templates.switches.auto_strategy.model_shapes import ModelShapes

BYTES_A_PARAMETER = 16
"""Bytes of the fp32 weight, gradient and AdamW moments of a parameter."""


def estimates(shapes: ModelShapes, layout: Layout, width: int, heads: int) -> dict[str, float]:
    """Return the bytes of a worker by estimator. Estimators that do not support the layout are left out.

    Args:
        width: Hidden size.
        heads: Attention heads of a block.
    """
    found = {"megatron": _megatron(shapes, layout, width, heads)}
    by_deepspeed = layout.partitioning.startswith("zero") and layout.tensor * layout.pipeline == 1
    if by_deepspeed and importlib.util.find_spec("deepspeed") is not None:
        found["deepspeed"] = _deepspeed(shapes, layout)
    return found


def _megatron(shapes: ModelShapes, layout: Layout, width: int, heads: int) -> float:
    """Return the model states, and 16-bit activations by equations 1 to 5 of Korthikanti et al., 2022."""
    count = sum(facts.count for facts in shapes.parameters.values())
    samples, tokens = shapes.batch(layout.micro_batch)["input_ids"].shape
    whole, t = samples * tokens * width, layout.tensor
    attention = 5 * heads * tokens / width
    a_block: float
    if layout.recompute != "none":
        a_block = 2.0 * whole
    elif layout.sequence_parallel:
        a_block = whole * (34 + attention) / t
    else:
        a_block = whole * (10 + 24 / t + attention / t)
    in_flight = min(layout.pipeline, layout.accumulation)
    blocks = sum(shapes.depths.values()) / layout.pipeline
    return BYTES_A_PARAMETER * count / (t * layout.pipeline) + a_block * blocks * in_flight


def _deepspeed(shapes: ModelShapes, layout: Layout) -> float:
    """Return the device memory of the model states by DeepSpeed's own estimators, without their factor for buffers."""
    with contextlib.redirect_stdout(io.StringIO()):
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    count = sum(facts.count for facts in shapes.parameters.values())
    common: dict[str, Any] = {"num_gpus_per_node": layout.data, "num_nodes": 1, "cpu_offload": False}
    if layout.partitioning == "zero-3":
        largest = max(facts.count for facts in shapes.parameters.values())
        needs = estimate_zero3_model_states_mem_needs(
            count, largest, cpu_offload_params=False, zero_init=True, **common
        )
    else:
        needs = estimate_zero2_model_states_mem_needs(count, **common)
    return float(needs[1])  # the tuple is (host, device)
