"""Compile the blocks of a model, each by itself: blocks of one kind share their graphs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from torch import nn

from rapidformer_templates.engines.model_building import Building
from rapidformer_templates.switches.torch_compile.receipt import CompileRecords

EVALUATION = 4
"""Graphs of a kind of block without gradients: one shape, any shape, and each of them with a single row."""
AUTOMATIC = 4 + EVALUATION
"""Graphs of a kind of block whose shapes are not known beforehand: the same in training."""


def compile_blocks(model: nn.Module, building: Building) -> nn.Module:
    """Compile the ``forward`` of each block with the backend of ``--torch-compile``.

    It is replaced on the instance: parameters keep their names, and the hooks of a sharding engine
    stay outside of the graphs. Graphs belong to the code of a ``forward``, not to a module, so that
    all blocks of a kind run the same ones. A model without blocks is compiled whole.

    The compiler starts empty, and makes at most ``EVALUATION`` + one graph a shape, or ``AUTOMATIC``
    graphs, of a kind of block; what it meets beyond that runs as it is, and the report tells.
    """
    plan = building.plan
    shapes = plan.engine_options["compile_shapes"]
    here = set(model.modules())  # the others are on other stages
    parts = [block for block in building.blocks.values() if block in here] or [model]
    kinds = len({type(part) for part in parts})
    torch.compiler.reset()
    # Blocks are small enough: DDP need not cut their graphs where its buckets end, which no checkpointed one survives.
    torch._dynamo.config.optimize_ddp = False
    # Checkpointed blocks of all kinds run one piece of code, and share its limit.
    torch._dynamo.config.recompile_limit = limit = kinds * (shapes + EVALUATION if shapes else AUTOMATIC)
    backend = building.options.torch_compile
    for part in parts:
        part.forward = Compiled(part.forward, backend, static=shapes > 0)
    vars(model)["compile_records"] = CompileRecords(backend, regions=len(parts), limit=limit)
    return model


class Compiled:
    """A forward that runs as compiled graphs; ``forward`` is what was compiled.

    Args:
        forward: a bound method, or an object that stands for one.
        backend: name of the compiler.
        static: a graph for each shape in training; otherwise one for all of them, from the second on.
    """

    def __init__(self, forward: Any, backend: str, *, static: bool) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self._training = torch.compile(forward, backend=backend, dynamic=False if static else None)
        # Evaluations pad as they like, whatever the shapes of training are.
        self._evaluating = torch.compile(forward, backend=backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self._training if torch.is_grad_enabled() else self._evaluating
        with _readable_collector():
            return compiled(*args, **kwargs)


@contextmanager
def _readable_collector() -> Iterator[None]:
    """While a graph is made or run, what transformers collects outputs in is a plain variable.

    Its hooks on parts of a block look for it in a ContextVar, which no graph can hold, unless the whole model is
    compiled. They are there once hidden states were asked for, and in a pipeline with several stages a worker.
    """
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    if getattr(collector, "compiling", True):  # compiled whole, or a version without
        yield
        return
    assert collector is not None
    collector.global_var, collector.compiling = collector.get(), True
    try:
        yield
    finally:
        collector.global_var, collector.compiling = None, False
