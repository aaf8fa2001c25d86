"""The ``rapidformer`` command. It does not import torch, so planning and help answer at once."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from rapidformer_templates.data.finetuning.locating import steps_of
from rapidformer_templates.errors import (
    ConfigError,
    HubUnreachable,
    Interrupted,
    RapidformerError,
    Refused,
    did_you_mean,
)
from rapidformer_templates.planning import environment
from rapidformer_templates.planning.config import RunConfig, to_yaml
from rapidformer_templates.planning.data_rules import check_data_flags, check_task_flags
from rapidformer_templates.planning.environment import DEVICE_KINDS, DEVICE_MEMORY, DeviceKindName, Environment
from rapidformer_templates.planning.flag_parser import CommandParser, FlagParser, add_flags, build_parser, parse, split
from rapidformer_templates.planning.flag_values import Epochs
from rapidformer_templates.planning.flags import flag
from rapidformer_templates.planning.hub import config_is_unknown, prepare_config
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.planning.registry import REGISTRY, load_object, switch_options
from rapidformer_templates.planning.resolve import choose_template, resolve, with_template_defaults
from rapidformer_templates.run import scripts
from rapidformer_templates.run.best import check_metric
from rapidformer_templates.system import launch
from rapidformer_templates.system.terminal import console

if TYPE_CHECKING:
    from rich.table import Table

    from rapidformer_templates.run.run import Template
    from rapidformer_templates.trainer import Trainer

HELP = """Train transformers. Each acceleration is one switch.

commands:
  rapidformer --task TASK …     train
  rapidformer plan …            resolve the flags of a training command and start nothing;
                                with --auto-strategy: list the layouts that fit, best first;
                                with --user-script: plan what the script would run
  rapidformer switches          catalogue of the switches and their compatibility
  rapidformer explain RF002     a rule, its reason, an example that breaks it, and what to do instead
  rapidformer doctor            what this machine has, what does not work, and what to do about it
  rapidformer data …            make, join and check data sets for pretraining
  rapidformer export RUN        the model of a run that was interrupted, or of any of its checkpoints;
                                with --merge: adapters added to their base
  rapidformer evaluate RUN …    the metrics of a run's model, on its own or on other data
  rapidformer predict RUN …     predictions of a run's model for the rows of a file
  rapidformer chat RUN          talk to a language model
  rapidformer bench …           measure
  rapidformer demo              fine-tune a pretrained model on labelled tweets with 2 workers
  rapidformer new KIND FILE     write a script to start from: finetuner, pretrainer, trainer; or the examples
  rapidformer convert FILE      our YAML for a configuration of axolotl, LLaMA-Factory, transformers or Megatron-LM
  rapidformer schema            print the JSON schema of the YAML files of --config, for editors
  rapidformer completion SHELL  print a script for bash, zsh, fish …: eval "$(rapidformer completion bash)"

