"""The facts that rules check: sizes, model, active switches, engine and optimizer. Does not import torch."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from rapidformer_templates.errors import ModelError
from rapidformer_templates.planning import optimizers
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.deepspeed_file.settings import decays_in_the_gradient
from rapidformer_templates.planning.environment import Environment
from rapidformer_templates.planning.flags import MOST_BLOCKS, ModelFlags
from rapidformer_templates.planning.hub import BESIDE_ADAPTERS, PRETRAINED, cached_folder, is_hub_name
from rapidformer_templates.planning.plan import Sizes
from rapidformer_templates.planning.switch import ModelFacts, Request, Resource, Switch

# Names of the same size in the configurations of different architectures in transformers.
CONFIG_KEYS = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads",),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
}


def build_request(
    config: RunConfig,
    environment: Environment,
    switches: Sequence[Switch],
    *,
    training: bool = False,
    model: ModelFacts | None = None,
) -> Request:
    """Gather the facts. With ``model``, the model's ``config.json`` is not read again."""
    # Sizes that do not divide are rounded down, and a rule reports it. A run by --epochs does not accumulate, and a
    # user's own loop need not. So without --micro-batch-size each rank computes its share of the global batch at once.
    divided = {size: config.get(name) for switch in switches for size, name in switch.sizes.items()}
    data = max(1, environment.world_size // math.prod(divided.values()))
    micro, whole = config.data.micro_batch_size, config.data.global_batch_size
    if whole and whole % data == 0 and micro_follows(config):
        micro = whole // data
    whole = whole or micro * data
    sizes = Sizes(
        world=environment.world_size,
        local_world=environment.local_world_size,
        data=data,
        micro_batch=micro,
        global_batch=whole,
        accumulation=max(1, whole // (micro * data)),
        **divided,
    )
    model = model or model_facts(config)
    options = config.switches
    active = [s for s in switches if s.active(options[s.name], sizes) or s.implied(model)]
    active = [switch.variant(switch, options[switch.name]) for switch in active]
    are_separate = any(switch.copies_differ for switch in active) and any(switch.divides_copies for switch in active)
    if sizes.divides > 1 or are_separate:
        active = [switch.in_layout(switch) for switch in active]
    return Request(config, environment, {switch.name: switch for switch in active}, sizes, model, training)


def micro_follows(config: RunConfig) -> bool:
    """Whether the micro batch size follows from ``--global-batch-size`` and the number of workers."""
    is_open = config.data.global_batch_size is not None and "micro_batch_size" not in config.origins
    return is_open and (config.training.epochs is not None or config.own_loop)


def precision(config: RunConfig, environment: Environment) -> str:
    """Return the type of matrix products: ``fp32``, ``bf16`` or ``fp16``."""
    return precision_on(environment.device, config.get("mixed_precision"))


def precision_on(device: str, requested: str | None) -> str:
    """Return the type of matrix products for a device and a value of ``--mixed-precision``."""
    if requested == "auto":
        return "bf16" if device == "cpu" else "fp16"
    return requested or "fp32"


def engine_owner(request: Request) -> Switch | None:
    """Return the switch whose engine owns the optimizer step: the first with an engine, in the order of application.

    Switches that divide the model come before those that divide its states, and their engine supports both. A switch
    with ``copies_differ`` comes last, because the other engines support it.
    """
    bringing = (switch for switch in request.active.values() if switch.engine)
    return min(bringing, key=lambda switch: switch.copies_differ, default=None)


def wide_weights(request: Request) -> str | None:
    """Return why the parameters stay fp32 under mixed precision. None if they are 16-bit with fp32 masters."""
    if request.config.get("keep_fp32_parameters"):
        return "--keep-fp32-parameters"
    owner = engine_owner(request)
    if owner is not None and not owner.master_weights:
        return owner.name
    return next((switch.name for switch in request.active.values() if switch.master_weights is False), None)


def model_facts(config: RunConfig) -> ModelFacts:
    """Return the type and sizes of the model from its flags, or from the ``config.json`` of its folder.

    A model on the hub has a folder in the cache. Nothing is downloaded here.

    Raises:
        ModelError: that file is not a JSON object.
    """
    folder = config_folder(config.model)
    # Loading the model will report a folder without this file.
    content = read_model_config(folder) if folder and config_file(folder).is_file() else {}
    text = content.get("text_config")  # of a vision-language model: its blocks are those that layouts divide
    content |= text if isinstance(text, dict) else {}
    kind = content.get("model_type") if content else config.model.model_type
    facts: dict[str, int | None] = {}
    for name, keys in CONFIG_KEYS.items():
        in_file = next((value for key in keys if isinstance(value := content.get(key), int)), None)
        value = getattr(config.model, name, None)
        facts[name] = in_file if value is None else value
    return ModelFacts(model_type=kind if isinstance(kind, str) else None, **facts)


def config_folder(flags: ModelFlags) -> Path | None:
    """Return the folder with the configuration of the pretrained model. For a name on the hub it is in the cache."""
    name = flags.pretrained_model_name_or_path
    return (cached_folder(name, flags.revision, "config") or Path(name)) if name else None


def check_whole_weights(flags: ModelFlags) -> None:
    """Check that the pretrained model is not a folder of adapters: their sum with their base is in no file.

    Raises:
        ModelError: it is one. The hint has the command that writes the whole model.
    """
    folder = config_folder(flags)
    if folder is None or not (folder / "adapter_config.json").is_file():
        return
    name = str(flags.pretrained_model_name_or_path)
    path = Path(name)
    if path.name == "export" and (path.parent / "plan.json").is_file():
        source, merged, output = shlex.quote(str(path.parent)), path.with_name("merged"), ""
    else:
        merged = Path(f"{path.name}-merged")
        source = f'"$(hf download {name})"' if is_hub_name(name) else shlex.quote(name)
        output = f" --output {shlex.quote(str(merged))}"
    message = f"{name} holds adapters, and new adapters need a base whose weights are in a folder"
    command = f"rapidformer export {source} --merge{output}; then {PRETRAINED} {shlex.quote(str(merged))}"
    raise ModelError(message, where=PRETRAINED, hint=f"merge them first: {command}")


def config_file(folder: Path) -> Path:
    """Return the file with the configuration of a model.

    In a folder of adapters it is not ``config.json``: transformers takes a folder with that file for a whole model.
    """
    beside_adapters = folder / BESIDE_ADAPTERS
    return beside_adapters if beside_adapters.is_file() else folder / "config.json"


def read_model_config(folder: Path) -> dict[str, object]:
    """Return the content of the ``config.json`` of a model's folder.

    Raises:
        ModelError: it is not a JSON object, or it has more blocks or experts than any model.
    """
    file = config_file(folder)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON: {error}", where=PRETRAINED) from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} does not hold a JSON object", where=PRETRAINED)
    for section in (content, *(value for value in content.values() if isinstance(value, dict))):
        for name, value in section.items():
            if re.search("layer|expert", name) and isinstance(value, int) and value > MOST_BLOCKS:
                message = f"{name} is {str(value)[:30]} in {file}, and no model has more than {MOST_BLOCKS:,}"
                raise ModelError(message, where=PRETRAINED, hint="correct the number, or download the file again")
    return content


def optimizer_facts(request: Request) -> optimizers.OptimizerFacts:
    """Return the record of the chosen optimizer."""
    return optimizers.OPTIMIZERS[request.config.get("optimizer")]


def optimizer_class(request: Request) -> optimizers.OptimizerClass:
    """Return the class that makes the updates in this run. For apex's classes it may be the fallback."""
    facts = optimizer_facts(request)
    if on_host_by_deepspeed(request):
        return optimizers.CPU_ADAM
    chosen = facts.fallback if facts.fallback and fallback_reason(request) else facts.implementation
    return chosen.l2 if isinstance(chosen.l2, optimizers.OptimizerClass) and decays_in_the_gradient(request) else chosen


def optimizer_options(request: Request) -> dict[str, object]:
    """Return the options of that class other than learning rate and weight decay.

    Options not listed keep its defaults.
    """
    training = request.config.training
    options: dict[str, object] = {}
    if training.adam_beta1 is not None or training.adam_beta2 is not None:
        betas = zip(
            (training.adam_beta1, training.adam_beta2), optimizer_facts(request).betas or optimizers.BETAS, strict=True
        )
        options["betas"] = tuple(default if beta is None else beta for beta, default in betas)
    if training.adam_epsilon is not None:
        options["eps"] = training.adam_epsilon
    l2 = optimizer_class(request).l2
    return options | {l2: False} if isinstance(l2, str) and decays_in_the_gradient(request) else options


def on_host_by_deepspeed(request: Request) -> bool:
    """Return whether DeepSpeed updates an offloaded AdamW state, for which it has a vectorized class."""
    facts = optimizer_facts(request)
    is_adamw = (
        facts.implementation in (optimizers.ADAMW, optimizers.FUSED_ADAMW) or facts.fallback is optimizers.FUSED_ADAMW
    )
    by_deepspeed = any(name.startswith("zero-") and switch.engine for name, switch in request.active.items())
    return is_adamw and by_deepspeed and bool(request.of_family("offload"))


def fallback_reason(request: Request) -> str | None:
    """Return why apex's class cannot be used in this run, or None if it can."""
    if "apex" not in request.environment.packages:
        return "Nvidia apex is not installed"
    if request.environment.device != "cuda":
        return "Nvidia apex runs on a GPU only"
    if request.of_family("offload"):
        return "Nvidia apex cannot update a state in host memory"
    if any(Resource.PARAMETERS in switch.claims for switch in request.active.values()):
        return "Nvidia apex does not accept sharded parameters"
    return None
