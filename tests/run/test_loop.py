"""The loop: what it refuses, what it logs, and what it does not change when an error occurs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from rapidformer_templates import Data, Finetuner
from rapidformer_templates.errors import ConfigError, NonFiniteLoss
from rapidformer_templates.run.checkpoint import check as checkpoint_check
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.folder import read_metrics
from tests.support import jobs
from tests.support.lines import FLAGS, Line
from tests.support.messages import Says
from tests.support.parity import trained


@pytest.mark.slow
def test_a_model_that_is_not_of_transformers_learns(tmp_path: Path) -> None:
    job = Line([*FLAGS, "--train-iters", "200", "--save", str(tmp_path / "run"), "--weight-decay", "0"])
    job.fit()
    weight, bias = (p.item() for p in job.model.parameters())
    assert weight == pytest.approx(2, abs=0.05)
    assert bias == pytest.approx(1, abs=0.05)
    exported, told = (tmp_path / "run" / name for name in ("export/model.safetensors", "summary.json"))
    assert exported.stat().st_mode == told.stat().st_mode  # everyone who may read one may read the other


@pytest.mark.parametrize("flags", [[], ["--async-save"]], ids=["waiting", "async"])
def test_non_finite_loss_names_step_and_samples_and_touches_nothing(flags: list[str], tmp_path: Path) -> None:
    """A save in the background is completed first."""
    folder = tmp_path / "run"
    accumulated = ["--train-iters", "5", "--global-batch-size", "8"]
    job = Line([*FLAGS, *accumulated, "--save", str(folder), "--save-interval", "1", *flags])
    job.poisoned = 7
    with pytest.raises(NonFiniteLoss) as caught:
        job.fit()
    step = int(caught.value.message.split()[1].rstrip(":"))
    assert step > 1
    samples = job._run.order.step(step - 1)[0].tolist()
    (microbatch,) = (samples[i : i + 4] for i in (0, 4) if 7 in samples[i : i + 4])
    assert caught.value.where == f"training samples {sorted(microbatch)}"
    assert all(torch.isfinite(p).all() for p in job.model.parameters())
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == list(range(1, step))
    newest = checkpoint.candidates(folder / "checkpoints")[0]
    assert newest.name == f"step-{step - 1}"
    assert torch.equal(checkpoint.Reader(newest).read("weights", "weight", (0, 0), (1, 1)), job.model.weight.detach())
    assert not list((folder / "checkpoints").glob("*.tmp"))


def test_saves_in_the_background_are_told_when_they_are_whole(tmp_path: Path) -> None:
    told: list[tuple[int, str | None]] = []

    class Told(Line):
        def on_checkpoint(self, step: int, folder: Path) -> None:
            told.append((step, checkpoint_check.problem_of(folder)))

        def on_train_end(self, summary: Any) -> None:
            told.append((0, None))

    flags = [*FLAGS, "--epochs", "2", "--save", str(tmp_path / "run"), "--save-interval", "2", "--async-save"]
    Told([*flags, "--keep-checkpoints", "1"]).fit()
    assert told == [(2, None), (4, None), (6, None), (8, None), (10, None), (0, None)]
    assert [path.name for path in checkpoint.candidates(tmp_path / "run/checkpoints")] == ["step-10"]


def test_loss_as_sum_and_count_is_the_mean() -> None:
    class Summed(Line):
        def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
            losses = (model(batch["x"]) - batch["y"]) ** 2
            return losses.sum(), len(losses)

    one, other = (trained(kind([*FLAGS, "--epochs", "2", "--no-save"]))["lines"] for kind in (Line, Summed))
    assert [line["loss"] for line in one] == pytest.approx([line["loss"] for line in other], rel=1e-6)


CLASS_WEIGHTS = torch.tensor([1.0, 4.0, 0.5])


class Weighted(jobs.ClassJob):
    double = True

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return cross_entropy(logits, batch["labels"], weight=CLASS_WEIGHTS.double())


class CountedWeights(Weighted):
    def count_targets(self, batch: Any) -> float:
        return float(CLASS_WEIGHTS[batch["labels"]].sum())


def test_class_weights_that_are_counted_do_not_depend_on_the_micro_batch() -> None:
    flags = ["--lr", "1e-2", "--train-iters", "4", "--global-batch-size", "16", "--log-interval", "1"]
    whole, counted, uncounted = (
        trained(kind([*flags, "--micro-batch-size", str(size)]))["curve"]
        for kind, size in ((Weighted, 16), (CountedWeights, 2), (Weighted, 2))
    )
    assert np.allclose(counted, whole, rtol=1e-12)
    assert not np.allclose(uncounted, whole, rtol=1e-3)


def test_short_last_batch_is_neither_lost_nor_padded(tmp_path: Path) -> None:
    seen: list[int] = []

    class Counting(Line):
        def count_targets(self, batch: Any) -> float:
            seen.append(len(batch["x"]))
            return super().count_targets(batch)

    Counting([*FLAGS, "--epochs", "1", "--micro-batch-size", "8", "--save", str(tmp_path / "run")]).fit()
    assert sorted(seen) == [4, 8, 8]
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["samples"] == 20


def test_metrics_and_summary_have_the_promised_fields(tmp_path: Path) -> None:
    Line([*FLAGS, "--epochs", "1", "--save", str(tmp_path / "run")]).fit()
    line = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    assert set(line) == {
        "step", "epoch", "loss", "grad_norm", "lr", "samples", "tokens", "samples_per_second", "step_ms",
        "peak_memory_mb", "skipped",
    }  # fmt: skip
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {"metrics", "throughput", "peak_memory_mb", "wall_seconds", "parameters", "versions", "receipts"} <= set(
        summary
    )
    assert summary["parameters"] == 2
    assert summary["receipts"]["parameter_bytes"] == 8
    assert summary["receipts"]["optimizer_state_bytes"] == 2 * (4 + 4) + 2 * 4  # two moments and a step count for each
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["template"] == "Trainer"
    assert plan["values"]["--lr"] == {"value": 0.1, "origin": "command line"}


@pytest.mark.parametrize("has_tokens", [True, False])
def test_tokens_are_counted_if_a_batch_has_them(
    has_tokens: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Masked(Line):
        def build_data(self) -> Data:
            data = super().build_data()
            mask = {"attention_mask": np.ones(3, dtype=np.int64)} if has_tokens else {}
            data.train = [{**sample, **mask} for sample in data.train]
            return data

    summary = Masked([*FLAGS, "--epochs", "2", "--save", str(tmp_path / "run")]).fit()
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert {"tokens_per_second" in line for line in lines if "loss" in line} == {has_tokens}
    assert ("tokens_per_second" in summary["throughput"]) == ("tokens/s" in capsys.readouterr().out) == has_tokens
    assert summary["tokens"] == 3 * 40 * has_tokens


def test_template_flag_against_the_script_is_refused(says: Says) -> None:
    with says(ConfigError):
        type("Mine", (Finetuner,), {})(["--template", "Trainer"])
