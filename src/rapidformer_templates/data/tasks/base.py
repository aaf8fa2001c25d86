"""The interface that every task offers to the templates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from rapidformer_templates.data.collate import Collate, PadCollate, Ragged, TokenizedSamples, count_targets
from rapidformer_templates.data.finetuning import tables
from rapidformer_templates.data.finetuning.chat_samples import drop_repeated
from rapidformer_templates.data.finetuning.labels import in_order_of_head
from rapidformer_templates.data.finetuning.locating import check_evaluated, flags_of_sets, locate, locate_part
from rapidformer_templates.data.generation import Generation, TrainedModel
from rapidformer_templates.data.indexed.blend import mixed, whole_weights
from rapidformer_templates.data.loader import MicroBatch, to_device
from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.data.types import Augment, Data, Endless, Model, ModelOutputs, Sample, SampleSet, Tensors
from rapidformer_templates.errors import DataError, ModelError
from rapidformer_templates.models.label_use import LabelUse
from rapidformer_templates.models.loading import build_config, build_model, folder_of_model, seq_length_of
from rapidformer_templates.models.model_files import load_tokenizer
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.flag_values import TEST, mixture_of
from rapidformer_templates.planning.tasks import MESSAGES
from rapidformer_templates.system.workers import Workers

Record = dict[str, Any]
"""The prediction for one row, as plain values that JSON can store."""


@dataclass(frozen=True)
class Inputs:
    """Rows to predict. They need no labels.

    Attributes:
        rows: the input of :meth:`Task.records`, one entry per row.
        lengths: number of tokens of each row. Rows of similar length share a batch.
    """

    rows: SampleSet
    lengths: np.ndarray

    @classmethod
    def of(cls, samples: TokenizedSamples) -> Inputs:
        """Build from tokenized samples."""
        return cls(samples, samples.lengths)


InputRow = Any
"""A row to predict, as :meth:`Task.inputs` of the same task makes it."""

Predictions = list[Any]
"""One small object for each sample, of a type of the task."""

Loss = torch.Tensor | tuple[torch.Tensor, torch.Tensor | int]
"""The mean loss of a batch, or the sum of its losses and the number of targets."""

EvalBatch = Callable[[MicroBatch, Callable[[Model, Tensors], Loss]], tuple[torch.Tensor, object]]
"""Evaluates a micro batch without gradients, with a hook that computes the loss.

