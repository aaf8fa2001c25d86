"""The context-parallel switch: divide each sequence over the workers of a group, through the whole model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rapidformer_templates.planning.checks import nearest_divisor, shown
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.switch import (
    Finding,
    Measured,
    Precedence,
    Prediction,
    Request,
    RuleList,
    Switch,
    replace,
)

CONTEXT, KIND = "context_parallel_size", "context_parallel_kind"


@dataclass(frozen=True)
class ContextParallelFlags:
    """Acceleration"""

    context_parallel_size: int = flag(1, "workers that share each sequence", metavar="N", minimum=1)
    context_parallel_kind: Literal["all-to-all", "ring"] | None = flag(
        None,
        "how attention sees whole sequences (default: all-to-all where the heads divide, else ring)",
        only_with=("context_parallel_size", 2),
    )


RULES = RuleList()


@RULES.add(
    "RF230",
    "[DeepSpeed-Ulysses]",
    "--context-parallel-size 3 --context-parallel-kind all-to-all --model-type gpt2 "
    "--num-attention-heads 4 --world-size 3",
)
def _heads_divide(request: Request) -> Iterator[Finding]:
    """All-to-all needs attention heads for each worker: the context size divides their number.

    Why: each worker computes attention over whole sequences for its share of the heads; a ring does not divide heads.
    """
    heads, sizes = request.model.num_attention_heads, request.sizes
    if request.config.get(KIND) == "all-to-all" and heads is not None and heads % (sizes.context * sizes.tensor):
        others = sizes.divides // sizes.context
        changes = nearest_divisor(
            CONTEXT, sizes.context, lambda n: not heads % (n * sizes.tensor) and not sizes.world % (n * others)
        )
        tensor = f" of tensor size {sizes.tensor}" if sizes.tensor > 1 else ""
        message = f"context size {sizes.context} does not divide attention heads {heads}{tensor}"
        flags = request.asked_for("context-parallel")
        yield Finding(message, flags, ("context-parallel",), (replace({KIND: "ring"}), *changes))


@RULES.add("RF231", "[rapidformer_templates]", "--context-parallel-size 2 --task seq2seq_lm --world-size 2")
def _one_sequence(request: Request) -> Iterator[Finding]:
    """Sequences are divided in decoders and encoders, not in models that have both.

    Why: a decoder reads the output of the encoder, whose sequence is another one.
    """
    if request.config.training.task == "seq2seq_lm" or request.model.model_type in ENCODER_DECODERS:
        message = "context-parallel does not work for an encoder-decoder model"
        yield Finding(message, request.asked_for("context-parallel"), switches=("context-parallel",))


ENCODER_DECODERS = ("t5", "mt5", "bart", "mbart", "pegasus", "marian")


def _notes(request: Request) -> Sequence[str]:
    sizes = request.sizes
    reach = sizes.context * sizes.tensor
    if reach <= sizes.local_world:
        return ()
    return (f"context-parallel: groups of {reach} workers span nodes of {sizes.local_world}, which is slow",)


def _acted(measured: Measured) -> str | None:
    size, tokens = measured.plan.sizes.context, measured.all("context_tokens")
    # Two intervals of a ring may together have one token more than a single interval of their length.
    divided = all(own in (-(-whole // size), -(-whole // (2 * size)) * 2) for own, whole in tokens)
    if tokens and divided and all(measured.all("context_attention")):
        return None
    return f"shards of one {size}-th of each sequence were expected; [tokens held, in all] are {shown(tokens)}"


CONTEXT_PARALLEL = Switch(
    name="context-parallel",
    summary="Divide each sequence over N workers, through the whole model.",
    source="[M, DeepSpeed-Ulysses]",
    precedence=Precedence.CONTEXT,
    options=ContextParallelFlags,
    on={CONTEXT: 2},
    predicts=Prediction(
        {
            "gradients": "copies in addition to those of the replicas",
            "activations": "those of a shard of each sequence and of the logits",
            "time": "exchange of queries, keys and values, as all-to-all",
        }
    ),
    templates=("Trainer",),
    notes=_notes,
    sizes={"context": CONTEXT},
    transform="rapidformer_templates.switches.layout.context:divide_context",
    receipt_hooks="rapidformer_templates.switches.layout.context:ContextDivision",
    engine_options=lambda request, options: dataclasses.replace(options, context_kind=request.config.get(KIND)),
    receipt=("context_tokens", "context_attention", "context_kind"),
    acted=_acted,
    rules=tuple(RULES),
)
