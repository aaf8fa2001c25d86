"""How each key of a DeepSpeed file is handled: as a flag, by DeepSpeed, as a note in the plan, or refused.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from rapidformer_templates.errors import did_you_mean
from rapidformer_templates.planning.deepspeed_file.json import DeepSpeedFile
from rapidformer_templates.planning.deepspeed_file.schedules import AUTO, NEEDED, PARAMETERS
from rapidformer_templates.planning.deepspeed_file.schema import SectionKeys, known_keys
from rapidformer_templates.planning.optimizers import DEEPSPEED_TYPES

OWN = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer",
        "scheduler",
    }
)
"""Keys that are flags, or that the library implements itself in the same way."""

PASSED_TO_DEEPSPEED = frozenset(
    {
        "fp16",
        "bf16",
        "zero_optimization",
        "aio",
        "communication_data_type",
        "disable_python_gc",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "zero_force_ds_cpu_optimizer",
    }
)
"""Keys that are passed to DeepSpeed and have their usual effect."""

NOTED = {
    "steps_per_print": "progress is shown and logged by --log-interval",
    "zero_allow_untested_optimizer": "RF025 checks which optimizers may update shards",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "the export holds the whole weights without it",
    "zero_optimization.gather_16bit_weights_on_model_save": "the export holds the whole weights without it",
}
"""Keys that request what happens anyway. The plan mentions them."""

METRICS = "metrics go to metrics.jsonl; send them elsewhere in on_step_end and on_evaluate"
ORDER = "the library orders the data; leave it out"
CHECKPOINTS = "the library writes checkpoints; leave it out"

REFUSED = {
    "amp": "--mixed-precision sets the precision; leave it out",
    "torch_autocast": "--mixed-precision sets the precision; leave it out",
    "bfloat16": "write bf16",
    "data_types": "gradients are accumulated in the type of the model; leave it out",
    "tensorboard": METRICS,
    "wandb": METRICS,
    "csv_monitor": METRICS,
    "comet": METRICS,
    "flops_profiler": "use --profile; leave it out",
    "comms_logger": "use --profile; leave it out",
    "timers": "use --profile; leave it out",
    "activation_checkpointing": "use --checkpoint-activations; leave it out",
    "compile": "use --torch-compile; leave it out",
    "tensor_parallel": "use --tensor-model-parallel-size; leave it out",
    "expert_parallel": "use --num-experts; leave it out",
    "use_data_before_expert_parallelism": "leave it out",
    "seq_parallel_communication_data_type": "leave it out",
    "sequence_parallel_size": "leave it out",
    "checkpoint": CHECKPOINTS,
    "datastates_ckpt": CHECKPOINTS,
    "nebula": CHECKPOINTS,
    "sparse_attention": "leave it out",
    "sparse_gradients": "leave it out",
    "curriculum_learning": ORDER,
    "data_efficiency": ORDER,
    "dataloader_drop_last": ORDER,
    "progressive_layer_drop": "leave it out",
    "pipeline": "leave it out",
    "autotuning": "leave it out",
    "elasticity": "leave it out",
    "hybrid_engine": "leave it out",
    "eigenvalue": "leave it out",
    "quantize_training": "leave it out",
    "compression_training": "leave it out",
    "weight_quantization": "leave it out",
    "graph_harvesting": "leave it out",
    "vocabulary_size": "leave it out",
    "log_level": "leave it out",
    "disable_allgather": "leave it out",
    "prescale_gradients": "ZeRO scales gradients itself; leave it out",
}
"""Keys that DeepSpeed reads, or once read, and that would do nothing here or replace a part of the library."""

ONLY: dict[str, tuple[Any, str]] = {
    "gradient_allreduce_op": ("mean", "the loss is the mean over the targets of the global batch"),
    "gradient_predivide_factor": (1.0, "ZeRO scales gradients itself"),
    "optimizer.legacy_fusion": (False, "--optimizer chooses the implementation"),
    "managed_gradient_accumulation": (False, "accumulation follows from the two batch sizes"),
    "fp16.fp16_master_weights_and_grads": (False, "the masters are fp32"),
    "bf16.bf16_master_weights_and_grads": (False, "the masters are fp32"),
    "bf16.bf16_optimizer_states": (False, "the optimizer state is fp32"),
    "bf16.check_grad_overflow": (True, "a step whose gradient is not finite ends the run"),
    "zero_optimization.compute_grad_norm": (True, "the metrics contain the gradient norm"),
    "zero_optimization.zero_hpz_partition_size": (1, "states are sharded over all workers"),
    "zero_optimization.zero_quantized_weights": (False, "a switch does not change the mathematics"),
    "zero_optimization.zero_quantized_nontrainable_weights": (False, "a switch does not change the mathematics"),
    "zero_optimization.zero_quantized_gradients": (False, "a switch does not change the mathematics"),
    "zero_optimization.zenflow": (None, "a switch does not change the mathematics"),
    "zero_optimization.elastic_checkpoint": (False, CHECKPOINTS),
    "zero_optimization.load_from_fp32_weights": (True, CHECKPOINTS),
    "zero_optimization.pipeline_loading_checkpoint": (False, CHECKPOINTS),
    "zero_optimization.legacy_stage1": (False, "DeepSpeed no longer has it"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": (False, "Muon cannot update shards (RF025)"),
    "zero_optimization.offload_optimizer.ratio": (1.0, "the whole state is offloaded"),
    "zero_optimization.offload_optimizer.super_offload": (False, "the whole state is offloaded"),
}
"""Keys with the only value that fits the library, and why. It is DeepSpeed's default."""

