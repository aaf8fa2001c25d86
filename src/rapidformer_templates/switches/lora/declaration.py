"""The lora switch: train low-rank adapters on frozen weights (Hu et al., 2021), through peft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from rapidformer_templates.planning.changes import add, drop, replace
from rapidformer_templates.planning.checks import Given, clash, needs
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.environment import version_of
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.switch import Finding, Measured, Precedence, Prediction, Request, RuleList, Switch

CODES = ("int8", "nf4", "int4")
DIVIDING = ("deepspeed-config", "tensor-parallel")
IN_CODES, IN_HALF = Given("quantize_base", CODES), Given("quantize_base", ("half",))
DORA = Given("lora_variant", ("dora",))
BITSANDBYTES = (0, 50)
"""The first version that also quantizes on a CPU."""
SHARDS_CODES = (2, 12)
"""The first version of torch whose FSDP shards parameters that are not floating-point numbers."""


_option = partial(flag, only_with=("lora_rank", 8))


@dataclass(frozen=True)
class LoraFlags:
    """Adapters"""

    lora_rank: int | None = flag(
        None, "train adapters of this rank on top of frozen weights", metavar="N", minimum=1, usual=True
    )
    lora_alpha: float | None = _option(
        None, "the adapters' output is multiplied by ALPHA / rank (default: twice the rank)", metavar="ALPHA", minimum=0
    )
    lora_dropout: float = _option(0.0, "dropout before the adapters", minimum=0, maximum=1)
    lora_target_modules: str = _option(
        "all-linear",
        "what gets adapters: all-linear, or comma-separated ends of names; experts and routers only by name",
        metavar="NAMES",
    )
    lora_modules_to_save: str | None = _option(
        None, "modules that are trained whole in addition (default: a new head)", metavar="NAMES"
    )
    lora_variant: Literal["lora", "rslora", "dora"] = _option(
        "lora", "rslora divides by the root of the rank; dora also trains the length of each output"
    )
    quantize_base: Literal["half", "int8", "nf4", "int4"] | None = _option(
        None,
        "store the frozen weights in fewer bits; half: the 16 bits of --mixed-precision; nf4: QLoRA's 4 bits, by "
        "bitsandbytes",
    )


RULES = RuleList()
_rule = partial(RULES.add, packages={"peft": "0.17"})


@_rule("RF120", "[peft]", "--lora-rank 8 --model-type gpt2")
def _pretrained(request: Request) -> list[Finding]:
    """Adapters need pretrained weights.

    Why: a product of two small matrices corrects existing weights; it cannot replace missing ones.
    """
    pretrained = Given("pretrained_model_name_or_path")
    if request.config.model.model_type is None:
        return []
    message = "adapters need pretrained weights, but --model-type starts from scratch"
    return needs(request, Given("lora_rank"), pretrained, add({pretrained.field: "FOLDER"}), message=message)


def _matrices(request: Request) -> list[str]:
    """Return the names in --lora-target-modules that belong to stacks of experts and so cannot be layers."""
    names = str(request.config.get("lora_target_modules")).split(",")
    return [name for name in map(str.strip, names) if {"experts", "gate_up_proj"} & set(name.split("."))]


@RULES.add("RF142", "[peft]", "--lora-rank 8 --lora-target-modules all-linear,experts --lora-dropout 0.1")
def _beside_matrices(request: Request) -> Iterator[Finding]:
    """If experts have adapters, all adapters are plain and without dropout.

    Why: peft's ParamWrapper adds the product to the whole matrix, so it can have neither dropout before the product nor
    DoRA.
    """
    plain: dict[str, object] = {"lora_dropout": 0.0, "lora_variant": "lora"}
    named, flags = _matrices(request), [n for n in plain if request.config.get(n) not in (plain[n], "rslora")]
    if named and flags:
        words = " and ".join(map(spelling, flags))
        message = f"peft has no adapters with {words} together with matrices that are not layers: {', '.join(named)}"
        changes = (drop({name: plain[name] for name in flags}), replace({"lora_target_modules": "all-linear"}))
        yield Finding(message, request.asked("lora_target_modules", *flags), changes=changes)


@_rule("RF140", "[rapidformer_templates]", "--lora-rank 8 --quantize-base int8 --tensor-model-parallel-size 2")
def _codes_divided(request: Request) -> Iterator[Finding]:
    """A base in 8 or 4 bits is divided only by ZeRO-3, and by FSDP with torch 2.12 or newer.

    Why: they gather all codes of a weight before they are read; a worker that computes with a part of a weight would
    cut through blocks of numbers that share a scale, and FSDP of older versions shards floating-point numbers only.
    """
    dividing = (*DIVIDING, *(("expert-parallel",) if _matrices(request) else ()))
    message = "{1} divides the weights, but codes of 8 or 4 bits are read together"
    yield from clash(request, IN_CODES, dividing, message=message)
    version = request.environment.packages.get("torch")
    if version is not None and version_of(version) < SHARDS_CODES:
        message = f"{{1}} shards codes of 8 or 4 bits with torch {'.'.join(map(str, SHARDS_CODES))}, not with {version}"
        yield from clash(request, IN_CODES, "fsdp", message=message)


@_rule("RF126", "[rapidformer_templates]", "--lora-rank 8 --quantize-base half")
def _half_of_what(request: Request) -> list[Finding]:
    """A 16-bit base needs 16-bit products.

    Why: autocast would round the same weights to the same bits in each product; fp32 products would differ.
    """
    message = "--quantize-base half keeps weights in the type that products are computed in, which is fp32 here"
    way = add({"mixed_precision": "bf16"})
    return needs(request, IN_HALF, Given("mixed_precision"), way, message=message)


@_rule("RF128", "[peft]", "--lora-rank 8 --lora-variant dora --quantize-base half --mixed-precision bf16")
def _read_in_fp32(request: Request) -> list[Finding]:
    """DoRA needs the weights in fp32.

    Why: each forward measures the lengths that it trains on them, and they would be rounded with the weights.
    """
    return clash(
        request, Given("quantize_base"), DORA, message="dora measures the length of each output's weights in fp32"
    )


@_rule("RF141", "[bitsandbytes]", "--lora-rank 8 --quantize-base nf4")
def _reads_nf4(request: Request) -> Iterator[Finding]:
    """nf4 is bitsandbytes' format.

    Why: it has kernels that write and read it on GPUs and, since 0.50, on CPUs; int8 and int4 need none.
    """
    version = request.environment.packages.get("bitsandbytes")
    if request.config.get("quantize_base") == "nf4" and (version is None or version_of(version) < BITSANDBYTES):
        has = "which is not installed" if version is None else f"and {version} is installed"
        since = ".".join(map(str, BITSANDBYTES))
        message = f"nf4 needs bitsandbytes {since} or newer, {has}: pip install 'rapidformer_templates[bitsandbytes]'"
        changes = tuple(add({"quantize_base": other}) for other in ("int4", "int8"))
        yield Finding(message, request.asked("quantize_base"), changes=changes)


@RULES.add("RF122", "[peft]", "--lora-rank 8 --lora-variant dora --zero-3-memory-optimization")
def _lengths_of_whole_weights(request: Request) -> list[Finding]:
    """DoRA needs whole weights.

    Why: it divides by the length of each output's weights, in each forward.
    """
    message = "dora reads the whole weights of a layer outside its forward, but {1} divides them"
    return clash(request, DORA, ("zero-3", "tensor-parallel"), message=message)


@_rule(
    "RF127",
    "[rapidformer_templates]",
    "--lora-rank 8 --quantize-base half --mixed-precision bf16 --zero-2-memory-optimization",
)
def _types_by_deepspeed(request: Request) -> list[Finding]:
    """A 16-bit base needs an engine that leaves weights unchanged.

    Why: DeepSpeed converts the whole model.
    """
    converting = ("zero-1", "zero-2", "zero-3", "deepspeed-config")
    return clash(request, IN_HALF, converting, message="{1} chooses the type of the weights itself")


def _notes(request: Request) -> Sequence[str]:
    notes = [
        "lora: export/ holds the adapters, which peft loads; rapidformer export RUN --merge writes the whole model"
    ]
    if "mixture-of-experts" in request.active and request.config.get("lora_target_modules") == "all-linear":
        notes.append(
            "lora: experts and routers get no adapters; --lora-target-modules all-linear,experts gives experts some"
        )
    return notes


def _acted(measured: Measured) -> str | None:
    trained, frozen = measured["trained_parameters"], measured["frozen_parameters"]
    adapted, in_codes = measured["adapted_layers"], measured["quantized_layers"]
    coded = (adapted or 0) - (measured["adapted_routers"] or 0)
    if adapted and measured.config.get("quantize_base") in CODES and in_codes != coded:
        return f"{coded} layers in {measured.config.get('quantize_base')} were expected; {in_codes} are"
    if {"fsdp", "zero-3"} & set(measured.plan.switches):
        shares = measured.plan.engine_options.parameter_sharding.shard_size or measured.plan.sizes.copies
        whole, most = measured["quantized_bytes"] or 0, max(measured.all("quantized_bytes_on_worker"), default=0)
        if most > whole / shares + (in_codes or 0):  # each layer is rounded up to equal shares
            return f"codes over {shares} workers were expected; a worker has {most:,} of {whole:,} bytes"
    if trained and frozen and measured["adapted_layers"]:
        return None
    return "adapters on top of frozen weights were expected; " + (
        "no layer has one"
        if not measured["adapted_layers"]
        else f"{trained:,} elements are trained, {frozen:,} are not"
    )


SWITCHES = (
    Switch(
        name="lora",
        master_weights=False,
        summary="Train small matrices on top of frozen weights.",
        source="[peft]",
        keeps_base=True,
        precedence=Precedence.STRUCTURE,
        options=LoraFlags,
        on={"lora_rank": 8},
        predicts=Prediction(
            {
                "parameters": "frozen weights and adapters",
                "gradients": "those of the adapters only",
                "optimizer": "those of the adapters only",
                "activations": "those of adapted layers",
            },
            traced=True,
        ),
        notes=_notes,
        needs_package="peft",
        install="pip install 'rapidformer_templates[peft]'",
        transform="rapidformer_templates.switches.lora.transform:add_adapters",
        exported="rapidformer_templates.switches.lora.exported",
        receipt_hooks="rapidformer_templates.switches.lora.transform:TrainedBesideFrozen",
        receipt=(
            *("trained_parameters", "frozen_parameters", "trained_bytes", "frozen_bytes"),
            *("adapted_layers", "adapted_routers"),
            *("quantized_layers", "quantized_bytes", "quantized_bytes_on_worker"),
        ),
        acted=_acted,
        changes_result=True,
        rules=tuple(RULES),
    ),
)
