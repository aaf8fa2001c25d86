"""Merge a folder of adapters into a full model."""

from __future__ import annotations

from pathlib import Path

import transformers
from transformers import AutoTokenizer

from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.loading import quiet_transformers
from rapidformer_templates.switches.lora.exported import base_of, read_config, read_model
from rapidformer_templates.switches.mixture_of_experts.exported import mark
from rapidformer_templates.system.files import new_folder


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
        raise ModelError(
            f"transformers has no class {name or 'for this model'}",
            where=str(adapters / "config.json"),
            hint="load the model with its own code and merge with peft: PeftModel.merge_and_unload()",
        )
    with quiet_transformers():
        model, info = read_model(factory, adapters, config, base_folder=base_folder)
    if info["in_neither"]:
        message = f"{len(info['in_neither'])} weights are missing in {base}, such as {min(info['in_neither'])}"
        hint = "the merged model would have random values there: name the folder of the whole base with --base"
        raise ModelError(message, where=str(base), hint=hint)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = True  # training switches it off
    with new_folder(output) as temporary, quiet_transformers():
        model.save_pretrained(temporary)
        mark(temporary)
        if (adapters / "tokenizer_config.json").is_file():
            AutoTokenizer.from_pretrained(adapters, local_files_only=True).save_pretrained(temporary)
