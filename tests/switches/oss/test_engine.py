"""OSS and OSS + SDP follow the one-process run, and each rank holds only its share."""

import gc
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rapidformer_templates.errors import NonFiniteLoss, RapidformerError
from rapidformer_templates.run.checkpoint.format import Reader
from tests.support.jobs import CausalJob, ClassJob
from tests.support.messages import Says
from tests.support.parity import EXACT, Trained, assert_close, assert_follows, observed, reference, train
from tests.support.selection import by_default
from tests.support.worker_pool import run_in_workers

pytest.importorskip("fairscale", reason="OSS and SDP need the fairscale extra")

pytestmark = pytest.mark.distributed

CLIP = 0.1
STEPS = f"--train-iters 5 --eval-interval 2 --global-batch-size 8 --clip-grad {CLIP} --weight-decay 0.1"
ALONE = f"{STEPS} --micro-batch-size 8"
OSS, SDP = "--oss-memory-optimization", "--oss-sdp-memory-optimization"
SWITCHES = {"oss": OSS, "sdp": SDP}
ACCUMULATED = f"{STEPS} --micro-batch-size 2"
IDLE = "--epochs 2 --weight-decay 0.1 --clip-grad 0.1 --global-batch-size 60 --micro-batch-size"
"""The last batch leaves a worker idle."""


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


CASES = [  # (job, double, flags of two workers, flags of the reference)
    ("causal", False, f"{ACCUMULATED} {OSS}", ALONE),
    ("causal", False, f"{ACCUMULATED} {SDP}", ALONE),
    ("half-frozen", False, f"{ACCUMULATED} {SDP}", ALONE),
    ("causal", False, f"{ACCUMULATED} {SDP} --optimizer adafactor", f"{ALONE} --optimizer adafactor"),
    ("causal", True, f"{IDLE} 30 {SDP}", f"{IDLE} 60"),
    ("classifier", True, f"{IDLE} 30 {OSS}", f"{IDLE} 60"),
    ("causal", False, f"{STEPS} --micro-batch-size 4 {OSS} --optimizer lamb", f"{ALONE} --optimizer lamb"),
]


@pytest.mark.parametrize(("job", "double", "flags", "alone"), by_default(CASES[:2], CASES))
def test_follows_one_process(job: str, double: bool, flags: str, alone: str) -> None:
    expected = reference(job, double, alone)
    for actual in observed(2, job, double, flags):
        assert_follows(actual, expected, *(EXACT if double else ()))
    losses = [loss for loss, _ in expected["curve"]]
    assert len(set(losses)) == len(losses)
    assert max(norm for _, norm in expected["curve"]) > 2 * CLIP


@pytest.mark.longer
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("switch", [OSS, SDP])
def test_half_precision_follows_one_process_of_that_precision(switch: str, precision: str) -> None:
    narrow = f"--mixed-precision {precision}"
    expected = reference("causal", False, f"{ALONE} {narrow}")
    tolerance = {"bf16": 2**-8, "fp16": 2**-11}[precision]
    for actual in observed(2, "causal", False, f"{ACCUMULATED} {narrow} {switch}"):
        assert_close(actual["curve"], expected["curve"], tolerance, 0)


def _saved(workers: Any, flags: str, folder: str) -> Trained:
    return train("causal", True, flags, "--save", folder)


