"""Transform that compiles each block of a model and the loss, and the receipt of what the compiler did."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._C import _len_torch_function_stack
from torch._dynamo.utils import counters, get_compilation_metrics, set_compilation_metrics_limit
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.engines.contract import Engine, Receipt
from rapidformer_templates.engines.forwards import checkpointed_forward
from rapidformer_templates.engines.loss import LossLayer
from rapidformer_templates.errors import ModelError
from rapidformer_templates.switches.layout import tensor_layers
from rapidformer_templates.switches.layout.sequence_shards import ContextSequenceShards, draws_random_numbers
from rapidformer_templates.switches.torch_compile.declaration import TorchCompileFlags

EVALUATION = 4
"""Graphs per kind of block without gradients: one shape, any shape, and both of these with a single row."""
AUTOMATIC = 4 + EVALUATION
"""Graphs per kind of block if shapes are not known in advance: as many again for training."""


def compile_blocks(assembly: Assembly, building: Building[TorchCompileFlags]) -> None:
    """Compile the ``forward`` of each block, and the loss over words, with the backend of ``--torch-compile``.

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
    assert backend is not None  # the switch is active
    if "zero-3" in plan.switches:
        _gather_whole(parts, model)
    # No graph can contain the random streams of divided layers or sequences, or a ring.
    shards, draws = assembly.find(ContextSequenceShards), draws_random_numbers(model)
    divides, rings = shards is not None, shards is not None and shards.kind == "ring"
    for part in parts:
        layers = tensor_layers.local_parameter_layers(part)
        owner = _owner(part, breaks=rings or (draws and (divides or bool(layers))))
        # Blocks share graphs even if their modules have replaced forwards, such as those of divided layers: a graph
        # depends on the identity of an object in place of a forward, but only on the code of a bound method.
        for module in part.modules():
            forward = vars(module).get("forward")
            if module is not part and forward is not None and not isinstance(forward, (MethodType, FunctionType)):
                module.forward = forward.__call__
        owner.forward = Compiled(owner.forward, backend, static=shapes > 0, layers=layers)
    if isinstance(model, PreTrainedModel) and assembly.blocks and model.get_output_embeddings() is not None:
        loss = model.loss_function
        if loss in (ForCausalLMLoss, ForMaskedLMLoss):
            model.loss_function = CompiledLoss(loss, backend, static=shapes > 0)
    assembly.is_compiled = True
    assembly.record(CompileRecords(backend, regions=len(parts), limit=limit))


def _gather_whole(parts: Sequence[nn.Module], model: nn.Module) -> None:
    """Make DeepSpeed gather and free all parameters of a block in hooks on the block, outside of its graph.

    Raises:
        ModelError: there are no blocks, so that it would gather the whole model, or blocks are partly frozen.
    """
    from deepspeed.utils import set_z3_leaf_module

    where = "--torch-compile with --zero-3-memory-optimization"
    if parts[0] is model:
        message = "a compiled model is gathered block by block, and this one has no repeated blocks"
        hint = "keep the blocks in an nn.ModuleList, or use --zero-2-memory-optimization"
        raise ModelError(message, where=where, hint=hint)
    if any(not parameter.requires_grad for part in parts for parameter in part.parameters()):
        message = "blocks are partly frozen, and the backward of their graphs meets parameters that are not gathered"
        hint = "use --zero-2-memory-optimization or --fsdp-memory-optimization, or leave --torch-compile out"
        raise ModelError(message, where=where, hint=hint)
    for part in parts:
        set_z3_leaf_module(part, True)


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
    if not breaks and not any(isinstance(module, LossLayer) for module in part.modules()):
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


