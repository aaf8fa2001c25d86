"""Choose which cases ``make test`` and ``make test-longer`` run. Fixtures train only what is tested."""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def by_default(taken: Collection[Any], cases: Iterable[Any], exhaustive: Collection[Any] = ()) -> list[Any]:
    """Build parameters for :func:`pytest.mark.parametrize`.

    Cases of ``exhaustive`` get the mark ``exhaustive``, and all others except ``taken`` the mark ``longer``. A case
    that is a tuple contains the values of several arguments.
    """
    parameters = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        other = pytest.mark.exhaustive if case in exhaustive else pytest.mark.longer
        parameters.append(pytest.param(*values, marks=() if case in taken else other))
    return parameters


def few(taken: Collection[Any], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Build parameters for a product of several arguments: few of its cases, in which each value of each occurs.

    Cases except ``taken`` get the mark ``longer``.
    """
    rest, chosen = list(cases), list(taken)
    every = {value for case in rest for value in enumerate(case)}
    while missing := every.difference(uses := Counter(value for case in chosen for value in enumerate(case))):
        # The case with most of what is missing and, among several, with what few cases have.
        chosen.append(
            max(rest, key=lambda case: [len(missing & {*enumerate(case)}), -sum(uses[v] for v in enumerate(case))])
        )
    return by_default(taken, chosen)


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
