"""Hidden tokens and T5's spans: their rates, their lengths, and the tokens that stay unchanged."""

import math
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AlbertTokenizer,
    AutoTokenizer,
    BertTokenizer,
    PreTrainedTokenizerFast,
    RobertaTokenizer,
    T5Tokenizer,
)

from rapidformer_templates.data.collate import IGNORED
from rapidformer_templates.data.pretraining.masking import (
    MaskTokens,
    SpanCorruption,
    SpanSizes,
    hidden_spans,
    random_parts,
    sentinels_of,
    span_sizes,
    word_starts,
)
from rapidformer_templates.data.tasks import load_task
from rapidformer_templates.data.tasks.pretraining import MaskWindows
from rapidformer_templates.errors import ConfigError, DataError
from rapidformer_templates.planning.data_rules import check_data_flags, sample_flags
from tests.support.messages import Says
from tests.support.texts import Configure, Load

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CLS, SEP, MASK = 2, 3, 4
PIECES = [f"w{i}" for i in range(100)] + [f"##p{i}" for i in range(100)]
WORD, PIECE = 5, 105
"""The first token that starts a word, and the first that continues one."""


@pytest.fixture(scope="module")
def pieces() -> BertTokenizer:
    return BertTokenizer(vocab={token: i for i, token in enumerate(SPECIAL + PIECES)})


