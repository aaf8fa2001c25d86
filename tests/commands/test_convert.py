"""Configurations of other trainers become YAML files whose plans resolve."""

import dataclasses
import json
import shutil
from contextlib import suppress
from itertools import cycle
from pathlib import Path

import pytest
import yaml

from rapidformer_templates.commands.convert import reader
from rapidformer_templates.commands.convert.cli import as_yaml, commands, converted, refusal_of
from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.planning.flags import SECTIONS
from rapidformer_templates.planning.registry import switch_options
from tests.support.messages import Says
from tests.support.selection import by_default
from tests.support.texts import WORDS, write_jsonl

CONFIGURATIONS = Path(__file__).parents[1] / "support" / "configurations"
"""Configurations as these projects ship them. Each has the file that it becomes next to it: NAME.ours.yaml."""

NAMES = sorted(file.name for file in CONFIGURATIONS.iterdir() if ".ours." not in file.name)
OPTIONS = {
    "llama-factory-sft.yaml": reader.Options(world_size=2),
    "llama-factory-v1.yaml": reader.Options(world_size=4, task="causal_lm"),
    "transformers-arguments.json": reader.Options(task="sequence_classification"),
}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with the files that the configurations name."""
    monkeypatch.chdir(tmp_path)
    for stage in (2, 3):
        zero = {"stage": stage, "overlap_comm": False, "reduce_bucket_size": "auto"}
        (tmp_path / f"ds_z{stage}_config.json").write_text(
            json.dumps({"zero_optimization": zero, "bf16": {"enabled": "auto"}})
        )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "v1_sft_demo.yaml").write_text("identity: {path: data/identity.json, source: local}\n")
    pairs = {"file_name": "dpo_en_demo.json", "ranking": True, "columns": {"chosen": "chosen", "rejected": "worse"}}
    described = {"alpaca_en_demo": {"file_name": "alpaca_en_demo.json"}, "dpo_en_demo": pairs}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(described))
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_configuration_becomes_ours_and_resolves(name: str, desk: Path) -> None:
    shutil.copy(CONFIGURATIONS / name, desk)
    kind, result = converted(desk / name, None, OPTIONS.get(name, reader.Options()))
    assert name.startswith(kind)
    ours = as_yaml(result, f"{result.workers} workers")
    assert ours == (CONFIGURATIONS / f"{Path(name).stem}.ours.yaml").read_text()
    (desk / "ours.yaml").write_text(ours)
    refusal, _ = refusal_of(desk / "ours.yaml", result.workers, "a100-80gb")
    assert refusal is None, refusal.render()


AXOLOTL = {"base_model": "a/b", "learning_rate": 1e-4, "datasets": [{"path": "d", "type": "alpaca"}]}
FACTORY = {"model_name_or_path": "a/b", "stage": "sft", "do_train": True, "dataset": "d"}
TRL = {"model_name_or_path": "a/b", "dataset_name": "d"}

SMALL = {"axolotl": AXOLOTL, "llama-factory": FACTORY, "trl": TRL, "transformers": {"output_dir": "out"}}
KEYS = yaml.safe_load((CONFIGURATIONS.parent / "converted_keys.yaml").read_text())


@pytest.mark.parametrize("case", KEYS, ids=lambda case: f"{case[0]}: {case[1]}"[:80])
def test_keys_become_flags(
    case: tuple[str, dict[str, reader.Value], dict[str, object], *tuple[str, ...]], desk: Path
) -> None:
    name, more, expected, *left = case
    result = reader.convert_trainer(name.replace("trl", "transformers"), SMALL[name] | more, reader.Options())
    assert {flag: result.flags.get(flag) for flag in expected} == expected
    is_named = any(setting.startswith(left[0]) for setting in result.left) if left else not result.left
    assert is_named, result.left


def test_defaults_that_depend_on_what_a_file_does_not_say_are_notes(desk: Path, says: Says) -> None:
    says.text("\n".join(reader.convert_trainer("axolotl", AXOLOTL, reader.Options()).notes))
    says.text("\n".join(reader.convert_trainer("axolotl", AXOLOTL | {"warmup_steps": 10}, reader.Options()).notes))
    says.text("\n".join(reader.convert_trainer("transformers", TRL | {"use_peft": True}, reader.Options()).notes))


LLAMA = {
    "position-embedding-type": "rope", "swiglu": True, "normalization": "RMSNorm", "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True, "ffn-hidden-size": 11008, "attention-dropout": 0, "hidden-dropout": 0,
}  # fmt: skip
STRATEGY = "data_parallel_sharding_strategy"
SIZES = {"num-layers": 2, "hidden-size": 4096, "num-attention-heads": 32, "train-iters": 5}


@pytest.mark.parametrize("missing", [*list(LLAMA)[:6], None])
def test_only_the_arguments_of_a_llama_make_one(missing: str | None) -> None:
    """Without one of them, Megatron-LM builds a model that transformers does not have."""
    arguments = {name: value for name, value in LLAMA.items() if name != missing}
    result = reader.convert_megatron("pretrain_gpt.py", SIZES | arguments, None, reader.Options())
    assert result.flags.get("model_type") == (None if missing else "llama")
    assert any(hint == reader.OWN_MODEL and missing in left for left, hint in result.left.items()) if missing else True


@pytest.mark.parametrize("only", [{"position-embedding-type": "rope"}, {"swiglu": True}, {"num-query-groups": 8}])
def test_one_argument_does_not_make_a_llama(only: dict[str, reader.Value]) -> None:
    result = reader.convert_megatron("pretrain_gpt.py", SIZES | only, None, reader.Options())
    assert "model_type" not in result.flags
    assert {f"{name}: {reader.shown(value)}" for name, value in only.items()} <= result.left.keys()
    assert reader.convert_megatron("pretrain_gpt.py", SIZES, None, reader.Options()).flags["model_type"] == "gpt2"


@pytest.mark.parametrize(
    ("strategy", "tensor", "expected"),
    [
        ("optim_grads_params", 2, {"use_distributed_optimizer": True, STRATEGY: "optim_grads_params"}),
        ("optim_grads_params", 1, {"fsdp_memory_optimization": True}),
        ("optim_grads", 1, {"use_distributed_optimizer": True, STRATEGY: "optim_grads"}),
        ("optim", 1, {"use_distributed_optimizer": True, STRATEGY: "optim"}),
    ],
)
def test_megatrons_sharding_works_inside_a_layout(strategy: str, tensor: int, expected: dict[str, object]) -> None:
    more = {"use_megatron_fsdp": True, STRATEGY: strategy, "tensor_model_parallel_size": tensor}
    flags = reader.convert_megatron("pretrain_gpt.py", SIZES | more, 4, reader.Options()).flags
    sharding = ("fsdp_memory_optimization", "use_distributed_optimizer", STRATEGY)
    assert {name: value for name in sharding if (value := flags.get(name))} == expected


def test_exponential_decay_of_megatron_is_not_another_one() -> None:
    more = {"lr-decay-style": "WSD", "lr-wsd-decay-samples": 200, "global-batch-size": 2, "micro-batch-size": 1}
    result = reader.convert_megatron("pretrain_gpt.py", SIZES | more, None, reader.Options())
    assert (result.flags["lr_wsd_decay_iters"], "lr_wsd_decay_style" in result.flags) == (100, False)
    assert "lr-wsd-decay-style: exponential" in result.left
    result = reader.convert_megatron(
        "pretrain_gpt.py", SIZES | more | {"lr-wsd-decay-style": "minus_sqrt"}, None, reader.Options()
    )
    assert result.flags["lr_wsd_decay_style"] == "1-sqrt"


def test_what_is_not_converted_is_in_the_file_and_on_the_screen(
    desk: Path, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    values = {"output_dir": "out", "push_to_hub": True, "my_own_key": 3, "debug": "x"}
    (desk / "args.json").write_text(json.dumps(values))
    assert main(["convert", "args.json", "--output", "ours.yaml"]) == 0
    shown = capsys.readouterr()
    says.text(shown.out + shown.err)
    comments = {line[2:] for line in (desk / "ours.yaml").read_text().splitlines() if line.startswith("# ")}
    assert set(shown.out.splitlines()[1:]) <= comments


def test_workers_decide_the_global_batch(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(CONFIGURATIONS / "axolotl-qlora.yml", desk)
    assert main(["convert", "axolotl-qlora.yml", "--world-size", "4"]) == 0
    shown = capsys.readouterr()
    ours = yaml.safe_load(shown.out)
    assert (ours["global-batch-size"], ours["train-iters"], ours["eval-interval"]) == (32, "1epochs", "0.25epochs")
    assert "The plan for 4 workers resolves." in shown.err


def test_samples_turn_shares_into_numbers(desk: Path) -> None:
    values = {"output_dir": "out", "logging_steps": 0.25, "gradient_accumulation_steps": 2}
    result = reader.convert_trainer("transformers", values, reader.Options(world_size=8, samples=1650))
    assert (result.flags["train_iters"], result.flags["log_interval"]) == ("3epochs", 10)  # a quarter of 3 × 13
    result = reader.convert_trainer("axolotl", AXOLOTL | {"val_set_size": 100}, reader.Options(samples=1000))
    assert (result.flags["validation_fraction"], result.left) == (0.1, {})


def test_packages_that_are_missing_are_no_refusal(desk: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    monkeypatch.setattr("rapidformer_templates.planning.environment.installed_packages", dict)
    shutil.copy(CONFIGURATIONS / "axolotl-qlora.yml", desk)
    says.command("convert axolotl-qlora.yml", status=0)


def test_refused_plan_is_written_and_explained(desk: Path, says: Says) -> None:
    (desk / "qlora.yml").write_text(yaml.safe_dump(AXOLOTL | {"load_in_4bit": True}))  # without adapters
    says.command("convert qlora.yml --output ours.yaml")
    assert yaml.safe_load((desk / "ours.yaml").read_text())["quantize-base"] == "nf4"


def test_output_is_not_overwritten_unless_asked(desk: Path, says: Says) -> None:
    shutil.copy(CONFIGURATIONS / "transformers-dpo.yaml", desk)
    (desk / "ours.yaml").write_text("lr: 1\n")
    says.command("convert transformers-dpo.yaml --output ours.yaml")
    assert (desk / "ours.yaml").read_text() == "lr: 1\n"
    assert main(["convert", "transformers-dpo.yaml", "--output", "ours.yaml", "--overwrite"]) == 0
    assert yaml.safe_load((desk / "ours.yaml").read_text())["lr"] == 5e-7
    assert sorted(path.name for path in desk.glob("*.tmp")) == []


BASE = "base_model: a/b\nlearning_rate: 1e-4\ndatasets: [{path: d, type: alpaca}]\n"
SFT = "model_name_or_path: a/b\nfinetuning_type: lora\nstage: sft\ndo_train: true\nlearning_rate: 1e-4\n"

MISTAKES = {
    "none.yaml": "",
    "broken.yaml": "a: [1\n",
    "broken.json": "{",
    "list.yaml": "- 1\n",
    "other.yaml": "colour: red\n",
    "accelerate.yaml": "compute_environment: LOCAL_MACHINE\n",
    "few.yaml": "model_name_or_path: a/b\ndo_train: true\n",
    "version1.yaml": "model: a\ntrain_dataset: b\npref_loss: hinge\n",
    "words.yml": BASE + "micro_batch_size: many\n",
    "half.yml": BASE + "micro_batch_size: 1.5\n",
    "maybe.yml": BASE + "sample_packing: maybe\n",
    "grpo.yml": BASE + "rl: grpo\n",
    "vision.yml": BASE + "processor_type: AutoProcessor\n",
    "no_rate.yml": "base_model: a/b\n",
    "ppo.yaml": SFT.replace("sft", "ppo"),
    "oft.yaml": SFT.replace("lora", "oft"),
    "hinge.yaml": SFT.replace("sft", "dpo") + "pref_loss: hinge\n",
    "predict.yaml": SFT.replace("do_train", "do_predict"),
    "tuned.yaml": "output_dir: a\nnum_generations: 4\n",
    "apo.yaml": "output_dir: a\nloss_type: apo_zero\n",
    "two.yaml": "output_dir: a\nloss_type: [sigmoid, ipo]\n",
    "nothing.sh": "echo train.py\n",
    "mamba.sh": "torchrun pretrain_hybrid.py --train-iters 5\n",
    "idle.sh": "torchrun pretrain_gpt.py --num-layers 2\n",
    "unset.sh": "torchrun pretrain_gpt.py --train-iters $5\n",
    "quote.sh": "torchrun pretrain_gpt.py --train-iters 5 --save 'a\n",
}


@pytest.mark.parametrize("file", MISTAKES)
def test_mistakes_are_explained(file: str, desk: Path, says: Says) -> None:
    if MISTAKES[file]:
        (desk / file).write_text(MISTAKES[file])
    says.command(f"convert {file}")


STRANGE = (None, True, False, [], [1], {"a": 1}, "x", -1, 0.5, "auto", [{"a": [1]}], "$1", 0)
EVERY = {"axolotl": AXOLOTL, "llama-factory": FACTORY, "transformers": TRL}
EVERY |= {"llama-factory, version 1": {"model": "a", "train_dataset": "b"}, "megatron": {}}


@pytest.mark.parametrize("name", by_default(["llama-factory"], EVERY))
def test_strange_values_raise_errors_for_users_only(name: str, desk: Path) -> None:
    """Each key of the rules has three strange values. It becomes flags, is named, or is refused with a message."""
    kinds = [*SECTIONS.values(), *switch_options().values()]
    flags = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    keys = [key for section in reader.RULES[name] for key in reader.rules_of(section)]
    count = 0
    for key, value in zip(keys * 3, cycle(STRANGE)):
        with suppress(RapidformerError):
            if name == "megatron":
                result = reader.convert_megatron("pretrain_gpt.py", SIZES | {key: value}, None, reader.Options())
            else:
                result = reader.convert_trainer(name.partition(",")[0], EVERY[name] | {key: value}, reader.Options())
            as_yaml(result, "converted")
            assert result.flags.keys() <= flags, (key, value)
            count += 1
    assert count > len(keys)


def test_format_that_is_named_is_used(desk: Path) -> None:
    (desk / "arguments.txt").write_text("python pretrain_bert.py --train-iters 5 --micro-batch-size 2\n")
    kind, result = converted(desk / "arguments.txt", "megatron", reader.Options())
    assert (kind, result.flags["model_type"], result.flags["sentence_pairs"]) == ("megatron", "megatron-bert", True)
    (desk / "few.yaml").write_text(MISTAKES["few.yaml"])
    assert converted(desk / "few.yaml", "llama-factory", reader.Options())[0] == "llama-factory"


@pytest.mark.parametrize("more", [["--task", "pretraining"], ["--task", "masked_lm"]])
def test_task_decides_which_flags_are_set(more: list[str], desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (desk / "args.yaml").write_text("output_dir: out\nlearning_rate: 1e-4\n")
    assert main(["convert", "args.yaml", *more]) == 0, capsys.readouterr().err
    assert ("validation-fraction" in capsys.readouterr().out) == ("masked_lm" in more)


@pytest.mark.slow
def test_arguments_of_transformers_that_nobody_has_set_are_not_named(desk: Path) -> None:
    """A file with the defaults of the installed version converts to their meaning here."""
    from transformers import TrainingArguments

    (desk / "args.json").write_text(TrainingArguments(output_dir="out").to_json_string())
    result = converted(desk / "args.json", None, reader.Options())[1]
    assert result.left == {}
    expected = {
        "micro_batch_size": 8, "epochs": 3, "lr": 5e-05, "lr_decay_style": "linear", "weight_decay": 0.0, "seed": 42,
        "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "optimizer": "adamw_torch_fused", "save": "out",
        "save_interval": 500, "log_interval": 500, "validation_fraction": 0.0,
    }  # fmt: skip
    assert result.flags == expected


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
        "base_model": "./model", "datasets": [{"path": "./alpaca.jsonl", "type": "alpaca"}], "num_epochs": 1,
        "sequence_len": 64, "optimizer": "adamw_torch", "val_set_size": 0.2, "output_dir": "out", "lora_r": 4,
        "attn_implementation": "sdpa", "adapter": "lora", "lora_target_linear": True, "lora_target_modules": None,
        "sample_packing": False, "load_in_4bit": False,
    }  # fmt: skip
    theirs = yaml.safe_load((CONFIGURATIONS / "axolotl-qlora.yml").read_text())
    (desk / "lora.yml").write_text(yaml.safe_dump(theirs | wanted))
    assert main(["convert", "lora.yml", "--output", "ours.yaml"]) == 0
    Finetuner(["--config", "ours.yaml", "--device", "cpu"]).fit()
    summary = json.loads((desk / "out" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert (summary["samples"], summary["receipts"]["micro_steps"]) == (16, 4)
    assert (summary["metrics"]["eval_loss"] > 0, summary["best"]) == (True, None)
    adapters = json.loads((desk / "out" / "export" / "adapter_config.json").read_text())
    assert (adapters["r"], adapters["lora_alpha"], adapters["lora_dropout"]) == (4, 16, 0.05)


IF = 'S=b\nif [ $S == "a" ]; then\nA=1\nelif [[ "$S" == "b" ]]; then\nA=2\nelse\nA=3\nfi\npython x.py --a $A'
CASE = 'S=b\ncase "${S}" in\n  "a")\n  A=1\n  ;;\n  b|c)\n  A=2\n  ;;\n  *)\n  A=3\n  ;;\nesac\npython x.py --a $A'
SHELLS = {
    "A=1\npython x.py --a $A": ["--a", "1"],
    "A=(--a 1)\nA+=(--b 2)\npython x.py ${A[@]}": ["--a", "1", "--b", "2"],
    'A=("--a 1" "--b")\npython x.py ${A[@]}': ["--a", "1", "--b"],
    "A='--a 1'\npython x.py $A --b": ["--a", "1", "--b"],
    "python x.py --a ${A:-3} --b ${B:-$C}": ["--a", "3", "--b", "$C"],
    "N=4\nM=$((N*2))\npython x.py --a $M --b $(($M+1))": ["--a", "8", "--b", "9"],
    "python x.py \\\n  --a 1 \\\n  --b 2 # not --c 3": ["--a", "1", "--b", "2"],
    'A="x # y"\npython x.py --a "$A"': ["--a", "x # y"],
    IF: ["--a", "2"],
    'A=1\nif [ -n "${KEY}" ]; then A=2; fi\npython x.py --a $A': ["--a", "1"],
    "if [ -z ${KEY} ]; then\n  A=2\nfi\npython x.py --a $A": ["--a", "2"],
    CASE: ["--a", "2"],
    "cat <<EOF\nit's a text\nEOF\npython x.py --a 1": ["--a", "1"],
}
"""Scripts, each with the arguments of its training script."""


@pytest.mark.parametrize("script", SHELLS)
def test_shell_script_is_read(script: str) -> None:
    assert [words[2:] for words in commands(script)] == [SHELLS[script]]
