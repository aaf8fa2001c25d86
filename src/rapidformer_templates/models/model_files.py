"""Checks that the files of a model and its tokenizer exist. Does not import torch."""

from __future__ import annotations

from pathlib import Path

from rapidformer_templates.errors import ModelError
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.hub import PRETRAINED, is_hub_name, no_folder_error

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
FROM_FOLDER = (None, "HuggingFaceTokenizer")
"""Values of ``--tokenizer-type`` whose tokenizer is in a folder."""


def check_model_files(config: RunConfig) -> None:
    """Check that the model that the flags name has a configuration and weights. A model on the hub is not looked up.

    Raises:
        ModelError: no model is named, or it is missing.
    """
    path = config.model.pretrained_model_name_or_path
    if path is None and config.model.model_type is None:
        raise no_model_error()
    if path is None:
        return
    folder = Path(path)
    if folder.is_dir():
        check_config_file(folder)
        check_weight_files(folder)
    elif not is_hub_name(path):
        raise no_folder_error(path, PRETRAINED)


def no_model_error() -> ModelError:
    hint = f"give {PRETRAINED} FOLDER, or --model-type and sizes to start from scratch"
    return ModelError("no model is named", where=PRETRAINED, hint=hint)


def check_config_file(folder: Path) -> None:
    """Raise a :class:`ModelError` if a model folder has no ``config.json``."""
    if not (folder / "config.json").is_file():
        hint = "name the folder that holds the model"
        raise ModelError(f"there is no config.json in {folder}", where=PRETRAINED, hint=hint)


def check_weight_files(folder: Path) -> None:
    """Raise a :class:`ModelError` if a model folder has no file with weights."""
    if not any(file for pattern in WEIGHT_FILES for file in folder.glob(pattern)):
        names = ", ".join(sorted(p.name for p in folder.iterdir())[:20])
        hint = f"it needs model.safetensors; it holds: {names}"
        raise ModelError(f"there are no weights in {folder}", where=PRETRAINED, hint=hint)


def check_tokenizer_files(config: RunConfig) -> None:
    """Check that the tokenizer that the flags name exists. A model on the hub is not looked up.

    Raises:
        ModelError: no tokenizer is named, or a file or folder is missing.
    """
    kind, path = config.data.tokenizer_type, config.data.tokenizer_path
    if kind in FROM_FOLDER:
        named = path or config.model.pretrained_model_name_or_path
        if named is None:
            raise no_tokenizer_error()
        if path and not Path(path).is_dir() and not is_hub_name(path):
            raise no_folder_error(path, "--tokenizer-path")
        return
    needed_file(config, "vocab_file")
    if kind == "GPT2BPETokenizer":
        needed_file(config, "merge_file")


def no_tokenizer_error() -> ModelError:
    return ModelError(
        "no tokenizer is named, and there is no pretrained model to take it from",
        where="--tokenizer-type",
        hint="give --tokenizer-path FOLDER, or --tokenizer-type with its files",
    )


def missing_tokenizer_error(path: str, flag: str) -> ModelError:
    hint = "name a folder with tokenizer.json, or a model on the hub, by --tokenizer-path"
    return ModelError(f"there is no tokenizer in {path} that can be read", where=spelling(flag), hint=hint)


def needed_file(config: RunConfig, flag: str) -> Path:
    """Return the file of a tokenizer that is not in a folder.

    Args:
        flag: ``vocab_file`` or ``merge_file``.

    Raises:
        ModelError: the flag or the file is missing.
    """
    kind, value = config.data.tokenizer_type, getattr(config.data, flag)
    if value is None:
        raise ModelError(f"{kind} needs {spelling(flag)}", where="--tokenizer-type", hint=f"add {spelling(flag)} FILE")
    if not Path(value).is_file():
        raise ModelError(f"the file {value} does not exist", where=spelling(flag), hint="give the tokenizer's file")
    return Path(value)
