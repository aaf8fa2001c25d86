"""The stages of a pipeline: which modules a worker keeps, and how a hidden state enters and leaves its blocks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.engines.shards import named_tensors
from rapidformer_templates.errors import ModelError, RapidformerError
from rapidformer_templates.models.blocks import (
    AbsentModule,
    BlockArguments,
    BlockOutput,
    OutputShape,
    Placement,
    SkippedBlock,
    canonical_name,
    hidden_of,
    put,
    replaced,
    shape_of,
    with_hidden,
)
from rapidformer_templates.planning.balance import balanced_cut
from rapidformer_templates.switches.layout import tracing
from rapidformer_templates.switches.layout.declaration import PipelineParallelFlags
from rapidformer_templates.switches.layout.tracing import AFTER, BEFORE, WITHIN

Result = TypeVar("Result")


def cut_into_stages(assembly: Assembly, building: Building[PipelineParallelFlags]) -> None:
    """Keep the blocks of this worker and the modules around them. Other workers have the rest.

    The model keeps its own forward, and remaining modules keep their names. Removed modules are replaced with modules
    without parameters. These pass on a block's input, or return zeros of the right shape in place of the embedding.

    Raises:
        ModelError: the model has no repeated blocks, too few of them, or cannot be cut between them.
        RapidformerError: the hook does not call the model exactly once.
    """
    workers, options = building.workers, building.options
    cut = PipelineCut(assembly, workers.pipeline, building.try_loss)
    sizes = cut.sizes(workers.pipeline * options.virtual_pipeline_size, options.pipeline_stages)
    assembly.placement = cut.remove_other_stages(sizes, workers.pipeline_rank)
    assembly.limit_derivatives(*tracing.NO_DERIVATIVES)
    if building.construction:
        of_stage = workers.world // workers.pipeline
        stages = [range(first, first + of_stage) for first in range(0, workers.world, of_stage)]
        building.construction.regroup(assembly.model.parameters(), stages)


class PipelineCut:
    """A model, and which pipeline ranks need which of its modules outside of the blocks.

    A module that is called before the blocks belongs to the first rank, one that is called after them to the last. Some
    modules are never called, compute another input of the blocks, or have parameters that reach the loss without the
    blocks. They stay on every rank where they may matter, and the gradients of their copies are summed.

    Args:
        pipeline: number of pipeline ranks.
        try_loss: computes the loss of one sample.

    Attributes:
        module_ranks: the pipeline ranks of each such module, by name. All other modules are on every rank.
    """

    def __init__(
        self,
        assembly: Assembly,
        pipeline: int,
        try_loss: Callable[[nn.Module], torch.Tensor | tuple[torch.Tensor, object]],
    ) -> None:
        self.assembly, self.model = assembly, assembly.model
        self.blocks = assembly.require_blocks("pipeline parallelism", "--pipeline-model-parallel-size")
        self._check_stack()
        self.pipeline = pipeline
        self.flow = tracing.trace(self.model, self.blocks, try_loss)
        self.module_ranks = self._module_ranks()

    def _check_stack(self) -> None:
        """Raise a :class:`ModelError` if there are stacks of several kinds, such as a vision part and a language part.

        The hidden states of one are not those of the next.
        """
        kinds = {name.rpartition(".")[0]: type(block).__name__ for name, block in self.blocks.items()}
        if len(set(kinds.values())) > 1:
            stacks = " and ".join(f"{kind} in {name}" for name, kind in kinds.items())
            hint = "divide the model with --fsdp-memory-optimization or --tensor-model-parallel-size"
            what = f"it has several stacks of blocks ({stacks}), which cannot become stages of one pipeline"
            raise ModelError(what, where=type(self.model).__name__, hint=hint)

    def _module_ranks(self) -> dict[str, frozenset[int]]:
        everywhere = frozenset(range(self.pipeline))
        ends = {BEFORE: frozenset({0}), AFTER: frozenset({self.pipeline - 1}), WITHIN: everywhere}
        own_of = {name: self._own(name) for name in self.flow.called}
        after = set().union(*(own_of[name] for name, phases in self.flow.called.items() if AFTER in phases))
        module_ranks: dict[str, frozenset[int]] = {}
        for name, phases in self.flow.called.items():
            ranks: frozenset[int] = frozenset().union(*(ends[phase] for phase in phases))
            own_ranks = own_of[name]
            if own_ranks & self.flow.beyond - after:  # a tied head's matrix reaches the loss through the head
                ranks |= ends[AFTER]
            if own_ranks & self.flow.side_inputs or (BEFORE in phases and self.flow.absent[name].kind is None):
                ranks = everywhere
            module_ranks[name] = ranks
        # It is unknown where modules that are never called matter.
        around = tracing.holders(self.model, self.blocks)
        for name, module in self.model.named_modules():
            has_ranks = name in module_ranks or name in around or self._block_of(name) is not None
            if not has_ranks and next(module.parameters(recurse=False), None) is not None:
                module_ranks[name] = everywhere
        for name in list(module_ranks):
            for outer in _ancestors(name):
                if outer in module_ranks:
                    module_ranks[outer] |= module_ranks[name]
        return module_ranks

    def _own(self, name: str) -> set[int]:
        return {id(p) for p in self.model.get_submodule(name).parameters(recurse=False)}

    def _block_of(self, name: str) -> str | None:
        return next((outer for outer in (*_ancestors(name), name) if outer in self.blocks), None)

    def sizes(self, stages: int, requested: str | None) -> list[int]:
        """Return the number of blocks of each stage: as requested, or balanced by the number of parameters."""
        count, where = len(self.blocks), type(self.model).__name__
        if requested:
            sizes = [int(size) for size in requested.split(",")]
            if sum(sizes) != count or len(sizes) != stages:
                found = f"--pipeline-stages {requested} has {sum(sizes)} blocks in {len(sizes)} stages"
                raise ModelError(f"{found}; the model has {count} blocks for {stages} stages", where=where)
            return sizes
        if count % self.pipeline or self.pipeline >= count or stages > count:
            hint = "choose a size below the number of blocks that divides it (RF010)"
            if stages < count:
                uneven = ",".join(str(count // stages + (stage < count % stages)) for stage in range(stages))
                hint += f", or give the blocks of each stage: --pipeline-stages {uneven}"
            raise ModelError(f"{count} blocks cannot be cut into {stages} stages", where=where, hint=hint)
        front = self._cost(name for name, ranks in self.module_ranks.items() if 0 in ranks)
        back = self._cost(name for name, ranks in self.module_ranks.items() if self.pipeline - 1 in ranks)
        blocks = [float(sum(math.prod(shape_of(p)) for p in block.parameters())) for block in self.blocks.values()]
        return balanced_cut(front, blocks, back, stages)

    def _cost(self, names: Iterable[str]) -> float:
        modules = [self.model.get_submodule(name) for name in names]
        return float(sum(math.prod(shape_of(p)) for m in modules for p in m.parameters(recurse=False)))

    def remove_other_stages(self, sizes: list[int], rank: int) -> Placement:
        """Remove the modules of other pipeline ranks. Return the placement of the rest, by names of the whole model."""
        stage_of = dict(zip(self.blocks, (s for s, size in enumerate(sizes) for _ in range(size)), strict=True))
        first_names = {id(tensor): name for name, tensor in named_tensors(self.assembly).items()}
        ranks: dict[str, set[int]] = defaultdict(set)
        parts: dict[str, set[int | None]] = defaultdict(set)
        parameters, buffers = self.model.named_parameters, self.model.named_buffers
        for wrapped_name, tensor in (*parameters(remove_duplicate=False), *buffers(remove_duplicate=False)):
            name = canonical_name(wrapped_name)
            whole = first_names.get(id(tensor))
            if whole is not None:
                ranks[whole] |= self._ranks_of(name, stage_of)
                parts[whole].add(self._part_of(name, stage_of, len(sizes)))
        local_blocks = [
            [n for n, s in stage_of.items() if s == stage] for stage in range(rank, len(sizes), self.pipeline)
        ]
        absent = {name for name in (*self.module_ranks, *self.blocks) if rank not in self._ranks_of(name, stage_of)}
        for name in absent:
            if absent.isdisjoint(_ancestors(name)):  # otherwise it goes with its parent
                block, shape = self.blocks.get(name), self.flow.absent.get(name, OutputShape())
                put(self.model, name, AbsentModule(shape) if block is None else SkippedBlock(self.flow.form, block))
        remaining = {name: first_names[id(tensor)] for name, tensor in named_tensors(self.assembly).items()}
        return Placement(
            names={name: whole for name, whole in remaining.items() if name != whole},
            stages={name: tuple(sorted(holding)) for name, holding in ranks.items() if len(holding) > 1},
            chunks={
                name: part
                for name, copies in parts.items()
                for part in copies
                if part is not None and len(copies) == 1 and ranks[name] == {rank}
            },
            parts=tuple({name: self.blocks[name] for name in names} for names in local_blocks),
            blocks_in_all=len(self.blocks),
            form=self.flow.form,
        )

    def _ranks_of(self, name: str, stage_of: dict[str, int]) -> frozenset[int]:
        """Return the pipeline ranks that have a module or tensor."""
        block = self._block_of(name)
        if block is not None:
            return frozenset({stage_of[block] % self.pipeline})
        ranks = frozenset(range(self.pipeline))
        for outer in (*_ancestors(name), name):
            ranks &= self.module_ranks.get(outer, ranks)
        return ranks

    def _part_of(self, name: str, stage_of: dict[str, int], stages: int) -> int | None:
        """Return the local part whose backward reaches a tensor, or None if there are several."""
        block = self._block_of(name)
        if block is not None:
            return stage_of[block] // self.pipeline
        phases = self.flow.called.get(name.rpartition(".")[0], set())
        return {BEFORE: 0, AFTER: stages // self.pipeline - 1}.get(next(iter(phases))) if len(phases) == 1 else None


def _ancestors(name: str) -> list[str]:
    """Return the names of the modules around a module: ``a.b`` → ``["", "a"]``."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))] if name else []


