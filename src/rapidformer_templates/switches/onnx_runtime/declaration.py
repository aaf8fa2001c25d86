"""ONNX Runtime: apply its graph optimisations to the exported forward and backward graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rapidformer_templates.planning.changes import replace
from rapidformer_templates.planning.checks import ENCODER_DECODER, Given, clash
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.request import precision
from rapidformer_templates.planning.switch import (
    Finding,
    Measured,
    Precedence,
    Prediction,
    Request,
    Resource,
    RuleList,
    Switch,
    always,
)

INSTALL = "pip install 'rapidformer_templates[onnx]'"
EXPORTER = ("onnx", "onnxscript")
"""Packages that torch's exporter needs."""

OTHERS_BLOCKS = {
    "tensor-parallel": "parallelises the blocks by hooks and sharded tensors, which a graph cannot hold",
    "pipeline-parallel": "cuts the model into stages, whose forward ends in the middle of the model",
    "context-parallel": "exchanges keys and values inside attention, for which a graph has no operator",
    "flash-attention": "chooses a kernel of torch for attention, which is part of the graph",
    "mixture-of-experts": "sends tokens to experts by their values, but a graph has fixed sizes for each tensor",
}
"""Switches that change a block's computation, and why it cannot be exported as a graph."""


@dataclass(frozen=True)
class OnnxRuntimeFlags:
    """Acceleration"""

    onnx_runtime_training: bool = flag(False, "run forward and backward graphs in ONNX Runtime", choice="graph")


RULES = RuleList()
_of_adapters = partial(RULES.add, concerns="lora", packages={"peft": "0.17", "onnxruntime": "1.30"})


@RULES.add("RF088", "[torch]", "--onnx-runtime-training --task seq2seq_lm")
def _generates(request: Request) -> list[Finding]:
    """ONNX Runtime is not for tasks that generate texts.

    Why: generation calls the blocks with a cache of keys and values that grows, which a graph cannot hold.
    """
    message = "{0} cannot be combined with {1}, which generates texts to evaluate them"
    return clash(request, "onnx-runtime", ENCODER_DECODER, message=message)


@RULES.add("RF086", "[onnxruntime]", "--onnx-runtime-training --mixed-precision bf16")
def _sixteen_bits_on_cpu(request: Request) -> list[Finding]:
    """ONNX Runtime computes in 32 bits on a CPU.

    Why: its CPU provider has no matrix product in bf16, and computes fp16 in fp32 with casts before and after.
    """
    if request.environment.device != "cpu":
        return []
    message = f"onnx-runtime does not compute in {precision(request.config, request.environment)} on a CPU"
    return clash(request, "onnx-runtime", "mixed-precision", message=message)


@RULES.add("RF087", "[torch, onnxruntime]", "--onnx-runtime-training", packages={"onnxruntime": "1.31.1+cpu"})
def _package_complete(request: Request) -> Iterator[Finding]:
    """ONNX Runtime needs the packages that export its graphs and, on a GPU, its CUDA provider.

    Why: torch's exporter builds on onnx and onnxscript; the package onnxruntime computes on CPUs only.
    """
    packages, device = request.environment.packages, request.environment.device
    if "onnxruntime" not in packages:
        return  # RF023 reports this
    messages = []
    if missing := [name for name in EXPORTER if name not in packages]:
        messages.append(f"onnx-runtime needs {' and '.join(missing)} to export graphs: {INSTALL}")
    if device not in ("cpu", "cuda"):
        messages.append(f"onnx-runtime shares memory with torch on a CPU or on Nvidia's GPUs, not on {device}")
    if device == "cuda" and packages["onnxruntime"].endswith("+cpu"):
        install = "pip uninstall onnxruntime; pip install onnxruntime-gpu"
        messages.append(f"onnxruntime {packages['onnxruntime']} does not compute on a GPU: {install}")
    for message in messages:
        yield Finding(message, request.asked_for("onnx-runtime"), switches=("onnx-runtime",))


