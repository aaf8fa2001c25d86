"""Masking of single tokens or whole words for masked language models, and of spans for T5.

Span corruption is the pretraining objective of T5 (Raffel et al. 2020, section 3.1.4). Spans of a window are masked,
each by a different sentinel token. The target has each sentinel, followed by the tokens that it replaces. The window
length is chosen so that the inputs fill the sequence length. So every batch has the same shape and no padding.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from rapidformer_templates.data.collate import IGNORED
from rapidformer_templates.data.types import Sample
from rapidformer_templates.errors import DataError
from rapidformer_templates.models.model_files import vocabulary_size

BYTE_LEVEL_SPACES = ("Ġ", "Ċ", "ĉ", "č")
"""How byte-level vocabularies write a space, a new line, a tab and a carriage return."""


@dataclass
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

    tokenizer: InitVar[PreTrainedTokenizerFast]
    probability: float
    _: KW_ONLY
    whole_words: InitVar[bool] = False
    at_least_one: bool = False

    def __post_init__(self, tokenizer: PreTrainedTokenizerFast, whole_words: bool) -> None:
        if tokenizer.mask_token_id is None:
            message = "the tokenizer has no mask token"
            raise DataError(message, where="--task", hint="use the tokenizer of a masked language model")
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


@dataclass(frozen=True)
class SpanSizes:
    """Lengths in tokens, the same for all samples.

    Attributes:
        window: number of raw tokens of a sample.
        noise: number of masked tokens among them.
        spans: number of masked spans.
    """

    window: int
    noise: int
    spans: int

    @property
    def inputs(self) -> int:
        """Length of the inputs: the visible tokens, a sentinel for each span, and the end token."""
        return self.window - self.noise + self.spans + 1

    @property
    def labels(self) -> int:
        """Length of the labels: the masked tokens, a sentinel before each span, and the end token."""
        return self.noise + self.spans + 1


def sizes_of_window(window: int, noise_density: float, mean_span_length: float) -> SpanSizes:
    """Return how many of ``window`` ≥ 2 tokens are masked, at least one and never all, and in how many spans."""
    noise = min(max(round(window * noise_density), 1), window - 1)
    return SpanSizes(window, noise, max(round(noise / mean_span_length), 1))


def span_sizes(seq_length: int, noise_density: float = 0.15, mean_span_length: float = 3.0) -> SpanSizes:
    """Return the longest window whose inputs have exactly ``seq_length`` tokens.

    Raises:
        DataError: the fraction is out of range or so high that spans would touch, or the sequence is too short.
    """
    if not 0 < noise_density < 1:
        hint = "choose a share between 0 and 1, such as 0.15"
        raise DataError(f"a share of {noise_density:g} cannot be hidden", where="--mask-prob", hint=hint)
    # One more raw token adds at most one input token. So the length is always reached, and bisection finds it.
    windows = range(2, int(seq_length / (1 - noise_density)) + 4)
    longer = bisect_right(
        windows, seq_length, key=lambda window: sizes_of_window(window, noise_density, mean_span_length).inputs
    )
    sizes = sizes_of_window(windows[max(longer - 1, 0)], noise_density, mean_span_length)
    shown = sizes.window - sizes.noise
    if sizes.spans > shown:
        message = f"{sizes.spans} spans do not fit between the {shown} tokens that are not hidden"
        raise DataError(message, where="--mask-prob", hint="choose a lower --mask-prob or a greater --mean-span-length")
    if sizes.inputs > seq_length:
        message = f"a sequence of {seq_length} tokens is too short to hide spans in"
        raise DataError(message, where="--seq-length", hint=f"use at least {sizes.inputs}")
    return sizes


def sentinels_of(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Return the ids of ``<extra_id_0>``, ``<extra_id_1>``, … in this order. In T5's vocabulary the ids decrease.

    Raises:
        DataError: the tokenizer has none.
    """
    numbers = {}
    for token, index in tokenizer.get_vocab().items():
        if match := re.fullmatch(r"<extra_id_(\d+)>", token):
            numbers[int(match[1])] = index
    if not numbers:
        hint = "use T5's tokenizer, or add <extra_id_0> to <extra_id_99> to its special tokens"
        raise DataError("the tokenizer has no sentinel tokens for spans", where="--tokenizer-type", hint=hint)
    return np.asarray([numbers[number] for number in sorted(numbers)], dtype=np.int64)


@dataclass(frozen=True)
class SpanCorruption:
    """Masks spans of a window: ``input_ids``, and ``labels`` for the decoder (transformers shifts them itself).

    Attributes:
        sizes: sizes of windows and spans. See :func:`span_sizes`.
        sentinels: the tokens that replace the first span, the second, …. See :func:`sentinels_of`.
        eos_token_id: the last token of inputs and labels.

    Raises:
        DataError: there are fewer sentinels than spans.
    """

    sizes: SpanSizes
    sentinels: np.ndarray
    eos_token_id: int

    def __post_init__(self) -> None:
        spans, sentinels = self.sizes.spans, len(self.sentinels)
        if spans > sentinels:
            message = f"a window has {spans} spans, the tokenizer only {sentinels} sentinel tokens"
            hint = "use a shorter --seq-length or a greater --mean-span-length"
            raise DataError(message, where=f"--seq-length {self.sizes.inputs}", hint=hint)

    def __call__(self, sample: Sample, generator: np.random.Generator) -> dict[str, np.ndarray]:
        tokens = sample["input_ids"]
        assert len(tokens) == self.sizes.window
        hidden = hidden_spans(self.sizes, generator)
        return {"input_ids": self._behind_sentinels(tokens, hidden), "labels": self._behind_sentinels(tokens, ~hidden)}

    def _behind_sentinels(self, tokens: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        """Replace each run of hidden tokens with the next sentinel, and append an end token."""
        starts = hidden.copy()
        starts[1:] &= ~hidden[:-1]
        shown = tokens.astype(np.int64)
        shown[starts] = self.sentinels[: self.sizes.spans]
        return np.concatenate([shown[~hidden | starts], [self.eos_token_id]])


def hidden_spans(sizes: SpanSizes, generator: np.random.Generator) -> np.ndarray:
    """Return which tokens are hidden, bool of shape (window,). Visible and hidden runs alternate.

    The last run is hidden.
    """
    shown = random_parts(sizes.window - sizes.noise, sizes.spans, generator)
    hidden = random_parts(sizes.noise, sizes.spans, generator)
    return np.repeat(np.arange(2 * sizes.spans) % 2 == 1, np.stack([shown, hidden], axis=1).ravel())


def random_parts(total: int, parts: int, generator: np.random.Generator) -> np.ndarray:
    """Draw ``parts`` positive numbers whose sum is ``total``, uniformly over all ordered choices."""
    borders = np.sort(generator.choice(total - 1, parts - 1, replace=False, shuffle=False)) + 1
    return np.diff(borders, prepend=0, append=total)
