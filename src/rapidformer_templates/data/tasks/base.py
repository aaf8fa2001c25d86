"""What every task offers to the templates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from rapidformer_templates.data.collate import PadCollate, Ragged, TokenizedSamples
from rapidformer_templates.data.finetuning.heads import in_order_of_head
from rapidformer_templates.data.finetuning.locating import Located, check_evaluated, each_of, locate, locate_part
from rapidformer_templates.data.finetuning.mixtures import mixed
from rapidformer_templates.data.finetuning.tables import Part, Raw, read_dataset, read_part, streamed_files
from rapidformer_templates.data.generation import Generation
from rapidformer_templates.data.indexed.blend import whole_weights
from rapidformer_templates.data.loader import MicroBatch, to_device
from rapidformer_templates.data.targets import count_targets
from rapidformer_templates.data.types import Batch, Data
from rapidformer_templates.errors import DataError, ModelError
from rapidformer_templates.models.label_use import LabelUse
from rapidformer_templates.models.loading import build_config, build_model, seq_length_of
from rapidformer_templates.models.tokenizers import load_tokenizer
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.metrics import TEST
from rapidformer_templates.planning.weights import mixture_of
from rapidformer_templates.system.workers import Workers

TEXT_COLUMNS = ("text", "sentence", "content", "document", "tweet", "review")
"""Columns in which a text is looked for when ``--text-column`` is not given."""


Record = dict[str, Any]
"""What is predicted of one row: plain values, as JSON knows them."""


@dataclass(frozen=True)
class Inputs:
    """Rows to predict, without anything to learn.

    Attributes:
        rows: what :meth:`Task.records` takes, one entry a row.
        lengths: tokens of each, by which rows of like lengths come together.
    """

    rows: Sequence[Any]
    lengths: np.ndarray

    @classmethod
    def of(cls, samples: TokenizedSamples) -> Inputs:
        """Of samples that are tokenized."""
        return cls(samples, samples.lengths)


EvalBatch = Callable[[MicroBatch, Callable[[Any, Batch], Any]], tuple[float, Any]]
"""From a micro batch and a hook to (sum of the losses over its targets, what the model put out), without gradients."""


class Task(ABC):
    """One kind of training: its data, its model and its metrics.

    Attributes:
        name: as in ``--task``.
        auto_class: transformers' class of the model.
        best_metric: the metric by which the best checkpoint is kept; ``eval_loss`` is the loop's.
        generates: evaluation needs :meth:`generate`; its texts take the place of ``outputs`` in
            :meth:`predict`.
        looks_ahead: :meth:`look_ahead` must see all micro batches of a mean before the first loss of it.
        measures: :meth:`measured` has something to tell of each step.
        decided: names of the attributes that :meth:`build_data` sets, and that a saved model is used with.
        columns: those by which the training part is read, by the flag that names such a one (``text_column`` …; None is
            none) and in what else the task must know of them; other rows are read by the same. None: nothing is known.
        problem: what the labels of texts are, in transformers' words; None for tasks that have labels of one kind.
        needs_reference: losses compare the model with one that is not trained.
        skipped: ``file:line: reason`` of the lines that ``--skip-bad-lines`` left out; set by
            :meth:`build_data`.
        notes: what people should know of the data; set by :meth:`build_data`.
        is_decided: the model is trained, and the data of an evaluation decide nothing of it: :meth:`take_decisions`.
        part: where it is decided, the part of the data that is read.
        label_use: how the model takes labels, once :meth:`use_labels` was told.
    """

    name: ClassVar[str]
    auto_class: str
    best_metric: str
    generates: ClassVar[bool] = False
    looks_ahead: bool = False
    measures: ClassVar[bool] = False
    problem: str | None = None
    needs_reference: bool = False
    decided: ClassVar[tuple[str, ...]] = ("columns",)
    columns: Mapping[str, Any] | None = None
    label_use: LabelUse | None = None
    labels: list[str]

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.skipped: list[str] = []
        self.notes: list[str] = []
        self.is_decided = False
        self.part: str | None = None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return load_tokenizer(self.config)

    @cached_property
    def model_config(self) -> PreTrainedConfig:
        """The model's configuration before its head is known."""
        return build_config(self.config, self.auto_class, self.tokenizer)

    @cached_property
    def seq_length(self) -> int:
        """Length that samples are cut to, tokens."""
        return seq_length_of(self.config, self.model_config)

    def check(self) -> None:
        """Look at what can be seen to be wrong before a worker starts: files, tokenizer, sizes of the model.

        Raises:
            RapidformerError: one of them is missing or cannot be used.
        """
        check_evaluated(self.config.data)
        if self.config.data.streaming:
            streamed_files(self.config.data)
        else:
            if self.is_decided:
                for flags in each_of(self.config.data):
                    locate_part(flags, self.part)
            else:
                self._check_held_out([locate(flags) for flags in each_of(self.config.data)])
            if mixture := mixture_of(self.config.data.data_name):
                whole_weights([weight for weight, _ in mixture], "--data-name")
        assert self.seq_length > 0

    def _check_held_out(self, located: Sequence[Located]) -> None:
        """Raise a :class:`DataError` if ``--validation-fraction`` is given and nothing is there to hold out from."""
        is_given = self.config.origin("validation_fraction") != "default" and self.config.data.validation_fraction > 0
        if is_given and all("valid" in one.parts for one in located):
            files = ", ".join(str(path) for one in located for path in one.parts["valid"][:1])
            raise DataError(
                f"the data set has a validation part ({files}), so no share of the training part is held out",
                where="--validation-fraction",
                hint="leave the flag out: the validation part is evaluated",
            )

    def build_data(self) -> Data:
        """Read, check and tokenize the data, or those of each set of a mixture.

        Raises:
            DataError: a file, column, line or label that cannot be used.
        """
        mixture = mixture_of(self.config.data.data_name)
        if not mixture:
            return self.read_data()
        sources = [(weight, name, self._of_one(name, i == 0)) for i, (weight, name) in enumerate(mixture)]
        data = {name: task.build_data() for _, name, task in sources}
        self.take_over([task for _, _, task in sources])
        return mixed(data, [weight for weight, _, _ in sources], self.config.training.seed)

    def _of_one(self, name: str, is_first: bool) -> Task:
        """This task for one data set of a mixture; the first one reads the further validation sets."""
        config = self.config.replace(self.config.origin("data_name"), data_name=name)
        task = type(self)(config if is_first else config.replace("a mixture", eval_data_name=None))
        task.tokenizer = self.tokenizer
        if self.is_decided:
            task.take_decisions(self.decisions(), self.part)
        return task

    def take_over(self, others: Sequence[Task]) -> None:
        """Take what the data of each set of a mixture have decided.

        Raises:
            DataError: their labels differ.
        """
        names = [name for _, name in mixture_of(self.config.data.data_name)]
        for name, task in zip(names, others, strict=True):
            self.skipped += task.skipped
            self.notes += [f"{name}: {note}" for note in task.notes]
        labels = [getattr(task, "labels", None) for task in others]
        if any(known != labels[0] for known in labels):
            shown = "; ".join(f"{name}: {', '.join(known or ())}" for name, known in zip(names, labels, strict=True))
            hint = "give them the same labels; a model's own labels (its config.json) serve for all"
            raise DataError(f"the sets of the mixture have different labels ({shown})", where="--data-name", hint=hint)
        if labels[0] is not None:
            self.labels = labels[0]
        first = others[0].columns
        self.columns = first if all(task.columns == first for task in others) else None

    @abstractmethod
    def read_data(self) -> Data:
        """Read, check and tokenize one data set.

        Raises:
            DataError: a file, column, line or label that cannot be used.
        """

    def in_order_of_head(self, names: Sequence[str]) -> list[str]:
        """The labels of the data in the order of the model's head; what people should know of it becomes a note.

        Raises:
            DataError: the head was trained for as many labels with other names.
        """
        labels, note = in_order_of_head(names, self.model_config, self.auto_class, new_head=self.config.model.new_head)
        self.notes += [note] if note else []
        return labels

    def build_model(self) -> PreTrainedModel:
        """The model with a head for the data; called after :meth:`build_data`, seeded by the caller.

        Raises:
            ModelError: the head is one for labels, and the data that name them were not read.
        """
        if type(self).config_overrides is not Task.config_overrides and not hasattr(self, "labels"):
            raise ModelError(
                f"the model of --task {self.name} has a head for the labels that the task's own data name",
                where="build_model()",
                hint="with your own build_data(), override build_model() as well",
            )
        return build_model(self.config, self.auto_class, self.tokenizer, **self.config_overrides())

    def check_model(self, model: nn.Module) -> None:  # noqa: B027 - most tasks suit every model
        """Look at whether the built model, which may be the user's own, can use the batches of this task.

        Raises:
            ModelError: it cannot.
        """

    def for_other_data(self, config: RunConfig) -> Task:
        """Return this task for other data of the same run.

        It keeps the decisions that the run's own data have made, the model's use of labels, and the reference.
        """
        other = type(self)(config)
        other.take_decisions(self.decisions())
        if self.label_use is not None:
            other.label_use = self.label_use
            other.use_labels(self.label_use)
        return other

    def use_labels(self, use: LabelUse) -> bool:
        """Hear how the model takes labels, before the first :meth:`compute_loss`.

        Returns:
            Whether in this task's loss the logits at a token are compared with the next token's label.

        Raises:
            ModelError: no loss of this task can be made of it.
        """
        return use.shifts

    def config_overrides(self) -> dict[str, Any]:
        """Attributes of the model's configuration that the data decides, such as ``num_labels``."""
        return {}

    def compute_loss(self, model: Any, batch: Mapping[str, torch.Tensor]) -> Any:
        """The mean loss of a batch, or (sum of losses, number of targets); by default what the model says."""
        return model(**batch).loss

    def count_targets(self, batch: Mapping[str, torch.Tensor], *, shifted: bool) -> float:
        """How many targets the mean loss of a batch is a mean over; ``shifted`` as in :meth:`use_labels`."""
        return count_targets(batch, shifted=shifted)

    def begin_step(self, microbatches: Sequence[MicroBatch]) -> None:  # noqa: B027 - most tasks need not
        """Hear of a step's micro batches of this rank, on their device, where the task ``measures``."""

    def look_ahead(  # noqa: B027 - most losses are sums over samples
        self, evaluate: EvalBatch, microbatches: Iterable[MicroBatch], workers: Workers
    ) -> None:
        """Find out what a loss needs to know of the whole global batch, or of the whole data set in an evaluation.

        Every worker calls it with as many micro batches.
        """

    def measured(self, workers: Workers) -> dict[str, torch.Tensor]:
        """Values of the last step's global batch for the metrics, the same on every worker; every one must call it."""
        return {}

    def begin_evaluation(self, name: str) -> None:  # noqa: B027 - most tasks need not
        """Hear which set is evaluated next: a name of ``Data.validation_sets()``, or that of the test part."""

    def generate(self, model: Any, batch: Mapping[str, torch.Tensor]) -> list[str]:
        """One generated text a sample; only tasks with ``generates`` have it."""
        raise NotImplementedError(f"{self.name} does not generate")

    @abstractmethod
    def predict(self, outputs: Any, batch: Mapping[str, torch.Tensor]) -> tuple[list[Any], list[Any]]:
        """(predictions, references), one small object a sample each, on the CPU.

        Args:
            outputs: the model's outputs for ``batch``, or the generated texts.
            batch: as it was collated.
        """

    @abstractmethod
    def compute_metrics(self, predictions: list[Any], references: list[Any]) -> dict[str, float]:
        """Metrics over the whole evaluation set, from what :meth:`predict` returned for its samples."""

    def decisions(self) -> Record:
        """What the data have decided (``decided``), as plain values."""
        return {name: getattr(self, name) for name in self.decided if getattr(self, name, None) is not None}

    # Rows that were never part of a data set, once the model is trained.

    def take_decisions(self, decisions: Mapping[str, Any], part: str | None = None) -> None:
        """Take what the data of the training have decided: the data that are read from now on decide nothing.

        Args:
            decisions: of :meth:`decisions`, as far as they are known; the model's configuration tells some, too.
            part: of a data set that is evaluated; None is its validation part, or its only one.
        """
        self.is_decided, self.part = True, part
        for name, value in {**self.told_by_model(), **decisions}.items():
            setattr(self, name, value)

    def told_by_model(self) -> Record:
        """The decisions that the model's configuration tells."""
        return {}

    def read_rows(self) -> Raw:
        """The rows of ``--data-dir`` and ``--data-name``: all that a run needs, or the part that is evaluated.

        Raises:
            DataError: a folder, file, line or part that is missing or cannot be read.
        """
        if self.is_decided:
            return read_part(self.config, self.part)
        self.columns = {}
        return read_dataset(self.config)

    def column(self, part: Part, flag: str, usual: Sequence[str]) -> str:
        """The column that a flag names, else the one that is known (``columns``), else the first of the usual names.

        Of the training part it is remembered.

        Raises:
            DataError: there is none; the columns are listed.
        """
        name = self.column_if_any(part, flag, usual)
        return part.column(flag, None, usual) if name is None else name

    def column_if_any(self, part: Part, flag: str, usual: Sequence[str]) -> str | None:
        """As :meth:`column`; None where no flag names one, and the training part had none or there is none."""
        given, known = getattr(self.config.data, flag), self.columns or {}
        if given is None and flag in known:
            name: str | None = known[flag]
            if name is not None:
                part.check_column(flag, name)
            return name
        name = part.column(flag, given, ()) if given else next((n for n in usual if n in part.table.column_names), None)
        self.remember({flag: name})
        return name

    def remember(self, columns: Mapping[str, Any]) -> None:
        """Know columns of the training part; of rows that are read for a trained model nothing is remembered."""
        if self.columns is not None and not self.is_decided:
            self.columns = {**self.columns, **columns}

    @property
    def text_column(self) -> str:
        """What the column of a text is called that stands alone, without columns."""
        return self.config.data.text_column or (self.columns or {}).get("text_column") or "text"

    @abstractmethod
    def inputs(self, part: Part) -> Inputs:
        """Tokenize rows to predict; what would be learned of them is not looked at.

        Raises:
            DataError: a column is missing, or a row that cannot be used.
        """

    @abstractmethod
    def records(self, model: Any, rows: Sequence[Any], generation: Generation) -> list[Record]:
        """What a model predicts of some rows of :meth:`inputs`; the model is in its evaluation mode.

        Args:
            generation: how texts are generated, for the tasks that do.
        """

    def outputs(self, model: Any, rows: Sequence[Any]) -> tuple[Any, Batch]:
        """What a model puts out for rows of tokens, and the batch on its device."""
        batch = to_device(PadCollate(padding_of(self.tokenizer))(list(rows)), device_of(model))
        return model(**batch), batch


