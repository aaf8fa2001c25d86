"""Messages of conversations: reads one message or a list of them in any of their forms.

The content of a message may be a list of parts, as in OpenAI's files. A part is ``{"type": "text", "text": …}``. The
types ``input_text`` and ``output_text`` of the Responses API mean the same. Text parts are joined into one text.
Source: OpenAI's reference of ``chat/completions`` and ``responses``.

Tools and calls have the form of ``transformers.apply_chat_template``: ``{"type": "function", "function": {"name": …,
"arguments": {…}}}`` for a call. The function alone, JSON texts, and OpenAI's older ``function_call`` are converted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from rapidformer_templates.data.text.bad_lines import BadLines
from rapidformer_templates.data.text.files import ROW_READERS, Row, data_suffix
from rapidformer_templates.errors import DataError, alike

Message = dict[str, object]
"""A message with ``role`` and ``content``, and other keys that the chat template may use."""

Tools = list[dict[str, object]]
"""JSON schemas of functions, each as ``{"type": "function", "function": {"name": …}}``."""

ROLES = ("system", "developer", "user", "assistant", "tool")
OLDER_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function": "tool"}
"""Roles of older forms. A message with the keys ``from`` and ``value`` may also be a ``function_call``."""

TOOL_COLUMNS = ("tools", "functions")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the thought before an answer. Templates read one of the first two, and get both."""

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
    message: Message = _without_none(value)
    if "role" not in message and "from" in message:
        role, content = message.pop("from"), message.pop("value", None)
        is_call = role == "function_call"
        message = {"role": "assistant" if is_call else role, "tool_calls" if is_call else "content": content, **message}
    role, content = message.get("role"), message.get("content")
    role = OLDER_ROLES.get(str(role), role)
    roles = f"roles are {', '.join(ROLES)}"
    if role is None:
        raise DataError(f"{what} has no role", hint=roles)
    if role not in ROLES:
        near = alike(str(role).lower(), (*ROLES, *OLDER_ROLES))
        guess = f"did you mean {OLDER_ROLES.get(near[0], near[0])}? " if near else ""
        raise DataError(f"{what} has the unknown role {role!r}", hint=guess + roles)
    if isinstance(content, list):
        content = joined_parts(content, what)
    calls = _calls(message.pop("tool_calls", None) or message.pop("function_call", None), what)
    if content is None and not calls:
        raise DataError(f"{what} has no content")
    if not isinstance(content, str | None):
        raise DataError(f"the content of {what} is {kind_of_value(content)}")
    if role == "assistant" and not calls and not (content or "").strip():
        raise DataError(f"{what} is an empty answer")
    _check_weight(message, what)
    thought = next((message[name] for name in REASONING if name in message), None)
    more: Message = dict.fromkeys(REASONING[:2], thought) if thought else {}
    more |= {name: value for name, value in (("content", content), ("tool_calls", calls)) if value is not None}
    return {**message, "role": role, **more}


def _without_none(value: Any) -> Any:
    """Return a value without the keys that are None, in all objects inside it."""
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list) else value


def _calls(value: object, what: str) -> list[dict[str, object]] | None:
    """Return the calls of a message, with arguments as objects. None if it has none.

    Raises:
        DataError: a call has no name, or its arguments are not an object.
    """
    value = _from_json(value, f"the calls of {what}")
    calls: list[dict[str, object]] = []
    for number, one in enumerate(value if isinstance(value, list) else [value] if value else [], start=1):
        call = _with_function(one, f"call {number} of {what}", '"arguments": {…}')
        function = call["function"]
        arguments = _from_json(function.get("arguments") or {}, f"the arguments of '{function['name']}' in {what}")
        if not isinstance(arguments, dict):
            raise DataError(f"the arguments of '{function['name']}' in {what} are {kind_of_value(arguments)}")
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls or None


