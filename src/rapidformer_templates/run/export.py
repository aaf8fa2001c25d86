"""The exported model: a folder that transformers' ``from_pretrained`` loads."""

from __future__ import annotations

import copy
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.utils import logging

from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.planning.registry import REGISTRY
from rapidformer_templates.system.files import new_folder
from rapidformer_templates.system.workers import Workers

if TYPE_CHECKING:
    from rapidformer_templates.run.template import Template


def export_model(engine: Engine, template: Template, folder: Path, workers: Workers) -> None:
    """Write weights, config and tokenizer; every rank must call it, rank 0 writes.

    A model that is not of transformers is exported as ``model.safetensors`` alone.
    """
    with engine.averaged():  # until they are written: they may be the parameters themselves
        weights = engine.full_weights()
        if weights is not None:
            _write(engine, template, folder, weights)


def _write(engine: Engine, template: Template, folder: Path, weights: dict[str, torch.Tensor]) -> None:
    own = next((module for module in _exported() if hasattr(module, "writes") and module.writes(engine.model)), None)
    with new_folder(folder) as temporary:
        if own:
            own.write(engine.model, weights, temporary)
        elif isinstance(engine.model, PreTrainedModel):
            _save_transformers(engine.model, weights, temporary)
        else:
            save_file(weights, temporary / "model.safetensors")
        if template.tokenizer is not None:
            template.tokenizer.save_pretrained(temporary)


def _exported() -> list[Any]:
    """Modules of switches that know models which transformers does not: they write such a one, or mark its folder."""
    return [import_module(switch.exported) for switch in REGISTRY.switches if switch.exported]


def _save_transformers(model: PreTrainedModel, weights: dict[str, torch.Tensor], folder: Path) -> None:
    # Sharding engines swap the class of the model; an empty one of the original class saves as transformers expects.
    original = next(c for c in type(model).__mro__ if not c.__name__.startswith("FSDP"))
    config = copy.deepcopy(model.config)
    if hasattr(config, "use_cache"):
        config.use_cache = True  # it is off in training alone
    with torch.device("meta"):
        skeleton = original(config)
    logging.disable_progress_bar()  # its bar would stand among our own lines
    skeleton.save_pretrained(folder, state_dict=weights)
    for module in _exported():
        if hasattr(module, "mark"):
            module.mark(folder)
