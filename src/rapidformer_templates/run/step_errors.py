"""Errors of a step that name its samples: numbers beyond a table, a failed kernel, or a lost device.

On a GPU, a token id or a class outside of the model's tables fails inside a kernel, which ends the process without
naming the sample. So batches are checked while they are on the host. A batch that is already on a device is not
checked, because the host would wait for it.
"""

from __future__ import annotations

import re
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from rapidformer_templates.data.collate import IGNORED
from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.engines.backwards import WHOLE_WEIGHTS
from rapidformer_templates.errors import (
    DataError,
    DeviceFailed,
    ModelError,
    NonFiniteLoss,
    RapidformerError,
    is_out_of_memory,
)
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.system.workers import Workers

SHOWN = 32
"""Largest number of samples that a message lists."""

SHOWN_WORKERS = 4
"""Largest number of workers that a message lists."""

OTHER_INPUTS = ("image", "video", "audio", "speech")
"""Inputs whose placeholder tokens may be beyond the vocabulary, because the model replaces them."""

CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")


@dataclass(frozen=True)
class IndexLimits:
    """The tables that a model looks numbers up in.

    Attributes:
        vocabulary: number of rows of the input embedding. None if it is unknown.
        classes: number of classes or tokens that ``labels`` choose from. None if it is unknown.
        allows_negative: whether a hook may replace negative numbers. Otherwise only -100 is allowed, in labels.
    """

    vocabulary: int | None = None
    classes: int | None = None
    allows_negative: bool = True

    @classmethod
    def of(cls, model: nn.Module, *, own_loss: bool) -> IndexLimits:
        """Read the limits from a model of transformers, or from such a model inside the user's own module.

        Args:
            own_loss: the user computes the loss, and may replace numbers of the batch first.
        """
        readers = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
        vocabularies = [size for size in map(_vocabulary_of, readers) if size]
        classes = _size_of(readers[0].get_output_embeddings, "out_features") if readers else None
        if readers and classes is None and type(readers[0]).__name__.endswith(CLASSIFIERS):
            classes = readers[0].config.num_labels
        return cls(
            vocabulary=max(vocabularies, default=None),
            classes=int(classes) if classes and classes > 1 else None,
            allows_negative=own_loss,
        )

    def check(self, microbatch: MicroBatch, name: str) -> None:
        """Check the token ids and labels of a micro batch on the host.

        Args:
            name: what the samples are called in the message, such as ``training samples``.

        Raises:
            DataError: a number is outside of its table.
        """
        if not (self.vocabulary or self.classes) or not isinstance(microbatch.batch, Mapping):
            return
        for field, tensor in microbatch.batch.items():
            if not isinstance(tensor, torch.Tensor) or not tensor.is_cpu or tensor.is_floating_point():
                continue
            if self.vocabulary and field.endswith("input_ids"):
                outside = self._outside(tensor.numpy(), self.vocabulary)
                what, table = "token id", f"{self.vocabulary:,} tokens of the model's vocabulary"
                hint = "use the tokenizer of the model, or enlarge its embedding with resize_token_embeddings()"
            elif self.classes and field == "labels":
                outside = self._outside(tensor.numpy(), self.classes, IGNORED)
                what, table = "label", f"{self.classes:,} classes of the model"
                hint = f"labels go from 0 to {self.classes - 1}, and -100 has no loss: fix them, or build a larger head"
            else:
                continue
            if outside is not None:
                value, rows = outside
                samples, count = microbatch.samples, len(microbatch.samples)
                # A preference has two rows per sample. If rows do not show their sample, all samples are named.
                if count and len(tensor) % count == 0:
                    samples = sorted({samples[row % count] for row in rows})
                where = f"{name} {list_samples(samples)}"
                raise DataError(f"the {what} {value} in '{field}' is not one of the {table}", where=where, hint=hint)

    def _outside(self, values: np.ndarray, size: int, ignored: int = 0) -> tuple[int, np.ndarray] | None:
        """Return (the largest number outside of a table, its rows in the batch), or None if all are inside."""
        if not values.size or (values.max() < size and (self.allows_negative or values.min() >= 0)):
            return None  # the usual case takes two passes over a small array
        is_outside = values >= size
        if not self.allows_negative:
            is_outside |= (values < 0) & (values != ignored)
        if not is_outside.any():
            return None
        rows = np.flatnonzero(is_outside.reshape(len(values), -1).any(axis=1))
        return int(values[is_outside].max()), rows


def _vocabulary_of(model: PreTrainedModel) -> int | None:
    """Return the number of rows of the input embedding, or None if the model has none, or replaces some tokens."""
    size = _size_of(model.get_input_embeddings, "num_embeddings")
    of_inputs = {name: value for name, value in vars(model.config).items() if name.startswith(OTHER_INPUTS)}
    ends = ("_token_id", "_token_index")
    placeholders = [value for name, value in of_inputs.items() if name.endswith(ends) and isinstance(value, int)]
    return None if size is None or any(value >= size for value in placeholders) else int(size)


def _size_of(find: Callable[[], nn.Module | None], attribute: str) -> int | None:
    """Return a size of the layer that a method of transformers finds, or None if the model has no such layer."""
    try:
        size: int | None = getattr(find(), attribute, None)
    except (NotImplementedError, AttributeError):  # models with several embeddings, or without any
        return None
    return size


