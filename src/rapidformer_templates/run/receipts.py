"""Receipts: the effects of the active switches, measured on the running model and never copied from flags.

Each active switch checks them after the first step. A switch without an effect ends the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.data.order import Order
from rapidformer_templates.engines.boxes import divided_over
from rapidformer_templates.engines.contract import Probe, Receipt, bytes_by_kind, storage_elements
from rapidformer_templates.engines.shards import local_part
from rapidformer_templates.errors import SwitchDidNothing
from rapidformer_templates.models.blocks import bytes_of, is_quantized, shape_of
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.registry import REGISTRY, load_object
from rapidformer_templates.planning.switch import Measured
from rapidformer_templates.run.run import Run
from rapidformer_templates.run.scripts import overridden_hooks
from rapidformer_templates.system.process_state import freed_memory


def _types(tensors: Sequence[torch.Tensor]) -> list[str]:
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})


INTERNAL = {
    "trained_elements", "updated_elements", "gradient_elements", "held_elements", "divided_elements",
    "divided_over_experts", "trained_over_experts", "largest_parameter", "chosen_shapes",
}  # fmt: skip
"""Values that switches check but the summary does not show."""

BYTES_BY_RANK = ("parameter_bytes", "gradient_bytes", "optimizer_state_bytes", "bucket_bytes")

Measurements = dict[str, object]
"""Measured values by name."""


class Receipts:
    """Observes the first step of a run, and then measures the engine.

    Args:
        run: the run, with the engine that trains and the plan that it should follow.
        order: order of the training samples, if the library chooses it.
    """

    def __init__(self, run: Run, order: Order | None = None) -> None:
        self.run = run
        self.engine = run.engine
        plan = run.plan
        self.switches = [REGISTRY[name] for name in plan.switches]
        self.requested = frozenset(name for switch in self.switches for name in switch.receipt)
        hooks = dict.fromkeys(switch.receipt_hooks for switch in self.switches if switch.receipt_hooks)
        self._switch_receipts: list[Receipt] = [load_object(path)() for path in hooks]
        self._chosen_shapes = [[shape.rows, shape.length] for shape in getattr(order, "shapes", ())]
        self._activations: set[str] = set()
        self._first_step: Measurements = {}
        self._shapes: set[tuple[int, ...]] = set()
        self._tokens = [0, 0]
        self._gradient_elements = 0
        # A hook may freeze some for the first steps.
        self._trained = frozenset(id(p) for p in self.engine.model.parameters() if p.requires_grad)

    def count(self, microbatches: Sequence[MicroBatch]) -> None:
        """Record the shapes and the padding of a step's batches. This is called in every step."""
        if "fill" in self.requested:
            self._shapes |= {microbatch.shape for microbatch in microbatches}
            self._tokens[0] += sum(microbatch.tokens for microbatch in microbatches if not microbatch.idle)
            self._tokens[1] += sum(microbatch.padded_tokens for microbatch in microbatches)

    @contextmanager
    def watch(self, microbatches: Sequence[MicroBatch]) -> Iterator[None]:
        """Context for the first step. It records the outputs of the forward and the measurements of the switches."""
        probe = Probe(self.engine, microbatches[0])
        for receipt in self._switch_receipts:
            self._first_step |= receipt.before_step(probe)
        compiles = any(receipt.compiles for receipt in self._switch_receipts)
        if compiles:
            # Hooks inside blocks would become part of their compiled graphs, which are recompiled without the hooks.
            with self._recording_leaves(), torch.compiler.set_stance("force_eager"), torch.no_grad():
                probe.forward()
        before = self.engine.micro_steps
        self.engine.before_update.append(self._measure_gradients)
        try:
            with ExitStack() as stack:
                if not compiles:
                    stack.enter_context(self._recording_leaves())
                for receipt in self._switch_receipts:
                    stack.enter_context(receipt.around_step())
                yield
        finally:
            self.engine.before_update.remove(self._measure_gradients)
        self._first_step["micro_steps"] = self.engine.micro_steps - before

    @contextmanager
    def _recording_leaves(self) -> Iterator[None]:
        """Record the output types of leaf modules only. Sums between them (a residual stream) keep the wider type."""

        def record_output(module: nn.Module, inputs: object, output: object) -> None:
            self._activations |= set(_types([t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]))

        hooks = [leaf.register_forward_hook(record_output) for leaf in self._leaves(self.engine.model)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _leaves(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the called modules that call no other modules."""
        hidden = any(receipt.hides_parts(module) for receipt in self._switch_receipts)
        children = [] if hidden else list(module.children())
        if not children:
            yield module
        for child in children:
            yield from self._leaves(child)

    def _measure_gradients(self) -> None:
        sizes = bytes_by_kind(self.engine.local_tensors())
        self._first_step["gradient_bytes"] = sizes["gradients"]
        self._gradient_elements = storage_elements(self.engine.local_tensors()["gradients"])
        if "buckets" in sizes:
            self._first_step["bucket_bytes"] = sizes["buckets"]

    def measured(self) -> Measurements:
        """Return all requested measurements, after the first step."""
        engine, rule = self.engine, self.engine.update_rule
        tensors = engine.local_tensors()  # must come first: it makes FSDP reshard parameters after an evaluation
        parameters = list(engine.model.parameters())
        sizes = bytes_by_kind(tensors)
        measures: dict[str, Callable[[], object]] = {
            "parameter_dtypes": lambda: _types(parameters),
            "activation_dtypes": lambda: sorted(self._activations),
            "parameter_bytes": lambda: sizes["parameters"],
            "parameter_bytes_whole": lambda: sum(map(bytes_of, parameters)),
            "optimizer_state_bytes": lambda: sizes["optimizer"],
            "optimizer_state_device": lambda: sorted({tensor.device.type for tensor in tensors["optimizer"]}),
            "optimizer_class": lambda: f"{rule.__module__}.{rule.__qualname__}",
            "matmul_precision": torch.get_float32_matmul_precision,
            "optimizer_is_fused": lambda: any(group.get("fused") for group in engine.optimizer.param_groups),
            "blocks": lambda: list(engine.assembly.blocks),
            "freed_memory": freed_memory,
            "swapped_bytes": lambda: getattr(engine, "swapped_bytes", 0),
            "layout": lambda: engine.workers.dimensions,
            "setup_peak_bytes": lambda: asdict(self.run.setup_peak),
        }
        always = {"parameter_bytes", "optimizer_state_bytes", "parameter_dtypes", "activation_dtypes", "freed_memory"}
        always |= {"setup_peak_bytes"}
        values = {name: measure() for name, measure in measures.items() if name in self.requested | always}
        for receipt in self._switch_receipts:
            values |= {name: one for name, one in receipt.after_step(engine).items() if name in self.requested}
        return values | self._first_step | dict(self.engine.receipts)

    def _by_rank(self) -> list[Measurements]:
        """Return the measurements of every rank, with the parameter elements that it trains, updates and holds."""
        engine = self.engine
        whole = {p: math.prod(shape_of(p)) for p in engine.model.parameters()}
        local = {}
        for p, count in whole.items():  # codes count as the numbers in them
            part = local_part(p)
            local[p] = min(count * part.nbytes // bytes_of(p) if is_quantized(p) else part.numel(), count)
        # Under tensor parallelism, this rank trains only its part of the sharded matrices, even without other switches.
        trained = {p: -(-count // divided_over(p, "tensor")) for p, count in whole.items()}
        of_experts = {p: count for p, count in whole.items() if divided_over(p, "experts") > 1}
        elements: Measurements = {
            "trained_elements": sum(count for p, count in trained.items() if id(p) in self._trained),
            "updated_elements": sum(local_part(p).numel() for g in engine.optimizer.param_groups for p in g["params"]),
            "gradient_elements": self._gradient_elements,
            "held_elements": sum(count for p, count in local.items() if id(p) in self._trained),
            "divided_elements": sum(count for p, count in whole.items() if local[p] < count),
            "divided_over_experts": sum(of_experts.values()),
            "trained_over_experts": sum(count for p, count in of_experts.items() if id(p) in self._trained),
            "largest_parameter": max(whole.values(), default=0),
            "chosen_shapes": self._chosen_shapes,
        }
        losses, workers = engine.assembly.losses, engine.workers
        values = self.measured() | elements | (losses.receipts(workers) if losses else {})
        if "fill" in self.requested:  # batches of all ranks: their (rows, tokens), and the counts of tokens
            useful, padded = workers.sum(*self._tokens)
            values["batch_shapes"] = [list(shape) for shape in sorted(set().union(*workers.gather(self._shapes)))]
            values |= {"useful_tokens": int(useful), "padded_tokens": int(padded)}
            values["fill"] = round(useful / max(padded, 1), 6)
        return workers.gather(values)

    def check(self) -> None:
        """Check after the first step that each active switch has acted. Call it on every rank.

        Raises:
            SwitchDidNothing: names all switches without an effect.
        """
        run = self.run
        hooks = frozenset(overridden_hooks(type(run.hooks)))
        measured = Measured(run.plan, run.config, self._by_rank(), hooks)
        acted = {switch.name: switch.acted(measured) for switch in self.switches}
        missing = {name: finding for name, finding in acted.items() if finding}
        if missing:
            flags = [f"{spelling(name)} ({run.config.origin(name)})" for s in missing for name in REGISTRY[s].on]
            raise SwitchDidNothing(missing, where=", ".join(flags))

    def measured_by_rank(self) -> Measurements:
        """Return each measurement from the first rank that has it, and the bytes per rank. Call it on every rank."""
        ranks = self._by_rank()
        values: Measurements = {}
        for of_rank in reversed(ranks):
            values |= {name: value for name, value in of_rank.items() if name not in INTERNAL and value is not None}
        bytes_by_rank = [{name: of_rank[name] for name in BYTES_BY_RANK if name in of_rank} for of_rank in ranks]
        setup_peaks = [of_rank["setup_peak_bytes"] for of_rank in ranks]
        return values | {"held_bytes_by_rank": bytes_by_rank, "setup_peak_bytes_by_rank": setup_peaks}
