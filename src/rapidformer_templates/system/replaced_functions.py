"""Patches functions of other libraries for some of the calls that this library makes.

A patch is installed once and stays. A context variable decides whether it acts. So threads do not affect each other,
and nothing must be restored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

Answer = Callable[..., Any]
"""Takes the original function and the arguments of the call."""


def install(owner: Any, name: str, answer: Answer) -> None:
    """Patch ``owner.name`` to call ``answer``. A name that this version does not have is skipped."""
    original = getattr(owner, name, None)
    if not callable(original) or hasattr(original, "_rapidformer_stand_in"):
        return

    @wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return answer(original, *args, **kwargs)

    stand_in._rapidformer_stand_in = answer  # type: ignore[attr-defined]
    setattr(owner, name, stand_in)
