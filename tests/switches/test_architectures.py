"""Every architecture that transformers can build small trains in each layout as in one process, or is refused."""

import random

import pytest

from tests.support.architecture_runs import LAYOUTS, compared, every

pytestmark = pytest.mark.distributed

EVERY = [(*model, layout) for model in every() for layout in LAYOUTS]
SAMPLE = random.Random(0).sample(EVERY, 6)
"""Runs of the default suite. ``scripts/architectures.py`` runs all of them."""
ONCE_FAILED = [("xlm", "causal", "recomputation")]
"""Further runs of the default suite, which ended in a stack trace in an earlier version."""
ONCE_FAILED_SLOWLY = [
    ("inkling2_text", "causal", "pipeline"),
    ("llama4_text", "causal", "pipeline"),
    ("qwen3_next", "causal", "tensor"),
]
"""The same for ``make test-longer``."""


def _mark(run: tuple[str, str, str]) -> list[pytest.MarkDecorator]:
    if run in ONCE_FAILED_SLOWLY:
        return [pytest.mark.longer]
    return [] if run in (*SAMPLE, *ONCE_FAILED) else [pytest.mark.exhaustive]


@pytest.mark.parametrize(
    ("architecture", "objective", "layout"), [pytest.param(*run, marks=_mark(run)) for run in EVERY]
)
def test_an_architecture_follows_one_process_or_is_refused(architecture: str, objective: str, layout: str) -> None:
    result = compared(architecture, objective, layout)
    assert result.state in ("equal", "refused"), result.text
