"""Folders of adapters in peft's format, with the configuration of their model, and models with merged adapters.

Every run imports this module, with or without adapters. So it imports peft only when a folder has adapters.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from rapidformer_templates.engines.assembly import Assembly
from rapidformer_templates.errors import ModelError, counted
from rapidformer_templates.models import loading
from rapidformer_templates.models.adapters import SETTINGS, FrozenBase, fp32_fingerprint
from rapidformer_templates.models.weight_files import save_model, tensors_read_one_by_one
from rapidformer_templates.planning.hub import BESIDE_ADAPTERS, model_folder
from rapidformer_templates.planning.request import config_file, read_model_config
from rapidformer_templates.system.files import JSON_ERRORS, new_folder, write_json
from rapidformer_templates.system.tensor_files import TensorFiles

ADAPTER = "default"
"""The name that peft gives to a model's only adapter."""
WEIGHTS = "adapter_model.safetensors"
PROCESSORS = "*processor_config.json"
"""Pattern of the files with the settings of a processor of images, videos or sounds."""
BASE = "adapter_base.json"
"""The file with the fingerprints of the base. peft does not read it."""
PREFIX = "base_model.model."
"""The prefix of a ``PeftModel`` before the parameter names of the model inside it."""
IN_FILES = [
    (re.compile(rf"\.modules_to_save\.{ADAPTER}\."), "."),
    (re.compile(rf"(\.lora_magnitude_vector)\.{ADAPTER}\.weight$"), r"\1"),
    (re.compile(rf"(\.lora_\w+)\.{ADAPTER}(\.weight)?$"), r"\1\2"),
]
"""Patterns in the parameter names of a model, and their replacements in a file."""
PEFT_TASKS = {
    "CAUSAL_LM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "SEQ_2_SEQ_LM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "SEQ_CLS": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "TOKEN_CLS": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "QUESTION_ANS": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
}
"""peft's names of tasks, with the models of transformers for them by architecture."""


def writes(assembly: Assembly) -> bool:
    """Return whether this module must write the model."""
    return assembly.base is not None


