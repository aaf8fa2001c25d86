"""Keys of other trainers, and the flags that they become."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from rapidformer_templates.commands.convert import (
    axolotl,
    llama_factory,
    llama_factory_v1,
    megatron,
    settings,
    training,
    trl,
)
from rapidformer_templates.commands.convert.cli import FORMATS, converted
from rapidformer_templates.commands.convert.conversion import Options, Value
from rapidformer_templates.planning.flags import SECTIONS
from rapidformer_templates.planning.optimizers import OPTIMIZERS
from rapidformer_templates.planning.registry import switch_options

FRAGMENTS: list[tuple[str, dict[str, Value], dict[str, Value], tuple[str, ...]]] = [
    (
        "axolotl",
        {"rl": "dpo", "rl_beta": 0.3},
        {"task": "preference", "preference_loss": "dpo", "preference_beta": 0.3},
        (),
    ),
    ("axolotl", {"rl": "orpo", "orpo_alpha": 0.2}, {"preference_loss": "orpo", "preference_beta": 0.2}, ()),
    ("axolotl", {"rl": "simpo", "simpo_gamma": 0.7}, {"preference_loss": "simpo", "simpo_gamma": 0.7}, ()),
    (
        "axolotl",
        {"rl": "kto", "kto_desirable_weight": 0.2},
        {"preference_loss": "kto", "kto_desirable_weight": 0.2},
        (),
    ),
    ("axolotl", {"reward_model": True, "num_labels": 1}, {"task": "reward"}, ("num_labels: 1",)),
    ("axolotl", {"optimizer": "lion_8bit"}, {"optimizer": None}, ("optimizer: lion_8bit",)),
    ("axolotl", {"optimizer": "ao_adamw_4bit"}, {"optimizer": "adamw_torch_4bit"}, ()),
    ("axolotl", {"optimizer": "muon"}, {"optimizer": "muon"}, ()),
    ("axolotl", {"fsdp": ["full_shard", "auto_wrap"]}, {"fsdp_memory_optimization": True, "cpu_offload": None}, ()),
    (
        "axolotl",
        {"fsdp_config": {"fsdp_version": 2, "offload_params": True}},
        {"fsdp_memory_optimization": True, "cpu_offload": True},
        (),
    ),
    ("axolotl", {"fsdp_config": {"reshard_after_forward": False}}, {"fsdp_reshard_after_forward": False}, ()),
    ("axolotl", {"fsdp": "hybrid_shard"}, {"fsdp_memory_optimization": True}, ("fsdp: hybrid_shard",)),
    ("axolotl", {"fsdp_version": 2, "dp_shard_size": 4, "dp_replicate_size": 2}, {"fsdp_shard_size": 4}, ()),
    ("axolotl", {"deepspeed": "ds_z3_config.json"}, {"zero_3_memory_optimization": True, "deepspeed_config": None}, ()),
    ("axolotl", {"deepspeed": "elsewhere.json"}, {"deepspeed_config": "elsewhere.json"}, ()),
    (
        "axolotl",
        {"deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}},
        {"zero_2_memory_optimization": True, "cpu_offload": True},
        (),
    ),
    (
        "axolotl",
        {"deepspeed": {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}},
        {"zero_3_memory_optimization": True, "cpu_offload": None},
        ("offload device: nvme",),
    ),
    (
        "axolotl",
        {"tensor_parallel_size": 2, "context_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "context_parallel_kind": "ring"},
        (),
    ),
    (
        "axolotl",
        {"gradient_checkpointing": "offload"},
        {"checkpoint_activations": True, "offload_activations": True},
        (),
    ),
    ("axolotl", {"activation_offloading": True}, {"checkpoint_activations": None, "offload_activations": True}, ()),
    ("axolotl", {"load_in_4bit": True}, {"quantize_base": None}, ("load_in_4bit: 4",)),
    ("axolotl", {"adapter": "lora", "lora_r": 4, "load_in_8bit": True}, {"lora_rank": 4, "quantize_base": "int8"}, ()),
    (
        "axolotl",
        {"adapter": "lora", "lora_target_modules": r"layers\.\d+\.mlp"},
        {"lora_target_modules": None},
        (r"lora_target_modules: layers\.\d+\.mlp",),
    ),
    (
        "axolotl",
        {"adapter": "lora", "lora_target_parameters": ["mlp.experts.down_proj"]},
        {"lora_target_modules": "all-linear,experts.down_proj"},
        (),
    ),
    (
        "axolotl",
        {"adapter": "lora", "peft_use_dora": True, "lora_modules_to_save": ["lm_head"]},
        {"lora_variant": "dora", "lora_modules_to_save": "lm_head"},
        (),
    ),
    ("axolotl", {"unfrozen_parameters": ["^lm_head", "layers.1"]}, {"train_only": "(?:^lm_head)|(?:layers.1)"}, ()),
    (
        "axolotl",
        {"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]},
        {"fused_linear_cross_entropy": True},
        (),
    ),
    (
        "axolotl",
        {"plugins": ["axolotl.integrations.spectrum.SpectrumPlugin"]},
        {"fused_linear_cross_entropy": None},
        ("plugins: axolotl.integrations.spectrum.SpectrumPlugin",),
    ),
    ("axolotl", {"lr_scheduler": "rex"}, {"lr_decay_style": None}, ("lr_scheduler: rex",)),
    ("axolotl", {"cosine_min_lr_ratio": 0.1}, {"lr_decay_style": "cosine", "min_lr": 1e-5}, ()),
    ("axolotl", {"warmup_steps": 10}, {"lr_warmup_iters": 10, "lr_warmup_fraction": None}, ()),
    (
        "axolotl",
        {},
        {
            "lr_decay_style": "cosine",
            "lr_warmup_fraction": 0.03,
            "seq_length": 512,
            "micro_batch_size": 1,
            "epochs": 1,
            "weight_decay": 0.0,
        },
        (),
    ),
    ("axolotl", {"max_steps": 100, "num_epochs": 4}, {"train_iters": 100, "epochs": None}, ()),
    ("axolotl", {"batch_size": 32, "micro_batch_size": 2, "max_steps": 9}, {"global_batch_size": 32}, ()),
    ("axolotl", {"num_epochs": 0.5}, {"epochs": None, "train_iters": "0.5epochs"}, ()),
    ("axolotl", {"val_set_size": 100}, {"validation_fraction": 0.0}, ("val_set_size: 100.0",)),
    ("axolotl", {"val_set_size": 0.1, "evals_per_epoch": 4}, {"eval_interval": "0.25epochs"}, ()),
    ("axolotl", {"saves_per_epoch": 3, "evals_per_epoch": 4}, {"save_interval": "0.333333333333epochs"}, ()),
    ("axolotl", {"saves_per_epoch": 1}, {"save_interval": None}, ()),
    ("axolotl", {"saves_per_epoch": 1, "max_steps": 9}, {"save_interval": "1epochs"}, ()),
    (
        "axolotl",
        {"saves_per_epoch": 1, "max_steps": 9, "streaming": True},
        {"save_interval": None, "streaming": True},
        (),
    ),
    (
        "axolotl",
        {"val_set_size": 0.1, "eval_steps": 20, "early_stopping_patience": 3},
        {"eval_interval": 20, "early_stopping_patience": 3, "keep_best": True},
        (),
    ),
    (
        "axolotl",
        {"wandb_project": "p", "wandb_name": "n"},
        {"report_to": "wandb", "project_name": "p", "run_name": "n"},
        (),
    ),
    (
        "axolotl",
        {"datasets": [{"path": "org/set", "name": "part", "type": "completion", "field": "chapter", "split": "train"}]},
        {"data_dir": "org/set", "data_name": "part", "text_column": "chapter", "loss_on": "all"},
        (),
    ),
    (
        "axolotl",
        {
            "datasets": [
                {
                    "path": "json",
                    "data_files": "d/x.jsonl",
                    "ds_type": "json",
                    "type": "jeopardy",
                    "split": "train[:1%]",
                }
            ]
        },
        {"data_dir": "d", "data_name": "x.jsonl"},
        ("datasets.type: jeopardy", "datasets.split: train[:1%]"),
    ),
    (
        "axolotl",
        {"datasets": [{"path": "a"}, {"path": "b"}]},
        {"data_name": None},
        ('datasets: [{"path": "a"}, {"path": "b"}]',),
    ),
    (
        "axolotl",
        {"datasets": None, "pretraining_dataset": "org/text", "max_steps": 5},
        {"streaming": True, "data_name": "org/text", "loss_on": "all", "validation_fraction": None},
        (),
    ),
    (
        "axolotl",
        {"datasets": [{"path": "d", "roles_to_train": ["assistant"], "odd": 1}]},
        {"data_name": "d"},
        ('datasets.roles_to_train: ["assistant"]',),
    ),
    ("llama-factory", {"stage": "pt"}, {"task": "causal_lm", "loss_on": "all", "pack_sequences": True}, ()),
    ("llama-factory", {"stage": "rm"}, {"task": "reward"}, ()),
    (
        "llama-factory",
        {"stage": "dpo", "pref_loss": "simpo", "simpo_gamma": 0.9},
        {"preference_loss": "simpo", "simpo_gamma": 0.9},
        (),
    ),
    (
        "llama-factory",
        {"stage": "kto", "kto_rejected_weight": 2.0},
        {"preference_loss": "kto", "kto_undesirable_weight": 2},
        (),
    ),
    ("llama-factory", {"packing": True}, {"pack_sequences": True}, ()),
    ("llama-factory", {"disable_gradient_checkpointing": True}, {"checkpoint_activations": None}, ()),
    (
        "llama-factory",
        {},
        {"checkpoint_activations": True, "lora_rank": 8, "seq_length": 2048, "micro_batch_size": 8},
        (),
    ),
    (
        "llama-factory",
        {"finetuning_type": "freeze", "freeze_trainable_layers": 8},
        {"lora_rank": None},
        ("freeze_trainable_layers: 8",),
    ),
    ("llama-factory", {"quantization_bit": 4}, {"quantize_base": "nf4"}, ()),
    (
        "llama-factory",
        {"quantization_bit": 4, "quantization_method": "gptq"},
        {"quantize_base": None},
        ("quantization_method: gptq",),
    ),
    (
        "llama-factory",
        {"use_dora": True, "lora_target": "q_proj,v_proj", "additional_target": "lm_head"},
        {"lora_variant": "dora", "lora_target_modules": "q_proj,v_proj", "lora_modules_to_save": "lm_head"},
        (),
    ),
    (
        "llama-factory",
        {"val_size": 0.1, "eval_strategy": "steps", "eval_steps": 50},
        {"validation_fraction": 0.1, "eval_interval": 50},
        (),
    ),
    (
        "llama-factory",
        {"streaming": True, "max_steps": 5},
        {"streaming": True, "shuffle_buffer": 16384, "validation_fraction": None},
        (),
    ),
    (
        "llama-factory",
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        (),
    ),
    ("llama-factory", {"use_galore": True, "galore_rank": 8}, {}, ("use_galore: true",)),
    (
        "transformers",
        {"use_peft": True, "load_in_4bit": True},
        {"lora_rank": 16, "lora_alpha": None, "quantize_base": "nf4"},
        (),
    ),
    ("transformers", {"lora_r": 16, "lora_alpha": 8}, {"lora_rank": None}, ()),
    (
        "transformers",
        {"desirable_weight": 1.5, "beta": 0.1},
        {"task": "preference", "preference_loss": "kto", "kto_desirable_weight": 1.5},
        (),
    ),
    ("transformers", {"dtype": "bfloat16"}, {"mixed_precision": "bf16"}, ()),
    (
        "transformers",
        {"attn_implementation": "flex_attention"},
        {"use_flash_attn": None},
        ("attn_implementation: flex_attention",),
    ),
    (
        "transformers",
        {"lr_scheduler_type": "constant", "warmup_steps": 10},
        {"lr_decay_style": "constant", "lr_warmup_iters": None},
        (),
    ),
    ("transformers", {"warmup_steps": 0.1}, {"lr_warmup_fraction": 0.1}, ()),
    ("transformers", {"optim": "adafactor", "adam_beta2": 0.9}, {"optimizer": "adafactor", "adam_beta2": None}, ()),
    (
        "transformers",
        {"resume_from_checkpoint": True, "overwrite_output_dir": True},
        {"resume": True, "overwrite": None},
        (),
    ),
    (
        "transformers",
        {"resume_from_checkpoint": "run/checkpoint-5"},
        {"resume": None},
        ("resume_from_checkpoint: run/checkpoint-5",),
    ),
    (
        "transformers",
        {"use_cpu": True, "dataloader_pin_memory": False},
        {"device": "cpu", "dataloader_pin_memory": False},
        (),
    ),
    (
        "transformers",
        {"max_steps": 200, "save_steps": 0.25, "logging_steps": 0.05},
        {"save_interval": 50, "log_interval": 10},
        (),
    ),
    ("transformers", {"save_steps": 0.25}, {"epochs": 3, "save_interval": "0.75epochs"}, ()),
    ("transformers", {"logging_steps": 0.25}, {"log_interval": None}, ("logging_steps: 0.25",)),
    ("transformers", {"save_strategy": "epoch"}, {"epochs": 3, "save_interval": None}, ()),
    ("transformers", {"max_steps": 9, "save_strategy": "epoch"}, {"save_interval": "1epochs"}, ()),
    (
        "transformers",
        {"gradient_accumulation_steps": 2, "num_train_epochs": 2},
        {"epochs": None, "train_iters": "2epochs", "global_batch_size": 128},
        (),
    ),
    ("transformers", {"torch_compile": True, "torch_compile_backend": "aot_eager"}, {"torch_compile": "aot_eager"}, ()),
]
"""Keys that are added to a small configuration, flags of the result (None: not set), and what has no counterpart."""

SMALL: dict[str, dict[str, Value]] = {
    "axolotl": {"base_model": "a/b", "learning_rate": 1e-4, "datasets": [{"path": "d", "type": "alpaca"}]},
    "llama-factory": {"model_name_or_path": "a/b", "stage": "sft", "do_train": True, "dataset": "d"},
    "transformers": {"output_dir": "out"},
}


@pytest.fixture
def zero_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with a DeepSpeed file."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "ds_z3_config.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "sub_group_size": 1e9}}))
    return file


@pytest.mark.parametrize("case", FRAGMENTS, ids=lambda case: f"{case[0]}: {case[1]}"[:70])
def test_keys_become_flags(case: tuple[str, dict[str, Value], dict[str, Value], tuple[str, ...]], zero_3: Path) -> None:
    name, more, expected, missing = case
    result = FORMATS[name](SMALL[name] | more, Options(world_size=8))
    assert {flag: result.flags.get(flag) for flag in expected} == expected
    assert tuple(result.missing) == missing
    assert result.unknown == (["datasets.odd: 1"] if "odd" in str(more) else [])


ARGUMENT_LINES = {
    "--bf16 --use-megatron-fsdp --use-distributed-optimizer": {
        "mixed_precision": "bf16", "fsdp_memory_optimization": True, "use_distributed_optimizer": None,
    },
    "--num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --expert-model-parallel-size 4": {
        "num_experts": 8, "moe_top_k": 2, "moe_loss_coeff": 0.01, "expert_model_parallel_size": 4,
    },
    "--recompute-granularity full --recompute-method block --recompute-num-layers 3": {
        "checkpoint_activations": True, "recompute_granularity": "full", "recompute_num_layers": 3,
    },
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": {
        "checkpoint_activations": True, "recompute_num_layers": None,
    },
    "--lr-decay-style WSD --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-iters 2": {
        "lr_decay_style": "warmup_stable_decay", "lr_wsd_decay_style": "1-sqrt", "lr_wsd_decay_iters": 2,
    },
    "--hidden-dropout 0.0 --attention-dropout 0.0 --swiglu": {"dropout": 0.0, "model_type": "llama"},
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model some/folder": {
        "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_path": "some/folder",
    },
    "--vocab-file v.txt": {"tokenizer_type": "BertWordPieceLowerCase", "vocab_file": "v.txt"},
    "--eval-iters 0": {"eval_iters": None, "eval_interval": None},
    "--save a --load b": {"save": "a", "resume": None, "load": None},
    "--sequence-parallel --tensor-model-parallel-size 1": {
        "sequence_parallel": None, "tensor_model_parallel_size": None,
    },
    "--reset-attention-mask --num-workers 2 --adam-eps 1e-6": {
        "keep_documents_apart": True, "dataloader_num_workers": 2, "adam_epsilon": 1e-6,
    },
    "--optimizer sgd": {"optimizer": None},
    "--wandb-project p --wandb-exp-name n": {"report_to": "wandb", "project_name": "p", "run_name": "n"},
    "--attention-backend flash --grad-reduce-in-bf16": {"use_flash_attn": True, "grad_reduce_dtype": "bf16"},
}  # fmt: skip
"""Arguments of Megatron-LM, and flags of the result. None: not set."""


@pytest.mark.parametrize("line", ARGUMENT_LINES)
def test_arguments_become_flags(line: str, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(f"torchrun pretrain_gpt.py --train-iters 5 {line}\n")
    flags = converted(tmp_path / "train.sh", None, Options())[1].flags
    expected = ARGUMENT_LINES[line]
    assert {flag: flags.get(flag) for flag in expected} == expected


def test_tables_name_flags_and_optimizers_of_this_library() -> None:
    known = {f.name for kind in (*SECTIONS.values(), *switch_options().values()) for f in dataclasses.fields(kind)}
    named = [
        *megatron.OTHER.values(),
        *megatron.SIZES.values(),
        *training.SCHEDULE_KEYS.values(),
        *(name.replace("-", "_") for name in megatron.SAME),
    ]
    assert [name for name in named if name not in known] == []
    assert [name for name in settings.OPTIMIZERS.values() if name not in OPTIMIZERS] == []


@pytest.mark.parametrize(
    "module", [axolotl, llama_factory, llama_factory_v1, megatron, trl], ids=lambda module: module.__name__
)
def test_key_is_either_ignored_or_explained(module: object) -> None:
    known = module.KNOWN  # type: ignore[attr-defined]
    assert len(known.ignored) > 30
    assert sorted(known.ignored & known.reasons.keys()) == []


def test_log_lines_at_a_share_of_the_epochs_need_their_samples(zero_3: Path) -> None:
    values = SMALL["transformers"] | {"logging_steps": 0.25, "gradient_accumulation_steps": 2}
    result = FORMATS["transformers"](values, Options(world_size=8, samples=1650))
    assert (result.flags["train_iters"], result.flags["log_interval"]) == ("3epochs", 10)  # a quarter of 3 × 13
    assert result.missing == {}
