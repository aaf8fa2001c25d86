"""Multiple choice: which of several texts continues or answers another one, as in SWAG, HellaSwag and RACE."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from string import ascii_uppercase

import numpy as np
import torch

from rapidformer_templates.data.collate import PadCollate, Ragged, TokenizedSamples
from rapidformer_templates.data.finetuning.labels import label_text
from rapidformer_templates.data.finetuning.tables import DataPart
from rapidformer_templates.data.generation import Generation, TrainedModel
from rapidformer_templates.data.loader import to_device
from rapidformer_templates.data.tasks import base
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.data.types import Data, ModelOutputs, Sample, Tensors
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.tasks import CONTEXT_COLUMNS, TASKS

CHOICE_COLUMNS = ("choices", "endings", "options")
NUMBERED_CHOICE = re.compile(r"(?:ending|choice|option|answer|sol)_?(\d+)")
"""Matches a column with one of the choices, such as SWAG's ``ending0``."""

BEGINNING_COLUMNS = ("question", "sent2")
"""Columns with a text that is put before each choice, unless it is the context."""

LABEL_COLUMNS = ("label", "labels", "answer", "answerKey", "target")


@dataclass(frozen=True)
class ChoiceExample:
    """A row: a context, the choices with the text before them, and the right one (None in a prediction)."""

    context: str
    choices: list[str]
    label: int | None


@dataclass(frozen=True)
class ChoiceColumns:
    """The columns of a part.

    Attributes:
        choices: one column with lists, or one column for each choice.
        first: the number that stands for the first choice in the labels, 0 or 1.
    """

    context: str
    beginning: str | None
    choices: tuple[str, ...]
    label: str | None
    first: int = 0

    def names(self) -> list[str]:
        """Return the columns in the order in which :meth:`read` takes their values."""
        return [name for name in (self.context, self.beginning, self.label) if name] + list(self.choices)

    def read(self, *values: object) -> ChoiceExample:
        """Read the values of a row.

        Raises:
            DataError: a text is missing or empty, there are fewer than two choices, or the label is not one of them.
                The caller adds the location.
        """
        row = dict(zip(self.names(), values, strict=True))
        context = base.text_value(row[self.context], self.context, may_be_empty=False)
        begin = f"{base.text_value(row[self.beginning], self.beginning, may_be_empty=False)} " if self.beginning else ""
        texts: object = [row[name] for name in self.choices] if len(self.choices) > 1 else row[self.choices[0]]
        names: Sequence[object] = ()
        if isinstance(texts, Mapping):  # CommonsenseQA and ARC: {"text": […], "label": ["A", "B", …]}
            names = texts.get("label") or ()
            texts = texts.get("text")
        column = " and ".join(self.choices)
        if not isinstance(texts, list):
            message = f"the column '{column}' holds {texts!r}, not a list of choices"
            raise DataError(message, hint='write a list, such as ["a cat", "a dog"]')
        if len(texts) < 2:
            raise DataError(f"the column '{column}' has {len(texts)} choices", hint="a row needs at least two")
        choices = [begin + base.text_value(choice, column, may_be_empty=False) for choice in texts]
        label = self._index_of(row[self.label], names or ascii_uppercase, len(choices)) if self.label else None
        return ChoiceExample(context, choices, label)

    def _index_of(self, value: object, names: Sequence[object], count: int) -> int:
        """Return the index of the right choice from its number, its letter or its own name.

        Raises:
            DataError: it is not one of the choices.
        """
        text = label_text(value)
        numbers = range(self.first, self.first + count)
        indices = {str(name): i for some in (numbers, names[:count]) for i, name in enumerate(some)}
        if text not in indices:
            what = "is empty" if text is None else f"is {text}; the row has {count} choices"
            hint = f"write the number of the right choice ({numbers[0]} to {numbers[-1]}) or its letter"
            raise DataError(f"the label in column '{self.label}' {what}", hint=hint)
        return indices[text]


