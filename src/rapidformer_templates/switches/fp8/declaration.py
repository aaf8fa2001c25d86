"""fp8: the flags of matrix products in 8 bits, and what they need."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from rapidformer_templates.planning.changes import add, drop, replace
from rapidformer_templates.planning.checks import Given, clash, needs
from rapidformer_templates.planning.environment import DEVICE_KINDS
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.request import precision
from rapidformer_templates.planning.switch import Finding, Measured, Precedence, Prediction, Request, RuleList, Switch

NAME = "fp8-products"
ADA = (8, 9)
"""The first compute capability with fp8 units."""

GW_HP = "rowwise_with_gw_hp"
KINDS = ("forward", "input_gradient", "weight_gradient")
"""The three products of a linear layer."""


@dataclass(frozen=True)
class Fp8Flags:
    """Acceleration"""

    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = flag(
        None,
        "matrix products of the blocks in fp8 (torchao). One scale per tensor is fastest, one per row is more "
        "accurate, and weight gradients in bf16 are most accurate",
    )
    fp8_filter: str | None = flag(
        None,
        "layers that stay in bf16: those whose name contains a match of this regular expression",
        metavar="REGEX",
        only_with=("fp8_recipe", "rowwise"),
    )
    fp8_emulate: bool = flag(
        False,
        "round to fp8, but multiply in fp32: for trying fp8 on a device without it",
        only_with=("fp8_recipe", "rowwise"),
    )
    fp8_all_gather: bool = flag(
        False,
        "FSDP: gather weights in fp8, half the bytes; needs one scale per tensor",
        only_with=("fp8_recipe", "tensorwise"),
    )


RULES = RuleList()
TORCHAO = {"torchao": "0.18"}
_rule = partial(RULES.add, packages=TORCHAO)
ROUNDED = "--fp8-recipe rowwise --fp8-emulate --mixed-precision bf16"
"""An example without an fp8 unit that breaks no rule."""


@_rule("RF290", "[torchao]", "--fp8-recipe rowwise --fp8-emulate")
def _beside_bf16(request: Request) -> Iterator[Finding]:
    """fp8 needs --mixed-precision bf16.

    Why: everything except the products, such as their results and the weights, stays in bf16; the products of fp16
    need a loss scale that fp8 does not know.
    """
    if precision(request.config, request.environment) != "bf16":
        yield Finding(
            "fp8 needs --mixed-precision bf16",
            request.asked("fp8_recipe", "mixed_precision"),
            (NAME,),
            (add({"mixed_precision": "bf16"}),),
        )


@_rule("RF291", "[torchao]", "--fp8-recipe rowwise --mixed-precision bf16")
def _has_units(request: Request) -> Iterator[Finding]:
    """fp8 needs a GPU with compute capability 8.9 or newer.

    Why: Ada, Hopper and Blackwell multiply in 8-bit floating point, older GPUs and CPUs do not.
    """
    environment = request.environment
    capability = environment.compute_capability
    if request.config.get("fp8_emulate") or (environment.device == "cuda" and (capability or ADA) >= ADA):
        return
    found = f"compute capability {capability[0]}.{capability[1]}" if capability else environment.device
    yield Finding(
        f"fp8 needs a GPU of compute capability 8.9 or newer; this is {found}",
        request.asked("fp8_recipe"),
        (NAME,),
        (add({"fp8_emulate": True}, "the same rounding on any device, slower than bf16"),),
    )


@_rule("RF292", "[rapidformer_templates]", "--fp8-recipe rowwise --fp8-filter [")
def _regular(request: Request) -> Iterator[Finding]:
    """Layers that stay in bf16 are named by a regular expression.

    Why: it is looked for in each layer's name.
    """
    try:
        re.compile(request.config.get("fp8_filter") or "")
    except re.error as error:
        message = f"--fp8-filter is not a regular expression: {error}"
        yield Finding(message, request.asked("fp8_filter"), changes=(drop({"fp8_filter": None}),))


@_rule(
    "RF293",
    "[deepspeed, onnxruntime]",
    f"{ROUNDED} --zero-3-memory-optimization --world-size 2",
    packages=TORCHAO | {"deepspeed": "0.18"},
)
def _in_torch(request: Request) -> list[Finding]:
    """fp8 works with the engines of torch and fairscale, not with DeepSpeed or ONNX Runtime.

    Why: torchao keeps a weight from the forward to the backward, while DeepSpeed replaces and frees weights in between;
    an exported graph has no operator for torchao's products.
    """
    return clash(request, NAME, lambda switch: switch.needs_package in ("deepspeed", "onnxruntime"))


@_rule("RF294", "[torchao]", f"{ROUNDED} --lora-rank 8 --quantize-base int8", packages=TORCHAO | {"peft": "0.17"})
def _of_numbers(request: Request) -> list[Finding]:
    """fp8 needs weights in 16 or 32 bits.

    Why: codes in 8 or 4 bits are dequantized for each product, which takes longer than fp8 saves.
    """
    half = replace({"quantize_base": "half"}, "16 bits per weight")
    codes = Given("quantize_base", ("int8", "nf4", "int4"), instead=(half,))
    return clash(request, NAME, codes, message="{0} cannot multiply with the codes of {1}")


@_rule(
    "RF295",
    "[torchao]",
    "--fp8-recipe tensorwise --fp8-emulate --mixed-precision bf16 --context-parallel-size 2 --world-size 2",
)
def _scale_of_a_part(request: Request) -> list[Finding]:
    """Under context parallelism, fp8 needs a scale per row.

    Why: a scale per tensor comes from all of its tokens, but each worker has only a part of a sequence.
    """
    rows = (replace({"fp8_recipe": "rowwise"}),)
    message = "one scale for all tokens cannot be found by {1}, which divides them"
    return clash(request, Given("fp8_recipe", ("tensorwise",), instead=rows), "context-parallel", message=message)


@_rule("RF296", "[torchao]", f"{ROUNDED} --fp8-all-gather --world-size 2")
def _gathered(request: Request) -> Iterator[Finding]:
    """--fp8-all-gather needs FSDP, one scale per tensor, and weights that only FSDP divides.

    Why: other engines do not gather weights for a forward; torchao sends rows with the scale of their whole tensor.
    """
    gather = Given("fp8_all_gather")
    yield from needs(request, gather, "fsdp", add({"fsdp_memory_optimization": True}))
    yield from needs(request, gather, Given("fp8_recipe", ("tensorwise",)), replace({"fp8_recipe": "tensorwise"}))
    yield from clash(request, gather, "tensor-parallel", message="{0} sends whole rows, which {1} divides")


def _notes(request: Request) -> Sequence[str]:
    notes = [f"{NAME}: heads, routers, stacks of experts, adapters, and sizes that 16 does not divide stay in bf16"]
    if "torch-compile" not in request.active and not request.config.get("fp8_emulate"):
        notes.append(f"{NAME}: without --torch-compile, casts are separate kernels, which cost more than fp8 saves")
    return notes


def _unknown(request: Request) -> dict[str, str]:
    kind = DEVICE_KINDS.get(request.environment.device_kind or "")
    has_rate = kind is not None and kind.fp8_tflops and not request.config.get("fp8_emulate")
    unknown = {} if has_rate else {"time": "the rate of fp8 is unknown here; products are predicted in bf16"}
    if request.config.get("fp8_all_gather"):
        unknown["activations"] = "weights that FSDP gathers are predicted in bf16"
    return unknown


def _acted(measured: Measured) -> str | None:
    """Check that each kind of product that the recipe computes in fp8 ran in fp8 on some worker."""
    ran: Counter[str] = Counter()
    for products in measured.all("fp8_products"):
        ran.update(products)
    in_bf16 = measured.config.get("fp8_recipe") == GW_HP or {"lora", "frozen-parameters"} & set(measured.plan.switches)
    missing = [kind for kind in KINDS if not ran[kind] and not (in_bf16 and kind == "weight_gradient")]
    if not missing and measured.config.get("fp8_all_gather") and not any(measured.all("gathered_in_8_bits")):
        return "weights gathered in fp8 were expected; none were"
    if not missing:
        return None
    found = ", ".join(f"{ran[kind]} {kind}" for kind in KINDS)
    return f"fp8 products of each kind were expected; there are {found}"


SWITCHES = (
    Switch(
        name=NAME,
        summary="Matrix products of the blocks in 8-bit floating point (torchao).",
        source="[torchao]",
        precedence=Precedence.PRODUCT,
        options=Fp8Flags,
        on={"fp8_recipe": "rowwise", "mixed_precision": "bf16", "fp8_emulate": True},
        off={"fp8_recipe": None, "fp8_filter": None, "fp8_emulate": False, "fp8_all_gather": False},
        predicts=Prediction(
            {"time": "products of blocks at the rate of fp8, with casts", "activations": "the largest casts"}, _unknown
        ),
        needs_package="torchao",
        install="pip install 'rapidformer_templates[torchao]'",
        notes=_notes,
        transform="rapidformer_templates.switches.fp8.transform:multiply_in_fp8",
        receipt_hooks="rapidformer_templates.switches.fp8.transform:Fp8Products",
        receipt=("fp8_products", "fp8_layers", "gathered_in_8_bits"),
        acted=_acted,
        changes_result=True,
        rules=tuple(RULES),
    ),
)
