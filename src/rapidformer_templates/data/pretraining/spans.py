"""Span corruption, the pretraining objective of T5 (Raffel et al. 2020, section 3.1.4).

Spans of a window are masked, each by a different sentinel token. The target has each sentinel, followed by the tokens
that it replaces. The window length is chosen so that the inputs fill the sequence length. So every batch has the same
shape and no padding.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from rapidformer_templates.data.types import Sample
from rapidformer_templates.errors import DataError


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
        DataError: a value is out of range, or the masked fraction is so high that spans would touch.
    """
    if not 0 < noise_density < 1:
        hint = "choose a share between 0 and 1, such as 0.15"
        raise DataError(f"a share of {noise_density:g} cannot be hidden", where="--mask-prob", hint=hint)
    if mean_span_length < 1:
        message = f"spans of {mean_span_length:g} tokens on average are not possible"
        raise DataError(message, where="--mean-span-length", hint="choose at least 1")
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


class SpanCorruption:
    """Masks spans of a window: ``input_ids``, and ``labels`` for the decoder (transformers shifts them itself).

    Args:
        sizes: sizes of windows and spans. See :func:`span_sizes`.
        sentinels: the tokens that replace the first span, the second, …. See :func:`sentinels_of`.
        eos_token_id: the last token of inputs and labels.

    Raises:
        DataError: there are fewer sentinels than spans.
    """

    def __init__(self, sizes: SpanSizes, sentinels: np.ndarray, eos_token_id: int) -> None:
        if sizes.spans > len(sentinels):
            message = f"a window has {sizes.spans} spans, the tokenizer only {len(sentinels)} sentinel tokens"
            hint = "use a shorter --seq-length or a greater --mean-span-length"
            raise DataError(message, where=f"--seq-length {sizes.inputs}", hint=hint)
        self.sizes = sizes
        self.sentinels = sentinels
        self.end = [eos_token_id]

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
        return np.concatenate([shown[~hidden | starts], self.end])


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
