"""The promises about a step are kept in one place: no engine can lose one of them by overriding a method."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import rapidformer_templates
from rapidformer_templates.engines.local import SingleEngine
from rapidformer_templates.engines.step import Step

CONTRACT: dict[type, set[str]] = {
    SingleEngine: {
        "setup",
        "begin",
        "check_loss",
        "backward",
        "reduce",
        "norm",
        "update",
        "raise_pending_errors",
        "keep_average",
        "averaged",
    },
    Step: {
        *("run", "forward", "backward", "update"),
        *("_begin_forward", "_end_forward", "_begin_backward", "_end_micro_batch", "_complete_gradients"),
    },
}


def _subclasses(kind: type) -> Iterator[type]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _engines() -> list[type]:
    """Return every engine of the package, including those that are not in the registry yet."""
    pytest.importorskip("deepspeed")
    pytest.importorskip("fairscale")
    for module in pkgutil.walk_packages(rapidformer_templates.__path__, "rapidformer_templates."):
        if ".engines." in module.name or module.name.endswith(("engine", "_parallel")):
            importlib.import_module(module.name)
    return list(dict.fromkeys(_subclasses(SingleEngine)))


def test_no_engine_overrides_the_contract() -> None:
    engines = _engines()
    assert {"DDPEngine", "FSDPEngine", "ParallelEngine", "PipelineEngine", "DeepSpeedEngine"} <= {
        engine.__name__ for engine in engines
    }
    assert [step.__name__ for step in _subclasses(Step)] == ["PipelineStep"]
    for kind, names in CONTRACT.items():
        final = {name for name, value in vars(kind).items() if getattr(value, "__final__", False)}
        assert final == names
        heirs = list(_subclasses(kind))
        assert [f"{heir.__name__}.{name}" for heir in heirs for name in sorted(names & vars(heir).keys())] == []
