"""Checks the keys and values of a DeepSpeed file with DeepSpeed's own classes.

Importing them takes seconds and chooses a device, which making a plan must not do. So a child process imports them.
This module imports neither torch nor deepspeed.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any, get_args

from rapidformer_templates.errors import ConfigError
from rapidformer_templates.planning.deepspeed_file import file as ds_file
from rapidformer_templates.planning.schedules import DEEPSPEED_SCHEDULES, FileSchedule
from rapidformer_templates.system import launch

MODELS = {
    "zero_optimization": ("runtime.zero.config", "DeepSpeedZeroConfig"),
    "fp16": ("runtime.precision_config", "DeepSpeedFP16Config"),
    "bf16": ("runtime.precision_config", "DeepSpeedBF16Config"),
}
"""Sections, with DeepSpeed's module and model that read them."""

PLAIN = {
    **dict.fromkeys(("fp16.enabled", "bf16.enabled"), (True, False, ds_file.AUTO)),
    "zero_optimization.stage": (1, 2, 3),
    "zero_optimization.offload_optimizer.device": ("cpu", "none"),
    "scheduler.type": ("WarmupLR",),
}
"""Values that the plan reads itself. DeepSpeed is not asked about a file that has no others."""


def deepspeed_problems(content: ds_file.Section) -> tuple[ds_file.Problem, ...]:
    """Return what the installed DeepSpeed does not know or does not accept in a file.

    Workers do not look, because their launcher, or the first of them, does. Without DeepSpeed nothing is known.

    Raises:
        ConfigError: DeepSpeed cannot be imported.
    """
    names = [*MODELS, "aio", *(["scheduler"] if ds_file.type_of(content, "scheduler") in DEEPSPEED_SCHEDULES else [])]
    sections = {name: section for name in names if (section := ds_file.section_at(content, name))}
    is_other_worker = launch.CHECKED in os.environ or os.environ.get("RANK", "0") != "0"
    is_plain = all(value in PLAIN.get(path, ()) for path, value in ds_file.leaves(sections))
    if is_plain or is_other_worker or find_spec("deepspeed") is None:
        return ()
    return _ask_deepspeed(json.dumps(sections))


@cache
def _ask_deepspeed(sections: str) -> tuple[ds_file.Problem, ...]:
    if "deepspeed" in sys.modules:
        return tuple(find_problems(json.loads(sections)))
    path = os.pathsep.join(entry for entry in sys.path if entry)  # the import path of this process
    variables = {"DS_ACCELERATOR": "cpu", **os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-P", "-W", "ignore", "-m", __name__]
    child = subprocess.run(command, input=sections, capture_output=True, text=True, env=variables, check=False)
    if child.returncode:
        reason = (child.stderr.strip().splitlines() or [f"it ended with status {child.returncode}"])[-1]
        raise ConfigError(
            f"DeepSpeed cannot check the file: {reason}", where="--deepspeed-config", hint="rapidformer doctor"
        )
    return tuple((path, message) for path, message in json.loads(child.stdout))


def find_problems(content: ds_file.Section) -> list[ds_file.Problem]:
    """Return what DeepSpeed does not know or does not accept. Imports DeepSpeed."""
    known = {f"aio.{key}": "" for key in _module("runtime.swap_tensor.aio_config").AIO_DEFAULT_DICT}
    models = {name: getattr(_module(module), kind) for name, (module, kind) in MODELS.items()}
    if scheduler := ds_file.type_of(content, "scheduler"):
        known |= dict.fromkeys(("scheduler.type", "scheduler.params", "scheduler.params.last_batch_iteration"), "")
        models["scheduler.params"] = _model_of(getattr(_module("runtime.lr_schedules"), scheduler))
    for name, model in models.items():
        known |= dict(_keys_of(model, f"{name}."))
    problems: list[ds_file.Problem] = []
    for name in content:
        problems += ds_file.unknown_in(ds_file.section_at(content, name), f"{name}.", known)
    for name, model in models.items():
        problems += _wrong_values(name, model, ds_file.section_at(content, name))
    if scheduler and not any(path.startswith("scheduler") for path, _ in problems):
        from rapidformer_templates.engines.recipe import deepspeed_rates

        schedule: FileSchedule = {"type": scheduler, "params": dict(ds_file.section_at(content, "scheduler.params"))}
        try:
            deepspeed_rates(schedule, lr=1e-3, warmup=1, total=9)(1)
        except (ArithmeticError, TypeError, ValueError) as error:
            problems.append(("scheduler.params", f"{scheduler} of DeepSpeed refuses scheduler.params: {error}"))
    return problems


def _module(name: str) -> Any:
    return importlib.import_module(f"deepspeed.{name}")


def _keys_of(model: Any, above: str) -> Iterator[tuple[str, str]]:
    """Yield (path, replacement if it is deprecated) of each key of a pydantic model, and of the models in it."""
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra or {}
        for key in filter(None, (name, field.alias)):
            yield f"{above}{key}", extra.get("new_param", "") if extra.get("deprecated") else ""
        for kind in (field.annotation, *get_args(field.annotation)):
            if hasattr(kind, "model_fields"):
                yield from _keys_of(kind, f"{above}{name}.")


def _model_of(schedule: Any) -> Any:
    """Return a pydantic model of the parameters of a schedule."""
    from pydantic import ConfigDict, NonNegativeFloat, create_model

    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(schedule).parameters.items():
        default = parameter.default
        kind = type(default) if isinstance(default, bool | str) else NonNegativeFloat
        fields[name] = (kind, ... if default is parameter.empty else default)
    del fields["optimizer"], fields["last_batch_iteration"]
    return create_model("Schedule", __config__=ConfigDict(strict=True, allow_inf_nan=False), **fields)


def _wrong_values(name: str, model: Any, section: ds_file.Section) -> Iterator[ds_file.Problem]:
    from pydantic import ValidationError

    values = section
    if name == "scheduler.params":  # DeepSpeed's own models leave "auto" out
        values = {key: 1 if value == ds_file.AUTO else value for key, value in section.items() if value is not None}
    try:
        model(**values)
    except ValidationError as error:
        for mistake in error.errors():
            path = ".".join([name, *map(str, mistake["loc"])])
            value = f" cannot be {mistake['input']!r:.80}" if mistake["loc"] and mistake["type"] != "missing" else ""
            if mistake["type"] != "extra_forbidden":
                yield path, f"{path}{value}: {mistake['msg']}"
    except OverflowError as error:  # DeepSpeed computes with some values while it checks them
        yield name, f"{name}: {error}"


if __name__ == "__main__":
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that DeepSpeed prints may mix with it
    json.dump(find_problems(json.load(sys.stdin)), report)
    report.close()
