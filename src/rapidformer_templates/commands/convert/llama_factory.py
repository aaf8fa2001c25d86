"""Configurations of LLaMA-Factory."""

from __future__ import annotations

from rapidformer_templates.commands.convert.conversion import Options, Result, Source, Value, keys, read_json
from rapidformer_templates.commands.convert.llama_factory_v1 import convert_version_1
from rapidformer_templates.commands.convert.settings import (
    PREFERENCE_LOSSES,
    SEVERAL,
    Adapter,
    set_adapter,
    set_data_set,
    set_optimizer,
    set_quantized_base,
)
from rapidformer_templates.commands.convert.training import DEFAULTS as ARGUMENTS
from rapidformer_templates.commands.convert.training import IGNORED, REASONS, convert_training
from rapidformer_templates.errors import ConfigError

DEFAULTS: dict[str, Value] = {
    **ARGUMENTS, "stage": "sft", "finetuning_type": "lora", "lora_rank": 8, "cutoff_len": 2048, "dataset_dir": "data",
    "pref_loss": "sigmoid",
}  # fmt: skip

KNOWN = keys(
    f"""
    {IGNORED} cache_dir compute_accuracy data_shared_file_system double_quantization enable_thinking
    enable_torch_profiler eval_on_each_dataset export_hf_on_finish flash_attn hub_token image_max_pixels
    image_min_pixels include_effective_tokens_per_second infer_backend infer_dtype low_cpu_mem_usage media_dir
    ms_hub_token om_hub_token overwrite_cache plot_loss predict_with_generate preprocessing_batch_size
    preprocessing_num_workers
    print_param_status quantization_device_map quantization_type tokenized_path upcast_layernorm upcast_lmhead_output
    use_fast_tokenizer use_v1_kernels video_fps video_max_pixels video_maxlen master_addr master_port placement_strategy
    freeze_vision_tower freeze_multi_modal_projector freeze_language_model eval_num_beams galore_rank galore_scale
    galore_target galore_layerwise galore_update_interval apollo_rank apollo_scale apollo_target apollo_layerwise
    apollo_scale_type badam_mode badam_switch_mode badam_switch_interval badam_verbose pissa_iter pissa_convert
    eaft_alpha asft_alpha fp8_backend fp8_enable_fsdp_float8_all_gather ray_run_name ray_storage_path ray_num_workers
    resources_per_worker overlap_param_gather overlap_grad_reduce bias_activation_fusion apply_rope_fusion
    moe_grouped_gemm moe_token_dispatcher_type use_packed_sequences
    """,
    *REASONS,
    ("template", "the chat template of the tokenizer is used. Change it there"),
    ("default_system tool_format", "write the system message into the data. Calls of tools are refused"),
    ("trust_remote_code", "give --trust-remote-code on the command line if you trust the code of the model"),
    ("adapter_name_or_path create_new_adapter",
     "start from the merged model, or with load: RUN and weights-only: true"),
    ("mask_history", "all answers of a conversation are learned. loss-on has answers and all"),
    ("mix_strategy interleave_probs", "data-name: 0.5 a 0.5 b is a mixture (docs/fine-tuning-data.md)"),
    ("new_special_tokens_config add_tokens add_special_tokens resize_vocab init_special_tokens",
     "change the tokenizer and the embeddings, and save both in the folder of the model"),
    ("loraplus_lr_ratio loraplus_lr_embedding", "adapters have one learning rate"),
    ("pissa_init", "adapters start as in plain LoRA"),
    ("use_galore use_apollo use_badam use_adam_mini",
     "optimizers here with small states: adamw_torch_8bit, adamw_torch_4bit, adafactor, muon"),
    ("use_dft_loss use_asft_loss use_eaft_loss pref_ftx pref_bco_weight dpo_label_smoothing ld_alpha",
     "write compute_loss() in your script"),
    ("ref_model ref_model_adapters", "the reference is the model that the run starts from"),
    ("fp8", "mixed-precision has bf16 and fp16"),
    ("rope_scaling shift_attn mixture_of_depths", "change the configuration in the folder of the model"),
    ("moe_aux_loss_coef", "moe-loss-coeff"),
    ("use_unsloth use_unsloth_gc", "checkpoint-activations: true"),
    ("train_from_scratch", "model-type and sizes in place of a pretrained model"),
    ("freeze_trainable_layers freeze_trainable_modules freeze_extra_modules use_llama_pro",
     "train-only: REGEX names the parameters that are trained"),
    ("disable_shuffling", "the samples are shuffled by the seed"),
    ("eval_dataset", "eval-data-name: NAME=SET"),
    ("quantization_method", "quantize-base quantizes the weights of an unquantized model itself"),
    ("use_ray", "start the same command on each machine with torchrun (docs/many-machines.md)"),
)  # fmt: skip

