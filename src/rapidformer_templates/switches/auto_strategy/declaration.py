"""The automatic strategy: search for the best feasible layout, and use it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rapidformer_templates.planning.changes import add
from rapidformer_templates.planning.checks import Given, clash, needs, needs_template
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.switch import Finding, Measured, Precedence, Prediction, Request, RuleList, Switch


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


@RULES.add("RF061", "[M]", "--max-global-batch-size 32")
def _bounds_the_search(request: Request) -> Iterator[Finding]:
    """--max-global-batch-size and --host-memory-gb bound a search: they need --auto-strategy. The first one excludes
    --global-batch-size.

    Why: without a search there is nothing to bound, and an exact size leaves nothing to bound.
    """
    search, bounds = Given("auto_strategy"), tuple(map(Given, BOUNDS))
    message = "{} has no effect without --auto-strategy"
    yield from needs(request, bounds, search, add({"auto_strategy": True}), message=message)
    if request.config.origin("global_batch_size") != "auto-strategy":
        yield from clash(
            request, search, bounds[0], Given("global_batch_size"), message="{2} and {1} exclude each other"
        )


@RULES.add("RF060", "[M]", "--template Pretrainer --auto-strategy --world-size 2")
def _only_in_trainer(request: Request) -> Iterator[Finding]:
    """The automatic strategy needs the Trainer template.

    Why: it chooses between 3D layouts and ZeRO, which the other templates do not have.
    """
    return needs_template(request, "auto-strategy")


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
        rules=tuple(RULES),
    ),
)
