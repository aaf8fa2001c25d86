"""Writes models in the format of transformers: a file with the weights, or shards of limited size with an index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rapidformer_templates.models.loading import mark_folder, quiet_transformers
from rapidformer_templates.system.files import write_json
from rapidformer_templates.system.tensor_files import TensorFiles

SHARD_BYTES = 5 * 10**9
"""Maximum bytes of a file with weights. A larger tensor has a file to itself."""


def save_model(
    model: PreTrainedModel, folder: Path, files: TensorFiles, weights: dict[str, torch.Tensor] | None = None
) -> None:
    """Write weights and configuration as ``from_pretrained`` reads them.

    Args:
        files: take the tensors that transformers computes to undo its changes of a format, such as stacked experts.
        weights: weights by name. They replace the model's own.
    """
    with quiet_transformers(), files.results_stored():
        model.save_pretrained(folder, state_dict=weights, max_shard_size=SHARD_BYTES)
    mark_folder(folder)


def save_weights(weights: Mapping[str, torch.Tensor], folder: Path, metadata: dict[str, str] | None = None) -> None:
    """Write the weights of a model that is not from transformers, under the same file names."""
    split = split_torch_state_dict_into_shards(
        dict(weights),
        filename_pattern=SAFE_WEIGHTS_NAME.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=SHARD_BYTES,
    )
    for file, names in split.filename_to_tensors.items():
        save_file({name: weights[name] for name in names}, folder / file, metadata=metadata)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / SAFE_WEIGHTS_INDEX_NAME, index)
