"""Configurations of other trainers become YAML files whose plans resolve.

The configurations have the keys and values of examples that these projects ship.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from rapidformer_templates.commands.convert.cli import FORMATS, converted, refusal_of
from rapidformer_templates.commands.convert.result import Options, as_yaml
from rapidformer_templates.commands.convert.shell import commands
from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import ConfigError, RapidformerError
from tests.support.texts import WORDS, write_jsonl

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


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with the files that the configurations name."""
    monkeypatch.chdir(tmp_path)
    zero = {"stage": 3, "overlap_comm": False, "reduce_bucket_size": "auto", "sub_group_size": 1e9}
    (tmp_path / "ds_z3_config.json").write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": "auto"}}))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "v1_sft_demo.yaml").write_text("identity: {path: data/identity.json, source: local}\n")
    described = {"alpaca_en_demo": {"file_name": "alpaca_en_demo.json"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(described))
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_configuration_becomes_ours_and_resolves(name: str, desk: Path) -> None:
    file, text, options, expected = CASES[name]
    (desk / file).write_text(text)
    kind, result = converted(desk / file, None, options)
    assert kind == name.split(",")[0]
    ours = as_yaml(result, "converted")
    assert yaml.safe_load(ours) == yaml.safe_load(expected)
    (desk / "ours.yaml").write_text(ours)
    refusal, _ = refusal_of(desk / "ours.yaml", result.workers, "a100-80gb")
    assert refusal is None, refusal.render()


def test_what_has_no_counterpart_is_named(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = {key: value for key, value in ARGUMENTS.items() if key != "label_smoothing_factor"}  # it needs a task
    (desk / "args.json").write_text(json.dumps(plain))
    assert main(["convert", "args.json", "--output", "ours.yaml"]) == 0
    shown = capsys.readouterr()
    assert "  push_to_hub: true\n    push-to-hub: ORG/NAME\n" in shown.out
    assert "  report_to: clearml\n    write a callback of your script" in shown.out
    assert "Unknown to this command, and left out:\n  my_own_key: 3\n" in shown.out
    assert "paged_adamw_32bit pages its states to host memory" in shown.out
    assert "the file does not name a task, a model or data" in shown.out
    assert "Not needed here: ddp_timeout" in shown.out
    assert shown.err.startswith("The plan for 1 worker resolves.\n")
    comments = {line[2:] for line in (desk / "ours.yaml").read_text().splitlines() if line.startswith("# ")}
    assert set(shown.out.splitlines()[1:]) <= comments


def test_trainer_of_a_preference_file_is_asked_for(desk: Path) -> None:
    (desk / "dpo.yaml").write_text(TRL)
    assert any("does not name its trainer" in note for note in converted(desk / "dpo.yaml", None, Options())[1].notes)
    (desk / "ipo.yaml").write_text(TRL + "loss_type: ipo\n")
    result = converted(desk / "ipo.yaml", None, Options())[1]
    assert (result.flags["preference_loss"], result.notes) == ("ipo", [])


def test_arguments_of_megatron_are_named(desk: Path) -> None:
    (desk / "train.sh").write_text(MEGATRON)
    result = converted(desk / "train.sh", None, Options())[1]
    assert result.workers == 8
    assert result.unknown == ["brand-new-argument: 3"]
    assert list(result.missing) == ["init-method-std: 0.006"]
    assert result.ignored == ["overlap-grad-reduce"]
    assert result.notes == ["the file does not set these variables, so write their values: $2"]


def test_configuration_of_megatrons_tests_is_read(desk: Path) -> None:
    arguments = {
        "--num-layers": 12,
        "--hidden-size": 512,
        "--num-attention-heads": 8,
        "--train-iters": 50,
        "--bf16": True,
    }
    (desk / "model_config.yaml").write_text(yaml.safe_dump({"MODEL_ARGS": {**arguments, "--normalization": "RMSNorm"}}))
    kind, result = converted(desk / "model_config.yaml", None, Options())
    assert kind == "megatron"
    assert {
        "num_layers": 12,
        "hidden_size": 512,
        "train_iters": 50,
        "mixed_precision": "bf16",
    }.items() <= result.flags.items()
    assert list(result.missing) == ["normalization: RMSNorm"]


def test_accumulation_over_epochs_resolves(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (desk / "qlora.yml").write_text(AXOLOTL)
    assert main(["convert", "qlora.yml"]) == 0
    shown = capsys.readouterr()
    ours = yaml.safe_load(shown.out)
    assert (ours["train-iters"], ours["micro-batch-size"], ours["global-batch-size"]) == ("1epochs", 2, 8)
    assert "epochs" not in ours
    assert "The plan for 1 worker resolves." in shown.err


def test_workers_decide_the_global_batch(desk: Path) -> None:
    (desk / "qlora.yml").write_text(AXOLOTL)
    flags = converted(desk / "qlora.yml", None, Options(world_size=4))[1].flags
    assert (flags["global_batch_size"], flags["train_iters"], flags["eval_interval"]) == (32, "1epochs", "0.25epochs")


def test_packages_that_are_missing_are_no_refusal(
    desk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rapidformer_templates.planning.environment.installed_packages", dict)
    (desk / "qlora.yml").write_text(AXOLOTL)
    assert main(["convert", "qlora.yml"]) == 0
    shown = capsys.readouterr().err
    assert "The plan for 1 worker resolves." in shown
    assert "adamw_bnb_8bit needs bitsandbytes, which is not installed" in shown


def test_output_is_not_overwritten_unless_asked(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (desk / "dpo.yaml").write_text(TRL)
    (desk / "ours.yaml").write_text("lr: 1\n")
    assert main(["convert", "dpo.yaml", "--output", "ours.yaml"]) == 2
    assert (desk / "ours.yaml").read_text() == "lr: 1\n"
    assert "ours.yaml already exists and is left unchanged" in capsys.readouterr().err
    assert main(["convert", "dpo.yaml", "--output", "ours.yaml", "--overwrite"]) == 0
    assert yaml.safe_load((desk / "ours.yaml").read_text())["lr"] == 5e-7
    assert sorted(path.name for path in desk.glob("*.tmp")) == []


BASE = "base_model: a/b\nlearning_rate: 1e-4\ndatasets: [{path: d, type: alpaca}]\n"
FACTORY = "model_name_or_path: a/b\nfinetuning_type: lora\nstage: sft\ndo_train: true\nlearning_rate: 1e-4\n"

MISTAKES = {
    "none.yaml": ("", "the file none.yaml does not exist"),
    "broken.yaml": ("a: [1\n", "broken.yaml is not YAML"),
    "broken.json": ("{", "broken.json is not JSON"),
    "list.yaml": ("- 1\n", "list.yaml must map keys to values"),
    "other.yaml": ("colour: red\n", "are not those of a training configuration"),
    "accelerate.yaml": ("compute_environment: LOCAL_MACHINE\n", "is a file for accelerate launch"),
    "version1.yaml": ("model: a\ntrain_dataset: b\npref_loss: hinge\n", "pref_loss: hinge is not supported"),
    "words.yml": (BASE + "micro_batch_size: many\n", "micro_batch_size needs a number, not 'many'"),
    "half.yml": (BASE + "micro_batch_size: 1.5\n", "micro_batch_size needs a whole number, not 1.5"),
    "maybe.yml": (BASE + "sample_packing: maybe\n", "sample_packing needs true or false, not 'maybe'"),
    "grpo.yml": (BASE + "rl: grpo\n", "rl: grpo is not supported"),
    "vision.yml": (BASE + "processor_type: AutoProcessor\n", "models that read images or sound are not supported"),
    "no_rate.yml": ("base_model: a/b\n", "there is no learning_rate"),
    "ppo.yaml": (FACTORY.replace("sft", "ppo"), "stage: ppo is not supported"),
    "oft.yaml": (FACTORY.replace("lora", "oft"), "finetuning_type: oft is not supported"),
    "hinge.yaml": (FACTORY.replace("sft", "dpo") + "pref_loss: hinge\n", "pref_loss: hinge is not supported"),
    "predict.yaml": (FACTORY.replace("do_train", "do_predict"), "this file does not train"),
    "tuned.yaml": ("output_dir: a\nnum_generations: 4\n", "reinforcement learning with generation is not supported"),
    "apo.yaml": ("output_dir: a\nloss_type: apo_zero\n", "loss_type: apo_zero has no counterpart"),
    "nothing.sh": ("echo train.py\n", "no command with a training script and its arguments was read"),
    "mamba.sh": ("torchrun pretrain_hybrid.py --train-iters 5\n", "pretrain_hybrid.py has no counterpart"),
    "idle.sh": ("torchrun pretrain_gpt.py --num-layers 2\n", "this command line does not train"),
    "unset.sh": ("torchrun pretrain_gpt.py --train-iters $5\n", "write the number in place of the variable"),
    "quote.sh": ("torchrun pretrain_gpt.py --train-iters 5 --save 'a\n", "a command cannot be read"),
}
"""Files, each with its text and a part of the error message."""


@pytest.mark.parametrize("file", MISTAKES)
def test_mistakes_are_explained(file: str, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, expected = MISTAKES[file]
    if text:
        (desk / file).write_text(text)
    assert main(["convert", file]) == 2
    shown = capsys.readouterr()
    assert expected in shown.err
    assert shown.err.startswith("error: ")
    assert shown.out == ""


STRANGE = (None, True, [], [1], {"a": 1}, "x", -1, 0.5, "auto", [{"a": [1]}])


@pytest.mark.parametrize("name", [name for name in CASES if name != "megatron"])
def test_strange_values_raise_errors_for_users_only(name: str, desk: Path) -> None:
    """Each key has each strange value once. It is converted, named, or refused with a message."""
    _, text, options, _ = CASES[name]
    kind, values = name.split(",")[0], yaml.safe_load(text)
    messages = []
    for key in values:
        for value in STRANGE:
            try:
                as_yaml(FORMATS[kind](values | {key: value}, options), "converted")
            except RapidformerError as error:
                messages.append(error.message)
    assert all(messages)
    assert 20 < len(messages) < len(values) * len(STRANGE) / 2


@pytest.mark.parametrize("more", [["--task", "pretraining"], ["--task", "masked_lm"]])
def test_task_decides_which_flags_are_set(more: list[str], desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (desk / "args.json").write_text(json.dumps({"output_dir": "out", "learning_rate": 1e-4}))
    assert main(["convert", "args.json", *more]) == 0, capsys.readouterr().err
    assert ("validation-fraction" in capsys.readouterr().out) == ("masked_lm" in more)


def test_parts_of_a_schedule_that_have_no_flag_are_named(desk: Path) -> None:
    arguments = {"output_dir": "out", "lr_scheduler_type": "cosine", "learning_rate": 1e-4}
    details = {"num_cycles": 0.5, "min_lr_rate": 0.1}
    result = FORMATS["transformers"](arguments | {"lr_scheduler_kwargs": details}, Options())
    assert result.flags["min_lr"] == pytest.approx(1e-5)
    assert list(result.missing) == ["lr_scheduler_kwargs.num_cycles: 0.5"]
    assert "lr_num_cycles" not in result.flags


@pytest.mark.parametrize("word", ["0", "-2", "many", "1.5"])
def test_number_of_workers_is_a_whole_number(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "none.yaml", f"--world-size={word}"]) == 2
    assert f"--world-size: needs a whole number of at least 1, not '{word}'" in capsys.readouterr().err


def test_format_that_is_named_is_used(desk: Path) -> None:
    (desk / "arguments.txt").write_text("python pretrain_bert.py --train-iters 5 --micro-batch-size 2\n")
    kind, result = converted(desk / "arguments.txt", "megatron", Options())
    assert (kind, result.flags["model_type"], result.flags["sentence_pairs"]) == ("megatron", "bert", True)
    (desk / "few.yaml").write_text("model_name_or_path: a/b\ndo_train: true\n")
    assert converted(desk / "few.yaml", "llama-factory", Options())[0] == "llama-factory"
    with pytest.raises(ConfigError, match="name its format with --from"):
        converted(desk / "few.yaml", None, Options())


SHELLS = {
    "A=1\npython x.py --a $A": ["--a", "1"],
    "A=(--a 1)\nA+=(--b 2)\npython x.py ${A[@]}": ["--a", "1", "--b", "2"],
    'A=("--a 1" "--b")\npython x.py ${A[@]}': ["--a", "1", "--b"],
    "A='--a 1'\npython x.py $A --b": ["--a", "1", "--b"],
    "python x.py --a ${A:-3} --b ${B:-$C}": ["--a", "3", "--b", "$C"],
    "N=4\nM=$((N*2))\npython x.py --a $M --b $(($M+1))": ["--a", "8", "--b", "9"],
    "python x.py \\\n  --a 1 \\\n  --b 2 # not --c 3": ["--a", "1", "--b", "2"],
    'A="x # y"\npython x.py --a "$A"': ["--a", "x # y"],
    'S=b\nif [ $S == "a" ]; then\nA=1\nelif [[ "$S" == "b" ]]; then\nA=2\nelse\nA=3\nfi\npython x.py --a $A': [
        "--a",
        "2",
    ],
    'A=1\nif [ -n "${KEY}" ]; then A=2; fi\npython x.py --a $A': ["--a", "1"],
    "if [ -z ${KEY} ]; then\n  A=2\nfi\npython x.py --a $A": ["--a", "2"],
    'S=b\ncase "${S}" in\n  "a")\n  A=1\n  ;;\n  b|c)\n  A=2\n  ;;\n  *)\n  A=3\n  ;;\nesac\npython x.py --a $A': [
        "--a",
        "2",
    ],
    "cat <<EOF\nit's a text\nEOF\npython x.py --a 1": ["--a", "1"],
}
"""Scripts, each with the arguments of its training script."""


@pytest.mark.parametrize("script", SHELLS)
def test_shell_script_is_read(script: str) -> None:
    assert [words[2:] for words in commands(script)] == [SHELLS[script]]


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_converted_configuration_trains(desk: Path, gpt_folder: Path) -> None:
    """A run accepts the data set, accumulation, schedule and adapters of the result."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from rapidformer_templates.finetuner import Finetuner

    shutil.copytree(gpt_folder, desk / "model")
    sizes = GPT2Config(vocab_size=512, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(sizes).save_pretrained(desk / "model")
    rows = [{"instruction": f"{word}?", "input": "", "output": word} for word in WORDS[:20]]
    write_jsonl(desk / "alpaca.jsonl", rows)
    wanted = {
        "base_model": "./model",
        "datasets": [{"path": "./alpaca.jsonl", "type": "alpaca"}],
        "num_epochs": 1,
    }
    wanted |= {"sequence_len": 64, "optimizer": "adamw_torch", "val_set_size": 0.2, "output_dir": "out", "lora_r": 4}
    wanted |= {
        "attn_implementation": "sdpa",
        "adapter": "lora",
        "lora_target_linear": True,
        "sample_packing": False,
        "load_in_4bit": False,
    }
    (desk / "lora.yml").write_text(yaml.safe_dump(yaml.safe_load(AXOLOTL) | wanted))
    assert main(["convert", "lora.yml", "--output", "ours.yaml"]) == 0
    Finetuner(["--config", "ours.yaml", "--device", "cpu"]).fit()
    summary = json.loads((desk / "out" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert (summary["samples"], summary["receipts"]["micro_steps"]) == (16, 4)
    assert (summary["metrics"]["eval_loss"] > 0, summary["best"]) == (True, None)
    adapters = json.loads((desk / "out" / "export" / "adapter_config.json").read_text())
    assert (adapters["r"], adapters["lora_alpha"], adapters["lora_dropout"]) == (4, 16, 0.05)


@pytest.mark.slow
def test_every_argument_of_transformers_is_known(desk: Path) -> None:
    """A file with the defaults of the installed version converts to their meaning here, and nothing is unknown."""
    from transformers import TrainingArguments

    (desk / "args.json").write_text(TrainingArguments(output_dir="out").to_json_string())
    result = converted(desk / "args.json", None, Options())[1]
    assert (result.unknown, result.missing) == ([], {})
    expected = {
        "micro_batch_size": 8, "epochs": 3, "lr": 5e-05, "weight_decay": 0.0, "seed": 42, "save": "out",
        "save_interval": 500, "log_interval": 500, "validation_fraction": 0.0,
    }  # fmt: skip
    assert result.flags == expected
