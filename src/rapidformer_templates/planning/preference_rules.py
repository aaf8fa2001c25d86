"""Rules about preferences and rewards: results that would not be exact, or a missing reference.

Does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from rapidformer_templates.planning.changes import add, drop, replace
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.flags import TrainingFlags
from rapidformer_templates.planning.switch import Example, Finding, Request, RuleList, Switch
from rapidformer_templates.planning.tasks import tasks_with

PREFERENCE_RULES = RuleList()

DEFAULTS = {field.name: field.default for field in dataclasses.fields(TrainingFlags)}
TWO_ROWS = tasks_with(lambda task: task.compares_answers)
COMPARED = ("dpo", "ipo", "kto")
"""Losses that compare the model with a reference."""


def _compares(config: RunConfig) -> bool:
    training = config.training
    return training.task == "preference" and training.preference_loss in COMPARED


def has_frozen_copy(config: RunConfig, switches: Iterable[Switch]) -> bool:
    """Return whether the reference is a second copy of the model. ``switches`` are the active ones."""
    keeps_base = any(switch.keeps_base for switch in switches)
    return _compares(config) and not config.training.precompute_reference and not keeps_base


def rows_per_sample(config: RunConfig) -> int:
    """Return the number of rows that each sample has in a batch: two if two answers are compared."""
    training = config.training
    is_unpaired = training.task == "preference" and training.preference_loss == "kto"
    return 2 if training.task in TWO_ROWS and not is_unpaired else 1


def _reasons(request: Request, field: str) -> list[tuple[str, str]]:
    """Return the active switches that have a reason in this field, with the reason."""
    named = [(name, getattr(switch, field)) for name, switch in request.active.items()]
    return [(name, why) for name, why in named if why]


_PRECOMPUTE = add({"precompute_reference": True}, "the model itself, before its first step")


@PREFERENCE_RULES.add(
    "RF130",
    "Noise on the embeddings is for samples of one row.",
    "it is drawn by a sample's position, and a chosen and a rejected answer share one",
    "[rapidformer_templates]",
    Example("--task preference --neftune-alpha 5"),
    refusal="Noise on the embeddings in preference training.",
)
def _one_row_a_sample(request: Request) -> list[Finding]:
    training = request.config.training
    if training.task not in TWO_ROWS or not training.neftune_alpha:
        return []
    message = f"--neftune-alpha is for samples of one row, not for the two answers of --task {training.task}"
    return [Finding(message, request.asked("neftune_alpha", "task"), changes=(drop({"neftune_alpha": None}),))]


@PREFERENCE_RULES.add(
    "RF131",
    "Preferences and rewards can be combined only with switches that keep the logits and add no loss.",
    "a forward of the reference would be counted or captured as one of the trained model",
    "[rapidformer_templates]",
    Example("--task preference --onnx-runtime-training"),
    refusal="Preferences or rewards together with a switch that replaces the logits or adds to the loss.",
)
def _one_loss(request: Request) -> list[Finding]:
    if request.config.training.task not in TWO_ROWS:
        return []
    return [
        Finding(
            f"--task {request.config.training.task} has two forwards or two answers per sample, but {name} {why}",
            (*request.asked_for(name), *request.asked("task")),
            switches=(name,),
        )
        for name, why in _reasons(request, "no_second_forward")
    ]


@PREFERENCE_RULES.add(
    "RF132",
    "A forward of the reference needs an engine that can run one.",
    "a schedule of stages runs only the trained model; with --precompute-reference there is no such forward",
    "[rapidformer_templates]",
    Example("--task preference --pipeline-model-parallel-size 2 --num-layers 4 --world-size 2"),
    refusal="A second forward for the reference under an engine that cannot run one, such as a pipeline.",
)
def _forward_of_reference(request: Request) -> list[Finding]:
    if not _compares(request.config) or request.config.training.precompute_reference:
        return []
    return [
        Finding(
            f"this run cannot compute the reference model: {name} {why}",
            (*request.asked_for(name), *request.asked("preference_loss")),
            switches=(name,),
            changes=(_PRECOMPUTE,),
        )
        for name, why in _reasons(request, "no_second_model")
    ]


@PREFERENCE_RULES.add(
    "RF133",
    "The reference is the model that the run starts from.",
    "DPO, IPO and KTO measure how far training has moved from it",
    "[Rafailov et al., 2023]",
    Example("--task preference --load run --weights-only"),
    refusal="Preference training that continues from a model which its reference would not be.",
)
def _copy_is_the_start(request: Request) -> list[Finding]:
    training = request.config.training
    if not _compares(request.config) or training.precompute_reference or training.load is None:
        return []
    if has_frozen_copy(request.config, request.active.values()):
        message = "--load changes the model after the reference was built, so both would start from different weights"
    elif training.weights_only:
        message = "the run begins with the adapters of --load, but the reference is the model without adapters"
    else:  # the loaded run continues, and its reference is also the model without adapters
        return []
    changes = (_PRECOMPUTE, drop({"load": None, "weights_only": False}))
    return [Finding(message, request.asked("load", "preference_loss"), changes=changes)]


@PREFERENCE_RULES.add(
    "RF134",
    "A reference is computed only for a loss that compares with it.",
    "ORPO and SimPO use only the trained model",
    "[Hong et al., 2024; Meng et al., 2024]",
    Example("--task preference --preference-loss orpo --precompute-reference"),
    refusal="--precompute-reference for a loss without a reference.",
)
def _reference_is_used(request: Request) -> list[Finding]:
    training = request.config.training
    if not training.precompute_reference or training.task != "preference" or _compares(request.config):
        return []
    message = f"--preference-loss {training.preference_loss} does not use a reference"
    changes = (drop({"precompute_reference": False}), replace({"preference_loss": "dpo"}))
    return [Finding(message, request.asked("precompute_reference", "preference_loss"), changes=changes)]


OF_LOSS = {"simpo_gamma": "simpo", "kto_desirable_weight": "kto", "kto_undesirable_weight": "kto"}
"""Flags that act only with one loss, and that loss."""


@PREFERENCE_RULES.add(
    "RF136",
    "The flags of a preference loss are given only with that loss.",
    "with another one they would be silently ignored",
    "[rapidformer_templates]",
    Example("--task preference --simpo-gamma 1"),
    refusal="A flag of one preference loss together with another loss.",
)
def _of_this_loss(request: Request) -> list[Finding]:
    training = request.config.training
    if training.task != "preference":
        return []
    return [
        Finding(
            f"--preference-loss {training.preference_loss} does not use {spelling(name)}, which is for {loss}",
            request.asked(name, "preference_loss"),
            changes=(drop({name: DEFAULTS[name]}), replace({"preference_loss": loss})),
        )
        for name, loss in OF_LOSS.items()
        if loss != training.preference_loss and request.config.get(name) != DEFAULTS[name]
    ]


@PREFERENCE_RULES.add(
    "RF135",
    "--preference-beta is above 0.",
    "it scales the value of a choice, and IPO divides by it",
    "[rapidformer_templates]",
    Example("--task preference --preference-beta 0"),
    refusal="A --preference-beta of 0 or less.",
)
def _bet_on_something(request: Request) -> list[Finding]:
    training = request.config.training
    if training.task != "preference" or training.preference_beta > 0:
        return []
    message = "with --preference-beta 0 no answer is better than another"
    changes = (replace({"preference_beta": 0.1}),)
    return [Finding(message, request.asked("preference_beta"), changes=changes)]