def test_rates_of_masking(bert_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    token = tokenizer.convert_tokens_to_ids("cat")
    row = np.full(200_000, token, dtype=np.int32)
    masked = MaskTokens(tokenizer, 0.15)({"input_ids": row}, np.random.default_rng(0))
    ids, chosen = masked["input_ids"], masked["labels"] != IGNORED
    spread = 4 * np.sqrt(0.25 / len(row))  # at most four standard deviations
    assert abs(chosen.mean() - 0.15) < spread
    assert (masked["labels"][chosen] == token).all()
    assert (ids[~chosen] == token).all()
    wide = 4 * np.sqrt(0.25 / chosen.sum())
    hidden, kept = (ids[chosen] == tokenizer.mask_token_id), (ids[chosen] == token)
    random_share = 1 / (len(tokenizer) - len(tokenizer.all_special_ids))
    assert abs(hidden.mean() - 0.8) < wide
    assert abs(kept.mean() - 0.1 - 0.1 * random_share) < wide
    replaced = ids[chosen][~hidden & ~kept]
    assert not np.isin(replaced, tokenizer.all_special_ids).any()
    assert len(np.unique(replaced)) > 0.9 * (len(tokenizer) - len(tokenizer.all_special_ids))


def test_masking_depends_on_its_generator_only(bert_folder: Path) -> None:
    mask = MaskTokens(AutoTokenizer.from_pretrained(bert_folder), 0.5)
    sample = {"input_ids": np.arange(5, 60)}
    first, again, other = (mask(sample, np.random.default_rng(seed))["input_ids"].tolist() for seed in (1, 1, 2))
    assert first == again != other
    assert sample["input_ids"].tolist() == list(range(5, 60))


def test_short_windows_keep_their_ends(bert_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    row = np.arange(10, 40, dtype=np.uint16)
    cut = MaskWindows(MaskTokens(tokenizer, 0.0), (2, 3), 0.25)
    rows = [cut({"input_ids": row}, np.random.default_rng(i))["input_ids"] for i in range(2000)]
    lengths = np.asarray([len(r) for r in rows])
    assert all(r[0] == 2 and r[-1] == 3 for r in rows)
    assert set(lengths.tolist()) == set(range(3, 33))
    assert abs((lengths < 32).mean() - 0.25 * 29 / 30) < 0.04


# Whole words


def slow_words(row: list[int]) -> list[list[int]]:
    """Return the positions of each word, found token by token."""
    words: list[list[int]] = []
    open_word = False
    for place, token in enumerate(row):
        if token < WORD:
            open_word = False
        elif token >= PIECE and open_word:
            words[-1].append(place)
        else:  # a piece at the very beginning is a separate word, because the window begins inside it
            words.append([place])
            open_word = True
    return words


ROWS = st.lists(st.sampled_from([CLS, SEP, MASK, WORD, WORD + 1, PIECE, PIECE + 1]), min_size=1, max_size=30)


@settings(max_examples=100, deadline=None)
@given(row=ROWS, share=st.sampled_from([0.0, 0.15, 0.5, 1.0]), seed=st.integers(0, 1000), whole=st.booleans())
def test_the_tokens_of_a_word_share_its_fate(
    pieces: BertTokenizer, row: list[int], share: float, seed: int, whole: bool
) -> None:
    masked = MaskTokens(pieces, share, whole_words=whole)({"input_ids": row}, np.random.default_rng(seed))
    ids, labels = masked["input_ids"], masked["labels"]
    words = slow_words(row) if whole else [[place] for place, token in enumerate(row) if token >= WORD]
    for word in words:
        chosen = labels[word] != IGNORED
        assert chosen.all() or not chosen.any()
        assert not chosen.any() or labels[word].tolist() == [row[place] for place in word]
        hidden = ids[word] == MASK
        assert hidden.all() or not hidden.any()
        assert chosen.any() or ids[word].tolist() == [row[place] for place in word]
    others = sorted(set(range(len(row))) - {place for word in words for place in word})
    assert (labels[others] == IGNORED).all()
    assert ids[others].tolist() == [row[place] for place in others]
    if share in (0.0, 1.0):
        assert sum(len(word) for word in words) * share == (labels != IGNORED).sum()


def test_rates_of_whole_words(pieces: BertTokenizer) -> None:
    words, sizes = 60_000, np.random.default_rng(1).integers(1, 5, 60_000)
    firsts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    row = np.full(sizes.sum(), PIECE)
    row[firsts] = WORD
    masked = MaskTokens(pieces, 0.15, whole_words=True)({"input_ids": row}, np.random.default_rng(0))
    ids, chosen = masked["input_ids"], masked["labels"] != IGNORED
    # Words are independent. So the variance of the share of tokens equals that of a sum of word sizes.
    spread = np.sqrt(0.15 * 0.85 * (sizes**2).sum()) / sizes.sum()
    assert abs(chosen.mean() - 0.15) < 4 * spread
    picked = np.flatnonzero(chosen[firsts])
    assert abs(len(picked) / words - 0.15) < 4 * np.sqrt(0.15 * 0.85 / words)
    starts = firsts[picked]
    count, ordinary = len(picked), len(PIECES)
    assert abs((ids[starts] == MASK).mean() - 0.8) < 4 * np.sqrt(0.16 / count)
    assert abs((ids[starts] == WORD).mean() - 0.1 - 0.1 / ordinary) < 4 * np.sqrt(0.09 / count)
    # In a replaced word, each token is drawn separately.
    long = starts[sizes[picked] > 1]
    replaced = long[(ids[long] != MASK) & (ids[long] != WORD)]
    pairs = ids[replaced] * 1000 + ids[replaced + 1]
    assert len(np.unique(pairs)) > 0.9 * len(pairs)


def test_word_starts_of_a_byte_level_vocabulary() -> None:
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "Ġ", "Ġa", "b", "Ċ", "Ġb"]
    roberta = RobertaTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[("Ġ", "a"), ("Ġ", "b")])
    starts = word_starts(roberta)
    assert [token for token, start in zip(tokens, starts, strict=True) if start] == [*tokens[:5], "Ġ", "Ġa", "Ċ", "Ġb"]
    row = np.asarray([0, 5, 8, 7, 8, 8, 10, 2])  # <s> ab abb b </s>
    hidden = {
        tuple(np.flatnonzero(MaskTokens(roberta, 0.3, whole_words=True)({"input_ids": row}, generator)["labels"] >= 0))
        for generator in map(np.random.default_rng, range(200))
    }
    words = [(1, 2), (3, 4, 5), (6,)]
    assert hidden == {sum((w for i, w in enumerate(words) if choice >> i & 1), ()) for choice in range(8)}


def test_word_starts_of_a_sentencepiece_vocabulary() -> None:
    tokens = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]", "▁a", "b", "▁"]
    albert = AlbertTokenizer(vocab=[(token, -float(i)) for i, token in enumerate(tokens)])
    starts = word_starts(albert)
    ids = albert.convert_tokens_to_ids(tokens)
    assert [token for token, index in zip(tokens, ids, strict=True) if not starts[index]] == ["b"]


