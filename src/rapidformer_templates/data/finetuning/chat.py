"""Chat and instruction data: which columns hold them, and which forms a row can have.

A row is one of these:

- a list of messages (``messages``, or the older ``conversations``)
- a prompt with its completion: two texts, which are joined without changes, or two lists of messages
- an instruction with its input and its answer, which are rendered as a conversation
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import pyarrow as pa

from rapidformer_templates.data.finetuning.messages import Message, kind_of_value, read_messages
from rapidformer_templates.data.finetuning.tables import DataPart
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.flags import DataFlags
from rapidformer_templates.planning.tasks import CHAT_COLUMNS, PROMPT_COLUMNS, PROMPTS, TEXT_COLUMNS

INSTRUCTION_COLUMNS = (("input", "context"), ("system",))
"""Columns that belong to an instruction: its input, and a system prompt."""

FLAGS = ("text_column", "label_column")
"""Flags that name the prompt column and the answer column."""


@dataclass(frozen=True)
class Columns:
    """The kind of a data set and the columns that hold it.

    Attributes:
        kind: plain text, conversations, prompts with completions, or instructions with answers.
        names: the only column, or the prompt column and the answer column.
        extra: the columns of an instruction's input and system prompt. None if there is no such column.
    """

    kind: Literal["text", "chat", "prompt", "instruction"]
    names: tuple[str, ...]
    extra: tuple[str | None, ...] = ()

    def of(self, part: DataPart) -> Columns:
        """Check that another part has these columns, and return them.

        Raises:
            DataError: a column is missing.
        """
        for flag, name in zip(FLAGS, self.names, strict=False):
            part.check_column(flag, name)
        return self

    def to_state(self) -> dict[str, str | None]:
        """Return the columns as plain values for :func:`known_columns`."""
        extra = dict(zip(("input_column", "system_column"), self.extra, strict=False))
        return {"kind": self.kind, **dict(zip(FLAGS, self.names, strict=False)), **extra}


def known_columns(flags: DataFlags, saved: Mapping[str, Any]) -> Columns | None:
    """Restore columns from :meth:`Columns.to_state`. Returns None if there are none or the flags name other columns."""
    if "kind" not in saved or any(getattr(flags, flag) not in (None, saved.get(flag)) for flag in FLAGS):
        return None
    extra = (saved["input_column"], saved["system_column"]) if saved["kind"] == "instruction" else ()
    return Columns(saved["kind"], tuple(saved[flag] for flag in FLAGS if flag in saved), extra)


def find_columns(part: DataPart, flags: DataFlags) -> Columns:
    """Return the columns that ``--text-column`` and ``--label-column`` name, else columns with a usual name.

    If several usual names exist, conversations come before prompts and instructions, and plain text comes last. A
    column of prompts or instructions is used with its answer column. Alone it would be learned as plain text.

    Raises:
        DataError: there is no such column.
    """
    columns = set(part.table.column_names)
    for prompt, usual in PROMPTS.items():
        named = flags.text_column == prompt
        is_free = flags.label_column or not columns & set(CHAT_COLUMNS)
        is_text_alone = flags.text_column is None and prompt in columns and is_free
        if (named or is_text_alone) and (flags.label_column or columns.intersection(usual)):
            answer = part.column("label_column", flags.label_column, usual)
            return prompt_and_answer_columns(part, prompt, answer, begins=flags.streaming)
    if flags.label_column:
        prompt = part.column("text_column", flags.text_column, tuple(PROMPTS))
        answer = part.column("label_column", flags.label_column, ())
        return prompt_and_answer_columns(part, prompt, answer, begins=flags.streaming)
    name = part.column("text_column", flags.text_column, (*CHAT_COLUMNS, *TEXT_COLUMNS))
    is_chat = name in CHAT_COLUMNS or _holds_lists(part, name)
    return Columns("chat" if is_chat else "text", (name,))


def _holds_lists(part: DataPart, column: str) -> bool:
    kind = part.table.data.schema.field(column).type
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def prompt_and_answer_columns(part: DataPart, prompt: str, answer: str | None, *, begins: bool = False) -> Columns:
    """Return the columns for prompts or instructions.

    Args:
        answer: None if there are no answers yet.
        begins: the part is the beginning of a stream, and later rows may have columns that are missing here.
    """
    if prompt != "instruction":
        return Columns("prompt", (prompt, answer) if answer else (prompt,))
    columns = [name for name in part.table.column_names if name != answer]
    extra = tuple(
        next((name for name in usual if name in columns), usual[0] if begins else None) for usual in INSTRUCTION_COLUMNS
    )
    return Columns("instruction", (prompt, answer) if answer else (prompt,), extra)


def find_prompt_columns(part: DataPart, flags: DataFlags, saved: Mapping[str, Any]) -> Columns:
    """Return the columns of texts to continue or answer, like :func:`find_columns` but without answers.

    The columns of the training part come first. If they are missing, any text column can be used.

    Args:
        saved: columns of the training part.

    Raises:
        DataError: there is no such column.
    """
    trained, columns = known_columns(flags, saved), part.table.column_names
    if trained is not None and trained.names[0] in columns:
        return replace(trained, names=trained.names[:1])
    if flags.text_column is None and saved.get("text_column") in columns:
        flags = replace(flags, text_column=saved["text_column"])
    name = part.column("text_column", flags.text_column, PROMPT_COLUMNS)
    if name in PROMPTS:
        return prompt_and_answer_columns(part, name, None)
    return Columns("chat" if _holds_lists(part, name) or name in CHAT_COLUMNS else "text", (name,))


def read_prompt(columns: Columns, fields: tuple[object, ...]) -> str | list[Message]:
    """Return a text to continue, or the messages to answer. An answer at the end of the messages is removed.

    Raises:
        DataError: the row cannot be used. The caller adds its location.
    """
    if columns.kind == "instruction":
        instruction, input_text, system = fields
        return [*_system_prompt(system), {"role": "user", "content": instruction_text(instruction, input_text)}]
    (value,) = fields
    if isinstance(value, str) or (columns.kind == "text" and not isinstance(value, list)):
        text = _text(value, columns.names[0])
        if not text.strip():
            raise DataError(f"the {columns.names[0]} is empty")
        return text
    messages = read_messages(value, columns.names[0])
    if messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError("there is no message to answer")
    return messages


@dataclass(frozen=True)
class ChatExample:
    """Messages. The first ``prompt_length`` of them are a prompt and are not learned."""

    messages: list[Message]
    prompt_length: int = 0

    @property
    def prompt(self) -> list[Message]:
        return self.messages[: self.prompt_length]


@dataclass(frozen=True)
class Completion:
    """A prompt and its completion, as texts."""

    prompt: str
    completion: str


Example = ChatExample | Completion


def rows_of(part: DataPart, columns: Columns) -> Iterator[tuple[object, ...]]:
    """Yield the values of ``columns`` for each row, as :func:`read_example` takes them.

    Raises:
        DataError: a row describes tools or earlier turns.
    """
    for column in ("tools", "functions"):
        _refuse(part, column, "tools are not supported in this version", "if the conversations use none")
    if columns.kind == "instruction":
        hint = "if the model should not learn from them; conversations belong in messages"
        _refuse(part, "history", "earlier turns in 'history' are not supported in this version", hint)
    existing = part.table.column_names
    names = [name if name in existing else None for name in (*columns.names, *columns.extra)]
    yield from zip(*(part.table[name][:] if name else [None] * len(part) for name in names), strict=True)


def _refuse(part: DataPart, column: str, message: str, unless: str) -> None:
    if column in part.table.column_names:
        row = next((row for row, value in enumerate(part.table[column][:]) if value), None)
        if row is not None:
            raise DataError(message, where=part.where(row), hint=f"remove the column '{column}', {unless}")


def read_example(fields: tuple[object, ...]) -> Example:
    """Return the conversation (one field), prompt and completion (two), or instruction (four) of a row.

    Raises:
        DataError: the row cannot be used. The caller adds its location.
    """
    if len(fields) == 1:
        return ChatExample(read_messages(fields[0], "conversation"))
    if len(fields) == 2:
        return read_completion(*fields)
    instruction, answer, input_text, system = fields
    user: Message = {"role": "user", "content": instruction_text(instruction, input_text)}
    if not _text(answer, "answer").strip():
        raise DataError("the answer is empty")
    prompt = [*_system_prompt(system), user]
    return ChatExample([*prompt, {"role": "assistant", "content": answer}], prompt_length=len(prompt))


def instruction_text(instruction: object, input_text: object) -> str:
    """Return an instruction. Its input, if there is one, follows after a blank line.

    Raises:
        DataError: the instruction is empty, or one of the two is not a text.
    """
    text = _text(instruction, "instruction")
    if not text.strip():
        raise DataError("the instruction is empty")
    return f"{text}\n\n{input_text}" if _text(input_text or "", "input").strip() else text


def _system_prompt(system: object) -> list[Message]:
    """Return the system prompt as a message, or nothing if it is empty."""
    return [{"role": "system", "content": system}] if _text(system or "", "system prompt").strip() else []


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"the {what} is {kind_of_value(value)}")
    return value


def read_completion(prompt: object, completion: object) -> Example:
    """Return a prompt and its completion. Both are texts, or both are lists of messages.

    Raises:
        DataError: they cannot be used. The caller adds the location.
    """
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion.strip():
            raise DataError("the completion is empty")
        return Completion(prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        asked = read_messages(prompt, "prompt") if prompt else []
        return ChatExample([*asked, *read_messages(completion, "completion")], prompt_length=len(asked))
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, (str, list)):
            raise DataError(f"the {name} is {kind_of_value(value)}", hint="write a text or a list of messages")
    message = f"the prompt is {kind_of_value(prompt)} and the completion is {kind_of_value(completion)}"
    raise DataError(message, hint="write both as texts, or both as lists of messages")
