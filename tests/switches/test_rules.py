"""Every rule: a request that breaks it, and the nearest requests that do not."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

from rapidformer_templates.commands.explain import example_request
from rapidformer_templates.commands.plan import PlanFlags
from rapidformer_templates.errors import ModelError, Refused
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.registry import REGISTRY, switch_options
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.planning.switch import Rule
from tests.support.requests import CPU, GPUS, codes, config_of, on
from tests.support.selection import by_default

DOCUMENTED = {  # SPEC §3, with the sources that it names
    "RF001": "[R]",
    "RF002": "[R]",
    "RF003": "[R]",
    "RF004": "[R, M]",
    "RF005": "[R]",
    "RF006": "[R]",
    "RF007": "[R]",
    "RF008": "[R]",
    "RF009": "[M]",
    "RF010": "[M]",
    "RF011": "[D]",
    "RF012": "[D]",
    "RF013": "[S]",
    "RF014": "[M]",
    "RF015": "[R]",
}


@pytest.mark.parametrize("code", DOCUMENTED)
def test_documented_rules_have_their_sources(code: str) -> None:
    assert {rule.code: rule.source for rule in REGISTRY.all_rules}[code] == DOCUMENTED[code]


@pytest.mark.parametrize("rule", REGISTRY.all_rules, ids=lambda rule: rule.code)
def test_example_breaks_its_rule_and_only_as_long_as_the_rule_is_there(rule: Rule) -> None:
    request = example_request(rule, REGISTRY)

    def told(without: bool) -> set[str]:
        registry = REGISTRY.without(rule.code) if without else REGISTRY
        try:
            plan = resolve(request.config, request.environment, registry, training=request.training)
        except Refused as refused:
            return {found.rule for found in refused.diagnostics}
        return set(plan.notes)

    if rule.refuses:
        assert rule.code in told(without=False)
        assert rule.code not in told(without=True)
    else:
        assert rule.check(request)  # test_flash_attention_notes_padding checks the note itself


REFUSED = [  # (code, flags, machine): in addition to the examples, the other ways to break a rule
    ("RF001", "--mixed-precision", on(CPU, template=None)),
    ("RF002", "--zero-1-memory-optimization", on(GPUS, template="Pretrainer")),
    ("RF002", "--zero-2-memory-optimization", on(GPUS, template="Finetuner")),
    ("RF003", "--pipeline-model-parallel-size 2", on(GPUS, template="Finetuner")),
    ("RF004", "--pipeline-model-parallel-size 2 --oss-memory-optimization", GPUS),
    ("RF004", "--tensor-model-parallel-size 2 --oss-sdp-memory-optimization", GPUS),
    ("RF004", "--tensor-model-parallel-size 2 --zero-3-memory-optimization", GPUS),
    ("RF005", "--cpu-offload --oss-memory-optimization", GPUS),
    ("RF005", "--cpu-offload --oss-sdp-memory-optimization", GPUS),
    ("RF005", "--cpu-offload --use-distributed-optimizer", GPUS),
    ("RF006", "--epochs 1 --micro-batch-size 1 --global-batch-size 16", GPUS),
    ("RF007", "--data-iterator dynamic-shape", on(CPU, template="Trainer")),
    ("RF008", "--zero-1-memory-optimization --zero-2-memory-optimization", GPUS),
    ("RF008", "--use-distributed-optimizer --zero-1-memory-optimization", GPUS),
    ("RF009", "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4", GPUS),
    ("RF010", "--pipeline-model-parallel-size 2 --num-layers 2", GPUS),
    ("RF010", "--tensor-model-parallel-size 8 --num-attention-heads 12", GPUS),
    ("RF011", "--nvme-path /local_nvme", GPUS),
    ("RF012", "--cpu-offload --optimizer apex_lamb", GPUS),
    ("RF012", "--nvme-path /d --zero-3-memory-optimization --optimizer lamb", GPUS),
    ("RF012", "--cpu-offload --optimizer adamw_apex_fused", GPUS),
    ("RF017", "--onnx-runtime-training --zero-3-memory-optimization", GPUS),
    ("RF085", "--onnx-runtime-training --use-flash-attn", GPUS),
    ("RF085", "--onnx-runtime-training --num-experts 4", GPUS),
    ("RF085", "--onnx-runtime-training --pipeline-model-parallel-size 2", GPUS),
    ("RF086", "--onnx-runtime-training --mixed-precision fp16", on(CPU, packages=GPUS.packages)),
    ("RF087", "--onnx-runtime-training", on(CPU, packages={"onnxruntime": "1+cpu", "onnx": "1"})),
    ("RF087", "--onnx-runtime-training", on(GPUS, packages=dict(GPUS.packages) | {"onnxruntime": "1+cpu"})),
    ("RF018", "--tf32", on(GPUS, compute_capability=(7, 5))),
    ("RF022", "--optimizer adamw_apex_fused", on(CPU, packages={"apex": "1"})),
    ("RF023", "--optimizer adamw_bnb_8bit", on(GPUS, packages={})),
    ("RF023", "--oss-memory-optimization", CPU),
    ("RF025", "--optimizer lamb --fsdp-memory-optimization", CPU),
    ("RF025", "--optimizer adamw_bnb_8bit --fsdp-memory-optimization", GPUS),
    ("RF028", "--deepspeed-config ds.json", on(GPUS, template="Finetuner")),
    ("RF034", "--resume", CPU),
    ("RF022", "--optimizer adamw_apex_fused", CPU),
    ("RF022", "--cpu-offload --optimizer adamw_bnb_8bit", on(GPUS, packages={"bitsandbytes": "0.49.2"})),
    ("RF025", "--optimizer muon --zero-1-memory-optimization", GPUS),
    ("RF025", "--optimizer adamw_torch_4bit --fsdp-memory-optimization", GPUS),
    ("RF025", "--optimizer lamb --tensor-model-parallel-size 2", GPUS),
    ("RF025", "--optimizer apex_lamb --use-distributed-optimizer", GPUS),
    ("RF025", "--optimizer apex_lamb --pipeline-model-parallel-size 2 --zero-1-memory-optimization", GPUS),
    ("RF062", "--fused-linear-cross-entropy --task question_answering", GPUS),
    ("RF034", "--weights-only", CPU),
    ("RF034", "--tokens-per-batch 4096", CPU),
    ("RF034", "--max-shapes 0", CPU),
    ("RF034", "--shape-multiple 1", CPU),
    ("RF039", "--data-iterator dynamic-shape --task question_answering", on(CPU, template="Pretrainer")),
    ("RF039", "--data-iterator dynamic-shape --keep-documents-apart", on(CPU, template="Pretrainer")),
    ("RF039", "--data-iterator dynamic-shape --pack-sequences", on(CPU, template="Pretrainer")),
    ("RF039", "--data-iterator dynamic-shape --group-by-length", on(CPU, template="Pretrainer")),
    ("RF039", "--data-iterator dynamic-shape --no-group-by-length", on(CPU, template="Pretrainer")),
    ("RF070", "--expert-parallel", CPU),
    ("RF070", "--model-type gpt2 --expert-model-parallel-size 2", GPUS),
    ("RF034", "--fsdp-shard-size 2", CPU),
    ("RF225", "--fsdp-memory-optimization --fsdp-shard-size 1", GPUS),
    ("RF225", "--fsdp-memory-optimization --fsdp-shard-size 16", GPUS),
    ("RF034", "--moe-capacity-factor 1.25", CPU),
    ("RF070", "--moe-z-loss-coeff 0.001 --model-type llama", CPU),
    ("RF071", "--model-type mixtral --num-experts 4 --moe-layer-interval 2", CPU),
    ("RF085", "--model-type mixtral --onnx-runtime-training", CPU),
    ("RF073", "--num-experts 4 --moe-capacity-factor -1", CPU),
    ("RF074", "--num-experts 4 --expert-parallel --zero-3-memory-optimization", CPU),
    ("RF074", "--num-experts 4 --expert-parallel --oss-memory-optimization", CPU),
    ("RF074", "--num-experts 4 --expert-model-parallel-size 2 --zero-3-memory-optimization", CPU),
    ("RF025", "--num-experts 4 --expert-parallel --optimizer adafactor", CPU),
    ("RF025", "--num-experts 4 --expert-parallel --use-distributed-optimizer --optimizer lamb", CPU),
    ("RF025", "--num-experts 4 --expert-parallel --zero-1-memory-optimization --optimizer muon", CPU),
    ("RF020", "--num-experts 6 --expert-model-parallel-size 4", GPUS),
    ("RF020", "--model-type mixtral --num-experts 6 --expert-model-parallel-size 4", GPUS),
    ("RF277", "--num-experts 6 --expert-model-parallel-size 3", GPUS),
    ("RF277", "--num-experts 8 --expert-parallel --expert-model-parallel-size 2", GPUS),
    ("RF020", "--num-experts 6 --expert-parallel --tensor-model-parallel-size 2", GPUS),
    ("RF277", "--num-experts 8 --expert-model-parallel-size 8 --pipeline-model-parallel-size 2", GPUS),
    ("RF099", "--lr 1e-4 --lr-decay-style constant --min-lr 1e-5", CPU),
    ("RF099", "--lr-decay-style constant --lr-decay-iters 5", CPU),
    ("RF099", "--train-iters 10 --lr-warmup-iters 11", CPU),
    ("RF099", "--lr-decay-iters 10 --lr-warmup-iters 11 --train-iters 20", CPU),
    ("RF098", "--metric-for-best wer --no-keep-best", CPU),
]

SCHEDULES = [  # ways to break RF099 whose way out was empty or incomplete
    "--lr-warmup-iters 50 --lr-decay-iters 5 --train-iters 10",
    "--lr-warmup-samples 100 --lr-decay-iters 5",
    "--lr 1e-4 --min-lr 1e-4 --lr-decay-style polynomial",
    "--epochs 3 --micro-batch-size 1 --global-batch-size 16 --lr-warmup-iters 9 --lr-decay-iters 1",
]

ACCEPTED = [  # the nearest requests on the other side of each rule
    ("--mixed-precision fp16", on(CPU, template="Finetuner")),
    ("--fsdp-memory-optimization --fsdp-shard-size 2", CPU),
    ("--fsdp-memory-optimization --fsdp-shard-size 4 --mixed-precision bf16", on(GPUS, template="Pretrainer")),
    ("--zero-3-memory-optimization", GPUS),
    ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", GPUS),
    ("--tensor-model-parallel-size 2 --zero-1-memory-optimization", GPUS),
    ("--pipeline-model-parallel-size 2 --zero-2-memory-optimization", GPUS),
    ("--pipeline-model-parallel-size 2 --use-distributed-optimizer", GPUS),
    ("--cpu-offload", on(CPU, template="Finetuner")),
    ("--cpu-offload --zero-2-memory-optimization", GPUS),
    ("--cpu-offload --zero-3-memory-optimization --optimizer adamw_torch", GPUS),
    ("--train-iters 5 --micro-batch-size 4 --global-batch-size 16", CPU),
    ("--epochs 1 --micro-batch-size 8 --global-batch-size 16", CPU),
    ("--data-iterator dynamic-shape", on(CPU, template="Pretrainer")),
    (
        "--data-iterator dynamic-shape --tokens-per-batch 4096 --max-shapes 0 --shape-multiple 1 --task masked_lm",
        on(CPU, template="Pretrainer"),
    ),
    ("--tensor-model-parallel-size 8", GPUS),
    ("--pipeline-model-parallel-size 4 --num-layers 8", GPUS),
    ("--tensor-model-parallel-size 4 --num-attention-heads 12 --hidden-size 768", GPUS),
    ("--nvme-path /local_nvme --zero-3-memory-optimization", GPUS),
    ("--sequence-parallel --tensor-model-parallel-size 2", GPUS),
    ("--use-flash-attn", GPUS),
    ("--onnx-runtime-training --oss-memory-optimization", GPUS),
    ("--onnx-runtime-training --mixed-precision", GPUS),
    (
        "--onnx-runtime-training --checkpoint-activations",
        on(CPU, packages=dict(GPUS.packages) | {"onnxruntime": "1+cpu"}),
    ),
    ("--tf32", on(GPUS, compute_capability=(8, 0))),
    ("--tf32 --device cuda", on(GPUS, compute_capability=None)),
    ("--mixed-precision fp16", on(GPUS, compute_capability=(7, 0))),
    ("--num-experts 4", GPUS),
    ("--num-experts 16 --moe-top-k 2", GPUS),
    ("--num-experts 3", GPUS),
    ("--num-experts 16 --expert-parallel --moe-capacity-factor 1.25 --moe-layer-interval 2", GPUS),
    ("--num-experts 16 --expert-parallel --use-distributed-optimizer", GPUS),
    ("--num-experts 4 --expert-parallel --tensor-model-parallel-size 2 --sequence-parallel", GPUS),
    ("--num-experts 4 --expert-model-parallel-size 2 --pipeline-model-parallel-size 2", GPUS),
    ("--num-experts 16 --expert-model-parallel-size 2 --zero-2-memory-optimization --cpu-offload", GPUS),
    ("--num-experts 16 --expert-parallel --optimizer lamb", GPUS),
    ("--model-type mixtral --expert-parallel", GPUS),
    ("--model-type qwen2_moe --num-experts 4 --expert-model-parallel-size 2 --zero-1-memory-optimization", GPUS),
    ("--num-experts 4 --zero-3-memory-optimization", GPUS),
    ("--model-type mixtral --moe-loss-coeff 0.01", CPU),
    ("--model-type mixtral --num-experts 4 --moe-top-k 1 --moe-ffn-hidden-size 64", CPU),
    ("--deepspeed-config ds.json --pipeline-model-parallel-size 2 --zero-1-memory-optimization", GPUS),
    ("--optimizer adamw_bnb_8bit", GPUS),
    ("--optimizer adamw_bnb_8bit", on(CPU, packages={"bitsandbytes": "0.50.2"})),
    ("--cpu-offload --optimizer adamw_torch_8bit", GPUS),
    ("--optimizer muon --oss-memory-optimization", GPUS),
    ("--optimizer adamw_anyprecision --zero-3-memory-optimization --cpu-offload", GPUS),
    ("--fused-linear-cross-entropy --task masked_lm --zero-3-memory-optimization", GPUS),
    ("--optimizer adafactor --oss-memory-optimization", GPUS),
    ("--optimizer lamb", CPU),
    ("--optimizer lamb --use-distributed-optimizer", GPUS),
    ("--optimizer muon --pipeline-model-parallel-size 2 --zero-2-memory-optimization", GPUS),
    ("--optimizer adamw_torch_4bit --use-distributed-optimizer", GPUS),
    ("--lr 1e-4 --min-lr 1e-4 --lr-decay-iters 10 --lr-warmup-iters 10 --train-iters 20", CPU),
    ("--lr-decay-style constant --lr-decay-iters 5 --lr-warmup-fraction 0.1", CPU),
    ("--metric-for-best wer", CPU),
    ("--metric-for-best utility --metric-for-best-mode min", CPU),
    ("--seq-length 512 --max-position-embeddings 512", CPU),
    ("", CPU),
]


@pytest.mark.parametrize(("code", "flags", "place"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_refused(code: str, flags: str, place: object) -> None:
    assert code in codes(flags, place)  # type: ignore[arg-type]
    assert code not in codes(flags, place, REGISTRY.without(code))  # type: ignore[arg-type]


@pytest.mark.parametrize(("flags", "place"), ACCEPTED, ids=lambda x: x if isinstance(x, str) else "")
def test_accepted(flags: str, place: object) -> None:
    assert codes(flags, place) == []  # type: ignore[arg-type]


def follow(change: str, words: list[str], place: Environment) -> tuple[list[str], Environment]:
    """Return a command after a printed suggestion, followed as a reader would."""
    template = re.search(r"class MyTask\((\w+)\)", change)
    if template:
        return follow(change.replace(template[0], ""), words, on(place, template=template[1]))
    if change.startswith("rapidformer "):
        return [word for word in shlex.split(change)[1:] if word != "plan"], place
    more, _, off = change.partition("without ")
    added = shlex.split(more)
    names = {word for word in (*added, *off.split()) if word.startswith("--")}
    switches = [switch for switch in REGISTRY.switches if any(spelling(name) in added for name in switch.on)]
    families = {switch.family for switch in switches if switch.family}
    names |= {spelling(name) for s in REGISTRY.switches if s.family in families and s not in switches for name in s.on}
    kept, is_named = list[str](), False
    for word in words:
        is_named = word in names if word.startswith("--") else is_named
        kept += [] if is_named else [word]
    if "--template" in added:
        place = on(place, template=added[added.index("--template") + 1])
    if "--device" in added:
        place = on(place, device="cpu", compute_capability=None)
    return kept + added, place


EXAMPLES = [
    (rule.example, example_request(rule, REGISTRY).environment, False) for rule in REGISTRY.all_rules if rule.refuses
]
WORKS = {
    "the rules' examples": EXAMPLES,
    "schedules": [(flags, CPU, training) for flags in SCHEDULES for training in (False, True)],
    "examples that train": [(flags, place, True) for flags, place, _ in EXAMPLES],
    "other ways to break a rule": [(flags, place, True) for _, flags, place in REFUSED],
}


@pytest.mark.parametrize("name", by_default(["the rules' examples", "schedules"], WORKS))
def test_every_printed_way_out_works(name: str) -> None:
    followed = 0
    for flags, place, training in WORKS[name]:
        given = parse(shlex.split(flags), switch_options(), user=PlanFlags)
        try:
            resolve(dataclasses.replace(given, user=None), place, training=training)
        except Refused as refused:
            for suggestion in {s for found in refused.diagnostics for s in found.works}:
                words, new_place = follow(suggestion.change, shlex.split(flags), place)
                words = ["3" if word == "N" else word for word in words]
                config = dataclasses.replace(parse(words, switch_options(), user=PlanFlags), user=None)
                assert suggestion.change, flags
                assert codes(config, new_place, training=training) == [], f"{flags}: {suggestion.change}"
                followed += 1
    assert followed > len(WORKS[name])


def test_training_asks_for_what_a_plan_may_leave_open() -> None:
    assert codes("", CPU, training=False) == []
    assert codes("", CPU, training=True) == ["RF015", "RF031", "RF100"]
    place = on(GPUS, compute_capability=None)
    assert codes("--device cuda", place, training=True) == ["RF015", "RF024", "RF031", "RF100"]
    assert codes("--lr 1e-4 --train-iters 3 --save run", CPU, training=True) == []


def test_flash_attention_notes_padding() -> None:
    note = "flash-attention: batches with padding use the memory-efficient kernel"
    config = config_of("--use-flash-attn --task sequence_classification")
    assert note in resolve(config, GPUS, REGISTRY).notes
    assert note not in resolve(config, GPUS, REGISTRY.without("RF013")).notes
    assert note not in resolve(config_of("--use-flash-attn --task pretraining"), GPUS, REGISTRY).notes


def test_sizes_are_read_from_the_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"n_layer": 6, "n_head": 12, "n_embd": 768, "n_positions": 256}))
    folder = f"--pretrained-model-name-or-path {tmp_path}"
    assert "RF010" in codes(f"{folder} --pipeline-model-parallel-size 4", GPUS)
    assert "RF010" in codes(f"{folder} --tensor-model-parallel-size 8", GPUS)
    assert codes(f"{folder} --seq-length 300", CPU) == ["RF033"]
    assert codes(f"{folder} --pipeline-model-parallel-size 2 --tensor-model-parallel-size 4", GPUS) == []


def test_experts_are_read_from_the_model_folder(tmp_path: Path) -> None:
    folder = f"--pretrained-model-name-or-path {tmp_path}"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert codes(f"{folder} --num-experts 8", CPU) == ["RF070"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", "num_local_experts": 8}))
    assert "mixture-of-experts" in resolve(config_of(folder), CPU, REGISTRY).switches
    assert codes(f"{folder} --num-experts 8", CPU) == []
    assert codes(f"{folder} --num-experts 4", CPU) == ["RF070"]
    assert codes(f"{folder} --num-experts 8 --moe-top-k 1", CPU) == ["RF071"]


def test_broken_model_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        resolve(config_of(f"--pretrained-model-name-or-path {tmp_path}"), CPU)


def test_every_broken_rule_is_told_at_once() -> None:
    flags = "--tf32 --zero-2-memory-optimization --fsdp-memory-optimization --global-batch-size 3"
    assert codes(flags, on(CPU, template="Finetuner"), REGISTRY) == ["RF002", "RF008", "RF018", "RF023", "RF030"]
