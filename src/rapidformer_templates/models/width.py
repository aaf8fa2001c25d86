"""The width of a model, which determines bucket sizes."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from rapidformer_templates.models.blocks import shape_of


def width_of(model: nn.Module) -> int:
    """Return the width of ``model`` from its configuration, or else from its matrices.

    A transformers configuration has it as ``hidden_size``, as the largest of ``hidden_sizes``, or in its
    ``text_config`` [D]. For another model each matrix adds its number of elements to the counts of both of its
    dimensions. The size with the highest count is the width. A tie goes to the smaller size. This works because each
    matrix of a transformer maps from or to the width. A model without a matrix has the width 1.
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
    """Return the width from a configuration, or None."""
    sizes = [getattr(config, "hidden_size", None), *(getattr(config, "hidden_sizes", None) or ())]
    return max((size for size in sizes if isinstance(size, int) and size > 0), default=None)
