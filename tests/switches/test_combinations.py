"""Up to three switches × three templates: accepted, or refused with reasons and an accepted alternative."""

import dataclasses
import itertools
from unittest import mock

import pytest

from rapidformer_templates.errors import Refused
from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.planning.registry import REGISTRY, Registry
from rapidformer_templates.planning.resolve import Path, nearest, resolve, to_suggestion
from rapidformer_templates.planning.switch import TEMPLATES, Request
from tests.support.requests import CPU, GPUS, on, with_switches
from tests.support.selection import by_default

NAMES = [switch.name for switch in REGISTRY.switches]
UP_TO_PAIRS = [names for size in range(3) for names in itertools.combinations(NAMES, size)]
TRIPLES = list(itertools.combinations(NAMES, 3))


PLACES = {"CPU": CPU, "GPUs": GPUS}


def _all_have_a_way(place: str, template: str, combinations: list[tuple[str, ...]]) -> None:
    there = on(PLACES[place], template=template, template_origin="train.py:8")
    accepted = [_is_accepted_or_mended(names, there) for names in combinations]
    assert sum(accepted) >= 22, "the rules refuse nearly everything"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("place", by_default(["GPUs"], PLACES))
def test_every_pair_is_accepted_or_mended(place: str, template: str) -> None:
    """Templates differ in the switches that they accept. Pairs show these differences."""
    _all_have_a_way(place, template, UP_TO_PAIRS)


@pytest.mark.parametrize("template", by_default([], TEMPLATES, {*TEMPLATES} - {"Trainer"}))
def test_every_triple_is_accepted_or_mended(template: str) -> None:
    _all_have_a_way("GPUs", template, TRIPLES)


def _is_accepted_or_mended(names: tuple[str, ...], place: Environment) -> bool:
    config = with_switches(names)
    searched: list[tuple[Request, list[Path]]] = []

    def search(request: Request, registry: Registry) -> list[Path]:
        searched.append((request, nearest(request, registry)))
        return searched[-1][1]

    try:
        with mock.patch("rapidformer_templates.planning.resolve.nearest", search):
            plan = resolve(config, place)
    except Refused as refused:
        ((request, paths),) = searched
        for found in refused.diagnostics:
            assert found.rule
            assert found.message
            assert found.why
            assert found.source
            assert found.works == tuple(to_suggestion(path, request) for path in paths)
        assert paths
        for path in paths:
            mended, there = config, place
            for change in path:
                mended = mended.replace("suggestion", **change.values)
                there = dataclasses.replace(there, template=change.template or there.template)
            resolve(mended, there)  # raises when the suggestion is refused in turn
        return False
    assert set(names) <= set(plan.switches), "an accepted switch is active in the plan"
    return True


def test_all_switches_at_once_still_have_a_way_out() -> None:
    for registry, place in ((REGISTRY, CPU), (REGISTRY, GPUS)):
        with pytest.raises(Refused) as refused:
            resolve(with_switches(NAMES).replace("test", epochs=3, train_iters=4), place, registry)
        assert all(found.works for found in refused.value.diagnostics)
