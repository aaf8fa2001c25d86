"""What any engine saved with any number of workers, any other goes on with: the curve is the uninterrupted one."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from tests.support.engine_runs import ENGINES, SAVED, STEPS, run
from tests.support.worker_group import run_in_workers

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
pytest.importorskip("fairscale", reason="needs fairscale: pip install 'rapidformer_templates[fairscale]'")
pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed, pytest.mark.slow]

NAMES = list(ENGINES)
EVERY = {(source, target) for source in NAMES for target in NAMES}
NEXT = set(zip(NAMES, [*NAMES[1:], NAMES[0]], strict=True))
SOME = {pair for pair in EVERY if pair[0] == pair[1] or "plain" in pair} | NEXT
"""There is one format, so that what each engine writes and reads is tested; ``-m exhaustive`` tests the other pairs."""


def resume(source: str, target: str, engine: str, workers: Any, **how: Any) -> Any:
    """Go on from a copy of a run, so that others can start from it, too."""
    if workers.is_main:
        shutil.copytree(source, target)
    workers.barrier()
    return run(target, engine, workers.world, "--resume", **how)


def _begin(workers: Any, root: str) -> dict[Any, Any]:
    """Whole runs, and beside them those that die; then some go on."""
    curves: dict[Any, Any] = {}
    for name in NAMES:
        curves["whole", name] = run(f"{root}/whole-{name}", name, 2)
        run(f"{root}/half-{name}", name, 2, dies_after=SAVED + 1)
    return curves | _go_on(workers, root, SOME)


def _go_on(workers: Any, root: str, pairs: set[tuple[str, str]]) -> dict[Any, Any]:
    return {
        (source, target): resume(f"{root}/half-{source}", f"{root}/{source}-{target}", target, workers)
        for source, target in sorted(pairs)
    }


def _from_one(workers: Any, root: str) -> dict[str, Any]:
    """The end of runs that two workers began and one went on with."""
    return {name: resume(f"{root}/one-{name}", f"{root}/two-{name}", name, workers) for name in NAMES}


def _four(workers: Any, root: str) -> dict[str, Any]:
    return {name: resume(f"{root}/half-{name}", f"{root}/four-{name}", name, workers) for name in NAMES}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def pairs(root: str) -> dict[Any, Any]:
    return run_in_workers(2, _begin, root)[0]


@pytest.fixture(scope="module")
def others(root: str, pairs: Any) -> dict[Any, Any]:
    return run_in_workers(2, _go_on, root, EVERY - SOME)[0]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(str(tmp_path_factory.mktemp("reference") / "run"), "plain", 1)


def _assert_close(curve: Any, expected: Any) -> None:
    assert len(curve) == len(expected)
    torch.testing.assert_close(torch.tensor(curve), torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("source", "target"), sorted(SOME))
def test_a_run_goes_on_under_another_engine(source: str, target: str, pairs: Any, reference: Any) -> None:
    _assert_close(pairs[source, target], reference[SAVED:])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("source", "target"), sorted(EVERY - SOME))
def test_any_goes_on_with_any(source: str, target: str, others: Any, reference: Any) -> None:
    _assert_close(others[source, target], reference[SAVED:])


@pytest.mark.parametrize("name", NAMES)
def test_the_same_engine_goes_on_bitwise(name: str, pairs: Any, reference: Any) -> None:
    _assert_close(pairs["whole", name], reference)
    assert pairs[name, name] == pairs["whole", name][SAVED:]


def test_two_workers_one_and_two_again(pairs: Any, root: str, reference: Any) -> None:
    for name in NAMES:
        shutil.copytree(f"{root}/half-{name}", f"{root}/one-{name}")
        begun = run(f"{root}/one-{name}", name, 1, "--resume", "--save-interval", "1", dies_after=SAVED + 2)
        _assert_close(begun, reference[SAVED : SAVED + 2])
    for curve in run_in_workers(2, _from_one, root)[0].values():
        # The checkpoint of the step in which a run dies is not written any more.
        _assert_close(curve, reference[SAVED + 1 :])


def test_two_workers_and_then_four(pairs: Any, root: str, reference: Any) -> None:
    for curve in run_in_workers(4, _four, root)[0].values():
        _assert_close(curve, reference[SAVED:])


def test_the_reference_moves(reference: Any) -> None:
    assert len({loss for loss, _ in reference}) == STEPS
