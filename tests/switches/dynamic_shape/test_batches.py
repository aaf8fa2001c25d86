"""Dynamic shapes: the order, batches of exactly their shape, and a loss that padding cannot change."""

from __future__ import annotations

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
from rapidformer_templates.data.loader import load, train_requests
from rapidformer_templates.data.order import BatchRequest
from rapidformer_templates.data.shapes import Shape, choose_shapes
from rapidformer_templates.errors import CheckpointError, DataError
from rapidformer_templates.run.folder import read_metrics
from rapidformer_templates.switches.dynamic_shape.batches import DynamicOrder

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


def test_epochs_share_neither_batches_nor_their_order() -> None:
    order = _order(80, 1)
    first, second = (
        [order.step(epoch * order.steps_per_epoch + step)[0].tolist() for step in range(order.steps_per_epoch)]
        for epoch in range(2)
    )
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in second}
    longest = [[order.lengths[batch].max() for batch in epoch] for epoch in (first, second)]
    assert longest[0] != longest[1]
    assert all(epoch not in (sorted(epoch), sorted(epoch, reverse=True)) for epoch in longest)
    assert [order.step(step)[0].tolist() for step in range(3)] != [
        _order(80, 1, seed=6).step(step)[0].tolist() for step in range(3)
    ]


def test_fill_is_what_the_batches_of_an_epoch_hold() -> None:
    order = _order(80, 1)
    requests = [_requests(order, step, 1)[0][0] for step in range(order.steps_per_epoch)]
    padded = sum(request.shape.tokens for request in requests if request.shape)
    assert order.fill == pytest.approx(order.lengths.sum() / padded)


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


def test_what_cannot_be_padded_is_refused() -> None:
    row = {"input_ids": np.arange(6)}
    with pytest.raises(DataError, match="does not fit into a batch of length 5"):
        collate_to_shape(CausalCollate(0), [row], Shape(1, 5))
    for labels in ({}, {"labels": 0.5}):
        with pytest.raises(DataError, match="rows that do not count"):
            collate_to_shape(PadCollate({"input_ids": 0}), [row | labels], Shape(2, 8))
    with pytest.raises(DataError, match="a batch of 1 rows × 6 tokens, not of 2 × 8"):
        collate_to_shape(lambda rows, shape: {"input_ids": torch.ones(1, 6)}, [row], Shape(2, 8))
    for collate in (None, lambda rows: rows):
        with pytest.raises(DataError, match="cannot pad a batch to a shape"):
            check_pads_to_shape(collate)
    check_pads_to_shape(CausalCollate(0))


def _gpt(dtype: torch.dtype = torch.float64) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 50, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(config).to(dtype)


@pytest.mark.parametrize("mask", [False, True])
def test_gradient_of_a_step_is_that_of_its_samples_one_at_a_time(mask: bool) -> None:
    """This holds for any padding and any rows without a sample, and also without a padding mask."""
    samples = _samples()
    lengths = np.array([len(sample["input_ids"]) for sample in samples])
    order = DynamicOrder(lengths, choose_shapes(lengths, 60, 3, 8), 8, 5)

    def has_empty_rows(step: int) -> bool:
        requests = _requests(order, step, 1)[0]
        return any(r.shape is not None and len(r.samples) < r.shape.rows for r in requests if not r.idle)

    step = next(step for step in range(40) if has_empty_rows(step))
    data = Data(train=samples, collate=CausalCollate(0, mask=mask))
    model, reference = _gpt(), _gpt()
    requests = _requests(order, step, 1)[0]
    batches = list(load(samples, data, requests, workers=0, pin_memory=False))
    targets = sum(count_targets(batch.batch, shifted=True) for batch in batches if not batch.idle)
    for batch in batches:
        if not batch.idle:
            logits = model(**{k: v for k, v in batch.batch.items() if k != "labels"}).logits[:, :-1]
            wanted = batch.batch["labels"][:, 1:]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
            (loss / targets).backward()
    drawn = [torch.from_numpy(samples[i]["input_ids"]) for i in order.step(step)[0]]
    assert targets == sum(len(ids) - 1 for ids in drawn)
    for ids in drawn:
        logits = reference(ids[None]).logits[0, :-1]
        (torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum") / targets).backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("most", [1, 4, 10])
@torch._dynamo.config.patch(recompile_limit=10)
def test_a_compiler_sees_as_many_graphs_as_there_are_shapes(most: int) -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Mean(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(50, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embedding(ids).mean()

    samples = _samples(400)
    lengths = np.array([len(sample["input_ids"]) for sample in samples])
    order = DynamicOrder(lengths, choose_shapes(lengths, 60, most), 2, 5)
    assert len(order.shapes) == most
    model = torch.compile(Mean(), backend=backend, dynamic=False)
    requests = train_requests(order, 0, 2 * order.steps_per_epoch, rank=0, data_size=1, accumulation=2)
    seen = set()
    for batch in load(samples, Data(train=samples, collate=CausalCollate(0)), requests, workers=0, pin_memory=False):
        seen.add(batch.shape)
        model(batch.batch["input_ids"])
    assert len(graphs) == len(seen) == most


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
def test_a_run_tells_what_it_padded_and_goes_on_where_it_was(tmp_path: Path) -> None:
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

    with pytest.raises(CheckpointError, match=r"shapes was .*, is .*"):
        _train(tmp_path / "parts", "--train-iters", "12", "--resume", "--max-shapes", "2")
    static = "--global-batch-size 2 --lr 1e-3 --train-iters 12 --resume --save"
    with pytest.raises(CheckpointError, match="--data-iterator was dynamic-shape, is None"):
        Job([*static.split(), str(tmp_path / "parts")]).fit()


@pytest.mark.slow
def test_epochs_are_whole(tmp_path: Path) -> None:
    summary, lines = _train(tmp_path, "--epochs", "2", "--micro-batch-size", "2")
    assert summary["epochs"] == 2
    assert summary["samples"] == 2 * len(_samples())
    assert lines[len(lines) // 2 - 1]["samples"] == len(_samples())


def test_a_run_without_lengths_or_with_a_plain_collate_is_refused(tmp_path: Path) -> None:
    class Plain(Job):
        def build_data(self) -> Data:
            return Data(train=_samples(), collate=lambda rows: rows)

    class Lengthless(Job):
        def build_data(self) -> Data:
            return Data(train=[sample["input_ids"] for sample in _samples()], collate=CausalCollate(0))

    flags = ["--data-iterator", "dynamic-shape", "--lr", "1e-3", "--train-iters", "1", "--no-save"]
    with pytest.raises(DataError, match="cannot pad a batch to a shape"):
        Plain(flags).fit()
    with pytest.raises(DataError, match="there are no lengths for 41 training samples"):
        Lengthless(flags).fit()
