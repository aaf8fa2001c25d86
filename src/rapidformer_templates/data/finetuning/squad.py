"""Extractive question answering: reads answers, finds them in logits and scores them."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rapidformer_templates.data.finetuning.tables import DataPart, part_of
from rapidformer_templates.data.text.files import Row
from rapidformer_templates.errors import DataError

MAX_ANSWER_TOKENS = 30
"""Maximum length of a predicted answer, as in BERT's SQuAD setting."""


@dataclass(frozen=True)
class QuestionExample:
    """A question about a context. ``answers`` are (text, first character), empty if the question has no answer."""

    question: str
    context: str
    answers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Feature:
    """A window of an example's context.

    Attributes:
        example: index of the example.
        offsets: start and end character of each token of the context, -1 for other tokens. Shape (tokens, 2). Token 0,
            which is never part of the context, means "no answer".
    """

    example: int
    offsets: np.ndarray


@dataclass(frozen=True)
class Candidates:
    """The best starts and ends of a feature, with their scores."""

    starts: np.ndarray
    start_scores: np.ndarray
    ends: np.ndarray
    end_scores: np.ndarray
    null_score: float


def flattened(part: DataPart) -> DataPart:
    """Flatten SQuAD's nested file (articles, paragraphs, questions) to one row per question. Keep other parts.

    Raises:
        DataError: an article has another form.
    """
    if "paragraphs" not in part.table.column_names:
        return part
    rows: list[Row] = []
    origins: list[tuple[int, int]] = []
    for article, paragraphs in enumerate(part.table["paragraphs"][:]):
        try:
            questions = [
                {"question": qa["question"], "context": paragraph["context"], "answers": qa["answers"]}
                for paragraph in paragraphs
                for qa in paragraph["qas"]
            ]
        except (KeyError, TypeError):
            hint = 'write [{"context": …, "qas": [{"question": …, "answers": …}]}], or one row per question'
            message = "the column 'paragraphs' does not hold paragraphs with questions"
            raise DataError(message, where=part.where(article), hint=hint) from None
        rows += questions
        file, line = part.origins[article].tolist()
        origins += [(file, line)] * len(questions)
    return part_of(rows, origins, part.files)


def read_example(question: str, context: str, answers: Any, column: str) -> QuestionExample:
    """Read the example of a row.

    Args:
        column: name of the column of answers, for messages.

    Raises:
        DataError: there are no answers, or one is not at the position that its row gives. The caller adds the
            location.
    """
    try:
        parsed = json.loads(answers) if isinstance(answers, str) else answers
        if isinstance(parsed, dict):
            pairs = tuple(zip(parsed["text"], map(int, parsed["answer_start"]), strict=True))
        else:
            pairs = tuple((answer["text"], int(answer["answer_start"])) for answer in parsed)
    except (KeyError, TypeError, ValueError):
        hint = 'write {"text": ["…"], "answer_start": [0]}'
        raise DataError(f"the column '{column}' holds no answers", hint=hint) from None
    for answer, start in pairs:
        if context[start : start + len(answer)] != answer:
            message = f"the answer '{answer}' is not at character {start} of the context"
            raise DataError(message, hint="answer_start counts characters from 0")
    return QuestionExample(question, context, pairs)


def answer_tokens(feature: Feature, example: QuestionExample) -> tuple[int, int]:
    """Return the first and last token of the first answer, or (0, 0) if the window does not contain all of it."""
    tokens = np.flatnonzero(feature.offsets[:, 0] >= 0)
    if not example.answers or not len(tokens) or not example.answers[0][0]:
        return 0, 0
    text, first = example.answers[0]
    last = first + len(text)
    starts, ends = feature.offsets[tokens].T
    if first < starts[0] or last > ends[-1]:
        return 0, 0
    return int(tokens[np.flatnonzero(ends > first)[0]]), int(tokens[np.flatnonzero(starts < last)[-1]])


def best_answers(
    candidates: Sequence[Candidates],
    features: Sequence[Feature],
    examples: Sequence[QuestionExample],
    *,
    may_be_null: bool,
) -> dict[int, str]:
    """Return the best answer of each example that has a feature among the candidates, by the example's index.

    Args:
        candidates: candidates of the first features.
        features, examples: all features and examples of the data set.
        may_be_null: an example may have no answer. It has none if token 0 scores best.
    """
    best: dict[int, tuple[float, str]] = {}
    null: dict[int, float] = {}
    for candidates_of_one, feature in zip(candidates, features, strict=False):
        number = feature.example
        score, text = _best_span(candidates_of_one, feature, examples[number].context)
        null[number] = min(null.get(number, np.inf), candidates_of_one.null_score)
        if number not in best or score > best[number][0]:
            best[number] = (score, text)
    return {n: "" if may_be_null and null[n] > score else text for n, (score, text) in best.items()}


def _best_span(candidates: Candidates, feature: Feature, context: str) -> tuple[float, str]:
    """Return (score, text) of the best span inside the context that is not too long."""
    first, last = candidates.starts[:, None], candidates.ends[None, :]
    scores = candidates.start_scores[:, None] + candidates.end_scores[None, :]
    inside = (feature.offsets[first, 0] >= 0) & (feature.offsets[last, 0] >= 0)
    fits = inside & (last >= first) & (last - first < MAX_ANSWER_TOKENS)
    if not fits.any():
        return -np.inf, ""
    i, j = np.unravel_index(np.where(fits, scores, -np.inf).argmax(), scores.shape)
    return float(scores[i, j]), context[
        feature.offsets[candidates.starts[i], 0] : feature.offsets[candidates.ends[j], 1]
    ]


def normalized(text: str) -> str:
    """Lower-case a text and remove punctuation, articles and extra spaces (SQuAD evaluation, Rajpurkar et al. 2016)."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """Return 1 if the prediction equals a reference after normalisation. No reference means no answer."""
    return float(any(normalized(prediction) == normalized(truth) for truth in references or [""]))


def f1(prediction: str, references: Sequence[str]) -> float:
    """Return the highest F1 over the references, on bags of words. No reference means no answer."""
    scores = []
    for reference in references or [""]:
        guess, truth = normalized(prediction).split(), normalized(reference).split()
        common = sum((Counter(guess) & Counter(truth)).values())
        scores.append(2 * common / (len(guess) + len(truth)) if guess and truth else float(guess == truth))
    return max(scores)
