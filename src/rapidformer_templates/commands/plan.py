"""``rapidformer plan``: resolves the flags of a training command or of a script, and prints the plan."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rapidformer_templates.data.finetuning.locating import steps_of
from rapidformer_templates.errors import ConfigError, HubUnreachable, Refused, counted
from rapidformer_templates.models.model_files import check_not_quantized
from rapidformer_templates.planning import environment
from rapidformer_templates.planning.config import RunConfig, spelling, to_yaml
from rapidformer_templates.planning.data_rules import check_data_flags, check_task_flags
from rapidformer_templates.planning.environment import DEVICE_KINDS, DEVICE_MEMORY, Environment
from rapidformer_templates.planning.flag_parser import CommandParser, add_flags, parse, split
from rapidformer_templates.planning.flag_values import Epochs, TokenCount, WorkerCounts
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.hub import config_is_unknown, prepare_config
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.registry import REGISTRY, switch_options
from rapidformer_templates.planning.resolve import choose_template, resolve, with_template_defaults
from rapidformer_templates.run import scripts
from rapidformer_templates.run.early_checks import check_metric
from rapidformer_templates.switches.auto_strategy.device_file import read_device_file
from rapidformer_templates.switches.auto_strategy.results import TrainingTerms
from rapidformer_templates.system.terminal import console

if TYPE_CHECKING:
    from rapidformer_templates.run.run import Template
    from rapidformer_templates.switches.auto_strategy.command import MeasurePlan
    from rapidformer_templates.switches.auto_strategy.model_of_flags import ModelSource

DESCRIPTION = """Resolve the flags of a training command, print the plan, and start nothing.

The plan has the template, the switches in their order, the batch sizes, the groups of workers, and the origin of each
value. It needs neither data nor a GPU. If a rule refuses the flags, the status is 2, and the message names flags that
work. With --auto-strategy it lists the layouts that fit, best first. With --user-script it plans what the script
would run. With --tokens, --price-per-hour or --disk-gb-per-second it also predicts the time, the cost and the
checkpoints of the whole training."""

EXAMPLE = """example: rapidformer plan --task causal_lm --fsdp-memory-optimization --world-size 8 --device cpu

