"""``rapidformer export --gguf``: writes an export as one file for llama.cpp, with llama.cpp's own converter."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from rapidformer_templates.errors import ConfigError, ModelError
from rapidformer_templates.system.files import sync, writing

CONVERTER = "convert_hf_to_gguf.py"
TYPES = ("f32", "f16", "bf16", "q8_0")
"""Types of the weights that the converter writes. ``llama-quantize`` makes smaller ones from the file."""


def find_converter() -> Path:
    """Return the path of the converter.

    Raises:
        ConfigError: the converter or the gguf package is missing.
    """
    found = shutil.which(CONVERTER)
    if found is None:
        hint = "put the folder of llama.cpp on PATH: PATH=$PATH:FOLDER"
        raise ConfigError(f"{CONVERTER} of llama.cpp is not on PATH", where="--gguf", hint=hint)
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("the package gguf is not installed", where="--gguf", hint="pip install gguf")
    return Path(found)


def write_gguf(converter: Path, export: Path, weights: str) -> Path:
    """Convert an export. The file gets its name after it has been read and compared with the export.

    Args:
        export: folder of a whole model with its tokenizer.
        weights: type of the weights, one of :data:`TYPES`.

    Returns:
        The new file, ``model-TYPE.gguf`` in the folder.

    Raises:
        ModelError: the converter does not know the model or its tokenizer, or its file differs from the export.
    """
    target = export / f"model-{weights}.gguf"
    partial = target.with_suffix(".gguf.tmp")
    command = [sys.executable, str(converter), str(export), "--outfile", str(partial), "--outtype", weights]
    with writing(target):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode or not partial.is_file():
                said = (done.stderr or done.stdout).strip().splitlines() or ["it says nothing"]
                hint = f"the export itself is complete: {export}"
                raise ModelError(f"llama.cpp's converter failed: {said[-1]}", where=str(converter), hint=hint)
            _check(partial, export)
            sync(partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    return target


def _check(file: Path, export: Path) -> None:
    """Compare the number of tokens, the end token and the chat template in a file with those of the tokenizer.

    Raises:
        ModelError: one of them differs.
    """
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(export)
    template = tokenizer.chat_template
    told = {name: field.contents() for name, field in GGUFReader(file).fields.items() if "tokenizer" in name}
    tokens = len(told.get("tokenizer.ggml.tokens") or ())
    pairs = {
        "number of tokens": (min(tokens, len(tokenizer)), len(tokenizer)),  # the converter adds unused ones
        "end token": (told.get("tokenizer.ggml.eos_token_id"), tokenizer.eos_token_id),
        "chat template": (
            told.get("tokenizer.chat_template"),
            template.get("default") if isinstance(template, dict) else template,
        ),
    }
    for what, (converted, own) in pairs.items():
        if converted != own:
            message = f"the {what} in llama.cpp's file differs from the export: {converted!r:.80}, not {own!r:.80}"
            raise ModelError(message, where=str(export), hint="update llama.cpp, which may not know this tokenizer")
