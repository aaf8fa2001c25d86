"""The exported adapters are the ones that the run has evaluated, with every engine. peft alone can read them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.request import build_request
from rapidformer_templates.run.export import export_checkpoint
from tests.support import parity
from tests.support.combinations import Combination, accepted, parsed, place, smallest
from tests.support.jobs import KEEP_FIRST, VOCABULARY, CausalJob, FallingMetric
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

peft: Any = pytest.importorskip("peft", reason="needs peft: pip install 'rapidformer_templates[peft]'")
pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

STEPS = (
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
FLAGS = {name: " ".join(found.flags) for name, found in LAYOUTS.items()}
FLAGS[INTERLEAVED] = f"{FLAGS['pipeline-parallel']} --virtual-pipeline-size 2"
WORLDS = {name: found.world for name, found in LAYOUTS.items()} | {INTERLEAVED: 2}


def _is_accepted(kind: str, layout: str) -> bool:
    config = REGISTRY.complete(parsed((*f"{STEPS} {FLAGS[layout]} {KINDS[kind]}".split(), "--save", "run")))
    request = build_request(config, place(WORLDS[layout], "Trainer"), REGISTRY.switches, training=True)
    return not REGISTRY.refusals(request)


EVERY = [(kind, layout) for kind in KINDS for layout in FLAGS if _is_accepted(kind, layout)]
CASES = {f"{kind}: {layout or 'replicas'}": (kind, layout) for kind, layout in EVERY}
SHORT = [
    *(f"lora: {layout}" for layout in ("tensor-parallel + pipeline-parallel", "zero-3")),
    *(f"{kind}: pipeline-parallel" for kind in ("last block", "average")),
    "head: tensor-parallel",
]


class Adapted(CausalJob):
    """A llama of four blocks without tied weights, from a folder."""

    base = ""

    def make(self) -> torch.nn.Module:
        model: torch.nn.Module = LlamaForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        return model


class Falling(FallingMetric, Adapted):
    """The first of its checkpoints is the best one."""


def _job(kind: str, root: str) -> type[Adapted]:
    return type("Adapted", (Falling if kind == "best" else Adapted,), {"base": f"{root}/base"})


def _train(workers: Any, root: str, kind: str, flags: str, folder: str) -> parity.Trained:
    return parity.trained(_job(kind, root)(f"{STEPS} {flags} {KINDS[kind]} --save {folder}".split()))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)).save_pretrained(folder / "base")
    return folder


@cache
def names_alone(root: Path, kind: str) -> set[str]:
    """Return the tensors that a single process exports."""
    folder = root / kind.replace(" ", "-")
    _train(None, str(root), kind, "--micro-batch-size 8", str(folder))
    return set(load_file(folder / "export" / "adapter_model.safetensors"))


@pytest.mark.parametrize("case", by_default(SHORT, CASES))
def test_peft_reads_what_was_evaluated(case: str, root: Path, tmp_path: Path) -> None:
    kind, layout = CASES[case]
    folder, later = tmp_path / "run", tmp_path / "later"
    run: parity.Trained = run_in_workers(WORLDS[layout], _train, str(root), kind, FLAGS[layout], str(folder))[0]
    export, step = folder / "export", BEST_STEP.get(kind, 3)
    weights = load_file(export / "adapter_model.safetensors")
    assert set(weights) == names_alone(root, kind)
    export_checkpoint(folder / f"checkpoints/step-{step}", folder / "model", later, averages=kind == "average")
    again = load_file(later / "adapter_model.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())
    base = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, str(export)).eval()
    data = Adapted().build_data()
    with torch.no_grad():
        loss = float(model(**data.collate(list(data.valid))).loss)
    # The export is not rounded to int8 like the base.
    evaluated = run["evaluations"][step - 1 if kind == "best" else -1]
    assert loss == pytest.approx(evaluated, rel=1e-3 if kind == "int8" else 1e-5)


def test_adapters_of_all_stages_change_the_loss(root: Path) -> None:
    """Otherwise the test above would not notice missing ones."""
    names, head = names_alone(root, "lora"), names_alone(root, "head")
    assert {name.split("layers.")[1].split(".")[0] for name in names} == {"0", "1", "2", "3"}
    assert len(names) == 4 * 7 * 2
    assert {name for name in head if "lora" not in name} == {"base_model.model.lm_head.weight"}
