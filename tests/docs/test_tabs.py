"""The tabs of the manual do the same: a command, a call in Python, and a YAML file."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.registry import switch_options
from scripts.manual import tabs
from tests.support.manual import PAGES, blocks, name

COMMANDS = [
    pytest.param(words, id=f"{name(page)}-{i}")
    for page in PAGES
    for i, block in enumerate(blocks(page, "bash"))
    if (words := tabs.training_words(block))
]


def _given(config: RunConfig) -> Mapping[str, Any]:
    """Return the given values. Only one side has the name of the file and that of the template."""
    left_out = ("config", "template")
    return {name: value for name, value in config.items() if config.origin(name) != "default" and name not in left_out}


def test_many_commands_have_tabs() -> None:
    assert len(COMMANDS) > 20


@pytest.mark.parametrize("words", COMMANDS)
def test_the_file_is_the_command(words: Sequence[str], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(tabs.as_yaml(words), encoding="utf-8")
    assert _given(parse(["--config", str(file)], switch_options())) == _given(parse(words, switch_options()))


@pytest.mark.parametrize("words", COMMANDS)
def test_the_call_is_the_command(words: Sequence[str]) -> None:
    _, statement = ast.parse(tabs.as_python(words)).body
    assert isinstance(statement, ast.Expr)
    fit = statement.value
    assert isinstance(fit, ast.Call)
    assert isinstance(fit.func, ast.Attribute)
    assert isinstance(fit.func.value, ast.Call)
    values = {str(word.arg): ast.literal_eval(word.value) for word in fit.func.value.keywords}
    for word in fit.keywords:
        assert word.arg == "workers"
        values["nproc_per_node"] = ast.literal_eval(word.value)
    called = parse([], switch_options(), in_code={name: (value, "a cell") for name, value in values.items()})
    assert _given(called) == _given(parse(words, switch_options()))


def test_other_blocks_stay() -> None:
    for page in (
        "```bash\nmake demo\n```\n",
        "```bash\nrapidformer --config my.yaml\n```\n",
        "```bash\nrapidformer --task causal_lm …\n```\n",
    ):
        assert tabs.with_tabs(page) == page
