"""A DeepSpeed file and the flags. Each value is in one of them, or the same in both. Does not import torch.

Values that are only in the file become flags, so that one plan shows everything. ``"auto"`` is filled from the flags.
Values in both must agree. Values without a flag are passed to DeepSpeed unchanged.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.deepspeed_file.buckets import by_width
from rapidformer_templates.planning.deepspeed_file.json import DeepSpeedFile, parse
from rapidformer_templates.planning.deepspeed_file.keys import (
    OPTIMIZERS,
    PASSED_TO_DEEPSPEED,
    are_betas,
    is_epsilon,
    look_up,
)
from rapidformer_templates.planning.deepspeed_file.schedules import AUTO, FLAGS, PARAMETERS

if TYPE_CHECKING:
    from rapidformer_templates.planning.switch import Request


def _whole(value: Any) -> Any:
    """Convert ``2e8``, which JSON reads as a float, to an integer."""
    return int(value) if isinstance(value, float) and math.isfinite(value) and value.is_integer() else value


@dataclass(frozen=True)
class FileEntry:
    """A value of the file that is also a flag.

    Attributes:
        path: its path in the file, with dots.
        field: the flag's field.
        to_flag: converts the file's value to the flag's.
    """

    path: str
    field: str
    to_flag: Callable[[Any], Any] = lambda value: value


ENTRIES = (
    FileEntry("train_micro_batch_size_per_gpu", "micro_batch_size", _whole),
    FileEntry("train_batch_size", "global_batch_size", _whole),
    FileEntry("gradient_clipping", "clip_grad"),
    FileEntry("optimizer.params.lr", "lr"),
    FileEntry("optimizer.params.weight_decay", "weight_decay"),
    FileEntry("zero_optimization.stage3_param_persistence_threshold", "zero_3_param_persistence_threshold", _whole),
    FileEntry("zero_optimization.stage3_prefetch_bucket_size", "zero_3_prefetch_bucket_size", _whole),
    FileEntry("zero_optimization.stage3_max_live_parameters", "zero_3_max_live_parameters", _whole),
)

ZERO = tuple(f"zero_{level}_memory_optimization" for level in (1, 2, 3))
OFFLOADS = ("offload_optimizer", "offload_param")
LOUD = ("wall_clock_breakdown", "memory_breakdown", "dump_state")
"""Keys that make DeepSpeed print."""


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
    value: Any
    shown: str


def read(text: str) -> DeepSpeedFile:
    """Read a DeepSpeed file, or JSON in its place, and rename its keys as in the installed DeepSpeed.

    Raises:
        ConfigError: the file does not exist or is not a JSON object, or it has a key twice.
    """
    file = parse(text)
    content, renamed = _booleans(file.content), {}
    zero = content.get("zero_optimization")
    if isinstance(zero, dict):
        if "aio" in zero and "aio" not in content:  # its place in the guide
            content["aio"], renamed["aio"] = zero.pop("aio"), "zero_optimization.aio"
        for name in [name for name in zero if f"stage3_{name}" in _ZERO_STAGE_3]:
            zero[f"stage3_{name}"] = zero.pop(name)
            renamed[f"zero_optimization.stage3_{name}"] = f"zero_optimization.{name}"
    aio = content.get("aio")
    if isinstance(aio, dict) and "thread_count" in aio:  # its name in the guide
        aio["intra_op_parallelism"] = aio.pop("thread_count")
        renamed["aio.intra_op_parallelism"] = f"{renamed.get('aio', 'aio')}.thread_count"
    return replace(file, content=content, renamed=renamed)


_ZERO_STAGE_3 = {entry.path.rpartition(".")[2] for entry in ENTRIES} | {"stage3_max_reuse_distance"}


def _booleans(value: Any) -> Any:
    """Replace ``"true"`` and ``"false"`` with booleans in the file's values."""
    if isinstance(value, dict):
        return {key: _booleans(inner) for key, inner in value.items()}
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def as_flags(file: DeepSpeedFile, config: RunConfig) -> list[FlagValue]:
    """Return the values of the file that are also flags.

    Raises:
        ConfigError: a value does not have its flag's type, or is out of range.
    """
    content, values = file.content, []

    def add(name: str, path: str, value: Any, shown: Any = None) -> None:
        checked = config.checked(name, value, f"{file.where(path)}, {path}")
        values.append(FlagValue(name, path, checked, str(look_up(content, path) if shown is None else shown)))

    for entry in ENTRIES:
        value = look_up(content, entry.path)
        if value is not None:
            add(entry.field, entry.path, entry.to_flag(value))
    zero_stage = look_up(content, "zero_optimization.stage")
    if zero_stage in (1, 2, 3):
        add(f"zero_{int(zero_stage)}_memory_optimization", "zero_optimization.stage", True)
    precision = _precision(content)
    if precision is not None:
        add("mixed_precision", f"{precision or 'fp16'}.enabled", precision or None)
    device = look_up(content, "zero_optimization.offload_optimizer.device")
    if device is not None:
        add("cpu_offload", "zero_optimization.offload_optimizer.device", device == "cpu")
    for name, path, value in (*_disks(content), *_of_adam(content)):
        add(name, path, value)
    kind = str(look_up(content, "optimizer.type") or "")
    if kind.lower() in OPTIMIZERS:
        add("optimizer", "optimizer.type", OPTIMIZERS[kind.lower()])
    for name, value, shown in _of_schedule(content):
        add(FLAGS[name], f"scheduler.params.{name}", _whole(value) if FLAGS[name] != "lr" else value, shown)
    return values


