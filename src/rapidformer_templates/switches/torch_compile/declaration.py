"""torch.compile: compile the model's graphs with one of torch's backends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rapidformer_templates.errors import alike
from rapidformer_templates.planning.changes import Change, replace
from rapidformer_templates.planning.checks import Given, clash
from rapidformer_templates.planning.environment import compile_backends
from rapidformer_templates.planning.flags import flag
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

DEFAULT = "inductor"
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


def _refuse(request: Request, message: str, instead: Change) -> Finding:
    return Finding(message, request.asked("torch_compile"), ("torch-compile",), (instead,))


RULES = RuleList()


@RULES.add("RF082", "[torch]", "--torch-compile nosuch")
def _known_backend(request: Request) -> Iterator[Finding]:
    """The backend of --torch-compile is one that torch lists.

    Why: torch looks backends up by name, and would fail in the first step.
    """
    name = request.config.get("torch_compile")
    backends = None if name == DEFAULT else compile_backends()  # for inductor, torch need not be imported
    if backends is not None and name not in backends:
        near = alike(name, backends)
        message = f"torch has no compiler backend '{name}'; it has: {', '.join(backends)}"
        yield _refuse(request, message, replace({"torch_compile": [*near, DEFAULT][0]}))


@RULES.add("RF083", "[torch]", "--torch-compile", cxx=None)
def _can_compile(request: Request) -> Iterator[Finding]:
    """The backend of --torch-compile has the compiler, the package or the GPU that it needs.

    Why: a graph that cannot be compiled would end the run in its first step.
    """
    backend, environment = request.config.get("torch_compile"), request.environment
    missing = None
    if backend in PACKAGES and PACKAGES[backend][0] not in environment.packages:
        missing = "{}, which is not installed: {}".format(*PACKAGES[backend])
    elif backend == "cudagraphs" and environment.device != "cuda":
        missing = "a GPU"
    elif backend == DEFAULT and environment.device == "cpu" and environment.cxx is None:
        missing = "a C++ compiler, and there is none: apt install g++, or name yours in CXX"
    elif backend == DEFAULT and environment.compute_capability and "triton" not in environment.packages:
        missing = "triton, which is not installed: pip install triton"
    if missing:
        eager = replace({"torch_compile": "aot_eager"}, "whole graphs, but nothing in them is made faster")
        yield _refuse(request, f"the backend {backend} needs {missing}", eager)


@RULES.add(
    "RF106",
    "[torch]",
    "--torch-compile aot_eager --num-experts 8 --checkpoint-activations --recompute-granularity selective",
)
def _checkpointed_experts(request: Request) -> list[Finding]:
    """Selective recomputation of compiled blocks needs blocks that are one graph: no experts in them.

    Why: the gate of a mixture breaks the graph of its block, and torch keeps products of whole graphs only; full
    recomputation works.
    """
    selective = Given("recompute_granularity", ("selective",), instead=(replace({"recompute_granularity": "full"}),))
    message = "products of compiled blocks with experts cannot be kept"
    return clash(request, "torch-compile", "mixture-of-experts", selective, message=message)


@RULES.add(
    "RF084", "[deepspeed, torch]", "--torch-compile aot_eager --zero-3-memory-optimization --lora-rank 8 --world-size 2"
)
def _frozen_in_shards(request: Request) -> list[Finding]:
    """torch.compile under ZeRO-3 needs blocks whose parameters are all trained.

    Why: the backward of a block's graph meets frozen parameters that DeepSpeed has not gathered again.
    """
    message = "blocks with frozen parameters cannot be compiled under ZeRO-3"
    return clash(request, "torch-compile", "zero-3", ("lora", "frozen-parameters"), message=message)


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
            predicted={"time": "operations between two matrix products move the operands of these 1.9 times"},
            unknown=always(
                activations="the compiler fuses operations and recomputes some; the eager model is predicted"
            ),
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