REFUSED = {
    "use_kt": "training with KTransformers is not supported",
    "use_mca": "this is for LLaMA-Factory's Megatron backend",
    "use_megatron_bridge": "this is for LLaMA-Factory's Megatron backend",
    "use_hyper_parallel": "this is for LLaMA-Factory's HyperParallel backend",
    "export_dir": "this file exports a model: rapidformer export RUN",
}

TASKS = {"sft": "causal_lm", "pt": "causal_lm", "rm": "reward", "dpo": "preference", "kto": "preference"}


def convert_llama_factory(values: dict[str, Value], options: Options) -> Result:
    """Convert a configuration of LLaMA-Factory.

    Raises:
        ConfigError: this kind of training has no counterpart, or a value has the wrong type.
    """
    if {"model", "train_dataset"} <= values.keys():
        return convert_version_1(values, options)
    for key, why in REFUSED.items():
        if values.get(key):
            raise ConfigError(f"{key}: {why}", where=key)
    if values.get("do_train") is not True and ("do_predict" in values or "learning_rate" not in values):
        raise ConfigError("this file does not train", where="do_train", hint="rapidformer predict, chat and export")
    source = Source(values, defaults=DEFAULTS)
    result = Result(workers=options.world_size or 1)
    replicas = _workers(source, result)
    kind = source.text("stage") or ""
    if kind not in TASKS:
        raise ConfigError(f"stage: {kind} is not supported", where="stage", hint=f"{', '.join(TASKS)} are")
    result.set("task", options.task or TASKS[kind])
    result.set("pretrained_model_name_or_path", source.text("model_name_or_path"))
    _data(source, result, options, kind)
    share = source.number("val_size")
    rate = share if share is None or share < 1 else None
    convert_training(source, result, options, held_out=rate, replicas=replicas)
    if share and share >= 1:
        result.miss("val_size", share, "validation-fraction: a share")
    _model(source, result)
    _method(source, result)
    _preference(source, result, kind)
    result.close(source, KNOWN)
    return result