@pytest.mark.parametrize("name", by_default(["sdp"], SWITCHES))
def test_checkpoint_has_all_of_the_state_once_and_from_its_owner(name: str, tmp_path: Path) -> None:
    expected_run = _saved(None, ALONE, str(tmp_path / "one"))
    for run in run_in_workers(2, _saved, f"{ACCUMULATED} {SWITCHES[name]}", str(tmp_path / "two")):
        assert_follows(run, expected_run, *EXACT)
    index = json.loads((tmp_path / "two/checkpoints/step-5/index.json").read_text())["optimizer"]
    expected = Reader(tmp_path / "one/checkpoints/step-5")
    assert index.keys() == expected.index["optimizer"].keys()
    assert {len(entry["boxes"]) for entry in index.values()} == {1}
    assert len({entry["boxes"][0][0] for entry in index.values()}) == 2  # files, one of each rank
    reader = Reader(tmp_path / "two/checkpoints/step-5")
    for entry, shape in expected.names("optimizer").items():
        whole = ("optimizer", entry, (0,) * len(shape), shape)
        torch.testing.assert_close(reader.read(*whole), expected.read(*whole), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("switch", SWITCHES.values())
def test_each_rank_holds_its_share_of_the_state(switch: str) -> None:
    whole = reference("causal", False, ALONE)["summary"]["receipts"]["optimizer_state_bytes"]
    run = observed(2, "causal", False, f"{ACCUMULATED} {switch}")[0]
    shares = [worker["optimizer_state_bytes"] for worker in run["summary"]["receipts"]["held_bytes_by_rank"]]
    assert sum(shares) == whole
    assert max(shares) < 0.6 * whole


def _gradients_before_each_update(workers: Any) -> list[int]:
    """Return the bytes of the gradients that SDP holds before each update."""
    from rapidformer_templates.switches.oss.engine import SDPEngine

    update, held = SDPEngine._update, list[int]()

    def spy(engine: Any) -> None:
        held.append(sum(p.grad.nbytes for p in engine.model.parameters() if p.grad is not None))
        update(engine)

    with mock.patch.object(SDPEngine, "_update", spy):
        train("causal", False, f"{ACCUMULATED} {SDP} --train-iters 1")
    return held


@pytest.mark.longer
def test_sdp_keeps_the_gradients_of_its_own_parameters_alone() -> None:
    whole = reference("causal", False, ALONE)["summary"]["receipts"]["parameter_bytes"]
    shares = [held[0] for held in run_in_workers(2, _gradients_before_each_update)]
    assert sum(shares) == whole
    assert max(shares) < 0.6 * whole


def _weights_held(workers: Any, switch: str) -> tuple[int, int]:
    """Return the bytes of the weights, and of all tensors that are alive before the first step."""
    gc.collect()
    others = {id(tensor) for tensor in gc.get_objects() if isinstance(tensor, torch.Tensor)}
    held: list[int] = []

    class Weighed(CausalJob):
        def on_train_start(self) -> None:
            gc.collect()
            new = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and id(t) not in others and not t.is_meta]
            owned = {s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in new)}
            held.append(sum(owned.values()))

    run = Weighed(f"--lr 1e-3 --train-iters 1 --global-batch-size 8 --micro-batch-size 4 --no-save {switch}".split())
    run.fit()
    return sum(p.nbytes for p in run.model.parameters()), held[0]


@pytest.mark.parametrize("switch", SWITCHES.values())
def test_weights_are_held_once_after_fairscale_has_moved_them(switch: str) -> None:
    for weights, held in run_in_workers(2, _weights_held, switch):
        assert weights <= held < 1.5 * weights


def _spoiled(workers: Any, switch: str) -> bool:
    """Return whether the failing step leaves the weights unchanged."""
    job = SpoiledJob([*f"{ACCUMULATED} {switch}".split(), "--lr", "1e-3"])
    job.rank = workers.rank
    with mock.patch("rapidformer_templates.system.launch.is_worker", return_value=False), pytest.raises(NonFiniteLoss):
        job.fit()
    assert len(job.curve) == 2
    return all(torch.equal(a, b) for a, b in zip(job.before, job.model.parameters(), strict=True))


@pytest.mark.parametrize("switch", by_default([SDP], SWITCHES.values()))
def test_loss_that_is_not_finite_on_one_worker_stops_all_with_their_weights(switch: str) -> None:
    assert run_in_workers(2, _spoiled, switch) == [True, True]


def _refused(workers: Any) -> RapidformerError:
    job = MixedTypesJob([*f"{ACCUMULATED} {OSS}".split(), "--lr", "1e-3"])
    with (
        mock.patch("rapidformer_templates.system.launch.is_worker", return_value=False),
        pytest.raises(RapidformerError) as error,
    ):
        job.fit()
    return error.value


def test_parameters_of_two_types_are_refused(says: Says) -> None:
    says.text(run_in_workers(2, _refused)[0].render())


@pytest.mark.slow
@pytest.mark.parametrize("name", by_default(["oss"], SWITCHES))
def test_one_worker_runs_as_without_and_is_told(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--train-iters 4 --micro-batch-size 2 --global-batch-size 4"
    plain = reference("causal", False, flags)
    alone = train("causal", False, f"{flags} {SWITCHES[name]}")
    assert_follows(alone, plain, 0, 0)
    assert "one worker, so there is nothing to shard" in capsys.readouterr().err
