"""Configurations of axolotl."""

from __future__ import annotations

from rapidformer_templates.commands.convert.conversion import Options, Result, Source, Value, keys
from rapidformer_templates.commands.convert.settings import (
    SEVERAL,
    Adapter,
    set_adapter,
    set_data_set,
    set_quantized_base,
)
from rapidformer_templates.commands.convert.training import (
    IGNORED,
    REASONS,
    Length,
    convert_training,
    set_times_per_epoch,
    set_validation,
)
from rapidformer_templates.errors import ConfigError

NAMES = {
    "model_name_or_path": "base_model",
    "per_device_train_batch_size": "micro_batch_size",
    "num_train_epochs": "num_epochs",
    "lr_scheduler_type": "lr_scheduler",
    "optim": "optimizer",
}
"""Keys of axolotl by that of ``TrainingArguments``. Other keys of both have the same name."""

DEFAULTS: dict[str, Value] = {
    "output_dir": "./model-out",
    "per_device_train_batch_size": 1,
    "num_train_epochs": 1,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.0,
    "seed": 42,
    "sequence_len": 512,
    "save_strategy": "epoch",
}

KNOWN = keys(
    f"""
    {IGNORED} auto_resume_from_checkpoints branch chat_template_kwargs curriculum_sampling dataset_exact_deduplication
    dataset_keep_in_memory dataset_num_proc dataset_prepared_path dataset_processes ddp device device_map
    do_bench_eval do_causal_lm_eval eval_causal_lm_metrics eval_max_new_tokens eval_sample_packing eval_table_size
    experimental_skip_move_to_device experts_implementation flash_attn_cross_entropy flash_attn_fuse_mlp
    flash_attn_rms_norm flash_optimum flex_attn_compile_kwargs fsdp_final_state_dict_type fsdp_version fused_attn_kernel
    gc_steps gemma4_hybrid_attn_impl generate_samples group_by_length heads_k_stride hf_use_auth_token
    include_tkps is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_qwen_derived_model
    liger_cross_entropy liger_glu_activation liger_layer_norm liger_rms_norm liger_rms_norm_gated liger_rope
    lora_fan_in_fan_out lora_mlp_kernel lora_o_kernel lora_qkv_kernel loss_watchdog_patience
    loss_watchdog_threshold low_cpu_mem_usage max_memory model_config model_type multipack_real_batches
    otel_metrics_host otel_metrics_port pad_to_multiple_of pad_to_sequence_len push_dataset_to_hub ray_num_workers
    resize_token_embeddings_to_32x sample_packing_eff_est sample_packing_group_size sample_packing_seq_len_multiplier
    save_first_step shuffle_merged_datasets streaming_multipack_buffer_size strict swanlab_completion_log_interval
    swanlab_completion_max_buffer swanlab_description swanlab_experiment_name swanlab_log_completions
    swanlab_log_model swanlab_mode swanlab_project swanlab_workspace tokenizer_legacy tokenizer_type
    tokenizer_use_fast tokenizer_use_mistral_common torchdistx_path total_num_tokens trackio_space_id
    use_kernels
    use_otel_metrics use_ray use_scattermoe use_sonicmoe wandb_entity wandb_log_model wandb_mode wandb_run_id
    wandb_watch xformers_attention sdp_attention eager_attention flex_attention sage_attention sdpa_varlen
    pretrain_multipack_attn pretrain_multipack_buffer_size sample_packing_sequentially bnb_config_kwargs
    excess_length_strategy base_model_ignore_patterns max_packed_sequence_len test_value
    """,
    *REASONS,
    ("chat_template chat_template_jinja", "the chat template of the tokenizer is used. Change it there"),
    ("special_tokens tokens eot_tokens added_tokens_overrides", "change the tokenizer in its folder"),
    ("default_system_message", "write the system message into the data"),
    ("trust_remote_code", "give --trust-remote-code on the command line if you trust the code of the model"),
    ("lora_model_dir", "start from the merged model, or with load: RUN and weights-only: true"),
    ("cosine_constant_lr_ratio lr_quadratic_warmup lr_div_factor lr_groups embedding_lr embedding_lr_scale",
     "write the schedule and the groups in build_optimizer() of your script"),
    ("relora relora_prune_ratio relora_cpu_offload jagged_restart_steps jagged_restart_warmup_steps "
     "jagged_restart_anneal_steps", "there is no ReLoRA"),
    ("lisa_n_layers lisa_step_interval lisa_layers_attribute", "there is no LISA. freeze: REGEX freezes layers"),
    ("loraplus_lr_ratio loraplus_lr_embedding", "adapters have one learning rate"),
    ("peft peft_init_lora_weights peft_layers_to_transform", "adapters start as in plain LoRA, on all blocks"),
    ("gptq gptq_groupsize gptq_model_v1 gptq_disable_exllama", "train on the weights that are not quantized"),
    ("qat quantization llmcompressor fp8 fp8_enable_fsdp_float8_all_gather nvfp4_merge_aware model_quantization_config "
     "model_quantization_config_kwargs dsv4_fp4_grouped_mode quantize_moe_experts", "quantize-base: nf4, int4 or int8 "
     "quantizes the frozen base; there is no training in fewer bits"),
    ("plugins", "only the fused cross-entropy of plugins has a counterpart"),
    ("use_eaft eaft_alpha eaft_k diffusion noise_schedule", "write compute_loss() in your script"),
    ("use_swanlab use_comet", "trackers here: tensorboard, wandb, mlflow, trackio"),
    ("tiled_mlp chunked_cross_entropy", "fused-linear-cross-entropy: true, checkpoint-activations: true"),
    ("center_rewards_coefficient", "the loss of rewards is not centered"),
    ("reinit_weights", "train from scratch: model-type and sizes in place of a pretrained model"),
    ("min_sample_len", "filter the data"),
    ("revision_of_model", "revision: NAME"),
    ("test_datasets", "eval-data-name: NAME=SET"),
    ("use_dsv4_kernels use_glm_dsa_kernels llama4_linearized_experts use_onebitllms", "transformers' own modules run"),
    ("expert_parallel_num_nvl_bytes expert_parallel_token_capacity", "expert-parallel exchanges all tokens"),
    ("torch_compile_options deepcompile", "torch-compile: BACKEND has no options"),
    ("layer_offloading", "cpu-offload: true, with ZeRO-3 also for parameters"),
    ("cls_model_config num_labels", "the labels of the data decide"),
    ("train_on_inputs", "loss-on: all"),
    ("float32", "the default precision is fp32"),
    ("noisy_embedding_alpha", "neftune-alpha"),
)  # fmt: skip

