"""The masking's rates, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from rapidformer_templates.config import RunConfig
from rapidformer_templates.data.masking import MaskTokens
from rapidformer_templates.data.tasks.pretraining import MaskWindows
from rapidformer_templates.errors import DataError
from rapidformer_templates.targets import IGNORED


def test_rates_of_masking(bert_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    token = tokenizer.convert_tokens_to_ids("cat")
    row = np.full(200_000, token, dtype=np.int32)
    masked = MaskTokens(tokenizer, 0.15)({"input_ids": row}, np.random.default_rng(0))
    ids, chosen = masked["input_ids"], masked["labels"] != IGNORED
    spread = 4 * np.sqrt(0.25 / len(row))  # four standard deviations at most
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
