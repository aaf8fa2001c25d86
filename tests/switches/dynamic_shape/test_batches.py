"""Dynamic shapes: the order, batches of exactly their shape, and a loss that padding cannot change."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer_templates import Data, Pretrainer
from rapidformer_templates.data.collate import (
    IGNORED,
    CausalCollate,
    PadCollate,
    check_pads_to_shape,
    collate_to_shape,
    count_targets,
)
from rapidformer_templates.data.loader import train_requests
from rapidformer_templates.data.order import BatchRequest
from rapidformer_templates.data.shapes import Shape, choose_shapes
from rapidformer_templates.errors import CheckpointError, DataError
from rapidformer_templates.run.folder import read_metrics
from rapidformer_templates.switches.dynamic_shape.batches import DynamicOrder
from tests.support.jobs import CausalJob, _sequences
from tests.support.messages import Says
from tests.support.parity import EXACT, assert_close, observed

pytestmark = pytest.mark.usefixtures("offline")

SIZES = st.integers(1, 80)
WORKERS = st.integers(1, 8)
ACCUMULATION = st.integers(1, 3)


def _order(size: int, micro_batches: int, seed: int = 5, most: int = 4) -> DynamicOrder:
    lengths = np.random.default_rng(size).lognormal(2, 0.8, size).astype(np.int64)  # an empty sample now and then
    budget = 3 * max(1, int(lengths.max()))
    return DynamicOrder(lengths, choose_shapes(lengths, budget, most, 2), micro_batches, seed)


def _requests(order: DynamicOrder, step: int, workers: int) -> list[list[BatchRequest]]:
    """Return the requests of a step by rank."""
    each = order.micro_batches // workers
    return [
        list(train_requests(order, step, step + 1, rank=rank, data_size=workers, accumulation=each))
        for rank in range(workers)
    ]


@given(SIZES, WORKERS, ACCUMULATION, st.integers(0, 30))
@settings(max_examples=150, deadline=None)
def test_workers_share_what_one_worker_would_take(size: int, workers: int, each: int, step: int) -> None:
    micro_batches = workers * each
    alone = _requests(_order(size, micro_batches), step, 1)[0]
    shared = _requests(_order(size, micro_batches), step, workers)
    assert [len(requests) for requests in shared] == [each] * workers
    dealt = [shared[rank][number] for number in range(each) for rank in range(workers)]
    assert dealt == alone
    order = _order(size, micro_batches)
    busy = [request for request in dealt if not request.idle]
    samples, places = order.step(step)
    assert [sample for request in busy for sample in request.samples] == samples.tolist()
    assert [place for request in busy for place in request.positions] == places.tolist()
    for request in dealt:
        assert request.shape in order.shapes
        assert request.shape is not None
        assert 1 <= len(request.samples) <= request.shape.rows
        assert request.tokens == order.lengths[request.samples].sum()
        assert order.lengths[request.samples].max() <= request.shape.length
    lengths = [request.shape.length for request in busy if request.shape]
    assert lengths == sorted(lengths, reverse=True)


@given(SIZES, st.integers(1, 12), st.integers(0, 60))
@settings(max_examples=80, deadline=None)
def test_seeking_gives_the_same_step_as_walking(size: int, micro_batches: int, step: int) -> None:
    walked = _order(size, micro_batches)
    for earlier in range(step):
        walked.step(earlier)
    assert _requests(walked, step, 1) == _requests(_order(size, micro_batches), step, 1)


@given(SIZES, st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_steps_of_an_epoch_differ_by_one_batch_at_most(size: int, micro_batches: int) -> None:
    order = _order(size, micro_batches)
    steps = [_requests(order, step, 1)[0] for step in range(order.steps_per_epoch)]
    busy = [sum(not request.idle for request in requests) for requests in steps]
    assert all(len(requests) == micro_batches for requests in steps)
    assert sum(busy) == order.batches
    assert min(busy) >= 1
    assert max(busy) - min(busy) <= 1


# Batches of exactly their shape.


def _samples(count: int = 41) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(3)
    return [{"input_ids": draw.integers(1, 50, draw.integers(2, 25))} for _ in range(count)]


def test_rows_beyond_the_samples_count_for_nothing() -> None:
    rows = [
        {"input_ids": np.array([4, 5, 6]), "labels": np.array([4, IGNORED, 6])},
        {"input_ids": np.array([7]), "labels": np.array([7])},
    ]
    shape = Shape(4, 5)
    batch = collate_to_shape(PadCollate({"input_ids": 0, "labels": IGNORED}), rows, shape)
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(batch, (4, 5))
    assert batch["labels"][:2].tolist() == [[4, IGNORED, 6, IGNORED, IGNORED], [7] + [IGNORED] * 4]
    assert (batch["labels"][2:] == IGNORED).all()
    assert batch["attention_mask"].sum(1).min() >= 1  # a row without a visible token is NaN for some kernels
    causal = collate_to_shape(CausalCollate(0), rows, shape)
    assert count_targets(causal, shifted=True) == count_targets(CausalCollate(0)(rows), shifted=True) == 2
    classes = collate_to_shape(PadCollate({"input_ids": 0}), [{"input_ids": np.array([4]), "labels": 2}], shape)
    assert classes["labels"].tolist() == [2, IGNORED, IGNORED, IGNORED]


def test_what_cannot_be_padded_is_refused(says: Says) -> None:
    row, pads = {"input_ids": np.arange(6)}, PadCollate({"input_ids": 0})
    with says(DataError):
        collate_to_shape(CausalCollate(0), [row], Shape(1, 5))
    for labels in ({}, {"labels": 0.5}):
        with says(DataError):
            collate_to_shape(pads, [row | labels], Shape(2, 8))
    with says(DataError):
        collate_to_shape(lambda rows, shape: {"input_ids": torch.ones(1, 6)}, [row], Shape(2, 8))
    for collate in (None, lambda rows: rows):
        with says(DataError):
            check_pads_to_shape(collate)
    check_pads_to_shape(CausalCollate(0))


def _gpt(dtype: torch.dtype = torch.float64) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 50, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(config).to(dtype)


# Whole runs.


class Job(Pretrainer):
    def build_data(self) -> Data:
        return Data(train=_samples(), valid=_samples(7), collate=CausalCollate(0))

    def build_model(self) -> torch.nn.Module:
        return _gpt(torch.float32)


def _train(folder: Path, *flags: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    dynamic = "--data-iterator dynamic-shape --tokens-per-batch 60 --max-shapes 3 --global-batch-size 2 --lr 1e-3"
    template = Job([*dynamic.split(), "--log-interval", "1", "--save", str(folder), "--device", "cpu", *flags])
    summary = template.fit()
    lines = read_metrics(folder / "metrics.jsonl")
    wanted = ("step", "epoch", "loss", "grad_norm", "samples", "tokens")
    return summary, [{name: line[name] for name in wanted} for line in lines if "loss" in line]


@pytest.mark.slow
def test_a_run_tells_what_it_padded_and_goes_on_where_it_was(tmp_path: Path, says: Says) -> None:
    summary, whole = _train(tmp_path / "whole", "--train-iters", "9")
    receipts = summary["receipts"]
    assert 1 <= len(receipts["batch_shapes"]) <= 3
    assert all(rows == 60 // length for rows, length in receipts["batch_shapes"])
    assert receipts["useful_tokens"] == summary["tokens"] == whole[-1]["tokens"]
    assert receipts["fill"] == pytest.approx(receipts["useful_tokens"] / receipts["padded_tokens"], abs=1e-6)
    plan = json.loads((tmp_path / "whole/plan.json").read_text())
    assert any("up to 60 tokens, at most 3 shapes" in note for note in plan["notes"])
    lengths = [len(sample["input_ids"]) for sample in _samples()]
    order = DynamicOrder(np.array(lengths), choose_shapes(np.array(lengths), 60, 3, 8), 2, 1234)
    consumed = np.concatenate([order.step(step)[0] for step in range(9)])
    assert summary["samples"] == len(consumed)
    assert summary["tokens"] == sum(lengths[i] for i in consumed)

    _train(tmp_path / "parts", "--train-iters", "9", "--save-interval", "4", "--keep-checkpoints", "9")
    for later in (tmp_path / "parts/checkpoints").glob("step-*"):
        if later.name != "step-4":
            later.rename(tmp_path / later.name)
    assert _train(tmp_path / "parts", "--train-iters", "9", "--resume")[1] == whole

    with says(CheckpointError):
        _train(tmp_path / "parts", "--train-iters", "12", "--resume", "--max-shapes", "2")
    static = "--global-batch-size 2 --lr 1e-3 --train-iters 12 --resume --save"
    with says(CheckpointError):
        Job([*static.split(), str(tmp_path / "parts")]).fit()


def test_a_run_without_lengths_or_with_a_plain_collate_is_refused(says: Says) -> None:
    class Plain(Job):
        def build_data(self) -> Data:
            return Data(train=_samples(), collate=lambda rows: rows)

    class Lengthless(Job):
        def build_data(self) -> Data:
            return Data(train=[sample["input_ids"] for sample in _samples()], collate=CausalCollate(0))

    flags = ["--data-iterator", "dynamic-shape", "--lr", "1e-3", "--train-iters", "1", "--no-save"]
    for kind in (Plain, Lengthless):
        with says(DataError):
            kind(flags).fit()


# Engines.

CLIP = 0.1
DYNAMIC = f"--data-iterator dynamic-shape --tokens-per-batch 80 --max-shapes 3 --clip-grad {CLIP} --weight-decay 0.1"
# Steps of 4 batches, across the borders of epochs of 19.


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
def test_workers_follow_a_loop_by_hand_where_one_of_them_idles() -> None:
    lengths = np.array([len(sample["input_ids"]) for sample in _sequences()])
    order = DynamicOrder(lengths, choose_shapes(lengths, 80, 3, 8), 2, 1234)
    assert order.batches % 2 == 1
    run = observed(2, "pretrained-causal", True, f"{DYNAMIC} --epochs 2")[0]  # steps of 2 batches
    assert_close(run["curve"], _by_hand(order, 2 * order.steps_per_epoch), *EXACT)
    assert run["summary"]["samples"] == 2 * len(lengths)
    assert run["summary"]["epochs"] == 2
