"""Remove lines from the product, to check that a test notices."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from types import CodeType
from typing import Any


@contextmanager
def without(module: str, line: str, instead: str = "pass") -> Iterator[None]:
    """Run with one line of the source replaced.

    Args:
        module: module whose source contains the line, in a function of the module or of a class.
        line: the line as it is in the source, without its indentation. It must occur exactly once.
        instead: the replacement.

    Raises:
        ValueError: the line does not occur, or it occurs more than once.
    """
    live = importlib.import_module(module)
    source = Path(live.__file__ or "").read_text(encoding="utf-8")
    if sum(text.strip() == line for text in source.splitlines()) != 1:
        raise ValueError(f"{module} has not one line '{line}'")
    changed = [text.replace(line, instead) if text.strip() == line else text for text in source.splitlines()]
    number = next(i for i, text in enumerate(source.splitlines(), 1) if text.strip() == line)
    code = compile("\n".join(changed), str(live.__file__), "exec")
    name, other = _outermost(code, number)
    function: Any = reduce(getattr, name.split("."), live)
    function = inspect.unwrap(function)  # torch wraps the steps of optimizers, some of them twice
    kept = function.__code__
    function.__code__ = other
    try:
        yield
    finally:
        function.__code__ = kept


def _outermost(code: CodeType, number: int) -> tuple[str, CodeType]:
    """Return the qualified name and the code of the outermost function that contains the line."""
    for part in (constant for constant in code.co_consts if isinstance(constant, CodeType)):
        lines = [line for _, _, line in part.co_lines() if line]
        nested = [line for inner in _inside(part) for _, _, line in inner.co_lines() if line]
        if number in (*lines, *nested):
            is_class = not part.co_flags & 0x2  # only functions have the flag CO_NEWLOCALS
            return _outermost(part, number) if is_class else (part.co_qualname, part)
    raise ValueError(f"line {number} is in no function")


def _inside(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inside(constant)