OPTIMIZERS = {kind.lower(): name for kind, name in DEEPSPEED_TYPES.items()}
"""Optimizer types of DeepSpeed, with the flag's value that makes the same update."""

ADAM_OPTIONS = frozenset({"betas", "eps", "adam_w_mode", "torch_adam", "bias_correction", "amsgrad"})
OPTIMIZER_OPTIONS = frozenset({"lr", "weight_decay", *ADAM_OPTIONS, "max_grad_norm"})
ONLY_OPTIONS: dict[str, tuple[Any, str]] = {
    "bias_correction": (True, "--optimizer has no optimizer without it"),
    "amsgrad": (False, "--optimizer has no optimizer with it"),
    "max_grad_norm": (0, "write gradient_clipping"),
}

Problem = tuple[str, str]
"""(path of a key, what is wrong with it)."""


def is_neutral(value: Any) -> bool:
    """Return whether a value changes nothing: off, ``"auto"``, or a section of such values."""
    if isinstance(value, Mapping):
        return value.get("enabled") is False or all(is_neutral(inner) for inner in value.values())
    return value is None or value is False or value == AUTO


def unknown(file: DeepSpeedFile) -> Iterator[Problem]:
    """Yield keys that neither DeepSpeed nor the library knows, and keys that DeepSpeed has deprecated."""
    schema = known_keys()
    top = OWN | PASSED_TO_DEEPSPEED | REFUSED.keys() | NOTED.keys() | {path for path in ONLY if "." not in path}
    for key, value in file.content.items():
        if key not in top:
            yield key, _no_such_key(key, top)
        elif key in schema:
            yield from _unknown_in(value, key, schema[key])
    yield from _unknown_words(file.content, "optimizer", OPTIMIZER_OPTIONS, ("type", "params", "legacy_fusion"))
    kind = _type_of(file.content, "scheduler")
    parameters = (
        {*PARAMETERS[kind], "last_batch_iteration"} if kind in PARAMETERS else None
    )  # others are refused as idle
    yield from _unknown_words(file.content, "scheduler", parameters, ("type", "params"))


def _unknown_in(section: Any, path: str, keys: SectionKeys) -> Iterator[Problem]:
    if not isinstance(section, Mapping):
        if section is not None:
            yield path, f"{path} must be a section, not {section!r}"
        return
    for key, value in section.items():
        key_path = f"{path}.{key}"
        if key not in keys.names:
            yield key_path, _no_such_key(key_path, [f"{path}.{name}" for name in keys.names])
        elif key in keys.replaced and not is_neutral(value):
            yield key_path, f"{key_path} is deprecated in DeepSpeed: write {path}.{keys.replaced[key]}"
        elif (inner := keys.names[key]) is not None:
            yield from _unknown_in(value, key_path, inner)


def _unknown_words(
    content: Mapping[str, Any], section: str, parameters: Collection[str] | None, around: tuple[str, ...]
) -> Iterator[Problem]:
    """Yield the unknown keys of a section with a type and parameters."""
    section_value = content.get(section)
    if section_value is None:
        return
    if not isinstance(section_value, Mapping) or not isinstance(section_value.get("params", {}), Mapping):
        yield section, f"{section} must be a section with a type and params"
        return
    for key in section_value:
        if key not in around:
            yield f"{section}.{key}", _no_such_key(f"{section}.{key}", [f"{section}.{name}" for name in around])
    for key in section_value.get("params", {}):
        if parameters is not None and key not in parameters:
            path = f"{section}.params"
            yield f"{path}.{key}", _no_such_key(f"{path}.{key}", [f"{path}.{name}" for name in parameters])


def _no_such_key(path: str, keys: Iterable[str]) -> str:
    hint = did_you_mean(path, sorted(keys), cutoff=0.75)
    return f"no such key: {path}" + (f"; {hint}" if hint else "")


def idle(file: DeepSpeedFile) -> Iterator[Problem]:
    """Yield known keys that would do nothing here, or something else than the library does."""
    content = file.content
    for key, hint in REFUSED.items():
        if key in content and not is_neutral(content[key]):
            what = "a section " if isinstance(content[key], Mapping) else ""
            yield key, f"{file.name} has {what}{key}: {hint}"
    for path, (value, why) in ONLY.items():
        setting = look_up(content, path)
        if setting is not None and setting != value:
            yield path, f"{path} = {_json(setting)} is not possible: {why}"
    zero_stage, dtype = look_up(content, "zero_optimization.stage"), look_up(content, "communication_data_type")
    if zero_stage is not None and zero_stage not in (0, 1, 2, 3):
        yield "zero_optimization.stage", f"zero_optimization.stage = {_json(zero_stage)}: the stages are 0, 1, 2 and 3"
    if dtype is not None and str(dtype).lower() not in ("fp16", "bf16", "fp32"):
        yield "communication_data_type", f"communication_data_type = {_json(dtype)}: the types are fp16, bf16 and fp32"
    yield from _idle_optimizer(content)
    yield from _idle_scheduler(content)
    zero = content.get("zero_optimization")
    if isinstance(zero, Mapping) and not _offloads(zero, "offload_optimizer") and _offloads(zero, "offload_param"):
        path = "zero_optimization.offload_param"
        yield path, f"{path} needs offload_optimizer: parameters leave the device after the optimizer state"


