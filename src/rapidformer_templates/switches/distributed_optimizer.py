"""The distributed optimizer: shards optimizer state over the data-parallel workers of a 3D layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rapidformer_templates.planning.checks import PARTITIONING, check_even_shards, idle_without_copies, needs_template
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.switch import Finding, Precedence, Prediction, Request, Resource, RuleList, Switch


@dataclass(frozen=True)
class DistributedOptimizerFlags:
    """Acceleration"""

    use_distributed_optimizer: bool = flag(
        False,
        "shard the optimizer state over the data-parallel workers, also under 3D parallelism",
        choice=PARTITIONING,
    )


RULES = RuleList()


@RULES.add("RF029", "[R, M]", "--template Pretrainer --use-distributed-optimizer --world-size 2")
def _only_in_trainer(request: Request) -> Iterator[Finding]:
    """The distributed optimizer needs the Trainer template.

    Why: it belongs to 3D parallelism; the other templates partition with OSS, SDP or FSDP.
    """
    return needs_template(request, "distributed-optimizer")


SWITCHES = (
    Switch(
        name="distributed-optimizer",
        summary="Shard optimizer state over the data-parallel workers, together with 3D parallelism.",
        source="[M]",
        precedence=Precedence.SHARD,
        options=DistributedOptimizerFlags,
        predicts=Prediction(
            {
                "optimizer": "a share on each replica",
                "activations": "buckets of the exchange",
                "time": "two halves of a sum",
            }
        ),
        family=PARTITIONING,
        freed_memory="as usual",
        claims=frozenset({Resource.OPTIMIZER_STATE}),
        templates=("Trainer",),
        notes=idle_without_copies("distributed-optimizer: one data-parallel worker, so there is nothing to shard"),
        engine="rapidformer_templates.engines.parallel.engine:ParallelEngine",
        master_weights=True,
        divides_copies=True,
        engine_options=lambda request, options: replace(options, shard_over_data="optimizer"),
        receipt=("parameter_bytes", "optimizer_state_bytes", "gradient_bytes"),
        acted=check_even_shards(updated_elements="optimizer state"),
        rules=tuple(RULES),
    ),
)