def _workers(source: Source, result: Result) -> int:
    """Set the sizes of the Megatron backends and return the number of data-parallel workers."""
    product = 1
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        size = source.whole(name) or 1
        product *= size
        result.set(name, size if size > 1 else None)
    experts = source.whole("expert_model_parallel_size") or 1
    result.set("expert_model_parallel_size", experts if experts > 1 else None)
    result.workers = max(result.workers, product * experts)
    for name in ("use_distributed_optimizer", "sequence_parallel"):
        result.set(name, source.is_on(name) or None)
    granularity = source.text("recompute_granularity")
    result.set("recompute_granularity", granularity)
    result.set("checkpoint_activations", True if granularity else None)
    if (source.text("mixed_precision") or "").startswith("bf16"):
        result.set("mixed_precision", "bf16")
    return max(1, result.workers // product)


def _data(source: Source, result: Result, options: Options, kind: str) -> None:
    names = source.words("dataset")
    if len(names) == 1:
        _data_set(source, result, options, names[0])
    elif names:
        source.get("dataset_dir")
        result.miss("dataset", ", ".join(names), SEVERAL)
    result.set("seq_length", source.whole("cutoff_len"))
    packing = source.get("packing")
    if source.is_on("neat_packing") or (packing is None and kind == "pt") or source.is_on("packing"):
        result.set("pack_sequences", True)
        if not source.is_on("neat_packing") and kind != "pt":
            result.note("packing: samples of a row see each other there. Here they do not, as with neat_packing")
    source.get("neat_packing")
    if kind == "pt" or source.is_on("train_on_prompt"):
        result.set("loss_on", "all")
    limit = source.whole("max_samples")
    result.set("max_train_samples", limit)
    if source.is_on("streaming"):
        result.set("streaming", True)
        result.set("shuffle_buffer", source.whole("buffer_size") or 16384)


def _data_set(source: Source, result: Result, options: Options, name: str) -> None:
    """Set a data set that ``dataset_info.json`` describes. Without that file, its name is also that of its file."""
    folder = source.text("dataset_dir") or "data"
    descriptions = (read_json(base / folder / "dataset_info.json") or {} for base in options.folders)
    info = Source(next((one for sets in descriptions if isinstance(one := sets.get(name), dict)), {}))
    hub, file = info.text("hf_hub_url"), info.text("file_name")
    if hub and not file:
        set_data_set(result, hub, info.text("subset"))
    else:
        result.set("data_dir", folder)
        result.set("data_name", file or name)
    columns = info.get("columns")
    for role, column in (columns if isinstance(columns, dict) else {}).items():
        if role == "messages" and column not in ("messages", "conversations"):
            result.set("text_column", column)
        elif role in ("images", "videos", "audios", "tools"):
            raise ConfigError(f"dataset: {name} has {role}, which are not supported", where="dataset")


def _model(source: Source, result: Result) -> None:
    if source.is_on("pure_bf16"):
        result.set("mixed_precision", "bf16")
        result.note("pure_bf16: 16-bit weights have fp32 masters here")
    if not source.is_on("disable_gradient_checkpointing"):
        result.set("checkpoint_activations", True)
    attention = source.text("flash_attn") or "auto"
    if attention in ("fa2", "fa3", "flash_attention_2"):
        result.set("use_flash_attn", True)
    if source.is_on("enable_liger_kernel"):
        result.set("fused_linear_cross_entropy", True)
    if source.is_on("use_muon"):
        set_optimizer(result, "use_muon", "muon")
    patience = source.whole("early_stopping_steps")
    result.set("early_stopping_patience", patience)
    if patience:
        result.set("keep_best", True)


def _method(source: Source, result: Result) -> None:
    kind = source.text("finetuning_type")
    if kind not in ("lora", "full", "freeze"):
        hint = "lora, full and freeze are"
        raise ConfigError(f"finetuning_type: {kind} is not supported", where="finetuning_type", hint=hint)
    adapter = Adapter(
        rank=(source.whole("lora_rank") or 8) if kind == "lora" else None,
        alpha=source.number("lora_alpha"),
        dropout=source.number("lora_dropout") or 0.0,
        targets=tuple(source.words("lora_target")),
        whole=tuple(source.words("additional_target")),
        variant="dora" if source.is_on("use_dora") else "rslora" if source.is_on("use_rslora") else "lora",
    )
    source.get("lora_rank", "use_rslora")
    set_adapter(result, adapter, "lora_target")
    if kind == "freeze":
        layers = source.get("freeze_trainable_layers") or 2
        result.miss("freeze_trainable_layers", layers, KNOWN.reasons["freeze_trainable_layers"])
    method, bits = source.text("quantization_method") or "bnb", source.whole("quantization_bit")
    if bits and method not in ("bnb", "bitsandbytes"):
        result.miss("quantization_method", method, KNOWN.reasons["quantization_method"])
    elif bits:
        set_quantized_base(result, "quantization_bit", bits, adapters=kind == "lora")


def _preference(source: Source, result: Result, kind: str) -> None:
    loss = source.text("pref_loss") or "sigmoid"
    if TASKS[kind] != "preference":
        return
    if kind == "dpo" and loss not in PREFERENCE_LOSSES:
        raise ConfigError(
            f"pref_loss: {loss} is not supported", where="pref_loss", hint=f"{', '.join(PREFERENCE_LOSSES)} are"
        )
    result.set("preference_loss", "kto" if kind == "kto" else PREFERENCE_LOSSES[loss])
    result.set("preference_beta", source.number("pref_beta"))
    if loss == "simpo":
        result.set("simpo_gamma", source.number("simpo_gamma"))
    if kind == "kto":
        result.set("kto_desirable_weight", source.number("kto_chosen_weight"))
        result.set("kto_undesirable_weight", source.number("kto_rejected_weight"))
