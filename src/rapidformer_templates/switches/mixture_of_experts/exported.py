"""Saved models with mixtures: how a folder is marked, and how it is loaded.

The folder has the format of transformers, except for the ``model_type`` in its ``config.json``, which begins with
``moe-``. So ``from_pretrained`` refuses it instead of filling dense feed-forwards with random numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from rapidformer_templates.models.blocks import find_blocks
from rapidformer_templates.models.loading import LoadingInfo
from rapidformer_templates.models.model_files import CONVERTED, is_converted
from rapidformer_templates.models.weight_files import tensors_in
from rapidformer_templates.switches.mixture_of_experts.transform import KEY, MixtureSizes, make_sparse
from rapidformer_templates.system.files import write_json


def mark(folder: Path) -> None:
    """Mark a saved folder if its model has mixtures."""
    file = folder / "config.json"
    saved = json.loads(file.read_text(encoding="utf-8"))
    if KEY in saved:
        write_json(
            file,
            saved | {"model_type": CONVERTED + saved["model_type"], "num_experts": saved[KEY]["experts"]},
        )


def is_marked(folder: Path) -> bool:
    """Return whether a folder contains a model with mixtures."""
    return (folder / "config.json").is_file() and is_converted(folder)


def read_config(folder: Path) -> PreTrainedConfig:
    """Read the configuration of the dense architecture, with the sizes of the mixtures as an attribute."""
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = saved.pop("model_type").removeprefix(CONVERTED)
    saved.pop("num_experts")
    config: PreTrainedConfig = AutoConfig.for_model(kind, **saved)
    return config


def rebuild(model: PreTrainedModel) -> None:
    """Put mixtures into a model if its configuration describes them. The caller must load their values."""
    sizes = getattr(model.config, KEY, None)
    if sizes:
        make_sparse(model, find_blocks(model), MixtureSizes(**sizes))


def read_model(
    factory: Any, folder: Path, config: PreTrainedConfig, *, base_folder: str | None = None
) -> tuple[PreTrainedModel, LoadingInfo]:
    """Load the model in a marked folder. Also return the loading info that ``from_pretrained`` would give.

    Args:
        factory: transformers' class for the task, such as ``AutoModelForCausalLM``, or a model class.
        folder: a folder that :func:`mark` has marked.
        config: from :func:`read_config`.
        base_folder: unused, because the folder has all weights.
    """
    build = getattr(factory, "from_config", factory)  # a model class builds from its own constructor
    model: PreTrainedModel = build(config).float()
    rebuild(model)
    model.config.name_or_path = str(folder)  # from_pretrained does so, and adapters record it as base
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= tensors_in(file)
    tensors = model.state_dict(keep_vars=True)  # tied weights are one object
    wrong = [(n, w.shape, tensors[n].shape) for n, w in weights.items() if n in tensors and w.shape != tensors[n].shape]
    for name, _, _ in wrong:
        del weights[name]
    absent, unexpected = model.load_state_dict(weights, strict=False)
    missing = set(absent) - {name for name, _, _ in wrong}
    read = {id(tensors[name]) for name in weights if name in tensors}
    untied = {name for name in missing if id(tensors[name]) not in read}
    return model, {"missing_keys": untied, "mismatched_keys": set(wrong), "unexpected_keys": set(unexpected)}


def load_mixture(folder: str | Path, auto_class: str = "AutoModelForCausalLM") -> PreTrainedModel:
    """Load a model with mixtures from an exported folder, for use outside of this library.

    Args:
        folder: ``export/`` of a run with ``--num-experts``.
        auto_class: transformers' class for the task.

    Raises:
        ValueError: the folder is not marked, so ``from_pretrained`` loads it. Or weights are missing.
    """
    import transformers

    folder = Path(folder)
    if not is_marked(folder):
        raise ValueError(f"{folder} does not hold a mixture of this library: use {auto_class}.from_pretrained")
    model, info = read_model(getattr(transformers, auto_class), folder, read_config(folder))
    if missing := info["missing_keys"] | {name for name, _, _ in info["mismatched_keys"]}:
        raise ValueError(
            f"{len(missing)} weights of a {type(model).__name__} are missing in {folder}: {min(missing)} …"
        )
    return model.eval()
