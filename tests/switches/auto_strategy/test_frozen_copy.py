"""Memory of a frozen copy of the model on each worker: the planner's prediction, and the measurement."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer_templates import Trainer
from rapidformer_templates.engines.assembly import Assembly
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.deepspeed_file.settings import bucket_sizes
from rapidformer_templates.switches.auto_strategy.layouts import Layout, MasterWeights, MemoryOptions
from rapidformer_templates.switches.auto_strategy.memory import states_by_worker
from rapidformer_templates.switches.auto_strategy.model_of_flags import Subject
from rapidformer_templates.switches.auto_strategy.model_shapes import ModelShapes
from rapidformer_templates.switches.auto_strategy.state_bytes import StateOptions
from tests.support.preference_runs import make, pairs
from tests.support.worker_pool import run_in_workers

KEPT_WHOLE = "stage3_param_persistence_threshold"
MASTERS = MemoryOptions("bf16", masters=MasterWeights())
ENGINES: dict[str, tuple[tuple[str, ...], str, MemoryOptions]] = {
    "none": ((), "none", MemoryOptions()),
    "none, weights of 16 bits": (("--mixed-precision", "bf16"), "none", MASTERS),
    "fsdp": (("--fsdp-memory-optimization",), "fsdp", MemoryOptions()),
    "zero-3": (
        ("--zero-3-memory-optimization",),
        "zero-3",
        MemoryOptions(how=StateOptions(kept_whole=bucket_sizes(32)[KEPT_WHOLE])),
    ),
}
"""By name: flags, and the partitioning and setting that the planner derives from them."""


def bytes_of(model: torch.nn.Module) -> int:
    """Return the local bytes of its parameters: whole parameters, shards, and partitions of ZeRO-3."""
    held = 0
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter.data
        held += local.nbytes + (parameter.ds_tensor.nbytes if hasattr(parameter, "ds_tensor") else 0)
    return held


def measured(workers: Any, flags: list[str]) -> dict[str, int]:
    found = {}
    for name, (more, _, _) in ENGINES.items():
        job = Trainer([*flags, *more, "--task", "preference", "--no-save"])
        job.fit()
        with job.task.reference(None) as copy:  # type: ignore[attr-defined]
            found[name] = bytes_of(copy)
    return found


@pytest.mark.distributed
@pytest.mark.slow
def test_the_copy_is_divided_as_it_is_predicted(gpt_folder: Path, tmp_path: Path) -> None:
    flags = make(tmp_path, gpt_folder, pairs(4))
    config = GPT2Config.from_pretrained(tmp_path / "model")
    assert config.n_embd == 32
    ranks: list[Mapping[str, int]] = run_in_workers(2, measured, [*flags, "--train-iters", "1"])
    alone, beside = (
        ModelShapes(lambda blocks: Assembly(GPT2LMHeadModel(config)), lambda samples: {}, has_copy=copied)
        for copied in (False, True)
    )
    for name, (_, partitioning, setting) in ENGINES.items():
        layout = Layout(1, 1, 2, partitioning=partitioning)
        more = zip(states_by_worker(beside, layout, setting), states_by_worker(alone, layout, setting), strict=True)
        assert [b.parameters - a.parameters for b, a in more] == [rank[name] for rank in ranks], name
        with_copy, without = (states_by_worker(model, layout, setting) for model in (beside, alone))
        assert [held.optimizer for held in with_copy] == [held.optimizer for held in without]


@pytest.mark.parametrize(
    ("flags", "copied", "rows"),
    [
        ({"task": "preference"}, True, 4),
        ({"task": "preference", "precompute_reference": True}, False, 4),
        ({"task": "preference", "preference_loss": "simpo"}, False, 4),
        ({"task": "preference", "preference_loss": "kto"}, True, 2),
        ({"task": "reward"}, False, 4),
        ({"task": "causal_lm"}, False, 2),
    ],
)
def test_the_planner_sees_what_a_task_needs(flags: dict[str, Any], copied: bool, rows: int) -> None:
    sizes = {"model_type": "gpt2", "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 8}
    subject = Subject(RunConfig().replace("command line", **flags, **sizes), gpu=False)
    assert subject.shapes.has_copy == copied
    assert len(subject.shapes.batch(2)["input_ids"]) == rows
