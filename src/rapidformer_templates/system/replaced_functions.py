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


def patch_function(owner: object, name: str, answer: Answer) -> None:
    """Patch ``owner.name`` to call ``answer``. A name that this version does not have is skipped."""
    original = getattr(owner, name, None)
    if not callable(original) or hasattr(original, "_rapidformer_replacement"):
        return

    @wraps(original)
    def replacement(*args: object, **kwargs: object) -> object:
        return answer(original, *args, **kwargs)

    replacement._rapidformer_replacement = answer  # type: ignore[attr-defined]
    setattr(owner, name, replacement)
