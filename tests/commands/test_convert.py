"""Configurations of other trainers become YAML files whose plans resolve."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from rapidformer_templates.commands.convert.cli import FORMATS, converted, refusal_of
from rapidformer_templates.commands.convert.conversion import Options, as_yaml
from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import ConfigError, RapidformerError
from tests.support.other_trainers import ARGUMENTS, AXOLOTL, CASES, MEGATRON, TRL
from tests.support.texts import WORDS, write_jsonl


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


def test_format_that_is_named_is_used(desk: Path) -> None:
    (desk / "arguments.txt").write_text("python pretrain_bert.py --train-iters 5 --micro-batch-size 2\n")
    kind, result = converted(desk / "arguments.txt", "megatron", Options())
    assert (kind, result.flags["model_type"], result.flags["sentence_pairs"]) == ("megatron", "bert", True)
    (desk / "few.yaml").write_text("model_name_or_path: a/b\ndo_train: true\n")
    assert converted(desk / "few.yaml", "llama-factory", Options())[0] == "llama-factory"
    with pytest.raises(ConfigError, match="name its format with --from"):
        converted(desk / "few.yaml", None, Options())


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
