"""A DeepSpeed file and the flags: each value stands in one of them, or in both alike. Imports no torch.

What the file says and no flag says becomes a flag, so that one plan shows everything; ``"auto"`` is
filled from the flags; what both say must agree. What no flag knows is handed to DeepSpeed as it is.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer_templates.config import RunConfig, spelling
from rapidformer_templates.errors import ConfigError

if TYPE_CHECKING:
    from rapidformer_templates.switches._switch import Request

AUTO = "auto"


@dataclass(frozen=True)
class Entry:
    """A value of the file that is also a flag.

    Attributes:
        path: its place in the file, with dots.
        field: the flag's field.
        to_flag: the flag's value for one in the file.
    """

    path: str
    field: str
    to_flag: Callable[[Any], Any] = lambda value: value


ENTRIES = (
    Entry("train_micro_batch_size_per_gpu", "micro_batch_size"),
    Entry("train_batch_size", "global_batch_size"),
    Entry("gradient_clipping", "clip_grad", float),
    Entry("optimizer.params.lr", "lr", float),
    Entry("optimizer.params.weight_decay", "weight_decay", float),
    Entry("zero_optimization.stage3_param_persistence_threshold", "zero_3_param_persistence_threshold", int),
    Entry("zero_optimization.stage3_prefetch_bucket_size", "zero_3_prefetch_bucket_size", int),
    Entry("zero_optimization.stage3_max_live_parameters", "zero_3_max_live_parameters", int),
    Entry("zero_optimization.offload_optimizer.nvme_path", "nvme_path"),
)

ZERO = tuple(f"zero_{level}_memory_optimization" for level in (1, 2, 3))

OURS_ALONE = {
    "scheduler": "the schedule is that of --lr-decay-style, --lr-warmup-iters and --min-lr; leave it out",
    "amp": "the precision is that of --mixed-precision; leave it out",
    "torch_autocast": "the precision is that of --mixed-precision; leave it out",
    "sparse_attention": "leave it out",
    "curriculum_learning": "the order of the data is the library's; leave it out",
    "data_efficiency": "the order of the data is the library's; leave it out",
    "pipeline": "leave it out",
    "autotuning": "leave it out",
}
"""Sections that would take over what the library does itself, and what to do."""


def read(text: str) -> dict[str, Any]:
    """The content of a DeepSpeed file, or of JSON that is given in its place.

    Raises:
        ConfigError: there is no such file, or it is no JSON object, or it asks for what the library does itself.
    """
    inline = text.lstrip().startswith("{")
    if not inline and not Path(text).is_file():
        raise ConfigError(f"the DeepSpeed file {text} does not exist", where="--deepspeed-config")
    try:
        content = json.loads(text if inline else Path(text).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{_shown(text)} is not JSON: {error}", where="--deepspeed-config") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{_shown(text)} does not hold a JSON object", where="--deepspeed-config")
    for section, hint in OURS_ALONE.items():
        if section in content and set(_leaves(content[section])) != {AUTO}:
            raise ConfigError(f"{_shown(text)} has a section {section}", where="--deepspeed-config", hint=hint)
    return content


def _shown(text: str) -> str:
    """How the file is named in messages."""
    return "the JSON of --deepspeed-config" if text.lstrip().startswith("{") else Path(text).name


def _leaves(value: Any) -> Iterator[Any]:
    """The values inside of sections, names of types left out; a section that is switched off has only auto ones."""
    if not isinstance(value, dict):
        yield value
        return
    if value.get("enabled") is False:
        yield AUTO
        return
    for key, inner in value.items():
        if key != "type":
            yield from _leaves(inner)


def look_up(content: Mapping[str, Any], path: str) -> Any:
    """The value at a path with dots; None where there is none, or ``"auto"``."""
    value: Any = content
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    return None if value == AUTO else value


def as_flags(content: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """What the file says in the words of the flags: field → (path in the file, value)."""
    found: dict[str, tuple[str, Any]] = {}
    for entry in ENTRIES:
        value = look_up(content, entry.path)
        if value is not None:
            found[entry.field] = (entry.path, entry.to_flag(value))
    stage = look_up(content, "zero_optimization.stage")
    if stage:
        found[f"zero_{stage}_memory_optimization"] = ("zero_optimization.stage", True)
    enabled = {kind: look_up(content, f"{kind}.enabled") for kind in ("fp16", "bf16")}
    chosen = next((kind for kind, value in enabled.items() if value), None)
    if chosen or any(value is False for value in enabled.values()):
        found["mixed_precision"] = (f"{chosen or 'fp16'}.enabled", chosen)
    device = look_up(content, "zero_optimization.offload_optimizer.device")
    if device is not None:
        found["cpu_offload"] = ("zero_optimization.offload_optimizer.device", device == "cpu")
    return found


def adopt(config: RunConfig) -> RunConfig:
    """The configuration with what the file says and no flag does; the file is its origin.

    Raises:
        ConfigError: the file cannot be used.
    """
    text = config.get("deepspeed_config")
    if text is None:
        return config
    said = as_flags(read(text))
    new = {name: value for name, (_, value) in said.items() if name not in config.origins and value is not None}
    if _stages(config):  # the file's stage is the same one, or a contradiction
        new = {name: value for name, value in new.items() if name not in ZERO}
    changed = {name: value for name, value in new.items() if value != config.get(name)}
    return config.replace(_shown(text), **changed) if changed else config


def contradictions(request: Request) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(what the file says otherwise than the flags, fields of those flags), one after another."""
    content = _content(request)
    shown = _shown(request.config.get("deepspeed_config"))
    for name, (path, value) in as_flags(content).items():
        flag_value = request.config.get(name)
        if name in ZERO:
            for other in _stages(request.config):
                if other != name:
                    yield f"{shown} has {path} = {look_up(content, path)}, {_said(request, other)}", (other,)
            continue
        if name == "global_batch_size" and flag_value is None:
            continue
        if name == "mixed_precision" and flag_value == AUTO:
            continue
        if flag_value != value:
            yield f"{shown} has {path} = {look_up(content, path)}, {_said(request, name)}", (name,)
    steps = look_up(content, "gradient_accumulation_steps")
    if steps is not None and steps != request.sizes.accumulation:
        batches = ("global_batch_size", "micro_batch_size")
        ours = request.sizes.accumulation
        yield f"{shown} has gradient_accumulation_steps = {steps}, the batch sizes make {ours}", batches


