"""``--pipeline-stages auto-memory``: compared with every other cut, in a plan, in a search, and in a run's workers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from rapidformer_templates import Trainer
from rapidformer_templates.errors import ConfigError, ModelError
from rapidformer_templates.run.configure import chosen_layout
from rapidformer_templates.switches.auto_strategy.layouts import Layout, MemoryOptions
from rapidformer_templates.switches.auto_strategy.memory import predict
from rapidformer_templates.switches.auto_strategy.stage_balance import ALIKE, balance_memory
from rapidformer_templates.system.launch import CHOSEN
from tests.support.jobs import CausalJob
from tests.support.messages import Says
from tests.support.model_shapes import shapes
from tests.support.plans import planned
from tests.support.requests import CPU, codes, on

STAGES, BLOCKS = 3, 8
LAYOUT = Layout(pipeline=STAGES, micro_batch=4, accumulation=8)
SETTING = MemoryOptions("bf16")
MODEL = (
    "--task pretraining --template Trainer --model-type gpt2 --num-layers 6 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 64 --device cpu"
)
BY_MEMORY = "--pipeline-stages auto-memory"
IN_STAGES = f"{MODEL} --pipeline-model-parallel-size 2 {BY_MEMORY} --micro-batch-size 4 --global-batch-size 16"
TRAINED = f"{IN_STAGES} --lr 1e-3 --train-iters 2 --nproc-per-node 2 --no-save"


def _every_cut() -> dict[tuple[int, ...], int]:
    model = shapes("llama", BLOCKS)
    borders = itertools.combinations(range(1, BLOCKS), STAGES - 1)
    cuts = [tuple(b - a for a, b in itertools.pairwise((0, *cut, BLOCKS))) for cut in borders]
    return {cut: predict(model, Layout(**{**vars(LAYOUT), "stages": cut}), SETTING).total for cut in cuts}


@pytest.mark.slow
def test_no_cut_needs_less_and_none_that_needs_as_much_is_faster() -> None:
    model, cuts = shapes("llama", BLOCKS), _every_cut()
    balance = balance_memory(model, LAYOUT, SETTING)
    assert cuts[balance.sizes] == max(balance.needed)
    least = min(cuts.values())
    assert max(balance.needed) <= least * (1 + ALIKE)
    usual, needed = balance.by_parameters
    assert max(needed) == cuts[usual] > 1.1 * max(balance.needed)
    front, (block, *_), back = model.stage_elements

    def largest(cut: tuple[int, ...]) -> float:
        return max(front + cut[0] * block, *(size * block for size in cut), cut[-1] * block + back)

    allowed = [cut for cut, size in cuts.items() if size <= least * (1 + ALIKE)]
    assert largest(balance.sizes) == min(map(largest, allowed))
    assert balance.slower == pytest.approx(largest(balance.sizes) / largest(usual) - 1)


def test_more_stages_than_blocks_are_refused(says: Says) -> None:
    with says(ModelError):
        balance_memory(shapes("llama"), Layout(pipeline=6), SETTING)
    few = f"--pipeline-model-parallel-size 8 {BY_MEMORY} --num-layers 6"
    assert codes(few, on(CPU, world_size=8)) == ["RF220"]
    assert codes(few.replace("8", "6"), on(CPU, world_size=6)) == []


@pytest.mark.slow
def test_a_plan_names_the_blocks_and_why() -> None:
    plan = planned(f"--world-size 2 {IN_STAGES}")["plan"]
    chosen = plan["values"]["--pipeline-stages"]
    assert chosen["origin"] == "auto-memory"
    assert sum(map(int, chosen["value"].split(","))) == 6
    (line,) = [note for note in plan["notes"] if "auto-memory" in note]
    assert line.startswith(f"--pipeline-stages auto-memory: {chosen['value']} blocks, at most ")
    assert "; by parameters " in line


@pytest.mark.slow
def test_workers_take_what_their_launcher_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    template = Trainer(TRAINED.split())
    stages = template.config.get("pipeline_stages")
    assert sum(map(int, stages.split(","))) == 6
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", **chosen_layout(template.config)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("rapidformer_templates.switches.auto_strategy.stage_balance.with_stages_by_memory", None)
    worker = Trainer(TRAINED.split())
    assert worker.config.get("pipeline_stages") == stages
    assert worker.plan.notes == template.plan.notes
    assert any("auto-memory" in note for note in worker.plan.notes)


def test_hooks_that_the_planner_cannot_see_are_refused(monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    monkeypatch.delenv(CHOSEN, raising=False)
    with says(ConfigError):
        CausalJob(TRAINED.split())


@pytest.mark.slow
def test_a_search_cuts_each_layout_by_its_memory() -> None:
    searched = f"--world-size 2 --auto-strategy --global-batch-size 8 {MODEL} --no-checkpoint-activations"
    searched += " --tensor-model-parallel-size 1"
    layouts = planned(f"{searched} {BY_MEMORY}", 4)["layouts"]
    assert {layout["pipeline"] for layout in layouts} == {1, 2}
    for layout in layouts:
        assert ("--pipeline-stages" in layout["flags"]) == (layout["pipeline"] == 2)
    usual = {_key(layout): layout for layout in planned(searched, 4)["layouts"]}
    lower = [usual[_key(mine)]["memory_gb"]["total"] - mine["memory_gb"]["total"] for mine in layouts]
    assert min(lower) > -0.001
    assert max(lower) > 0


def _key(layout: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(layout[name] for name in ("pipeline", "data", "micro_batch_size", "partitioning"))
