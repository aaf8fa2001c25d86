"""``rapidformer plan --auto-strategy`` with its output, and the layout that a training command uses."""

from __future__ import annotations

import gc
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from rich.console import Console
from rich.table import Table

from rapidformer_templates.errors import ConfigError, RapidformerError
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.planning.flag_parser import parse
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.registry import REGISTRY, Registry
from rapidformer_templates.planning.request import precision
from rapidformer_templates.planning.resolve import resolve
from rapidformer_templates.switches.auto_strategy import results
from rapidformer_templates.switches.auto_strategy.layouts import FlagValue, Layout, layout_of, memory_options_of
from rapidformer_templates.switches.auto_strategy.step_seconds import Timing
from rapidformer_templates.switches.auto_strategy.timing import GB, Hardware, find_hardware
from rapidformer_templates.switches.layout.declaration import AUTO_MEMORY
from rapidformer_templates.system.launch import is_first_worker
from rapidformer_templates.system.terminal import console

if TYPE_CHECKING:
    from rapidformer_templates.switches.auto_strategy.model_of_flags import ModelSource, Subject

WIDTHS = {"recompute": len("selective"), "partitioning": len("distributed…")}
"""Minimum widths of table columns whose words must not be cut shorter."""


class NothingFits(RapidformerError):
    """No layout of the workers fits the model."""


MeasurePlan: TypeAlias = Callable[[Plan], results.Memory]
"""Runs the engine of a plan on tensors without data, and returns the memory that it needs."""

Subjects: TypeAlias = "dict[tuple[str, ...], Subject]"
"""Traced models of earlier searches, by the switches that change them."""


def search(
    config: RunConfig,
    environment: Environment,
    registry: Registry = REGISTRY,
    *,
    source: ModelSource | None = None,
    cached: bool = True,
    subjects: Subjects | None = None,
) -> tuple[results.SearchResult, Hardware]:
    """Search all layouts. Return them, and the devices that they are for.

    Args:
        source: builds the model. The default is the model of the flags.
        cached: whether the result of an equal search is used if there is one. A new result is stored. With ``source``,
            no result is used or stored, because the model does not follow from the flags.
        subjects: the models that searches of the same model share. A new one is added.

    Raises:
        Refused: a rule is broken that no layout can satisfy.
        ModelError: the model cannot be built.
        ConfigError: the memory of the devices is unknown.
    """
    by_memory = config.get("pipeline_stages") == AUTO_MEMORY
    if by_memory:  # every layout with a pipeline requests it, and no other layout may
        config = config.replace("default", pipeline_stages=None)
    # The flags without a layout: invalid ones are refused with the usual message.
    without_layout = registry.complete(config).replace("default", micro_batch_size=1, global_batch_size=None)
    plan = resolve(without_layout, environment, registry)
    complete = registry.complete(config)
    hardware = find_hardware(environment, precision(complete, environment), complete.get("host_memory_gb"))
    is_known = cached and registry is REGISTRY and source is None
    file = results.cache_file(config, environment, hardware, by_memory=by_memory) if is_known else None
    result = results.read_result(file) if file else None
    if result is None:
        gc.disable()  # collections take a sixth of the import of torch and transformers
        try:
            from rapidformer_templates.switches.auto_strategy.model_of_flags import Subject
            from rapidformer_templates.switches.auto_strategy.search import Search
        finally:
            gc.enable()

        subjects = {} if subjects is None else subjects
        subject = subjects.get(plan.switches) or Subject(config, plan, gpu=environment.device != "cpu", source=source)
        subjects[plan.switches] = subject
        result = Search(config, environment, subject, hardware, registry, by_memory=by_memory).run()
        if file:
            results.write_result(file, result)
    return result, hardware


