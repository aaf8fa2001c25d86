"""The frozen-parameters switch: freeze parameters by name, or all except some."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.switch import (
    Example,
    Finding,
    Measured,
    Precedence,
    Prediction,
    Request,
    RuleList,
    Switch,
    drop,
)

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


def _flags_given(request: Request) -> list[str]:
    return [name for name in OFF if request.config.get(name) is not None]


RULES = RuleList()


@RULES.add(
    "RF123",
    "Parameters are named either by what is frozen or by what is trained.",
    "each of the two decides about all parameters",
    "[rapidformer_templates]",
    Example("--freeze wte --train-only head"),
    refusal="--freeze and --train-only in one command.",
)
def _one_of_two(request: Request) -> list[Finding]:
    if len(_flags_given(request)) < 2:
        return []
    changes = tuple(drop({name: None}) for name in OFF)
    return [Finding("--freeze and --train-only exclude each other", request.asked(*OFF), changes=changes)]


@RULES.add(
    "RF124",
    "Parameters are named by a regular expression.",
    "it is looked for in each parameter's name",
    "[rapidformer_templates]",
    Example("--freeze ["),
    refusal="A pattern for parameter names that is not a regular expression.",
)
def _regular(request: Request) -> list[Finding]:
    findings = []
    for name in _flags_given(request):
        try:
            re.compile(request.config.get(name))
        except re.error as error:
            message = f"{spelling(name)} is not a regular expression: {error}"
            findings.append(Finding(message, request.asked(name), changes=(drop({name: None}),)))
    return findings


@RULES.add(
    "RF125",
    "Adapters decide what is frozen.",
    "they freeze all weights except for modules that are trained whole",
    "[peft]",
    Example("--freeze wte --lora-rank 8", {"packages": {"peft": "0.17"}}),
    refusal="--freeze or --train-only together with adapters.",
)
def _adapters_decide(request: Request) -> list[Finding]:
    if "lora" not in request.active:
        return []
    message = "adapters freeze all weights; --lora-modules-to-save names what is trained whole in addition"
    return [Finding(message, request.asked_for("lora"), switches=("frozen-parameters", "lora"))]


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
    frozen = measured["frozen_parameters"]
    return None if frozen else "frozen parameters were expected; all are trained"


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
