"""Messages of conversations: reads one message or a list of them in any of their forms.

The content of a message may be a list of parts, as in OpenAI's files. A part is ``{"type": "text", "text": …}``. The
types ``input_text`` and ``output_text`` of the Responses API mean the same. Text parts are joined into one text.
Source: OpenAI's reference of ``chat/completions`` and ``responses``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.data.text.files import ROW_READERS, Row, data_suffix
from rapidformer_templates.errors import DataError, alike

Message = dict[str, object]
"""A message with ``role`` and ``content``, and other keys that the chat template may use."""

ROLES = ("system", "developer", "user", "assistant", "tool")
OLDER_ROLES = {"human": "user", "gpt": "assistant"}
"""Roles of the older form, which has the keys ``from`` and ``value``. Other role names have not changed."""

TEXT_PART_TYPES = ("text", "input_text", "output_text")


def read_messages(value: object, what: str) -> list[Message]:
    """Return a list of messages, each with a role and a text.

    Raises:
        DataError: the value is not a list of messages, or a message cannot be used. The caller adds the location.
    """
    if not isinstance(value, list):
        raise DataError(f"the {what} is {kind_of_value(value)}, not a list of messages")
    if not value:
        raise DataError(f"the {what} has no message")
    return [_message(message, f"message {number} of the {what}") for number, message in enumerate(value, start=1)]


def _message(value: object, what: str) -> Message:
    """Return a message in the current form. Keys that are None (tables add them at any depth) are left out.

    Raises:
        DataError: the message has no role or no text, an unknown role, or an empty answer.
    """
    if not isinstance(value, dict):
        raise DataError(f"{what} is {kind_of_value(value)}", hint='write {"role": …, "content": …}')
    message = _without_none(value)
    if "role" not in message and "from" in message:
        role = message.pop("from")
        message = {"role": OLDER_ROLES.get(str(role), role), "content": message.pop("value", None), **message}
    role, content = message.get("role"), message.get("content")
    roles = f"roles are {', '.join(ROLES)}"
    if role is None:
        raise DataError(f"{what} has no role", hint=roles)
    if role not in ROLES:
        near = alike(str(role).lower(), (*ROLES, *OLDER_ROLES))
        guess = f"did you mean {OLDER_ROLES.get(near[0], near[0])}? " if near else ""
        raise DataError(f"{what} has the unknown role {role!r}", hint=guess + roles)
    _refuse_ignored_fields(message, what)
    if isinstance(content, list):
        content = joined_parts(content, what)
    if content is None:
        raise DataError(f"{what} has no content")
    if not isinstance(content, str):
        raise DataError(f"the content of {what} is {kind_of_value(content)}")
    if role == "assistant" and not content.strip():
        raise DataError(f"{what} is an empty answer")
    return {**message, "role": role, "content": content}


def _without_none(value: Any) -> Any:
    """Return a value without the keys that are None, in all objects inside it."""
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list) else value


def _refuse_ignored_fields(message: Message, what: str) -> None:
    """Refuse fields that a chat template would silently ignore."""
    if message.get("tool_calls") or message.get("function_call"):
        raise DataError(f"{what} calls tools, which is not supported in this version", hint="remove the conversation")
    if message["role"] == "assistant" and message.get("weight", 1) != 1:
        hint = "remove the key to learn the answer, or end the conversation before it"
        raise DataError(f"{what} has the weight {message['weight']}, which is not supported in this version", hint=hint)


def kind_of_value(value: object) -> str:
    """Describe the type of a value of a row for a message, in the words of JSON: ``empty``, ``a list``."""
    if value is None:
        return "empty"
    names = {"list": "a list", "dict": "an object", "str": "a text"}
    return names.get(type(value).__name__, f"of type {type(value).__name__}")


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the common beginning of two sequences."""
    return sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(first, second, strict=False)))


def joined_parts(content: list[object], what: str) -> str:
    """Join the texts of a list of parts without separators.

    Args:
        content: the parts.
        what: the message that has this content, for error messages.

    Raises:
        DataError: a part has another type, or it is not a part.
    """
    texts = []
    for number, part in enumerate(content, start=1):
        where = f"part {number} of the content of {what}"
        if not isinstance(part, dict) or part.get("type") is None:
            raise DataError(f"{where} has no type", hint='write {"type": "text", "text": …}')
        if part["type"] not in TEXT_PART_TYPES:
            hint = "remove the part or the conversation; only text parts are read"
            message = f"{where} is of the type '{part['type']}', which is not supported in this version"
            raise DataError(message, hint=hint)
        if not isinstance(part.get("text"), str):
            raise DataError(f"{where} has no text", hint='write {"type": "text", "text": …}')
        texts.append(part["text"])
    return "".join(texts)


def rows_with_texts(path: Path, bad: BadLines) -> Iterator[tuple[int, Row]]:
    """Yield (line, row) for each row of a file, with the parts of each message joined to a text.

    A column may mix both forms of content.
    """
    for number, row in ROW_READERS[data_suffix(path)](path, bad):
        try:
            yield number, {key: _with_texts(v, key) if isinstance(v, list) else v for key, v in row.items()}
        except DataError as error:
            bad.note(path, number, error.message, error.hint or "")


def _with_texts(messages: list[object], column: str) -> list[object]:
    """Return a list of any values with the contents of its messages joined to texts."""
    return [
        {**message, "content": joined_parts(message["content"], f"message {number} in '{column}'")}
        if isinstance(message, dict) and "role" in message and isinstance(message.get("content"), list)
        else message
        for number, message in enumerate(messages, start=1)
    ]