def best_layout(config: RunConfig, environment: Environment) -> dict[str, FlagValue]:
    """Return the best layout's fields that the user has left open. They are shown first.

    Raises:
        NothingFits: no layout fits.
        Refused, ModelError, ConfigError: see :func:`search`.
    """
    result, hardware = search(config, environment)
    if not result.layouts:
        constraints = [rejected.constraint for rejected in result.rejected]
        closest = next((each for each in reversed(constraints) if "memory" in each), "".join(constraints[-1:]))
        raise NothingFits(
            f"no layout of {environment.world_size} workers with {hardware.memory_gb:g} GB each fits this model",
            where=f"--auto-strategy: {closest}" if closest else "--auto-strategy",
            hint="rapidformer plan --auto-strategy … lists every layout with what it lacks",
        )
    if is_first_worker():
        lines = [*reasons(result, hardware), *not_predicted(result.not_predicted)]
        print("\n".join(lines), file=sys.stderr, flush=True)
    by_memory = config.get("pipeline_stages") == AUTO_MEMORY
    user_fields = config.origins.keys() - ({"pipeline_stages"} if by_memory else set())
    values = result.layouts[0].layout.values_that_act(user_fields)
    return values if "pipeline_stages" in user_fields else {"pipeline_stages": None, **values}


def plan_command(
    config: RunConfig,
    environment: Environment,
    terms: results.TrainingTerms,
    source: ModelSource | None = None,
    *,
    as_json: bool,
    cached: bool = True,
    compared: str | None = None,
) -> int:
    """Search and print. Return the exit status, which is 1 if nothing fits.

    Args:
        source, cached: see :func:`search`.
        compared: flags of a layout to compare with the best one.
    """
    narrower = with_layout_flags(config, compared) if compared else None
    subjects: Subjects = {}
    result, hardware = search(config, environment, source=source, cached=cached, subjects=subjects)
    named = None
    if narrower:
        named, _ = search(narrower, environment, source=source, cached=cached, subjects=subjects)
    trainings = [results.estimate_training(each, config, environment, terms, result.totals) for each in result.layouts]
    if as_json:
        more = {"compared": compared_to_json(result, named)} if named else {}
        print(json.dumps(to_json(result, hardware, trainings) | more, indent=2))
    else:
        show(result, hardware, trainings[0].lines(environment, terms) if trainings else ())
        if named:
            show_comparison(result, named)
        if result.file:
            print(f"note: read from {result.file}; --no-search-cache searches again")
    return 0 if result.layouts else 1


def predict_run(
    plan: Plan,
    config: RunConfig,
    environment: Environment,
    terms: results.TrainingTerms,
    source: ModelSource | None = None,
    measure: MeasurePlan | None = None,
    *,
    own_optimizer: bool = False,
) -> tuple[dict[str, object], list[str]]:
    """Return the prediction for a plan's own layout, as JSON and as lines for people.

    Args:
        source: builds the model. The default is the model of the flags.
        measure: returns the memory of the plan's own engine. The default predicts it by rules.
        own_optimizer: whether a script builds an optimizer that the flags do not describe.

    Raises:
        ModelError: the model cannot be built.
        ConfigError: the memory of the devices is unknown.
    """
    from rapidformer_templates.switches.auto_strategy.model_of_flags import Subject, fp8_layers
    from rapidformer_templates.switches.auto_strategy.search import Search

    hardware = find_hardware(environment, plan.precision, config.get("host_memory_gb"))
    subject = Subject(config, plan, gpu=environment.device != "cpu", source=source)
    one = Search(config, environment, subject, hardware)
    setting = memory_options_of(plan, one.subject.shapes.width)
    unknown = one.unknown()
    if own_optimizer:
        as_if = f"the update takes the seconds, and a checkpoint the space, that {plan.optimizer} needs"
        unknown = (*unknown, results.Unknown("build_optimizer()", ("time",), as_if))
    memory = measure(plan) if measure else None
    candidate = one.predict(layout_of(plan), setting, memory)
    constraint = one.constraint(candidate.memory, candidate.setup, setting)
    training = results.estimate_training(candidate, config, environment, terms, one.totals())
    layers = fp8_layers(subject, config, plan) if setting.fp8 else {}
    counted = f"{layers.get('fp8')} of {sum(layers.values())} linear layers of the blocks"
    in_fp8 = [f"  fp8: {counted} multiply in it, forward and backward"] if layers else []
    as_json = {
        **layout_to_json(candidate, training),
        **({"fp8_layers": layers} if layers else {}),
        "memory_from": "engine" if measure else "rules",
        "constraint": constraint,
        "assumed": hardware.lines(offloads=candidate.layout.offload),
        "not_predicted": [vars(kinds) for kinds in unknown],
    }
    how = ", from a run of its engine on tensors without data" if measure else ""
    lines = [
        f"predicted: {candidate.timing.total:.3g} s per step, {candidate.needed_gb:.1f} of {hardware.memory_gb:g} GB "
        f"per worker, including the allowance{how}",
        *([f"  does not fit: {constraint}"] if constraint else []),
        where_the_step_goes(candidate.timing),
        *in_fp8,
        *training.lines(environment, terms),
        *(f"assumed: {line}" for line in hardware.lines(offloads=candidate.layout.offload)),
        *not_predicted(unknown),
    ]
    return as_json, lines


