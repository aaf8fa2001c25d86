"""Command lines of Megatron-LM, and the ``MODEL_ARGS`` of its test configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from rapidformer_templates.commands.convert.conversion import Options, Result, Source, Value, keys
from rapidformer_templates.commands.convert.settings import set_optimizer
from rapidformer_templates.commands.convert.shell import commands
from rapidformer_templates.errors import ConfigError

SAME = (
    "num-layers", "hidden-size", "num-attention-heads", "max-position-embeddings", "seq-length", "micro-batch-size",
    "global-batch-size", "lr", "min-lr", "lr-decay-iters", "lr-warmup-iters", "lr-warmup-fraction", "lr-warmup-samples",
    "weight-decay", "adam-beta1", "adam-beta2", "clip-grad", "seed", "vocab-file", "merge-file",
    "split", "log-interval", "save-interval", "eval-interval", "eval-iters", "num-experts", "moe-z-loss-coeff",
    "moe-ffn-hidden-size", "mask-prob", "short-seq-prob", "recompute-granularity", "use-distributed-optimizer",
    "use-flash-attn", "async-save",
)  # fmt: skip
"""Arguments that have the same name and meaning here."""

OTHER = {
    "adam-eps": "adam_epsilon", "moe-router-topk": "moe_top_k", "moe-aux-loss-coeff": "moe_loss_coeff",
    "moe-expert-capacity-factor": "moe_capacity_factor", "data-cache-path": "data_cache_dir",
    "num-workers": "dataloader_num_workers", "encoder-num-layers": "num_layers", "encoder-seq-length": "seq_length",
    "checkpoint-activations": "checkpoint_activations",
    "use-megatron-fsdp": "fsdp_memory_optimization", "use-torch-fsdp2": "fsdp_memory_optimization",
    "optimizer-cpu-offload": "cpu_offload",
}  # fmt: skip
"""Flags of this library by the argument that means the same under another name."""

SIZES = {
    "tensor-model-parallel-size": "tensor_model_parallel_size",
    "pipeline-model-parallel-size": "pipeline_model_parallel_size",
    "context-parallel-size": "context_parallel_size",
    "expert-model-parallel-size": "expert_model_parallel_size",
}

KNOWN = keys(
    """
    accumulate-allreduce-grads-in-fp32 apply-query-key-layer-scaling async-tensor-model-parallel-allreduce
    attention-softmax-in-fp32 attention-backend auto-detect-ckpt-format bert-no-binary-head bias-activation-fusion
    calculate-per-token-loss check-weight-hash-across-dp-replicas-interval ckpt-format ckpt-fully-parallel-load
    ckpt-fully-parallel-save cross-entropy-loss-fusion cross-entropy-fusion-impl cuda-graph-impl
    data-parallel-random-init DDP-impl ddp-average-in-collective
    ddp-num-buckets decoder-num-layers decoder-seq-length delay-wgrad-compute deterministic-mode
    disable-bf16-reduced-precision-matmul dist-ckpt-optim-fully-reshardable dist-ckpt-strictness distributed-backend
    distributed-timeout-minutes empty-unused-memory-level enable-ft-package export-force-local-attention
    fp16-lm-cross-entropy gradient-accumulation-fusion group-query-attention high-priority-stream-groups
    initial-loss-scale log-max-attention-logit log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm
    log-progress log-throughput log-timers-to-tensorboard log-validation-ppl-to-tensorboard logging-level loss-scale
    make-vocab-size-divisible-by manual-gc manual-gc-interval moe-grouped-gemm moe-layer-recompute moe-per-layer-logging
    moe-permute-fusion moe-router-dtype moe-router-load-balancing-type moe-token-dispatcher-type
    nccl-communicator-config-path nccl-ub no-async-tensor-model-parallel-allreduce no-barrier-with-level-1-timing
    no-bias-dropout-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-check-for-nan-in-loss-and-grad
    no-ckpt-fully-parallel-save no-create-attention-mask-in-dataloader no-gradient-accumulation-fusion no-load-optim
    no-load-rng no-log-loss-scale-to-tensorboard no-masked-softmax-fusion no-mmap-bin-files no-persist-layer-norm
    no-position-embedding no-rope-fusion no-save-optim no-save-rng num-layers-per-virtual-pipeline-stage
    onnx-safe overlap-grad-reduce
    no-overlap-p2p-communication overlap-p2p-communication-warmup-flush overlap-param-gather
    overlap-param-gather-with-optimizer-step profile profile-ranks profile-step-end profile-step-start recompute-method
    recompute-num-layers reset-attention-mask reset-position-ids rerun-mode sequence-parallel spec swiglu
    tensorboard-log-interval tensorboard-queue-size timing-log-level timing-log-option tp-comm-overlap transformer-impl
    use-checkpoint-args use-checkpoint-opt_param-scheduler use-mcore-models use-persistent-ckpt-worker
    use-precision-aware-optimizer use-pytorch-profiler use-rotary-position-embeddings use-tp-pp-dp-mapping
    vocab-extra-ids vocab-size wandb-entity wandb-save-dir exit-on-missing-checkpoint attention-dropout hidden-dropout
    async-strategy ckpt-assume-constant-structure moe-flex-dispatcher-backend verify-integrity
    apply-wd-to-qk-layernorm use-fused-weighted-squared-relu microbatch-group-size-per-virtual-pipeline-stage
    defer-embedding-wgrad-compute wgrad-deferral-limit straggler-minmax-count use-flashinfer-fused-rope
    error-injection-rate error-injection-type fsdp-double-buffer fsdp-manual-registration init-model-with-meta-device
    override-opt_param-scheduler save-retain-interval use-nccl-ub eval-global-batch-size cp-comm-type
    no-use-tokenizer-model-from-checkpoint-args moe-enable-deepep tokenizer-model bias-swiglu-fusion train-samples
    """,
    ("ffn-hidden-size num-query-groups kv-channels normalization norm-epsilon position-embedding-type rotary-base "
     "rotary-percent untie-embeddings-and-output-weights disable-bias-linear qk-layernorm apply-layernorm-1p "
     "squared-relu init-method-std add-qkv-bias use-rope-scaling rope-scaling-factor rope-type no-rope-freq "
     "quick-geglu moe-shared-expert-intermediate-size multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim "
     "qk-pos-emb-head-dim v-head-dim glu-linear-offset softmax-type window-size window-attn-skip-freq "
     "activation-func-clamp-value enable-gpt-oss mtp-num-layers mtp-loss-scaling-factor rotary-interleaved use-mup "
     "mup-base-hidden-size rotary-scaling-factor mscale mscale-all-dim experimental-attention-variant "
     "attention-output-gate linear-attention-freq linear-conv-kernel-dim linear-key-head-dim linear-value-head-dim "
     "linear-num-key-heads linear-num-value-heads moe-shared-expert-gate",
     "build the model from a config.json with these values in build_model() of your script (docs/white-box.md)"),
    ("fp8-format fp8-amax-history-len fp8-amax-compute-algo fp8-param-gather fp8-recipe fp4-format",
     "mixed-precision has bf16 and fp16"),
    ("grad-reduce-in-bf16", "grad-reduce-dtype: bf16"),
    ("rampup-batch-size step-batch-size-schedule", "the batch size does not change in a run"),
    ("mock-data data-args-path per-split-data-args-path train-data-path valid-data-path test-data-path data-path2",
     "data-path: PREFIX or a blend, and split"),
    ("exit-interval exit-duration-in-mins exit-signal-handler", "SIGTERM saves and stops, and resume: true continues"),
    ("decoupled-lr decoupled-min-lr", "write the groups in build_optimizer() of your script"),
    ("start-weight-decay end-weight-decay weight-decay-incr-style", "the weight decay does not change in a run"),
    ("moe-layer-freq", "moe-layer-interval: K has experts in every K-th block"),
    ("moe-input-jitter-eps moe-router-pre-softmax moe-router-score-function moe-router-enable-expert-bias "
     "moe-router-bias-update-rate moe-router-num-groups moe-router-group-topk moe-router-topk-scaling-factor "
     "moe-shared-expert-overlap moe-pad-expert-input-to-capacity moe-token-drop-policy expert-tensor-parallel-size",
     "the gate is a softmax over the top experts (docs/mixture-of-experts.md)"),
    ("dataloader-type", "the samples are shuffled by the seed"),
    ("load", "load: RUN reads runs of this library only"),
    ("pretrained-checkpoint", "convert the checkpoint to a transformers folder"),
    ("tiktoken-pattern", "tokenizer-type: HuggingFaceTokenizer with tokenizer-path"),
    ("fim-data fim-rate fim-spm-rate", "there is no fill-in-the-middle"),
    ("hierarchical-context-parallel-sizes", "context-parallel-kind: all-to-all or ring"),
    ("num-distributed-optimizer-instances", "fsdp-shard-size: N with FSDP"),
    ("data-parallel-sharding-strategy", "fsdp-memory-optimization, use-distributed-optimizer"),
    ("apply-residual-connection-post-layernorm fp32-residual-connection", "transformers' own modules run"),
    ("cuda-graph-scope external-cuda-graph enable-cuda-graph", "torch-compile: cudagraphs"),
    ("recompute-modules", "recompute-granularity: selective recomputes what is cheap"),
    ("decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers pipeline-model-parallel-layout "
     "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split", "pipeline-stages: A,B,…"),
    ("log-straggler check-for-spiky-loss", "metrics.jsonl has the loss and the time of each logged step"),
    ("retro-add-retriever encoder-pipeline-model-parallel-size encoder-tensor-model-parallel-size",
     "there is no Retro"),
)  # fmt: skip

OF_LLAMA: Mapping[str, Value] = {
    "normalization": "RMSNorm", "position-embedding-type": "rope", "untie-embeddings-and-output-weights": True,
    "disable-bias-linear": True, "rotary-percent": "1.0", "rotary-base": "10000", "rope-type": "rope",
}  # fmt: skip
"""Arguments that describe what every llama is."""

DEFAULTS: dict[str, Value] = {"eval-interval": "1000", "eval-iters": "100"}
"""Values of Megatron-LM that differ from those of this library."""

REFUSED = {
    "perform-rl-step": "reinforcement learning with generation is not supported",
    "num-tokens-to-generate": "this command line generates texts: rapidformer predict and chat",
    "prompts": "this command line generates texts: rapidformer predict and chat",
    "prompt-file": "this command line generates texts: rapidformer predict and chat",
    "hybrid-layer-pattern": "models with Mamba blocks are not supported",
}
"""Arguments of trainings and models that this library does not have."""

SCRIPTS = {"pretrain_gpt": "gpt2", "pretrain_bert": "bert", "pretrain_t5": "t5", "finetune_gpt": "gpt2"}
TOKENIZERS = ("BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer", "HuggingFaceTokenizer")


def arguments_of_script(text: str) -> tuple[str, dict[str, Value], int | None]:
    """Return the training script, its arguments and the number of workers that a shell script starts.

    Raises:
        ConfigError: the shell script starts no training script with arguments.
    """
    for words in commands(text):
        scripts = [i for i, word in enumerate(words) if word.endswith(".py")]
        if scripts and any(word.startswith("--") for word in words[scripts[0] + 1 :]):
            launcher = {name.replace("-", "_"): str(value) for name, value in _arguments(words[: scripts[0]]).items()}
            local, nodes = launcher.get("nproc_per_node", ""), launcher.get("nnodes", "")
            workers = int(local) * (int(nodes) if nodes.isdecimal() else 1) if local.isdecimal() else None
            return words[scripts[0]], _arguments(words[scripts[0] + 1 :]), workers
    hint = "the file must contain a command such as: torchrun … pretrain_gpt.py --num-layers …"
    raise ConfigError("no command with a training script and its arguments was read", where="FILE", hint=hint)


def _arguments(words: Sequence[str]) -> dict[str, Value]:
    """Return the arguments by name, without the dashes. An argument without a value is true."""
    arguments: dict[str, Value] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            arguments[name] = value if equals else True
        elif name:
            before = arguments[name]
            arguments[name] = word if before is True else f"{before} {word}"
    return arguments


def convert_megatron(script: str, values: Mapping[str, Value], workers: int | None, options: Options) -> Result:
    """Convert arguments of Megatron-LM.

    Args:
        script: the training script, such as ``pretrain_gpt.py``.
        values: the arguments by name, without the dashes.
        workers: number of workers that the launcher starts, or None if it is not known.

    Raises:
        ConfigError: the model has no counterpart, or a value has the wrong type.
    """
    for key, why in REFUSED.items():
        if key in values:
            raise ConfigError(f"{key}: {why}", where=key)
    if not values.keys() & {"train-iters", "train-samples"}:
        raise ConfigError("this command line does not train: it has no train-iters and no train-samples", where="FILE")
    source = Source(values, defaults=DEFAULTS)
    result = Result()
    result.set("task", options.task or "pretraining")
    kind = _model(source, script)
    result.set("model_type", kind)
    for name in SAME:
        result.set(name.replace("-", "_"), _plain(source.get(name)))
    for name, flag in OTHER.items():
        result.set(flag, _plain(source.get(name)))
    _dropout(source, result)
    _workers(source, result, options.world_size or workers)
    _length(source, result)
    _precision(source, result)
    _data(source, result, kind)
    _outputs(source, result)
    # These flags would be refused because they have nothing to do.
    if result.flags.get("eval_iters") == 0:
        del result.flags["eval_iters"], result.flags["eval_interval"]
        result.note("eval-iters: 0 evaluates nothing. split: 1,0,0 does the same here")
    if "fsdp_memory_optimization" in result.flags:  # it shards the optimizer state itself
        result.flags.pop("use_distributed_optimizer", None)
    if not result.flags.get("lr_warmup_samples"):
        result.flags.pop("lr_warmup_samples", None)
    result.close(source, KNOWN)
    texts = [str(one) for value in result.flags.values() for one in (value if isinstance(value, list) else [value])]
    unset = [text for text in dict.fromkeys(texts) if "$" in text]
    if unset:
        result.note(f"the file does not set these variables, so write their values: {', '.join(unset)}")
    return result


def _plain(value: Value) -> Value:
    """Return a word of a command line as the number that it is."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _model(source: Source, script: str) -> str:
    """Return the type of the model, and read sizes that every model of this type has."""
    stem = PurePath(script).stem
    if stem not in SCRIPTS:
        hint = f"{', '.join(f'{name}.py' for name in SCRIPTS)} are read"
        raise ConfigError(f"{stem}.py has no counterpart", where=script, hint=hint)
    kind = SCRIPTS[stem]
    if stem.endswith("gpt") and (source.is_on("swiglu") or source.text("position-embedding-type") == "rope"):
        kind = "llama"
    width, heads = source.whole("hidden-size"), source.whole("num-attention-heads")
    usual: dict[str, Value] = {"kv-channels": width // heads if width and heads else None}
    usual |= OF_LLAMA if kind == "llama" else {"ffn-hidden-size": 4 * width if width else None}
    for name, value in usual.items():
        if str(source.values.get(name)) == str(value):
            source.get(name)
    return kind


def _dropout(source: Source, result: Result) -> None:
    hidden, attention = source.number("hidden-dropout"), source.number("attention-dropout")
    rates = [0.1 if rate is None else rate for rate in (hidden, attention)]
    result.set("dropout", rates[0])
    if rates[0] != rates[1]:
        result.miss("attention-dropout", rates[1], "dropout sets every rate")


def _workers(source: Source, result: Result, workers: int | None) -> None:
    sizes = {name: source.whole(name) or 1 for name in SIZES}
    for name, size in sizes.items():
        if size > 1:
            result.set(SIZES[name], size)
    tensor, pipeline, context, experts = sizes.values()
    # Experts are divided over the workers that have copies of everything else: data × context.
    result.workers = max(workers or 1, tensor * pipeline * max(context, experts))
    if source.is_on("sequence-parallel") and tensor > 1:
        result.set("sequence_parallel", True)
    virtual, layers = source.whole("num-layers-per-virtual-pipeline-stage"), source.whole("num-layers")
    if virtual and layers and pipeline > 1:
        result.set("virtual_pipeline_size", layers // pipeline // virtual)
    result.set("virtual_pipeline_size", source.whole("num-virtual-stages-per-pipeline-rank"))


def _length(source: Source, result: Result) -> None:
    steps, batch = source.whole("train-iters"), source.whole("global-batch-size")
    if batch is None:
        sizes = math.prod(source.whole(name) or 1 for name in list(SIZES)[:3])
        batch = (source.whole("micro-batch-size") or 1) * max(1, result.workers // sizes)
    samples, decay = source.whole("train-samples"), source.whole("lr-decay-samples")
    result.set("train_iters", steps or (samples // batch if samples else None))
    if decay:
        result.set("lr_decay_iters", decay // batch)
    style = source.text("lr-decay-style")
    styles = {"WSD": "warmup_stable_decay", "inverse-square-root": "inverse_sqrt"}
    result.set("lr_decay_style", styles.get(style or "", style))
    shape, decay_steps = source.text("lr-wsd-decay-style"), source.whole("lr-wsd-decay-iters")
    if style == "WSD":
        result.set("lr_wsd_decay_style", {"minus_sqrt": "1-sqrt"}.get(shape or "", shape))
        result.set("lr_wsd_decay_iters", decay_steps)
    optimizer = source.text("optimizer")
    if optimizer not in (None, "adam"):
        set_optimizer(result, "optimizer", optimizer)


def _precision(source: Source, result: Result) -> None:
    """Convert the precision, the kernel of the attention, and recomputation."""
    for name in ("fp16", "bf16"):
        if source.is_on(name):
            result.set("mixed_precision", name)
    if source.is_on("grad-reduce-in-bf16"):
        result.set("grad_reduce_dtype", "bf16")
    if source.text("attention-backend") == "flash":
        result.set("use_flash_attn", True)
    method, layers = source.text("recompute-method"), source.whole("recompute-num-layers")
    if source.is_on("recompute-activations"):
        result.set("recompute_granularity", "selective")
    if source.get("activations-checkpoint-method") or "recompute_granularity" in result.flags:
        result.set("checkpoint_activations", True)
    if method == "block":
        result.set("recompute_num_layers", layers)


def _data(source: Source, result: Result, kind: str) -> None:
    path = source.text("data-path")
    result.set("data_path", list[Value](path.split()) if path else None)
    name, model = source.text("tokenizer-type"), source.text("tokenizer-model")
    if name in TOKENIZERS:
        result.set("tokenizer_type", name)
    elif name is not None:
        hint = "tokenizer-type: HuggingFaceTokenizer, tokenizer-path: the folder of the tokenizer"
        result.miss("tokenizer-type", name, hint)
    elif "vocab_file" in result.flags:
        result.set("tokenizer_type", "GPT2BPETokenizer" if "merge_file" in result.flags else "BertWordPieceLowerCase")
    if name == "HuggingFaceTokenizer":
        result.set("tokenizer_path", model)
    if source.is_on("reset-position-ids") or source.is_on("reset-attention-mask"):
        result.set("keep_documents_apart", True)
    if kind == "bert" and not source.is_on("bert-no-binary-head"):
        result.set("sentence_pairs", True)


def _outputs(source: Source, result: Result) -> None:
    saved, loaded = source.text("save"), source.text("load")
    result.set("save", saved)
    if saved is not None and saved == loaded:
        result.set("resume", True)
    elif loaded is not None:
        result.miss("load", loaded, KNOWN.reasons["load"])
    project = source.text("wandb-project")
    trackers = [("tensorboard", source.text("tensorboard-dir")), ("wandb", project)]
    names = [name for name, value in trackers if value]
    if names:
        result.set("report_to", ",".join(names))
    if project:
        result.set("project_name", project)
        result.set("run_name", source.text("wandb-exp-name"))
    source.get("finetune", "wandb-exp-name")
