"""Each loss compared with TRL's trainer, on the same batches: eight steps from the same weights.

TRL is not a dependency. If it is installed (1.16 was used), ``pytest -s`` prints the losses of docs/preferences.md.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from accelerate.state import GradientState
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rapidformer_templates import Trainer
from tests.support.preference_runs import curve_of, judged, make, pairs

pytest.importorskip("trl", reason="TRL is not installed: pip install --no-deps trl")

Batch = dict[str, torch.Tensor]
STEPS = 8
FLAGS = f"--train-iters {STEPS} --micro-batch-size 4 --weight-decay 0 --clip-grad 0".split()


class Recorded(Trainer):
    """Records the training batches."""

    def compute_loss(self, model: Any, batch: Batch) -> Any:
        if torch.is_grad_enabled():
            self.batches = [*getattr(self, "batches", []), {name: tensor.clone() for name, tensor in batch.items()}]
        return super().compute_loss(model, batch)


def _completions(batch: Batch, prefix: str = "") -> torch.Tensor:
    return (batch[f"{prefix}labels"] != -100).long()


def _of_dpo(batch: Batch) -> Batch:
    return {name: batch[name] for name in ("input_ids", "attention_mask")} | {"completion_mask": _completions(batch)}


def _of_kto(batch: Batch) -> Batch:
    drift = {f"KL_{name}": batch[f"kl_{name}"] for name in ("input_ids", "attention_mask")}
    return _of_dpo(batch) | drift | {"KL_completion_mask": _completions(batch, "kl_"), "label": batch["is_good"]}


def _of_reward(batch: Batch) -> Batch:
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def _halves(batch: Batch) -> Batch:
    names = ("input_ids", "attention_mask", "labels")
    return {f"{half}_{n}": batch[n].chunk(2)[i] for i, half in enumerate(("chosen", "rejected")) for n in names}


PEERS: Mapping[str, tuple[str, str, dict[str, Any], Callable[[Batch], Batch]]] = {
    "dpo": ("trl", "DPO", {"loss_type": ["sigmoid"]}, _of_dpo),
    "ipo": ("trl", "DPO", {"loss_type": ["ipo"]}, _of_dpo),
    "orpo": ("trl.experimental.orpo", "ORPO", {}, _halves),
    "simpo": ("trl.experimental.cpo", "CPO", {"loss_type": "simpo", "cpo_alpha": 0.0}, _halves),
    "kto": ("trl.trainer.kto_trainer", "KTO", {}, _of_kto),
    "reward": ("trl", "Reward", {}, _of_reward),
}
"""Module, name and options of the trainer, and the batch that it takes."""


def _told(peer: Any) -> dict[str, float]:
    """Return the metrics of the last loss, by TRL's names."""
    kept = getattr(peer, "_metrics", None) or peer._stored_metrics
    told = {name: values[-1] for name, values in kept["train"].items() if values}
    kept["train"].clear()  # otherwise a batch without a bad answer would show the metrics of the previous one
    return told


def _train(peer: Any, batches: list[Batch], batch_for: Callable[[Batch], Batch]) -> list[dict[str, float]]:
    model = peer.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-3, weight_decay=0)
    steps = []
    for batch in batches:
        loss = peer.compute_loss(model, batch_for(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append({"loss": float(loss), **_told(peer)})
    return steps


@pytest.mark.parametrize("loss", PEERS)
def test_eight_steps_are_those_of_trl(loss: str, gpt_folder: Path, tmp_path: Path) -> None:
    GradientState._reset_state()  # of a peer in another test, whose last batch would cut the metrics of this one
    rows = judged() if loss == "kto" else pairs()
    flags = make(tmp_path / "data", gpt_folder, rows)
    task = ["--task", "reward"] if loss == "reward" else ["--task", "preference", "--preference-loss", loss]
    job = Recorded([*flags, *FLAGS, *task, "--save", str(tmp_path / "run")])
    start: dict[str, torch.Tensor] = {}
    job.on_train_start = lambda: start.update({n: p.clone() for n, p in job.model.state_dict().items()})  # type: ignore[method-assign]
    job.fit()
    ours = curve_of(tmp_path / "run")[:STEPS]

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "data" / "model")
    tokenizer.pad_token = tokenizer.eos_token
    factory: Any = AutoModelForSequenceClassification if loss == "reward" else AutoModelForCausalLM
    more = {"num_labels": 1, "pad_token_id": 0} if loss == "reward" else {}
    model = factory.from_pretrained(tmp_path / "data" / "model", **more)
    model.load_state_dict(start)
    common = {
        "output_dir": str(tmp_path / "trl"), "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True,
    }  # fmt: skip
    module, name, options, batch_for = PEERS[loss]
    config, trainer = (getattr(importlib.import_module(module), f"{name}{kind}") for kind in ("Config", "Trainer"))
    data = datasets.Dataset.from_list(rows)
    peer = trainer(model, args=config(**options, **common), train_dataset=data, processing_class=tokenizer)
    for part in peer.model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    theirs = _train(peer, job.batches, batch_for)

    worst = 0.0
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        names = {"loss": 0, "rewards/chosen": 2, "rewards/rejected": 3}
        both = [(mine[i], other[n]) for n, i in names.items() if n in other]
        if "margin" in other:  # margin of rewards, whose names differ
            both.append((mine[4], other["margin"]))
        worst = max(worst, *(abs(a - b) / max(1.0, abs(b)) for a, b in both))
        print(f"{loss:8}{step + 1:3}{mine[0]:14.7f}{other['loss']:14.7f}")
        np.testing.assert_allclose(*zip(*both, strict=True), rtol=1e-5, atol=1e-5)
    print(f"{loss:8} largest difference {worst:.1e}")