def read_tools(value: object) -> Tools | None:
    """Return the tools of a row, or None if it has none.

    Args:
        value: a list of JSON schemas, or the same as a JSON text. A schema may be the function alone.

    Raises:
        DataError: a tool is not such a schema.
    """
    tools = _without_none(value) if isinstance(value, list) else _from_json(value, "the list of tools")
    tools = tools if isinstance(tools, list) else [tools] if tools else []
    form = '"description": …, "parameters": {…}'
    return [_with_function(tool, f"tool {number}", form) for number, tool in enumerate(tools, start=1)] or None


def _with_function(value: object, what: str, form: str) -> dict[str, Any]:
    """Return a tool or a call with its function inside, where some files have the function alone.

    Args:
        form: the keys of the function after its name, for the error message.

    Raises:
        DataError: there is no function, or it has no name.
    """
    outer = value if isinstance(value, dict) else {}
    if "function" not in outer:
        inner = {name: entry for name, entry in outer.items() if name not in ("type", "id")}
        outer = {name: outer[name] for name in outer.keys() - inner.keys()} | {"function": inner}
    if not isinstance(outer["function"], dict) or not isinstance(outer["function"].get("name"), str):
        hint = f'write {{"type": "function", "function": {{"name": …, {form}}}}}'
        raise DataError(f"{what} names no function", hint=hint)
    return {"type": "function", **outer}


def _from_json(value: object, what: str) -> Any:
    """Return a value that may be written as a JSON text. An empty text is None."""
    try:
        return (json.loads(value) if value.strip() else None) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"{what} cannot be read as JSON: {error}") from error


def _check_weight(message: Message, what: str) -> None:
    """Check that a message is learned or not, and nothing between.

    Raises:
        DataError: it has another weight.
    """
    for name in ("weight", "train"):
        if (value := message.get(name, 1)) not in (0, 1):
            hint = "1 learns the answer, and 0 leaves it out"
            raise DataError(f"{what} has the {name} {value!r}, and only 0 and 1 are supported", hint=hint)


def is_learned(message: Message) -> bool:
    """Whether no ``weight: 0`` or ``train: false`` leaves out an answer."""
    return bool(message.get("weight", 1)) and bool(message.get("train", True))


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
    """Yield (line, row) for each row of a file, as :func:`table_row` returns it."""
    is_filled = data_suffix(path) == ".parquet"
    for number, row in ROW_READERS[data_suffix(path)](path, bad):
        try:
            yield number, table_row(row, is_filled=is_filled)
        except DataError as error:
            bad.note(path, number, error.message, error.hint or "")


def table_row(row: Row, *, is_filled: bool = False) -> Row:
    """Return a row whose values a table can hold.

    A column of a table has one type, but a content may be a text or parts, and arguments and schemas may be anything.
    So parts are joined to a text, and calls and tools become JSON texts.

    Args:
        is_filled: the row comes from a table, where None marks keys that only other rows have. Otherwise it is a
            value, such as that of an argument.

    Raises:
        DataError: a part is not a text.
    """

    def as_json(value: object) -> str:
        return json.dumps(_without_none(value) if is_filled else value, ensure_ascii=False)

    def message_of(value: object, what: str) -> object:
        if not isinstance(value, dict) or "role" not in value:
            return value
        calls = {name: value.get(name) for name in ("tool_calls", "function_call")}
        calls = {name: as_json(entry) for name, entry in calls.items() if isinstance(entry, list | dict)}
        content = value.get("content")
        return value | calls | ({"content": joined_parts(content, what)} if isinstance(content, list) else {})

    def value_of(values: object, column: str) -> object:
        if not isinstance(values, list):
            return values
        first = next((value for value in values if isinstance(value, dict)), {})
        if first and (column in TOOL_COLUMNS or {"function", "parameters"} & first.keys()):
            return as_json(values)
        return [message_of(value, f"message {number} in '{column}'") for number, value in enumerate(values, start=1)]

    return {column: value_of(values, column) for column, values in row.items()}
