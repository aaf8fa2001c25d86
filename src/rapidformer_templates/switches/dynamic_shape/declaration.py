"""The dynamic-shape iterator: batches of a few shapes, each with about the same number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from rapidformer_templates.planning.changes import drop, replace
from rapidformer_templates.planning.checks import Given, clash, needs_template, shown
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.switch import (
    Finding,
    Measured,
    Precedence,
    Prediction,
    Request,
    RuleList,
    Switch,
    always,
)
from rapidformer_templates.planning.tasks import tasks_with

# A compiler keeps one graph per shape. torch.compile stops compiling a function after eight of them.
MAX_SHAPES = 8
# Lengths suit the matrix units of a GPU best in multiples of eight [S].
MULTIPLE = 8

# Incompatible fields: field → (its value when off, reason).
OWN_BATCHES = {
    "group_by_length": (None, "forms its batches by length itself"),
    "pack_sequences": (False, "has nothing to gain from packed rows: they are all of one length"),
    "streaming": (False, "chooses its shapes by the lengths of all samples, which a stream does not show"),
    "keep_documents_apart": (False, "keeps documents apart: each is a separate sample"),
}


_option = partial(flag, only_with=("data_iterator", "dynamic-shape"))


@dataclass(frozen=True)
class DynamicShapeFlags:
    """Acceleration"""

    data_iterator: Literal["static", "dynamic-shape"] = flag("static", "batches of one shape, or of varying shapes")
    tokens_per_batch: int | None = _option(
        None,
        "dynamic shapes: maximum tokens of a micro batch, with padding (default: micro batch × sequence length)",
        minimum=1,
    )
    max_shapes: int | None = _option(
        None, f"dynamic shapes: maximum number of distinct shapes (default: {MAX_SHAPES}; 0: no limit)", minimum=0
    )
    shape_multiple: int | None = _option(
        None, f"dynamic shapes: lengths are padded to multiples of this (default: {MULTIPLE})", minimum=1
    )

    @property
    def shape_limit(self) -> int:
        """Highest number of distinct shapes. 0 means no limit."""
        return MAX_SHAPES if self.max_shapes is None else self.max_shapes


def _notes(request: Request) -> Sequence[str]:
    config, sizes = request.config, request.sizes
    options, length = config.switches["dynamic-shape"], config.model.seq_length
    budget: int | None = options.tokens_per_batch or (length and length * sizes.micro_batch)
    tokens = f"{budget:,} tokens" if budget else f"{sizes.micro_batch} × the sequence length"
    count = f"at most {options.shape_limit} shapes" if options.shape_limit else "any number of shapes"
    multiples = f"lengths in multiples of {options.shape_multiple or MULTIPLE}"
    return (f"dynamic-shape: micro batches of up to {tokens}, {count}, {multiples}",)


RULES = RuleList()


@RULES.add("RF039", "[rapidformer_templates]", "--template Pretrainer --task seq2seq_lm --data-iterator dynamic-shape")
def _one_length(request: Request) -> Iterator[Finding]:
    """Dynamic shapes need samples with one length each, and choose the order of the samples.

    Why: a shape has one length; a task with a second one, or one that needs targets even in a row of padding, cannot be
    padded to it.
    """
    tasks = Given("task", tasks_with(lambda task: not task.has_lengths), instead=())
    yield from clash(request, tasks, "dynamic-shape", message="{1} cannot be combined with {0}")
    static = replace({"data_iterator": "static"})
    for name, (off, reason) in OWN_BATCHES.items():
        if request.config.get(name) != off:
            flags = (*request.asked(name), *request.asked_for("dynamic-shape"))
            yield Finding(f"dynamic-shape {reason}", flags, changes=(drop({name: off}), static))


@RULES.add("RF007", "[R]", "--template Finetuner --data-iterator dynamic-shape")
def _only_in_pretrainer(request: Request) -> Iterator[Finding]:
    """The dynamic-shape iterator needs the Pretrainer template.

    Why: its batches hold varying numbers of samples, while recipes for fine-tuning count samples per step.
    """
    return needs_template(request, "dynamic-shape")


def _acted(measured: Measured) -> str | None:
    chosen, used = measured["chosen_shapes"], measured["batch_shapes"] or []
    if chosen and used and all(shape in chosen for shape in used):
        return None
    return f"batches of the shapes {shown(chosen)} were expected; there were {shown(used)}"


SWITCHES = (
    Switch(
        name="dynamic-shape",
        summary="Batches of a few shapes with a constant number of tokens, chosen to minimize padding.",
        source="[R]",
        precedence=Precedence.DATA,
        options=DynamicShapeFlags,
        on={"data_iterator": "dynamic-shape"},
        predicts=Prediction(
            unknown=always(
                activations="the shapes of the batches follow from the data; --seq-length is assumed for all",
                time="the shapes of the batches follow from the data; --seq-length is assumed for all",
            )
        ),
        templates=("Pretrainer",),
        notes=_notes,
        order="rapidformer_templates.switches.dynamic_shape.batches:order_of",
        receipt=("batch_shapes", "fill", "useful_tokens", "padded_tokens"),
        acted=_acted,
        changes_result=True,
        rules=tuple(RULES),
    ),
)
