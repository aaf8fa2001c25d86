"""torch.compile: compile the model's graphs with one of torch's backends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from rapidformer_templates.errors import alike
from rapidformer_templates.planning.environment import compile_backends
from rapidformer_templates.planning.flags import flag
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
    replace,
)

DEFAULT = "inductor"
WHOLE = ("mixture-of-experts", "checkpoint-activations")
FREEZING = ("lora", "frozen-parameters")
# Backends that torch lists but that are separate packages: the module, and what to install.
PACKAGES = {
    "tvm": ("tvm", "pip install apache-tvm"),
    "openxla": ("torch_xla", "pip install torch_xla"),
    "openxla_eval": ("torch_xla", "pip install torch_xla"),
}


@dataclass(frozen=True)
class TorchCompileFlags:
    """Acceleration"""

    torch_compile: str | None = flag(
        None,
        "compile the blocks with this backend; without a value: inductor",
        bare=DEFAULT,
        metavar="BACKEND",
        choice="graph",
    )


def _shapes(request: Request) -> int:
    """Highest number of shapes of a training batch. 0 means unknown."""
    return request.config.switches["dynamic-shape"].shape_limit if "dynamic-shape" in request.active else 0


def _notes(request: Request) -> Sequence[str]:
    shapes = _shapes(request)
    graphs = f"a graph for each of at most {shapes} shapes" if shapes else "shapes that vary share a graph"
    return (f"torch-compile: {request.config.get('torch_compile')}, block by block; {graphs}",)


RULES = RuleList()


@RULES.add(
    "RF082",
    "The backend of --torch-compile is one that torch lists.",
    "torch looks backends up by name, and would fail in the first step",
    "[torch]",
    Example("--torch-compile nosuch"),
    refusal="A --torch-compile backend that torch does not know.",
)
def _known_backend(request: Request) -> list[Finding]:
    name = request.config.get("torch_compile")
    backends = None if name == DEFAULT else compile_backends()  # for inductor, torch need not be imported
    if backends is None or name in backends:
        return []
    near = alike(name, backends)
    message = f"torch has no compiler backend '{name}'; it has: {', '.join(backends)}"
    changes = (replace({"torch_compile": [*near, DEFAULT][0]}),)
    return [Finding(message, request.asked("torch_compile"), switches=("torch-compile",), changes=changes)]


@RULES.add(
    "RF083",
    "The backend of --torch-compile has the compiler, the package or the GPU that it needs.",
    "a graph that cannot be compiled would end the run in its first step",
    "[torch]",
    Example("--torch-compile", machine={"cxx": None}),
    refusal="A --torch-compile backend whose compiler, package or GPU is missing.",
)
def _can_compile(request: Request) -> list[Finding]:
    backend, environment = request.config.get("torch_compile"), request.environment
    if backend in PACKAGES and PACKAGES[backend][0] not in environment.packages:
        missing = "{}, which is not installed: {}".format(*PACKAGES[backend])
    elif backend == "cudagraphs" and environment.device != "cuda":
        missing = "a GPU"
    elif backend == DEFAULT and environment.device == "cpu" and environment.cxx is None:
        missing = "a C++ compiler, and there is none: apt install g++, or name yours in CXX"
    elif backend == DEFAULT and environment.compute_capability and "triton" not in environment.packages:
        missing = "triton, which is not installed: pip install triton"
    else:
        return []
    message = f"the backend {backend} needs {missing}"
    changes = (replace({"torch_compile": "aot_eager"}, "whole graphs, but nothing in them is made faster"),)
    return [Finding(message, request.asked("torch_compile"), switches=("torch-compile",), changes=changes)]


@RULES.add(
    "RF106",
    "Selective recomputation of compiled blocks needs blocks that are one graph: no experts in them.",
    "the gate of a mixture breaks the graph of its block, and torch keeps products of whole graphs only; "
    "full recomputation works",
    "[torch]",
    Example("--torch-compile aot_eager --num-experts 8 --checkpoint-activations --recompute-granularity selective"),
    refusal="Selective recomputation of compiled blocks that have experts.",
)
def _checkpointed_experts(request: Request) -> list[Finding]:
    selective = request.config.get("recompute_granularity") == "selective"
    if not selective or not request.active.keys() >= set(WHOLE):
        return []
    names = ("torch-compile", *WHOLE)
    message = "products of compiled blocks with experts cannot be kept"
    return [Finding(message, request.asked_for(*names), switches=names)]


@RULES.add(
    "RF084",
    "torch.compile under ZeRO-3 needs blocks whose parameters are all trained.",
    "the backward of a block's graph meets frozen parameters that DeepSpeed has not gathered again",
    "[deepspeed, torch]",
    Example("--torch-compile aot_eager --zero-3-memory-optimization --lora-rank 8 --world-size 2"),
    refusal="torch.compile under ZeRO-3 for a model with frozen parameters.",
)
def _frozen_in_shards(request: Request) -> list[Finding]:
    frozen = [name for name in FREEZING if name in request.active]
    if not frozen or not {"torch-compile", "zero-3"} <= request.active.keys():
        return []
    names = ("torch-compile", "zero-3", *frozen)
    message = "blocks with frozen parameters cannot be compiled under ZeRO-3"
    return [Finding(message, request.asked_for(*names), switches=names)]


def _acted(measured: Measured) -> str | None:
    compiled = measured.all("compile")
    if any(records["graphs"] for records in compiled):
        return None
    reasons = [reason for records in compiled for reason in records["not_compiled"]]
    return f"compiled graphs were expected; there is none{': ' if reasons else ''}{'; '.join(reasons[:1])}"


SWITCHES = (
    Switch(
        name="torch-compile",
        summary="Compile the model's blocks (torch.compile).",
        source="[S]",
        precedence=Precedence.COMPILE,
        options=TorchCompileFlags,
        on={"torch_compile": DEFAULT},
        predicts=Prediction(
            unknown=always(
                activations="the compiler fuses operations and recomputes some; the eager model is predicted",
                time="the compiler fuses operations; the eager model is predicted",
            )
        ),
        family="graph",
        claims=frozenset({Resource.GRAPH}),
        notes=_notes,
        engine_options=lambda request, options: dataclasses.replace(options, compile_shapes=_shapes(request)),
        transform="rapidformer_templates.switches.torch_compile.transform:compile_blocks",
        receipt_hooks="rapidformer_templates.switches.torch_compile.transform:Compilation",
        receipt=("compile",),
        acted=_acted,
        rules=tuple(RULES),
    ),
)
