"""Configurations of other trainers, as these projects ship them, and the ones that they are converted to."""

from __future__ import annotations

import json

from rapidformer_templates.commands.convert.conversion import Options

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
load_in_8bit: false
load_in_4bit: true
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.1
output_dir: ./outputs/qlora-out
adapter: qlora
lora_model_dir:
sequence_len: 2048
sample_packing: true
eval_sample_packing: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: [gate_proj, down_proj, up_proj, q_proj, v_proj, k_proj, o_proj]
wandb_project:
wandb_watch:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
tf32: false
gradient_checkpointing: true
resume_from_checkpoint:
logging_steps: 1
attn_implementation: flash_attention_2
loss_watchdog_threshold: 5.0
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: "<|end_of_text|>"
"""

FROM_AXOLOTL = """
task: causal_lm
pretrained-model-name-or-path: NousResearch/Llama-3.2-1B
data-name: teknium/GPT4-LLM-Cleaned
seq-length: 2048
pack-sequences: true
micro-batch-size: 2
global-batch-size: 8
train-iters: 1epochs
lr: 0.0002
lr-decay-style: cosine
lr-warmup-fraction: 0.1
optimizer: adamw_bnb_8bit
weight-decay: 0.0
seed: 42
mixed-precision: bf16
checkpoint-activations: true
save: ./outputs/qlora-out
log-interval: 1
validation-fraction: 0.1
eval-interval: 0.25epochs
keep-best: false
use-flash-attn: true
lora-rank: 32
lora-alpha: 16
lora-dropout: 0.05
lora-target-modules: gate_proj,down_proj,up_proj,q_proj,v_proj,k_proj,o_proj
quantize-base: nf4
"""

LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
deepspeed: ds_z3_config.json
dataset: alpaca_en_demo
template: qwen3_nothink
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
dataloader_num_workers: 4
output_dir: saves/qwen3-4b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
"""

FROM_LLAMA_FACTORY = """
task: causal_lm
pretrained-model-name-or-path: Qwen/Qwen3-4B-Instruct-2507
data-dir: data
data-name: alpaca_en_demo.json
seq-length: 2048
max-train-samples: 1000
micro-batch-size: 1
global-batch-size: 4
train-iters: 3epochs
lr: 0.0001
lr-decay-style: cosine
lr-warmup-fraction: 0.1
weight-decay: 0.0
seed: 42
mixed-precision: bf16
zero-3-memory-optimization: true
save: saves/qwen3-4b/lora/sft
overwrite: true
save-interval: 500
log-interval: 10
dataloader-num-workers: 4
validation-fraction: 0.0
checkpoint-activations: true
lora-rank: 8
"""

VERSION_1 = """
model: Qwen/Qwen3-4B
model_class: llm
peft_config:
  name: lora
  r: 16
  lora_alpha: 64
  lora_dropout: 0.05
  target_modules: all
kernel_config:
  name: auto
dist_config:
  name: fsdp2
  dcp_path: null
train_dataset: data/v1_sft_demo.yaml
output_dir: ./outputs/test_lora
micro_batch_size: 1
global_batch_size: 8
cutoff_len: 2048
learning_rate: 1.0e-4
max_steps: 10
save_epochs: 2
cp_size: 2
batching_strategy: padding_free
sample_backend: hf
"""

FROM_VERSION_1 = """
task: causal_lm
pretrained-model-name-or-path: Qwen/Qwen3-4B
data-dir: data
data-name: identity.json
seq-length: 2048
pack-sequences: true
context-parallel-size: 2
context-parallel-kind: all-to-all
micro-batch-size: 1
global-batch-size: 8
train-iters: 10
lr: 0.0001
lr-decay-style: constant
seed: 42
mixed-precision: bf16
checkpoint-activations: true
save: ./outputs/test_lora
log-interval: 1
validation-fraction: 0.0
save-interval: 2epochs
fsdp-memory-optimization: true
lora-rank: 16
lora-alpha: 64
lora-dropout: 0.05
"""

ARGUMENTS = {
    "output_dir": "runs/sst2",
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "learning_rate": 3e-5,
    "lr_scheduler_type": "polynomial",
    "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 1e-7},
    "warmup_steps": 50,
    "optim": "paged_adamw_32bit",
    "weight_decay": 0.01,
    "adam_beta2": 0.98,
    "max_grad_norm": 0.5,
    "label_smoothing_factor": 0.1,
    "fp16": True,
    "bf16": False,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 3,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_accuracy",
    "greater_is_better": True,
    "torch_compile": True,
    "fsdp": "shard_grad_op auto_wrap",
    "report_to": ["wandb", "clearml"],
    "run_name": "first",
    "seed": 7,
    "push_to_hub": True,
    "ddp_timeout": 1800,
    "my_own_key": 3,
}

FROM_ARGUMENTS = """
task: sequence_classification
micro-batch-size: 16
epochs: 3
lr: 3.0e-05
lr-decay-style: polynomial
lr-warmup-iters: 50
lr-power: 2
min-lr: 1.0e-07
optimizer: adamw_torch
weight-decay: 0.01
adam_beta2: 0.98
clip-grad: 0.5
label-smoothing: 0.1
seed: 7
mixed-precision: fp16
torch-compile: inductor
fsdp-memory-optimization: true
fsdp-reshard-after-forward: false
save: runs/sst2
keep-checkpoints: 3
log-interval: 500
report-to: wandb
run-name: first
keep-best: true
metric-for-best: accuracy
metric-for-best-mode: max
""".replace("adam_beta2", "adam-beta2")

