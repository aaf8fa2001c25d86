"""Exported adapters are those that a run has evaluated. Runs start from adapters, codes or folders without a head."""

import json
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rapidformer_templates import Trainer
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.run.export import export_checkpoint
from tests.support import parity
from tests.support.combinations import Combination, accepted, smallest
from tests.support.engine_layouts import accepts, accepts_on, runs_of_layouts
from tests.support.jobs import KEEP_FIRST, VOCABULARY, CausalJob, FallingMetric
from tests.support.preference_runs import pairs, words
from tests.support.selection import few
from tests.support.texts import write_jsonl
from tests.support.worker_pool import outcomes_in_workers, run_in_workers

peft: Any = pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")

from rapidformer_templates.switches.lora.exported import merge  # noqa: E402 - it imports peft

pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

EXPORTED = (
    "--train-iters 3 --eval-interval 3 --lr 1e-2 --log-interval 1 --clip-grad 0.5 --no-keep-best --export-model"
    " --device cpu --lora-rank 4"
)
KINDS = {
    "lora": "",
    "attention": "--lora-target-modules q_proj,v_proj",
    "dora": "--lora-variant dora",
    "head": "--lora-modules-to-save lm_head",
    "last block": "--lora-target-modules layers.3.self_attn.q_proj",
    "average": "--ema-decay 0.5",
    "int8": "--quantize-base int8",
    "best": f"{KEEP_FIRST} --eval-interval 1",
}
BEST_STEP = {"best": 1}
"""The step that a run exports, if it is not the last one."""
OWNING = [switch.name for switch in REGISTRY.switches if switch.engine]
LAYOUTS: dict[str, Combination] = {
    " + ".join(names): found
    for names in [(), *((name,) for name in OWNING), ("tensor-parallel", "pipeline-parallel")]
    if (found := (accepted if len(names) > 1 else smallest)(("lora", *names)))
    and "mixture-of-experts" not in found.plan.switches
}
INTERLEAVED = "pipeline-parallel, interleaved"
LORA_FLAGS = {name: " ".join(found.flags) for name, found in LAYOUTS.items()}
LORA_FLAGS[INTERLEAVED] = f"{LORA_FLAGS['pipeline-parallel']} --virtual-pipeline-size 2"
LORA_WORLDS = {name: found.world for name, found in LAYOUTS.items()} | {INTERLEAVED: 2}


ADAPTED = [
    (kind, layout)
    for kind in KINDS
    for layout in LORA_FLAGS
    if accepts_on(LORA_WORLDS[layout], f"{EXPORTED} {LORA_FLAGS[layout]} {KINDS[kind]}".split())
]


class Adapted(CausalJob):
    """A llama of four blocks without tied weights, from a folder."""

    base = ""

    def make(self) -> torch.nn.Module:
        model: torch.nn.Module = LlamaForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        return model


class Falling(FallingMetric, Adapted):
    """The first of its checkpoints is the best one."""


def _job_of(kind: str, llama: str) -> type[Adapted]:
    return type("Adapted", (Falling if kind == "best" else Adapted,), {"base": f"{llama}/base"})


def _train_adapters(workers: Any, llama: str, kind: str, flags: str, folder: str) -> parity.Trained:
    return parity.trained(_job_of(kind, llama)(f"{EXPORTED} {flags} {KINDS[kind]} --save {folder}".split()))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)).save_pretrained(folder / "base")
    return folder


@cache
def names_alone(llama: Path, kind: str) -> set[str]:
    """Return the tensors that a single process exports."""
    folder = llama / kind.replace(" ", "-")
    _train_adapters(None, str(llama), kind, "--micro-batch-size 8", str(folder))
    return set(load_file(folder / "export" / "adapter_model.safetensors"))


