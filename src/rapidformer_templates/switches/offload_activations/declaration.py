"""Activation offload: activations that the blocks keep for their backward wait in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rapidformer_templates.planning.checks import Given, clash
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.switch import Finding, Measured, Precedence, Prediction, Request, RuleList, Switch


@dataclass(frozen=True)
class OffloadActivationsFlags:
    """Acceleration"""

    offload_activations: bool = flag(
        False, "on a GPU: move what a block keeps for its backward to host memory, and back before it is needed"
    )


def _notes(request: Request) -> Sequence[str]:
    what = "what blocks keep goes"
    if "checkpoint-activations" in request.active:
        selective = request.config.get("recompute_granularity") == "selective"
        what = f"the inputs of recomputed blocks{', and their products with weights,' if selective else ''} go"
    notes = [
        f"offload-activations: {what} to page-locked host memory while the next block computes, and back during the "
        f"backward of the following block; if a block computes for less time than its copy takes, it waits"
    ]
    if request.sizes.pipeline > 1:
        notes.append("offload-activations: in stages before the last, the first backward of a step waits for its copy")
    return notes


RULES = RuleList()


@RULES.add("RF215", "[torch]", "--offload-activations")
def _has_no_memory_of_its_own(request: Request) -> Iterator[Finding]:
    """Activations are offloaded only from a device with its own memory.

    Why: on a CPU there is nowhere to offload to, and no stream on which a copy runs during the computation.
    """
    if request.environment.device == "cpu":
        message = "this run is on a CPU: what blocks keep is in host memory already"
        yield Finding(message, request.asked_for("offload-activations"), switches=("offload-activations",))


@RULES.add("RF216", "[torch]", "--offload-activations --torch-compile cudagraphs", device="cuda")
def _no_captured_memory(request: Request) -> list[Finding]:
    """Activations are not offloaded from CUDA graphs.

    Why: a captured graph owns its memory for the whole run, so nothing would be freed.
    """
    graphs, message = Given("torch_compile", ("cudagraphs",)), "CUDA graphs hold what they keep in their own memory"
    return clash(request, "offload-activations", graphs, message=message)


def _acted(measured: Measured) -> str | None:
    if sum(measured.all("offloaded_bytes")) > 0:
        return None
    return (
        "activations in host memory were expected; none were sent: what the last block keeps stays, since its backward "
        "comes at once, and so does what is smaller than 32 KB"
    )


SWITCHES = (
    Switch(
        name="offload-activations",
        summary="Store what blocks keep for their backward in host memory, copied during the computation.",
        source="[torch]",
        precedence=Precedence.KEEP,
        options=OffloadActivationsFlags,
        predicts=Prediction(
            {
                "activations": "those of two blocks at a time; the others in host memory",
                "time": "copies, as far as they take longer than the computation at the same time",
            }
        ),
        notes=_notes,
        transform="rapidformer_templates.switches.offload_activations.transform:offload_activations",
        receipt_hooks="rapidformer_templates.switches.offload_activations.transform:Offloading",
        receipt=("offloaded_bytes", "offloaded_bytes_at_a_time", "late_bytes"),
        acted=_acted,
        rules=tuple(RULES),
    ),
)