Each command has --help. Every flag is accepted with dashes or underscores, and as a key of the YAML file of
--config."""


@dataclass(frozen=True)
class CommandHome:
    """Where a command is.

    Attributes:
        module: its module in this folder.
        main: its function, which takes the words after the command.
        parser: the function that returns its parser.
    """

    module: str
    main: str = "main"
    parser: str = "build_parser"

    def run(self, words: Sequence[str]) -> int:
        """Run the command and return its exit status."""
        main: Callable[[Sequence[str]], int] = load_object(f"rapidformer_templates.commands.{self.module}:{self.main}")
        return main(words)

    def build_parser(self) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = load_object(f"rapidformer_templates.commands.{self.module}:{self.parser}")()
        return parser


OTHERS = {
    "data": CommandHome("data"),
    "export": CommandHome("export"),
    "evaluate": CommandHome("evaluate"),
    "predict": CommandHome("predict"),
    "chat": CommandHome("chat"),
    "bench": CommandHome("bench.cli"),
    "demo": CommandHome("demo"),
    "new": CommandHome("demo", "new_main", "new_parser"),
    "convert": CommandHome("convert.cli"),
    "schema": CommandHome("completion", "schema_main", "schema_parser"),
    "completion": CommandHome("completion"),
}
"""The commands that have their own parser."""

REFERENCE = {"switches": CommandHome("catalogue"), "explain": CommandHome("explain"), "doctor": CommandHome("doctor")}
"""The commands about the library and the machine. ``rapidformer`` itself shows their help."""

COMMANDS = ("plan", *REFERENCE, *OTHERS)


@dataclass(frozen=True)
class PlanFlags:
    """Plan"""

    json: bool = flag(False, "print the plan as JSON")
    yaml: bool = flag(False, "print the flags that were given as a file for --config, if the plan is accepted")
    world_size: int | None = flag(
        None, "workers to plan for (default: --nproc-per-node, else 1)", metavar="N", minimum=1
    )
    local_world_size: int | None = flag(None, "workers on one node (default: all)", metavar="N", minimum=1)
    device_kind: DeviceKindName | None = flag(None, "plan for GPUs of this kind, which need not be here")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. A user's mistake is reported as one message on standard error, without a stack trace.

    Args:
        argv: words after ``rapidformer``. The default is the command line of this process.

    Returns:
        The exit status: 0, or that of the error. It is 2 for a mistake in the command, and ``errors.py`` has others.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with _read_no_further():
            return _dispatch(words)
    except RapidformerError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:  # during imports only, because a run treats it as a request to save and stop
        print("interrupted", file=sys.stderr)
        return Interrupted.LOST


@contextmanager
def _read_no_further() -> Iterator[None]:
    """Exit without an error message if the reader of the output stops early, as ``head`` does."""
    try:
        yield
        sys.stdout.flush()  # here rather than at Python's exit
    except BrokenPipeError as error:
        watch = select.poll()
        watch.register(sys.stdout.fileno(), 0)
        if not any(event & select.POLLERR for _, event in watch.poll(0)):
            raise  # the error is about another pipe, used in the body
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for output that is still in the buffer
        raise SystemExit(128 + signal.SIGPIPE) from error  # as a shell reports a program that SIGPIPE has killed


def _dispatch(words: list[str]) -> int:
    command, rest = words[0] if words else "--help", words[1:]
    if command in OTHERS:
        return OTHERS[command].run(rest)
    if command == "--version":
        print(f"rapidformer_templates {importlib.metadata.version('rapidformer_templates')}")
        return 0
    if "--help-all" in words:
        print(all_flags_parser().format_help())
        return 0
    if {"-h", "--help"}.intersection(words or ["--help"]):
        parsers = own_parsers()
        print(parsers[command].format_help() if command in parsers else all_flags_parser().format_usual_help())
        return 0
    if command == "plan":
        return _plan(rest)
    if command in REFERENCE:
        return REFERENCE[command].run(rest)
    if not command.startswith("-"):
        of_files = {".yaml": "--config", ".yml": "--config", ".json": "--config", ".py": "--user-script"}
        flag = of_files.get(Path(command).suffix)
        hint = did_you_mean(command, COMMANDS) or f"commands: {', '.join(COMMANDS)}"
        hint = f"did you mean rapidformer {flag} {command}?" if flag else hint
        raise ConfigError(f"unknown command '{command}'", hint=hint)
    return train(words)


def train(argv: Sequence[str]) -> int:
    """Train with the flags in ``argv``. If ``--user-script`` names a script, run it with the other flags instead.

    Raises:
        RapidformerError: the run is refused or fails.
    """
    from rapidformer_templates.run import configure
    from rapidformer_templates.run.early_checks import refuse_mistakes

    script, rest = scripts.split_script(argv)
    if script is not None:
        scripts.run_script(script, rest)
        return 0
    template = configure.choose(argv)[0] if launch.is_worker() else refuse_mistakes(argv)
    _template(template)(argv).fit()
    return 0


def template_of(argv: Sequence[str]) -> type[Trainer]:
    """Return the template of a black-box run with these flags. It is chosen from the task and the switches."""
    from rapidformer_templates.run import configure

    return _template(configure.choose(argv)[0])


def _template(name: str) -> type[Trainer]:
    from rapidformer_templates.finetuner import Finetuner
    from rapidformer_templates.pretrainer import Pretrainer
    from rapidformer_templates.trainer import Trainer

    kinds: dict[str, type[Trainer]] = {"Trainer": Trainer, "Pretrainer": Pretrainer, "Finetuner": Finetuner}
    return kinds[name]


def all_flags_parser() -> FlagParser:
    """Return the parser of every flag. Its description lists the commands."""
    parser = build_parser("rapidformer", switch_options().values(), PlanFlags, HELP)
    parser.usual -= {field.name for field in dataclasses.fields(PlanFlags)}
    parser.usage = f"rapidformer [{' | '.join(COMMANDS)}] [flags]"
    return parser


def own_parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of ``plan``, which also takes training flags, and of the commands in :data:`REFERENCE`."""
    plan = CommandParser(
        prog="rapidformer plan",
        usage="rapidformer plan [--json | --yaml] [--world-size N] [flags of a training command]",
        description=PLAN_DESCRIPTION,
        epilog=PLAN_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(plan, PlanFlags)
    return {"plan": plan, **{name: home.build_parser() for name, home in REFERENCE.items()}}


PLAN_DESCRIPTION = """Resolve the flags of a training command, print the plan, and start nothing.

The plan has the template, the switches in their order, the batch sizes, the groups of workers, and the origin of each
value. It needs neither data nor a GPU. If a rule refuses the flags, the status is 2, and the message names flags that
work. With --auto-strategy it lists the layouts that fit, best first. With --user-script it plans what the script
would run."""

PLAN_EXAMPLE = """example: rapidformer plan --task causal_lm --fsdp-memory-optimization --world-size 8 --device cpu

rapidformer --help-all lists the flags of a training command."""


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
        world_size=options.world_size or config.launch.nproc_per_node,
        local_world_size=options.local_world_size,
    )
    return with_template_defaults(config, template), _planned_environment(detected, config, options), options