@pytest.mark.parametrize(("kind", "layout"), few([("average", "pipeline-parallel")], ADAPTED))
def test_peft_reads_what_was_evaluated(kind: str, layout: str, llama: Path, tmp_path: Path) -> None:
    folder, later = tmp_path / "run", tmp_path / "later"
    run: parity.Trained = run_in_workers(
        LORA_WORLDS[layout], _train_adapters, str(llama), kind, LORA_FLAGS[layout], str(folder)
    )[0]
    export, step = folder / "export", BEST_STEP.get(kind, 3)
    weights = load_file(export / "adapter_model.safetensors")
    assert set(weights) == names_alone(llama, kind)
    export_checkpoint(folder / f"checkpoints/step-{step}", folder / "model", later, averages=kind == "average")
    again = load_file(later / "adapter_model.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())
    base = AutoModelForCausalLM.from_pretrained(llama / "base", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, str(export)).eval()
    data = Adapted().build_data()
    with torch.no_grad():
        loss = float(model(**data.collate(list(data.valid))).loss)
    # The export is not rounded to int8 like the base.
    evaluated = run["evaluations"][step - 1 if kind == "best" else -1]
    assert loss == pytest.approx(evaluated, rel=1e-3 if kind == "int8" else 1e-5)


def test_adapters_of_all_stages_change_the_loss(llama: Path) -> None:
    """Otherwise the test above would not notice missing ones."""
    names, head = names_alone(llama, "lora"), names_alone(llama, "head")
    assert {name.split("layers.")[1].split(".")[0] for name in names} == {"0", "1", "2", "3"}
    assert len(names) == 4 * 7 * 2
    assert {name for name in head if "lora" not in name} == {"base_model.model.lm_head.weight"}


STEPS = "--train-iters 2 --eval-interval 2 --lr 1e-2 --no-keep-best --export-model --device cpu --seq-length 32"
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


class Start(NamedTuple):
    """A folder to start from.

    Attributes:
        folder: its name.
        flags: of the run.
        error: what the run is refused with. None if it trains.
        base: folder of the same weights in fp32, which peft reads below the exported adapters.
    """

    folder: str
    flags: str
    error: str | None = None
    base: str | None = None


CAUSAL, ADAPTERS = "--task causal_lm", "--task causal_lm --lora-rank 2"
PREFERENCES = "--task preference --lora-rank 2"
STARTS: Mapping[str, Start] = {
    "adapters": Start("sft/export", ADAPTERS, "rapidformer export {root}/sft --merge"),
    "preferences of adapters": Start("sft/export", PREFERENCES, "rapidformer export {root}/sft --merge"),
    "4 bits": Start("bits", CAUSAL, "bits are quantized (bitsandbytes)"),
    "adapters of 4 bits": Start("bits", ADAPTERS, "bits are quantized (bitsandbytes)"),
    "no head": Start("headless", CAUSAL, "{root}/headless lacks 1 weight, such as lm_head.weight"),
    "adapters without a head": Start("headless", ADAPTERS, "{root}/headless lacks 1 weight"),
    "body": Start("body", CAUSAL, "{root}/body has no head for words: lm_head.weight is missing"),
    "merged": Start("merged", ADAPTERS, base="merged"),
    "preferences of merged": Start("merged", PREFERENCES, base="merged"),
    "fp8": Start("fp8", CAUSAL),
    "adapters of fp8": Start("fp8", ADAPTERS, base="dequantized"),
}
FLAGS, WORLDS = runs_of_layouts()
CASES = [
    (start, layout)
    for start, (_, flags, *_) in STARTS.items()
    for layout in FLAGS
    if "--num-experts" not in FLAGS[layout] and accepts(layout, f"{STEPS} {flags}")
]


def _write(folder: Path, config: Mapping[str, Any], weights: dict[str, torch.Tensor], tokenizer: Path) -> None:
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, gpt_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("starts")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    vocabulary = len(AutoTokenizer.from_pretrained(gpt_folder))
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, initializer_range=0.2, **sizes))
    model.save_pretrained(folder / "base")
    config = json.loads((folder / "base/config.json").read_text())
    weights = load_file(folder / "base/model.safetensors")
    AutoTokenizer.from_pretrained(gpt_folder).save_pretrained(folder / "base")
    _write(folder / "bits", config | {"quantization_config": BITSANDBYTES}, weights, gpt_folder)
    headless = {name: weight for name, weight in weights.items() if name != "lm_head.weight"}
    _write(folder / "headless", config, headless, gpt_folder)
    shutil.copytree(folder / "headless", folder / "body")
    model.model.save_pretrained(folder / "body")

    codes: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if "proj" in name:
            scale = weight.abs().max() / 448
            codes[name], codes[f"{name}_scale_inv"] = (weight / scale).to(torch.float8_e4m3fn), scale.reshape(1, 1)
            weights[name] = codes[name].float() * scale
        else:
            codes[name] = weight
    _write(folder / "fp8", config | {"quantization_config": FP8}, codes, gpt_folder)
    _write(folder / "dequantized", config, weights, gpt_folder)

    talks = [(("user", words(3, i)), ("assistant", words(2 + i % 5, 40 + i))) for i in range(12)]
    chats = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    for task, rows in (("causal_lm", chats), ("preference", pairs(12))):
        (folder / task).mkdir()
        write_jsonl(folder / task / "train.jsonl", rows)
        write_jsonl(folder / task / "valid.jsonl", rows[:5])
    _job(folder, "base", f"{ADAPTERS} --micro-batch-size 4 --save {folder}/sft").fit()
    merge(folder / "sft/export", folder / "merged")
    return folder


