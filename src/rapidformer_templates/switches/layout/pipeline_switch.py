"""The pipeline-parallel switch: each worker of a group has a range of consecutive blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rapidformer_templates.planning.balance import balanced_cut
from rapidformer_templates.planning.checks import ENCODER_DECODER, Given, clash, shown
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.switch import (
    Finding,
    Measured,
    Precedence,
    Prediction,
    Request,
    RuleList,
    Switch,
    drop,
    replace,
)

_PIPELINE = ("pipeline_model_parallel_size", 2)

AUTO_MEMORY = "auto-memory"
"""Replaces the list of blocks per stage. The planner then minimizes the memory of the stage that needs most."""


@dataclass(frozen=True)
class PipelineParallelFlags:
    """Acceleration"""

    pipeline_model_parallel_size: int = flag(1, "stages that the blocks are cut into", metavar="N", minimum=1)
    virtual_pipeline_size: int = flag(
        1,
        "stages per worker of a pipeline; above 1 they are interleaved",
        metavar="N",
        minimum=1,
        only_with=_PIPELINE,
    )
    pipeline_stages: str | None = flag(
        None,
        "blocks of each stage, such as 3,5, or auto-memory for the lowest peak memory (default: by parameters, with "
        "embedding and head)",
        metavar="A,B|auto-memory",
        only_with=_PIPELINE,
    )


def _stages(request: Request) -> int:
    return request.sizes.pipeline * int(request.config.get("virtual_pipeline_size"))


RULES = RuleList()


@RULES.add(
    "RF075",
    "[rapidformer_templates]",
    "--pipeline-model-parallel-size 2 --num-layers 8 --pipeline-stages 3,4 --world-size 2",
)
def _stages_fit(request: Request) -> Iterator[Finding]:
    """--pipeline-stages gives the number of blocks of each stage, and covers all blocks.

    Why: every block is on one stage, and each of the pipeline's workers has as many stages as the others.
    """
    sizes, stages, layers = request.config.get("pipeline_stages"), _stages(request), request.model.num_layers
    if sizes in (None, AUTO_MEMORY):
        return
    words = [word.strip() for word in sizes.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        message = f"--pipeline-stages {sizes} is neither a list of numbers of blocks above zero nor {AUTO_MEMORY}"
    elif len(words) != stages:
        message = f"--pipeline-stages {sizes} names {len(words)} stages; there are {stages}"
    elif layers is not None and sum(map(int, words)) != layers:
        message = f"--pipeline-stages {sizes} has {sum(map(int, words))} blocks; the model has {layers}"
    else:
        return
    changes = [drop({"pipeline_stages": None})]
    if layers and layers >= stages:
        changes.append(replace({"pipeline_stages": ",".join(map(str, balanced_cut(0, [1] * layers, 0, stages)))}))
    flags = request.asked("pipeline_stages", "pipeline_model_parallel_size", "virtual_pipeline_size")
    yield Finding(message, flags, changes=tuple(changes))


@RULES.add(
    "RF220",
    "[rapidformer_templates]",
    "--pipeline-model-parallel-size 2 --virtual-pipeline-size 2 --pipeline-stages auto-memory "
    "--num-layers 8 --world-size 2",
)
def _predicted_stages(request: Request) -> Iterator[Finding]:
    """With --pipeline-stages auto-memory each worker has one stage of one or more blocks.

    Why: the search weighs one run of blocks per worker against those of the others; several would be weighed at once.
    """
    by_memory, layers = Given("pipeline_stages", (AUTO_MEMORY,)), request.model.num_layers
    yield from clash(request, by_memory, Given("virtual_pipeline_size"))
    if layers is not None and layers < request.sizes.pipeline:
        message = f"{layers} blocks are too few for {request.sizes.pipeline} stages"
        yield from clash(request, by_memory, "pipeline-parallel", message=message)


@RULES.add("RF076", "[M]", "--pipeline-model-parallel-size 2 --virtual-pipeline-size 3 --num-layers 4 --world-size 2")
def _enough_blocks(request: Request) -> list[Finding]:
    """Interleaved stages have at least one block each.

    Why: a stage without a block would only pass hidden states on.
    """
    stages, layers = _stages(request), request.model.num_layers
    if layers is None or stages <= layers:
        return []
    message = f"{layers} blocks are too few for {stages} stages"
    return clash(request, Given("virtual_pipeline_size"), message=message)


@RULES.add("RF077", "[rapidformer_templates]", "--task seq2seq_lm --pipeline-model-parallel-size 2 --world-size 2")
def _one_run_of_blocks(request: Request) -> list[Finding]:
    """A pipeline needs a model with one run of blocks: no encoder-decoder model.

    Why: every block of a decoder needs the output of the encoder, but stages send one hidden state to the next.
    """
    message = "an encoder-decoder model cannot be cut into pipeline stages"
    return clash(request, "pipeline-parallel", ENCODER_DECODER, message=message)


def _acted(measured: Measured) -> str | None:
    """Check that the workers of one stage have the same blocks, and that no block is on two stages."""
    stages = {tuple(blocks) for blocks in measured.all("blocks")}
    names = [name for stage in stages for name in stage]
    if len(stages) == measured.plan.sizes.pipeline and len(set(names)) == len(names):
        return None
    actual = " and ".join(sorted(shown(stage) for stage in stages))
    return f"{measured.plan.sizes.pipeline} stages of different blocks were expected; workers have {actual or 'none'}"


PIPELINE_PARALLEL = Switch(
    name="pipeline-parallel",
    summary="Cut the blocks into N consecutive stages, one per worker.",
    source="[R, M]",
    no_second_model="runs stages in a schedule of one model",
    precedence=Precedence.PARTITION,
    options=PipelineParallelFlags,
    on={"pipeline_model_parallel_size": 2},
    predicts=Prediction(
        dict.fromkeys(("parameters", "gradients", "optimizer"), "those of a stage")
        | {
            "activations": "those of all micro batches in flight",
            "time": "the bubble, and what stages send",
        },
    ),
    templates=("Trainer",),
    sizes={"pipeline": "pipeline_model_parallel_size"},
    engine="rapidformer_templates.switches.layout.pipeline_engine:PipelineEngine",
    builds_in_shares=True,
    master_weights=True,
    transform="rapidformer_templates.switches.layout.pipeline:cut_into_stages",
    receipt=("parameter_bytes", "blocks"),
    acted=_acted,
    rules=tuple(RULES),
)
