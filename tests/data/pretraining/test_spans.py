"""T5's spans: lengths compared with a plain search, spans with a plain loop, and the window recovered from a sample."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration, T5Tokenizer

from rapidformer_templates.data.collate import IGNORED, PadCollate
from rapidformer_templates.data.pretraining.masking import (
    SpanCorruption,
    SpanSizes,
    hidden_spans,
    random_parts,
    sentinels_of,
    span_sizes,
)
from rapidformer_templates.errors import DataError

PAD, END, FIRST = 0, 1, 200
SENTINELS = np.arange(199, 99, -1)
LENGTHS = st.tuples(st.integers(8, 300), st.floats(0.02, 0.45), st.floats(1, 8))


def window_of(sizes: SpanSizes) -> np.ndarray:
    """Return tokens that show their position."""
    return (FIRST + np.arange(sizes.window)).astype(np.uint16)


def corrupted(sizes: SpanSizes, seed: int) -> dict[str, np.ndarray]:
    corrupt = SpanCorruption(sizes, SENTINELS, END)
    return corrupt({"input_ids": window_of(sizes)}, np.random.default_rng(seed))


def slow_sizes(seq_length: int, density: float, mean: float) -> tuple[int, int, int, int]:
    """Return (window, noise, spans, length of labels), by trying one window after another."""
    best = None
    for window in range(2, 3 * seq_length):
        noise = min(max(int(np.round(window * density)), 1), window - 1)
        spans = max(int(np.round(noise / mean)), 1)
        if window - noise + spans + 1 == seq_length:
            best = window, noise, spans, noise + spans + 1
    assert best
    return best


@settings(max_examples=80, deadline=None)
@given(LENGTHS)
def test_inputs_have_exactly_the_sequence_length(values: tuple[int, float, float]) -> None:
    sizes = span_sizes(*values)
    assert sizes.inputs == values[0]
    assert (sizes.window, sizes.noise, sizes.spans, sizes.labels) == slow_sizes(*values)


def test_lengths_of_the_paper() -> None:
    # For 512 tokens, 15 % and spans of 3, T5 trains on targets of 114 tokens.
    sizes = span_sizes(512)
    assert (sizes.window, sizes.inputs, sizes.labels) == (568, 512, 114)


@pytest.mark.parametrize(
    ("values", "where", "message"),
    [
        ((512, 0.0, 3.0), "--mask-prob", "share of 0 cannot"),
        ((512, 1.0, 3.0), "--mask-prob", "share of 1 cannot"),
        ((512, 0.15, 0.5), "--mean-span-length", "spans of 0.5 tokens"),
        ((2, 0.15, 3.0), "--seq-length", "too short"),
        ((512, 0.9, 1.0), "--mask-prob", "do not fit between"),
    ],
)
def test_impossible_lengths(values: tuple[int, float, float], where: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        span_sizes(*values)
    assert error.value.where == where
    assert error.value.hint


def slow_corruption(tokens: list[int], hidden: list[bool]) -> tuple[list[int], list[int]]:
    """Return inputs and labels, computed token by token."""
    inputs: list[int] = []
    labels: list[int] = []
    spans, before = 0, False
    for token, is_hidden in zip(tokens, hidden, strict=True):
        if is_hidden and not before:
            inputs.append(int(SENTINELS[spans]))
            labels.append(int(SENTINELS[spans]))
            spans += 1
        (labels if is_hidden else inputs).append(token)
        before = is_hidden
    return [*inputs, END], [*labels, END]


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(0, 20))
def test_spans_are_those_of_a_plain_loop(values: tuple[int, float, float], seed: int) -> None:
    sizes = span_sizes(*values)
    if sizes.spans > len(SENTINELS):
        return
    hidden = hidden_spans(sizes, np.random.default_rng(seed))
    runs = np.flatnonzero(np.diff(hidden.astype(int), prepend=0) == 1)
    assert (hidden.sum(), len(runs)) == (sizes.noise, sizes.spans)
    assert not hidden[0]
    inputs, labels = slow_corruption(window_of(sizes).tolist(), hidden.tolist())
    sample = corrupted(sizes, seed)
    assert sample["input_ids"].tolist() == inputs
    assert sample["labels"].tolist() == labels


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(0, 20))
def test_inputs_and_labels_give_the_window_back(values: tuple[int, float, float], seed: int) -> None:
    sizes = span_sizes(*values)
    if sizes.spans > len(SENTINELS):
        return
    sample = corrupted(sizes, seed)
    assert len(sample["input_ids"]) == values[0]
    assert len(sample["labels"]) == sizes.labels
    assert sample["input_ids"][-1] == sample["labels"][-1] == END
    spans: dict[int, list[int]] = {}
    for token in sample["labels"][:-1].tolist():
        if token < FIRST:
            spans[sentinel := token] = []
        else:
            spans[sentinel].append(token)
    assert list(spans) == SENTINELS[: sizes.spans].tolist()
    restored: list[int] = []
    for token in sample["input_ids"][:-1].tolist():
        restored += spans.pop(token) if token < FIRST else [token]
    assert restored == window_of(sizes).tolist()
    assert not spans


@pytest.mark.parametrize(("total", "parts"), [(6, 3), (5, 5), (7, 1), (6, 2)])
def test_all_ways_to_part_are_equally_likely(total: int, parts: int) -> None:
    ways = [way for way in product(range(1, total + 1), repeat=parts) if sum(way) == total]
    generator, draws = np.random.default_rng(11), 6000
    counts = Counter(tuple(random_parts(total, parts, generator).tolist()) for _ in range(draws))
    share = 1 / len(ways)
    for way in ways:
        assert abs(counts[way] / draws - share) <= 4.5 * math.sqrt(share * (1 - share) / draws)
    assert set(counts) == set(ways)


def test_hidden_tokens_are_spread_over_the_window() -> None:
    sizes, draws = SpanSizes(window=20, noise=6, spans=2), 4000
    seen = np.stack([hidden_spans(sizes, np.random.default_rng((1, i))) for i in range(draws)])
    # By enumeration: all ways to split the visible and the hidden tokens are equally likely.
    ways = [np.repeat([False, True, False, True], [a, b, 14 - a, 6 - b]) for a, b in product(range(1, 14), range(1, 6))]
    shares = np.mean(ways, axis=0)
    assert (np.abs(seen.mean(axis=0) - shares) <= 4.5 * np.sqrt(shares * (1 - shares) / draws)).all()


def test_sentinels_are_in_the_order_of_their_names(bert_folder: Path) -> None:
    tokenizer = T5Tokenizer(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁a", -1.0)], extra_ids=12)
    names = [f"<extra_id_{i}>" for i in range(12)]
    assert sentinels_of(tokenizer).tolist() == tokenizer.convert_tokens_to_ids(names)
    with pytest.raises(DataError, match="no sentinel tokens") as error:
        sentinels_of(AutoTokenizer.from_pretrained(bert_folder))
    assert "<extra_id_0>" in str(error.value.hint)


def test_too_few_sentinels() -> None:
    sizes = span_sizes(512)
    with pytest.raises(DataError, match="28 spans, the tokenizer only 27") as error:
        SpanCorruption(sizes, SENTINELS[:27], END)
    assert error.value.where == "--seq-length 512"


def test_t5_takes_the_batches_and_learns_from_them() -> None:
    torch.manual_seed(0)
    sizes = span_sizes(32)
    batch = PadCollate({"input_ids": PAD, "labels": IGNORED}, mask=False)([corrupted(sizes, seed) for seed in range(3)])
    assert batch["input_ids"].shape == (3, 32)
    assert batch["labels"].shape == (3, sizes.labels)
    assert not (batch["labels"] == IGNORED).any()
    config = T5Config(
        vocab_size=FIRST + sizes.window, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=PAD, pad_token_id=PAD, eos_token_id=END,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(8):
        loss = model(**batch).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.7 * losses[0]
