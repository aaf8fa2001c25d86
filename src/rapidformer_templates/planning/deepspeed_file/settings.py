"""The DeepSpeed configuration of a run: the flags, with the file's own values over them. Does not import torch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rapidformer_templates.planning.deepspeed_file.file import (
    AUTO,
    Json,
    Section,
    file_of,
    is_neutral,
    look_up,
    section_at,
    shown,
)
from rapidformer_templates.planning.deepspeed_file.flags import ENTRIES, file_schedule
from rapidformer_templates.planning.deepspeed_file.keys import key_table

if TYPE_CHECKING:
    from rapidformer_templates.planning.switch import Request

LEAST, MOST = 2**18, 50_000_000
"""Limits of a bucket's elements. With fewer, sending takes longer than computing. With more, it is not faster."""

OFFLOADS = ("offload_optimizer", "offload_param")
LOUD = ("wall_clock_breakdown", "memory_breakdown", "dump_state")
"""Keys that make DeepSpeed print."""


def bucket_sizes(width: int) -> dict[str, int]:
    """Return the elements of each bucket, and the size above which ZeRO-3 partitions a parameter.

    A bucket has the size of a square matrix of this width, as in DeepSpeed's guide [D].

    Args:
        width: the width of the model.
    """
    square = min(max(width * width, LEAST), MOST)
    return {
        "reduce_bucket_size": square,
        "allgather_bucket_size": square + square % 2,  # DeepSpeed requires an even size
        "stage3_prefetch_bucket_size": square * 9 // 10,
        "stage3_param_persistence_threshold": 10 * width,
    }


def fill_bucket_sizes(settings: Section, width: int) -> dict[str, Json]:
    """Return the section ``zero_optimization`` with sizes in place of each ``"auto"``.

    Args:
        width: the width of the model.
    """
    sizes = bucket_sizes(width)
    return {name: sizes.get(name, value) if value == AUTO else value for name, value in settings.items()}


def deepspeed_settings(request: Request, precision: str) -> dict[str, Json]:
    """Return the DeepSpeed configuration of a run: the file, combined with the flags.

    Args:
        precision: ``fp32``, ``bf16`` or ``fp16``.
    """
    content = file_of(request).content
    passed = {name: value for name, value in content.items() if name in key_table().passed}
    merged = _merged(passed, _from_flags(request, precision))
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


def _from_flags(request: Request, precision: str) -> dict[str, Json]:
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
        "zero_optimization": _zero_stage_settings(request),
    }


def _zero_stage_settings(request: Request) -> dict[str, Json]:
    config = request.config
    stage = next(level for level in (1, 2, 3) if f"zero-{level}" in request.active)
    width = None if request.environment.white_box else request.model.hidden_size
    sizes: dict[str, Json] = {name: AUTO if width is None else size for name, size in bucket_sizes(width or 1).items()}
    for path, field in ENTRIES.items():
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
