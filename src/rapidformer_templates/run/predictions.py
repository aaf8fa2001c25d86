"""A trained model at work: one plain record per unlabelled sample, or a conversation that streams its answers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, TextStreamer

from rapidformer_templates.data.finetuning.chat import ChatExample
from rapidformer_templates.data.finetuning.chat_samples import ChatTemplate
from rapidformer_templates.data.finetuning.messages import Message, Tools, table_row
from rapidformer_templates.data.finetuning.tables import DataPart, part_of, part_of_table
from rapidformer_templates.data.generation import DEFAULT_NEW_TOKENS, Generation, generate
from rapidformer_templates.data.tasks import Task
from rapidformer_templates.data.tasks.base import Inputs, Record
from rapidformer_templates.engines.forwards import evaluating
from rapidformer_templates.errors import DataError
from rapidformer_templates.models.architectures import positions_of
from rapidformer_templates.system.workers import Workers

if TYPE_CHECKING:
    import datasets

GREEDY = Generation()
"""Always choose the most likely token."""


def predict_samples(
    task: Task, model: Any, samples: Sequence[object], batch_size: int = 8, generation: Generation = GREEDY
) -> list[Record]:
    """Predict samples with a model in this process.

    Args:
        task: a task whose labels are known, from its data or from :meth:`Task.load_label_state`.
        model: the unsharded model, on the device where it runs.
        samples: mappings with the task's columns, plain texts or conversations. See :func:`samples_as_part`.
        batch_size: number of samples that the model processes at once.
        generation: how to generate texts, for causal_lm, seq2seq_lm and preference.

    Returns:
        One record of plain values per sample, see docs/after-training.md.

    Raises:
        DataError: a column is missing, or a sample cannot be used. The error names the sample by its position.
    """
    if not len(samples):
        return []
    part = samples_as_part(samples, task.text_column, task.chat_column)
    return predict_inputs(task, model, task.inputs(part), batch_size, generation)


def samples_as_part(samples: Sequence[Any], text_column: str = "text", chat_column: str | None = None) -> DataPart:
    """Convert samples in memory to the rows of a data set. A ``datasets.Dataset`` keeps the names of its labels.

    Args:
        samples: texts, mappings of columns to values, messages or lists of messages, or a ``datasets.Dataset``.
        text_column: the column for samples that are texts.
        chat_column: the column for conversations. None: the task reads none.

    Raises:
        DataError: a sample has another form.
    """
    if is_dataset(samples):
        return part_of_table(samples, "the samples")
    rows: list[dict[str, object]] = []
    for number, sample in enumerate(samples, start=1):
        if isinstance(sample, str):
            rows.append({text_column: sample})
        elif chat_column and (is_message(sample) or is_conversation(sample)):
            rows.append(table_row({chat_column: [sample] if isinstance(sample, Mapping) else list(sample)}))
        elif isinstance(sample, Mapping):
            rows.append(table_row(dict(sample)))
        else:
            hint = 'give texts, or mappings such as {"text": "…"}' + (", or lists of messages" if chat_column else "")
            raise DataError(f"it is of type {type(sample).__name__}", where=f"sample {number}", hint=hint)
    return part_of(rows, [(0, number) for number in range(1, len(rows) + 1)], ("the samples",))


def is_message(sample: object) -> bool:
    """Whether a sample is a single message of a conversation, with nothing else."""
    keys = set(sample) if isinstance(sample, Mapping) else set()
    return ("role" in keys and bool({"content", "tool_calls"} & keys)) or {"from", "value"} <= keys


def is_conversation(samples: object) -> bool:
    """Whether samples are the messages of one conversation."""
    return isinstance(samples, list | tuple) and bool(samples) and all(map(is_message, samples))


def is_dataset(samples: object) -> TypeGuard[datasets.Dataset]:
    """Whether samples are a ``datasets.Dataset``."""
    library = sys.modules.get("datasets")  # an object of a library exists only if its module was imported
    return library is not None and isinstance(samples, library.Dataset)


def rows_of_frame(samples: Any) -> Any:
    """Return the rows of a pandas ``DataFrame`` as a list of mappings. An empty cell is None. Keep anything else."""
    library = sys.modules.get("pandas")
    if library is None or not isinstance(samples, library.DataFrame):
        return samples
    cells = samples.astype(object)
    return cells.where(cells.notna(), None).to_dict("records")


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
    with evaluating(model), torch.no_grad():
        # Rows of similar length share a batch. The batches depend only on the rows, not on the number of workers.
        order = np.argsort(inputs.lengths, kind="stable").tolist()
        for first in range(rank * batch_size, len(order), world * batch_size):
            batch = order[first : first + batch_size]
            # Each batch has its own seed, so it does not matter which worker draws.
            torch.manual_seed(generation.seed + batch[0])
            batch_records = task.records(model, [inputs.rows[row] for row in batch], generation)
            own_records |= dict(zip(batch, batch_records, strict=True))
            advance(len(batch))
    shares = workers.gather(own_records) if workers else [own_records]
    records = {row: record for share in shares for row, record in share.items()}
    return [records[row] for row in range(len(records))]


MIN_ROOM = 16
"""Minimum number of tokens that must remain for an answer."""


class Conversation:
    """Messages in the chat template of the tokenizer, and the model that answers them.

    Args:
        model: an unsharded causal language model, on the device where it runs.
        system: a message that comes before all others.
        tools: tools that the model may call. See :meth:`answer` for their results.

    Attributes:
        messages: the messages so far.
        is_plain: whether a plain template is used because the tokenizer has none.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerFast,
        generation: Generation,
        system: str | None = None,
        tools: Tools | None = None,
    ) -> None:
        self._tools = tools
        self.model, self.tokenizer, self.generation = model, tokenizer, generation
        self._template = ChatTemplate(tokenizer)
        self.is_plain = self._template.is_plain
        self._first: list[Message] = [{"role": "system", "content": system}] if system else []
        self._positions = positions_of(model.config)
        self.reset()
        torch.manual_seed(generation.seed)

    def reset(self) -> None:
        """Forget all messages except the system message."""
        self.messages = list(self._first)

    def answer(self, text: str, tell: Callable[[str], object], role: str = "user") -> int:
        """Send a message and stream the answer. After an interruption, the conversation keeps the streamed part.

        Args:
            tell: receives the pieces of the answer.
            role: ``tool`` for the result of a call.

        Returns:
            Number of the oldest messages that were forgotten because the model has no room for them.

        Raises:
            DataError: the message itself leaves no room for an answer, or the template rejects it.
        """
        ids, forgotten = self._prompt({"role": role, "content": text})
        streamer = _WordStreamer(self.tokenizer, tell)
        room = self.generation.max_new_tokens or DEFAULT_NEW_TOKENS
        if self._positions is not None:
            room = min(room, self._positions - ids.shape[1])
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        try:
            with torch.no_grad():
                generate(self.model, self.tokenizer, batch, room, self.generation.temperature, streamer=streamer)
        finally:
            try:
                streamer.end()
            finally:
                self.messages.append({"role": "assistant", "content": "".join(streamer.pieces).strip()})
        return forgotten

    def _prompt(self, message: Message) -> tuple[torch.Tensor, int]:
        """Return (the tokens up to the answer, number of forgotten messages). After an error nothing is forgotten."""
        first, forgotten = len(self._first), 0
        messages = [*self.messages, message]
        while True:
            text = self._template.render(ChatExample(messages, tools=self._tools), add_generation_prompt=True)
            ids = torch.tensor([self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]])
            if not ids.shape[1]:
                raise DataError("the message has no token", hint="write it in the characters that the tokenizer knows")
            if self._positions is None or ids.shape[1] + MIN_ROOM <= self._positions:
                self.messages = messages
                return ids.to(next(self.model.parameters()).device), forgotten
            later = [i for i, sent in enumerate(messages) if i > first and sent["role"] == "user"]
            if not later:
                takes = f"the model takes {self._positions}, including its answer"
                raise DataError(f"the message has {ids.shape[1]} tokens, and {takes}", hint="shorten it")
            del messages[first : later[0]]
            forgotten += later[0] - first


class _WordStreamer(TextStreamer):
    """Passes on the output of ``generate``, word by word."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, tell: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._tell = tell
        self.pieces: list[str] = []

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called by ``generate`` and by :meth:`end`."""
        if text:
            self.pieces.append(text)
            self._tell(text)
