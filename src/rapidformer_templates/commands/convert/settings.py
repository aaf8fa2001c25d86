"""Settings that several trainers have: optimizers, adapters, data sets, DeepSpeed files, FSDP, trackers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rapidformer_templates.commands.convert.conversion import Result, Source, Value, read_json
from rapidformer_templates.planning.flag_values import TRACKERS

OPTIMIZERS = {
    "adam": "adamw_torch",
    "adamw": "adamw_torch",
    "adamw_hf": "adamw_torch",
    "adamw_torch": "adamw_torch",
    "adamw_torch_fused": "adamw_torch_fused",
    "adamw_apex_fused": "adamw_apex_fused",
    "adamw_anyprecision": "adamw_anyprecision",
    "adamw_bnb_8bit": "adamw_bnb_8bit",
    "adamw_8bit": "adamw_bnb_8bit",
    "adamw_torch_8bit": "adamw_torch_8bit",
    "ao_adamw_8bit": "adamw_torch_8bit",
    "adamw_torch_4bit": "adamw_torch_4bit",
    "ao_adamw_4bit": "adamw_torch_4bit",
    "adafactor": "adafactor",
    "lamb": "lamb",
    "lion": "lion",
    "lion_32bit": "lion",
    "muon": "muon",
    "paged_adamw": "adamw_torch",
    "paged_adamw_32bit": "adamw_torch",
    "paged_adamw_8bit": "adamw_bnb_8bit",
    "paged_lion_32bit": "lion",
}
"""This library's optimizer for the name of another one."""

NO_OPTIMIZER = "the default AdamW is used. Build another optimizer in build_optimizer() of your script"


def set_optimizer(result: Result, key: str, name: str) -> None:
    """Set the optimizer, or name one that has no counterpart."""
    optimizer = OPTIMIZERS.get(name.lower())
    if optimizer is None:
        result.miss(key, name, NO_OPTIMIZER)
        return
    result.set("optimizer", optimizer)
    if name.startswith("paged_"):
        result.note(
            f"{key}: {name} pages its states to host memory. {optimizer} keeps them on the device (cpu-offload: true)"
        )
    if optimizer == "muon":
        result.note(f"{key}: muon scales its updates like those of AdamW here, so the learning rate may differ")


@dataclass(frozen=True)
class Adapter:
    """Adapters, with the values that the other trainer uses.

    Attributes:
        rank: the rank, or None if the whole model is trained.
        alpha: numerator of the scale, or None for twice the rank.
        dropout: dropout before the adapters.
        targets: ends of the names of layers. Empty for all linear layers.
        whole: modules that are trained as a whole.
        variant: lora, rslora or dora.
    """

    rank: int | None
    alpha: float | None
    dropout: float
    targets: tuple[str, ...]
    whole: tuple[str, ...]
    variant: str = "lora"


ALL_LINEAR = {"all", "all-linear", "all_linear"}
NO_PATTERN = "names of layers are ends of names here, separated by commas. all-linear is used instead"


def set_adapter(result: Result, adapter: Adapter, targets_key: str) -> None:
    """Set the flags of LoRA. Patterns of names are named, because only ends of names can be given."""
    if adapter.rank is None:
        return
    result.set("lora_rank", adapter.rank)
    if adapter.alpha is not None and adapter.alpha != 2 * adapter.rank:
        result.set("lora_alpha", adapter.alpha)
    if adapter.dropout > 0:
        result.set("lora_dropout", adapter.dropout)
    patterns = [name for name in adapter.targets if set(name) & set("[]()|*\\^$+?")]
    if patterns:
        result.miss(targets_key, patterns[0], NO_PATTERN)
    elif adapter.targets and not ALL_LINEAR & set(adapter.targets):
        result.set("lora_target_modules", ",".join(adapter.targets))
    if adapter.whole:
        result.set("lora_modules_to_save", ",".join(adapter.whole))
    if adapter.variant != "lora":
        result.set("lora_variant", adapter.variant)


def set_quantized_base(result: Result, key: str, bits: int, *, adapters: bool) -> None:
    """Set the bits of a frozen base, which needs adapters."""
    if adapters and bits in (4, 8):
        result.set("quantize_base", "nf4" if bits == 4 else "int8")
    else:
        result.miss(key, bits, "only the frozen base under adapters is quantized, in 4 or 8 bits (quantize-base)")


PREFERENCE_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
"""This library's loss for a name in TRL and LLaMA-Factory."""

FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet")


def set_data_set(result: Result, path: str, configuration: str | None = None) -> None:
    """Set the data set: a file, a folder, or a name on the hub."""
    if path.endswith(FILES):
        result.set("data_dir", str(Path(path).parent))
        result.set("data_name", Path(path).name)
    elif configuration and configuration != "default":
        result.set("data_dir", path)
        result.set("data_name", configuration)
    else:
        result.set("data_dir" if path.startswith(("/", ".", "~")) else "data_name", path)