def _stages(config: RunConfig) -> list[str]:
    """The ZeRO flags that are on."""
    return [name for name in ZERO if config.get(name)]


def _said(request: Request, name: str) -> str:
    value = request.config.get(name)
    word = {True: "is on", False: "is off", None: "is not given"}.get(value, f"is {value}")
    return f"{spelling(name)} {word} ({request.config.origin(name)})"


def _content(request: Request) -> dict[str, Any]:
    text = request.config.get("deepspeed_config")
    # That the file is there has been seen when it was adopted; a plan of switches alone has none.
    given = text is not None and (text.lstrip().startswith("{") or Path(text).is_file())
    return read(text) if given else {}


def effective(request: Request, precision: str) -> dict[str, Any]:
    """The DeepSpeed configuration of a run: the file, with what the flags say.

    Args:
        precision: ``fp32``, ``bf16`` or ``fp16``.
    """
    content = _content(request)
    content = {name: section for name, section in content.items() if name not in (*OURS_ALONE, "optimizer")}
    return _merged(content, from_flags(request, precision))


def from_flags(request: Request, precision: str) -> dict[str, Any]:
    """What the flags say, in DeepSpeed's words."""
    config, sizes = request.config, request.sizes
    return {
        "train_batch_size": sizes.global_batch,
        "train_micro_batch_size_per_gpu": sizes.micro_batch,
        "gradient_accumulation_steps": sizes.accumulation,
        "gradient_clipping": config.training.clip_grad,
        "steps_per_print": 2**31,  # progress and metrics are ours
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
    stage = next(level for level in (1, 2, 3) if f"zero-{level}" in request.active)
    section: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "reduce_bucket_size": 20_000_000,
        "allgather_bucket_size": 50_000_000,
    }
    if stage == 3:
        section |= {
            "stage3_param_persistence_threshold": config.get("zero_3_param_persistence_threshold"),
            "stage3_prefetch_bucket_size": config.get("zero_3_prefetch_bucket_size"),
            "stage3_max_live_parameters": config.get("zero_3_max_live_parameters"),
            "stage3_max_reuse_distance": config.get("zero_3_max_live_parameters"),
            # These two would replace a function of torch, and Module.apply, for the whole process.
            "memory_efficient_linear": False,
            "override_module_apply": False,
        }
    pinned = request.environment.device == "cuda"
    if "nvme-offload" in request.active:
        place = {"device": "nvme", "nvme_path": config.get("nvme_path"), "pin_memory": pinned}
        # The optimizer state passes through memory a sub-group at a time, in four buffers of that size.
        buffers = {"buffer_size": _largest_share(request)}
        section |= {"offload_optimizer": place, "offload_param": {**place, **buffers}, "sub_group_size": 25_000_000}
    elif "cpu-offload" in request.active:
        place = {"device": "cpu", "pin_memory": pinned}
        section |= {"offload_optimizer": place} | ({"offload_param": dict(place)} if stage == 3 else {})
    return section


def _largest_share(request: Request) -> int:
    """Elements of a buffer that a worker's share of any parameter passes through on its way to a disk.

    The largest parameter is the embedding or a feed-forward; where the sizes are not known, DeepSpeed's default.
    """
    model, workers = request.model, request.sizes.data
    if request.environment.white_box or model.hidden_size is None or model.vocab_size is None:
        return 100_000_000
    largest = model.hidden_size * max(-(-model.vocab_size // 128) * 128, 8 * model.hidden_size)
    return -(-largest // workers) + 2**20  # and what alignment adds


def _merged(content: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """The file's values where it has any, ours where it has none or ``"auto"``."""
    result: dict[str, Any] = copy.deepcopy(dict(ours))
    for name, value in content.items():
        if isinstance(value, dict):
            result[name] = _merged(value, result.get(name) or {})
        elif value != AUTO:
            result[name] = value
    return result
