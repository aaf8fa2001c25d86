"""A run exports the model that it has evaluated, with every engine. transformers alone reads the export.

``test_exported_adapters.py`` does the same for adapters, and ``test_written_runs.py`` compares single weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.request import build_request
from tests.support import parity
from tests.support.combinations import Combination, parsed, place, smallest
from tests.support.engine_layouts import NAMES
from tests.support.jobs import KEEP_FIRST, VOCABULARY, CausalJob, DeepJob, FallingMetric
from tests.support.mixtures import MixtralJob
from tests.support.parallel_jobs import Tanh, TanhModel
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

STEPS = "--train-iters 3 --eval-interval 1 --lr 1e-2 --log-interval 1 --clip-grad 0.5 --export-model --device cpu"


class LlamaJob(CausalJob):
    """A llama of four blocks whose head and embeddings have separate weights."""

    def make(self) -> nn.Module:
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))


class FallingJob(FallingMetric, DeepJob):
    """The first of its checkpoints is the best one."""


class OwnJob(Tanh):
    """A module that is not from transformers, with its own loss."""

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


KINDS: dict[str, tuple[type[Any], str]] = {
    "weights": (LlamaJob, "--no-keep-best"),
    "tied": (DeepJob, "--no-keep-best"),
    "average": (DeepJob, "--no-keep-best --ema-decay 0.5"),
    "best": (FallingJob, KEEP_FIRST),
    "best average": (FallingJob, f"{KEEP_FIRST} --ema-decay 0.5"),
    "own module": (OwnJob, "--no-keep-best"),
    "mixture": (MixtralJob, "--no-keep-best"),
}
"""The job and flags of each kind."""

LAYOUTS: dict[str, Combination] = {name: found for name, names in NAMES.items() if (found := smallest(names))}
FLAGS = {name: " ".join(found.flags) for name, found in LAYOUTS.items()}
FLAGS["interleaved"] = f"{FLAGS['pipeline-parallel']} --virtual-pipeline-size 2"
WORLDS = {name: found.world for name, found in LAYOUTS.items()} | {"interleaved": 2}
CONVERTED = {name for name, flags in FLAGS.items() if "--num-experts" in flags}
"""Layouts with experts of this library, which transformers cannot read."""


def _is_accepted(kind: str, layout: str) -> bool:
    words = f"{STEPS} {FLAGS[layout]} {KINDS[kind][1]} --save run".split()
    request = build_request(
        REGISTRY.complete(parsed(tuple(words))), place(WORLDS[layout], "Trainer"), REGISTRY.switches, training=True
    )
    return layout not in CONVERTED and not REGISTRY.refusals(request)


CASES = [(kind, layout) for kind in KINDS for layout in FLAGS if _is_accepted(kind, layout)]
SHORT = [
    ("best average", "zero-3"),
    ("best average", "tensor 2, pipeline 2"),
    ("own module", "interleaved"),
    ("mixture", "zero-3"),
]


def _refusal(kind: str, layout: str) -> str | None:
    """Return why the model of a kind cannot be divided like this, or None. The rules do not know the model."""
    switches = NAMES.get(layout, ("pipeline-parallel",))
    if kind == "own module" and "tensor-parallel" in switches:
        return "TanhModel has no tensor plan"
    if kind == "own module" and "context-parallel" in switches:
        return "TanhModel is not a transformers model"
    return "2 blocks cannot be cut into" if kind == "mixture" and "pipeline-parallel" in switches else None


def _train(workers: Any, kind: str, flags: str, folder: str) -> parity.Trained | str:
    job, own = KINDS[kind]
    try:
        return parity.trained(job([*f"{STEPS} {own} {flags}".split(), "--save", folder]))
    except RapidformerError as error:
        return error.message


@pytest.fixture(scope="module")
def names(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The tensors that a single process exports, by kind. They are trained once."""
    root, found = tmp_path_factory.mktemp("alone"), {}
    for kind in selected(request, "kind"):
        _train(None, kind, "--micro-batch-size 8", str(root / kind))
        found[kind] = set(load_file(root / kind / "export" / "model.safetensors"))
    return found


def _read(kind: str, export: Path) -> nn.Module:
    if kind != "own module":
        model: nn.Module = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
        return model
    own = TanhModel()
    own.load_state_dict(load_file(export / "model.safetensors"))
    return own


def _loss(kind: str, model: nn.Module) -> float:
    job = KINDS[kind][0]()
    data = job.build_data()
    assert data.valid is not None
    batch = data.collate(list(data.valid))
    with torch.no_grad():
        return float(job.compute_loss(model, batch) if kind == "own module" else model(**batch).loss)


@pytest.mark.parametrize(("kind", "layout"), by_default(SHORT, CASES))
def test_the_export_is_the_model_that_was_evaluated(
    kind: str, layout: str, names: dict[str, set[str]], tmp_path: Path
) -> None:
    run = run_in_workers(WORLDS[layout], _train, kind, FLAGS[layout], str(tmp_path / "run"))[0]
    refusal = _refusal(kind, layout)
    if refusal:
        assert isinstance(run, str)
        assert run.startswith(refusal)
        return
    assert not isinstance(run, str), run
    export = tmp_path / "run" / "export"
    assert set(load_file(export / "model.safetensors")) == names[kind]
    expected = run["evaluations"][0 if kind.startswith("best") else -1]
    assert _loss(kind, _read(kind, export)) == pytest.approx(expected, rel=1e-5)
