"""Chat and instruction data: which columns hold them, and which forms a row can have.

A row is one of these:

- a list of messages (``messages``, or the older ``conversations``)
- a prompt with its completion: two texts, which are joined without changes, or two lists of messages
- an instruction with its input and its answer, which are rendered as a conversation

All but plain text can have tools in a further column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import pyarrow as pa

from rapidformer_templates.data.finetuning.messages import (
    TOOL_COLUMNS,
    Message,
    Tools,
    kind_of_value,
    read_messages,
    read_tools,
)
from rapidformer_templates.data.finetuning.tables import DataPart
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.flags import DataFlags
from rapidformer_templates.planning.tasks import CHAT_COLUMNS, PROMPT_COLUMNS, PROMPTS, TEXT_COLUMNS

INPUT_COLUMNS = ("input", "context")
"""Usual names of the input of an instruction."""

FLAGS = ("text_column", "label_column", "tools_column")
"""Flags that name the prompt column, the answer column and the column of tools."""

Kind = Literal["text", "chat", "prompt", "instruction"]

EXTRA: dict[Kind, tuple[str, ...]] = {
    "text": (),
    "chat": ("system_column", "tools_column"),
    "prompt": ("tools_column",),
    "instruction": ("input_column", "system_column", "tools_column"),
}
"""The further columns of each kind, as they are stored with a run."""


@dataclass(frozen=True)
class Columns:
    """The kind of a data set and the columns that hold it.

    Attributes:
        kind: plain text, conversations, prompts with completions, or instructions with answers.
        names: the only column, or the prompt column and the answer column.
        extra: the columns of :data:`EXTRA`. A part may lack them. None if there is no such column.
    """

    kind: Kind
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
        extra = dict(zip(EXTRA[self.kind], self.extra, strict=True))
        return {"kind": self.kind, **dict(zip(FLAGS, self.names, strict=False)), **extra}


def known_columns(flags: DataFlags, saved: Mapping[str, Any]) -> Columns | None:
    """Restore columns from :meth:`Columns.to_state`. Returns None if there are none or the flags name other columns."""
    if "kind" not in saved or any(getattr(flags, flag) not in (None, saved.get(flag)) for flag in FLAGS):
        return None
    names = tuple(saved[flag] for flag in FLAGS[:2] if flag in saved)
    return Columns(saved["kind"], names, tuple(saved.get(column) for column in EXTRA[saved["kind"]]))


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
            return _columns_of(part, flags, prompt, answer)
    if flags.label_column:
        prompt = part.column("text_column", flags.text_column, tuple(PROMPTS))
        answer = part.column("label_column", flags.label_column, ())
        return _columns_of(part, flags, prompt, answer)
    name = part.column("text_column", flags.text_column, (*CHAT_COLUMNS, *TEXT_COLUMNS))
    return _columns_of(part, flags, name)


def _columns_of(part: DataPart, flags: DataFlags, *names: str, is_prompt: bool = False) -> Columns:
    """Return columns of these names with the further ones of their kind. Other parts may have tools if this has none.

    Args:
        names: the prompt column and the answer column, or the only column.
        is_prompt: the only column is that of prompts.

    Raises:
        DataError: the flag names a column of tools that does not exist.
    """
    if flags.tools_column and not flags.streaming:
        part.column("tools_column", flags.tools_column, ())
    usual = dict(zip(EXTRA["instruction"], beside_instruction(part, names, begins=flags.streaming), strict=False))
    existing = part.table.column_names
    usual["tools_column"] = flags.tools_column or next((name for name in TOOL_COLUMNS if name in existing), "tools")
    values: pa.DataType = part.table.data.schema.field(names[0]).type
    kind: Kind = "text"
    if len(names) > 1 or is_prompt:
        kind = "instruction" if names[0] == "instruction" else "prompt"
    elif names[0] in CHAT_COLUMNS or pa.types.is_list(values) or pa.types.is_large_list(values):
        kind = "chat"
    return Columns(kind, names, tuple(usual[column] for column in EXTRA[kind]))


def beside_instruction(
    part: DataPart, used: tuple[str | None, ...], *, begins: bool = False
) -> tuple[str | None, str | None]:
    """Return the columns of the input and of the system prompt of an instruction. None if there is no such column.

    Args:
        used: other columns.
        begins: the part is the beginning of a stream, and later rows may have columns that are missing here.
    """
    columns = [name for name in part.table.column_names if name not in used]
    given, system = (
        next((name for name in usual if name in columns), usual[0] if begins else None)
        for usual in (INPUT_COLUMNS, ("system",))
    )
    return given, system


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
    return _columns_of(part, flags, name, is_prompt=name in PROMPTS)


def read_prompt(columns: Columns, fields: tuple[object, ...]) -> str | ChatExample:
    """Return a text to continue, or the messages to answer. An answer at the end of the messages is removed.

    Raises:
        DataError: the row cannot be used. The caller adds its location.
    """
    value, tools = fields[0], read_tools(fields[-1]) if columns.kind != "text" else None
    if columns.kind == "instruction":
        _, input_text, system, _ = fields
        user: Message = {"role": "user", "content": instruction_text(value, input_text)}
        return ChatExample([*_system_prompt(system), user], tools=tools)
    if isinstance(value, str) or (columns.kind == "text" and not isinstance(value, list)):
        text = _text(value, columns.names[0])
        if not text.strip():
            raise DataError(f"the {columns.names[0]} is empty")
        _refuse_tools_of_text(tools)
        return text
    messages = read_messages(value, columns.names[0])
    if messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError("there is no message to answer")
    return ChatExample(_with_system(messages, fields[1] if columns.kind == "chat" else None), tools=tools)


@dataclass(frozen=True)
class ChatExample:
    """Messages and tools. The first ``prompt_length`` messages are a prompt and are not learned."""

    messages: list[Message]
    prompt_length: int = 0
    tools: Tools | None = None

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
        DataError: a row describes earlier turns.
    """
    existing = part.table.column_names
    if columns.kind == "instruction" and "history" in existing:
        row = next((row for row, value in enumerate(part.table["history"][:]) if value), None)
        if row is not None:
            hint = "remove the column 'history', if the model should not learn from them"
            hint += "; conversations belong in messages"
            message = "earlier turns in 'history' are not supported in this version"
            raise DataError(message, where=part.where(row), hint=hint)
    names = [name if name in existing else None for name in (*columns.names, *columns.extra)]
    yield from zip(*(part.table[name][:] if name else [None] * len(part) for name in names), strict=True)