def _planned_environment(environment: Environment, config: RunConfig, options: PlanFlags) -> Environment:
    """Return the environment of the plan. Devices that the user names or describes replace those of this machine.

    Raises:
        ConfigError: ``--device-kind`` names a GPU, but ``--device`` is cpu.
    """
    kind, device = options.device_kind, config.launch.device
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


def _plan(words: list[str]) -> int:
    script, rest = scripts.split_script(words)
    if script is not None:
        return _plan_script(script, rest)
    config, detected, options = plan_request(words)
    if config.launch.user_script:
        raise ConfigError("--user-script is set on the command line", where=config.origin("user_script"))
    checks = [check_task_flags, check_data_flags, check_metric] if config.training.task else []
    return _show_resolved(config, detected, options, checks)


def _plan_script(script: str, words: list[str]) -> int:
    """Show what a script would run with these words: its class, its values, its flags and its hooks."""
    from rapidformer_templates.run import configure
    from rapidformer_templates.run.scripts import overridden_hooks, unused_flags

    options, rest = split(words, PlanFlags)

    def inspect(template: Template) -> tuple[Template, Environment, tuple[str, ...]]:
        kind, config = type(template), template.config
        world, local = options.world_size or config.launch.nproc_per_node, options.local_world_size
        return template, configure.environment_of(kind, config, world, local), unused_flags(kind, config)

    template, environment, notes = scripts.capture_template(script, rest, inspect)
    kind, config = type(template), template.config
    detected = _planned_environment(environment, config, options)
    checks: list[Check] = []
    if config.training.task and template.reads_task_data:
        checks = [check_task_flags, check_data_flags, *([] if template.computes_own_metrics else [check_metric])]
    about_script: AboutScript = {"file": script, "template": kind.__name__, "hooks": overridden_hooks(kind)}
    return _show_resolved(config, detected, options, checks, about_script, notes)


