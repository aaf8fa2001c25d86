"""The values of a DeepSpeed file that are also flags, and the DeepSpeed configuration of a run. Does not import torch.

Values that are only in the file become flags, so that one plan shows everything. ``"auto"`` is filled from the flags.
Values in both must agree. Values without a flag are passed to DeepSpeed unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rapidformer_templates.planning.changes import DROP, WITHOUT, Change
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.deepspeed_file.file import (
    AUTO,
    OPTIMIZERS,
    DeepSpeedFile,
    Json,
    Section,
    file_of,
    is_neutral,
    key_table,
    leaves,
    look_up,
    read,
    section_at,
    shown,
    type_of,
    whole,
)
from rapidformer_templates.planning.schedules import DEEPSPEED_FLAGS, DEEPSPEED_SCHEDULES, OF_SCHEDULES, FileSchedule

if TYPE_CHECKING:
    from rapidformer_templates.planning.switch import Request

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
    content = file.content
    entries = [(field, path, look_up(content, path)) for path, field in key_table().entries.items()]
    own = [*((field, path, value) for field, path, value in entries if value is not None), *_other_flags(content)]
    found = [(field, path, value, str(look_up(content, path))) for field, path, value in own]
    parameters = section_at(content, "scheduler.params")
    for name, default in DEEPSPEED_SCHEDULES.get(type_of(content, "scheduler"), {}).items():
        value = parameters.get(name, default)
        if value is not None and value != AUTO:
            note = "" if name in parameters else " (DeepSpeed's default)"
            found.append((DEEPSPEED_FLAGS[name], f"scheduler.params.{name}", value, f"{value}{note}"))
    return [
        FlagValue(field, path, config.checked(field, whole(value), f"{file.where(path)}, {path}"), shown_value)
        for field, path, value, shown_value in found
    ]


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
    if isinstance(betas, list) and len(betas) == 2:  # idle_keys() reports others
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


def contradictions(request: Request) -> Iterator[tuple[str, Change | None]]:
    """Yield each value of the file that contradicts a flag, and flags of another schedule.

    An item is (message, change that leaves the flag to the file or None).
    """
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
            values = {field: False, flag.field: flag.value} if flag.field in ZERO else {field: flag.value}
            change = None if value is None else Change(f"{WITHOUT}{spelling(field)}", DROP, values)
            yield f"{file.name} has {flag.path} = {flag.shown}, {flags}", change
    steps, accumulation = look_up(file.content, "gradient_accumulation_steps"), request.sizes.accumulation
    if steps is not None and steps != accumulation:
        yield f"{file.name} has gradient_accumulation_steps = {steps}, the batch sizes make {accumulation}", None
    if (scheduler := file_schedule(request)) is None:
        return
    used = {DEEPSPEED_FLAGS[name] for name in DEEPSPEED_SCHEDULES[scheduler["type"]]}
    if scheduler["params"].get("warmup_num_steps") == AUTO:
        used |= {"lr_warmup_fraction", "lr_warmup_samples"}
    for field in OF_SCHEDULES:
        origin = config.origins.get(field, file.name)
        if field not in used and not origin.startswith(file.name):
            flags = f"{spelling(field)} ({origin})"
            yield f"{file.name} has the schedule {scheduler['type']}, with which {flags} would do nothing", None


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


def keys_without_flag(request: Request) -> list[str]:
    """Return the keys that request something from DeepSpeed itself, which no flag does."""
    table = key_table()
    flags = {"zero_optimization.stage", "fp16.enabled", "bf16.enabled", "zero_optimization.offload_optimizer.device"}
    return [
        path
        for path, value in leaves(file_of(request).content)
        if not is_neutral(value)
        and path.partition(".")[0] not in table.own
        and path not in {*flags, *table.entries, *table.noted}
    ]


LEAST, MOST = 2**18, 50_000_000
"""Limits of a bucket's elements. With fewer, sending takes longer than computing. With more, it is not faster."""

OFFLOADS = ("offload_optimizer", "offload_param")
LOUD = ("wall_clock_breakdown", "memory_breakdown", "dump_state")
"""Keys that make DeepSpeed print."""


def smallest_bucket(device: str) -> int:
    """Return the elements of the smallest bucket: 1 MB in fp32 on a CPU, 32 MB on an accelerator.

    An exchange would take longer to begin than to send a smaller one.
    """
    return LEAST if device == "cpu" else 2**23


def bucket_sizes(width: int, device: str) -> dict[str, int]:
    """Return the elements of each bucket, and the size above which ZeRO-3 partitions a parameter.

    A bucket has the size of a square matrix of this width, as in DeepSpeed's guide [D].

    Args:
        width: the width of the model.
        device: kind of device, which decides the size of the smallest bucket.
    """
    square = min(max(width * width, smallest_bucket(device)), MOST)
    return {
        "reduce_bucket_size": square,
        "allgather_bucket_size": square + square % 2,  # DeepSpeed requires an even size
        "stage3_prefetch_bucket_size": square * 9 // 10,
        "stage3_param_persistence_threshold": 10 * width,
    }


def fill_bucket_sizes(settings: Section, width: int, device: str) -> dict[str, Json]:
    """Return the section ``zero_optimization`` with sizes in place of each ``"auto"``.

    Args:
        width, device: see :func:`bucket_sizes`.
    """
    sizes = bucket_sizes(width, device)
    return {name: sizes.get(name, value) if value == AUTO else value for name, value in settings.items()}


