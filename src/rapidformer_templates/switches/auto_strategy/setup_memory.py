"""Memory of a worker from the start of ``build_model`` until its engine can train: the peak on its device and host."""

from __future__ import annotations

from rapidformer_templates.engines.construction import room_for
from rapidformer_templates.planning.optimizer_states import BF16, FP32, ParameterShape
from rapidformer_templates.switches.auto_strategy.layouts import Layout, MemoryOptions
from rapidformer_templates.switches.auto_strategy.memory import largest_states
from rapidformer_templates.switches.auto_strategy.model_shapes import ModelShapes
from rapidformer_templates.switches.auto_strategy.results import SetupMemory
from rapidformer_templates.switches.auto_strategy.stage_memory import peak_stage_candidates


def setup_memory(model: ModelShapes, layout: Layout, setting: MemoryOptions) -> SetupMemory:
    """Predict the memory of the worker that needs most.

    The model is built on the host in fp32: whole, or in shares (see ``engines/construction.py``). Then the engine
    takes it over, one parameter at a time.
    """
    sizes = [FP32 * facts.count for facts in model.all_parameters.values()]
    whole, largest = sum(sizes), max(sizes, default=0)
    owned, passing = _taken_over(model, layout, setting, largest)
    building = whole + largest
    if setting.builds_in_shares and layout.world > 1:
        # Stages, experts and matrices are cut out on the host. FSDP and ZeRO-3 take their part from the shares.
        cut_out = 0 if layout.as_fsdp or layout.partitioning == "zero-3" else owned
        if layout.shards_stages:
            # Divided experts are cut out of whole parts.
            cut_out = whole // (layout.tensor * layout.pipeline) if layout.tensor > 1 and layout.experts > 1 else 0
        share = max(whole // layout.world, cut_out)
        building = share + max(room_for(whole, layout.world), largest)
    if setting.gpu:
        if layout.partitioning in ("zero-1", "zero-2") and setting.precision != "fp32":
            building += BF16 * sum(
                facts.count for facts in model.all_parameters.values()
            )  # in addition to the exact values
        return SetupMemory(owned + passing, building)
    peak = max(building, owned + passing)
    return SetupMemory(peak, peak)


def _taken_over(model: ModelShapes, layout: Layout, setting: MemoryOptions, largest: int) -> tuple[int, int]:
    """Return bytes of the parameters that the engine has at the end, and of what exists next to them at the peak."""
    if setting.by_parallel_engine(layout):
        stages = peak_stage_candidates(model, layout, setting)
        if layout.shards_stages:
            return max(stage.states().parameters for stage in stages), 0  # only shards reach the device
        owned = max(
            _built_bytes([*stage.parameters.values(), *model.stage_frozen(stage.coordinates)]) for stage in stages
        )
        copied = owned if setting.masters else 0  # fp32 masters exist before the first parameter is cast
        shares = layout.replicas if layout.partitioning != "none" else 1
        return owned, max(largest, copied // shares)
    states = largest_states(model, layout.of_states, setting)
    states = states.on_gpu if setting.gpu else states
    everything = [*model.parameters.values(), *model.frozen_of(model.all_parameters.values())]
    if layout.as_fsdp:
        return states.parameters, 0  # only shards reach the device
    match layout.partitioning:
        case "zero-3":
            # DeepSpeed makes fp32 masters and a buffer for gradients. The other states follow in the first step.
            masters = sum(FP32 * facts.count for facts in everything if facts.is_trained) // layout.world
            return states.parameters + masters + states.gradients, largest
        case "zero-1" | "zero-2":
            # The exact values are in host memory until the masters have them.
            exact = 0 if setting.precision == "fp32" or setting.gpu else _built_bytes(everything)
            return states.parameters + states.optimizer, exact
    owned = _built_bytes([facts.among(layout.experts) for facts in everything])
    if layout.partitioning in ("oss", "oss-sdp") and layout.replicas > 1 and not setting.gpu:
        return owned, owned  # fairscale copies the parameters of each owner into a buffer, and freed memory stays
    return owned, largest


def _built_bytes(parameters: list[ParameterShape]) -> int:
    """Return the bytes of parameters before an engine converts them."""
    return sum(facts.bytes_in(FP32 if facts.is_trained else facts.width) for facts in parameters)