class MultipleChoice(base.Task):
    """Columns with a context, a list of choices, and the index of the right one.

    ``--text-column``, ``--pair-column`` and ``--label-column`` name them. A sample has a row of tokens for each choice:
    the context and the choice as a text pair. The model scores each row, and the loss is a cross-entropy over the
    choices of a sample. All rows of a part have the same number of choices.

    Attributes:
        choices: number of choices of the training part's rows. None until they are read.
    """

    name = "multiple_choice"
    auto_class = "AutoModelForMultipleChoice"
    best_metric = "accuracy"
    choices: int | None = None

    def read_data(self) -> Data:
        sets = {}
        for name, part in self.read_rows().parts().items():
            columns = self._columns(part, with_label=True)
            examples = part.read(columns.names(), columns.read)
            labels = [example.label for example in examples]
            sets[name] = ChoiceSamples({**self._tokens(examples), "labels": labels}, len(examples[0].choices))
        return base.as_data(sets, ChoiceCollate(base.padding_of(self.tokenizer)))

    def usable_rows(self, part: DataPart, bad: BadLines) -> DataPart:
        """Return the rows with a right choice and with as many choices as the first row."""
        columns, count = self._columns(part, with_label=True), self.choices

        def check(*values: object) -> None:
            nonlocal count
            choices = len(columns.read(*values).choices)
            count = count or choices
            if choices != count:
                message = f"the row has {choices} choices, and the first row has {count}"
                raise DataError(message, hint="give all rows the same number of choices")

        rows = part.usable(columns.names(), check, bad)
        self.choices = None if self.is_trained else count  # a trained model scores any number of choices
        return rows

    def merge_decisions(self, others: Sequence[base.Task]) -> None:
        super().merge_decisions(others)
        counts = {task.choices for task in others if isinstance(task, MultipleChoice)}
        if len(counts) > 1:
            shown = ", ".join(map(str, sorted(filter(None, counts))))
            message = f"the sets of the mixture have different numbers of choices ({shown})"
            raise DataError(message, where="--data-name", hint="mix sets with the same number of choices")
        (self.choices,) = counts

    def _columns(self, part: DataPart, *, with_label: bool) -> ChoiceColumns:
        context, names = self.column(part, "text_column", CONTEXT_COLUMNS), part.table.column_names
        numbered = {name: int(match[1]) for name in names if (match := NUMBERED_CHOICE.fullmatch(name))}
        if len(numbered) > 1 and self.column_if_any(part, "pair_column", CHOICE_COLUMNS) is None:
            choices = tuple(sorted(numbered, key=numbered.__getitem__))
        else:
            choices = (self.column(part, "pair_column", CHOICE_COLUMNS),)
        beginning: str | None = next((name for name in BEGINNING_COLUMNS if name in names and name != context), None)
        beginning = (self.columns or {}).get("beginning_column", beginning)
        if beginning is not None:
            part.check_column("text_column", beginning)
        self.remember({"beginning_column": beginning})
        label = self.column(part, "label_column", LABEL_COLUMNS) if with_label else None
        first = (self.columns or {}).get("first_choice")
        if first is None and label:
            texts: Sequence[object] = choices
            if len(choices) == 1:
                texts = next((value for value in part.table[choices[0]] if isinstance(value, list)), ())
            # The labels of Winogrande number the choices from 1.
            labels = {label_text(value) for value in part.table[label][:]}
            first = int("0" not in labels and str(len(texts)) in labels)
            self.remember({"first_choice": first})
        return ChoiceColumns(context, beginning, choices, label, first or 0)

    def _tokens(self, examples: Sequence[ChoiceExample]) -> dict[str, Ragged]:
        """Return a row of tokens for each choice of each example."""
        contexts = [example.context for example in examples for _ in example.choices]
        choices = [choice for example in examples for choice in example.choices]
        return base.tokenized(self.tokenizer, contexts, choices, max_length=self.seq_length, notes=self.notes)

    @classmethod
    def planned_batch(cls, rows: int, tokens: int) -> dict[str, torch.Tensor]:
        choices = TASKS[cls.name].rows_per_sample
        batch = {name: tensor.view(-1, choices, tokens) for name, tensor in super().planned_batch(rows, tokens).items()}
        return batch | {"labels": torch.zeros(rows // choices, dtype=torch.long)}

    def predict(self, outputs: ModelOutputs, batch: Tensors) -> tuple[base.Predictions, base.Predictions]:
        return outputs.logits.argmax(dim=-1).tolist(), batch["labels"].tolist()

    def compute_metrics(self, predictions: base.Predictions, references: base.Predictions) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.equal(predictions, references)))}

    def inputs(self, part: DataPart) -> base.Inputs:
        columns = self._columns(part, with_label=False)
        examples = part.read(columns.names(), columns.read)
        tokens = iter(TokenizedSamples(self._tokens(examples)))
        rows = [list(islice(tokens, len(example.choices))) for example in examples]
        return base.Inputs(rows, np.asarray([max(len(sample["input_ids"]) for sample in row) for row in rows]))

    def records(self, model: TrainedModel, rows: Sequence[list[Sample]], generation: Generation) -> list[base.Record]:
        """Return the index of each row's most likely choice, with the score of every choice.

        The rows may have different numbers of choices, so the model gets all of them as choices of one sample.
        """
        batch = PadCollate(base.padding_of(self.tokenizer))([sample for row in rows for sample in row])
        batch = to_device({name: tensor[None] for name, tensor in batch.items()}, base.device_of(model))
        logits = model(**batch).logits[0].float().cpu().split([len(row) for row in rows])
        shares = [row.softmax(dim=-1).tolist() for row in logits]
        return [{"label": int(np.argmax(row)), "scores": [base.round_score(share) for share in row]} for row in shares]


class ChoiceSamples(TokenizedSamples):
    """Samples with a row of tokens for each choice. The length of a sample is the length of its longest row.

    Args:
        fields: rows of the choices of all samples, one after the other, and lists with one value per sample.
        choices: number of choices of a sample.
    """

    def __init__(self, fields: Mapping[str, Ragged | Sequence[object]], choices: int) -> None:
        super().__init__(fields)
        self.choices = choices
        self._count = len(self.fields["labels"])

    def __getitem__(self, index: int) -> dict[str, object]:
        index = range(self._count)[index]
        rows = range(index * self.choices, (index + 1) * self.choices)
        return {
            name: [values[row] for row in rows] if isinstance(values, Ragged) else values[index]
            for name, values in self.fields.items()
        }

    @property
    def lengths(self) -> np.ndarray:
        longest: np.ndarray = super().lengths.reshape(-1, self.choices).max(axis=1)
        return longest


@dataclass(frozen=True)
class ChoiceCollate:
    """Collates samples of several rows to tensors of shape (samples, choices, tokens), padded on the right."""

    padding: Mapping[str, int]

    def __call__(self, samples: list[Sample]) -> dict[str, torch.Tensor]:
        fields = [name for name in samples[0] if name != "labels"]
        rows: list[Sample] = [
            dict(zip(fields, row, strict=True))
            for sample in samples
            for row in zip(*(sample[name] for name in fields), strict=True)
        ]
        batch = {
            name: tensor.view(len(samples), -1, tensor.shape[-1])
            for name, tensor in PadCollate(self.padding)(rows).items()
        }
        return batch | {"labels": torch.tensor([sample["labels"] for sample in samples])}
