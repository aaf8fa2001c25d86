"""ONNX Runtime: apply its graph optimisations to the exported forward and backward graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rapidformer_templates.planning.checks import FlagValues, excludes
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.request import precision
from rapidformer_templates.planning.switch import (
    Example,
    Finding,
    Measured,
    Precedence,
    Prediction,
    Request,
    Resource,
    RuleList,
    Switch,
    always,
    drop,
    replace,
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


@RULES.add(
    "RF088",
    "ONNX Runtime is not for tasks that generate texts.",
    "generation calls the blocks with a cache of keys and values that grows, which a graph cannot hold",
    "[torch]",
    Example("--onnx-runtime-training --task seq2seq_lm"),
    refusal="ONNX Runtime in a task that generates texts.",
)
def _generates(request: Request) -> list[Finding]:
    if request.config.training.task != "seq2seq_lm":
        return []
    message = "onnx-runtime cannot be combined with --task seq2seq_lm, which generates texts to evaluate them"
    return [Finding(message, (*request.asked_for("onnx-runtime"), *request.asked("task")), switches=("onnx-runtime",))]


@RULES.add(
    "RF086",
    "ONNX Runtime computes in 32 bits on a CPU.",
    "its CPU provider has no matrix product in bf16, and computes fp16 in fp32 with casts before and after",
    "[onnxruntime]",
    Example("--onnx-runtime-training --mixed-precision bf16"),
    refusal="ONNX Runtime in 16 bits on a CPU.",
)
def _sixteen_bits_on_cpu(request: Request) -> list[Finding]:
    computed = precision(request.config, request.environment)
    if request.environment.device != "cpu" or computed == "fp32":
        return []
    return [
        Finding(
            f"onnx-runtime does not compute in {computed} on a CPU",
            request.asked_for("onnx-runtime", "mixed-precision"),
            switches=("onnx-runtime", "mixed-precision"),
        )
    ]


@RULES.add(
    "RF087",
    "ONNX Runtime needs the packages that export its graphs and, on a GPU, its CUDA provider.",
    "torch's exporter builds on onnx and onnxscript; the package onnxruntime computes on CPUs only",
    "[torch, onnxruntime]",
    Example("--onnx-runtime-training", machine={"packages": {"onnxruntime": "1.31.1+cpu"}}),
    refusal="ONNX Runtime without the packages that export its graphs, or without CUDA on a GPU.",
)
def _package_complete(request: Request) -> list[Finding]:
    packages = request.environment.packages
    if "onnxruntime" not in packages:
        return []  # RF023 reports this
    flags = request.asked_for("onnx-runtime")
    missing = [name for name in EXPORTER if name not in packages]
    findings = []
    if missing:
        message = f"onnx-runtime needs {' and '.join(missing)} to export graphs: {INSTALL}"
        findings.append(Finding(message, flags, switches=("onnx-runtime",)))
    device = request.environment.device
    if device not in ("cpu", "cuda"):
        message = f"onnx-runtime shares memory with torch on a CPU or on Nvidia's GPUs, not on {device}"
        findings.append(Finding(message, flags, switches=("onnx-runtime",)))
    if request.environment.device == "cuda" and packages["onnxruntime"].endswith("+cpu"):
        message = (
            f"onnxruntime {packages['onnxruntime']} does not compute on a GPU: "
            "pip uninstall onnxruntime; pip install onnxruntime-gpu"
        )
        findings.append(Finding(message, flags, switches=("onnx-runtime",)))
    return findings


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
        rules=(
            *RULES,
            excludes(
                "onnx-runtime",
                Resource.PARAMETERS,
                code="RF017",
                title="ONNX Runtime needs whole parameters: no FSDP, no ZeRO-3.",
                why="the exported graphs take whole parameters, which these gather and free outside the graph",
                source="[onnxruntime, torch]",
                example=Example("--onnx-runtime-training --fsdp-memory-optimization --world-size 2"),
                refusal="ONNX Runtime together with FSDP or ZeRO-3.",
            ),
            excludes(
                "onnx-runtime",
                OTHERS_BLOCKS,
                code="RF085",
                title="ONNX Runtime captures plain blocks: none that are divided, no flash attention, no experts.",
                why="a graph is made of the operators of a block as it was built",
                source="[onnxruntime, torch]",
                example=Example("--onnx-runtime-training --tensor-model-parallel-size 2 --world-size 2"),
                refusal="ONNX Runtime for blocks that are divided, use flash attention or have experts.",
            ),
            excludes(
                FlagValues("quantize_base", ("int8", "nf4", "int4"), instead=drop({"quantize_base": None})),
                "onnx-runtime",
                message="{1} computes in graphs that torch exports, which cannot read codes",
                code="RF143",
                title="A base in 8 or 4 bits cannot run in ONNX Runtime.",
                why="codes and scales are in one tensor of bytes, and torch's exporter has no operator that reads "
                "bytes as numbers (aten.view.dtype)",
                source="[torch]",
                example=Example(
                    "--lora-rank 8 --quantize-base int8 --onnx-runtime-training",
                    {"packages": {"peft": "0.17", "onnxruntime": "1.30"}},
                ),
                refusal="A base in 8 or 4 bits in ONNX Runtime.",
                concerns="lora",
            ),
            excludes(
                FlagValues("lora_variant", ("dora",), instead=drop({"lora_variant": "lora"})),
                "onnx-runtime",
                message="dora's layers are not one graph, which {1} needs",
                code="RF144",
                title="DoRA cannot run in ONNX Runtime.",
                why="a block must be one graph, but torch's compiler breaks it where peft measures the weights",
                source="[peft, torch]",
                example=Example(
                    "--lora-rank 8 --lora-variant dora --onnx-runtime-training",
                    {"packages": {"peft": "0.17", "onnxruntime": "1.30"}},
                ),
                refusal="DoRA in ONNX Runtime.",
                concerns="lora",
            ),
            excludes(
                FlagValues("recompute_granularity", ("selective",), instead=replace({"recompute_granularity": "full"})),
                "onnx-runtime",
                message="ONNX Runtime runs a block as one piece, so nothing inside it can be kept",
                code="RF200",
                title="Selective recomputation needs blocks that run operation by operation, or that torch compiles.",
                why="it keeps results inside a block, but a captured graph returns only its outputs",
                source="[M]",
                example=Example("--checkpoint-activations --recompute-granularity selective --onnx-runtime-training"),
                refusal="Selective recomputation of blocks that ONNX Runtime captures.",
                concerns="checkpoint-activations",
            ),
        ),
    ),
)