rapidformer --help-all lists the flags of a training command."""


@dataclass(frozen=True)
class PlanFlags:
    """Plan"""

    json: bool = flag(False, "print the plan as JSON")
    yaml: bool = flag(False, "print the flags that were given as a file for --config, if the plan is accepted")
    world_size: WorkerCounts | None = flag(
        None,
        "workers to plan for (default: --nproc-per-node, else 1); 8,16,32 compares sizes, with --auto-strategy",
        metavar="N",
    )
    local_world_size: int | None = flag(None, "workers on one node (default: all)", metavar="N", minimum=1)
    device_kind: str | None = flag(
        None, "plan for GPUs of this kind, which need not be here", choices=tuple(DEVICE_KINDS)
    )
    device_file: str | None = flag(
        None, "plan for devices that `rapidformer bench calibrate --output FILE` has measured", metavar="FILE"
    )
    tokens: TokenCount | None = flag(
        None,
        "length of the training, such as 300B or 1.5T: predicts its hours, GPU-hours and checkpoints",
        metavar="N",
    )
    price_per_hour: float | None = flag(
        None, "price of one GPU for an hour (of one worker on CPUs): predicts the cost", metavar="PRICE", minimum=0
    )
    disk_gb_per_second: float | None = flag(
        None,
        "10^9 bytes per second at which all workers together write a checkpoint (default: 1)",
        metavar="GB",
        minimum=0.001,
    )

    compare: str | None = flag(
        None,
        "with --auto-strategy: flags of a layout, in quotes, to compare with the best one by component",
        metavar="FLAGS",
    )
    engine_memory: bool = flag(
        False, "predict the memory with the engine itself, which trains two steps on tensors without data"
    )

    @property
    def workers(self) -> int | None:
        """The first number of workers. None if it is not given."""
        return self.world_size.counts[0] if self.world_size else None

    @property
    def terms(self) -> TrainingTerms | None:
        """The terms of the whole training. None if the flags ask for no prediction."""
        terms = (self.tokens, self.price_per_hour, self.disk_gb_per_second)
        is_asked = self.engine_memory or any(value is not None for value in terms)
        return TrainingTerms(*terms) if is_asked else None

    def check(self, config: RunConfig) -> None:
        """Check that these flags agree with one another and with the training command.

        Raises:
            ConfigError: two flags say the same.
        """
        if self.json and self.yaml:
            message = "--json and --yaml both say what to print"
            raise ConfigError(message, where="command line", hint="leave one of them out")
        lengths = [name for name in ("train_iters", "epochs") if getattr(config.training, name) is not None]
        if self.tokens is not None and lengths:
            message = f"--tokens and {spelling(lengths[0])} both set the length of the training"
            raise ConfigError(message, where=config.origin(lengths[0]), hint="leave one of them out")
        counts = self.world_size.counts if self.world_size else ()
        if len(counts) > 1 and (not config.get("auto_strategy") or self.compare):
            other = "--auto-strategy and without --compare"
            raise ConfigError(f"--world-size with {len(counts)} numbers works with {other}", where="command line")
        if self.compare and not config.get("auto_strategy"):
            raise ConfigError("--compare has no effect without --auto-strategy", where="command line")
        if self.engine_memory and config.get("auto_strategy"):
            hint = "leave --auto-strategy out, and give the flags of a layout"
            raise ConfigError("--engine-memory predicts one layout", where="command line", hint=hint)


@dataclass(frozen=True)
class _Script:
    """The file of a script, the class of its template, and the hooks that this class overrides."""

    file: str
    template: str
    hooks: list[str]


@dataclass(frozen=True)
class _PlanRequest:
    """The flags of a plan, and how they are checked.

    Attributes:
        place: the workers and their devices.
        checks: checks of the flags that need no data.
        source: builds the model of a script whose hooks do that.
        measure: returns the memory of a plan's own engine.
    """

    config: RunConfig
    place: Environment
    options: PlanFlags
    checks: Sequence[Callable[[RunConfig], object]]
    script: _Script | None = None
    source: ModelSource | None = None
    measure: MeasurePlan | None = None


def main(words: Sequence[str]) -> int:
    """Resolve and print the plan of a training command or of a script.

    Args:
        words: words after ``rapidformer plan``.

    Raises:
        RapidformerError: a flag or a value cannot be used, or the plan is refused.
    """
    script, rest = scripts.split_script(words)
    if script is not None:
        return _plan_script(script, rest)
    config, detected, options = plan_request(words)
    if config.launch.user_script:
        raise ConfigError("--user-script is set on the command line", where=config.origin("user_script"))
    checks = [check_task_flags, check_data_flags, check_metric, check_not_quantized] if config.training.task else []
    measure = None
    if options.engine_memory:
        from rapidformer_templates.trainer import Trainer

        template = Trainer([])
        template.config = config
        measure = _engine_measure(template, None, "--engine-memory")
    return _show(_PlanRequest(config, detected, options, checks, measure=measure))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own flags, for its help. It also takes the flags of training."""
    parser = CommandParser(
        prog="rapidformer plan",
        usage="rapidformer plan [--json | --yaml] [--world-size N] [flags of a training command]",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser, PlanFlags)
    return parser


def plan_request(words: Sequence[str]) -> tuple[RunConfig, Environment, PlanFlags]:
    """Return the configuration and the environment that ``rapidformer plan`` resolves, and its own flags.

    Raises:
        ConfigError: a flag or a value cannot be used.
    """
    config = parse(words, switch_options(), user=PlanFlags)
    options: PlanFlags = config.user
    own_flags = {field.name for field in dataclasses.fields(PlanFlags)}
    origins = {name: origin for name, origin in config.origins.items() if name not in own_flags}
    config = REGISTRY.merge_files(dataclasses.replace(config, user=None, origins=origins))
    with suppress(HubUnreachable):  # a note says so
        prepare_config(config.model)
    template, origin = choose_template(config)
    detected = environment.detect(
        template,
        origin,
        device=config.launch.device,
        world_size=options.workers or config.launch.nproc_per_node,
        local_world_size=options.local_world_size,
    )
    return with_template_defaults(config, template), _planned_environment(detected, config, options), options


