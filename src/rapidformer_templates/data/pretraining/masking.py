"""Masking of single tokens or whole words for masked language models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from rapidformer_templates.data.targets import IGNORED
from rapidformer_templates.data.types import Sample
from rapidformer_templates.errors import DataError
from rapidformer_templates.models.model_files import vocabulary_size

BYTE_LEVEL_SPACES = ("Ġ", "Ċ", "ĉ", "č")
"""How byte-level vocabularies write a space, a new line, a tab and a carriage return."""


class MaskTokens:
    """Masks tokens of a sample, as BERT does (Devlin et al. 2019, section 3.1).

    Each token that is not special is chosen independently with the given probability. A chosen token becomes the mask
    token in 80 % of cases, a random token in 10 % and stays the same in 10 %. Labels are the chosen tokens, and -100
    elsewhere. A short sample may have none. With whole words, all tokens of a word are chosen, and masked, replaced or
    kept, together. The expected fraction is the same.

    Args:
        tokenizer: provides the special tokens and the mask token.
        probability: fraction of tokens that are chosen.
        whole_words: choose words instead of tokens.
        at_least_one: choose a random token (or word) if none was chosen in a sample, as BERT does.

    Raises:
        DataError: the tokenizer has no mask token, or does not mark where words start.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        probability: float,
        *,
        whole_words: bool = False,
        at_least_one: bool = False,
    ) -> None:
        if tokenizer.mask_token_id is None:
            raise DataError(
                "the tokenizer has no mask token", where="--task", hint="use the tokenizer of a masked language model"
            )
        if not 0 <= probability <= 1:
            raise DataError(
                f"a share of {probability:g} cannot be masked", where="--mask-prob", hint="choose a share from 0 to 1"
            )
        self.probability = probability
        self.at_least_one = at_least_one
        self.mask_id = tokenizer.mask_token_id
        self.special = np.zeros(vocabulary_size(tokenizer), dtype=bool)
        self.special[tokenizer.all_special_ids] = True
        self.ordinary = np.setdiff1d(np.fromiter(tokenizer.get_vocab().values(), np.int64), tokenizer.all_special_ids)
        self.starts = word_starts(tokenizer) if whole_words else None

    def __call__(self, sample: Sample, generator: np.random.Generator) -> dict[str, np.ndarray]:
        original = np.asarray(sample["input_ids"], dtype=np.int64)
        maskable = ~self.special[original]
        # Two draws per token or word: whether it is chosen, and how it is changed.
        if self.starts is None:
            draws = generator.random((2, len(original)))
        else:
            word = np.cumsum(self.starts[original])
            draws = generator.random((2, len(original) + 1))[:, word]
        chosen = (draws[0] < self.probability) & maskable
        if self.at_least_one and not chosen.any() and maskable.any():
            # The draws have the same distribution for all tokens, so the lowest belongs to a random one.
            chosen = maskable & (draws[0] == draws[0][maskable].min())
        hidden = original.copy()
        hidden[chosen & (draws[1] < 0.8)] = self.mask_id
        replaced = chosen & (draws[1] >= 0.8) & (draws[1] < 0.9)
        hidden[replaced] = self.ordinary[generator.integers(len(self.ordinary), size=int(replaced.sum()))]
        return {**sample, "input_ids": hidden, "labels": np.where(chosen, original, IGNORED)}


def word_starts(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Return for each token of the vocabulary whether a word starts with it: bool, shape (vocabulary size,).

    WordPiece marks tokens that continue a word (``##``). Byte-level and SentencePiece vocabularies mark tokens that
    follow a space (``Ġ``, ``▁``). Special tokens are always separate.

    Raises:
        DataError: the tokenizer marks neither.
    """
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    kinds = {part.get("type"): part for part in _parts([parts["pre_tokenizer"], parts["decoder"]])}
    continues = parts["model"].get("continuing_subword_prefix")
    spaces: tuple[str, ...] = ()
    if "ByteLevel" in kinds:
        spaces = BYTE_LEVEL_SPACES
    elif "Metaspace" in kinds:
        spaces = (kinds["Metaspace"]["replacement"],)
    if not continues and not spaces:
        hint = "leave out --whole-word-mask, or use a WordPiece, byte-level or SentencePiece tokenizer"
        raise DataError("the tokenizer does not say where words start", where="--whole-word-mask", hint=hint)
    starts = np.ones(vocabulary_size(tokenizer), dtype=bool)
    for token, index in tokenizer.get_vocab().items():
        starts[index] = not token.startswith(continues) if continues else token.startswith(spaces)
    starts[tokenizer.all_special_ids] = True
    return starts


def _parts(steps: list[dict[str, Any] | None]) -> Iterator[dict[str, Any]]:
    """Yield the steps of a pre-tokenizer or decoder, including those inside sequences."""
    for step in steps:
        if step is not None:
            yield step
            yield from _parts(step.get("pretokenizers", []) + step.get("decoders", []))


def check_mask_probability(share: float) -> None:
    """Raise a :class:`DataError` if ``--mask-prob`` leaves nothing to learn, or is not a fraction."""
    if not 0 < share <= 1:
        hint = "choose a share above 0 and up to 1, such as 0.15"
        raise DataError(f"a share of {share:g} cannot be masked", where="--mask-prob", hint=hint)


def check_short_probability(share: float) -> None:
    """Raise a :class:`DataError` if ``--short-seq-prob`` is not a fraction."""
    if not 0 <= share <= 1:
        raise DataError(f"{share:g} is not a share", where="--short-seq-prob", hint="choose a share from 0 to 1")
