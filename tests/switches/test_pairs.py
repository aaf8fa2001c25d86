"""Every accepted combination of switches follows one process with the same mathematics.

Pairs by ``-m exhaustive``, with them as many triples as ``RAPIDFORMER_TRIPLES`` says (default: 60), drawn by the seed
``RAPIDFORMER_SEED`` (default: 0); without it a tenth of the pairs, drawn by the same seed.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from rapidformer_templates.planning.registry import REGISTRY
from tests.support.combinations import VARIANTS, Combination, accepted, all_accepted, distance, train
from tests.support.warm_workers import Failure, outcome
from tests.support.worker_group import why_no_nvme

pytestmark = [pytest.mark.distributed, pytest.mark.deepspeed]

SEED = int(os.environ.get("RAPIDFORMER_SEED", "0"))
TRIPLES = int(os.environ.get("RAPIDFORMER_TRIPLES", "60"))

ROUNDING = {
    "fp32": (1e-5, "sums in another order"),
    "bf16": (2**-7, "8 bits of mantissa: each sum over workers or micro batches rounds in another order"),
    "fp16": (2**-9, "11 bits of mantissa, likewise"),
}
"""Greatest relative difference by the type of the matrix products, and why there is one."""

CHOICES = (0.05, "a token whose two best experts are nearly alike goes to another one where 16 bits round otherwise")
"""Of a mixture in 16 bits."""

REFUSED = ("the loss does not reach", "a micro batch does not come by all parameters")
"""What ZeRO says of parameters that no worker reaches, or that one leaves out while others gather them."""

COSTLY = {"onnx-runtime", "torch-compile"}
"""Graphs take seconds to make."""


TENTH = 14
"""Pairs, of about 144 that the rules accept on a CPU."""


def _triples() -> list[Combination]:
    """Combinations that the rules accept, in an order that the seed draws."""
    triples = list(itertools.combinations([switch.name for switch in REGISTRY.switches], 3))
    random.Random(SEED).shuffle(triples)
    return list(itertools.islice((found for names in triples if (found := accepted(names))), TRIPLES))


@cache
def _reference(template: str, flags: tuple[str, ...], variant: str, wide: bool, folder: str) -> Any:
    return outcome(train, template, flags, variant, wide, f"{folder}/reference-{len(os.listdir(folder))}")


def _assert_follows(
    found: Combination, variant: str, groups: Any, folder: str, record: Callable[[str, object], None]
) -> None:
    """Train it beside its reference; ``record`` takes how far they are apart, for ``--junitxml``."""
    wide = "nvme-offload" in found.names
    if wide and (why := why_no_nvme()):
        pytest.skip(why)
    wanted = _reference(found.template, found.reference, variant, wide, folder)
    place = f"{folder}/run-{len(os.listdir(folder))}"
    results = groups[found.world].run(train, found.template, found.flags, variant, wide, place)
    shutil.rmtree(place, ignore_errors=True)
    if variant == "branches" and found.plan.engine.endswith("DeepSpeedEngine"):
        for result in results:
            assert isinstance(result, Failure)
            assert result.text.removeprefix("error: ").startswith(REFUSED)
        return
    for result in (wanted, *results):
        assert not isinstance(result, Failure), result.text
    flips = "mixture-of-experts" in found.plan.switches and found.plan.precision != "fp32"
    limit, why = CHOICES if flips else ROUNDING[found.plan.precision]
    apart = distance(results[0], wanted)
    record(found.plan.precision, apart.worst)
    assert apart.worst <= limit, f"{found}: {apart}; {why} explains {limit:.1e}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("combinations"))


def _pairs() -> list[Combination]:
    return [*all_accepted(1), *all_accepted(2)]


def _some_pairs() -> list[Combination]:
    """A tenth, of those whose graphs are not costly to make."""
    names = [switch.name for switch in REGISTRY.switches if switch.name not in COSTLY]
    pairs = random.Random(SEED).sample(list(itertools.combinations(names, 2)), k=40)
    return [found for pair in pairs if (found := accepted(pair, most=2))][:TENTH]


def _engines() -> list[Combination]:
    """Every engine alone, and with several micro batches a step."""
    owning = [switch.name for switch in REGISTRY.switches if switch.engine]
    names = [(), ("gradient-accumulation",), *((name,) for name in owning)]
    names += [("gradient-accumulation", name) for name in owning]
    return [found for name in names if (found := accepted(name))]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Which combinations there are takes seconds to find out, so that only those are looked for that are asked for."""
    making = {"some_pair": _some_pairs, "pair": _pairs, "triple": _triples, "engine": _engines}
    for name in making.keys() & set(metafunc.fixturenames):
        wanted = name == "some_pair" or metafunc.config.getoption("markexpr") == "exhaustive"
        metafunc.parametrize(name, making[name]() if wanted else [], ids=str)


def test_some_pairs_follow_one_process(some_pair: Combination, groups: Any, folder: str, record_property: Any) -> None:
    _assert_follows(some_pair, "plain", groups, folder, record_property)


@pytest.mark.exhaustive
def test_every_pair_follows_one_process(pair: Combination, groups: Any, folder: str, record_property: Any) -> None:
    _assert_follows(pair, "plain", groups, folder, record_property)


@pytest.mark.exhaustive
def test_triples_follow_one_process(triple: Combination, groups: Any, folder: str, record_property: Any) -> None:
    _assert_follows(triple, "plain", groups, folder, record_property)


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_every_engine_follows_whatever_a_batch_reaches(
    engine: Combination, variant: str, groups: Any, folder: str, record_property: Any
) -> None:
    _assert_follows(engine, variant, groups, folder, record_property)