Check = Callable[[RunConfig], object]


class AboutScript(TypedDict):
    """Facts about a script that its plan includes."""

    file: str
    template: str
    hooks: Sequence[str]


def _show_resolved(
    config: RunConfig,
    detected: Environment,
    options: PlanFlags,
    checks: Iterable[Check],
    script: AboutScript | None = None,
    notes: tuple[str, ...] = (),
) -> int:
    """Resolve, check and print the plan, and return the exit status."""
    if options.json and options.yaml:
        raise ConfigError(
            "--json and --yaml both say what to print", where="command line", hint="leave one of them out"
        )
    try:
        if config.get("auto_strategy") and not options.yaml:
            from rapidformer_templates.switches.auto_strategy.command import plan_command

            return plan_command(config, detected, as_json=options.json)
        if config.get("pipeline_stages") == "auto-memory" and not options.yaml:
            from rapidformer_templates.switches.auto_strategy.stage_balance import with_stages_by_memory

            config = with_stages_by_memory(config, detected)
        plan = _with_notes(resolve(config, detected), config, notes)
    except Refused as refused:
        if not options.json:
            raise
        print(
            json.dumps({"ok": False, "errors": [diagnostic.to_json() for diagnostic in refused.diagnostics]}, indent=2)
        )
        return refused.exit_status
    for check in checks:
        check(config)
    if options.yaml:
        program = f"python {script['file']}" if script else "rapidformer"
        print(f"# {program} --config FILE\n{to_yaml(config)}", end="")
    elif options.json:
        print(json.dumps({"ok": True, "plan": plan.to_json(), **({"script": script} if script else {})}, indent=2))
    else:
        show_plan(plan)
        if script:
            print(f"script: {script['file']}: {script['template']}, own hooks: {', '.join(script['hooks']) or 'none'}")
    return 0


def _with_notes(plan: Plan, config: RunConfig, notes: tuple[str, ...]) -> Plan:
    """Return the plan with more notes: unknown sizes of the model, ``notes``, the length of a run in epochs."""
    added = list(notes)
    if config_is_unknown(config.model):
        model = config.model.pretrained_model_name_or_path
        what = f"the sizes of {model} are not known here"
        added.insert(0, f"{what}: it is not in the cache, and the hub cannot be reached")
    epochs = config.training.train_iters
    if isinstance(epochs, Epochs):
        is_counted = not any(REGISTRY[name].order for name in plan.switches)
        steps = steps_of(config, epochs, plan.sizes.global_batch) if is_counted else None
        passes = f"{float(epochs.size):g} epoch{'' if epochs.size == 1 else 's'}"
        count = f" = {steps:,} steps" if steps else ", counted in steps when the data is loaded"
        added.append(f"length: {passes}{count}")
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
    terminal = console()
    terminal.print(table)
    if plan.groups:
        terminal.print(_groups(plan))
    if values.row_count:
        terminal.print(values)
    for note in plan.notes:
        print(f"note: {note}")


def _groups(plan: Plan) -> Table:
    """Return a table of rank 0's groups: their ranks, their exchanges, and whether these cross nodes."""
    from rich.table import Table

    table = Table(
        "group", "workers", "ranks", "reaches over", "exchanges", title="Groups of rank 0", title_justify="left"
    )
    for group in plan.groups:
        ranks = list(map(str, range(0, group.size * group.stride, group.stride)))
        shown = ", ".join(ranks if group.size < 5 else [*ranks[:2], "…", ranks[-1]])
        reach = "one node" if group.nodes == 1 else f"{group.nodes} nodes"
        table.add_row(group.name, str(group.size), shown, reach, group.exchanges)
    return table
