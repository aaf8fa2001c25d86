"""Values of a wrong type or size in a DeepSpeed file: a plan, or an error that names the file's key."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates.errors import ConfigError, Refused
from rapidformer_templates.planning import resolve as resolve_module
from rapidformer_templates.planning.deepspeed_file.settings import merge_file
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.resolve import resolve
from tests.support.requests import GPUS, config_of, on
from tests.support.rotten_input import DEEPSPEED_FILE

WRONG = (
    None, True, -1, 10**400, 1e308, float("inf"), float("nan"), "", "much", "auto", [], [[1]], {}, {"a": {"b": []}},
)  # fmt: skip
MACHINE = on(GPUS, world_size=2, local_world_size=2)


def paths(section: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every value and every section."""
    for key, value in section.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


def with_value(path: tuple[str, ...], value: object) -> dict[str, Any]:
    content: dict[str, Any] = copy.deepcopy(DEEPSPEED_FILE)
    section = content
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    return content


@pytest.fixture(autouse=True)
def _without_suggestions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the search for a request that works, which takes a second for each refusal."""
    monkeypatch.setattr(resolve_module, "nearest", lambda request, registry: [])


def outcomes(path: tuple[str, ...], file: Path) -> Iterator[Plan | str]:
    """Yield the plan or the message of the error, for each wrong value at the path."""
    more = ("", "--zero-2-memory-optimization --hidden-size 64 --mixed-precision fp16")
    parsed = [config_of(f"--deepspeed-config {file} {flags}") for flags in more]  # does not read the file yet
    for value in WRONG:
        file.write_text(json.dumps(with_value(path, value)))
        for without_file in parsed:
            try:
                yield resolve(merge_file(without_file), MACHINE)
            except (ConfigError, Refused) as error:
                yield error.render()


@pytest.mark.parametrize("path", list(paths(DEEPSPEED_FILE)), ids=".".join)
def test_a_wrong_value_makes_a_plan_or_an_error(path: tuple[str, ...], tmp_path: Path) -> None:
    results = list(outcomes(path, tmp_path / "ds.json"))
    assert len(results) == 2 * len(WRONG)
    assert [message for message in results if isinstance(message, str) and "ds.json" not in message] == []
