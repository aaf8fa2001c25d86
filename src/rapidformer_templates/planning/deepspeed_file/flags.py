"""Values of a DeepSpeed file that are also flags. Each is in one of them, or the same in both. Does not import torch.

Values that are only in the file become flags, so that one plan shows everything. ``"auto"`` is filled from the flags.
Values in both must agree. Values without a flag are passed to DeepSpeed unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.deepspeed_file.file import (
    AUTO,
    DeepSpeedFile,
    Json,
    Section,
    file_of,
    is_neutral,
    leaves,
    look_up,
    read,
    section_at,
    type_of,
    whole,
)
from rapidformer_templates.planning.deepspeed_file.keys import OPTIMIZERS, key_table
from rapidformer_templates.planning.schedules import DEEPSPEED_FLAGS, DEEPSPEED_SCHEDULES, OF_SCHEDULES, FileSchedule

if TYPE_CHECKING:
    from rapidformer_templates.planning.switch import Request

ENTRIES = {
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "train_batch_size": "global_batch_size",
    "gradient_clipping": "clip_grad",
    "optimizer.params.lr": "lr",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.eps": "adam_epsilon",
    "zero_optimization.stage3_param_persistence_threshold": "zero_3_param_persistence_threshold",
    "zero_optimization.stage3_prefetch_bucket_size": "zero_3_prefetch_bucket_size",
    "zero_optimization.stage3_max_live_parameters": "zero_3_max_live_parameters",
}
"""Keys with the fields of the flags that have the same value."""

ZERO = tuple(f"zero_{level}_memory_optimization" for level in (1, 2, 3))


@dataclass(frozen=True)
class FlagValue:
    """A value of a file as a flag.

    Attributes:
        field: the flag's field.
        path: the key in the file.
        value: the flag's value.
        shown: the key's value as messages show it.
    """

    field: str
    path: str
    value: object
    shown: str


def as_flags(file: DeepSpeedFile, config: RunConfig) -> list[FlagValue]:
    """Return the values of the file that are also flags.

    Raises:
        ConfigError: a value does not have its flag's type, or is out of range.
    """
    return [
        FlagValue(field, path, config.checked(field, whole(value), f"{file.where(path)}, {path}"), shown_value)
        for field, path, value, shown_value in _flag_values(file.content)
    ]


def _flag_values(content: Section) -> Iterator[tuple[str, str, Json, str]]:
    """Yield (field, path, the flag's value, the key's value as shown) of each value that is a flag."""
    for path, field in ENTRIES.items():
        if (value := look_up(content, path)) is not None:
            yield field, path, value, str(value)
    for field, path, value in _other_flags(content):
        yield field, path, value, str(look_up(content, path))
    parameters = section_at(content, "scheduler.params")
    for name, default in DEEPSPEED_SCHEDULES.get(type_of(content, "scheduler"), {}).items():
        value = parameters.get(name, default)
        if value is not None and value != AUTO:
            note = "" if name in parameters else " (DeepSpeed's default)"
            yield DEEPSPEED_FLAGS[name], f"scheduler.params.{name}", value, f"{value}{note}"


def _other_flags(content: Section) -> Iterator[tuple[str, str, Json]]:
    """Yield (field, path, the flag's value) of the values that a flag spells otherwise."""
    stage = look_up(content, "zero_optimization.stage")
    if isinstance(stage, int | float) and stage in (1, 2, 3):
        yield ZERO[int(stage) - 1], "zero_optimization.stage", True
    enabled = {kind: look_up(content, f"{kind}.enabled") for kind in ("fp16", "bf16")}
    if kind := next((kind for kind, value in enabled.items() if value), None):
        yield "mixed_precision", f"{kind}.enabled", kind
    elif any(value is False for value in enabled.values()):
        yield "mixed_precision", "fp16.enabled", None
    device = look_up(content, "zero_optimization.offload_optimizer.device")
    if device is not None:
        yield "cpu_offload", "zero_optimization.offload_optimizer.device", device == "cpu"
    for section in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
        folder = look_up(content, f"{section}.nvme_path")
        if folder is not None and look_up(content, f"{section}.device") == "nvme":
            yield "nvme_path", f"{section}.nvme_path", folder
    betas = look_up(content, "optimizer.params.betas")
    if isinstance(betas, list) and len(betas) == 2:  # RF103 reports others
        yield "adam_beta1", "optimizer.params.betas", betas[0]
        yield "adam_beta2", "optimizer.params.betas", betas[1]
    optimizer = OPTIMIZERS.get(type_of(content, "optimizer").lower())
    if optimizer is not None:
        yield "optimizer", "optimizer.type", optimizer


def merge_file(config: RunConfig) -> RunConfig:
    """Return the configuration with the values that are only in the file, with the file as their origin.

    Raises:
        ConfigError: the file cannot be used.
    """
    text = config.get("deepspeed_config")
    if text is None:
        return config
    file, has_zero_stage = read(text), any(config.get(name) for name in ZERO)
    for flag in as_flags(file, config):
        if flag.field in config.origins or flag.value is None or _matches(flag, config.get(flag.field)):
            continue
        if not (has_zero_stage and flag.field in ZERO):  # the file has the same stage, or it is a contradiction
            config = config.replace(file.where(flag.path), **{flag.field: flag.value})
    return config


def _matches(flag: FlagValue, value: object) -> bool:
    """Return whether a flag's value matches the file. All implementations of Adam match each other."""
    return flag.value == value or (flag.field == "optimizer" and "adam" in str(flag.value) and "adam" in str(value))


def contradictions(request: Request) -> Iterator[str]:
    """Yield a message for each value of the file that contradicts the flags."""
    file, config = file_of(request), request.config
    for flag in as_flags(file, config):
        value = config.get(flag.field)
        if flag.field in ZERO:
            fields = [name for name in ZERO if config.get(name) and name != flag.field]
        elif (flag.field, value) in (("global_batch_size", None), ("mixed_precision", AUTO)) or _matches(flag, value):
            fields = []
        else:
            fields = [flag.field]
        for field in fields:
            value = config.get(field)
            word = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
            state = "is not given" if value is None else f"is {word}"
            flags = f"{spelling(field)} {state} ({config.origin(field)})"
            yield f"{file.name} has {flag.path} = {flag.shown}, {flags}"
    steps, accumulation = look_up(file.content, "gradient_accumulation_steps"), request.sizes.accumulation
    if steps is not None and steps != accumulation:
        yield f"{file.name} has gradient_accumulation_steps = {steps}, the batch sizes make {accumulation}"


def file_schedule(request: Request) -> FileSchedule | None:
    """Return the schedule of a file."""
    content = file_of(request).content
    kind = type_of(content, "scheduler")
    if kind not in DEEPSPEED_SCHEDULES:
        return None
    return {"type": kind, "params": dict(section_at(content, "scheduler.params"))}


def decays_in_the_gradient(request: Request) -> bool:
    """Return whether a file requests Adam with the weight decay in the gradient (L2), not decoupled."""
    return look_up(file_of(request).content, "optimizer.params.adam_w_mode") is False


def idle_schedule_flags(request: Request) -> Iterator[tuple[str, str]]:
    """Yield (message, field) of each flag that has no effect with a file's schedule."""
    file, scheduler = file_of(request), file_schedule(request)
    if scheduler is None:
        return
    used = {DEEPSPEED_FLAGS[name] for name in DEEPSPEED_SCHEDULES[scheduler["type"]]}
    if scheduler["params"].get("warmup_num_steps") == AUTO:
        used |= {"lr_warmup_fraction", "lr_warmup_samples"}
    for field in OF_SCHEDULES:
        origin = request.config.origins.get(field)
        if origin is not None and field not in used and not origin.startswith(file.name):
            conflict = f"with which {spelling(field)} would do nothing"
            yield f"{file.name} has the schedule {scheduler['type']}, {conflict}", field


def keys_without_flag(request: Request) -> list[str]:
    """Return the keys that request something from DeepSpeed itself, which no flag does."""
    table = key_table()
    flags = {"zero_optimization.stage", "fp16.enabled", "bf16.enabled", "zero_optimization.offload_optimizer.device"}
    return [
        path
        for path, value in leaves(file_of(request).content)
        if not is_neutral(value)
        and path.partition(".")[0] not in table.own
        and path not in {*flags, *ENTRIES, *table.noted}
    ]
