"""The keys of transformers' ``TrainingArguments``. LLaMA-Factory has the same, axolotl has other names for some."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rapidformer_templates.commands.convert.conversion import Options, Result, Source, Value
from rapidformer_templates.commands.convert.settings import set_deepspeed, set_fsdp, set_optimizer, set_trackers
from rapidformer_templates.planning.schedules import STYLES

DEFAULTS: dict[str, Value] = {
    "output_dir": "trainer_output",
    "per_device_train_batch_size": 8,
    "num_train_epochs": 3,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "seed": 42,
    "logging_steps": 500,
    "save_strategy": "steps",
    "save_steps": 500,
}
"""Values of ``TrainingArguments`` that differ from those of this library."""

IGNORED = """
    accelerator_config average_tokens_across_devices batch_eval_metrics bf16_full_eval data_seed ddp_backend
    ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout disable_tqdm do_eval
    do_predict do_train dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context
    dataloader_persistent_workers dataloader_prefetch_factor eval_accumulation_steps eval_delay eval_do_concat_batches
    eval_on_start eval_use_gather_object enable_jit_checkpoint fp16_backend fp16_full_eval fp16_opt_level
    fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params full_determinism gradient_checkpointing_kwargs
    activation_checkpointing_kwargs half_precision_backend hub_always_push hub_private_repo hub_revision hub_strategy
    hub_token ignore_data_skip include_for_metrics include_inputs_for_metrics include_num_input_tokens_seen
    include_tokens_per_second label_names length_column_name local_rank log_level log_level_replica log_on_each_node
    logging_dir logging_first_step logging_nan_inf_filter mp_parameters no_cuda past_index per_device_eval_batch_size
    eval_batch_size prediction_loss_only project ray_scope remove_unused_columns restore_callback_states_from_checkpoint
    run_name save_on_each_node save_only_model save_safetensors skip_memory_metrics split_batches torch_compile_mode
    torch_empty_cache_steps tpu_num_cores tpu_metrics_debug trackio_bucket_id trackio_space_id trackio_static_space_id
    use_cache use_legacy_prediction_loop use_reentrant_gc xpu_backend use_cpu use_mps_device use_ipex
    """
"""Keys that change nothing here: they are about the process, the display or the speed."""

REASONS = (
    ("auto_find_batch_size", "rapidformer plan --auto-strategy finds the largest batch that fits"),
    ("push_to_hub hub_model_id push_to_hub_model_id", "push-to-hub: ORG/NAME"),
    ("optim_args optim_target_modules", "write it in build_optimizer() of your script"),
    ("parallelism_config", "tensor-model-parallel-size, context-parallel-size, fsdp-shard-size"),
    ("liger_kernel_config", "fused-linear-cross-entropy: true is the only kernel of Liger here"),
    ("debug", "rapidformer reports non-finite losses itself"),
)

SCHEDULE_KEYS = {
    "min_lr": "min_lr", "eta_min": "min_lr", "lr_end": "min_lr", "num_cycles": "lr_num_cycles", "power": "lr_power",
    "num_decay_steps": "lr_wsd_decay_iters", "decay_type": "lr_wsd_decay_style",
}  # fmt: skip


@dataclass(frozen=True)
class Length:
    """How long the run is.

    Attributes:
        steps: optimizer steps, or None for a run of epochs.
        epochs: number of epochs, if the run has no number of steps.
        global_batch: samples per step.
    """

    steps: int | None
    epochs: float
    global_batch: int

    def share(self, part: float) -> int | str:
        """Return a share of the run as an interval: in steps, or in epochs."""
        return max(1, math.ceil(part * self.steps)) if self.steps else in_epochs(part * self.epochs)


def in_epochs(count: float) -> str:
    """Spell a number of epochs as the value of a flag: ``0.25epochs``."""
    return f"{count:.12g}epochs"


def convert_training(
    source: Source, result: Result, options: Options, *, held_out: float | None, replicas: int | None = None
) -> Length:
    """Convert the keys of ``TrainingArguments``.

    Args:
        held_out: share of the training data that is evaluated. None if nothing is known about it.
        replicas: data-parallel workers. The default is all workers.

    Returns:
        The length of the run.
    """
    length = _length(source, result, replicas or result.workers)
    _schedule(source, result)
    _optimizer(source, result)
    _precision(source, result)
    _memory(source, result, options)
    _outputs(source, result, options, length)
    _evaluation(source, result, length, held_out)
    return length


def _length(source: Source, result: Result, replicas: int) -> Length:
    micro = source.whole("per_device_train_batch_size") or 1
    accumulation = source.whole("gradient_accumulation_steps") or 1
    epochs, steps = source.number("num_train_epochs") or 0, source.whole("max_steps") or -1
    batch = micro * accumulation * replicas
    result.set("micro_batch_size", micro)
    if accumulation > 1:
        result.set("global_batch_size", batch)
    if steps > 0:
        result.set("train_iters", steps)
        return Length(steps, epochs, batch)
    if epochs == int(epochs) and accumulation == 1:
        result.set("epochs", int(epochs))
    else:
        result.set("train_iters", in_epochs(epochs))
    return Length(None, epochs, batch)


def _schedule(source: Source, result: Result) -> None:
    rate = source.number("learning_rate")
    result.set("lr", rate)
    key, style = source.own("lr_scheduler_type"), source.text("lr_scheduler_type") or "linear"
    if style not in STYLES:
        result.miss(key, style, f"lr-decay-style has {', '.join(STYLES)}")
    elif style != "linear":
        result.set("lr_decay_style", style)
    warmup = source.number("warmup_steps") or 0
    share = source.number("warmup_ratio") or 0
    if style == "constant" and (warmup or share):
        result.note("the schedule constant has no warmup in transformers. constant_with_warmup has one")
    elif warmup >= 1:
        result.set("lr_warmup_iters", int(warmup))
    elif warmup or share:
        result.set("lr_warmup_fraction", warmup or share)
    details = source.get("lr_scheduler_kwargs")
    flags = STYLES[style].takes if style in STYLES else ()
    for name, value in (details if isinstance(details, dict) else {}).items():
        flag = SCHEDULE_KEYS.get(name)
        if name == "min_lr_rate" and isinstance(value, int | float):
            result.set("min_lr", (rate or 0) * value)
        elif flag in flags:
            result.set(str(flag), value)
        else:
            result.miss(f"lr_scheduler_kwargs.{name}", value, "write the schedule in build_scheduler() of your script")


def _optimizer(source: Source, result: Result) -> None:
    name = source.text("optim")
    if name and name != "adamw_torch_fused":  # the default here is a fused AdamW, too
        set_optimizer(result, source.own("optim"), name)
    result.set("weight_decay", source.number("weight_decay"))
    usual = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
    for key, default in usual.items():
        value = source.number(key)
        if value not in (None, default) and result.flags.get("optimizer") != "adafactor":
            result.set(key, value)
    clip = source.number("max_grad_norm")
    if clip not in (None, 1.0):
        result.set("clip_grad", clip)
    for key, flag in (("label_smoothing_factor", "label_smoothing"), ("neftune_noise_alpha", "neftune_alpha")):
        result.set(flag, source.number(key) or None)
    result.set("seed", source.whole("seed"))


def _precision(source: Source, result: Result) -> None:
    half = source.get("bf16")
    if half in ("auto", "full") or (half is not None and source.is_on("bf16")):
        result.set("mixed_precision", "bf16")
    elif source.is_on("fp16"):
        result.set("mixed_precision", "fp16")
    source.get("fp16")  # false next to bf16
    if source.get("tf32") != "auto" and source.is_on("tf32"):
        result.set("tf32", True)


def _memory(source: Source, result: Result, options: Options) -> None:
    if source.is_on("gradient_checkpointing", "activation_checkpointing"):
        result.set("checkpoint_activations", True)
    backend = source.text("torch_compile_backend")
    if source.get("torch_compile") == "auto" or source.is_on("torch_compile"):
        result.set("torch_compile", backend or "inductor")
    if source.is_on("use_liger_kernel"):
        result.set("fused_linear_cross_entropy", True)
    set_fsdp(result, source)
    set_deepspeed(result, source, options.folders)
    if source.is_on("use_cpu", "no_cuda"):
        result.set("device", "cpu")


def _outputs(source: Source, result: Result, options: Options, length: Length) -> None:
    result.set("save", source.text("output_dir"))
    if source.is_on("overwrite_output_dir"):
        result.set("overwrite", True)
    resumed = source.get("resume_from_checkpoint")
    if resumed in (True, "true"):
        result.set("resume", True)
        result.flags.pop("overwrite", None)
    elif resumed not in (None, False, "false"):
        result.miss(
            source.own("resume_from_checkpoint"),
            resumed,
            "checkpoints of other trainers are not read. Start from its weights",
        )
    strategy = (source.text("save_strategy") or "steps").removeprefix("IntervalStrategy.").lower()
    steps = source.number("save_steps")
    if strategy == "steps":
        _interval(result, length, "save", steps)
    elif strategy == "epoch":
        set_times_per_epoch(result, length, "save", 1)
    elif strategy == "best":
        result.set("keep_best", True)
    result.set("keep_checkpoints", source.whole("save_total_limit"))
    _log_interval(source, result, options, length)
    names = [name.lower() for name in source.words("report_to")]
    set_trackers(result, source.own("report_to"), names, source.text("run_name"), source.text("project"))
    result.set("dataloader_num_workers", source.whole("dataloader_num_workers") or None)
    if source.get("dataloader_pin_memory") is False:
        result.set("dataloader_pin_memory", False)
    if source.is_on("group_by_length") or source.text("train_sampling_strategy") == "group_by_length":
        result.set("group_by_length", True)


def _log_interval(source: Source, result: Result, options: Options, length: Length) -> None:
    """Set the interval of log lines, which is a number of steps here."""
    logged = source.number("logging_steps")
    if (source.text("logging_strategy") or "steps").lower() != "steps" or not logged:
        return
    steps = length.steps
    if not steps and options.samples:
        steps = math.ceil(length.epochs * math.ceil(options.samples / length.global_batch))
    if logged >= 1:
        result.set("log_interval", int(logged))
    elif steps:
        result.set("log_interval", max(1, math.ceil(logged * steps)))
    else:
        result.miss(source.own("logging_steps"), logged, "log-interval: a number of steps; --samples N computes it")


def _interval(result: Result, length: Length, what: str, steps: float | None) -> None:
    """Set an interval in steps, or in a share of the run."""
    if steps:
        result.set(f"{what}_interval", int(steps) if steps >= 1 else length.share(steps))


def set_times_per_epoch(result: Result, length: Length, what: str, times: float) -> None:
    """Set the interval of something that happens some times per epoch. Once per epoch is the default in epochs."""
    if times == 1 and not length.steps:
        return
    if result.flags.get("streaming"):
        result.note(f"{what}: at the end of the run only, because a stream has no epochs")
    else:
        result.set(f"{what}_interval", in_epochs(1 / times))


def set_validation(result: Result, share: float | None) -> None:
    """Set the share of the training data that is held out. Streams and corpora for pretraining hold out none."""
    if not result.flags.get("streaming") and result.flags.get("task") != "pretraining":
        result.set("validation_fraction", share)


def _evaluation(source: Source, result: Result, length: Length, held_out: float | None) -> None:
    strategy = (source.text("eval_strategy", "evaluation_strategy") or "no").removeprefix("IntervalStrategy.").lower()
    steps = source.number("eval_steps") or source.number("logging_steps")
    is_best = source.is_on("load_best_model_at_end") or result.flags.get("keep_best") is True
    metric, greater = source.text("metric_for_best_model"), source.get("greater_is_better")
    if strategy == "no":
        set_validation(result, 0.0)
        return
    set_validation(result, held_out)
    if strategy == "steps":
        _interval(result, length, "eval", steps)
    else:
        set_times_per_epoch(result, length, "eval", 1)
    result.set("keep_best", is_best)
    if is_best and metric:
        name = metric.removeprefix("eval_")
        result.set("metric_for_best", "eval_loss" if name == "loss" else name)
        if name != "loss" and greater is not None:
            result.set("metric_for_best_mode", "max" if greater else "min")