def _idle_optimizer(content: Mapping[str, Any]) -> Iterator[Problem]:
    kind = _type_of(content, "optimizer") or "AdamW"  # the guide's default
    if kind.lower() not in OPTIMIZERS:
        names = ", ".join(DEEPSPEED_TYPES)
        yield "optimizer.type", f"optimizer.type = {kind} is not among the optimizers of --optimizer: {names}"
        return
    for name, (value, why) in ONLY_OPTIONS.items():
        setting = look_up(content, f"optimizer.params.{name}")
        if setting is not None and setting != value:
            yield f"optimizer.params.{name}", f"optimizer.params.{name} = {_json(setting)} is not possible: {why}"
    if look_up(content, "optimizer.params.adam_w_mode") is False and kind.lower() != "adam":
        yield "optimizer.params.adam_w_mode", f"optimizer.params.adam_w_mode = false needs the type Adam, not {kind}"
    betas, eps = (look_up(content, f"optimizer.params.{name}") for name in ("betas", "eps"))
    if betas is not None and not are_betas(betas):
        yield "optimizer.params.betas", f"optimizer.params.betas must be two numbers from 0 to below 1, not {betas!r}"
    if eps is not None and not is_epsilon(eps):
        yield "optimizer.params.eps", f"optimizer.params.eps must be a number of at least 0, not {eps!r}"


def _idle_scheduler(content: Mapping[str, Any]) -> Iterator[Problem]:
    if not isinstance(content.get("scheduler"), Mapping):
        return
    kind = _type_of(content, "scheduler")
    if kind not in PARAMETERS:
        means = did_you_mean(kind, PARAMETERS) or f"choose from {', '.join(PARAMETERS)}"
        yield "scheduler.type", f"scheduler.type = {kind or 'none'} is not a schedule of DeepSpeed; {means}"
        return
    params, path = content["scheduler"].get("params"), "scheduler.params"
    parameters = params if isinstance(params, Mapping) else {}
    for name, value in parameters.items():
        problem = _wrong(name, value)
        if name in (*PARAMETERS[kind], "last_batch_iteration") and value not in (None, AUTO) and problem:
            yield f"{path}.{name}", f"{path}.{name} = {_json(value)}: {problem}"
    for name in NEEDED.get(kind, ()):
        if name not in parameters:
            yield "scheduler", f"{path}.{name} is missing, which {kind} needs"
    if kind == "OneCycle" and parameters.get("cycle_momentum", True) is not False:
        why = "the optimizer sets the betas; DeepSpeed would move them with the learning rate"
        yield f"{path}.cycle_momentum", f"{path}.cycle_momentum must be false: {why}"


def _wrong(name: str, value: Any) -> str | None:
    """Return what is wrong with a parameter of a schedule, or None."""
    if name == "last_batch_iteration":
        return None if value == -1 else "a resumed run continues where it stopped; leave it out"
    if name == "warmup_type":
        return None if value in ("log", "linear") else "log or linear"
    if name in ("cycle_momentum", "lr_range_test_staircase"):
        return None if isinstance(value, bool) else "true or false"
    if not _is_number(value) or value < 0:
        return "a number of at least 0 is needed"
    counts = ("warmup_num_steps", "cycle_first_step_size", "lr_range_test_step_size")
    return "at least 1 is needed" if name in counts and value < 1 else None


def _type_of(content: Mapping[str, Any], section: str) -> str:
    section_value = content.get(section)
    return str(section_value.get("type") or "") if isinstance(section_value, Mapping) else ""


def _offloads(zero: Mapping[str, Any], section: str) -> bool:
    return look_up(zero, f"{section}.device") not in (None, "none")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_epsilon(value: Any) -> bool:
    """Return whether a value can be Adam's epsilon."""
    return _is_number(value) and value >= 0


def are_betas(value: Any) -> bool:
    """Return whether a value can be Adam's two decays."""
    return isinstance(value, list) and len(value) == 2 and all(_is_number(beta) and 0 <= beta < 1 for beta in value)


def _json(value: Any) -> str:
    """Return a value as a file spells it."""
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def look_up(content: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path with dots, or None if it is missing or ``"auto"``."""
    value: Any = content
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return None if value == AUTO else value


def leaves(content: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of every value inside sections."""
    for key, value in content.items():
        key_path = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            yield from leaves(value, key_path)
        else:
            yield key_path, value
