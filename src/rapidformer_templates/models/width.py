"""How wide a model is: what the sizes of buckets follow."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from rapidformer_templates.models.blocks import shape_of


def width_of(model: nn.Module) -> int:
    """The width of ``model``: what its configuration says, else what its matrices do.

    A transformers configuration has it as ``hidden_size``, as the largest of ``hidden_sizes``, or in its
    ``text_config`` [D]. Of another model it is the size that most elements of its matrices have in one of their
    dimensions, the smaller one of two: each matrix of a transformer leads from the width or to it. A model without a
    matrix has the width 1.
    """
    config = getattr(model, "config", None)
    stated = _stated(config) or _stated(getattr(config, "text_config", None))
    if stated:
        return stated
    elements: Counter[int] = Counter()
    for rows, columns in (shape for shape in map(shape_of, model.parameters()) if len(shape) == 2):
        for size in {rows, columns}:
            elements[size] += rows * columns
    return max(elements, key=lambda size: (elements[size], -size), default=1)


def _stated(config: Any) -> int | None:
    """What a configuration says, if it does."""
    sizes = [getattr(config, "hidden_size", None), *(getattr(config, "hidden_sizes", None) or ())]
    return max((size for size in sizes if isinstance(size, int) and size > 0), default=None)