COLUMNS = "docs/fine-tuning-data.md and docs/preferences.md list the columns that are read"

DATA_KEYS = keys(
    "ds_type trust_remote_code shards shards_idx preprocess_shards field_thinking template_thinking_key conversation",
    ("split", "data-split: NAME. max-train-samples: N takes the first rows"),
    ("field_chosen field_rejected", "rename the columns to chosen and rejected"),
    ("roles message_field_role message_field_content", "rename the keys to role and content"),
    ("roles_to_train train_on_eos train_on_eot message_field_training", "answers and their end are learned. "
     "loss-on: all takes all tokens"),
    ("drop_system_message chat_template input_transform", "write the data as the model should see it"),
    ("revision", "download that revision, and name its folder"),
    ("step_separator max_completion_length train_on_last_step_only", COLUMNS),
)  # fmt: skip
"""Keys of one data set."""

REFUSED = {
    "processor_type": "models that read images or sound are not supported",
    "ebft": "energy-based fine-tuning is not supported",
    "process_reward_model": "process reward models are not supported",
    "diffusion": "diffusion language models are not supported",
    "vllm": "reinforcement learning with generation is not supported",
    "llmcompressor": "training of sparse or quantized models is not supported",
}
"""Keys of trainings that this library does not have."""

LOSSES = ("dpo", "ipo", "orpo", "simpo", "kto")


