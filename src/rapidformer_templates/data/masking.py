"""Masking for masked language models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from rapidformer_templates.data.tokenizers import vocabulary_size
from rapidformer_templates.errors import DataError
from rapidformer_templates.targets import IGNORED


class MaskTokens:
    """Hide tokens of a sample, as BERT does (Devlin et al. 2019, section 3.1).

    Each token that is not special is chosen with the given probability, independently; a chosen one
    becomes the mask token in 80 % of cases, a random token in 10 % and stays itself in 10 %. Labels
    are the chosen tokens and -100 elsewhere; a short sample may have none.

    Args:
        tokenizer: says which tokens are special, and the mask token.
        probability: share of tokens that are chosen.

    Raises:
        DataError: the tokenizer has no mask token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, probability: float) -> None:
        if tokenizer.mask_token_id is None:
            raise DataError(
                "the tokenizer has no mask token", where="--task", hint="use the tokenizer of a masked language model"
            )
        if not 0 <= probability <= 1:
            raise DataError(
                f"a share of {probability:g} cannot be masked", where="--mask-prob", hint="choose a share from 0 to 1"
            )
        self.probability = probability
        self.mask_id = tokenizer.mask_token_id
        self.special = np.zeros(vocabulary_size(tokenizer), dtype=bool)
        self.special[tokenizer.all_special_ids] = True
        self.ordinary = np.setdiff1d(np.fromiter(tokenizer.get_vocab().values(), np.int64), tokenizer.all_special_ids)

    def __call__(self, sample: Mapping[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        original = np.asarray(sample["input_ids"])
        draws = generator.random((2, len(original)))
        chosen = (draws[0] < self.probability) & ~self.special[original]
        hidden = original.copy()
        hidden[chosen & (draws[1] < 0.8)] = self.mask_id
        replaced = chosen & (draws[1] >= 0.8) & (draws[1] < 0.9)
        hidden[replaced] = self.ordinary[generator.integers(len(self.ordinary), size=int(replaced.sum()))]
        return {**sample, "input_ids": hidden, "labels": np.where(chosen, original, IGNORED)}