class LeaveStage(BaseException):
    """Ends a model's forward after the last block of a stage.

    It is not an error, so ``except Exception`` ignores it.
    """

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__("the forward continues in the next stage")
        self.hidden = hidden


class StageRunner:
    """Runs the user's loss function through one local part of the model at a time.

    The first block of the part gets the hidden state of the previous stage. After the last block, the forward ends,
    unless the part has the end of the model: then the model's head and the loss follow. The model's own code recomputes
    everything around the blocks (masks, position tables) on each stage.

    Args:
        assembly: a model that ``cut_into_stages`` has cut.
        begins: whether the first local part has the beginning of the model.
        ends: whether the last local part has the end of the model.
    """

    def __init__(self, assembly: Assembly, *, begins: bool, ends: bool) -> None:
        model, placement = assembly.model, assembly.placement
        assert placement.parts is not None, "the model was not cut"
        self.model, self.parts, self._ends = model, placement.parts, ends
        self._begins, self._stands_in = begins, False
        self._blocks = placement.blocks
        self._skipped = {name: SkippedBlock(placement.form, block) for name, block in self._blocks.items()}
        self._first: nn.Module | None = None
        self._last: nn.Module | None = None
        self._hidden: torch.Tensor | None = None
        self._entered = 0
        self._missing = placement.blocks_in_all - len(self.parts[-1])
        if len(self.parts) > 1:  # later, transformers would install its hooks for hidden states in some blocks only
            for module in (module for module in model.modules() if isinstance(module, PreTrainedModel)):
                maybe_install_capturing_hooks(module)
        for block in self._blocks.values():
            block.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
            block.register_forward_hook(self._leave_stage)
        if ends:
            model.register_forward_hook(self._fill)

    def run(self, part: int, hidden: torch.Tensor | None, body: Callable[[], Result]) -> Result | torch.Tensor:
        """Return what ``body`` returns, or the hidden state with which it leaves the part.

        Args:
            part: index of the local part, from 0.
            hidden: the output of the previous stage. None at the beginning of the model.
            body: calls the model once.

        Raises:
            RapidformerError: the body did not call the model, or called it twice.
        """
        with self._open(part, hidden):
            try:
                result = body()
            except LeaveStage as leaving:
                return leaving.hidden
            if not self._entered or self._last is not None:
                raise tracing.not_called_error()
            return result

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Run a forward through all local blocks inside the context, with zeros in place of another stage's output."""
        self._stands_in = not self._begins and torch.is_grad_enabled()
        with self._open(None, None):
            try:
                yield
            except LeaveStage:
                return
            finally:
                self._stands_in = False

    @contextmanager
    def _open(self, part: int | None, hidden: torch.Tensor | None) -> Iterator[None]:
        blocks = self._blocks if part is None else self.parts[part]
        chosen = list(blocks.values())
        others = {name: module for name, module in self._skipped.items() if name not in blocks}
        self._first, self._hidden, self._entered = chosen[0], hidden, 0
        at_end = self._ends and part in (None, len(self.parts) - 1)
        self._last = None if at_end else chosen[-1]
        try:
            with replaced(self.model, others) if others else nullcontext():
                yield
        finally:
            self._first = self._last = self._hidden = None

    def _enter(self, block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> BlockArguments | None:
        if block is not self._first:
            return None
        self._entered += 1
        if self._entered > 1:
            raise tracing.called_twice_error()
        hidden_state = hidden_of(args, kwargs)
        if self._hidden is None:
            # Like the real output of another stage, its replacement requires a gradient, so that a graph is built for
            # both.
            return with_hidden(args, kwargs, hidden_state.detach().requires_grad_()) if self._stands_in else None
        if hidden_state.shape != self._hidden.shape:
            raise RapidformerError(
                f"a hidden state of shape {tuple(self._hidden.shape)} arrived, but the batch makes "
                f"{tuple(hidden_state.shape)}",
                where="compute_loss(model, batch)",
                hint="the hook must give every stage the same inputs: draw no random numbers before the model",
            )
        return with_hidden(args, kwargs, self._hidden)

    def _leave_stage(self, block: nn.Module, args: object, output: BlockOutput) -> None:
        if block is self._last:
            raise LeaveStage(output[0] if isinstance(output, tuple) else output)

    def _fill(self, model: nn.Module, args: object, output: Any) -> object:
        """Put hidden states and attentions at their places in the whole model. The entries of other stages are None."""
        for name in ("hidden_states", "attentions"):
            states = getattr(output, name, None)
            if self._first is not None and isinstance(states, tuple) and states:
                output[name] = (None,) * self._missing + states
        return output
