"""Configurations of LLaMA-Factory's version 1, in which each plugin has a mapping, such as ``peft_config``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from rapidformer_templates.commands.convert.conversion import (
    Options,
    Result,
    Source,
    Value,
    keys,
    mapping_of,
    read_text,
)
from rapidformer_templates.commands.convert.settings import (
    PREFERENCE_LOSSES,
    SEVERAL,
    Adapter,
    set_adapter,
    set_data_set,
    set_deepspeed,
    set_fsdp,
    set_optimizer,
    set_quantized_base,
)
from rapidformer_templates.commands.convert.training import IGNORED, REASONS, convert_training, in_epochs
from rapidformer_templates.errors import ConfigError

NAMES = {
    "model_name_or_path": "model",
    "per_device_train_batch_size": "micro_batch_size",
    "gradient_checkpointing": "enable_activation_checkpointing",
}

DEFAULTS: dict[str, Value] = {
    "output_dir": "outputs", "per_device_train_batch_size": 1, "num_train_epochs": 3, "learning_rate": 1e-4,
    "lr_scheduler_type": "constant", "cutoff_len": 2048, "bf16": True, "gradient_checkpointing": True,
    "logging_steps": 1, "save_strategy": "no", "seed": 42, "cp_mode": "ulysses",
}  # fmt: skip

KNOWN = keys(
    f"""
    {IGNORED} batching_workers dist_timeout init_config kernel_config max_new_tokens model_class sample_backend
    save_ckpt_as_hf dp_size mp_replicate_size
    """,
    *REASONS,
    ("custom_chat_template", "the chat template of the tokenizer is used. Change it there"),
    ("trust_remote_code", "give --trust-remote-code on the command line if you trust the code of the model"),
    ("eval_dataset", "eval-data-name: NAME=SET"),
    ("pref_ftx dpo_label_smoothing ld_alpha", "write compute_loss() in your script"),
)

PACKED = ("padding_free", "dynamic_padding_free")


def convert_version_1(values: dict[str, Value], options: Options) -> Result:
    """Convert a configuration of version 1. Its command decides between SFT, DPO and rewards, and is not in the file.

    Raises:
        ConfigError: this kind of training has no counterpart, or a value has the wrong type.
    """
    source = Source(values, NAMES, dict(DEFAULTS))
    result = Result(workers=options.world_size or 1)
    is_preference = options.task == "preference" or bool(values.keys() & {"pref_loss", "pref_beta", "simpo_gamma"})
    result.set("task", options.task or ("preference" if is_preference else "causal_lm"))
    if options.task is None and not is_preference:
        result.note("the file does not say whether it is for sft, dpo or rm: convert with --task preference or reward")
    result.set("pretrained_model_name_or_path", source.text("model_name_or_path"))
    _data(source, result, options.folders)
    context = source.whole("cp_size") or 1
    result.workers = max(result.workers, context)
    if context > 1:
        result.set("context_parallel_size", context)
        result.set("context_parallel_kind", "all-to-all" if source.text("cp_mode") == "ulysses" else "ring")
    source.get("cp_mode")
    replicas = result.workers // context
    micro, batch = source.whole("per_device_train_batch_size") or 1, source.whole("global_batch_size")
    if batch:
        source.defaults = {**source.defaults, "gradient_accumulation_steps": math.ceil(batch / (micro * replicas))}
    convert_training(source, result, options, held_out=None, replicas=replicas)
    saved = source.number("save_epochs")
    result.set("save_interval", in_epochs(saved) if saved else None)
    _plugins(source, result, options)
    if is_preference:
        loss = source.text("pref_loss") or "sigmoid"
        if loss not in PREFERENCE_LOSSES:
            raise ConfigError(f"pref_loss: {loss} is not supported", where="pref_loss")
        result.set("preference_loss", PREFERENCE_LOSSES[loss])
        result.set("preference_beta", source.number("pref_beta"))
        result.set("simpo_gamma", source.number("simpo_gamma") if loss == "simpo" else None)
    result.close(source, KNOWN)
    return result


def _data(source: Source, result: Result, folders: Iterable[Path]) -> None:
    """Set the data set that the YAML file of ``train_dataset`` describes, or the file that it names itself."""
    name = source.text("train_dataset") or ""
    file = next((folder / name for folder in folders if (folder / name).is_file()), None)
    sets = list(mapping_of(read_text(file), file).values()) if file and name.endswith((".yaml", ".yml")) else []
    if len(sets) == 1 and isinstance(sets[0], dict):
        set_data_set(result, str(sets[0].get("path", "")))
    elif sets or name.endswith((".yaml", ".yml")):
        result.miss("train_dataset", name, SEVERAL)
    else:
        set_data_set(result, name)
    result.set("seq_length", source.whole("cutoff_len"))
    strategy = source.text("batching_strategy") or "normal"
    if strategy in PACKED:
        result.set("pack_sequences", True)
    elif strategy == "dynamic_batching":
        result.miss("batching_strategy", strategy, "data-iterator: dynamic-shape, for pretraining")
    source.get("batching_strategy")


def _plugin(source: Source, key: str) -> tuple[str, Source]:
    """Return the name and the options of a plugin."""
    value = source.get(key)
    options = value if isinstance(value, dict) else {"name": value} if value else {}
    return str(options.get("name", "")), Source(options)


def _plugins(source: Source, result: Result, options: Options) -> None:
    name, _ = _plugin(source, "kernel_config")
    if "liger" in name:
        result.set("fused_linear_cross_entropy", True)
    name, division = _plugin(source, "dist_config")
    if name.startswith("fsdp"):
        set_fsdp(result, Source({"fsdp": True}))
        experts = division.whole("ep_size") or 1
        result.set("expert_model_parallel_size", experts if experts > 1 else None)
        result.workers = max(result.workers, experts)
    elif name == "deepspeed":
        set_deepspeed(result, Source({"deepspeed": division.get("config_file")}), options.folders)
    name, optimizer = _plugin(source, "optim_config")
    if name:
        set_optimizer(result, "optim_config", name)
        result.set("weight_decay", optimizer.number("wd", "weight_decay"))
    name, schedule = _plugin(source, "lr_scheduler_config")
    if name:
        result.miss("lr_scheduler_config", schedule.values.get("name"), "lr-decay-style and lr-warmup-iters")
    if (source.text("flash_attn") or "").startswith(("fa", "flash")):
        result.set("use_flash_attn", True)
    name, adapters = _plugin(source, "peft_config")
    if name == "lora":
        _adapter(adapters, result)
    elif name:
        result.miss("peft_config", source.values.get("peft_config"), "lora-rank, or train-only: REGEX")
    name, quantized = _plugin(source, "quant_config")
    bits = quantized.whole("quantization_bit")
    if bits:
        set_quantized_base(result, "quant_config", bits, adapters="lora_rank" in result.flags)


def _adapter(options: Source, result: Result) -> None:
    adapter = Adapter(
        rank=options.whole("r") or 8,
        alpha=options.number("lora_alpha"),
        dropout=options.number("lora_dropout") or 0.0,
        targets=tuple(options.words("target_modules")),
        whole=tuple(options.words("modules_to_save")),
    )
    set_adapter(result, adapter, "peft_config.target_modules")
