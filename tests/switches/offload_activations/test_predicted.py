"""The planner's prediction for activations on the host: memory of the device and of the host, and seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from benchmarks.stand_in_host import ROOM
from rapidformer_templates.commands.main import main
from rapidformer_templates.switches.auto_strategy.layouts import Layout, MemoryOptions
from rapidformer_templates.switches.auto_strategy.memory import predict, variant_of
from rapidformer_templates.switches.auto_strategy.model_shapes import ModelShapes
from rapidformer_templates.switches.auto_strategy.step_seconds import exposed_copies
from rapidformer_templates.switches.auto_strategy.timing import GB
from tests.support.model_shapes import shapes

HERE, AWAY = MemoryOptions(gpu=True), MemoryOptions(gpu=True, offloads_activations=True)


@pytest.fixture(scope="module")
def model() -> Iterator[ModelShapes]:
    with mock.patch(f"{ROOM}.transform.MIN_BYTES", 1024):
        yield shapes("gpt2", blocks=8)


@pytest.mark.slow
def test_all_but_two_blocks_are_on_the_host(model: ModelShapes) -> None:
    layout = Layout(micro_batch=4)
    here, away = (predict(model, layout, setting) for setting in (HERE, AWAY))
    a_block = model.trace(variant_of(layout, AWAY)).sent / 7
    assert here.host == 0
    assert away.host == pytest.approx(7 * a_block)
    saved = here.total - away.total
    assert 5 * a_block < saved < 7 * a_block
    assert here.parameters + here.optimizer == away.parameters + away.optimizer


@pytest.mark.slow
def test_micro_batches_in_flight_are_on_the_host(model: ModelShapes) -> None:
    """The first of two stages has two micro batches in flight, and also sends what its last block keeps."""
    layout = Layout(pipeline=2, micro_batch=4, accumulation=4)
    here, away = (predict(model, layout, setting) for setting in (HERE, AWAY))
    a_block = model.trace(variant_of(layout, AWAY)).sent / 7
    assert away.host == pytest.approx(8 * a_block, rel=0.05)
    assert here.total - away.total > 4 * a_block


def test_a_step_waits_for_what_the_computation_does_not_hide() -> None:
    """The forward is a third of the computation and hides the outgoing copies. The rest hides the returning copies."""
    assert exposed_copies(1.0, 3.0) == 0
    assert exposed_copies(1.5, 3.0) == pytest.approx(0.5)
    assert exposed_copies(3.0, 3.0) == pytest.approx(2 + 1)


def _planned(more: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    sizes = "--model-type gpt2 --num-layers 6 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --device cuda"
    flags = f"plan --auto-strategy --json {sizes} --world-size 1 --micro-batch-size 8 --global-batch-size 8 {more}"
    assert main(flags.split()) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.slow
def test_the_plan_tells_what_the_link_costs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEVICE_MEMORY_GB", "16")
    flags = "--no-checkpoint-activations"
    (plain,) = _planned(flags, capsys)["layouts"]
    assert plain["memory_gb"]["host"] == 0
    seconds = []
    for link in ("100000", "10", "5"):
        monkeypatch.setenv("HOST_LINK_GBS", link)
        answer = _planned(f"{flags} --offload-activations", capsys)
        assert f"{float(link):g} GB/s to the host and back (HOST_LINK_GBS)" in answer["assumed"]
        assert not [unknown for unknown in answer["not_predicted"] if unknown["switch"] == "offload-activations"]
        (layout,) = answer["layouts"]
        assert layout["memory_gb"]["total"] < plain["memory_gb"]["total"]
        seconds.append(layout["step_seconds"])
    copies = layout["memory_gb"]["host"] * GB
    assert seconds[2] - seconds[1] == pytest.approx(2 * copies * (1 / 5 - 1 / 10) / GB, rel=1e-3)
    assert seconds[0] < seconds[1]