def _planned_environment(environment: Environment, config: RunConfig, options: PlanFlags) -> Environment:
    """Return the environment of the plan. Devices that the user names or describes replace those of this machine.

    Raises:
        ConfigError: ``--device-kind`` names a GPU, but ``--device`` is cpu. Or ``--device-file`` cannot be used.
    """
    kind, device = options.device_kind, config.launch.device
    if options.device_file:
        file = read_device_file(options.device_file)
        if kind is not None:
            raise ConfigError("--device-kind and --device-file both describe the devices", hint="leave one of them out")
        if device not in ("auto", file.device):
            message = f"{options.device_file} describes {file.device}, not --device {device}"
            raise ConfigError(message, hint="leave --device out")
        return dataclasses.replace(
            environment,
            device=file.device,
            compute_capability=file.compute_capability,
            device_origin=f"--device-file {options.device_file}: {file.name}",
            device_file=options.device_file,
        )
    if kind is not None:
        if device == "cpu":
            raise ConfigError(f"--device-kind {kind} is a GPU, and --device cpu none", hint="leave one of them out")
        origin, capability = f"--device-kind {kind}", DEVICE_KINDS[kind].capability
        return dataclasses.replace(
            environment, device="cuda", compute_capability=capability, device_origin=origin, device_kind=kind
        )
    described = config.get("auto_strategy") and DEVICE_MEMORY in os.environ
    if described and device == "auto" and environment.device == "cpu":
        origin = f"{DEVICE_MEMORY} without --device; --device cpu plans for CPUs"
        return dataclasses.replace(environment, device="cuda", device_origin=origin)
    return environment


def _plan_script(script: str, words: list[str]) -> int:
    """Show what a script would run with these words: its class, its values, its flags and its hooks."""
    from rapidformer_templates.run import configure
    from rapidformer_templates.run.planned_model import HookModel, hook_model
    from rapidformer_templates.run.scripts import overridden_hooks

    options, rest = split(words, PlanFlags)

    def inspect(template: Template) -> tuple[Template, Environment, HookModel | None]:
        kind, config = type(template), template.config
        world, local = options.workers or config.launch.nproc_per_node, options.local_world_size
        source = None
        if not options.yaml and (configure.is_searched(config) or options.terms):
            from rapidformer_templates.switches.auto_strategy.model_of_flags import FlagModel

            source = hook_model(template, FlagModel, searching=configure.is_searched(config))
        return template, configure.environment_of(kind, config, world, local), source

    template, environment, source = scripts.capture_template(script, rest, inspect)
    kind, config = type(template), template.config
    detected = _planned_environment(environment, config, options)
    checks: list[Callable[[RunConfig], object]] = []
    if config.training.task and template.reads_task_data:
        checks = [check_task_flags, check_data_flags]
        if not template.computes_own_metrics:
            checks.append(partial(check_metric, own_loss="compute_loss" in overridden_hooks(kind)))
    if "build_model" not in overridden_hooks(kind):
        checks.append(check_not_quantized)
    about_script = _Script(script, kind.__name__, overridden_hooks(kind))
    has_own_optimizer = source is not None and "build_optimizer" in about_script.hooks
    measure = None
    if has_own_optimizer or options.engine_memory:
        measure = _engine_measure(template, source, "build_optimizer()" if has_own_optimizer else "--engine-memory")
    return _show(_PlanRequest(config, detected, options, checks, about_script, source, measure))


def _engine_measure(template: Template, source: ModelSource | None, where: str) -> MeasurePlan:
    """Return a function that runs the engine of a plan on tensors without data.

    Args:
        source: builds the model. None is the model of the flags.
        where: the flag or the hook that asks for it, for messages.
    """
    from rapidformer_templates.run.planned_model import planned_memory
    from rapidformer_templates.switches.auto_strategy.model_of_flags import FlagModel

    if template.config.training.lr is None:
        template.config = template.config.replace("plan", lr=1.0)  # the memory does not depend on it
    return partial(planned_memory, template, source or FlagModel(template.config), where)


def _show(request: _PlanRequest) -> int:
    """Resolve, check and print the plan. Return the exit status."""
    config, options = request.config, request.options
    options.check(config)
    try:
        if config.get("auto_strategy") and not options.yaml:
            return _search(request)
        if config.get("pipeline_stages") == "auto-memory" and not options.yaml:
            from rapidformer_templates.switches.auto_strategy.stage_balance import with_stages_by_memory

            config = with_stages_by_memory(config, request.place, request.source)
            request = dataclasses.replace(request, config=config)
        plan = _with_notes(resolve(config, request.place), config)
    except Refused as refused:
        if not options.json:
            raise
        errors = [diagnostic.to_json() for diagnostic in refused.diagnostics]
        print(json.dumps({"ok": False, "errors": errors}, indent=2))
        return refused.exit_status
    for check in request.checks:
        check(config)
    if options.yaml:
        program = f"python {request.script.file}" if request.script else "rapidformer"
        print(f"# {program} --config FILE\n{to_yaml(config)}", end="")
    else:
        _print_plan(request, plan)
    return 0


