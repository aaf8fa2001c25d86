"""torch.compile: the model's graphs compiled by one of torch's backends."""

from __future__ import annotations

from dataclasses import dataclass

from rapidformer_templates.flags import flag
from rapidformer_templates.switches._switch import Resource, Stage, Switch


@dataclass(frozen=True)
class TorchCompileFlags:
    """Acceleration"""

    torch_compile: str | None = flag(
        None, "compile the blocks with this backend; alone: inductor", bare="inductor", metavar="BACKEND"
    )


SWITCH = Switch(
    name="torch-compile",
    summary="Compile the model's blocks (torch.compile).",
    source="[S]",
    stage=Stage.COMPILE,
    options=TorchCompileFlags,
    active=lambda options, sizes: options.torch_compile is not None,
    on={"torch_compile": "inductor"},
    off={"torch_compile": None},
    family="graph",
    claims=frozenset({Resource.GRAPH}),
    available=False,
)