def deepspeed_settings(request: Request, precision: str) -> dict[str, Json]:
    """Return the DeepSpeed configuration of a run: the file, combined with the flags.

    Args:
        precision: ``fp32``, ``bf16`` or ``fp16``.
    """
    content = file_of(request).content
    passed = {name: value for name, value in content.items() if name in key_table().passed}
    sizes = request.sizes
    from_flags: dict[str, Json] = {
        "train_batch_size": sizes.global_batch,
        "train_micro_batch_size_per_gpu": sizes.micro_batch,
        "gradient_accumulation_steps": sizes.accumulation,
        "gradient_clipping": request.config.training.clip_grad,
        "steps_per_print": 2**31,  # this library reports progress and metrics
        "zero_allow_untested_optimizer": True,  # RF025 refuses those that cannot update shards
        "zero_force_ds_cpu_optimizer": False,
        "fp16": {
            "enabled": precision == "fp16",
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 2000,
            "hysteresis": 1,
            "min_loss_scale": 1,
        },
        "bf16": {"enabled": precision == "bf16", "check_grad_overflow": True},
        "zero_optimization": _zero_stage_settings(request),
    }
    merged = _merged(passed, from_flags)
    steps = content.get("steps_per_print")
    if isinstance(steps, int) and any(content.get(name) for name in LOUD):
        merged["steps_per_print"] = steps  # the interval at which DeepSpeed prints
    return merged


def _merged(content: Section, defaults: Section) -> dict[str, Json]:
    """Replace defaults with the file's values, except with ``"auto"``, or with null in place of a section."""
    result = copy.deepcopy(dict(defaults))
    for name, value in content.items():
        default = result.get(name)
        if isinstance(value, Mapping):
            result[name] = _merged(value, default if isinstance(default, Mapping) else {})
        elif value != AUTO and not (value is None and isinstance(default, Mapping)):
            result[name] = value
    return result


def _zero_stage_settings(request: Request) -> dict[str, Json]:
    config = request.config
    stage = next(level for level in (1, 2, 3) if f"zero-{level}" in request.active)
    width = None if request.environment.white_box else request.model.hidden_size
    known = bucket_sizes(width or 1, request.environment.device)
    sizes: dict[str, Json] = {name: AUTO if width is None else size for name, size in known.items()}
    for path, field in key_table().entries.items():
        name = path.rpartition(".")[2]
        if name in sizes and config.get(field) is not None:
            sizes[name] = config.get(field)
    if stage == 3:
        sizes |= {
            "stage3_max_live_parameters": config.get("zero_3_max_live_parameters"),
            "stage3_max_reuse_distance": config.get("zero_3_max_live_parameters"),
            # These two would replace a torch function, and Module.apply, in the whole process.
            "memory_efficient_linear": False,
            "override_module_apply": False,
        }
    section = {"stage": stage, "contiguous_gradients": True, **sizes, **_offloads(request, stage)}
    if stage < 3 and request.environment.device != "cpu":
        section["overlap_comm"] = True  # gradients travel during the backward. DeepSpeed does so by itself for ZeRO-3
    return {name: value for name, value in section.items() if stage == 3 or not name.startswith("stage3_")}


def _offloads(request: Request, stage: int) -> dict[str, Json]:
    """Return the sections that move states to the host or to a disk."""
    pinned = request.environment.device != "cpu"
    section: dict[str, Json] = {}
    if "nvme-offload" in request.active:
        device = {"device": "nvme", "nvme_path": request.config.get("nvme_path"), "pin_memory": pinned}
        # A buffer holds a worker's share of any parameter on its way to a disk, plus padding for alignment. The largest
        # parameter is the embedding or a feed-forward. If the sizes are unknown, it is DeepSpeed's default.
        model, buffer = request.model, 100_000_000
        if not request.environment.white_box and model.hidden_size is not None and model.vocab_size is not None:
            largest = model.hidden_size * max(-(-model.vocab_size // 128) * 128, 8 * model.hidden_size)
            buffer = -(-largest // request.sizes.data) + 2**20
        buffers = {"buffer_size": buffer}
        # The optimizer state passes through memory one sub-group at a time, in four buffers of that size.
        section = {"offload_optimizer": device, "offload_param": {**device, **buffers}, "sub_group_size": 25_000_000}
    elif "cpu-offload" in request.active:
        device = {"device": "cpu", "pin_memory": pinned}
        section = {"offload_optimizer": device} | ({"offload_param": dict(device)} if stage == 3 else {})
    zero = section_at(file_of(request).content, "zero_optimization")
    named = {name for name in OFFLOADS if isinstance(zero.get(name), Mapping)}
    # A file that names one of the two offloads only that one.
    return {name: value for name, value in section.items() if not named or name not in OFFLOADS or name in named}


def file_notes(request: Request) -> Iterator[str]:
    """Yield the plan's notes about a file."""
    file = file_of(request)
    for new, old in file.renamed.items():
        yield f"{file.name}: {old} is read as {new}, where DeepSpeed looks for it"
    for path, why in key_table().noted.items():
        value = look_up(file.content, path)
        prints_anyway = path == "steps_per_print" and any(file.content.get(name) for name in LOUD)
        if not is_neutral(value) and not prints_anyway:
            yield f"{file.name}: {path} {shown(value)}: {why}"
    if look_up(file.content, "optimizer.params.weight_decay"):
        yield f"{file.name}: optimizer.params.weight_decay does not apply to biases and norms, as elsewhere"
    if scheduler := file_schedule(request):
        listed = (f"{name} {shown(value)}" for name, value in scheduler["params"].items())
        yield f"{file.name}: the learning rate follows DeepSpeed's {scheduler['type']} ({', '.join(listed)})"
    if "aio" in file.content and "nvme-offload" not in request.active:
        yield f"{file.name}: aio acts with offload to NVMe only"