@pytest.mark.parametrize("whole_words", [False, True])
def test_at_least_one(pieces: BertTokenizer, whole_words: bool) -> None:
    mask = MaskTokens(pieces, 0.0, whole_words=whole_words, at_least_one=True)
    row = np.asarray([CLS, WORD, PIECE, WORD, WORD, PIECE, SEP])
    units = [(1, 2), (3,), (4, 5)] if whole_words else [(1,), (2,), (3,), (4,), (5,)]
    draws, share = 3000, 1 / len(units)
    chosen = [
        tuple(np.flatnonzero(mask({"input_ids": row}, np.random.default_rng(i))["labels"] != IGNORED).tolist())
        for i in range(draws)
    ]
    assert set(chosen) == set(units)
    for unit in units:
        assert abs(chosen.count(unit) / draws - share) < 4.5 * np.sqrt(share * (1 - share) / draws)
    alone = mask({"input_ids": row[[0, 6]]}, np.random.default_rng(0))
    assert (alone["labels"] == IGNORED).all()


# Flags


def test_masked_lm_masks_whole_words(load: Load, bert_folder: Path) -> None:
    rows = [{"text": "the treehouse sees"}] * 20
    data: Any = load("masked_lm", rows, whole_word_mask=True, mask_prob=0.5).build_data()
    words = AutoTokenizer.from_pretrained(bert_folder)("the treehouse sees").word_ids()
    assert words.count(1) == 4
    seen = set()
    for i in range(40):
        chosen = data.augment(data.train[0], np.random.default_rng(i))["labels"] != IGNORED
        seen.add(tuple(chosen.tolist()))
        for word in range(3):
            assert len({bool(c) for c, w in zip(chosen, words, strict=True) if w == word}) == 1
    assert len(seen) == 8


def test_what_cannot_be_masked_is_refused_before_the_start(
    load: Load, gpt_folder: Path, tmp_path: Path, says: Says
) -> None:
    tokenizer = Tokenizer(models.WordLevel({"[MASK]": 0, "[UNK]": 1, "[PAD]": 2, "cat": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"mask_token": "[MASK]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(tmp_path / "words")
    load("masked_lm", [{"text": "the cat"}], whole_word_mask=True).check()
    for flags in (
        {"tokenizer_path": str(tmp_path / "words"), "whole_word_mask": True},
        {"tokenizer_path": str(gpt_folder)},
        {"mask_prob": 0.0},
    ):
        with says(DataError):
            load("masked_lm", **flags).check()


def test_flags_that_a_task_does_not_read_are_refused(configure: Configure, says: Says) -> None:
    for task, flag, value in (
        ("causal_lm", "whole_word_mask", True), ("masked_lm", "short_seq_prob", 0.2),
        ("seq2seq_lm", "mean_span_length", 2.0), ("causal_lm", "keep_documents_apart", True),
    ):  # fmt: skip
        with says(ConfigError):
            load_task(configure(task=task, **{flag: value}))
    for task, flag, value in (
        ("pretraining", "data_dir", "there"), ("pretraining", "max_eval_samples", 8), ("causal_lm", "split", "9,1"),
        ("masked_lm", "label_column", "stars"), ("causal_lm", "pair_column", "other"),
    ):  # fmt: skip
        check_data_flags(configure(task=task))
        with says(ConfigError):
            check_data_flags(configure(task=task, **{flag: value}))


def test_a_checkpoint_remembers_how_samples_were_masked(configure: Configure) -> None:
    # Resuming compares these flags, because the resumed run must not mask differently.
    assert sample_flags(configure(task="masked_lm", mask_prob=0.3)) == {"--mask-prob": 0.3, "--whole-word-mask": False}
    assert "--mask-prob" not in sample_flags(configure(task="causal_lm"))


END, FIRST = 1, 200
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


def test_impossible_lengths(says: Says) -> None:
    for values in ((512, 0.0, 3.0), (512, 1.0, 3.0), (2, 0.15, 3.0), (512, 0.9, 1.0)):
        with says(DataError):
            span_sizes(*values)
    with says(DataError):
        SpanCorruption(span_sizes(512), SENTINELS[:27], END)


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


def test_sentinels_are_in_the_order_of_their_names(bert_folder: Path, says: Says) -> None:
    tokenizer = T5Tokenizer(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁a", -1.0)], extra_ids=12)
    names = [f"<extra_id_{i}>" for i in range(12)]
    assert sentinels_of(tokenizer).tolist() == tokenizer.convert_tokens_to_ids(names)
    with says(DataError):
        sentinels_of(AutoTokenizer.from_pretrained(bert_folder))