def layout_to_json(candidate: results.Candidate, training: results.TrainingEstimate) -> dict[str, object]:
    """Return the public JSON form of a layout. See docs/planner.md."""
    timing, memory, setup = candidate.timing, candidate.memory, candidate.setup
    sizes = {**vars(memory), "total": memory.total, "setup": setup.device, "setup_host": setup.host}
    gigabytes = {name: round(size / GB, 6) for name, size in sizes.items()}
    return {
        **_sizes(candidate.layout),
        "memory_gb": {**gigabytes, "needed": round(candidate.needed_gb, 3), "node_host": round(candidate.host_gb, 3)},
        "bubble": round(candidate.layout.bubble, 6),
        "communication": round(timing.communication / timing.total, 6),
        "step_seconds": timing.total,
        "seconds": {name: round(value, 6) for name, value in vars(timing).items()},
        "samples_per_second": candidate.samples_per_second,
        "flags": " ".join(candidate.layout.flags()),
        "training": vars(training),
    }


def to_json(
    result: results.SearchResult, hardware: Hardware, trainings: Sequence[results.TrainingEstimate]
) -> dict[str, object]:
    """Return the public JSON form of a search. See docs/planner.md."""
    return {
        "ok": bool(result.layouts),
        "layouts": [layout_to_json(*each) for each in zip(result.layouts, trainings, strict=True)],
        "slower": result.slower,
        "rejected": [{**_sizes(rejected.layout), "constraint": rejected.constraint} for rejected in result.rejected],
        "assumed": hardware.lines(offloads=_offloads(result)),
        "not_predicted": [vars(unknown) for unknown in result.not_predicted],
    }


def _sizes(layout: Layout) -> dict[str, object]:
    sizes = ("tensor", "pipeline", "virtual", "experts", "data", "context", "accumulation")
    return {
        **{name: getattr(layout, name) for name in (*sizes, "partitioning", "shard_size", "recompute")},
        "micro_batch_size": layout.micro_batch,
        "global_batch_size": layout.global_batch,
        "checkpoint_activations": layout.recompute != "none",
        "offload_activations": layout.offload,
    }


