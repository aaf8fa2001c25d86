"""The loop: what it refuses, what it logs, and what it does not change when an error occurs."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from rapidformer_templates import Data, Finetuner
from rapidformer_templates.errors import CheckpointError, ConfigError, DataError, NonFiniteLoss, RapidformerError
from rapidformer_templates.run.checkpoint import check as checkpoint_check
from rapidformer_templates.run.checkpoint import format as checkpoint
from rapidformer_templates.run.checkpoint import tensor_file
from rapidformer_templates.run.folder import read_metrics
from tests.support import jobs
from tests.support.lines import FLAGS, Line
from tests.support.parity import trained


@pytest.mark.slow
def test_a_model_that_is_not_of_transformers_learns(tmp_path: Path) -> None:
    job = Line([*FLAGS, "--epochs", "40", "--save", str(tmp_path / "run"), "--weight-decay", "0"])
    summary = job.fit()
    assert summary["steps"] == 40 * 5
    weight, bias = (p.item() for p in job.model.parameters())
    assert weight == pytest.approx(2, abs=0.05)
    assert bias == pytest.approx(1, abs=0.05)
    exported, told = (tmp_path / "run" / name for name in ("export/model.safetensors", "summary.json"))
    assert exported.stat().st_mode == told.stat().st_mode  # everyone who may read one may read the other


def test_non_finite_loss_names_step_and_samples_and_touches_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    accumulated = ["--train-iters", "5", "--global-batch-size", "8"]
    job = Line([*FLAGS, *accumulated, "--save", str(folder), "--save-interval", "1"])
    job.poisoned = 7
    with pytest.raises(NonFiniteLoss) as caught:
        job.fit()
    step = int(caught.value.message.split()[1].rstrip(":"))
    samples = job._run.order.step(step - 1)[0].tolist()
    (microbatch,) = (samples[i : i + 4] for i in (0, 4) if 7 in samples[i : i + 4])
    assert caught.value.where == f"training samples {sorted(microbatch)}"
    assert all(torch.isfinite(p).all() for p in job.model.parameters())
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == list(range(1, step))
    newest = checkpoint.candidates(folder / "checkpoints")[0] if step > 1 else None
    if newest:
        saved = checkpoint.Reader(newest).read("weights", "weight", (0, 0), (1, 1))
        assert torch.equal(saved, job.model.weight.detach())


@pytest.mark.durable
@pytest.mark.parametrize("flags", [[], ["--async-save"]], ids=["waiting", "async"])
@pytest.mark.parametrize("full", ["optimizer-00000-00000.safetensors", "manifest.json"])
def test_full_disk_leaves_the_earlier_checkpoint(
    full: str,
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run continues without the checkpoint of step 4. It fails at the end, in step 5."""
    folder = tmp_path / "run"
    job = Line([*FLAGS, "--epochs", "1", "--save", str(folder), "--save-interval", "2", *flags])

    def fail_on_full_disk(function: Any) -> Any:
        def writer(path: Path, *more: Any) -> Any:
            if path.parent.name in ("step-4.tmp", "step-5.tmp") and path.name == full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(path, *more)

        return writer

    monkeypatch.setattr(tensor_file, "unbuffered", fail_on_full_disk(tensor_file.unbuffered))
    monkeypatch.setattr(checkpoint, "write_synced", fail_on_full_disk(checkpoint.write_synced))
    with pytest.raises(CheckpointError, match="step 5 could not be written: the disk is full") as caught:
        job.fit()
    warning = "warning: the checkpoint of step 4 could not be written: the disk is full: training continues"
    assert warning in capsys.readouterr().err
    assert "--resume from step-2" in caught.value.hint
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["latest", "step-2"]
    assert checkpoint_check.problem_of(folder / "checkpoints" / "step-2") is None