class CompiledLoss:
    """A cross-entropy over words whose graph never stores the logits in fp32. ``forward`` is the original.

    The original also computes the loss of an evaluation, and of logits that are divided or never computed. Code that
    watches the functions of a forward, such as the one that smooths labels, must see it.
    """

    def __init__(self, forward: Callable[..., torch.Tensor], backend: str, *, static: bool) -> None:
        self.forward = forward
        self._compiled = torch.compile(forward, backend=backend, dynamic=False if static else None)

    def __call__(self, logits: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        is_plain = type(logits) is torch.Tensor and torch.is_grad_enabled() and not _len_torch_function_stack()
        return (self._compiled if is_plain else self.forward)(logits, *args, **kwargs)


class Compiled:
    """A forward that runs as compiled graphs. ``forward`` is the original.

    Args:
        forward: a bound method, or an object in place of one.
        backend: name of the compiler.
        static: whether training has one graph per shape. Otherwise, from the second shape on, one graph has all shapes.
        layers: layers inside it that have local parts of parameters.
    """

    def __init__(
        self,
        forward: Callable[..., object],
        backend: str,
        *,
        static: bool,
        layers: Sequence[tensor_layers.OnLocalParameters],
    ) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self._layers = layers
        self._training = torch.compile(forward, backend=backend, dynamic=False if static else None)
        # Evaluations pad in their own way, independently of the shapes of training.
        self._evaluating = torch.compile(forward, backend=backend)

    def __call__(self, *args: object, **kwargs: object) -> object:
        compiled = self._training if torch.is_grad_enabled() else self._evaluating
        with tensor_layers.with_local_parameters(self._layers), _readable_collector():
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


RECORDS = 4096  # torch keeps the last 64 by default, fewer than a large model may need


class CompileRecords:
    """Reads torch's own records, starting from its creation.

    Args:
        backend: name of the compiler.
        regions: number of modules that are compiled separately.
        limit: highest number of graphs for one piece of code.
    """

    def __init__(self, backend: str, *, regions: int, limit: int) -> None:
        self._settings = {"backend": backend, "regions": regions, "limit": limit}
        set_compilation_metrics_limit(RECORDS)
        self._earlier = {id(record): record for record in get_compilation_metrics()}
        self._breaks = Counter(counters["graph_break"])
        self._graphs = counters["stats"]["unique_graphs"]

    def measured(self) -> dict[str, object]:
        """Return the entry for ``summary.json``.

        Returns:
            ``graphs``: number of compiled graphs. ``seconds``: time that this took. ``graph_breaks`` and
            ``recompilations``: how often each reason occurred. ``not_compiled``: why some code runs
            uncompiled, such as the ``limit`` of graphs for one piece of code.
        """
        records = [record for record in get_compilation_metrics() if id(record) not in self._earlier]
        return {
            **self._settings,
            "graphs": counters["stats"]["unique_graphs"] - self._graphs,
            "seconds": round(sum(record.duration_us or 0 for record in records) / 1e6, 3),
            "graph_breaks": _counted((Counter(counters["graph_break"]) - self._breaks).items()),
            "recompilations": _counted(Counter(r.recompile_reason for r in records if not r.fail_reason).items()),
            "not_compiled": _counted(Counter(r.fail_reason for r in records).items()),
        }


class Compilation(Receipt):
    """Reports ``compile``: the records of the model's blocks.

    Each number and reason has its maximum over all workers.
    """

    compiles = True

    def after_step(self, engine: Engine) -> dict[str, object]:
        records = engine.assembly.find(CompileRecords)
        return {"compile": records and _most(engine.workers.gather(records.measured()))}


def _most(of_workers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the highest value of each entry.

    Stages have different blocks, and copies of a block break in the same way.
    """
    keys = dict.fromkeys(key for measured in of_workers for key in measured)
    values = {key: [measured[key] for measured in of_workers if key in measured] for key in keys}
    return {key: _most(each) if isinstance(each[0], dict) else max(each) for key, each in values.items()}


def _counted(reasons: Iterable[tuple[str | None, int]]) -> dict[str, int]:
    """Count each reason, shortened to its first line without the number of the graph that did not fit."""
    counts: Counter[str] = Counter()
    for reason, count in reasons:
        if reason:
            line = reason.strip().split("\n")[0]
            number, _, rest = line.partition(": ")
            has_number = rest and number.replace("/", "").isdecimal()
            counts[rest.split("  # ")[0].strip() if has_number else line] += count
    return dict(counts)