def read_example(columns: Columns, fields: tuple[object, ...]) -> Example:
    """Return the conversation, prompt and completion, or instruction of a row of :func:`rows_of`.

    Raises:
        DataError: the row cannot be used. The caller adds its location.
    """
    if columns.kind == "chat":
        messages, system, tools = fields
        return ChatExample(_with_system(read_messages(messages, "conversation"), system), tools=read_tools(tools))
    if columns.kind == "prompt":
        return read_completion(*fields)
    instruction, answer, input_text, system, tools = fields
    user: Message = {"role": "user", "content": instruction_text(instruction, input_text)}
    if not _text(answer, "answer").strip():
        raise DataError("the answer is empty")
    prompt = [*_system_prompt(system), user]
    return ChatExample([*prompt, {"role": "assistant", "content": answer}], len(prompt), read_tools(tools))


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


def _with_system(messages: list[Message], system: object) -> list[Message]:
    """Return messages with a system prompt from another column, unless they begin with one."""
    return messages if messages[0]["role"] in ("system", "developer") else [*_system_prompt(system), *messages]


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"the {what} is {kind_of_value(value)}")
    return value


def read_completion(prompt: object, completion: object, tools: object = None) -> Example:
    """Return a prompt and its completion. Both are texts, or both are lists of messages.

    Raises:
        DataError: they cannot be used. The caller adds the location.
    """
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion.strip():
            raise DataError("the completion is empty")
        _refuse_tools_of_text(read_tools(tools))
        return Completion(prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        asked = read_messages(prompt, "prompt") if prompt else []
        return ChatExample([*asked, *read_messages(completion, "completion")], len(asked), read_tools(tools))
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, (str, list)):
            raise DataError(f"the {name} is {kind_of_value(value)}", hint="write a text or a list of messages")
    message = f"the prompt is {kind_of_value(prompt)} and the completion is {kind_of_value(completion)}"
    raise DataError(message, hint="write both as texts, or both as lists of messages")


def _refuse_tools_of_text(tools: Tools | None) -> None:
    """Refuse tools for a plain text, which no template renders."""
    if tools:
        hint = "write the prompt as a list of messages, or remove the tools"
        raise DataError("there are tools, but the prompt is a text, which no chat template renders", hint=hint)