@RULES.add("RF017", "[onnxruntime, torch]", "--onnx-runtime-training --fsdp-memory-optimization --world-size 2")
def _whole_parameters(request: Request) -> list[Finding]:
    """ONNX Runtime needs whole parameters: no FSDP, no ZeRO-3.

    Why: the exported graphs take whole parameters, which these gather and free outside the graph.
    """
    return clash(request, "onnx-runtime", Resource.PARAMETERS)


@RULES.add("RF085", "[onnxruntime, torch]", "--onnx-runtime-training --tensor-model-parallel-size 2 --world-size 2")
def _plain_blocks(request: Request) -> list[Finding]:
    """ONNX Runtime captures plain blocks: none that are divided, no flash attention, no experts.

    Why: a graph is made of the operators of a block as it was built.
    """
    return clash(request, "onnx-runtime", OTHERS_BLOCKS)


@_of_adapters("RF143", "[torch]", "--lora-rank 8 --quantize-base int8 --onnx-runtime-training")
def _codes(request: Request) -> list[Finding]:
    """A base in 8 or 4 bits cannot run in ONNX Runtime.

    Why: codes and scales are in one tensor of bytes, and torch's exporter has no operator that reads bytes as numbers
    (aten.view.dtype).
    """
    message = "{1} computes in graphs that torch exports, which cannot read codes"
    return clash(request, Given("quantize_base", ("int8", "nf4", "int4")), "onnx-runtime", message=message)


@_of_adapters("RF144", "[peft, torch]", "--lora-rank 8 --lora-variant dora --onnx-runtime-training")
def _measures_weights(request: Request) -> list[Finding]:
    """DoRA cannot run in ONNX Runtime.

    Why: a block must be one graph, but torch's compiler breaks it where peft measures the weights.
    """
    message = "dora's layers are not one graph, which {1} needs"
    return clash(request, Given("lora_variant", ("dora",)), "onnx-runtime", message=message)


@RULES.add(
    "RF200",
    "[M]",
    "--checkpoint-activations --recompute-granularity selective --onnx-runtime-training",
    concerns="checkpoint-activations",
)
def _blocks_in_one_piece(request: Request) -> list[Finding]:
    """Selective recomputation needs blocks that run operation by operation, or that torch compiles.

    Why: it keeps results inside a block, but a captured graph returns only its outputs.
    """
    selective = Given("recompute_granularity", ("selective",), instead=(replace({"recompute_granularity": "full"}),))
    message = "ONNX Runtime runs a block as one piece, so nothing inside it can be kept"
    return clash(request, selective, "onnx-runtime", message=message)


def _notes(request: Request) -> Sequence[str]:
    return (
        "onnx-runtime: blocks and heads are exported in the first step, and again if the shape of the batches changes",
    )


def _acted(measured: Measured) -> str | None:
    if any(captured["graphs"] for captured in measured.all("onnx_runtime")):
        return None
    return "graphs that ran in ONNX Runtime were expected; there is none"


SWITCHES = (
    Switch(
        name="onnx-runtime",
        master_weights=False,
        summary="Forward and backward graphs in ONNX Runtime.",
        source="[R]",
        no_second_forward="runs one graph for the forward and the backward of a step",
        precedence=Precedence.GRAPH,
        options=OnnxRuntimeFlags,
        predicts=Prediction(
            unknown=always(
                activations="ONNX Runtime decides what it keeps; those of torch are predicted",
                time="ONNX Runtime's kernels are its own; those of torch are predicted",
            )
        ),
        family="graph",
        claims=frozenset({Resource.GRAPH}),
        needs_package="onnxruntime",
        install=INSTALL,
        transform="rapidformer_templates.switches.onnx_runtime.transform:run_in_onnx_runtime",
        receipt_hooks="rapidformer_templates.switches.onnx_runtime.transform:OnnxGraphs",
        receipt=("onnx_runtime",),
        acted=_acted,
        notes=_notes,
        rules=tuple(RULES),
    ),
)