def test_a_loss_that_is_not_finite_waits_for_the_save_in_the_background(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = Line([*FLAGS, "--epochs", "1", "--save", str(folder), "--save-interval", "1", "--async-save"])
    job.poisoned = 7
    with pytest.raises(NonFiniteLoss) as caught:
        job.fit()
    step = int(caught.value.message.split()[1].rstrip(":"))
    assert step > 1
    assert checkpoint.candidates(folder / "checkpoints")[0].name == f"step-{step - 1}"
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


def test_loss_as_sum_and_count_is_the_mean(tmp_path: Path) -> None:
    class Summed(Line):
        def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
            losses = (model(batch["x"]) - batch["y"]) ** 2
            return losses.sum(), len(losses)

    curves = []
    for kind in (Line, Summed):
        kind([*FLAGS, "--epochs", "2", "--save", str(tmp_path / kind.__name__)]).fit()
        curves.append([line["loss"] for line in read_metrics(tmp_path / kind.__name__ / "metrics.jsonl")])
    assert curves[0] == pytest.approx(curves[1], rel=1e-6)


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


def test_other_count_than_count_targets_is_refused() -> None:
    class Miscounted(Line):
        def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
            return super().compute_loss(model, batch) * 3, 3

    with pytest.raises(RapidformerError, match="summed over 3 targets, count_targets counted 4"):
        Miscounted([*FLAGS, "--epochs", "1", "--no-save"]).fit()


def test_loss_that_is_no_scalar_is_refused() -> None:
    class PerSample(Line):
        def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
            return (model(batch["x"]) - batch["y"]) ** 2

    with pytest.raises(RapidformerError, match=r"compute_loss returned a tensor of shape \(4, 1\)"):
        PerSample([*FLAGS, "--epochs", "1", "--no-save"]).fit()


def test_empty_training_data_is_refused() -> None:
    class Empty(Line):
        def build_data(self) -> Data:
            return Data(train=[])

    with pytest.raises(DataError, match="training data set is empty"):
        Empty([*FLAGS, "--epochs", "1", "--no-save"]).fit()


def test_model_without_trainable_parameters_is_refused() -> None:
    class Frozen(Line):
        def build_model(self) -> nn.Module:
            return super().build_model().requires_grad_(False)

    with pytest.raises(RapidformerError, match="no parameter that requires a gradient"):
        Frozen([*FLAGS, "--epochs", "1", "--no-save"]).fit()


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
def test_tokens_per_second_exist_only_if_the_batches_show_their_tokens(
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


def test_callbacks_come_in_order(tmp_path: Path) -> None:
    calls: list[Any] = []

    class Called(Line):
        def build_data(self) -> Data:
            data = super().build_data()
            data.valid = data.train
            return data

        def on_train_start(self) -> None:
            calls.append("start")

        def on_step_end(self, step: int, result: Any) -> None:
            calls.append(step)

        def on_evaluate(self, step: int, metrics: Any) -> None:
            calls.append(("evaluate", step, sorted(metrics)))

        def on_epoch_end(self, epoch: int) -> None:
            calls.append(("epoch", epoch))

        def on_checkpoint(self, step: int, folder: Path) -> None:
            calls.append(("checkpoint", folder.name))

        def on_train_end(self, summary: Any) -> None:
            calls.append("end")

    Called([*FLAGS, "--epochs", "2", "--micro-batch-size", "10", "--save", str(tmp_path / "run")]).fit()
    each = [[("evaluate", s, ["eval_loss"]), ("epoch", s // 2), ("checkpoint", f"step-{s}")] for s in (2, 4)]
    assert calls == ["start", 1, 2, *each[0], 3, 4, *each[1], "end"]


def test_own_flags_and_flags_in_code(tmp_path: Path) -> None:
    from dataclasses import dataclass

    from rapidformer_templates import flag

    @dataclass(frozen=True)
    class Flags:
        """Line"""

        slope: float = flag(2.0, "slope of the line")

    class Sloped(Line):
        pass

    Sloped.Flags = Flags
    job = Sloped(["--slope", "3"], lr=0.5)
    assert job.flags.slope == 3.0
    assert job.config.training.lr == 0.5
    assert job.config.origin("lr").startswith("test_loop.py:")
    assert Sloped(["--lr", "0.1"], lr=0.5).config.training.lr == 0.1


@pytest.mark.slow
def test_best_checkpoint_is_exported(tmp_path: Path) -> None:
    """Validation gets worse after its best epoch. The weights of that epoch are exported and summarised."""

    class Worsening(Line):
        def build_data(self) -> Data:
            data = super().build_data()
            data.valid = [{"x": np.float32([1.0]), "y": np.float32([0.6])}]  # the fit passes through it on its way to 3
            return data

    folder = tmp_path / "run"
    flags = [*FLAGS, "--epochs", "12", "--save", str(folder), "--keep-best", "--keep-checkpoints", "1"]
    summary = Worsening(flags).fit()
    losses = {line["step"]: line["eval_loss"] for line in read_metrics(folder / "metrics.jsonl") if "eval_loss" in line}
    best = min(losses, key=lambda step: losses[step])
    assert best < max(losses)
    assert summary["best"] == {"step": best, "metric": "eval_loss", "value": losses[best]}
    assert summary["metrics"]["eval_loss"] == pytest.approx(losses[best], rel=1e-6)
    kept = {path.name for path in (folder / "checkpoints").iterdir()}
    assert kept == {"latest", f"step-{best}", f"step-{max(losses)}"}


def test_template_flag_against_the_script_is_refused() -> None:
    class Mine(Finetuner):
        pass

    with pytest.raises(ConfigError, match="this script's template is Finetuner, not Trainer"):
        Mine(["--template", "Trainer"])


def test_save_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        Line([*FLAGS, "--epochs", "1", "--save", str(path)]).fit()
