"""Runs that start from adapters, merged adapters, quantized weights or a folder without a head, under every engine.

A run that starts is compared with peft and transformers alone. Others end with the reason and the way out.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rapidformer_templates import Trainer
from rapidformer_templates.errors import RapidformerError
from tests.support import parity
from tests.support.engine_layouts import accepts, runs_of_layouts
from tests.support.preference_runs import pairs, words
from tests.support.selection import by_default
from tests.support.texts import write_jsonl
from tests.support.worker_pool import outcomes_in_workers

pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
from peft import PeftModel

from rapidformer_templates.switches.lora.exported import merge

pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

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
SHORT = [
    ("adapters", "replicas"),
    ("adapters of 4 bits", "tensor 2, pipeline 2"),
    ("no head", "fsdp"),
    ("body", "pipeline-parallel"),
    ("preferences of merged", "zero-3"),
    ("adapters of fp8", "tensor-parallel"),
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


@pytest.mark.parametrize(("start", "layout"), by_default(SHORT, CASES))
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
    model = PeftModel.from_pretrained(read, tmp_path / "run/export") if base else read
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
