"""The figures of a small package, counted by hand."""

from __future__ import annotations

from pathlib import Path

from scripts.grain import measure, modules_of

ONE = '''"""A module."""
from typing import Any

from package.switches.two import helper


def shown(value: Any) -> int:
    """Return a number."""
    # A comment is not a line of code.
    first = _step(value)

    return first + 1


def _step(value):
    return value


class Shape:
    pass
'''
TWO = """def helper(model: "nn.Module") -> None:
    vars(model)["fact"] = 1
    model.other = 2
    model.forward = 3


class Shape:
    pass
"""


def test_figures_of_a_small_package(tmp_path: Path) -> None:
    switches = tmp_path / "package/switches"
    switches.mkdir(parents=True)
    (switches / "one.py").write_text(ONE)
    (switches / "two.py").write_text(TWO)
    modules = modules_of(tmp_path / "package")
    assert {module.room for module in modules} == {"switches"}
    assert dict(measure("package", modules, modules).rows()) == {
        "code lines": 15,
        "modules": 2,
        "functions": 3,
        "body of a function, median lines": 2,
        "functions with a body of one line": 1,
        "private functions used once": 1,
        "Any": 1,
        "class names that exist twice or more": 1,
        "imports from one switch into another": 1,
        "facts pinned on modules": 2,
    }
