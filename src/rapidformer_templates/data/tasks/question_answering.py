"""Question answering: the answer is a span of the context, as in SQuAD."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from tokenizers import Encoding
from torch.nn.functional import cross_entropy

from rapidformer_templates.data.collate import PadCollate, Ragged, TokenizedSamples
from rapidformer_templates.data.finetuning.tables import DataPart, part_name, part_of
from rapidformer_templates.data.generation import Generation, TrainedModel
from rapidformer_templates.data.tasks.base import Inputs, Record, Task, as_data, padding_of, text_value, texts_of
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.data.text.files import Row
from rapidformer_templates.data.types import Data, Model, ModelOutputs, Sample, Tensors
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
        if not all(isinstance(answer, str) for answer, _ in pairs):
            raise TypeError("an answer is not a text")
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
    for one, feature in zip(candidates, features, strict=False):
        # The best span inside the context that is not too long.
        number, offsets, score, text = feature.example, feature.offsets, -np.inf, ""
        first, last = one.starts[:, None], one.ends[None, :]
        scores = one.start_scores[:, None] + one.end_scores[None, :]
        inside = (offsets[first, 0] >= 0) & (offsets[last, 0] >= 0)
        fits = inside & (last >= first) & (last - first < MAX_ANSWER_TOKENS)
        if fits.any():
            i, j = np.unravel_index(np.where(fits, scores, -np.inf).argmax(), scores.shape)
            begin, end = offsets[one.starts[i], 0], offsets[one.ends[j], 1]
            score, text = float(scores[i, j]), examples[number].context[begin:end]
        null[number] = min(null.get(number, np.inf), one.null_score)
        if number not in best or score > best[number][0]:
            best[number] = (score, text)
    return {n: "" if may_be_null and null[n] > score else text for n, (score, text) in best.items()}


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


PLACES = ("start_positions", "end_positions")
"""Batch fields with the first and the last token of each answer."""

BEST = 20
"""Number of best starts and ends per window that are combined into spans."""


class QuestionAnswering(Task):
    """Columns ``question``, ``context`` and ``answers`` (texts and first characters), or SQuAD's own files.

    A context that is too long is split into several windows (samples). They overlap by a quarter of the sequence
    length, at most 128 tokens. The metrics are SQuAD's exact match and F1, in per cent. They use the best span over all
    windows of an example. ``--pair-column`` names the question, ``--text-column`` the context and ``--label-column``
    the answers.
    """

    name = "question_answering"
    auto_class = "AutoModelForQuestionAnswering"
    best_metric = "f1"
    may_be_null = False
    state_fields = ("columns", "may_be_null")

    def read_data(self) -> Data:
        raw = self.read_rows()
        self.may_be_null = self.is_trained and self.may_be_null
        sets, self._read = {}, {}
        for name, part in raw.parts().items():
            columns = self._columns(part)
            examples = part.read(columns, partial(read_example, column=columns[2]))
            self.may_be_null |= any(not example.answers for example in examples)
            fields, features = self._tokens(part, examples)
            spans = [answer_tokens(feature, examples[feature.example]) for feature in features]
            places = zip(PLACES, ([start for start, _ in spans], [end for _, end in spans]), strict=True)
            sets[name] = TokenizedSamples({**fields, **dict(places)})
            self._read[name] = features, examples
        if part_name("") in sets:
            self.begin_evaluation("")
        return as_data(sets, PadCollate(padding_of(self.tokenizer)))

    def usable_rows(self, part: DataPart, bad: BadLines) -> DataPart:
        """Return the rows whose answers are in their contexts. Empty texts are only left out on request."""
        part = flattened(part)
        columns = self._columns(part)

        def check(question: object, context: object, answers: object) -> None:
            question_text = text_value(question, columns[0], may_be_empty=not bad.skip)
            context_text = text_value(context, columns[1], may_be_empty=not bad.skip)
            read_example(question_text, context_text, answers, columns[2])

        return part.usable(columns, check, bad)

    def _columns(self, part: DataPart) -> tuple[str, str, str]:
        """Return the columns of questions, contexts and answers."""
        return *self._text_columns(part), self.column(part, "label_column", ("answers",))

    def _text_columns(self, part: DataPart) -> tuple[str, str]:
        """Return the question column and the context column."""
        question = self.column(part, "pair_column", ("question",))
        return question, self.column(part, "text_column", ("context",))

    def _tokens(self, part: DataPart, examples: list[QuestionExample]) -> tuple[dict[str, Ragged], list[Feature]]:
        """Return the tokens of each window, and their offsets in the context."""
        ids: list[list[int]] = []
        types: list[list[int]] = []
        features: list[Feature] = []
        for number, encoding in self._windows(part, examples):
            context = np.asarray([sequence == 1 for sequence in encoding.sequence_ids])
            offsets = np.where(context[:, None], np.asarray(encoding.offsets, dtype=np.int32), -1)
            ids.append(encoding.ids)
            types.append(encoding.type_ids)
            features.append(Feature(number, offsets))
        fields = {"input_ids": Ragged(ids)}
        if "token_type_ids" in self.tokenizer.model_input_names:
            fields["token_type_ids"] = Ragged(types)
        return fields, features

    def _windows(self, part: DataPart, examples: list[QuestionExample]) -> Iterator[tuple[int, Encoding]]:
        """Yield (index of the example, encoding) for each window."""
        stride = min(128, self.seq_length // 4)
        room = self.seq_length - self.tokenizer.num_special_tokens_to_add(pair=True) - stride
        for start in range(0, len(examples), 1000):
            chunk = examples[start : start + 1000]
            questions = [example.question for example in chunk]
            alone = self.tokenizer(questions, add_special_tokens=False, return_attention_mask=False, verbose=False)
            for row, tokens in enumerate(map(len, alone["input_ids"]), start):
                if tokens >= room:
                    message = f"the question has {tokens} tokens and leaves no room for its context"
                    raise DataError(message, where=part.where(row), hint="use a greater --seq-length")
            encoded = self.tokenizer(
                questions,
                [example.context for example in chunk],
                truncation="only_second",
                max_length=self.seq_length,
                stride=stride,
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
                verbose=False,
            )
            assert encoded.encodings is not None  # fast tokenizers always have encodings
            for row, encoding in zip(encoded["overflow_to_sample_mapping"], encoded.encodings, strict=True):
                yield start + row, encoding

    def begin_evaluation(self, name: str) -> None:
        self.features, self.examples = self._read[part_name(name)]

    def compute_loss(self, model: Model, batch: Tensors) -> torch.Tensor:
        """Return the mean of the start and end losses. Each is a softmax over the tokens of the sample.

        The model's own loss includes padding, so it would depend on the other samples of a batch.
        """
        outputs = model(**{name: tensor for name, tensor in batch.items() if name not in PLACES})
        padding = batch["attention_mask"] == 0
        start, end = (
            cross_entropy(logits.masked_fill(padding, torch.finfo(logits.dtype).min), batch[name])
            for logits, name in zip((outputs.start_logits, outputs.end_logits), PLACES, strict=True)
        )
        return (start + end) / 2

    @classmethod
    def planned_batch(cls, rows: int, tokens: int) -> dict[str, torch.Tensor]:
        batch = super().planned_batch(rows, tokens)
        del batch["labels"]
        return batch | dict.fromkeys(PLACES, torch.zeros(rows, dtype=torch.long))

    def predict(self, outputs: ModelOutputs, batch: Tensors) -> tuple[list[Candidates], list[None]]:
        """Return the best starts and ends of each window. The true answers are found by the window's index."""
        padding = batch["attention_mask"].cpu() == 0
        starts, ends = outputs.start_logits.float().cpu(), outputs.end_logits.float().cpu()
        candidates = [
            Candidates(*_best(start, tokens), *_best(end, tokens), float(start[0] + end[0]))
            for start, end, tokens in zip(starts, ends, ~padding, strict=True)
        ]
        return candidates, [None] * len(candidates)

    def compute_metrics(self, predictions: list[Candidates], references: list[None]) -> dict[str, float]:
        """Compute metrics for the first windows of the evaluated set, one window per prediction."""
        answers = best_answers(predictions, self.features, self.examples, may_be_null=self.may_be_null)
        truths = {number: [text for text, _ in self.examples[number].answers] for number in answers}
        measures = {"exact_match": exact_match, "f1": f1}
        count = max(1, len(answers))
        return {key: 100 * sum(of(answers[n], truths[n]) for n in answers) / count for key, of in measures.items()}

    def inputs(self, part: DataPart) -> Inputs:
        """Return each row with all of its windows."""
        part = flattened(part)
        question, context = self._text_columns(part)
        texts = zip(texts_of(part, question), texts_of(part, context), strict=True)
        examples = [QuestionExample(asked, about, ()) for asked, about in texts]
        fields, features = self._tokens(part, examples)
        samples = TokenizedSamples(fields)
        rows: list[_Windows] = [(example, [], []) for example in examples]
        for window, feature in enumerate(features):
            _, samples_of_row, features_of_row = rows[feature.example]
            samples_of_row.append(samples[window])
            features_of_row.append(Feature(0, feature.offsets))
        return Inputs(rows, np.asarray([max(len(s["input_ids"]) for s in windows) for _, windows, _ in rows]))

    def records(self, model: TrainedModel, rows: Sequence[_Windows], generation: Generation) -> list[Record]:
        """Return the answers. They may be empty if the model was trained with unanswerable questions."""
        windows = [sample for _, samples, _ in rows for sample in samples]
        candidates: list[Candidates] = []
        for start in range(0, len(windows), len(rows)):  # at most one window per row in each batch
            candidates += self.predict(*self.outputs(model, windows[start : start + len(rows)]))[0]
        records, done = [], 0
        for example, _, features in rows:
            of_row = candidates[done : done + len(features)]
            done += len(features)
            best = best_answers(of_row, features, [example], may_be_null=self.may_be_null)
            records.append({"answer": best[0]})
        return records


_Windows = tuple[QuestionExample, list[Sample], list[Feature]]
"""A row to predict, with the samples and features of its windows."""


def _best(scores: torch.Tensor, tokens: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return (positions, scores) of the best tokens of a window. ``tokens`` is False for padding."""
    positions = tokens.nonzero()[:, 0]  # a window may have fewer than BEST tokens
    best = scores[positions].topk(min(BEST, len(positions)))
    return positions[best.indices].numpy(), best.values.numpy()
