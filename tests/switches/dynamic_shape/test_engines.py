"""Dynamic shapes: two workers follow one, and one follows a loop by hand without padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rapidformer_templates.data.shapes import choose_shapes
from rapidformer_templates.switches.dynamic_shape.batches import DynamicOrder
from tests.support.jobs import CausalJob, _sequences
from tests.support.parity import EXACT, Trained, assert_close, assert_follows, reference, train
from tests.support.worker_pool import run_in_workers

CLIP = 0.1
DYNAMIC = f"--data-iterator dynamic-shape --tokens-per-batch 80 --max-shapes 3 --clip-grad {CLIP} --weight-decay 0.1"
# Steps of 4 batches, across the borders of epochs of 19.
STEPS = f"{DYNAMIC} --train-iters 6 --eval-interval 3 --global-batch-size 8 --micro-batch-size 2"
PAIRS = {
    ("pretrained-causal", "ddp"): STEPS,
    ("pretrained-causal", "fsdp"): f"{STEPS} --fsdp-memory-optimization --checkpoint-activations",
    ("pretrained-masked", "ddp"): STEPS,
    # Steps of 2 batches. In the last step of an epoch, a worker idles.
    ("pretrained-causal", "epochs"): f"{DYNAMIC} --epochs 2",
}


def _train_all(workers: Any) -> dict[tuple[str, str], Any]:
    return {(job, name): train(job, True, flags) for (job, name), flags in PAIRS.items()}


@pytest.fixture(scope="module")
def runs() -> dict[tuple[str, str], Trained]:
    return run_in_workers(2, _train_all)[0]


@pytest.mark.distributed
@pytest.mark.parametrize("job", ["pretrained-causal", "pretrained-masked"])
def test_two_workers_follow_one(job: str, runs: Any) -> None:
    expected = reference(job, True, STEPS)
    assert len({loss for loss, _ in expected["curve"]}) == 6
    for layout in ("ddp", "fsdp"):
        if (job, layout) not in runs:
            continue
        actual = runs[job, layout]
        assert_follows(actual, expected, *EXACT)
        same = ("samples", "tokens", "epochs")
        assert [actual["summary"][name] for name in same] == [expected["summary"][name] for name in same]
        measured, alone = actual["summary"]["receipts"], expected["summary"]["receipts"]
        for name in ("batch_shapes", "fill", "useful_tokens", "padded_tokens"):
            assert measured[name] == alone[name]
        assert len(measured["batch_shapes"]) == 3
        assert (measured["micro_steps"], alone["micro_steps"]) == (2, 4)


def _by_hand(order: DynamicOrder, steps: int) -> list[tuple[float, float]]:
    """Return the curve of the causal job, computed one sample at a time."""
    torch.manual_seed(1234)
    model = CausalJob(["--lr", "1e-3", "--train-iters", "1"]).make().double()
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    samples, curve = _sequences(), []
    for step in range(steps):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for index in order.step(step)[0]:
            ids, labels = (torch.from_numpy(samples[index][name]) for name in ("input_ids", "labels"))
            kept = labels[1:] != -100
            likelihood = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1)
            total = total - likelihood[kept, labels[1:][kept]].sum()
            count += int(kept.sum())
        optimizer.zero_grad()
        (total / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - step / steps)
        optimizer.step()
        curve.append((float(total.detach() / count), float(norm)))
    return curve


@pytest.mark.distributed
def test_workers_follow_a_loop_by_hand_where_one_of_them_idles(runs: Any) -> None:
    lengths = np.array([len(sample["input_ids"]) for sample in _sequences()])
    order = DynamicOrder(lengths, choose_shapes(lengths, 80, 3, 8), 2, 1234)
    assert order.batches % 2 == 1
    run = runs["pretrained-causal", "epochs"]
    assert_close(run["curve"], _by_hand(order, 2 * order.steps_per_epoch), *EXACT)
    assert run["summary"]["samples"] == 2 * len(lengths)
    assert run["summary"]["epochs"] == 2
