"""What the runs of DeepSpeed stand on."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def deepspeed_parts(request: pytest.FixtureRequest) -> None:
    """Built before the workers of a module start, as a launch does it; of several test processes one builds."""
    if request.node.get_closest_marker("deepspeed") is None:
        return
    from rapidformer_templates.deepspeed_parts import PartError, build

    try:
        build(["cpu_adam"], "cpu")
    except PartError as error:
        pytest.skip(error.render())
