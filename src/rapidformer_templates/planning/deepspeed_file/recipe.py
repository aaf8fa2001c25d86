"""The optimizer and the schedule of a DeepSpeed file in the plan, and the plan's notes about the file.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rapidformer_templates.planning.config import spelling
from rapidformer_templates.planning.deepspeed_file.file import ENTRIES, LOUD, effective, file_of, from_flags
from rapidformer_templates.planning.deepspeed_file.json import DeepSpeedFile
from rapidformer_templates.planning.deepspeed_file.keys import NOTED, OWN, is_neutral, leaves, look_up
from rapidformer_templates.planning.deepspeed_file.schedules import AUTO, FLAGS, PARAMETERS
from rapidformer_templates.planning.schedules import OF_SCHEDULES

if TYPE_CHECKING:
    from rapidformer_templates.planning.switch import Request

FLAGS_OF_SECTIONS = {
    "zero_optimization.stage",
    "fp16.enabled",
    "bf16.enabled",
    "zero_optimization.offload_optimizer.device",
    *(entry.path for entry in ENTRIES),
}


def file_options(request: Request) -> dict[str, Any]:
    """Return the options of the file's optimizer other than learning rate and weight decay."""
    params = look_up(file_of(request).content, "optimizer.params")
    parameters = params if isinstance(params, Mapping) else {}
    options = {name: parameters[name] for name in ("betas", "eps") if parameters.get(name, AUTO) not in (AUTO, None)}
    return options | ({"betas": tuple(options["betas"])} if "betas" in options else {})


def decays_in_the_gradient(request: Request) -> bool:
    """Return whether a file requests Adam with the weight decay in the gradient (L2), not decoupled."""
    return look_up(file_of(request).content, "optimizer.params.adam_w_mode") is False


def schedule(request: Request) -> dict[str, Any] | None:
    """Return the type and parameters of a file's schedule."""
    section = file_of(request).content.get("scheduler")
    if not isinstance(section, Mapping) or section.get("type") not in PARAMETERS:
        return None
    return {"type": section["type"], "params": dict(section.get("params") or {})}


def notes(request: Request) -> Iterator[str]:
    """Yield the plan's notes about a file."""
    file = file_of(request)
    yield from _moved(file)
    for path, why in NOTED.items():
        value = look_up(file.content, path)
        prints_anyway = path == "steps_per_print" and any(file.content.get(name) for name in LOUD)
        if value is not None and not is_neutral(value) and not prints_anyway:
            yield f"{file.name}: {path} {_shown(value)}: {why}"
    if options := file_options(request):
        listed = ", ".join(f"{name} {_shown(value)}" for name, value in options.items())
        yield f"{file.name}: the optimizer has {listed}"
    if look_up(file.content, "optimizer.params.weight_decay"):
        yield f"{file.name}: optimizer.params.weight_decay does not apply to biases and norms, as elsewhere"
    if scheduler := schedule(request):
        listed = ", ".join(f"{name} {_shown(value)}" for name, value in scheduler["params"].items())
        yield f"{file.name}: the learning rate follows DeepSpeed's {scheduler['type']} ({listed})"
    if "aio" in file.content and "nvme-offload" not in request.active:
        yield f"{file.name}: aio acts with offload to NVMe only"
    yield from _filled(request, file)


def _moved(file: DeepSpeedFile) -> Iterator[str]:
    for new, old in file.renamed.items():
        yield f"{file.name}: {old} is read as {new}, where DeepSpeed looks for it"


def _filled(request: Request, file: DeepSpeedFile) -> Iterator[str]:
    """Yield a note about ``"auto"`` values of the file that no flag shows."""
    precision = "fp32"  # it does not matter here
    defaults = dict(leaves(from_flags(request, precision)))
    filled = dict(leaves(effective(request, precision)))
    auto = [path for path, value in leaves(file.content) if value == AUTO and path in filled and path in defaults]
    shown = [f"{path} {filled[path]}" for path in auto if path.startswith("zero_optimization.")]
    if shown:
        yield f"{file.name}: auto values are filled in: {', '.join(shown)}"


def _shown(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def two_schedules(request: Request) -> Iterator[tuple[str, str]]:
    """Yield (message, field) of each flag that has no effect with a file's schedule."""
    file, scheduler = file_of(request), schedule(request)
    if scheduler is None:
        return
    params = {**PARAMETERS[scheduler["type"]], **scheduler["params"]}
    used = {FLAGS[name] for name in params if name in FLAGS}
    if scheduler["params"].get("warmup_num_steps") == AUTO:
        used |= {"lr_warmup_fraction", "lr_warmup_samples"}
    for field in OF_SCHEDULES:
        origin = request.config.origins.get(field)
        if origin is not None and field not in used and not origin.startswith(file.name):
            yield (
                f"{file.name} has the schedule {scheduler['type']}, with which {spelling(field)} would do nothing",
                field,
            )


def for_deepspeed_alone(request: Request) -> list[str]:
    """Return the keys that request something from DeepSpeed itself, which no flag does."""
    return [
        path
        for path, value in leaves(file_of(request).content)
        if not is_neutral(value)
        and path.partition(".")[0] not in OWN
        and path not in FLAGS_OF_SECTIONS
        and path not in NOTED
    ]
