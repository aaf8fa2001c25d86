"""Files of ``TrainingArguments``: those of transformers' Trainer (JSON), and of TRL's command and recipes (YAML)."""

from __future__ import annotations

from collections.abc import Mapping

from rapidformer_templates.commands.convert.conversion import Options, Result, Source, Value, keys
from rapidformer_templates.commands.convert.settings import (
    PREFERENCE_LOSSES,
    SEVERAL,
    Adapter,
    set_adapter,
    set_data_set,
    set_quantized_base,
)
from rapidformer_templates.commands.convert.training import DEFAULTS, IGNORED, REASONS, convert_training
from rapidformer_templates.errors import ConfigError

KNOWN = keys(
    f"""
    {IGNORED}
    dataset_num_proc dataset_kwargs model_revision bnb_4bit_compute_dtype bnb_4bit_quant_storage
    bnb_4bit_quant_type use_bnb_nested_quant lora_task_type padding_free packing_strategy eval_packing log_completions
    dataset_test_split disable_dropout pad_to_multiple_of max_prompt_length
    max_completion_length dataset_batch_size wandb_entity wandb_project wandb_run_group benchmarks callbacks
    overwrite_hub_revision push_to_hub_revision
    hub_model_revision model_init_kwargs truncation_mode env generate_during_eval
    """,
    *REASONS,
    ("chat_template chat_template_path", "the chat template of the tokenizer is used. Change it there"),
    ("eos_token pad_token", "change the tokenizer in its folder"),
    ("dataset_mixer dataset_mixture dataset_splits", f"{SEVERAL}. Splits must be named train and validation"),
    ("system_prompt", "write the system message into the data"),
    ("trust_remote_code", "give --trust-remote-code on the command line if you trust the code of the model"),
    ("loss_weights rpo_alpha ld_alpha f_divergence_type reference_free", "preference-loss selects the loss"),
    ("ref_model sync_ref_model", "the reference is the model that the run starts from"),
    ("dataset_train_split", "data-split: TRAIN,VALIDATION for a data set on the hub, or name the file train.jsonl"),
)

LOSSES = PREFERENCE_LOSSES | {"kto": "kto"}

GENERATING = {"num_generations", "vllm_mode", "use_vllm", "reward_funcs", "num_ppo_epochs", "rloo_k"}
"""Keys of trainers that generate texts during the training."""


def convert_arguments(values: dict[str, Value], options: Options) -> Result:
    """Convert ``TrainingArguments``, with the keys that TRL adds.

    Raises:
        ConfigError: the trainer has no counterpart, or a value has the wrong type.
    """
    generating = sorted(GENERATING & values.keys())
    if generating:
        hint = "preference-loss has dpo, ipo, orpo, simpo and kto, which need no generation"
        raise ConfigError(f"{generating[0]}: reinforcement learning with generation is not supported", hint=hint)
    source = Source(values, defaults=DEFAULTS)
    result = Result(workers=options.world_size or 1)
    task = options.task or _task(values)
    result.set("task", task)
    result.set("pretrained_model_name_or_path", source.text("model_name_or_path"))
    _data(source, result, task)
    convert_training(source, result, options, held_out=None)
    if task == "preference":
        _preference(source, result)
    _model(source, result)
    if task is None:
        result.note("the file does not name a task, a model or data: give --task here, and add the flags of the others")
    result.close(source, KNOWN)
    return result


def _task(values: Mapping[str, Value]) -> str | None:
    """Return the task of a recipe, from the keys that only its trainer has."""
    if values.keys() & {"beta", "loss_type", "desirable_weight", "precompute_ref_log_probs"}:
        return "preference"
    if values.keys() & {"center_rewards_coefficient"}:
        return "reward"
    supervised = {"packing", "max_seq_length", "max_length", "dataset_text_field", "dataset_name", "dataset_mixture"}
    return "causal_lm" if values.keys() & {*supervised, "dataset_mixer"} else None


def _data(source: Source, result: Result, task: str | None) -> None:
    name = source.text("dataset_name")
    if name:
        set_data_set(result, name, source.text("dataset_config"))
    split = source.text("dataset_train_split")
    if split not in (None, "train"):
        result.miss("dataset_train_split", split, KNOWN.reasons["dataset_train_split"])
    result.set("text_column", source.text("dataset_text_field"))
    length = source.whole("max_length", "max_seq_length")
    result.set("seq_length", length or (1024 if task and name else None))
    if source.is_on("packing"):
        result.set("pack_sequences", True)
    if source.get("assistant_only_loss", "completion_only_loss") is False and task == "causal_lm":
        result.note("the loss is on the answers of conversations and prompts here. loss-on: all takes all tokens")


def _preference(source: Source, result: Result) -> None:
    losses = source.words("loss_type") or ["sigmoid"]
    is_kto = source.get("desirable_weight") is not None or source.get("undesirable_weight") is not None
    if len(losses) > 1 or losses[0] not in LOSSES:
        known = ", ".join(LOSSES)
        raise ConfigError(f"loss_type: {' '.join(losses)} has no counterpart", hint=f"one of {known}")
    result.set("preference_loss", "kto" if is_kto else LOSSES[losses[0]])
    if not is_kto and source.get("loss_type") is None:
        result.note(
            "the file does not name its trainer. Set preference-loss to orpo for ORPOTrainer, to kto for KTOTrainer"
        )
    result.set("preference_beta", source.number("beta"))
    if result.flags["preference_loss"] == "simpo":
        result.set("simpo_gamma", source.number("simpo_gamma"))
    result.set("kto_desirable_weight", source.number("desirable_weight"))
    result.set("kto_undesirable_weight", source.number("undesirable_weight"))
    if source.is_on("precompute_ref_log_probs"):
        result.set("precompute_reference", True)
    if source.number("label_smoothing"):
        result.miss("label_smoothing", source.get("label_smoothing"), "preference losses have no label smoothing here")


def _model(source: Source, result: Result) -> None:
    attention = source.text("attn_implementation") or ""
    if attention.startswith(("flash_attention", "kernels-community/")):
        result.set("use_flash_attn", True)
    elif attention not in ("", "sdpa", "eager"):
        result.miss("attn_implementation", attention, "sdpa is used. The flash kernel: use-flash-attn: true")
    kind = source.text("dtype", "torch_dtype")
    if kind in ("bfloat16", "float16") and "mixed_precision" not in result.flags:
        result.set("mixed_precision", "bf16" if kind == "bfloat16" else "fp16")
        result.note(f"{kind} weights: 16-bit weights with fp32 masters here")
    if source.is_on("activation_offloading"):
        result.set("offload_activations", True)
    variant = "dora" if source.is_on("use_dora") else "rslora" if source.is_on("use_rslora") else "lora"
    adapter = Adapter(
        rank=(source.whole("lora_r") or 16) if source.is_on("use_peft") else None,
        alpha=source.number("lora_alpha") or 32,
        dropout=source.number("lora_dropout") or 0.0,
        targets=tuple(source.words("lora_target_modules")),
        whole=tuple(source.words("lora_modules_to_save")),
        variant=variant,
    )
    source.get("lora_r")
    set_adapter(result, adapter, "lora_target_modules")
    for key, bits in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        if source.is_on(key):
            set_quantized_base(result, key, bits, adapters=adapter.rank is not None)
