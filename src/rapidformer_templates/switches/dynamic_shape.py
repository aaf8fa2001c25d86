"""The dynamic-shape iterator: batches of varying length and size with a constant number of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rapidformer_templates.flags import flag
from rapidformer_templates.switches._checks import needs_template
from rapidformer_templates.switches._switch import Example, Rule, Stage, Switch


@dataclass(frozen=True)
class DynamicShapeFlags:
    """Acceleration"""

    data_iterator: Literal["static", "dynamic-shape"] = flag("static", "batches of one shape, or of varying shapes")


SWITCH = Switch(
    name="dynamic-shape",
    summary="Batches of varying shapes.",
    source="[R]",
    stage=Stage.DATA,
    options=DynamicShapeFlags,
    active=lambda options, sizes: options.data_iterator == "dynamic-shape",
    on={"data_iterator": "dynamic-shape"},
    off={"data_iterator": "static"},
    templates=("Pretrainer",),
    available=False,
    rules=(
        Rule(
            "RF007",
            "The dynamic-shape iterator only in the Pretrainer template.",
            "its batches hold varying numbers of samples, so an epoch of a data set has no fixed number of steps",
            "[R]",
            needs_template("dynamic-shape"),
            Example("--template Finetuner --data-iterator dynamic-shape"),
        ),
    ),
)