def list_samples(samples: Sequence[int]) -> str:
    """Return the first :data:`SHOWN` samples as text."""
    return f"{list(samples[:SHOWN])}{' …' if len(samples) > SHOWN else ''}"


def name_not_finite(error: NonFiniteLoss, workers: Workers) -> str | None:
    """Return the samples, and the workers, whose losses are not finite. Call it on every worker.

    Returns None if no loss shows where the failure is: all of them are finite, or those of all workers are not.
    """
    by_rank = workers.gather((list(error.samples), socket.gethostname()))
    named = [(rank, samples, host) for rank, (samples, host) in enumerate(by_rank) if samples]
    if workers.world == 1 and named:
        return f"training samples {list_samples(error.samples)}"
    if not named or len(named) == workers.world:
        return None
    parts = [f"{list_samples(samples)} of worker {rank} on {host}" for rank, samples, host in named[:SHOWN_WORKERS]]
    more = f", and of {len(named) - SHOWN_WORKERS} more" if len(named) > SHOWN_WORKERS else ""
    return f"training samples {', '.join(parts)}{more}"


OF_PARTS = re.compile(r"mixed torch\.Tensor and DTensor|_local_tensor|\[0\]|\(0\)")
"""Errors of torch about a part of a parameter: a DTensor among tensors, or a tensor without elements (ZeRO-3)."""


@contextmanager
def explain_parameters(plan: Plan) -> Iterator[None]:
    """Context for steps. It explains errors about parameters that the workers have divided, or of two 16-bit types.

    Raises:
        ModelError: replaces an error of torch about a norm in bf16 that is given fp16, or the other way round.
        RapidformerError: replaces an error of torch about a part of a parameter.
    """
    try:
        yield
    except (RuntimeError, AttributeError) as error:
        if plan.precision != "fp32" and "mixed dtype (CPU)" in str(error):
            message = f"the parameters of a norm have another 16-bit type than its {plan.precision} input"
            hint = "load the model in fp32: from_pretrained(…, dtype=torch.float32)"
            raise ModelError(message, where="build_model()", hint=hint) from error
        if not plan.builds_in_shares or not OF_PARTS.search(str(error)):
            raise
        message = "a parameter is used outside of the forward of its module, where a worker has only its part"
        message += f" ({str(error).partition(chr(10))[0]})"
        raise RapidformerError(message, where="compute_loss(model, batch)", hint=WHOLE_WEIGHTS) from error


MAY_HELP = "a lower --lr, --clip-grad or bf16 instead of fp16 may help"


@contextmanager
def locate_non_finite(
    newest: int, hint: str, where: Callable[[NonFiniteLoss, int], str | None] = lambda error, step: None
) -> Iterator[None]:
    """Context for steps. It adds the step to a :class:`NonFiniteLoss`, which may belong to an earlier one.

    Args:
        newest: the last step that was started.
        hint: what to do.
        where: names the samples of a step.
    """
    try:
        yield
    except NonFiniteLoss as error:
        step = newest - error.age
        message = f"step {step + 1}: {error.message}; the weights are from after step {step}"
        raise NonFiniteLoss(message, where=where(error, step), hint=hint) from None


TORCH = str(Path(torch.__file__).parent)


@contextmanager
def locate_device_errors(step: Callable[[], int], hint: str = "") -> Iterator[None]:
    """Context for steps. It adds to a device error the step after which the host received it.

    The host runs ahead of a device and receives its errors late, so the line that raises is not the one that failed.

    Args:
        step: returns the number of completed steps.
        hint: how to resume.

    Raises:
        DeviceFailed: replaces the device's error.
    """
    try:
        yield
    except torch.AcceleratorError as error:
        if is_out_of_memory(error):
            raise
        message = (str(error).splitlines() or [type(error).__name__])[0]
        where = f"raised in {_line_of(error)}; devices report errors late, so it may be from an earlier step"
        hint = "; ".join(filter(None, ["with --device cpu a wrong operation fails at its own line", hint]))
        raise DeviceFailed(f"after step {step()} the device failed: {message}", where=where, hint=hint) from error


@contextmanager
def locate_index_errors(samples: Sequence[int], name: str) -> Iterator[None]:
    """Context for forwards on a CPU. An index error of torch becomes an error that names the samples.

    It serves models whose tables are unknown to :class:`IndexLimits`.

    Raises:
        DataError: replaces an :class:`IndexError` that a function of torch has raised.
    """
    try:
        yield
    except IndexError as error:
        if not traceback.extract_tb(error.__traceback__)[-1].filename.startswith(TORCH):
            raise
        message = f"a number of the batch is beyond the table that it indexes: {error}"
        hint = "compare the largest token id and the largest label with the sizes of the embedding and of the head"
        raise DataError(message, where=f"{name} {list_samples(samples)}, {_line_of(error)}", hint=hint) from error


def _line_of(error: BaseException) -> str:
    """Return the last line outside torch in the traceback of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if not frame.filename.startswith(TORCH)), frames[-1])
    return f"{frame.filename}:{frame.lineno}"
