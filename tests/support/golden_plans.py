"""Plans of many commands, as they were when they were last reviewed.

``python -m tests.support.golden_plans`` writes ``golden_plans.json``. Run it after a change that plans should show, and
read the difference. ``tests/planning/test_resolve.py`` compares every plan with the file.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rapidformer_templates.errors import Refused
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.environment import OPTIONAL_PACKAGES, Environment
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.planning.resolve import resolve
from tests.support import covering
from tests.support.requests import GPUS, config_of, on, with_switches

FILE = Path(__file__).with_name("golden_plans.json")

CPUS = Environment(
    world_size=4, local_world_size=4, device="cpu", packages=dict.fromkeys(OPTIONAL_PACKAGES, "any"), cxx="c++"
)
NODES = on(GPUS, world_size=32)

COMMANDS = {
    "": GPUS,
    "--task sequence_classification --epochs 3 --micro-batch-size 8": CPUS,
    "--task pretraining --model-type gpt2 --num-layers 12 --train-iters 100 --mixed-precision": GPUS,
    "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --global-batch-size 64 --lr 1e-3": NODES,
    "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --mixed-precision bf16": NODES,
    "--zero-3-memory-optimization --cpu-offload --mixed-precision bf16 --optimizer adamw": NODES,
    "--fsdp-memory-optimization --fsdp-shard-size 8 --mixed-precision bf16 --torch-compile": NODES,
    "--num-experts 8 --expert-model-parallel-size 8 --mixed-precision bf16 --global-batch-size 256": NODES,
    "--lora-rank 8 --quantize-base nf4 --mixed-precision bf16 --task causal_lm": GPUS,
    "--optimizer lamb --lr-decay-style linear --lr-warmup-iters 10 --train-iters 100": GPUS,
}
"""Commands next to those made from the registry, each with the machine on which it is planned."""


def plans() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the plan of every command, or the codes of the rules that refuse it, by a name for the command."""
    for switch in REGISTRY.switches:
        yield f"{switch.name} on 8 GPUs", _answer(with_switches([switch.name]), GPUS)
    for row in covering.table()["rows"]:
        yield f"{' + '.join(row)} on 4 CPUs", _answer(with_switches(row), CPUS)
    for flags, machine in COMMANDS.items():
        yield f"{flags} on {machine.world_size} workers", _answer(config_of(flags), machine)


def _answer(config: RunConfig, machine: Environment) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for template in ("Trainer", "Pretrainer", "Finetuner"):
        place = dataclasses.replace(machine, template=template, template_origin="a test")
        try:
            plan = resolve(REGISTRY.complete(config), place).to_json()
        except Refused as refused:
            answers.setdefault("refused", [found.rule for found in refused.diagnostics])
        else:
            return dict(json.loads(json.dumps(plan)))
    return answers


if __name__ == "__main__":
    all_plans = dict(plans())
    FILE.write_text(json.dumps(all_plans, indent=1) + "\n", encoding="utf-8")
    print(f"{len(all_plans)} plans in {FILE}")