def device_of(model: nn.Module) -> torch.device:
    """Where a model computes."""
    return next(model.parameters()).device


def share(value: float) -> float:
    """A probability or a score as it is told: its last digits depend on how many threads have added it up."""
    return float(f"{value:.4g}")


def label_map(names: Sequence[str]) -> dict[str, Any]:
    """The attributes of a model's configuration that name its labels."""
    return {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: i for i, name in enumerate(names)},
    }


def texts_of(part: Part, column: str, *, may_be_missing: bool = False) -> list[str]:
    """The texts of a column.

    Args:
        may_be_missing: a value that is not there is an empty text.

    Raises:
        DataError: a value is missing or is no text.
    """
    texts = list(part.table[column][:])
    if may_be_missing:
        texts = ["" if text is None else text for text in texts]
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            what = "is empty" if text is None else f"holds {type(text).__name__}, not text"
            raise DataError(f"the column '{column}' {what}", where=part.where(row), hint="fill it, or take the row out")
    return texts


def tokenized(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[Any], pairs: Sequence[Any] | None = None, **arguments: Any
) -> dict[str, Ragged]:
    """Tokenize texts (or text pairs) in batches: ``input_ids``, and ``token_type_ids`` where not all are zero.

    Token types that are all zero are left out: the models fill them in by themselves.
    """
    chunks = list(_encoded(tokenizer, texts, pairs, arguments))
    fields = {"input_ids": Ragged(row for chunk in chunks for row in chunk["input_ids"])}
    if chunks and "token_type_ids" in chunks[0]:
        types = Ragged(row for chunk in chunks for row in chunk["token_type_ids"])
        if types.values.any():
            fields["token_type_ids"] = types
    return fields


