"""The published 3D table (1.3 B parameters on 4 devices of 32 GB), with what the planner predicts for its rows."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from rapidformer_templates.commands.bench.tables import PARALLEL
from rapidformer_templates.commands.main import plan_request
from rapidformer_templates.switches.auto_strategy.layouts import Layout
from rapidformer_templates.switches.auto_strategy.memory import predict
from rapidformer_templates.switches.auto_strategy.setting import Setting

MODEL = (
    "--model-type gpt2 --num-layers 24 --hidden-size 2048 --num-attention-heads 32 --seq-length 1024 "
    "--max-position-embeddings 1024 --device cuda --world-size 4 --mixed-precision fp16"
)


def rows() -> list[dict[str, Any]]:
    """Predicted MB of each published layout."""
    from rapidformer_templates.switches.auto_strategy.model_of_flags import Subject

    subject = Subject(plan_request(MODEL.split())[0], gpu=True)
    found = []
    for solution in PARALLEL.solutions.values():
        assert isinstance(solution.published, tuple)
        sizes = plan_request([*MODEL.split(), *solution.flags])[0]
        tensor, pipeline = sizes.get("tensor_model_parallel_size"), sizes.get("pipeline_model_parallel_size")
        data = 4 // solution.divides
        memory = predict(subject.shapes, Layout(tensor, pipeline, data, 1, 4 // data), Setting("fp16"))
        states = memory.parameters + memory.gradients + memory.optimizer
        found.append(
            {
                "tensor": tensor,
                "pipeline": pipeline,
                "data": data,
                "parameters": subject.facts.parameters,
                "states_mb": states / 1e6,
                "predicted_mb": memory.total / 1e6,
                "published_mb": solution.published[1],
            }
        )
    return found


def table(found: list[dict[str, Any]]) -> Table:
    made = Table(
        title="GPT of 1.3 B parameters on 4 devices of 32 GB, micro batch 1, global batch 4, fp16: MB a worker"
    )
    made.title_justify = "left"
    for name in ("tensor", "pipeline", "data", "states", "predicted", "published"):
        made.add_column(name, justify="right")
    for row in found:
        sizes = (row["tensor"], row["pipeline"], row["data"])
        amounts = (row["states_mb"], row["predicted_mb"], row["published_mb"])
        made.add_row(*map(str, sizes), *(f"{amount:,.0f}" for amount in amounts))
    return made
