"""OSS and OSS + SDP follow the one-process run, and each rank holds only its share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rapidformer_templates.errors import NonFiniteLoss, RapidformerError
from rapidformer_templates.run.checkpoint.format import Reader
from tests.support.jobs import OTHERS, CausalJob, ClassJob
from tests.support.parity import Trained, reference, train
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

pytest.importorskip("fairscale", reason="OSS and SDP need the fairscale extra")

CLIP = 0.1
STEPS = f"--train-iters 5 --eval-interval 2 --global-batch-size 8 --clip-grad {CLIP} --weight-decay 0.1"
ALONE = f"{STEPS} --micro-batch-size 8"
SWITCHES = {"oss": "--oss-memory-optimization", "sdp": "--oss-sdp-memory-optimization"}
LAYOUTS = {
    f"{name}{suffix}": f"{STEPS} --micro-batch-size {micro} {switch}"
    for name, switch in SWITCHES.items()
    for suffix, micro in (("", 4), ("-accumulated", 2))
}
EPOCHS = "--epochs 2 --weight-decay 0.1 --clip-grad 0.1"
LAST_BATCH_LEAVES_A_WORKER_IDLE = f"{EPOCHS} --global-batch-size 60 --micro-batch-size"


class FirstBlockFrozenJob(ClassJob):
    """The first block is frozen."""

    def make(self) -> torch.nn.Module:
        model = super().make()
        model.bert.encoder.layer[0].requires_grad_(False)
        return model


class _Routed(torch.nn.Module):
    """A classifier with a part for some samples only, and a part for none."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.never = torch.nn.Linear(5, 5)
        self.sometimes = torch.nn.Linear(16, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        pooled = self.inner.bert(input_ids=input_ids, attention_mask=attention_mask).pooler_output
        logits = self.inner.classifier(pooled)
        rows = (input_ids[:, 0] < 7).nonzero().flatten()
        if len(rows):
            logits = logits.index_add(0, rows, self.sometimes(pooled[rows]))
        return logits


class RoutedJob(ClassJob):
    def make(self) -> torch.nn.Module:
        return _Routed(super().make())

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(batch["input_ids"], batch["attention_mask"])
        return torch.nn.functional.cross_entropy(logits, batch["labels"])


class SpoiledJob(CausalJob):
    """In step 3 the loss of one worker is not finite."""

    rank = 0

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = super().compute_loss(model, batch)
        done = len(getattr(self, "curve", []))
        self.before = [p.detach().clone() for p in self.model.parameters()]
        return loss * float("nan") if done == 2 and self.rank == 1 else loss


class MixedTypesJob(ClassJob):
    def make(self) -> torch.nn.Module:
        model = super().make()
        model.classifier.double()
        return model


OTHERS |= {"first-block-frozen": FirstBlockFrozenJob, "routed": RoutedJob}
CASES: dict[tuple[str, bool, str], tuple[str, str]] = {
    # (job, double, name): flags for two workers, and for the reference
    **{
        (job, False, name): (flags, ALONE)
        for job in ("causal", "first-block-frozen")
        for name, flags in LAYOUTS.items()
    },
    **{("causal", True, name): (flags, ALONE) for name, flags in LAYOUTS.items() if "accumulated" in name},
    **{
        ("causal", False, f"{name}-{optimizer}"): tuple(
            f"{flags} --optimizer {optimizer}" for flags in (f"{STEPS} --micro-batch-size 2 {switch}", ALONE)
        )
        for name, switch in SWITCHES.items()
        for optimizer in ("lamb", "adafactor", "adamw_torch")
    },
    **{
        (job, True, f"{name}-idle"): (
            f"{LAST_BATCH_LEAVES_A_WORKER_IDLE} 30 {switch}",
            f"{LAST_BATCH_LEAVES_A_WORKER_IDLE} 60",
        )
        for name, switch in SWITCHES.items()
        for job in ("causal", "classifier")
    },
    **{
        ("routed", True, f"{name}{suffix}"): (f"{STEPS} --micro-batch-size {micro} {switch}", ALONE)
        for name, switch in SWITCHES.items()
        for suffix, micro in (("", 4), ("-accumulated", 1))
    },
}
LONGER = {
    *(("first-block-frozen", False, name) for name in SWITCHES),
    *(("causal", False, f"{name}-lamb") for name in SWITCHES),
    *(("classifier", True, f"{name}-idle") for name in SWITCHES),
    *(("routed", True, name) for name in SWITCHES),
    *(("causal", False, name) for name in SWITCHES),
    *(("causal", False, f"{name}-adamw_torch") for name in SWITCHES),
    ("causal", False, "oss-adafactor"),
    ("first-block-frozen", False, "oss-accumulated"),
    ("causal", True, "oss-idle"),
}
"""For ``make test-longer``. The same jobs run accumulated, adafactor also needs whole parameters, and the causal job
has an idle worker, too. SDP, which also divides the gradients, runs with all of this."""
PARAMETERS = [pytest.param(case, marks=pytest.mark.longer if case in LONGER else ()) for case in CASES]
SAVED = {("causal", True, f"{name}-accumulated") for name in SWITCHES}
"""Cases whose checkpoints are compared with that of one process."""
READ = SAVED | {("causal", False, name) for name in LAYOUTS if "accumulated" in name}
"""Cases that other tests read."""
PRECISIONS = {
    f"{name}-{precision}": f"--mixed-precision {precision} {switch}"
    for name, switch in SWITCHES.items()
    for precision in ("bf16", "fp16")
}


def _all_runs(workers: Any, folder: str, cases: list[tuple[str, bool, str]], half: list[str]) -> dict[Any, Any]:
    """Train in each of two workers."""
    runs: dict[Any, Any] = {"gradient bytes": []}
    for case in cases:
        flags, _ = CASES[case]
        save = ("--save", f"{folder}/{case[2]}") if case in SAVED else ()
        with _gradients_seen(runs["gradient bytes"] if case == ("causal", False, "sdp-accumulated") else []):
            runs[case] = train(*case[:2], flags, *save)
    for name in half:
        runs[name] = train("causal", False, f"{STEPS} --micro-batch-size 2 {PRECISIONS[name]}")
    with mock.patch("rapidformer_templates.system.launch.is_worker", return_value=False):
        for name, switch in SWITCHES.items():
            runs["spoiled", name] = _spoiled(workers.rank, f"{STEPS} --micro-batch-size 2 {switch}")
        mixed = MixedTypesJob([*LAYOUTS["oss"].split(), "--lr", "1e-3"])
        with pytest.raises(RapidformerError, match="parameters of one type, this model has float32 and float64"):
            mixed.fit()
    return runs


@contextmanager
def _gradients_seen(held: list[int]) -> Iterator[None]:
    """Append the bytes of the gradients that SDP holds before each update."""
    from rapidformer_templates.switches.oss.engine import SDPEngine

    update = SDPEngine._update

    def spy(engine: Any) -> None:
        held.append(sum(p.grad.nbytes for p in engine.model.parameters() if p.grad is not None))
        update(engine)

    with mock.patch.object(SDPEngine, "_update", spy):
        yield


def _spoiled(rank: int, flags: str) -> bool:
    """Return whether the failing step leaves the weights unchanged."""
    job = SpoiledJob([*flags.split(), "--lr", "1e-3"])
    job.rank = rank
    with pytest.raises(NonFiniteLoss):
        job.fit()
    assert len(job.curve) == 2
    return all(torch.equal(a, b) for a, b in zip(job.before, job.model.parameters(), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, folder: Path) -> list[dict[Any, Any]]:
    """The runs by rank."""
    cases = sorted({*selected(request, "case"), *(("causal", False, n) for n in selected(request, "layout")), *READ})
    return run_in_workers(2, _all_runs, str(folder), cases, selected(request, "half"))


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[tuple[str, bool, str], Trained]:
    """The runs of one process by job, precision and flags. One of them has a checkpoint."""
    wanted = dict.fromkeys((job, double, flags) for (job, double, _), (_, flags) in CASES.items())
    saved = ("causal", True, ALONE)
    trained = {case: reference(*case) for case in wanted if case != saved}
    return trained | {saved: train(*saved, "--save", str(folder / "one"))}


@pytest.mark.distributed
@pytest.mark.parametrize("case", PARAMETERS, ids=lambda case: f"{case[0]}-{'fp64' if case[1] else 'fp32'}-{case[2]}")
def test_follows_one_process(case: tuple[str, bool, str], references: Any, runs: Any) -> None:
    job, double, _ = case
    expected = references[job, double, CASES[case][1]]
    for actual in (results[case] for results in runs):
        close = {"rtol": 1e-10 if double else 1e-5, "atol": 1e-12 if double else 1e-6}
        torch.testing.assert_close(torch.tensor(actual["curve"]), torch.tensor(expected["curve"]), **close)
        torch.testing.assert_close(torch.tensor(actual["evaluations"]), torch.tensor(expected["evaluations"]), **close)
        assert actual["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(
                actual["weights"][name], weight, **close, msg=lambda text, n=name: f"{n}: {text}"
            )


@pytest.mark.distributed
def test_the_references_learn_and_are_clipped(references: Any) -> None:
    for (job, _, flags), run in references.items():
        losses = [loss for loss, _ in run["curve"]]
        assert len(set(losses)) == len(losses), (job, flags)
        assert max(norm for _, norm in run["curve"]) > 2 * CLIP, (job, flags)


@pytest.mark.distributed
@pytest.mark.parametrize("half", by_default(["oss-fp16", "sdp-bf16"], PRECISIONS))
def test_half_precision_follows_one_process_of_that_precision(half: str, runs: Any) -> None:
    precision = half.rpartition("-")[2]
    expected = reference("causal", False, f"{ALONE} --mixed-precision {precision}")
    tolerance = {"bf16": 2**-8, "fp16": 2**-11}[precision]
    for actual in (results[half] for results in runs):
        torch.testing.assert_close(
            torch.tensor(actual["curve"]), torch.tensor(expected["curve"]), rtol=tolerance, atol=0
        )


@pytest.mark.distributed
@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.usefixtures("references", "runs")
def test_checkpoint_has_all_of_the_state_once_and_from_its_owner(name: str, folder: Path) -> None:
    checkpoint = folder / f"{name}-accumulated" / "checkpoints" / "step-5"
    index = json.loads((checkpoint / "index.json").read_text())["optimizer"]
    expected = Reader(folder / "one" / "checkpoints" / "step-5")
    assert index.keys() == expected.index["optimizer"].keys()
    assert {len(entry["boxes"]) for entry in index.values()} == {1}
    assert len({entry["boxes"][0][0] for entry in index.values()}) == 2  # files, one of each rank
    reader = Reader(checkpoint)
    for entry, shape in expected.names("optimizer").items():
        whole = ("optimizer", entry, (0,) * len(shape), shape)
        torch.testing.assert_close(reader.read(*whole), expected.read(*whole), rtol=1e-9, atol=1e-13)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", by_default([name for name in LAYOUTS if "accumulated" in name], LAYOUTS))
def test_each_rank_holds_its_share_of_the_state(layout: str, references: Any, runs: Any) -> None:
    whole = references["causal", False, ALONE]["summary"]["receipts"]["optimizer_state_bytes"]
    held = runs[0]["causal", False, layout]["summary"]["receipts"]["held_bytes_by_rank"]
    shares = [worker["optimizer_state_bytes"] for worker in held]
    assert sum(shares) == whole
    assert max(shares) < 0.6 * whole


@pytest.mark.distributed
def test_sdp_keeps_the_gradients_of_its_own_parameters_alone(references: Any, runs: Any) -> None:
    whole = references["causal", False, ALONE]["summary"]["receipts"]["parameter_bytes"]
    shares = [results["gradient bytes"][0] for results in runs]
    assert sum(shares) == whole
    assert max(shares) < 0.6 * whole


@pytest.mark.distributed
@pytest.mark.parametrize("name", SWITCHES)
def test_loss_that_is_not_finite_on_one_worker_stops_all_with_their_weights(name: str, runs: Any) -> None:
    assert [results["spoiled", name] for results in runs] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("name", SWITCHES)
def test_one_worker_runs_as_without_and_is_told(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--train-iters 4 --micro-batch-size 2 --global-batch-size 4"
    plain = reference("causal", False, flags)
    alone = train("causal", False, f"{flags} {SWITCHES[name]}")
    assert alone["curve"] == plain["curve"]
    assert all(torch.equal(alone["weights"][n], weight) for n, weight in plain["weights"].items())
    assert "one worker, so there is nothing to shard" in capsys.readouterr().err
