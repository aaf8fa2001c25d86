"""Compile each block of a model separately. Blocks of one kind share their graphs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
import torch._dynamo
from torch import nn

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.errors import ModelError
from rapidformer_templates.switches.checkpoint_activations.transform import checkpointed_forward
from rapidformer_templates.switches.layout.random_streams import draws_random_numbers
from rapidformer_templates.switches.layout.sequence_shards import ContextSequenceShards
from rapidformer_templates.switches.layout.tensor_layers import (
    OnLocalParameters,
    local_parameter_layers,
    with_local_parameters,
)
from rapidformer_templates.switches.mixture_of_experts.layer import SparseFeedForward
from rapidformer_templates.switches.torch_compile.receipt import CompileRecords

EVALUATION = 4
"""Graphs per kind of block without gradients: one shape, any shape, and both of these with a single row."""
AUTOMATIC = 4 + EVALUATION
"""Graphs per kind of block if shapes are not known in advance: as many again for training."""


def compile_blocks(assembly: Assembly, building: Building) -> None:
    """Compile the ``forward`` of each block with the backend of ``--torch-compile``.

    It is replaced on the instance: parameters keep their names, and the hooks of a sharding engine
    stay outside of the graphs. Graphs belong to the code of a ``forward``, not to a module, so
    all blocks of a kind run the same ones. A model without blocks is compiled whole.

    The compiler starts empty. Per kind of block, it makes at most ``EVALUATION`` + one graph per shape, or
    ``AUTOMATIC`` graphs. Calls beyond that limit run uncompiled, and the report shows them.

    Raises:
        ModelError: products must be saved, and blocks do not become one graph.
    """
    model, plan = assembly.model, building.plan
    shapes = plan.engine_options.compile_shapes
    parts = list(assembly.blocks.values()) or [model]
    kinds = len({type(part) for part in parts})
    torch.compiler.reset()
    # Blocks are small, so DDP need not split their graphs at its bucket ends. Checkpointed graphs fail if split.
    torch._dynamo.config.optimize_ddp = False
    # Divided layers have their local parameters while they run. They leave no side effect that a recomputation needs.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    # Checkpointed blocks of all kinds run one piece of code and share its limit.
    torch._dynamo.config.recompile_limit = limit = kinds * (shapes + EVALUATION if shapes else AUTOMATIC)
    backend = building.options.torch_compile
    if "zero-3" in plan.switches:
        _gather_whole(parts, model)
    for part in parts:
        layers = local_parameter_layers(part)
        owner = _owner(part, breaks=_breaks(assembly, divided=bool(layers)))
        _share_code(part)
        owner.forward = Compiled(owner.forward, backend, static=shapes > 0, layers=layers)
    assembly.is_compiled = True
    assembly.record(CompileRecords(backend, regions=len(parts), limit=limit))


def _gather_whole(parts: Sequence[nn.Module], model: nn.Module) -> None:
    """Make DeepSpeed gather and free all parameters of a block in hooks on the block, outside of its graph.

    Raises:
        ModelError: there are no blocks, so that it would gather the whole model, or blocks are partly frozen.
    """
    from deepspeed.utils import set_z3_leaf_module

    if parts[0] is model:
        raise ModelError(
            "a compiled model is gathered block by block, and this one has no repeated blocks",
            where="--torch-compile with --zero-3-memory-optimization",
            hint="keep the blocks in an nn.ModuleList, or use --zero-2-memory-optimization",
        )
    if any(not parameter.requires_grad for part in parts for parameter in part.parameters()):
        raise ModelError(
            "blocks are partly frozen, and the backward of their graphs meets parameters that are not gathered",
            where="--torch-compile with --zero-3-memory-optimization",
            hint="use --zero-2-memory-optimization or --fsdp-memory-optimization, or leave --torch-compile out",
        )
    for part in parts:
        set_z3_leaf_module(part, True)


def _breaks(assembly: Assembly, *, divided: bool) -> bool:
    """Whether each block of a model has a part that no graph can contain: separate random streams, or a ring."""
    shards = assembly.find(ContextSequenceShards)
    rings = shards is not None and shards.kind == "ring"
    return rings or ((divided or shards is not None) and draws_random_numbers(assembly.model))


def _owner(part: nn.Module, *, breaks: bool) -> Any:
    """Return the object whose ``forward`` is compiled: a block, or the innermost forward that wrappers enclose.

    The innermost forward is for blocks that are known not to become one graph. If there is a graph break inside a
    recomputation, or inside code that cleans up after a forward, torch compiles none of it.

    Args:
        part: the block.
        breaks: whether every block of its model has a part that no graph can contain.

    Raises:
        ModelError: products must be saved, which torch supports only for whole graphs.
    """
    if not breaks and not any(isinstance(module, SparseFeedForward) for module in part.modules()):
        return part
    checkpointed = checkpointed_forward(part)
    if checkpointed is not None and checkpointed.keeps:
        raise ModelError(
            "experts, rings, and dropout in divided layers break graphs, and torch keeps products of whole graphs only",
            where="--recompute-granularity selective with --torch-compile",
            hint="use --recompute-granularity full",
        )
    owner: Any = part
    while hasattr(owner.forward, "forward"):
        owner = owner.forward
    return owner


def _share_code(part: nn.Module) -> None:
    """Let blocks share graphs even if their modules have replaced forwards, such as those of divided layers.

    A graph depends on the identity of an object in place of a ``forward``, but only on the code of a bound method.
    """
    for module in part.modules():
        forward = vars(module).get("forward")
        if module is not part and forward is not None and not isinstance(forward, (MethodType, FunctionType)):
            module.forward = forward.__call__


class Compiled:
    """A forward that runs as compiled graphs. ``forward`` is the original.

    Args:
        forward: a bound method, or an object in place of one.
        backend: name of the compiler.
        static: whether training has one graph per shape. Otherwise, from the second shape on, one graph has all shapes.
        layers: layers inside it that have local parts of parameters.
    """

    def __init__(
        self, forward: Callable[..., object], backend: str, *, static: bool, layers: Sequence[OnLocalParameters]
    ) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self._layers = layers
        self._training = torch.compile(forward, backend=backend, dynamic=False if static else None)
        # Evaluations pad in their own way, independently of the shapes of training.
        self._evaluating = torch.compile(forward, backend=backend)

    def __call__(self, *args: object, **kwargs: object) -> object:
        compiled = self._training if torch.is_grad_enabled() else self._evaluating
        with with_local_parameters(self._layers), _readable_collector():
            return compiled(*args, **kwargs)


@contextmanager
def _readable_collector() -> Iterator[None]:
    """Make transformers' output collector a plain variable while a graph is compiled or run.

    transformers' hooks on parts of a block look for it in a ContextVar, which no graph can contain, unless the whole
    model is compiled. The hooks exist once hidden states were requested, and in a pipeline with several stages per
    worker.
    """
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    if getattr(collector, "compiling", True):  # compiled whole, or a version without a collector
        yield
        return
    assert collector is not None
    collector.global_var, collector.compiling = collector.get(), True
    try:
        yield
    finally:
        collector.global_var, collector.compiling = None, False
