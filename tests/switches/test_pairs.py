"""Every accepted combination of switches follows one process that computes the same.

The covering table contains every accepted pair. Rows of two workers run by default. Others take long: ``-m longer``.
``-m exhaustive`` runs each pair alone and ``RAPIDFORMER_TRIPLES`` triples (default: 60), drawn with the seed
``RAPIDFORMER_SEED`` (default: 0).
"""

import itertools
import os
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from rapidformer_templates.planning.environment import installed_packages
from rapidformer_templates.planning.registry import REGISTRY
from tests.support import covering
from tests.support.combinations import (
    FP8,
    VARIANTS,
    Combination,
    Size,
    accepted,
    all_accepted,
    distance,
    smallest,
    train,
)
from tests.support.machine import why_no_nvme
from tests.support.worker_pool import Failure, outcome, outcomes_in_workers

pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

SEED = int(os.environ.get("RAPIDFORMER_SEED", "0"))
TRIPLES = int(os.environ.get("RAPIDFORMER_TRIPLES", "60"))

ROUNDING = {
    "fp32": (1e-5, "sums in another order"),
    "bf16": (2**-7, "8 bits of mantissa: each sum over workers or micro batches rounds in another order"),
    "fp16": (2**-9, "11 bits of mantissa, likewise"),
}
"""Largest relative difference by the type of the matrix products, and the reason for it."""

CHOICES = (0.05, "a token whose two best experts are nearly equal goes to another one where 16 bits round otherwise")
"""The same for a mixture in 16 bits."""

REFUSED = ("the loss does not reach", "a micro batch does not use")
"""Beginnings of ZeRO's errors if no worker reaches a parameter, or if one worker skips what others gather."""

NAMES = [switch.name for switch in REGISTRY.switches]


@cache
def _reference(template: str, flags: tuple[str, ...], variant: str, size: Size) -> Any:
    return outcome(train, None, template, flags, variant, size)


def _problem(found: Combination, variant: str = "plain", record: Callable[[str, object], None] | None = None) -> str:
    """Train a combination and its reference. Return how they differ, or "" if they agree.

    Args:
        record: receives the distance between them, for ``--junitxml``.
    """
    if "nvme-offload" in found.names and (why := why_no_nvme()):
        pytest.skip(why)
    if FP8 in found.names and "torchao" not in installed_packages():
        pytest.skip("needs torchao: pip install 'rapidformer_templates[torchao]'")
    wanted = _reference(found.template, found.reference, variant, found.size)
    results = outcomes_in_workers(found.world, train, found.template, found.flags, variant, found.size)
    if variant == "branches" and found.plan.engine.endswith("DeepSpeedEngine"):
        refused = [isinstance(r, Failure) and r.text.removeprefix("error: ").startswith(REFUSED) for r in results]
        return "" if all(refused) else f"{found}: not refused"
    for result in (wanted, *results):
        if isinstance(result, Failure):
            return f"{found}: {result.text}\n{result.trace}"
    flips = "mixture-of-experts" in found.plan.switches and found.plan.precision != "fp32"
    limit, why = CHOICES if flips else ROUNDING[found.plan.precision]
    apart = distance(results[0], wanted)
    if record:
        record(found.plan.precision, apart.worst)
    return "" if apart.worst <= limit else f"{found}: {apart}; {why} explains {limit:.1e}"


def _smaller(names: tuple[str, ...]) -> Iterator[str]:
    """Yield the failures of single switches and pairs of a failed row."""
    parts = (part for size in (1, 2) for part in itertools.combinations(names, size))
    return (problem for part in parts if (found := smallest(part)) and (problem := _problem(found)))


def _triples() -> list[Combination]:
    """Return combinations that the rules accept, in an order drawn with the seed."""
    triples = list(itertools.combinations(NAMES, 3))
    random.Random(SEED).shuffle(triples)
    return list(itertools.islice((found for names in triples if (found := accepted(names))), TRIPLES))


def _pairs() -> list[Combination]:
    return [*all_accepted(1), *all_accepted(2)]


def _engines() -> list[Combination]:
    """Return every engine alone, and with several micro batches per step."""
    owning = [switch.name for switch in REGISTRY.switches if switch.engine]
    names = [(), ("gradient-accumulation",), *((name,) for name in owning)]
    names += [("gradient-accumulation", name) for name in owning]
    return [found for name in names if (found := accepted(name))]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Find the combinations only if a test needs them, because that takes seconds."""
    making = {"pair": _pairs, "triple": _triples, "engine": _engines}
    for name in making.keys() & set(metafunc.fixturenames):
        wanted = metafunc.config.getoption("markexpr") == "exhaustive"
        metafunc.parametrize(name, making[name]() if wanted else [], ids=str)


def _takes_long(row: list[str]) -> bool:
    """Four workers share two cores, a disk is slow, and every shape is compiled."""
    found = smallest(row)
    has_four = found is not None and found.world > 2
    return has_four or "nvme-offload" in row or bool(covering.pairs_of(row) & covering.SLOW)


ROWS = [
    pytest.param(row, id=" + ".join(row), marks=[pytest.mark.longer] if _takes_long(row) else [])
    for row in covering.table()["rows"]
    if FP8 not in row  # see fp8/test_pairs.py
]


@pytest.mark.parametrize("row", ROWS)
def test_rows_that_cover_all_pairs_follow_one_process(row: list[str], record_property: Any) -> None:
    check_row(row, record_property)


def check_row(row: list[str], record_property: Any) -> None:
    """Compare a row with one process. If it fails, name the switches and pairs that fail alone."""
    found = smallest(row)
    assert found is not None, f"the rules refuse {row}: run python -m tests.support.covering"
    problem = _problem(found, record=record_property)
    if problem:
        causes = "\n".join(_smaller(found.names)) or "no switch and no pair of it fails alone"
        pytest.fail(f"{problem}\n\n{causes}")


def test_the_table_has_every_accepted_pair() -> None:
    table = covering.table()
    pairs = {tuple(pair) for pair in table["pairs"]}
    assert pairs == set(covering.accepted_of(2)), "run python -m tests.support.covering"
    assert pairs <= set().union(*map(covering.pairs_of, table["rows"]))


@pytest.mark.exhaustive
def test_the_table_is_what_the_registry_gives() -> None:
    table = covering.table()
    assert table["rows"] == covering.cover((one, other) for one, other in table["pairs"])
    triples = covering.accepted_of(3)
    covered = [triple for triple in triples if any(set(triple) <= set(row) for row in table["rows"])]
    assert table["triples"] == {"accepted": len(triples), "covered": len(covered)}


@pytest.mark.exhaustive
def test_every_pair_follows_one_process(pair: Combination, record_property: Any) -> None:
    assert not _problem(pair, record=record_property)


@pytest.mark.exhaustive
def test_triples_follow_one_process(triple: Combination, record_property: Any) -> None:
    assert not _problem(triple, record=record_property)


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_every_engine_follows_whatever_a_batch_reaches(engine: Combination, variant: str, record_property: Any) -> None:
    assert not _problem(engine, variant, record_property)
