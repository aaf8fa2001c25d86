"""Message contents that are lists of parts, as in OpenAI's files. Text parts are joined into one text.

A part is ``{"type": "text", "text": …}``. The types ``input_text`` and ``output_text`` of the Responses API mean the
same. Source: OpenAI's reference of ``chat/completions`` and ``responses``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.data.text.files import ROW_READERS, Row, data_suffix
from rapidformer_templates.errors import DataError

OF_TEXT = ("text", "input_text", "output_text")


def joined_parts(content: list[Any], what: str) -> str:
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
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is None:
            raise DataError(f"{where} has no type", hint='write {"type": "text", "text": …}')
        if kind not in OF_TEXT:
            hint = "remove the part or the conversation; only text parts are read"
            raise DataError(f"{where} is of the type '{kind}', which is not supported in this version", hint=hint)
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
            yield number, {key: _joined_messages(v, key) if isinstance(v, list) else v for key, v in row.items()}
        except DataError as error:
            bad.note(path, number, error.message, error.hint or "")


def _joined_messages(messages: list[Any], column: str) -> list[Any]:
    def in_parts(message: Any) -> bool:
        return isinstance(message, dict) and "role" in message and isinstance(message.get("content"), list)

    return [
        {**message, "content": joined_parts(message["content"], f"message {number} in '{column}'")}
        if in_parts(message)
        else message
        for number, message in enumerate(messages, start=1)
    ]