def _job(root: Path, start: str, flags: str) -> Trainer:
    data = root / flags.split("--task ")[1].split()[0]
    return Trainer(f"{STEPS} {flags} --data-dir {data} --pretrained-model-name-or-path {root / start}".split())


def _train(workers: Any, root: Path, start: str, flags: str) -> list[float] | str:
    """Return the losses of the evaluations, or the error."""
    try:
        return parity.trained(_job(root, start, flags))["evaluations"]
    except RapidformerError as error:
        return error.render()


@pytest.mark.parametrize(("start", "layout"), few([("adapters", "replicas")], CASES))
def test_a_run_starts_right_or_says_why_not(start: str, layout: str, root: Path, tmp_path: Path) -> None:
    folder, flags, error, base = STARTS[start]
    flags = f"{flags} {FLAGS[layout]} --save {tmp_path / 'run'}"
    told = outcomes_in_workers(WORLDS[layout], _train, root, folder, flags)[0]  # some errors are found by rank 0 alone
    if error is not None:
        assert isinstance(told, str)
        assert error.format(root=root) in told
        return
    assert isinstance(told, list), told
    read = AutoModelForCausalLM.from_pretrained(root / base if base else tmp_path / "run/export")
    model = peft.PeftModel.from_pretrained(read, tmp_path / "run/export") if base else read
    assert told[-1] == pytest.approx(_loss(_job(root, folder, flags), model), rel=1e-5)


@torch.no_grad()
def _loss(job: Trainer, model: Any) -> float:
    """Return the loss of the validation part by transformers. For preferences: DPO's, compared with its base."""
    data = job.build_data()
    assert data.valid is not None
    batch = data.collate([data.valid[i] for i in range(len(data.valid))])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if job.config.training.task == "causal_lm":
        return float(model(**inputs, labels=batch["labels"]).loss)

    def logps() -> torch.Tensor:
        logits = model(**inputs).logits[:, :-1].transpose(1, 2)
        return -functional.cross_entropy(logits, batch["labels"][:, 1:], reduction="none").sum(1)

    trained = logps()
    with model.disable_adapter():
        chosen, rejected = (trained - logps()).chunk(2)
    return float(-functional.logsigmoid(0.1 * (chosen - rejected)).mean())