TRL = """
model_name_or_path: alignment-handbook/zephyr-7b-sft-full
torch_dtype: null
dataset_name: HuggingFaceH4/ultrafeedback_binarized
dataset_train_split: train_prefs
bf16: true
beta: 0.01
do_eval: true
eval_strategy: steps
eval_steps: 100
gradient_accumulation_steps: 1
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
learning_rate: 5.0e-7
logging_steps: 10
lr_scheduler_type: cosine
max_length: 1024
max_prompt_length: 512
num_train_epochs: 1
optim: adamw_torch
output_dir: data/zephyr-7b-dpo-full
per_device_train_batch_size: 8
save_strategy: steps
save_steps: 100
seed: 42
warmup_ratio: 0.1
"""

FROM_TRL = """
task: preference
pretrained-model-name-or-path: alignment-handbook/zephyr-7b-sft-full
data-name: HuggingFaceH4/ultrafeedback_binarized
seq-length: 1024
micro-batch-size: 8
epochs: 1
lr: 5.0e-07
lr-decay-style: cosine
lr-warmup-fraction: 0.1
optimizer: adamw_torch
weight-decay: 0.0
seed: 42
mixed-precision: bf16
checkpoint-activations: true
save: data/zephyr-7b-dpo-full
save-interval: 100
log-interval: 10
eval-interval: 100
keep-best: false
preference-loss: dpo
preference-beta: 0.01
"""

MEGATRON = r"""#!/bin/bash
# Runs a model of 1.3 billion parameters; don't change the sizes
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=1
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=${1:-"checkpoints/gpt"} #<path>
DATA_PATH=$2

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
GPT_MODEL_ARGS=(
    --num-layers 24
    --hidden-size 2048
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # Can use (flash/fused/unfused/local)
)
TRAINING_ARGS="
    --micro-batch-size 1 \
    --global-batch-size 64 \
    --train-samples 64000 \
    --lr-decay-samples 32000 \
    --weight-decay 0.1 \
    --adam-beta2 0.95 \
    --init-method-std 0.006 \
    --fp16 \
    --lr 6.0e-5 \
    --lr-decay-style cosine \
    --min-lr 6.0e-6 \
    --lr-warmup-fraction .001 \
"
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --num-layers-per-virtual-pipeline-stage 6
    --sequence-parallel
)
MORE="--recompute-activations"
if [ "$WORLD_SIZE" == "16" ]; then
    MORE="--fp8-format hybrid"
fi
OUTPUT_ARGS=(
    --log-interval 100
    --save-interval 10000
    --save $CHECKPOINT_PATH
    --load $CHECKPOINT_PATH
    --tensorboard-dir "${CHECKPOINT_PATH}/tensorboard"
    --overlap-grad-reduce
    --brand-new-argument 3
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${GPT_MODEL_ARGS[@]} $TRAINING_ARGS ${MODEL_PARALLEL_ARGS[@]} $MORE \
    --data-path 0.3 $DATA_PATH 0.7 other_text_document --vocab-file vocab.json --merge-file merges.txt \
    ${OUTPUT_ARGS[@]}
"""

FROM_MEGATRON = """
task: pretraining
model-type: gpt2
num-layers: 24
hidden-size: 2048
num-attention-heads: 16
max-position-embeddings: 2048
seq-length: 2048
micro-batch-size: 1
global-batch-size: 64
lr: 6.0e-05
min-lr: 6.0e-06
lr-warmup-fraction: 0.001
weight-decay: 0.1
adam-beta2: 0.95
vocab-file: vocab.json
merge-file: merges.txt
log-interval: 100
save-interval: 10000
eval-interval: 1000
eval-iters: 100
dropout: 0.1
tensor-model-parallel-size: 2
pipeline-model-parallel-size: 2
sequence-parallel: true
virtual-pipeline-size: 2
train-iters: 1000
lr-decay-iters: 500
lr-decay-style: cosine
mixed-precision: fp16
recompute-granularity: selective
checkpoint-activations: true
data-path: ['0.3', $2, '0.7', other_text_document]
tokenizer-type: GPT2BPETokenizer
save: checkpoints/gpt
resume: true
report-to: tensorboard
"""

CASES = {
    "axolotl": ("qlora.yml", AXOLOTL, Options(), FROM_AXOLOTL),
    "llama-factory": ("sft.yaml", LLAMA_FACTORY, Options(world_size=2), FROM_LLAMA_FACTORY),
    "llama-factory, version 1": ("v1.yaml", VERSION_1, Options(world_size=4, task="causal_lm"), FROM_VERSION_1),
    "transformers": ("args.json", json.dumps(ARGUMENTS), Options(task="sequence_classification"), FROM_ARGUMENTS),
    "transformers, as TRL writes it": ("dpo.yaml", TRL, Options(), FROM_TRL),
    "megatron": ("train.sh", MEGATRON, Options(), FROM_MEGATRON),
}
