"""The promises about a step are kept in one place: no engine can lose one of them by overriding a method."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import rapidformer_templates
from rapidformer_templates.engines.local import SingleEngine

CONTRACT = {
    *(
        "setup",
        "train_batch",
        "raise_pending_errors",
        "_accumulate_gradients",
        "_exchange",
        "_loss_of",
        "_begin_backward",
        "_grad_norm",
    ),
    *("keep_average", "averaged"),
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
        if ".engines." in module.name or module.name.endswith((".engine", "_parallel")):
            importlib.import_module(module.name)
    return list(dict.fromkeys(_subclasses(SingleEngine)))


def test_no_engine_overrides_the_contract() -> None:
    engines = _engines()
    assert {"DDPEngine", "FSDPEngine", "ParallelEngine", "PipelineEngine", "DeepSpeedEngine"} <= {
        engine.__name__ for engine in engines
    }
    kept = {name for name, value in vars(SingleEngine).items() if getattr(value, "__final__", False)}
    assert kept == CONTRACT
    overridden = [f"{engine.__name__}.{name}" for engine in engines for name in sorted(kept & vars(engine).keys())]
    assert overridden == []
