"""Choose which cases ``make test`` runs. ``make test-longer`` runs the others. Fixtures train only what is tested."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def by_default(taken: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Build parameters for :func:`pytest.mark.parametrize`. All cases except ``taken`` get the mark ``longer``.

    A case that is a tuple contains the values of several arguments.
    """
    parameters = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        parameters.append(pytest.param(*values, marks=() if case in taken else pytest.mark.longer))
    return parameters


def selected(request: pytest.FixtureRequest, argument: str) -> list[Any]:
    """Return the distinct values of an argument in those tests of this module that will run, in the order of the tests.

    Args:
        request: request of a fixture in the module.
        argument: name of a parameter of the tests.
    """
    values: list[Any] = []
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.path == request.path and hasattr(item, "callspec"):
            value = item.callspec.params.get(argument)
            if value is not None and value not in values:
                values.append(value)
    return values