def with_tokens(rows: Ragged, part: Part, column: str) -> Ragged:
    """The tokens of the texts of a column, of which each has some.

    Raises:
        DataError: one has none: it is empty, and the tokenizer adds no token of its own.
    """
    for row in np.flatnonzero(rows.lengths == 0)[:1].tolist():
        message = f"the text in column '{column}' has no token"
        raise DataError(message, where=part.where(row), hint="fill it, or take the row out")
    return rows


def _encoded(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[Any], pairs: Sequence[Any] | None, arguments: Mapping[str, Any]
) -> Iterator[Any]:
    for start in range(0, len(texts), 1000):
        chunk = slice(start, start + 1000)
        yield tokenizer(
            texts[chunk],
            pairs[chunk] if pairs is not None else None,
            return_attention_mask=False,
            verbose=False,
            **arguments,
        )


def as_data(
    sets: Mapping[str, TokenizedSamples],
    collate: Callable[[list[Any]], Batch],
    augment: Callable[[Any, np.random.Generator], Any] | None = None,
) -> Data:
    """What :meth:`Task.build_data` returns, of the parts that are there."""
    named = {name.removeprefix("valid").strip(): samples for name, samples in sets.items() if name.startswith("valid")}
    valid = named if set(named) - {""} else named.get("")
    return Data(sets["train"], valid, sets.get(TEST), collate, augment, sets["train"].lengths)


def padding_of(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """What each row of inputs is filled up with."""
    assert isinstance(tokenizer.pad_token_id, int)
    return {"input_ids": tokenizer.pad_token_id, "token_type_ids": 0}