def _search(request: _PlanRequest) -> int:
    """Search for layouts and print them. Return the exit status."""
    from rapidformer_templates.switches.auto_strategy.cluster_sizes import plan_clusters
    from rapidformer_templates.switches.auto_strategy.command import plan_command

    config, place, options, source = request.config, request.place, request.options, request.source
    terms, as_json = options.terms or TrainingTerms(), options.json
    if options.world_size and len(options.world_size.counts) > 1:
        counts = options.world_size.counts
        place = dataclasses.replace(place, local_world_size=options.local_world_size or max(counts))
        return plan_clusters(config, place, counts, terms, source, as_json=as_json)
    return plan_command(config, place, terms, source, as_json=as_json, compared=options.compare)


def _print_plan(request: _PlanRequest, plan: Plan) -> None:
    more: dict[str, object] = {}
    lines = []
    if request.script:
        more["script"] = dataclasses.asdict(request.script)
        hooks = ", ".join(request.script.hooks) or "none"
        lines.append(f"script: {request.script.file}: {request.script.template}, own hooks: {hooks}")
    if request.options.terms:
        from rapidformer_templates.switches.auto_strategy.command import predict_run

        own = request.script is not None and "build_optimizer" in request.script.hooks
        arguments = (plan, request.config, request.place, request.options.terms, request.source, request.measure)
        more["prediction"], predicted = predict_run(*arguments, own_optimizer=own)
        lines += predicted
    if request.options.json:
        print(json.dumps({"ok": True, "plan": plan.to_json(), **more}, indent=2))
    else:
        show_plan(plan)
        print("".join(f"{line}\n" for line in lines), end="")


def _with_notes(plan: Plan, config: RunConfig) -> Plan:
    """Return the plan with more notes: unknown sizes of the model, the length of a run in epochs."""
    added = []
    if config_is_unknown(config.model):
        model = config.model.pretrained_model_name_or_path
        what = f"the sizes of {model} are not known here"
        added.append(f"{what}: it is not in the cache, and the hub cannot be reached")
    epochs = config.training.train_iters
    if isinstance(epochs, Epochs):
        is_counted = not any(REGISTRY[name].order for name in plan.switches)
        steps = steps_of(config, epochs, plan.sizes.global_batch) if is_counted else None
        count = f" = {counted(steps, 'step')}" if steps else ", counted in steps when the data is loaded"
        added.append(f"length: {counted(float(epochs.size), 'epoch')}{count}")
    return dataclasses.replace(plan, notes=(*plan.notes, *added))


def show_plan(plan: Plan) -> None:
    """Print a plan as tables."""
    from rich.table import Table

    sizes = plan.sizes
    context = f"context {sizes.context} × " if sizes.context > 1 else ""
    layout = f"{sizes.world} = tensor {sizes.tensor} × {context}pipeline {sizes.pipeline} × data {sizes.data}"
    batch = f"{sizes.global_batch} = micro {sizes.micro_batch} × data {sizes.data} × accumulation {sizes.accumulation}"
    facts = {
        "template": f"{plan.template}  ({plan.values['template']['origin']})",
        "switches": " → ".join(plan.switches),
        "workers": layout,
        "global batch": f"{batch}  (samples)",
        "engine": plan.engine.partition(":")[2],
        "device": plan.device,
        "precision": plan.precision,
        "optimizer": f"{plan.optimizer}: {plan.optimizer_implementation}",
        "rules": f"{len(plan.rules)} consulted, none broken",
    }
    table = Table(title="Plan", title_justify="left", show_header=False)
    for name, fact in facts.items():
        table.add_row(name, fact)
    values = Table("flag", "value", "from", title="Values that are not defaults", title_justify="left")
    for name, value in plan.values.items():
        if name != "template":
            values.add_row(name, str(value["value"]), value["origin"])
    # Rank 0's groups: their ranks, their exchanges, and whether these cross nodes.
    headings = ("group", "workers", "ranks", "reaches over", "exchanges")
    groups = Table(*headings, title="Groups of rank 0", title_justify="left")
    for group in plan.groups:
        ranks = list(map(str, range(0, group.size * group.stride, group.stride)))
        shown = ", ".join(ranks if group.size < 5 else [*ranks[:2], "…", ranks[-1]])
        reach = "one node" if group.nodes == 1 else f"{group.nodes} nodes"
        groups.add_row(group.name, str(group.size), shown, reach, group.exchanges)
    terminal = console()
    for shown_table in (table, groups, values):
        if shown_table.row_count:
            terminal.print(shown_table)
    for note in plan.notes:
        print(f"note: {note}")