SEVERAL = "give one data set, or weights for a mixture: data-dir, and data-name: 0.5 a 0.5 b (docs/fine-tuning-data.md)"


def set_trackers(result: Result, key: str, names: Iterable[str], run: str | None, project: str | None) -> None:
    """Set the trackers, and the names of the run and of the project in them."""
    known = [name for name in names if name in TRACKERS or name == "all"]
    for name in names:
        if name not in known and name != "none":
            result.miss(key, name, f"write a callback of your script. Trackers here: {', '.join(TRACKERS)}")
    if known:
        result.set("report_to", ",".join(known))
        result.set("run_name", run)
        result.set("project_name", project)


SHARDING = {"full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "auto_wrap", "offload", "no_shard"}

IDLE_FSDP: dict[str, Value] = {
    "min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False,
}  # fmt: skip
"""Options that transformers writes into every file of arguments, also without FSDP."""


def set_fsdp(result: Result, source: Source) -> None:
    """Set the flags of FSDP from the keys ``fsdp`` and ``fsdp_config``.

    A file that ``fsdp_config`` names is not read.
    """
    value, options = source.get("fsdp"), source.get("fsdp_config")
    words = set(source.words("fsdp")) if not isinstance(value, bool) else ({"full_shard"} if value else set())
    if isinstance(options, str):
        result.miss(source.own("fsdp_config"), options, "write its options as fsdp flags (docs/partitioning.md)")
    mapping = options if isinstance(options, dict) else {}
    settings = {name.removeprefix("fsdp_"): value for name, value in mapping.items()}  # some versions write the prefix
    settings = {name: value for name, value in settings.items() if value != IDLE_FSDP.get(name, ...)}
    version_2 = value is None and bool(settings)
    if (not words and not version_2) or "no_shard" in words:
        return
    result.set("fsdp_memory_optimization", True)
    strategy = str(settings.get("sharding_strategy", "")).lower()
    words |= {strategy} if strategy in SHARDING else set()
    if "shard_grad_op" in words or settings.get("reshard_after_forward") in (False, "SHARD_GRAD_OP"):
        result.set("fsdp_reshard_after_forward", False)
    if any(word.startswith("hybrid") for word in words):
        result.miss("fsdp", "hybrid_shard", "fsdp-shard-size: N, the workers of a node")
    if "offload" in words or settings.get("offload_params") is True or settings.get("cpu_offload") is True:
        result.set("cpu_offload", True)
    if settings.get("activation_checkpointing") is True:
        result.set("checkpoint_activations", True)
    for word in sorted(words - SHARDING):
        result.miss(source.own("fsdp"), word, "full_shard, shard_grad_op and hybrid_shard are known")


UNREAD_FILE = "the file is not there, so its ZeRO stage is unknown; DeepSpeed reads it in the run (deepspeed-config)"


def set_deepspeed(result: Result, source: Source, folders: Iterable[Path]) -> None:
    """Set the ZeRO stage and the offload of the DeepSpeed file that is named, or that is part of the configuration."""
    value = source.get("deepspeed")
    if value in (None, False):
        return
    file = next((folder / str(value) for folder in folders if (folder / str(value)).is_file()), None)
    content = value if isinstance(value, dict) else read_json(file) if file else None
    if content is None:
        result.set("deepspeed_config", str(value))
        result.note(f"{source.own('deepspeed')}: {value}: {UNREAD_FILE}")
        return
    part = content.get("zero_optimization")
    settings = part if isinstance(part, dict) else {}
    number = settings.get("stage", 0)
    if number in (1, 2, 3):
        result.set(f"zero_{number}_memory_optimization", True)
    devices = {name: _device(settings.get(f"offload_{name}")) for name in ("optimizer", "param")}
    if "nvme" in devices.values():
        result.miss("offload device", "nvme", "nvme-path: DIR")
    elif "cpu" in devices.values():
        result.set("cpu_offload", True)
    converted = ("stage", "offload_optimizer", "offload_param")
    others = {key: one for key, one in settings.items() if key not in converted}
    if tuned := sorted(key for key, one in others.items() if one != "auto" and not isinstance(one, bool | None)):
        hint = "deepspeed-config: FILE in place of the ZeRO flag keeps them"
        result.note(
            f"{source.own('deepspeed')}: ZeRO {number}. Its other settings ({', '.join(tuned)}) are not used. {hint}"
        )


def _device(part: Value) -> Value:
    return part.get("device") if isinstance(part, dict) else None
