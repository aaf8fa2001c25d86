"""The frozen-parameters switch: freeze parameters by name, or all except some."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rapidformer_templates.planning.changes import drop
from rapidformer_templates.planning.checks import Given, clash
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.switch import Finding, Measured, Precedence, Prediction, Request, RuleList, Switch

if TYPE_CHECKING:
    from rapidformer_templates.engines.assembly import Assembly, Building


@dataclass(frozen=True)
class FrozenFlags:
    """Adapters"""

    freeze: str | None = flag(
        None, "freeze parameters whose name contains a match of this regular expression", metavar="REGEX"
    )
    train_only: str | None = flag(
        None,
        "freeze all parameters except those whose name contains a match of this regular expression",
        metavar="REGEX",
    )


OFF = {"freeze": None, "train_only": None}


RULES = RuleList()


@RULES.add("RF123", "[rapidformer_templates]", "--freeze wte --train-only head")
def _one_of_two(request: Request) -> list[Finding]:
    """Parameters are named either by what is frozen or by what is trained.

    Why: each of the two decides about all parameters.
    """
    return clash(request, Given("freeze"), Given("train_only"), message="--freeze and --train-only exclude each other")


@RULES.add("RF124", "[rapidformer_templates]", "--freeze [")
def _regular(request: Request) -> Iterator[Finding]:
    """Parameters are named by a regular expression.

    Why: it is looked for in each parameter's name.
    """
    for name in OFF:
        try:
            re.compile(request.config.get(name) or "")
        except re.error as error:
            message = f"{spelling(name)} is not a regular expression: {error}"
            yield Finding(message, request.asked(name), changes=(drop({name: None}),))


@RULES.add("RF125", "[peft]", "--freeze wte --lora-rank 8", packages={"peft": "0.17"})
def _adapters_decide(request: Request) -> list[Finding]:
    """Adapters decide what is frozen.

    Why: they freeze all weights except for modules that are trained whole.
    """
    message = "adapters freeze all weights; --lora-modules-to-save names what is trained whole in addition"
    return clash(request, "frozen-parameters", "lora", message=message)


def freeze(assembly: Assembly, building: Building[FrozenFlags]) -> None:
    """Freeze parameters by name.

    Raises:
        ModelError: the expression matches no parameter, or leaves none to train.
    """
    from rapidformer_templates.errors import ModelError
    from rapidformer_templates.models.blocks import canonical_name

    model, options = assembly.model, building.options
    field = "freeze" if options.freeze is not None else "train_only"
    expression = re.compile(getattr(options, field))
    whole_name = assembly.placement.whole_name
    named = {whole_name(canonical_name(name)): parameter for name, parameter in model.named_parameters()}
    everywhere = sorted(set().union(*building.workers.gather(list(named))))  # a pipeline stage has only some of them
    matching = {name for name in everywhere if expression.search(name)}
    hint = f"names begin with {', '.join(sorted({name.partition('.')[0] for name in everywhere}))}"
    if not matching:
        raise ModelError(f"no parameter's name contains {expression.pattern}", where=spelling(field), hint=hint)
    frozen = matching if field == "freeze" else set(everywhere) - matching
    if frozen == set(everywhere):
        raise ModelError("no parameter is left to train", where=spelling(field), hint=hint)
    for name in frozen & named.keys():
        named[name].requires_grad_(False)


def _acted(measured: Measured) -> str | None:
    return None if measured["frozen_parameters"] else "frozen parameters were expected; all are trained"


SWITCHES = (
    Switch(
        name="frozen-parameters",
        summary="Freeze parameters by their names.",
        source="[rapidformer_templates]",
        precedence=Precedence.STRUCTURE,
        options=FrozenFlags,
        active=lambda options, sizes: options.freeze is not None or options.train_only is not None,
        on={"freeze": "embed|wte|wpe"},
        off=OFF,
        predicts=Prediction(
            {
                "gradients": "those of trained parameters",
                "optimizer": "those of trained parameters",
                "activations": "those of trained parameters",
            },
            traced=True,
        ),
        transform="rapidformer_templates.switches.frozen_parameters:freeze",
        receipt_hooks="rapidformer_templates.engines.contract:TrainedAndFrozen",
        receipt=("trained_parameters", "frozen_parameters", "trained_bytes", "frozen_bytes"),
        acted=_acted,
        changes_result=True,
        rules=tuple(RULES),
    ),
)
