"""The content of a message as a list of parts, as OpenAI's files have it; those of text are one text.

A part is ``{"type": "text", "text": …}``; the types of the Responses form, ``input_text`` and ``output_text``,
mean the same. Source: OpenAI's reference of ``chat/completions`` and ``responses``.
"""

from __future__ import annotations

from typing import Any

from rapidformer_templates.data.text.files import Row
from rapidformer_templates.errors import DataError

OF_TEXT = ("text", "input_text", "output_text")


def joined_parts(content: list[Any], what: str) -> str:
    """The text of a list of parts, put together as it stands.

    Args:
        content: the parts.
        what: whose content it is, for messages.

    Raises:
        DataError: a part is of another type, or is none.
    """
    texts = []
    for number, part in enumerate(content, start=1):
        where = f"part {number} of the content of {what}"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is None:
            raise DataError(f"{where} has no type", hint='write {"type": "text", "text": …}')
        if kind not in OF_TEXT:
            hint = "take the part out, or the conversation; only parts of text are read"
            raise DataError(f"{where} is of the type '{kind}', which is not in this version", hint=hint)
        if not isinstance(part.get("text"), str):
            raise DataError(f"{where} has no text", hint='write {"type": "text", "text": …}')
        texts.append(part["text"])
    return "".join(texts)


def with_joined_parts(row: Row) -> Row:
    """A row whose messages have texts, so that those with parts can stand in a column beside those with a text.

    Raises:
        DataError: a part is not of text; see :func:`joined_parts`.
    """
    return {key: _joined_messages(value, key) if isinstance(value, list) else value for key, value in row.items()}


def _joined_messages(messages: list[Any], column: str) -> list[Any]:
    def in_parts(message: Any) -> bool:
        return isinstance(message, dict) and "role" in message and isinstance(message.get("content"), list)

    return [
        {**message, "content": joined_parts(message["content"], f"message {number} in '{column}'")}
        if in_parts(message)
        else message
        for number, message in enumerate(messages, start=1)
    ]