Returns (sum of the losses over its targets, the model's outputs).
"""


class Task(ABC):
    """One kind of training: its data, its model and its metrics.

    Attributes:
        name: the value of ``--task``.
        auto_class: name of the transformers auto class of the model.
        best_metric: the metric that selects the best checkpoint. ``eval_loss`` comes from the training loop.
        generates: evaluation needs :meth:`generate`. Its texts replace ``outputs`` in :meth:`predict`.
        needs_prepass: :meth:`prepass` must see all micro batches of a mean before the first loss of that mean.
        measures: :meth:`measured` returns values for each step.
        state_fields: names of the attributes that :meth:`build_data` sets and that a saved model needs later.
        columns: how the training part is read. It maps the flag that names a column (``text_column`` …) to that column,
            or to None if there is none, and holds other facts about columns that the task needs. Other rows are read
            the same way. None: nothing is known.
        labels: the names of the classes, by their numbers. Set by :meth:`build_data`. Empty for tasks without classes.
        problem: the problem type of text labels, as transformers names it. None for tasks with only one kind of label.
        needs_reference: the loss compares the model with a reference model that is not trained.
        bad: the lines and rows that ``--skip-bad-lines`` left out. Set by :meth:`build_data`.
        notes: remarks about the data for the user. Set by :meth:`build_data`.
        is_trained: the model is already trained, so the data of an evaluation must not change labels or columns. See
            :meth:`load_label_state`.
        part: the part of the data to read if ``is_trained``.
        label_use: how the model uses labels. The run sets it when it calls :meth:`use_labels`.
    """

    name: ClassVar[str]
    auto_class: str
    best_metric: str
    generates: ClassVar[bool] = False
    needs_prepass: bool = False
    measures: ClassVar[bool] = False
    labels: Sequence[str] = ()
    problem: str | None = None
    needs_reference: bool = False
    state_fields: ClassVar[tuple[str, ...]] = ("columns",)
    columns: Mapping[str, Any] | None = None
    label_use: LabelUse | None = None

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.bad = BadLines()
        self.notes: list[str] = []
        self.is_trained = False
        self.part: str | None = None

    @classmethod
    def kind_for(cls, config: RunConfig) -> type[Task]:
        """Return the class for a configuration. Most tasks have only one.

        Raises:
            DataError: a flag is set that this class does not use.
        """
        return cls

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return load_tokenizer(self.config)

    @cached_property
    def model_config(self) -> PreTrainedConfig:
        """The model's configuration before its head is known."""
        return build_config(self.config, self.auto_class, self.tokenizer)

    @cached_property
    def seq_length(self) -> int:
        """Maximum length of a sample, in tokens."""
        return seq_length_of(self.config, self.model_config)

    def check(self) -> None:
        """Check what can be checked before a worker starts: files, tokenizer and model sizes.

        Raises:
            RapidformerError: one of them is missing or cannot be used.
        """
        data = self.config.data
        check_evaluated(data)
        if data.streaming:
            tables.locate_training(data)
        else:
            if self.is_trained:
                for flags in flags_of_sets(data):
                    locate_part(flags, self.part)
            else:
                located = [locate(flags) for flags in flags_of_sets(data)]
                is_given = self.config.origin("validation_fraction") != "default" and data.validation_fraction > 0
                if is_given and all("valid" in one.parts for one in located):
                    files = ", ".join(str(path) for one in located for path in one.parts["valid"][:1])
                    raise DataError(
                        f"the data set has a validation part ({files}), so no share of the training part is held out",
                        where="--validation-fraction",
                        hint="leave the flag out: the validation part is evaluated",
                    )
            if mixture := mixture_of(data.data_name):
                whole_weights([weight for weight, _ in mixture], "--data-name")
        assert self.seq_length > 0
        if self.config.model.pretrained_model_name_or_path:
            folder_of_model(self.config.model)  # downloads the weights if they are not in the cache

    def build_data(self) -> Data:
        """Read, check and tokenize the data, or each data set of a mixture.

        Raises:
            DataError: a file, column, line or label cannot be used.
        """
        mixture = mixture_of(self.config.data.data_name)
        if not mixture:
            return self.read_data()
        tasks: dict[str, Task] = {}
        for name in (name for _, name in mixture):
            config = self.config.replace(self.config.origin("data_name"), data_name=name)
            # Only the first one reads the additional validation sets.
            tasks[name] = task = type(self)(config.replace("a mixture", eval_data_name=None) if tasks else config)
            task.tokenizer = self.tokenizer
            if self.is_trained:
                task.load_label_state(self.decisions(), self.part)
        data = {name: task.build_data() for name, task in tasks.items()}
        self.merge_decisions(list(tasks.values()))
        return mixed(data, [weight for weight, _ in mixture], self.config.training.seed)

    def merge_decisions(self, others: Sequence[Task]) -> None:
        """Adopt what the data sets of a mixture have decided.

        Raises:
            DataError: their labels differ.
        """
        names = [name for _, name in mixture_of(self.config.data.data_name)]
        for name, task in zip(names, others, strict=True):
            self.bad.skipped += task.bad.skipped
            self.notes += [f"{name}: {note}" for note in task.notes]
        labels = [task.labels for task in others]
        if any(other_labels != labels[0] for other_labels in labels):
            shown = "; ".join(f"{name}: {', '.join(own)}" for name, own in zip(names, labels, strict=True))
            hint = "give them the same labels; a model's own labels (its config.json) serve for all"
            raise DataError(f"the sets of the mixture have different labels ({shown})", where="--data-name", hint=hint)
        self.labels = labels[0]
        first = others[0].columns
        self.columns = first if all(task.columns == first for task in others) else None

    @abstractmethod
    def read_data(self) -> Data:
        """Read, check and tokenize one data set.

        Raises:
            DataError: a file, column, line or label cannot be used.
        """

    def in_order_of_head(self, names: Sequence[str]) -> list[str]:
        """Return the labels of the data in the order of the model's head. Remarks for the user are added to ``notes``.

        Raises:
            DataError: the head was trained for the same number of labels with other names.
        """
        labels, note = in_order_of_head(names, self.model_config, self.auto_class, new_head=self.config.model.new_head)
        self.notes += [note] if note else []
        return labels

    def build_model(self) -> PreTrainedModel:
        """Build the model with a head for the data. Call it after :meth:`build_data`. The caller sets the seed.

        Raises:
            ModelError: the head depends on labels, and the data that name them were not read.
        """
        if type(self).config_overrides is not Task.config_overrides and not self.labels:
            message = f"the model of --task {self.name} has a head for the labels that the task's own data name"
            hint = "with your own build_data(), override build_model() as well"
            raise ModelError(message, where="build_model()", hint=hint)
        return build_model(self.config, self.auto_class, self.tokenizer, **self.config_overrides())

    def check_model(self, model: nn.Module) -> None:  # noqa: B027 - most tasks suit every model
        """Check whether the model, which may be the user's own, can use the batches of this task.

        Raises:
            ModelError: it cannot.
        """

    def for_other_data(self, config: RunConfig) -> Task:
        """Return this task for other data of the same run.

        It keeps the decisions from the run's data, the model's use of labels, and the reference.
        """
        other = type(self)(config)
        other.load_label_state(self.decisions())
        if self.label_use is not None:
            other.label_use = self.label_use
            other.use_labels(self.label_use)
        return other

    def use_labels(self, use: LabelUse) -> bool:
        """Receive how the model uses labels, before the first :meth:`compute_loss`.

        Returns:
            Whether this task's loss compares the logits at a token with the next token's label.

        Raises:
            ModelError: this task cannot compute its loss with such a model.
        """
        return use.shifts

    def config_overrides(self) -> dict[str, object]:
        """Return attributes of the model's configuration that depend on the data, such as ``num_labels``."""
        return {}

    def compute_loss(self, model: Model, batch: Tensors) -> Loss:
        """Return the mean loss of a batch, or (sum of losses, number of targets). By default the model computes it."""
        return model(**batch).loss

    def count_targets(self, batch: Tensors, *, shifted: bool) -> float:
        """Return the number of targets in the mean loss. For ``shifted`` see :meth:`use_labels`."""
        return count_targets(batch, shifted=shifted)

    @classmethod
    def planned_batch(cls, rows: int, tokens: int) -> dict[str, torch.Tensor]:
        """Return zeros in the shapes that the collate function of :meth:`build_data` makes, for a plan without data."""
        ids = torch.zeros((rows, tokens), dtype=torch.long)
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    def begin_step(self, microbatches: Sequence[MicroBatch]) -> None:  # noqa: B027 - most tasks need not
        """Receive this rank's micro batches of a step, on their device. Called if the task ``measures``."""

    def prepass(  # noqa: B027 - most losses are sums over samples
        self, evaluate: EvalBatch, microbatches: Iterable[MicroBatch], workers: Workers
    ) -> None:
        """Compute what a loss needs from the whole global batch, or from the whole data set in an evaluation.

        Every worker calls it with the same number of micro batches.
        """

    def measured(self, workers: Workers) -> dict[str, torch.Tensor]:
        """Return metrics of the last step's global batch. Every worker must call it, and all get the same values."""
        return {}

    def begin_evaluation(self, name: str) -> None:  # noqa: B027 - most tasks need not
        """Prepare to evaluate a set: a name from ``Data.validation_sets()``, or the name of the test part."""

    def generate(self, model: TrainedModel, batch: Tensors) -> list[str]:
        """Generate one text per sample. Only tasks with ``generates`` implement it."""
        raise NotImplementedError(f"{self.name} does not generate")

    @abstractmethod
    def predict(self, outputs: Any, batch: Tensors) -> tuple[Predictions, Predictions]:
        """Return (predictions, references) on the CPU, with one small object per sample in each.

        Args:
            outputs: the model's outputs for ``batch``, or the generated texts.
            batch: the collated batch.
        """

    @abstractmethod
    def compute_metrics(self, predictions: Predictions, references: Predictions) -> dict[str, float]:
        """Compute metrics over the whole evaluation set from the results of :meth:`predict`."""

    def decisions(self) -> Record:
        """Return the attributes named in ``state_fields`` that the data have set, as plain values."""
        state = {name: getattr(self, name, None) for name in self.state_fields}
        return {name: value for name, value in state.items() if value not in (None, ())}

    # Prediction: rows outside of any data set, for a trained model.

    def load_label_state(self, decisions: Mapping[str, Any], part: str | None = None) -> None:
        """Use the decisions of the training data. Data that are read later decide nothing.

        Args:
            decisions: the result of :meth:`decisions`, as far as known. They take precedence over those that the
                model's configuration contains.
            part: the part of a data set to evaluate. None is its validation part, or its only part.
        """
        self.is_trained, self.part = True, part
        for name, value in {**self.label_state_of_config(), **decisions}.items():
            setattr(self, name, value)

    def label_state_of_config(self) -> Record:
        """Return the decisions that the model's configuration contains."""
        return {}

    def read_rows(self) -> tables.LoadedDataset:
        """Read the rows of ``--data-dir`` and ``--data-name``: all parts for a run, or only the part to evaluate.

        Raises:
            DataError: a folder, file or part is missing, or lines or rows cannot be used.
        """
        self.bad = BadLines(skip=self.config.data.skip_bad_lines)
        self.notes = []
        if self.is_trained:
            return tables.read_part(self.config, self.part, self.bad, self.usable_rows)
        self.columns = {}
        return tables.read_dataset(self.config, self.bad, self.usable_rows)

    def usable_rows(self, part: tables.DataPart, bad: BadLines) -> tables.DataPart:
        """Return the rows of a part that can be learned or evaluated. The others are noted in ``bad``.

        The training part comes first.

        Raises:
            DataError: a column is missing.
        """
        return part

    def unread_rows(self, part: tables.DataPart) -> tables.LoadedDataset:
        """Return a part that is already in memory, in place of :meth:`read_rows`.

        Raises:
            DataError: rows cannot be used.
        """
        self.bad = BadLines(advice="")
        rows = self.usable_rows(part, self.bad)
        self.bad.raise_all()
        return tables.LoadedDataset(train=rows, valid=rows)

    def column(self, part: tables.DataPart, flag: str, usual: Sequence[str]) -> str:
        """Return the column that a flag names, else the known one (``columns``), else the first of the usual names.

        The column of the training part is remembered.

        Raises:
            DataError: there is none. The message lists the columns.
        """
        name = self.column_if_any(part, flag, usual)
        return part.column(flag, None, usual) if name is None else name

    def column_if_any(self, part: tables.DataPart, flag: str, usual: Sequence[str]) -> str | None:
        """Return the same as :meth:`column`, or None if there is no such column.

        It is None if no flag names a column, and the training part had none or this part has none.
        """
        flag_value, columns = getattr(self.config.data, flag), self.columns or {}
        if flag_value is None and flag in columns:
            name: str | None = columns[flag]
            if name is not None:
                part.check_column(flag, name)
            return name
        name = next((n for n in usual if n in part.table.column_names), None)
        if flag_value:
            name = part.column(flag, flag_value, ())
        self.remember({flag: name})
        return name

    def remember(self, columns: Mapping[str, object]) -> None:
        """Remember columns of the training part. Rows that are read for a trained model change nothing."""
        if self.columns is not None and not self.is_trained:
            self.columns = {**self.columns, **columns}

    @property
    def text_column(self) -> str:
        """Name of the text column for a text that is given without columns."""
        return self.config.data.text_column or (self.columns or {}).get("text_column") or "text"

    @property
    def chat_column(self) -> str | None:
        """Name of the column for a conversation that is given without columns. None: the task reads none."""
        if self.auto_class != "AutoModelForCausalLM":
            return None
        columns = self.columns or {}
        trained = columns["text_column"] if columns.get("kind") == "chat" else None
        return self.config.data.text_column or trained or MESSAGES

    @abstractmethod
    def inputs(self, part: tables.DataPart) -> Inputs:
        """Tokenize rows to predict, without reading labels.

        Raises:
            DataError: a column is missing, or a row cannot be used.
        """

    @abstractmethod
    def records(self, model: TrainedModel, rows: Sequence[InputRow], generation: Generation) -> list[Record]:
        """Predict rows from :meth:`inputs`. The model is in evaluation mode.

        Args:
            generation: options for tasks that generate text.
        """

    def tokens_of(
        self, part: tables.DataPart, column: str, texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> dict[str, Ragged]:
        """Tokenize the texts of a column, or text pairs, cut to the sequence length. See :func:`tokenized`.

        Raises:
            DataError: a text has no token.
        """
        fields = tokenized(self.tokenizer, texts, pairs, max_length=self.seq_length, notes=self.notes)
        return {**fields, "input_ids": with_tokens(fields["input_ids"], part, column)}

    def outputs(self, model: TrainedModel, rows: Sequence[Sample]) -> tuple[ModelOutputs, Tensors]:
        """Return the model's outputs for tokenized rows, and the batch on the model's device."""
        batch = to_device(PadCollate(padding_of(self.tokenizer))(list(rows)), device_of(model))
        return model(**batch), batch


def device_of(model: nn.Module | TrainedModel) -> torch.device:
    """Return the device of a model."""
    return next(model.parameters()).device


def round_score(value: float) -> float:
    """Round a probability or a score for output. Its last digits depend on how many threads computed the sum."""
    return float(f"{value:.4g}")


def label_map(names: Sequence[str]) -> dict[str, object]:
    """Return the attributes of a model's configuration that name its labels."""
    numbers = {name: number for number, name in enumerate(names)}
    return {"num_labels": len(names), "id2label": dict(enumerate(names)), "label2id": numbers}


def text_value(value: object, column: str, *, may_be_empty: bool = True) -> str:
    """Return a text.

    Raises:
        DataError: it is missing, is not a text, or is empty. The caller adds the location.
    """
    if not isinstance(value, str):
        what = "is empty" if value is None else f"holds {type(value).__name__}, not text"
        raise DataError(f"the column '{column}' {what}", hint="fill it, or remove the row")
    if not may_be_empty and not value.strip():
        raise DataError(f"the text in column '{column}' is empty", hint="fill it, or remove the row")
    return value


def with_texts(part: tables.DataPart, columns: Sequence[str], bad: BadLines) -> tables.DataPart:
    """Return the rows with a text in each of some columns. Empty texts are only left out on request."""

    def check(*values: object) -> None:
        for value, column in zip(values, columns, strict=True):
            text_value(value, column, may_be_empty=not bad.skip)

    return part.usable(columns, check, bad)


def texts_of(part: tables.DataPart, column: str, *, may_be_missing: bool = False) -> list[str]:
    """Return the texts of a column.

    Args:
        may_be_missing: read a missing value as an empty text.

    Raises:
        DataError: a value is missing or is not a text.
    """

    def read(value: object) -> str:
        return text_value("" if value is None and may_be_missing else value, column)

    return part.read([column], read)


def tokenized(
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    *,
    max_length: int | None = None,
    notes: list[str] | None = None,
) -> dict[str, Ragged]:
    """Tokenize texts or text pairs in batches. Returns ``input_ids``, and ``token_type_ids`` unless all are zero.

    Models use zeros by default, so token types that are all zero are left out.

    Args:
        max_length: samples are cut to this number of tokens.
        notes: receives remarks for the user.
    """
    chunks = []
    for start in range(0, len(texts), 1000):
        second = None if pairs is None else list(pairs[start : start + 1000])
        chunk = tokenizer(
            list(texts[start : start + 1000]),
            second,
            return_attention_mask=False,
            verbose=False,
            truncation=max_length is not None,
            max_length=max_length,
        )
        drop_repeated(tokenizer, chunk.data, notes, second)
        chunks.append(chunk)
    fields = {"input_ids": Ragged(row for chunk in chunks for row in chunk["input_ids"])}
    if chunks and "token_type_ids" in chunks[0]:
        types = Ragged(row for chunk in chunks for row in chunk["token_type_ids"])
        if types.values.any():
            fields["token_type_ids"] = types
    return fields


def with_tokens(rows: Ragged, part: tables.DataPart, column: str) -> Ragged:
    """Check that each text of a column has at least one token, and return the tokens.

    Raises:
        DataError: a text is empty, and the tokenizer does not add a token.
    """
    bad = BadLines(advice="")
    for row in np.flatnonzero(rows.lengths == 0).tolist():
        bad.note_at(part.where(row), f"the text in column '{column}' has no token", "fill it, or remove the row")
    bad.raise_all()
    return rows


def as_data(sets: Mapping[str, TokenizedSamples | Endless], collate: Collate, augment: Augment | None = None) -> Data:
    """Build the result of :meth:`Task.build_data` from the existing parts."""
    train = sets["train"]
    whole = {name: samples for name, samples in sets.items() if isinstance(samples, TokenizedSamples)}
    named = {name.removeprefix("valid").strip(): samples for name, samples in whole.items() if name.startswith("valid")}
    valid = named if set(named) - {""} else named.get("")
    return Data(train, valid, whole.get(TEST), collate, augment, train.lengths, augments_evaluation=True)


def padding_of(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Return the padding value of each model input."""
    assert isinstance(tokenizer.pad_token_id, int)
    return {"input_ids": tokenizer.pad_token_id, "token_type_ids": 0}
