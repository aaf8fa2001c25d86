"""Functions of another library that answer otherwise in a part of our own calls.

A stand-in is put in once and stays; whether it acts is a context variable's to say, so that threads do not
see each other's, and nothing is to be put back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

Answer = Callable[..., Any]
"""Takes the function that it stands in for, and that function's own arguments."""


def install(owner: Any, name: str, answer: Answer) -> None:
    """Have ``answer`` called instead of ``owner.name``; a name that this version does not have is left out."""
    original = getattr(owner, name, None)
    if not callable(original) or hasattr(original, "_rapidformer_stand_in"):
        return

    @wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return answer(original, *args, **kwargs)

    stand_in._rapidformer_stand_in = answer  # type: ignore[attr-defined]
    setattr(owner, name, stand_in)
