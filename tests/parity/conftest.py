"""What the runs of DeepSpeed stand on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.warm_workers import WarmWorkers


@pytest.fixture(autouse=True, scope="module")
def deepspeed_parts(request: pytest.FixtureRequest) -> None:
    """Built before the workers of a module start, as a launch does it; of several test processes one builds."""
    if request.node.get_closest_marker("deepspeed") is None:
        return
    from rapidformer_templates.switches.zero.compiled_parts import PartError, build

    try:
        build(["cpu_adam"], "cpu")
    except PartError as error:
        pytest.skip(error.render())


@pytest.fixture(scope="session")
def groups() -> Iterator[dict[int, WarmWorkers]]:
    """Workers for runs of a second: groups of two and of four, which start when they are first asked."""
    groups = {count: WarmWorkers(count) for count in (2, 4)}
    yield groups
    for group in groups.values():
        group.end()