def show(result: results.SearchResult, hardware: Hardware, training: Sequence[str] = ()) -> None:
    """Print the best layouts, their assumptions, and why the others were rejected.

    Args:
        training: lines about a whole training with the best layout.
    """
    terminal = console(piped_width=160)
    if result.layouts:
        terminal.print(_table(result))
        for line in (*reasons(result, hardware), *training):
            print(line)
    for line in hardware.lines(offloads=_offloads(result)):
        print(f"assumed: {line}")
    for line in not_predicted(result.not_predicted):
        print(line)
    allowance = f"{results.ALLOWANCE:.0%} and the contexts must be free in addition"
    print(f"memory is predicted from the model's own graph; {allowance}")
    print("setup is the peak of a device while the model is built and loaded, host that of all workers of a node")
    if result.slower:
        print(f"slower: {result.slower:,} other layouts. Whether they fit was not tried")
    show_rejected(result, terminal)


def _offloads(result: results.SearchResult) -> bool:
    return any(candidate.layout.offload for candidate in result.layouts)


COLUMNS = ("tensor", "pipe", "data", "micro", "accum.", "global", "partitioning", "recompute")
"""Columns of sizes. If any layout uses context or experts, these columns follow ``pipe``."""


def _table(result: results.SearchResult) -> Table:
    table = Table(title="The fastest layouts that fit, best first", title_justify="left")
    more = [name for name in ("context", "experts") if any(getattr(each.layout, name) > 1 for each in result.layouts)]
    for name in (*COLUMNS[:2], *more, *COLUMNS[2:]):
        table.add_column(name, justify="right", min_width=WIDTHS.get(name))
    for name in ("state GB", "activ. GB", "setup GB", "needed GB", "host GB", "bubble", "comm.", "s/step", "samples/s"):
        table.add_column(name, justify="right")
    for candidate in result.layouts[: results.SHOWN]:
        layout, memory, timing = candidate.layout, candidate.memory, candidate.timing
        table.add_row(
            *map(str, (layout.tensor, layout.pipelined, *(getattr(layout, name) for name in more))),
            *map(str, (layout.data, layout.micro_batch, layout.accumulation, layout.global_batch)),
            layout.partitioned,
            "" if layout.recompute == "none" else layout.recompute,
            f"{(memory.parameters + memory.gradients + memory.optimizer) / GB:.2f}",
            f"{(memory.activations + memory.buffers) / GB:.2f}",
            f"{candidate.setup.device / GB:.2f}",
            f"{candidate.needed_gb:.2f}",
            f"{candidate.host_gb:,.1f}",
            f"{layout.bubble:.0%}",
            f"{timing.communication / timing.total:.0%}",
            f"{timing.total:.3g}",
            f"{candidate.samples_per_second:.3g}",
        )
    return table


def where_the_step_goes(timing: Timing) -> str:
    """Return a line with the share of each component in the step."""
    spent = ", ".join(f"{name} {share / timing.total:.0%}" for name, share in components(timing).items() if share > 0)
    hidden = f" ({timing.hidden:.3g} s of replica exchanges run during the computation)" if timing.hidden else ""
    return f"  where the step goes: {spent}{hidden}"


def reasons(result: results.SearchResult, hardware: Hardware) -> list[str]:
    """Explain why the best layout is the best, and how to request it."""
    best = result.layouts[0]
    layout, timing = best.layout, best.timing
    lines = [
        f"best: {' '.join(layout.flags())}",
        f"  fits: {best.needed_gb:.1f} of {hardware.memory_gb:g} GB per worker, including the allowance",
    ]
    lines.append(where_the_step_goes(timing))
    for name, words in (
        ("tensor", "tensor size"),
        ("pipeline", "pipeline size"),
        ("virtual", "number of stages per worker"),
        ("experts", "number of workers to a copy of the experts"),
        ("micro_batch", "micro batch"),
        ("recompute", "recomputation"),
        ("partitioned", "partitioning"),
    ):
        chosen = getattr(layout, name)
        if other := next((c for c in result.layouts if getattr(c.layout, name) != chosen), None):
            faster = other.samples_per_second / best.samples_per_second - 1
            value = getattr(other.layout, name)
            lines.append(f"  best with another {words} ({value}): {faster:+.0%} samples/s, {other.needed_gb:.1f} GB")
    if layout.offload and any(not rejected.layout.offload for rejected in result.rejected):
        lines.append("  what blocks keep goes to host memory: no layout fits without that")
    limit = "" if hardware.host_gb is None else f" of {hardware.host_gb:,g} GB"
    return [*lines, f"  host memory: {best.host_gb:,.1f}{limit} per node, including the allowance"]


