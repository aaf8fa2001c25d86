"""``plan --auto-strategy --compare FLAGS``: why a layout is not the best one, component by component.

Imports no torch.
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass

from rich.table import Table

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.switches.auto_strategy.layouts import Layout
from rapidformer_templates.switches.auto_strategy.results import Candidate, SearchResult
from rapidformer_templates.switches.auto_strategy.step_seconds import Timing
from rapidformer_templates.switches.auto_strategy.timing import GB
from rapidformer_templates.system.terminal import console


def with_layout_flags(config: RunConfig, text: str) -> RunConfig:
    """Return the configuration with the flags of ``--compare``. The search may only fill in what they leave open.

    Raises:
        ConfigError: a flag does not exist, does not belong to a layout, or is on the command line, too.
    """
    named = parse(shlex.split(text), REGISTRY.options())
    layout_fields = Layout().values().keys() | {"pipeline_stages"}
    for name in named.origins:
        if name not in layout_fields:
            hint = "it takes flags such as --tensor-model-parallel-size 8 --zero-2-memory-optimization"
            raise ConfigError(f"{spelling(name)} does not belong to a layout", where="--compare", hint=hint)
        if name in config.origins:
            where = f"--compare and {config.origin(name)}"
            raise ConfigError(f"{spelling(name)} is given twice", where=where, hint="leave one of them out")
    return config.replace("--compare", **{name: named.get(name) for name in named.origins})


@dataclass(frozen=True)
class Difference:
    """A part of the time or the memory of two layouts.

    Attributes:
        unit: ``ms`` per sample, or ``GB`` per worker.
    """

    name: str
    unit: str
    best: float
    named: float


def differences(best: Candidate, named: Candidate) -> list[Difference]:
    """Compare a layout with the best one. Times are per sample, because the global batches may differ."""
    times = [components(each.timing) | {"step": each.timing.total} for each in (best, named)]
    scales = [1000 / each.layout.global_batch for each in (best, named)]
    seconds = [
        Difference(name, "ms", times[0][name] * scales[0], times[1][name] * scales[1])
        for name in times[0]
        if times[0][name] or times[1][name]
    ]
    memories = [{**vars(each.memory), "total": each.memory.total, "setup": each.setup.device} for each in (best, named)]
    gigabytes = [
        Difference(name, "GB", memories[0][name] / GB, memories[1][name] / GB)
        for name in memories[0]
        if memories[0][name] or memories[1][name]
    ]
    return [*seconds, *gigabytes, Difference("needed", "GB", best.needed_gb, named.needed_gb)]


def components(timing: Timing) -> dict[str, float]:
    """Return the seconds of a step by component."""
    return {
        "matrix products": timing.products,
        "attention": timing.attention,
        "norms, activations and gradient sums": timing.memory,
        "waiting for the host": timing.launches,
        "bubble": timing.bubble,
        "tensor sums": timing.tensor,
        "tokens to experts": timing.experts,
        "stage transfers": timing.pipeline,
        "exposed replica exchanges": timing.data,
        "update": timing.update,
        "copies to the host and back": timing.offload,
    }


def compared_to_json(result: SearchResult, named: SearchResult) -> dict[str, object]:
    """Return the public JSON form. See docs/planner-answers.md."""
    if not result.layouts or not named.layouts:
        return {"flags": None, "constraint": closest_constraint(named), "differences": []}
    chosen = named.layouts[0]
    compared = [vars(each) for each in differences(result.layouts[0], chosen)]
    return {"flags": " ".join(chosen.layout.flags()), "constraint": None, "differences": compared}


def closest_constraint(result: SearchResult) -> str:
    """Return the constraint that most layouts fail: the last one of that kind, which divides the model most."""
    kinds = Counter(rejected.constraint.partition(":")[0] for rejected in result.rejected)
    if not kinds:
        return "these flags allow no layout"
    ((usual, _),) = kinds.most_common(1)
    return [each.constraint for each in result.rejected if each.constraint.partition(":")[0] == usual][-1]


def show_comparison(result: SearchResult, named: SearchResult) -> None:
    """Print a table of the differences, and the component that costs most. Or the reason why nothing fits."""
    if not result.layouts or not named.layouts:
        print(f"--compare: no layout with these flags fits: {closest_constraint(named)}")
        return
    best, chosen = result.layouts[0], named.layouts[0]
    slower = best.samples_per_second / chosen.samples_per_second - 1
    title = f"--compare: {' '.join(chosen.layout.flags())}"
    table = Table("", "unit", title=title, title_justify="left")
    for name in ("best", "--compare", "difference"):
        table.add_column(name, justify="right")
    compared = differences(best, chosen)
    for each in compared:
        sizes = (f"{each.best:,.3f}", f"{each.named:,.3f}", f"{each.named - each.best:+,.3f}")
        table.add_row(each.name, each.unit, *sizes)
    console(piped_width=160).print(table)
    times = [each for each in compared if each.unit == "ms" and each.name != "step"]
    most = max(times, key=lambda each: each.named - each.best)
    cause = f", most of it: {most.name}" if slower > 0 and most.named > most.best else ""
    print(f"--compare: {slower:+.1%} time per sample{cause}. The table has ms per sample, and GB per worker")
