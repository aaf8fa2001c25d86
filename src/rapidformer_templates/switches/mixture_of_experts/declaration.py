"""The mixture-of-experts switch: sparse feed-forwards, with balance and z losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rapidformer_templates.models.model_files import CONVERTED, OWN_EXPERTS
from rapidformer_templates.planning.changes import add, drop, replace
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.switch import (
    Finding,
    Measured,
    ModelFacts,
    Precedence,
    Prediction,
    Request,
    RuleList,
    Switch,
)

_option = partial(flag, only_with=("num_experts", 8))


@dataclass(frozen=True)
class MixtureOfExpertsFlags:
    """Acceleration"""

    num_experts: int | None = flag(None, "replace feed-forwards by this many gated experts", metavar="N", minimum=1)
    moe_top_k: int | None = _option(
        None,
        "experts that each token visits (default: 2, or that of an architecture with experts)",
        metavar="K",
        minimum=1,
    )
    moe_ffn_hidden_size: int | None = _option(
        None, "inner width of an expert (default: that of the dense feed-forward)", metavar="N", minimum=1
    )
    moe_layer_interval: int = _option(1, "experts in every K-th block", metavar="K", minimum=1)
    moe_loss_coeff: float | None = flag(
        None, "weight of the balance loss (default: 0.01, or that of a pretrained mixture)", metavar="C", minimum=0
    )
    moe_z_loss_coeff: float | None = flag(
        None, "weight of the router z loss (default: 0.001; 0 for a pretrained mixture)", metavar="C", minimum=0
    )
    moe_capacity_factor: float | None = _option(
        None,
        "capacity of an expert relative to an even load; further tokens are dropped (default: none are)",
        metavar="F",
    )


UNDIVIDED = {"expert_parallel": False, "expert_model_parallel_size": None}
"""The defaults of the flags that divide experts. They need a model with experts, too."""
OFF = {declared.name: declared.default for declared in dataclasses.fields(MixtureOfExpertsFlags)}
SIZING = ("moe_top_k", "moe_ffn_hidden_size")
SHAPING = ("moe_layer_interval", "moe_capacity_factor")


def _has_experts(model: ModelFacts) -> bool:
    kind = model.model_type or ""
    return kind in OWN_EXPERTS or kind.startswith(CONVERTED)


RULES = RuleList()


@RULES.add("RF027", "[deepspeed]", "--num-experts 2 --moe-top-k 4")
def _top_k_exists(request: Request) -> Iterator[Finding]:
    """A token visits at most as many experts as there are.

    Why: the gate chooses distinct experts.
    """
    experts, top_k = request.config.get("num_experts"), request.config.get("moe_top_k")
    if experts is not None and top_k is not None and top_k > experts:
        message = f"a token cannot visit {top_k} of {experts} experts"
        flags = request.asked("moe_top_k", "num_experts")
        yield Finding(message, flags, ("mixture-of-experts",), (replace({"moe_top_k": experts}),))


@RULES.add("RF070", "[rapidformer_templates]", "--moe-loss-coeff 0.01 --model-type gpt2")
def has_experts_to_use(request: Request) -> Iterator[Finding]:
    """Experts need a model that is trained from scratch, or pretrained weights that have them.

    Why: dense weights have no experts, and an untrained gate would only damage them.
    """
    config, model, has_some = request.config, request.model, _has_experts(request.model)
    pretrained, num_experts = config.model.pretrained_model_name_or_path, config.get("num_experts")
    if num_experts is None and not has_some:
        balanced = {name: OFF[name] for name in ("moe_loss_coeff", "moe_z_loss_coeff") if model.model_type is not None}
        flags = {name: off for name, off in (balanced | UNDIVIDED).items() if config.get(name) != off}
        if flags:
            message = f"{' and '.join(map(spelling, flags))} needs a model with experts"
            yield Finding(message, request.asked(*flags), changes=(add({"num_experts": 8}), drop(flags)))
    fits = has_some and num_experts == model.num_experts
    if num_experts is not None and pretrained and model.model_type is not None and not fits:
        has = f"{model.num_experts} experts, not {num_experts}" if has_some else "dense feed-forwards"
        given = {n: off for n, off in OFF.items() if config.get(n) != off and n != "moe_loss_coeff"}
        asked = request.asked("num_experts", "pretrained_model_name_or_path")
        yield Finding(f"the pretrained {model.model_type} has {has}", asked, ("mixture-of-experts",), (drop(given),))


@RULES.add("RF071", "[transformers]", "--model-type mixtral --num-experts 4 --moe-capacity-factor 1.25")
def _own_experts_as_they_are(request: Request) -> Iterator[Finding]:
    """Experts that an architecture or a pretrained model already has are used unchanged.

    Why: which blocks have them and what they drop is part of the architecture, and their sizes are part of the weights.
    """
    config, kind = request.config, request.model.model_type
    fixed: tuple[str, ...] = SHAPING if kind in OWN_EXPERTS else ()
    if config.model.pretrained_model_name_or_path:
        fixed = (*SIZING, *SHAPING)
    flags = {name: OFF[name] for name in fixed if config.get(name) != OFF[name]}
    if flags and _has_experts(request.model):
        words = " and ".join(map(spelling, flags))
        message = f"the experts of {kind} are used unchanged, and {words} cannot change them"
        yield Finding(message, request.asked(*flags), changes=(drop(flags),))


@RULES.add("RF073", "[rapidformer_templates]", "--num-experts 4 --moe-capacity-factor 0")
def _room_for_a_token(request: Request) -> Iterator[Finding]:
    """A capacity factor is above zero.

    Why: an expert without room does not take any token.
    """
    factor = request.config.get("moe_capacity_factor")
    if factor is not None and factor <= 0:
        changes = (replace({"moe_capacity_factor": 1.25}), drop({"moe_capacity_factor": None}))
        message = f"with a capacity factor of {factor:g} the experts have no room"
        yield Finding(message, request.asked("moe_capacity_factor"), changes=changes)


def _notes(request: Request) -> Sequence[str]:
    if request.config.get("num_experts") is None or _has_experts(request.model):
        return ()
    return (
        "mixture-of-experts: export/ is read by rapidformer and rapidformer_templates.load_mixture, "
        "not by from_pretrained",
    )


def _acted(measured: Measured) -> str | None:
    layers = measured["expert_load_by_layer"]
    if layers and all(any(layer) for layer in layers):
        return None
    return "tokens that visit the experts of each layer, and their balance loss, were expected; there are none"


SWITCHES = (
    Switch(
        name="mixture-of-experts",
        summary="Sparse gated feed-forwards with a load-balancing loss.",
        source="[R, S]",
        no_second_forward="adds losses over all tokens of a forward",
        precedence=Precedence.MIXTURE,
        options=MixtureOfExpertsFlags,
        active=lambda options, sizes: any(
            value is not None for value in (options.num_experts, options.moe_loss_coeff, options.moe_z_loss_coeff)
        ),
        implied=_has_experts,
        on={"num_experts": 8},
        off=OFF,
        predicts=Prediction(
            dict.fromkeys(("parameters", "gradients", "optimizer"), "with those of gates and all experts")
            | {"activations": "each token as often as it visits experts", "time": "products of the experts visited"},
            traced=True,
        ),
        notes=_notes,
        transform="rapidformer_templates.switches.mixture_of_experts.transform:mixture_of_experts",
        exported="rapidformer_templates.switches.mixture_of_experts.transform",
        receipt=("expert_load", "expert_load_by_layer", "dropped_choices"),
        acted=_acted,
        changes_result=True,
        rules=tuple(RULES),
    ),
)