def not_predicted(unknown: Sequence[results.Unknown]) -> list[str]:
    """List what the numbers leave out, one line per reason."""
    return [f"not predicted: {each.switch}: {', '.join(each.kinds)}: {each.why}" for each in unknown]


def show_rejected(result: results.SearchResult, terminal: Console) -> None:
    """Print a table of the rejected layouts, one line per constraint."""
    if not result.rejected:
        return
    table = Table("layouts", "constraint", "such as", title=f"Rejected: {len(result.rejected)}", title_justify="left")
    kinds = Counter(rejected.constraint.partition(":")[0] for rejected in result.rejected)
    for kind, count in kinds.most_common():
        example = next(r for r in result.rejected if r.constraint.partition(":")[0] == kind)
        sizes = example.layout
        context = f"context {sizes.context} × " if sizes.context > 1 else ""
        where = f"tensor {sizes.tensor} × {context}pipeline {sizes.pipelined} × data {sizes.data}, {sizes.partitioned}"
        table.add_row(str(count), example.constraint, where)
    terminal.print(table)


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


def differences(best: results.Candidate, named: results.Candidate) -> list[tuple[str, str, float, float]]:
    """Return (name, unit, of the best, of the named layout) for each time per sample and each size of memory."""
    times = [components(each.timing) | {"step": each.timing.total} for each in (best, named)]
    scales = [1000 / each.layout.global_batch for each in (best, named)]
    sizes = [{**vars(each.memory), "total": each.memory.total, "setup": each.setup.device} for each in (best, named)]
    rows = [(name, "ms", time * scales[0], times[1][name] * scales[1]) for name, time in times[0].items()]
    rows += [(name, "GB", size / GB, sizes[1][name] / GB) for name, size in sizes[0].items()]
    return [*(row for row in rows if row[2] or row[3]), ("needed", "GB", best.needed_gb, named.needed_gb)]


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


def compared_to_json(result: results.SearchResult, named: results.SearchResult) -> dict[str, object]:
    """Return the public JSON form. See docs/planner.md."""
    if not result.layouts or not named.layouts:
        return {"flags": None, "constraint": closest_constraint(named), "differences": []}
    chosen = named.layouts[0]
    names = ("name", "unit", "best", "named")
    compared = [dict(zip(names, each, strict=True)) for each in differences(result.layouts[0], chosen)]
    return {"flags": " ".join(chosen.layout.flags()), "constraint": None, "differences": compared}


def closest_constraint(result: results.SearchResult) -> str:
    """Return the constraint that most layouts fail: the last one of that kind, which divides the model most."""
    kinds = Counter(rejected.constraint.partition(":")[0] for rejected in result.rejected)
    if not kinds:
        return "these flags allow no layout"
    ((usual, _),) = kinds.most_common(1)
    return [each.constraint for each in result.rejected if each.constraint.partition(":")[0] == usual][-1]


def show_comparison(result: results.SearchResult, named: results.SearchResult) -> None:
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
    for name, unit, of_best, of_named in compared:
        table.add_row(name, unit, f"{of_best:,.3f}", f"{of_named:,.3f}", f"{of_named - of_best:+,.3f}")
    console(piped_width=160).print(table)
    more, most = max((named - best, name) for name, unit, best, named in compared if unit == "ms" and name != "step")
    cause = f", most of it: {most}" if slower > 0 and more > 0 else ""
    print(f"--compare: {slower:+.1%} time per sample{cause}. The table has ms per sample, and GB per worker")
