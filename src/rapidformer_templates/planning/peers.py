"""This library's names for the flags of other trainers. Does not import torch.

The names come from transformers' ``TrainingArguments`` and its example scripts, trl, accelerate, Lightning,
Megatron-LM and DeepSpeed. Flags with the same name here (``--tensor-model-parallel-size`` …) need no line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rapidformer_templates.errors import alike

SIMILAR = 0.75
"""How similar two names must be to suggest one for the other: ``tf31`` and ``tf32``, but not ``bf16`` and ``tf32``."""


@dataclass(frozen=True)
class Equivalent:
    """This library's equivalent of another trainer's flag.

    Attributes:
        flags: the flags, with a value if the name implies one (``--mixed-precision bf16``). Empty if there is none.
        note: additional information.
    """

    flags: str
    note: str = ""


_ACCUMULATION = "accumulation steps are computed: global batch / (micro batch × data-parallel workers)"
_BY_HOOK = "write it in build_optimizer() of your own script"
_INTERVAL = "a number of steps, or 20000samples, 30minutes; by default the end of each epoch, or of the run"
_NODES = "start the same command on each machine with torchrun (docs/many-machines.md)"

# Names, and their equivalents. Names that differ only in dashes and underscores are the same.
_LINES: tuple[tuple[str, str, str], ...] = (
    # Length and batch sizes.
    ("num-train-epochs max-epochs num-epochs n-epochs train-epochs", "--epochs", ""),
    ("max-steps total-steps num-train-steps max-train-steps num-steps max-iters", "--train-iters", ""),
    ("train-samples", "--train-iters", "steps: the samples / --global-batch-size"),
    ("per-device-train-batch-size per-gpu-train-batch-size batch-size train-micro-batch-size-per-gpu "
     "micro-batch-size-per-gpu", "--micro-batch-size", ""),
    ("per-device-eval-batch-size eval-batch-size per-gpu-eval-batch-size", "--micro-batch-size",
     "evaluation uses it, too"),
    ("gradient-accumulation-steps accumulate-grad-batches grad-accum-steps gradient-accumulation",
     "--global-batch-size", _ACCUMULATION),
    ("train-batch-size total-batch-size", "--global-batch-size", ""),
    ("auto-find-batch-size auto-scale-batch-size", "--auto-strategy", ""),
    # The optimizer and its schedule.
    ("learning-rate", "--lr", ""),
    ("lr-scheduler-type lr-scheduler scheduler-type", "--lr-decay-style", ""),
    ("warmup-steps num-warmup-steps warmup-iters lr-warmup-steps warmup-num-steps", "--lr-warmup-iters", ""),
    ("warmup-ratio warmup-fraction", "--lr-warmup-fraction", ""),
    ("decay-steps lr-decay-steps", "--lr-decay-iters", ""),
    ("min-learning-rate lr-min eta-min lr-end", "--min-lr", ""),
    ("num-cycles num-restarts", "--lr-num-cycles", ""),
    ("num-decay-steps wsd-decay-iters", "--lr-wsd-decay-iters", ""),
    ("max-grad-norm gradient-clipping gradient-clip-val grad-clip clip-grad-norm", "--clip-grad", ""),
    ("optim", "--optimizer", ""),
    ("adam-eps", "--adam-epsilon", ""),
    ("adam-betas betas", "--adam-beta1 0.9", "and --adam-beta2 0.999"),
    ("optim-args", "", _BY_HOOK),
    ("neftune-noise-alpha noise-alpha", "--neftune-alpha", ""),
    ("beta pref-beta dpo-beta rl-beta", "--preference-beta", ""),
    ("simpo-gamma-beta-ratio", "--simpo-gamma", ""),
    ("label-smoothing-factor", "--label-smoothing", ""),
    ("data-seed manual-seed random-seed", "--seed", ""),
    # Precision.
    ("bf16-full-eval", "--mixed-precision bf16", ""),
    ("half-precision amp fp16-full-eval", "--mixed-precision fp16", ""),
    ("precision dtype torch-dtype", "--mixed-precision bf16", "or fp16; the default is fp32"),
    ("use-tf32 allow-tf32", "--tf32", ""),
    # Memory.
    ("gradient-checkpointing activation-checkpointing use-gradient-checkpointing", "--checkpoint-activations", ""),
    ("activation-offloading enable-activation-offloading cpu-offloading-activations", "--offload-activations", ""),
    ("recompute-method", "--recompute-num-layers", "the first N blocks, Megatron-LM's method block; without it: all"),
    ("fsdp use-fsdp fully-shard", "--fsdp-memory-optimization", ""),
    ("fsdp-config fsdp-transformer-layer-cls-to-wrap fsdp-auto-wrap-policy", "--fsdp-memory-optimization",
     "it shards each block separately"),
    ("fsdp-sharding-strategy", "--fsdp-memory-optimization", "--no-fsdp-reshard-after-forward keeps blocks whole, "
     "--fsdp-shard-size N is a hybrid"),
    ("data-parallel-shard-degree dp-shard-size parallelism-config-dp-shard-size", "--fsdp-shard-size",
     "with --fsdp-memory-optimization"),
    ("data-parallel-replicate-degree dp-replicate-size parallelism-config-dp-replicate-size", "",
     "--fsdp-shard-size is workers / copies"),
    ("deepspeed deepspeed-config-file ds-config", "--deepspeed-config", "or a switch: --zero-2-memory-optimization …"),
    ("use-deepspeed zero-stage zero zero2", "--zero-2-memory-optimization", "or --zero-1-…, --zero-3-…"),
    ("zero1 zero-1", "--zero-1-memory-optimization", ""),
    ("zero-2", "--zero-2-memory-optimization", ""),
    ("zero3 zero-3", "--zero-3-memory-optimization", ""),
    ("oss sharded-ddp", "--oss-memory-optimization", ""),
    ("oss-sdp", "--oss-sdp-memory-optimization", ""),
    ("offload-optimizer offload-optimizer-device optimizer-cpu-offload offload", "--cpu-offload", ""),
    ("offload-param offload-param-device fsdp-offload-params", "--cpu-offload --zero-3-memory-optimization", ""),
    ("nvme-offload offload-nvme", "--nvme-path", ""),
    # Layouts and workers.
    ("tensor-parallel-size tensor-parallel tp tp-size tensor-parallelism", "--tensor-model-parallel-size", ""),
    ("pipeline-parallel-size pipeline-parallel pp pp-size", "--pipeline-model-parallel-size", ""),
    ("num-layers-per-virtual-pipeline-stage", "--virtual-pipeline-size", "parts of the model per worker"),
    ("expert-parallel-size ep ep-size", "--expert-model-parallel-size", "inside groups of data-parallel workers"),
    ("context-parallel context-parallel-degree cp cp-size", "--context-parallel-size", ""),
    ("num-processes num-gpus gpus devices ngpus n-gpu gpus-per-node num-proc", "--nproc-per-node", ""),
    ("num-machines num-nodes nnodes node-rank machine-rank", "", _NODES),
    ("main-process-port", "--master-port", ""),
    ("main-process-ip master-addr", "", _NODES),
    ("strategy", "--fsdp-memory-optimization", "or another switch; without one, several workers are data-parallel"),
    ("ddp multi-gpu", "--nproc-per-node", "several workers are data-parallel without a flag"),
    ("ddp-find-unused-parameters find-unused-parameters ddp-backend distributed-backend local-rank "
     "overlap-grad-reduce", "", "leave it out: it is detected automatically"),
    ("no-cuda use-cpu cpu", "--device cpu", ""),
    ("accelerator", "--device", "cpu or cuda"),
    ("dataloader-workers num-workers", "--dataloader-num-workers", ""),
    ("pin-memory", "--dataloader-pin-memory", ""),
    # The model and its kernels.
    ("model-name-or-path model model-name pretrained-model base-model", "--pretrained-model-name-or-path", ""),
    ("tokenizer tokenizer-name tokenizer-model tokenizer-name-or-path", "--tokenizer-path", ""),
    ("max-seq-length max-length max-seq-len block-size model-max-length cutoff-len sequence-len", "--seq-length", ""),
    ("n-layer num-hidden-layers", "--num-layers", ""),
    ("n-embd d-model", "--hidden-size", ""),
    ("n-head num-heads", "--num-attention-heads", ""),
    ("hidden-dropout attention-dropout resid-pdrop", "--dropout", ""),
    ("attn-implementation flash-attn use-flash-attention flash-attention", "--use-flash-attn", ""),
    ("torch-compile-backend compile use-compile torchdynamo", "--torch-compile", ""),
    ("ort onnxruntime use-ort", "--onnx-runtime-training", ""),
    ("use-liger-kernel liger", "--fused-linear-cross-entropy", ""),
    ("moe-router-topk num-experts-per-tok", "--moe-top-k", ""),
    ("moe-aux-loss-coeff router-aux-loss-coef", "--moe-loss-coeff", ""),
    ("use-peft use-lora lora lora-r", "--lora-rank 8", ""),
    ("lora-target lora-target-linear", "--lora-target-modules", ""),
    ("modules-to-save", "--lora-modules-to-save", ""),
    ("finetuning-type adapter", "--lora-rank 8", "for adapters; the whole model is trained without it"),
    ("use-dora", "--lora-variant dora", "with --lora-rank"),
    ("use-rslora", "--lora-variant rslora", "with --lora-rank"),
    ("freeze-layers frozen-parameters freeze-parameters", "--freeze", "a regular expression of names"),
    ("unfrozen-parameters trainable-parameters", "--train-only", "a regular expression of names"),
    ("load-in-4bit", "--quantize-base nf4", "with --lora-rank"),
    ("load-in-8bit quantization-bit", "--quantize-base int8", "with --lora-rank"),
    # Data.
    ("train-file train-data train-data-path dataset", "--data-dir", "a folder; --data-name names the set in it"),
    ("dataset-name", "--data-name", "on the hub, or in the folder --data-dir"),
    ("validation-file", "--data-dir", "the folder that holds train.EXT and validation.EXT"),
    ("dataset-text-field text-field", "--text-column", ""),
    ("validation-split-percentage", "--validation-fraction", "a share, such as 0.1"),
    ("packing pack sample-packing", "--pack-sequences", ""),
    ("assistant-only-loss completion-only-loss train-on-inputs", "--loss-on answers", ""),
    ("reset-position-ids reset-attention-mask", "--keep-documents-apart", ""),
    ("mlm-probability", "--mask-prob", ""),
    ("bucket-by-length length-grouped-sampling", "--group-by-length", ""),
    # Outputs of a run, and evaluations.
    ("output-dir default-root-dir logging-dir save-dir checkpoint-dir project-dir out-dir", "--save", ""),
    ("overwrite-output-dir", "--overwrite", ""),
    ("resume-from-checkpoint ckpt-path auto-resume", "--resume", "from the newest checkpoint in --save"),
    ("finetune", "--weights-only", "with --load"),
    ("save-steps save-every checkpointing-steps every-n-train-steps", "--save-interval", ""),
    ("save-strategy", "--save-interval", _INTERVAL),
    ("save-total-limit save-top-k checkpoints-total-limit", "--keep-checkpoints", ""),
    ("load-best-model-at-end", "--keep-best", ""),
    ("metric-for-best-model monitor", "--metric-for-best", ""),
    ("patience early-stopping", "--early-stopping-patience 3", "evaluations without an improvement"),
    ("greater-is-better", "--metric-for-best-mode max", ""),
    ("eval-steps val-check-interval evaluate-every", "--eval-interval", ""),
    ("eval-strategy evaluation-strategy", "--eval-interval", _INTERVAL),
    ("limit-val-batches eval-batches", "--eval-iters", ""),
    ("logging-steps log-every-n-steps log-every steps-per-print", "--log-interval", ""),
    ("with-tracking log-with loggers", "--report-to tensorboard", ""),
    ("wandb use-wandb", "--report-to wandb", ""),
    ("tensorboard-dir", "--report-to tensorboard", "which is in --save"),
    ("hub-model-id push-to-hub-model-id export-hub-model-id", "--push-to-hub ORG/NAME", ""),
    ("model-revision revision-of-model", "--revision", ""),
    ("dataset-config dataset-config-name", "--data-config", ""),
    ("dataset-train-split dataset-split", "--data-split", ""),
    ("wandb-project trackio-project experiment-name", "--project-name", "with --report-to"),
    ("wandb-exp-name", "--run-name", "with --report-to"),
    ("do-train do-eval do-predict disable-tqdm remove-unused-columns prediction-loss-only", "",
     "leave it out"),
)  # fmt: skip

PEERS: dict[str, Equivalent] = {
    name.replace("-", "_"): Equivalent(flags, note) for names, flags, note in _LINES for name in names.split()
}


def as_flags(flags: str) -> str:
    """Return flags as on a command line: ``--mixed-precision bf16``."""
    return flags


def as_yaml(flags: str) -> str:
    """Return flags as in a file: ``mixed_precision: bf16``."""
    return ", ".join(f"{name}: {value}" if value else name for name, value in _pairs(flags))


def as_code(flags: str) -> str:
    """Return flags as in a script: ``mixed_precision="bf16"``."""
    return ", ".join(f'{name}="{value}"' if value else name for name, value in _pairs(flags))


def _pairs(flags: str) -> list[tuple[str, str]]:
    """Return (field, value) of each flag."""
    pairs = re.findall(r"--(\S+)(?: (?!--)(\S+))?", flags)
    return [(name.replace("-", "_"), value) for name, value in pairs]


def flag_hint(word: str, known: Iterable[str], spelled: Callable[[str], str] = as_flags) -> str | None:
    """Return a hint for an unknown name: its equivalent here, or the known flag with the closest spelling.

    Args:
        word: the name, with or without its dashes.
        known: the known flags, with their dashes.
        spelled: formats flags as the source of the name does.
    """
    name = word.lstrip("-").replace("-", "_").lower()
    equivalent = PEERS.get(name)
    if equivalent is not None:
        return " ".join(
            part
            for part in (equivalent.flags and f"did you mean {spelled(equivalent.flags)}?", equivalent.note)
            if part
        )
    flags = {flag.lstrip("-").replace("-", "_"): flag for flag in known}
    near = alike(name, flags, cutoff=SIMILAR)
    return f"did you mean {spelled(flags[near[0]])}?" if near else None
