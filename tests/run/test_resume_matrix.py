"""Any engine resumes what any other engine has saved with any number of workers. The curve is the uninterrupted one."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_runs import ENGINES, SAVED, STEPS, WholeRuns, run
from tests.support.parity import assert_close
from tests.support.selection import by_default, selected
from tests.support.worker_pool import run_in_workers

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")
pytest.importorskip("fairscale", reason="needs fairscale: pip install 'rapidformer_templates[fairscale]'")
pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed, pytest.mark.slow]

NAMES = list(ENGINES)
SAME = [(name, name) for name in NAMES]
NEXT = list(zip(NAMES, [*NAMES[1:], NAMES[0]], strict=True))
"""Pairs (source, target). There is only one format. So each engine only writes for one other engine and reads from one.

Four workers of an engine resume a run that two workers of the previous engine in the list have saved. By default, four
engines do so, of all kinds: replicas, fairscale, and DeepSpeed with and without offload.
``-m exhaustive`` tests all pairs on two workers, and each engine on four workers with a run that it has saved itself.
"""
SHORT = [("plain", "fsdp"), ("oss", "sdp"), ("zero-2", "zero-3"), ("zero-2-offload", "zero-3-offload")]
EVERY = [(source, target) for source in NAMES for target in NAMES if source != target]

Pairs = Sequence[tuple[str, str]]


def half_of(whole: Path, copy: Path) -> None:
    """Copy a run as if it had died after its first checkpoint."""
    shutil.copytree(whole, copy, ignore=shutil.ignore_patterns(f"step-{STEPS}", "summary.json"))
    (copy / "checkpoints" / "latest").write_text(f"step-{SAVED}\n")


def _go_on(workers: Any, root: str, pairs: Pairs) -> dict[Any, Any]:
    """Resume several runs, each in a separate folder, and return their curves."""
    return {pair: run(f"{root}/{'-'.join(pair)}", pair[1], workers.world, "--resume") for pair in pairs}


def resumed(workers: int, pairs: Pairs, whole: WholeRuns, root: Path) -> dict[Any, Any]:
    """Return, by pair, the second half of the target's run after the source's first half, trained by two workers."""
    for source, target in pairs:
        half_of(whole.root / source, root / f"{source}-{target}")
    return run_in_workers(workers, _go_on, str(root), pairs)[0]


@pytest.fixture(scope="module")
def same(
    request: pytest.FixtureRequest, whole_runs: WholeRuns, tmp_path_factory: pytest.TempPathFactory
) -> dict[Any, Any]:
    pairs = [(name, name) for name in selected(request, "name")]
    return resumed(2, pairs, whole_runs, tmp_path_factory.mktemp("same"))


@pytest.fixture(scope="module")
def next_ones(
    request: pytest.FixtureRequest, whole_runs: WholeRuns, tmp_path_factory: pytest.TempPathFactory
) -> dict[Any, Any]:
    sources = selected(request, "source")
    return resumed(4, [pair for pair in NEXT if pair[0] in sources], whole_runs, tmp_path_factory.mktemp("next"))


@pytest.fixture(scope="module")
def every(whole_runs: WholeRuns, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    return resumed(2, EVERY, whole_runs, tmp_path_factory.mktemp("every"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(str(tmp_path_factory.mktemp("reference") / "run"), "plain", 1)


@pytest.mark.parametrize(("source", "target"), by_default(SHORT, NEXT))
def test_four_workers_of_the_next_engine_go_on(source: str, target: str, next_ones: Any, reference: Any) -> None:
    assert_close(next_ones[source, target], reference[SAVED:])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("source", "target"), EVERY)
def test_any_goes_on_with_any(source: str, target: str, every: Any, reference: Any) -> None:
    assert_close(every[source, target], reference[SAVED:])


@pytest.mark.parametrize("name", by_default(("oss", "zero-3"), NAMES))
def test_the_same_engine_goes_on_bitwise(name: str, same: Any, whole_runs: WholeRuns, reference: Any) -> None:
    assert_close(whole_runs.curves[name], reference)
    assert same[name, name] == whole_runs.curves[name][SAVED:]


@pytest.mark.parametrize("name", by_default(("zero-3",), NAMES))
def test_two_workers_one_and_two_again(name: str, whole_runs: WholeRuns, tmp_path: Path, reference: Any) -> None:
    folder = tmp_path / f"{name}-{name}"
    half_of(whole_runs.root / name, folder)
    begun = run(str(folder), name, 1, "--resume", "--save-interval", "1", dies_after=SAVED + 2)
    assert_close(begun, reference[SAVED : SAVED + 2])
    resumed = run_in_workers(2, _go_on, str(tmp_path), [(name, name)])[0]
    # The checkpoint of the step in which a run dies is never written.
    assert_close(resumed[name, name], reference[SAVED + 1 :])


@pytest.mark.exhaustive
def test_two_workers_and_then_four(whole_runs: WholeRuns, tmp_path: Path, reference: Any) -> None:
    for curve in resumed(4, SAME, whole_runs, tmp_path).values():
        assert_close(curve, reference[SAVED:])


def test_the_reference_moves(reference: Any) -> None:
    assert len({loss for loss, _ in reference}) == STEPS
