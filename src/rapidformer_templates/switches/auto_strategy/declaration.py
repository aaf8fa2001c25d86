"""The automatic strategy: search for the best feasible layout, and use it."""

from __future__ import annotations

from dataclasses import dataclass

from rapidformer_templates.planning.checks import needs_template
from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.switch import (
    Example,
    Finding,
    Measured,
    Precedence,
    Prediction,
    Request,
    Rule,
    RuleList,
    Switch,
    add,
)


@dataclass(frozen=True)
class AutoStrategyFlags:
    """Acceleration"""

    auto_strategy: bool = flag(False, "search for the best layout of workers and batch", usual=True)
    max_global_batch_size: int | None = flag(
        None, "maximum samples per optimizer step that --auto-strategy may choose", minimum=1
    )
    host_memory_gb: float | None = flag(
        None,
        "host memory of a node in 10^9 bytes, which --auto-strategy may use (default: measured, if it plans for the "
        "devices of this machine)",
        metavar="GB",
        minimum=1,
    )


BOUNDS = ("max_global_batch_size", "host_memory_gb")
RULES = RuleList()


@RULES.add(
    "RF061",
    "--max-global-batch-size and --host-memory-gb bound a search: they need --auto-strategy. The first one excludes "
    "--global-batch-size.",
    "without a search there is nothing to bound, and an exact size leaves nothing to bound",
    "[M]",
    Example("--max-global-batch-size 32"),
    refusal="A bound of the search without a search, or --max-global-batch-size next to --global-batch-size.",
)
def _bounds_the_search(request: Request) -> list[Finding]:
    bound, exact = request.config.get("max_global_batch_size"), request.config.data.global_batch_size
    bounds = [name for name in BOUNDS if request.config.get(name) is not None]
    if bounds and not request.config.get("auto_strategy"):
        message = f"{' and '.join(map(spelling, bounds))} has no effect without --auto-strategy"
        changes = (add({"auto_strategy": True}),)
        return [Finding(message, request.asked(*bounds), switches=("auto-strategy",), changes=changes)]
    if bound is not None and exact is not None and request.config.origin("global_batch_size") != "auto-strategy":
        flags = request.asked("max_global_batch_size", "global_batch_size")
        message = "--global-batch-size and --max-global-batch-size exclude each other"
        return [Finding(message, flags, switches=("auto-strategy",))]
    return []


def _acted(measured: Measured) -> str | None:
    sizes, origins = measured.plan.sizes, [value["origin"] for value in measured.plan.values.values()]
    planned, trained = [sizes.pipeline, sizes.data, sizes.tensor], measured["layout"]
    planned += [sizes.context] if sizes.context > 1 else []
    if "auto-strategy" in origins and trained == planned:
        return None
    return f"workers divided by the search into pipeline × data × tensor {planned} were expected; they are {trained}"


SWITCHES = (
    Switch(
        name="auto-strategy",
        summary="Search for the best feasible layout of workers and batch.",
        source="[M]",
        precedence=Precedence.DATA,
        options=AutoStrategyFlags,
        active=lambda options, sizes: (
            options.auto_strategy or any(getattr(options, name) is not None for name in BOUNDS)
        ),
        off={"auto_strategy": False, **dict.fromkeys(BOUNDS)},
        predicts=Prediction(),
        templates=("Trainer",),
        receipt=("layout",),
        acted=_acted,
        rules=(
            Rule(
                "RF060",
                "The automatic strategy needs the Trainer template.",
                "it chooses between 3D layouts and ZeRO, which the other templates do not have",
                "[M]",
                needs_template("auto-strategy"),
                Example("--template Pretrainer --auto-strategy --world-size 2"),
                refusal="The automatic strategy in a Finetuner or a Pretrainer.",
            ),
            *RULES,
        ),
    ),
)
