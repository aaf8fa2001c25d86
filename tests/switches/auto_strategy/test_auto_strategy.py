"""``--auto-strategy`` on a training command: its choice, the origin that the values show, and who receives them."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from rapidformer_templates import Finetuner, Trainer
from rapidformer_templates.commands.main import main
from rapidformer_templates.errors import ConfigError, ModelError, Refused
from rapidformer_templates.run.configure import chosen_layout
from rapidformer_templates.run.folder import read_metrics
from rapidformer_templates.switches.auto_strategy.command import NothingFits
from rapidformer_templates.switches.auto_strategy.layouts import Layout, MemoryOptions
from rapidformer_templates.switches.auto_strategy.memory import predict
from rapidformer_templates.switches.auto_strategy.stage_balance import ALIKE, balance_memory
from rapidformer_templates.system.launch import CHOSEN
from tests.support.jobs import CausalJob
from tests.support.messages import Says
from tests.support.model_shapes import shapes
from tests.support.plans import planned
from tests.support.requests import CPU, codes, on

FLAGS = [
    *("--auto-strategy", "--max-global-batch-size", "4", "--task", "pretraining", "--model-type", "gpt2"),
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--lr", "1e-3", "--train-iters", "2", "--device", "cpu", "--nproc-per-node", "2", "--no-save"),
]


@pytest.mark.longer
def test_the_best_layout_is_taken_and_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEVICE_MEMORY_GB", "4")
    template = Trainer([*FLAGS, "--zero-1-memory-optimization"])
    assert capsys.readouterr().err.startswith("best: --")
    sizes, values = template.plan.sizes, template.plan.values
    assert sizes.global_batch <= 4
    assert sizes.tensor * sizes.pipeline * sizes.data == 2
    assert values["--global-batch-size"] == {"value": sizes.global_batch, "origin": "auto-strategy"}
    assert values["--zero-1-memory-optimization"]["origin"] == "command line"
    assert "zero-1" in template.plan.switches

    # Workers that this process starts do not repeat the search.
    chosen = json.loads(chosen_layout(template.config)[CHOSEN])["values"]
    assert chosen["global_batch_size"] == [sizes.global_batch, "auto-strategy"]
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", **chosen_layout(template.config)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("rapidformer_templates.switches.auto_strategy.command.search", None)
    worker = Trainer([*FLAGS, "--zero-1-memory-optimization"])
    assert worker.plan.sizes == template.plan.sizes


def test_what_cannot_be_searched_is_refused(monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    monkeypatch.setenv("DEVICE_MEMORY_GB", "0.801")
    with says(NothingFits):
        Trainer([*FLAGS, "--zero-1-memory-optimization", "--micro-batch-size", "2"])
    with says(ConfigError):  # hooks that the search cannot see
        CausalJob(FLAGS)
    with says(Refused):
        Finetuner(FLAGS)


@pytest.mark.slow
def test_a_command_trains_in_the_layout_that_the_plan_puts_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DEVICE_MEMORY_GB", "2")
    corpus, tokenizer, run = tmp_path / "corpus.jsonl", tmp_path / "tokenizer", tmp_path / "run"
    corpus.write_text("\n".join(json.dumps({"text": f"{n} red cats and {n * n} dogs"}) for n in range(300)))
    made = ["--input", str(corpus), "--type", "bpe", "--vocab-size", "300", "--output", str(tokenizer)]
    assert main(["data", "tokenizer", *made]) == 0
    model = f"--model-type gpt2 --num-layers 4 --hidden-size 32 --num-attention-heads 4 --tokenizer-path {tokenizer}"
    batch = "--seq-length 32 --max-global-batch-size 4 --no-checkpoint-activations"
    common = f"--auto-strategy --device cpu {batch} {model}"
    best = planned(f"--world-size 1 {common}")["layouts"][0]
    train = f"--task pretraining --template Trainer --data-path {corpus} --data-cache-dir {tmp_path} --lr 1e-3"
    assert main([*train.split(), "--train-iters", "3", "--log-interval", "1", "--save", str(run), *common.split()]) == 0
    plan = json.loads((run / "plan.json").read_text())
    sizes = {name: plan["sizes"][name] for name in ("tensor", "pipeline", "data", "accumulation")}
    assert sizes == {name: best[name] for name in sizes}
    assert plan["sizes"]["micro_batch"] == best["micro_batch_size"]
    assert {"--micro-batch-size", "--global-batch-size"} <= {
        flag for flag, value in plan["values"].items() if value["origin"] == "auto-strategy"
    }
    assert [line["samples"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line] == [4, 8, 12]


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


@pytest.mark.longer
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
    with pytest.raises(ModelError, match="4 blocks cannot be cut into 6 stages"):  # the search leaves such layouts out
        shapes("llama", 4).stage_sizes(6)
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


@pytest.mark.longer
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