def _disks(content: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Return (field, key, folder) of each section that offloads to a disk."""
    for section in OFFLOADS:
        key = f"zero_optimization.{section}.nvme_path"
        if look_up(content, key) is not None and look_up(content, f"zero_optimization.{section}.device") == "nvme":
            yield "nvme_path", key, look_up(content, key)


def _precision(content: Mapping[str, Any]) -> str | None:
    """Return ``fp16`` or ``bf16``, an empty string if one of them is off, or None if the file has neither."""
    enabled = {kind: look_up(content, f"{kind}.enabled") for kind in ("fp16", "bf16")}
    off = "" if any(value is False for value in enabled.values()) else None
    return next((kind for kind, value in enabled.items() if value), off)


def _of_adam(content: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield (field, key, value) of valid betas and epsilon. A rule reports invalid ones."""
    betas, eps = (look_up(content, f"optimizer.params.{name}") for name in ("betas", "eps"))
    if are_betas(betas):
        yield from (
            (name, "optimizer.params.betas", beta)
            for name, beta in zip(("adam_beta1", "adam_beta2"), betas, strict=True)
        )
    if is_epsilon(eps):
        yield "adam_epsilon", "optimizer.params.eps", eps


def _of_schedule(content: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield (parameter, value, value as messages show it) of the schedule's parameters that are flags."""
    kind = look_up(content, "scheduler.type")
    parameters = look_up(content, "scheduler.params")
    parameters = parameters if isinstance(parameters, Mapping) else {}
    for name, default in PARAMETERS.get(kind, {}).items():
        if name in FLAGS and name in parameters and parameters[name] not in (AUTO, None):
            yield name, parameters[name], str(parameters[name])
        elif name in FLAGS and name not in parameters and default is not None:
            yield name, default, f"{default} (DeepSpeed's default)"


def merge_file(config: RunConfig) -> RunConfig:
    """Return the configuration with the values that are only in the file, with the file as their origin.

    Raises:
        ConfigError: the file cannot be used.
    """
    text = config.get("deepspeed_config")
    if text is None:
        return config
    file, has_zero_stage = read(text), bool(_zero_stages(config))
    for flag in as_flags(file, config):
        if flag.field in config.origins or flag.value is None or _matches(flag, config.get(flag.field)):
            continue
        if not (has_zero_stage and flag.field in ZERO):  # the file has the same stage, or it is a contradiction
            config = config.replace(file.where(flag.path), **{flag.field: flag.value})
    return config


def _matches(flag: FlagValue, value: Any) -> bool:
    """Return whether a flag's value matches the file. All implementations of Adam match each other."""
    return flag.value == value or (flag.field == "optimizer" and "adam" in flag.value and "adam" in value)


def contradictions(request: Request) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (message, fields of the flags) for each value of the file that contradicts the flags."""
    file = file_of(request)
    for flag in as_flags(file, request.config):
        name, flag_value = flag.field, request.config.get(flag.field)
        if name in ZERO:
            for other in _zero_stages(request.config):
                if other != name:
                    yield f"{file.name} has {flag.path} = {flag.shown}, {_flag_values(request, other)}", (other,)
            continue
        if name == "global_batch_size" and flag_value is None:
            continue
        if name == "mixed_precision" and flag_value == AUTO:
            continue
        if not _matches(flag, flag_value):
            yield f"{file.name} has {flag.path} = {flag.shown}, {_flag_values(request, name)}", (name,)
    steps = look_up(file.content, "gradient_accumulation_steps")
    if steps is not None and steps != request.sizes.accumulation:
        batches = ("global_batch_size", "micro_batch_size")
        accumulation = request.sizes.accumulation
        yield f"{file.name} has gradient_accumulation_steps = {steps}, the batch sizes make {accumulation}", batches


def _zero_stages(config: RunConfig) -> list[str]:
    """Return the ZeRO flags that are on."""
    return [name for name in ZERO if config.get(name)]


def _flag_values(request: Request, name: str) -> str:
    value = request.config.get(name)
    word = "is on" if value is True else "is off" if value is False else "is not given" if value is None else None
    return f"{spelling(name)} {word or f'is {value}'} ({request.config.origin(name)})"


def file_of(request: Request) -> DeepSpeedFile:
    """Return the file of a request, or an empty one if there is none."""
    text = request.config.get("deepspeed_config")
    # adopt() has already checked that the file exists. A plan of switches alone has no file.
    has_file = text is not None and (text.lstrip().startswith("{") or Path(text).is_file())
    return read(text) if has_file else DeepSpeedFile(str(text), {})


def effective(request: Request, precision: str) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a run: the file, combined with the flags.

    Args:
        precision: ``fp32``, ``bf16`` or ``fp16``.
    """
    file_content = file_of(request).content
    content = {name: section for name, section in file_content.items() if name in PASSED_TO_DEEPSPEED}
    merged = _merged(content, from_flags(request, precision))
    steps = file_content.get("steps_per_print")
    if isinstance(steps, int) and any(content.get(name) for name in LOUD):
        merged["steps_per_print"] = steps  # the interval at which DeepSpeed prints
    return merged


def from_flags(request: Request, precision: str) -> dict[str, Any]:
    """Return the flags as DeepSpeed's configuration."""
    config, sizes = request.config, request.sizes
    return {
        "train_batch_size": sizes.global_batch,
        "train_micro_batch_size_per_gpu": sizes.micro_batch,
        "gradient_accumulation_steps": sizes.accumulation,
        "gradient_clipping": config.training.clip_grad,
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
        "zero_optimization": _zero(request),
    }


def _zero(request: Request) -> dict[str, Any]:
    config = request.config
    zero_stage = next(level for level in (1, 2, 3) if f"zero-{level}" in request.active)
    section: dict[str, Any] = {
        "stage": zero_stage,
        "contiguous_gradients": True,
        **_buckets(request, zero_stage),
    }
    if zero_stage == 3:
        section |= {
            "stage3_max_live_parameters": config.get("zero_3_max_live_parameters"),
            "stage3_max_reuse_distance": config.get("zero_3_max_live_parameters"),
            # These two would replace a torch function, and Module.apply, in the whole process.
            "memory_efficient_linear": False,
            "override_module_apply": False,
        }
    pinned = request.environment.device != "cpu"
    if "nvme-offload" in request.active:
        device = {"device": "nvme", "nvme_path": config.get("nvme_path"), "pin_memory": pinned}
        # The optimizer state passes through memory one sub-group at a time, in four buffers of that size.
        buffers = {"buffer_size": _largest_share(request)}
        section |= {"offload_optimizer": device, "offload_param": {**device, **buffers}, "sub_group_size": 25_000_000}
    elif "cpu-offload" in request.active:
        device = {"device": "cpu", "pin_memory": pinned}
        section |= {"offload_optimizer": device} | ({"offload_param": dict(device)} if zero_stage == 3 else {})
    named = {name for name in OFFLOADS if isinstance(look_up(_zero_of(request), name), Mapping)}
    # A file that names one of the two offloads only that one.
    return {key: value for key, value in section.items() if not named or key not in OFFLOADS or key in named}


def _zero_of(request: Request) -> Mapping[str, Any]:
    section = file_of(request).content.get("zero_optimization")
    return section if isinstance(section, Mapping) else {}


def _buckets(request: Request, zero_stage: int) -> dict[str, Any]:
    """Return the sizes of buckets from a flag or from the width.

    ``"auto"`` if the width is known only from the model.
    """
    width = None if request.environment.white_box else request.model.hidden_size
    sizes: dict[str, Any] = by_width(width or 1)
    if width is None:
        sizes = dict.fromkeys(sizes, AUTO)
    for entry in ENTRIES:
        name = entry.path.rpartition(".")[2]
        if name in sizes and request.config.get(entry.field) is not None:
            sizes[name] = request.config.get(entry.field)
    return {name: size for name, size in sizes.items() if zero_stage == 3 or not name.startswith("stage3_")}


def _largest_share(request: Request) -> int:
    """Return the elements of a buffer that holds a worker's share of any parameter on its way to a disk.

    The largest parameter is the embedding or a feed-forward. If the sizes are unknown, it is DeepSpeed's default.
    """
    model, workers = request.model, request.sizes.data
    if request.environment.white_box or model.hidden_size is None or model.vocab_size is None:
        return 100_000_000
    largest = model.hidden_size * max(-(-model.vocab_size // 128) * 128, 8 * model.hidden_size)
    return -(-largest // workers) + 2**20  # plus padding for alignment


def _merged(content: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two configurations. The file's values replace ours, except ``"auto"``."""
    result: dict[str, Any] = copy.deepcopy(dict(defaults))
    for name, value in content.items():
        if isinstance(value, dict):
            result[name] = _merged(value, result.get(name) or {})
        elif value != AUTO:
            result[name] = value
    return result
