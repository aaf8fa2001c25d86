"""The rates of masking, and the tokens that it leaves unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AlbertTokenizer, AutoTokenizer, BertTokenizer, PreTrainedTokenizerFast, RobertaTokenizer

from rapidformer_templates.data.collate import IGNORED
from rapidformer_templates.data.pretraining.masking import MaskTokens, word_starts
from rapidformer_templates.data.pretraining.objectives import MaskWindows
from rapidformer_templates.data.tasks import load_task
from rapidformer_templates.errors import ConfigError, DataError
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.data_rules import check_data_flags, sample_flags
from tests.support.texts import TINY, write_jsonl

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


def test_special_tokens_are_never_masked(bert_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    row = np.asarray(tokenizer("the cat sees")["input_ids"] + [tokenizer.pad_token_id, tokenizer.mask_token_id])
    special = np.isin(row, tokenizer.all_special_ids)
    masked = MaskTokens(tokenizer, 1.0)({"input_ids": row}, np.random.default_rng(0))
    assert (masked["labels"][special] == IGNORED).all()
    assert (masked["input_ids"][special] == row[special]).all()
    assert (masked["labels"][~special] == row[~special]).all()


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


def test_no_mask_token(gpt_folder: Path, configure: Callable[..., RunConfig]) -> None:
    with pytest.raises(DataError, match="no mask token"):
        MaskTokens(AutoTokenizer.from_pretrained(gpt_folder), 0.15)


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
@given(row=ROWS, share=st.sampled_from([0.0, 0.15, 0.5, 1.0]), seed=st.integers(0, 1000))
def test_the_tokens_of_a_word_share_its_fate(pieces: BertTokenizer, row: list[int], share: float, seed: int) -> None:
    masked = MaskTokens(pieces, share, whole_words=True)({"input_ids": row}, np.random.default_rng(seed))
    ids, labels = masked["input_ids"], masked["labels"]
    words = slow_words(row)
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


def test_a_vocabulary_without_word_starts_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel({"[MASK]": 0, "[UNK]": 1, "cat": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="[MASK]", unk_token="[UNK]")
    MaskTokens(fast, 0.15)
    with pytest.raises(DataError, match="does not say where words start") as error:
        MaskTokens(fast, 0.15, whole_words=True)
    assert error.value.where == "--whole-word-mask"


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


def test_small_token_types_are_enough(pieces: BertTokenizer) -> None:
    row = np.arange(WORD, 60, dtype=np.uint16)
    small, large = (
        MaskTokens(pieces, 0.5)({"input_ids": r}, np.random.default_rng(0)) for r in (row, row.astype(np.int64))
    )
    assert np.array_equal(small["labels"], large["labels"])
    assert np.array_equal(small["input_ids"], large["input_ids"])
    assert (small["labels"] == IGNORED).any()


# Flags


Configure = Callable[..., RunConfig]


def test_masked_lm_masks_whole_words(configure: Configure, bert_folder: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"text": "the treehouse sees"}] * 20)
    flags = {"task": "masked_lm", "data_dir": str(tmp_path), "model_type": "bert", "tokenizer_path": str(bert_folder)}
    data = load_task(configure(**flags, **TINY, whole_word_mask=True, mask_prob=0.5)).build_data()
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    words = tokenizer("the treehouse sees").word_ids()
    assert words.count(1) == 4
    assert data.augment is not None
    assert data.train is not None
    seen = set()
    for i in range(40):
        chosen = data.augment(data.train[0], np.random.default_rng(i))["labels"] != IGNORED
        seen.add(tuple(chosen.tolist()))
        for word in range(3):
            assert len({bool(c) for c, w in zip(chosen, words, strict=True) if w == word}) == 1
    assert len(seen) == 8


def test_a_tokenizer_without_word_starts_is_refused_before_the_start(
    configure: Configure, tmp_path: Path, bert_folder: Path
) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"text": "the cat"}])
    tokenizer = Tokenizer(models.WordLevel({"[MASK]": 0, "[UNK]": 1, "[PAD]": 2, "cat": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, mask_token="[MASK]", unk_token="[UNK]", pad_token="[PAD]"
    )
    fast.save_pretrained(tmp_path / "words")
    flags = {"task": "masked_lm", "data_dir": str(tmp_path), "model_type": "bert", **TINY}
    load_task(configure(**flags, tokenizer_path=str(bert_folder), whole_word_mask=True)).check()
    with pytest.raises(DataError, match="where words start"):
        load_task(configure(**flags, tokenizer_path=str(tmp_path / "words"), whole_word_mask=True)).check()


@pytest.mark.parametrize(
    ("task", "flag", "value"),
    [
        ("causal_lm", "whole_word_mask", True),
        ("sequence_classification", "mask_prob", 0.2),
        ("masked_lm", "short_seq_prob", 0.2),
        ("seq2seq_lm", "mean_span_length", 2.0),
        ("causal_lm", "keep_documents_apart", True),
    ],
)
def test_flags_of_other_tasks_are_refused(configure: Configure, task: str, flag: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{task} does not use --{flag.replace('_', '-')}"):
        load_task(configure(task=task, **{flag: value}))


@pytest.mark.parametrize(
    ("task", "flag", "value"),
    [
        ("pretraining", "data_dir", "there"),
        ("pretraining", "label_column", "stars"),
        ("pretraining", "max_eval_samples", 8),
        ("causal_lm", "data_path", ("corpus.txt",)),
        ("causal_lm", "split", "9,1"),
        ("masked_lm", "label_column", "stars"),
        ("causal_lm", "pair_column", "other"),
    ],
)
def test_data_flags_that_a_task_does_not_read_are_refused(
    configure: Configure, task: str, flag: str, value: object
) -> None:
    with pytest.raises(ConfigError, match=f"{task} does not use --{flag.replace('_', '-')}"):
        check_data_flags(configure(task=task, **{flag: value}))
    check_data_flags(configure(task=task))


def test_a_run_that_hides_nothing_is_refused(configure: Configure, bert_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a cat\n")
    flags = {"model_type": "bert", "tokenizer_path": str(bert_folder), "mask_prob": 0.0, **TINY}
    with pytest.raises(DataError, match="a share of 0 cannot be masked"):
        load_task(configure(task="pretraining", data_path=(str(tmp_path / "train.txt"),), **flags)).check()


def test_a_checkpoint_remembers_how_samples_were_masked(configure: Configure) -> None:
    # Resuming compares these flags, because the resumed run must not mask differently.
    assert sample_flags(configure(task="masked_lm", mask_prob=0.3)) == {"--mask-prob": 0.3, "--whole-word-mask": False}
    assert "--mask-prob" not in sample_flags(configure(task="causal_lm"))