def write(assembly: Assembly, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write adapters and fully trained modules in peft's format, which names them without ``default``.

    The vector of DoRA is a module in a model and a tensor in a file. peft's own function looks at the modules of the
    model. In a pipeline, this worker has the modules of one stage only, but the weights of all stages. So this function
    looks at the names of the weights.

    Args:
        weights: full tensors by name: adapters, fully trained modules, buffers.
    """
    adapters = {}
    for name, tensor in weights.items():
        in_file = name
        for pattern, replacement in IN_FILES:
            in_file = pattern.sub(replacement, in_file)
        if in_file != name:
            adapters[PREFIX + in_file] = tensor.contiguous()
    save_file(adapters, folder / WEIGHTS, metadata={"format": "pt"})
    describe(assembly, folder)


def describe(assembly: Assembly, folder: Path) -> None:
    """Write everything about adapters except their weights: their settings and the configuration of the model."""
    from peft import LoraConfig

    model, config, frozen = assembly.model, assembly.find(LoraConfig), assembly.base
    assert config is not None
    base = getattr(getattr(model, "config", None), "_name_or_path", "") or None
    config.base_model_name_or_path = str(Path(base).resolve()) if base and Path(base).exists() else base
    if isinstance(model, PreTrainedModel):
        kind = loading.class_of(model)
        config.task_type = next((task for task, names in PEFT_TASKS.items() if kind.__name__ in names.values()), None)
        mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        config.auto_mapping = None if config.task_type else mapping  # peft's Auto classes need one of the two
    config.inference_mode = True
    config.save_pretrained(str(folder))
    config.inference_mode = False
    if frozen and frozen.fingerprints:
        write_json(folder / BASE, {"fingerprints": frozen.fingerprints})
    if isinstance(model, PreTrainedModel):
        described = copy.deepcopy(model.config)
        described.architectures = [loading.class_of(model).__name__]  # the base may have another head's class
        described.to_json_file(folder / BESIDE_ADAPTERS)


def restore(model: PreTrainedModel, folder: Path) -> Assembly:
    """Add the adapters that :func:`describe` has written to the layers of a model on the meta device."""
    from peft import PeftConfig, inject_adapter_in_model

    config = PeftConfig.from_pretrained(str(folder))
    with torch.device("meta"):
        loading.rebuild_layers(model)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inject_adapter_in_model(config, model)
    model.config.name_or_path = config.base_model_name_or_path or ""
    assembly = Assembly(model, base=FrozenBase(frozenset(), "", _fingerprints_in(folder)))
    assembly.record(config)
    return assembly


def is_marked(folder: Path) -> bool:
    """Return whether a folder contains adapters."""
    return (folder / SETTINGS).is_file()


def read_config(folder: Path) -> PreTrainedConfig:
    """Read the configuration of the model that the adapters belong to."""
    return AutoConfig.from_pretrained(config_file(folder), local_files_only=True)


def _fingerprints_in(folder: Path) -> dict[str, str]:
    """Return the fingerprints of the base that :func:`describe` has written. Empty for adapters of other programs."""
    if not (folder / BASE).is_file():
        return {}
    try:
        written = json.loads((folder / BASE).read_text(encoding="utf-8"))["fingerprints"]
        return {str(name): str(value) for name, value in written.items()}
    except JSON_ERRORS as error:
        hint = "restore the file, or delete it: the base is not compared then"
        raise ModelError(f"{folder / BASE} cannot be read: {error}", where=str(folder), hint=hint) from error


def check_base(base: nn.Module, folder: Path, named: str) -> None:
    """Check that a base has the weights with which the adapters were trained.

    Args:
        base: the base, without the adapters. Parts that it does not share with the trained model are not compared.
        folder: contains the adapters.
        named: where the base was read.

    Raises:
        ModelError: a weight differs.
    """
    expected = _fingerprints_in(folder)
    compared = ((name, parameter) for name, parameter in base.named_parameters() if name in expected)
    differing = [name for name, parameter in compared if fp32_fingerprint(parameter) != expected[name]]
    if differing:
        raise ModelError(
            f"{len(differing)} of {len(expected)} weights in {named} are not those with which the adapters in {folder} "
            f"were trained, such as {differing[0]}",
            where=named,
            hint=f"name the folder of the right base with --base; without {BASE}, it is not compared",
        )


def base_of(folder: Path, base: str | None = None) -> str:
    """Return the folder of the base model that the adapters name.

    Args:
        base: the base that the user names. It replaces that of the adapters.

    Raises:
        ModelError: the adapters name no base, or the folder does not exist.
    """
    if base is not None:
        if not Path(base).is_dir():
            raise ModelError(f"{base} does not exist", where="--base", hint="name the folder with the base model")
        return base
    named = _setting(folder, "base_model_name_or_path")
    if not isinstance(named, str) or not named or "\0" in named:
        raise ModelError(
            f"the adapters in {folder} do not name a base",
            where=str(folder / SETTINGS),
            hint="their model was built by code: name a folder with its weights with --base, or build it again and "
            "load them with peft.PeftModel.from_pretrained",
        )
    if Path(named).is_absolute() and not Path(named).is_dir():
        message = f"the base of the adapters no longer exists: {named}"
        hint = "restore the folder, or name its new place with --base FOLDER"
        raise ModelError(message, where=str(folder / SETTINGS), hint=hint)
    return str(named)


def revision_of(folder: Path) -> str | None:
    """Return the revision of the base that the adapters name, for a base on the hub."""
    named = _setting(folder, "revision")
    return named if isinstance(named, str) else None


def _setting(folder: Path, name: str) -> object:
    try:
        return json.loads((folder / SETTINGS).read_text(encoding="utf-8")).get(name)
    except JSON_ERRORS as error:
        hint = "restore the file, or name a folder without it"
        raise ModelError(f"{folder / SETTINGS} cannot be read: {error}", where=str(folder), hint=hint) from error


def read_model(
    factory: Any, folder: Path, config: PreTrainedConfig, *, base_folder: str | None = None
) -> tuple[Any, loading.LoadingInfo]:
    """Read the base model, merge the adapters into it, and return it with the names of weights in neither folder.

    Args:
        factory: transformers' class for the task, such as ``AutoModelForCausalLM``.
        folder: contains the adapters.
        config: from :func:`read_config`.
        base_folder: folder of the base, if it is not where the adapters say.

    Raises:
        ModelError: the base does not exist, or it has other weights than the one of the training.
    """
    from peft import PeftConfig, PeftModel

    settings = PeftConfig.from_pretrained(str(folder))
    settings.task_type = None  # the adapters may be used for another task
    base, info = _read_base(factory, folder, config, base_folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = PeftModel.from_pretrained(base, str(folder), config=settings)
        _untie(adapted)
        merged = adapted.merge_and_unload().requires_grad_(True)  # peft has frozen the base
    _note_untied(merged)
    missing = info["missing_keys"] | {name for name, _, _ in info["mismatched_keys"]}
    if (folder / WEIGHTS).is_file():
        # A head that was trained with the adapters is stored with them. The base has none, or one of another shape.
        with safe_open(folder / WEIGHTS, "pt") as file:
            missing -= {name.removeprefix(PREFIX) for name in file.keys()}  # noqa: SIM118 - it is not a dictionary
    return merged, {"missing_keys": missing, "mismatched_keys": set(), "unexpected_keys": set()}


def _read_base(
    factory: Any, folder: Path, config: PreTrainedConfig, base_folder: str | None
) -> tuple[Any, loading.LoadingInfo]:
    """Read and check the base of adapters. The arguments, the result and the errors are those of ``read_model``."""
    named = base_of(folder, base_folder)
    source = model_folder(named, None if base_folder else revision_of(folder), "weights", flag=str(folder / SETTINGS))
    reader = loading.own_reader(source)
    base, info = reader.read_model(factory, source, config) if reader else loading.read_weights(factory, source, config)
    check_base(base, folder, named)
    return base, info


def check_named_base(folder: Path, base_folder: str | None) -> str:
    """Return the folder or name of the base of adapters, for programs that read it themselves, after a check.

    The weights are read once for it. They are not compared for adapters of other programs, and for models whose class
    is not from transformers.

    Raises:
        ModelError: the base does not exist, or it has other weights than the one of the training.
    """
    named = base_of(folder, base_folder)
    names = read_model_config(folder).get("architectures")
    factory = getattr(transformers, str(names[0]), None) if isinstance(names, list) and names else None
    if factory is not None and _fingerprints_in(folder):
        with loading.quiet_transformers():
            _read_base(factory, folder, read_config(folder), base_folder)
    return named


def _untie(adapted: nn.Module) -> None:
    """Untie weights that have adapters, so that merging changes only the adapted layer."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    owners = Counter(id(p) for _, p in adapted.named_parameters(remove_duplicate=False))
    for module in adapted.modules():
        layer = module.get_base_layer() if isinstance(module, BaseTunerLayer) else None
        for name, parameter in layer.named_parameters(recurse=False) if isinstance(layer, nn.Module) else ():
            if owners[id(parameter)] > 1:
                setattr(layer, name, nn.Parameter(parameter.detach().clone()))


def _note_untied(model: PreTrainedModel) -> None:
    """Write into the configuration that the head and the embeddings have separate weights.

    Raises:
        ModelError: the model computes something else without tied weights.
    """
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or not model.config.tie_word_embeddings or head.weight is embeddings.weight:
        return
    if model.config.is_encoder_decoder:
        raise ModelError(
            f"the head of {type(model).__name__} is tied to its embeddings, so adapters of only one of them cannot "
            f"be merged",
            where="--lora-target-modules, --lora-modules-to-save",
            hint="train without adapters of the head and of the embeddings",
        )
    model.config.tie_word_embeddings = False


def merge(adapters: Path, output: Path, base_folder: str | None = None) -> None:
    """Add adapters to the weights of their base model, in fp32, and write the model in transformers' format.

    Args:
        base_folder: folder of the base, if it is not where the adapters say.

    Raises:
        ModelError: the base does not exist, has other weights or lacks some, transformers does not have its class, or
            the output would replace it.
    """
    base = Path(base_of(adapters, base_folder)).resolve()
    if output.resolve() == base:
        message = f"the base of the adapters, {base}, would be replaced"
        raise ModelError(message, where="--output", hint="give another folder")
    config = read_config(adapters)
    name = (config.architectures or [""])[0]
    factory = getattr(transformers, name, None)
    if factory is None:
        message = f"transformers has no class {name or 'for this model'}"
        hint = "load the model with its own code and merge with peft: PeftModel.merge_and_unload()"
        raise ModelError(message, where=str(config_file(adapters)), hint=hint)
    with new_folder(output) as temporary, TensorFiles(temporary) as files, loading.quiet_transformers():
        with tensors_read_one_by_one(), files.parameters_stored():
            model, info = read_model(factory, adapters, config, base_folder=base_folder)
        if missing := info["missing_keys"]:
            message = f"{base} lacks {counted(len(missing), 'weight')}, such as {min(missing)}"
            hint = "the merged model would have random values there: name the folder of the whole base with --base"
            raise ModelError(message, where=str(base), hint=hint)
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = True  # training switches it off
        for parameter in model.parameters():
            files.store_parameter(parameter)  # copies of modules are not registered one by one
        save_model(model, temporary, files)
        if (adapters / "tokenizer_config.json").is_file():
            AutoTokenizer.from_pretrained(adapters, local_files_only=True).save_pretrained(temporary)
        for file in adapters.glob(PROCESSORS):
            shutil.copyfile(file, temporary / file.name)
