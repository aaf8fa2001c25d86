"""Predictions of a trained model for unlabelled samples: one plain record per sample, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rapidformer_templates.data.finetuning.tables import DataPart, part_of
from rapidformer_templates.data.generation import Generation
from rapidformer_templates.data.tasks import Task
from rapidformer_templates.data.tasks.base import Inputs, Record
from rapidformer_templates.errors import DataError
from rapidformer_templates.system.random_state import capture, restore
from rapidformer_templates.system.workers import Workers

GREEDY = Generation()
"""Always choose the most likely token."""


def predict_samples(
    task: Task,
    model: Any,
    samples: Sequence[Mapping[str, Any] | str],
    batch_size: int = 8,
    generation: Generation = GREEDY,
) -> list[Record]:
    """Predict samples with a model in this process.

    Args:
        task: a task whose labels are known, from its data or from :meth:`Task.load_label_state`.
        model: the unsharded model, on the device where it runs.
        samples: mappings with the task's columns, or plain texts.
        batch_size: number of samples that the model processes at once.
        generation: how to generate texts, for causal_lm, seq2seq_lm and preference.

    Returns:
        One record of plain values per sample, see docs/after-training.md.

    Raises:
        DataError: a column is missing, or a sample cannot be used. The error names the sample by its position.
    """
    if not samples:
        return []
    return predict_inputs(task, model, task.inputs(samples_as_part(samples, task.text_column)), batch_size, generation)


def samples_as_part(samples: Sequence[Mapping[str, Any] | str], text_column: str = "text") -> DataPart:
    """Convert samples in memory to the rows of a data set.

    Args:
        text_column: the column for samples that are texts.

    Raises:
        DataError: a sample is neither a text nor a mapping of names to values.
    """
    rows = [{text_column: sample} if isinstance(sample, str) else sample for sample in samples]
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            hint = 'give texts, or mappings such as {"text": "…"}'
            raise DataError(f"it is of type {type(row).__name__}", where=f"sample {number}", hint=hint)
    return part_of([dict(row) for row in rows], [(0, number) for number in range(1, len(rows) + 1)], ("the samples",))


def predict_inputs(
    task: Task,
    model: Any,
    inputs: Inputs,
    batch_size: int = 8,
    generation: Generation = GREEDY,
    workers: Workers | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Record]:
    """Return the records of all rows of :meth:`Task.inputs`, in their order.

    Args:
        workers: workers with a copy of the model each. They share the batches, and all return all records.
        advance: called with the number of rows that this worker has completed.
    """
    rank, world = (workers.rank, workers.world) if workers else (0, 1)
    own_records: dict[int, Record] = {}
    with _predicting(model):
        for batch in batches_of(inputs, batch_size)[rank::world]:
            torch.manual_seed(
                generation.seed + batch[0]
            )  # seeded per batch, so that it does not matter which worker draws
            batch_records = task.records(model, [inputs.rows[row] for row in batch], generation)
            own_records |= dict(zip(batch, batch_records, strict=True))
            advance(len(batch))
    records = {
        row: record
        for share in (workers.gather(own_records) if workers else [own_records])
        for row, record in share.items()
    }
    return [records[row] for row in range(len(records))]


def batches_of(inputs: Inputs, batch_size: int) -> list[list[int]]:
    """Group rows of similar length. The batches depend only on the rows, not on the number of workers."""
    order = np.argsort(inputs.lengths, kind="stable").tolist()
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


@contextmanager
def _predicting(model: Any) -> Iterator[None]:
    """Context for forwards without side effects. It restores the mode and the random state, without gradients."""
    random_state, training = capture(), model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        restore(*random_state)