def convert_axolotl(values: dict[str, Value], options: Options) -> Result:
    """Convert a configuration of axolotl.

    Raises:
        ConfigError: this kind of training has no counterpart, or a value has the wrong type.
    """
    for key, why in REFUSED.items():
        if values.get(key):
            raise ConfigError(f"{key}: {why}", where=key)
    if "base_model" not in values:
        raise ConfigError("there is no base_model, so this is not a training configuration of axolotl", where="FILE")
    recomputed = values.get("gradient_checkpointing")
    is_offloaded = recomputed in ("offload", "offload_disk")
    source = Source(values | {"gradient_checkpointing": True} if is_offloaded else values, NAMES, DEFAULTS)
    result = Result(workers=options.world_size or 1)
    task = options.task or _task(source)
    result.set("task", task)
    result.set("pretrained_model_name_or_path", source.text("model_name_or_path"))
    result.set("tokenizer_path", source.text("tokenizer_config"))
    _data(source, result)
    result.set("seq_length", source.whole("sequence_len"))
    if source.is_on("sample_packing"):
        result.set("pack_sequences", True)
    replicas = _workers(source, result)
    total, micro = source.whole("batch_size"), source.whole("per_device_train_batch_size") or 1
    if total and source.get("gradient_accumulation_steps") is None:
        source.defaults = {**source.defaults, "gradient_accumulation_steps": max(1, total // (micro * replicas))}
    length = convert_training(source, result, options, held_out=None, replicas=replicas)
    _evaluation(source, result, options, length)
    _schedule(source, result)
    _memory(source, result)
    if is_offloaded:
        result.set("offload_activations", True)
    _adapter(source, result)
    _preference(source, result)
    _trackers(source, result)
    result.close(source, KNOWN)
    return result


def _task(source: Source) -> str:
    kind = source.text("rl")
    if kind and kind not in LOSSES:
        hint = f"preference losses here: {', '.join(LOSSES)}"
        raise ConfigError(f"rl: {kind} is not supported", where="rl", hint=hint)
    if source.is_on("reward_model"):
        return "reward"
    return "preference" if kind else "causal_lm"


def _data(source: Source, result: Result) -> None:
    streamed = source.get("pretraining_dataset")
    sets = source.get("datasets") or streamed
    if streamed or source.is_on("streaming"):
        result.set("streaming", True)
    if isinstance(sets, str):
        sets = [{"path": sets}]
    if not isinstance(sets, list) or len(sets) != 1:
        result.miss("datasets", sets, SEVERAL)
        return
    first = sets[0]
    if not isinstance(first, dict):
        raise ConfigError(f"datasets needs a list of mappings, not {first!r}", where="datasets")
    _data_set(Source(first), result)
    is_text = streamed or str(first.get("type")).startswith(("completion", "pretrain"))
    if source.is_on("train_on_inputs") or is_text:
        result.set("loss_on", "all")


def _data_set(one: Source, result: Result) -> None:
    path, files = one.text("path") or "", one.words("data_files")
    set_data_set(result, files[0] if len(files) == 1 else path, one.text("name"))
    kind = one.get("type")
    name = kind if isinstance(kind, str) else "user-defined"
    if kind and not name.startswith(("alpaca", "chat_template", "completion", "pretrain", "sharegpt", "bradley_terry")):
        result.miss("datasets.type", kind, COLUMNS)
    elif name.startswith("alpaca"):
        result.note("the instructions are rendered with the tokenizer's chat template, not with Alpaca's prompt")
    column = one.text("field", "text_column", "field_messages")
    if column not in (None, "text", "messages", "conversations"):
        result.set("text_column", column)
    if one.values.get("split") == "train":
        one.get("split")
    names = one.get("message_property_mappings")
    if names not in (None, {"role": "from", "content": "value"}, {"role": "role", "content": "content"}):
        result.miss("datasets.message_property_mappings", names, "rename the keys to role and content")
    result.close(one, DATA_KEYS, prefix="datasets.")


def _workers(source: Source, result: Result) -> int:
    """Set the sizes of the layout and return the number of data-parallel workers."""
    tensor = source.whole("tensor_parallel_size") or 1
    context = source.whole("context_parallel_size", "sequence_parallel_degree") or 1
    result.workers = max(result.workers, tensor * context)
    if tensor > 1:
        result.set("tensor_model_parallel_size", tensor)
    if context > 1:
        result.set("context_parallel_size", context)
        result.set("context_parallel_kind", "ring")
    source.get("ring_attn_func")
    experts = source.whole("expert_parallel_size") or 1
    if experts > 1:
        result.set("expert_model_parallel_size", experts)
    shard, copies = source.whole("dp_shard_size") or 1, source.whole("dp_replicate_size") or 1
    if copies > 1 and shard > 1:
        result.set("fsdp_shard_size", shard)
    result.workers = max(result.workers, shard * copies * tensor * context, experts)
    return max(1, result.workers // (tensor * context))


def _evaluation(source: Source, result: Result, options: Options, length: Length) -> None:
    """Convert the share that is held out, and how often an epoch is evaluated and saved."""
    held_out = source.number("val_set_size") or 0.0
    if held_out >= 1 and options.samples:
        held_out = held_out / options.samples
    if held_out >= 1:
        result.miss("val_set_size", held_out, "validation-fraction: a share; --samples N makes a share of rows")
    else:
        set_validation(result, held_out)
    for what, key in (("eval", "evals_per_epoch"), ("save", "saves_per_epoch")):
        times = source.number(key)
        if times and (what == "save" or held_out):
            set_times_per_epoch(result, length, what, times)
    if not held_out:
        source.get("eval_steps", "eval_strategy")
        return
    if source.number("eval_steps"):
        result.set("eval_interval", source.whole("eval_steps"))
    result.set(
        "keep_best", source.is_on("load_best_model_at_end") or source.number("early_stopping_patience") is not None
    )
    result.set("early_stopping_patience", source.whole("early_stopping_patience"))


def _schedule(source: Source, result: Result) -> None:
    share, rate = source.number("cosine_min_lr_ratio"), source.number("learning_rate")
    if rate is None:
        raise ConfigError("there is no learning_rate", where="learning_rate")
    if share and share < 1:
        result.set("min_lr", rate * share)
    elif share:
        result.miss("cosine_min_lr_ratio", share, "min-lr: below the peak")
    if source.number("eta_min") is not None and result.flags.get("lr_decay_style") == "cosine":
        result.set("min_lr", source.number("eta_min"))
    epsilon = source.number("adam_eps")
    if epsilon is not None:
        result.set("adam_epsilon", epsilon)
    if source.number("warmup_steps", "warmup_ratio") is None and result.flags.get("lr_decay_style") != "constant":
        result.set("lr_warmup_fraction", 0.03)


def _memory(source: Source, result: Result) -> None:
    if source.is_on("bfloat16") or source.text("torch_dtype") == "bfloat16":
        result.flags.setdefault("mixed_precision", "bf16")
    if source.is_on("float16"):
        result.flags.setdefault("mixed_precision", "fp16")
    if source.get("activation_offloading") not in (None, False):
        result.set("offload_activations", True)
    attention = source.text("attn_implementation") or ""
    if source.is_on("flash_attention") or attention.startswith(("flash", "kernels-community/")):
        result.set("use_flash_attn", True)
    elif attention not in ("", "sdpa", "eager", "xformers"):
        result.miss("attn_implementation", attention, "sdpa is used. The flash kernel: use-flash-attn: true")
    plugins = source.words("plugins")
    fused = [name for name in plugins if name.endswith("CutCrossEntropyPlugin")]
    if fused or source.is_on("cut_cross_entropy") or source.is_on("liger_fused_linear_cross_entropy"):
        result.set("fused_linear_cross_entropy", True)
    source.get("cut_cross_entropy", "liger_fused_linear_cross_entropy")
    for name in plugins:
        if name not in fused and not name.endswith(("LigerPlugin", "KernelsPlugin", "ExpertParallelPlugin")):
            result.miss("plugins", name, KNOWN.reasons["plugins"])
    trained = source.words("unfrozen_parameters")
    if trained and not source.get("adapter"):  # adapters freeze all other weights
        result.set("train_only", "|".join(f"(?:{name})" for name in trained))


def _adapter(source: Source, result: Result) -> None:
    kind = source.text("adapter")
    if kind not in (None, "lora", "qlora"):
        raise ConfigError(f"adapter: {kind} is not supported", where="adapter", hint="lora and qlora are")
    experts = tuple(name.removeprefix("mlp.") for name in source.words("lora_target_parameters"))
    linear = source.is_on("lora_target_linear")
    named = source.get("lora_target_modules")
    targets = (named,) if isinstance(named, str) else tuple(source.words("lora_target_modules"))
    if linear or not targets:
        targets = ("all-linear",)
    adapter = Adapter(
        rank=(source.whole("lora_r") or 8) if kind else None,
        alpha=source.number("lora_alpha"),
        dropout=source.number("lora_dropout") or 0.0,
        targets=targets,
        whole=tuple(source.words("lora_modules_to_save")),
        variant="dora" if source.is_on("peft_use_dora") else "rslora" if source.is_on("peft_use_rslora") else "lora",
    )
    source.get("lora_r", "lora_target_modules", "peft_use_rslora")
    set_adapter(result, adapter, "lora_target_modules")
    if kind and experts:
        linear_names = str(result.flags.get("lora_target_modules", "all-linear"))
        result.set("lora_target_modules", ",".join((linear_names, *experts)))
    for key, bits in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        if source.is_on(key):
            set_quantized_base(result, key, bits, adapters=kind is not None)


def _preference(source: Source, result: Result) -> None:
    kind, beta = source.text("rl"), source.number("rl_beta")
    if kind is None:
        return
    result.set("preference_loss", kind)
    alpha = source.number("orpo_alpha")
    result.set("preference_beta", alpha if kind == "orpo" and alpha is not None else beta)
    if kind == "simpo":
        result.set("simpo_gamma", source.number("simpo_gamma"))
    if kind == "kto":
        result.set("kto_desirable_weight", source.number("kto_desirable_weight"))
        result.set("kto_undesirable_weight", source.number("kto_undesirable_weight"))
    if source.is_on("precompute_ref_log_probs"):
        result.set("precompute_reference", True)


def _trackers(source: Source, result: Result) -> None:
    """Set the trackers. A name of a project turns its tracker on."""
    names = {
        "wandb": (source.is_on("use_wandb"), source.text("wandb_project"), source.text("wandb_name")),
        "mlflow": (source.is_on("use_mlflow"), source.text("mlflow_experiment_name"), source.text("mlflow_run_name")),
        "trackio": (source.is_on("use_trackio"), source.text("trackio_project_name"), source.text("trackio_run_name")),
        "tensorboard": (source.is_on("use_tensorboard"), None, None),
    }
    known = [name for name, (is_on, project, _) in names.items() if is_on or project]
    if not known:
        return
    result.set("report_to", ",".join(known))
    result.set("project_name", next((project for _, project, _ in names.values() if project), None))
    result.set("run_name", next((run for _, _, run in names.values() if run), None))
