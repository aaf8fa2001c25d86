"""The files of a model, which are checked without importing torch, and the tokenizer that is loaded from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rapidformer_templates.errors import ModelError
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.hub import PRETRAINED, is_hub_name, model_folder, no_folder_error
from rapidformer_templates.planning.request import config_file, config_folder, read_model_config
from rapidformer_templates.system.files import check_downloaded, hash_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

OWN_EXPERTS = frozenset({"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "granitemoeshared", "flex_olmo"})
"""Architectures of transformers whose own experts are used without conversion."""

CONVERTED = "moe-"
"""Prefix of ``model_type`` for exported models whose dense feed-forward layers were converted to mixtures."""

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
DEQUANTIZED = ("fp8", "mxfp4")
"""Formats of quantized weights that transformers dequantizes while it reads them."""
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
    """Raise a :class:`ModelError` if a model folder has no ``config.json``, or one that cannot be a model's."""
    if not config_file(folder).is_file():
        holds = folder / "export" if config_file(folder / "export").is_file() else "the folder that holds the model"
        raise ModelError(f"there is no config.json in {folder}", where=PRETRAINED, hint=f"name {holds}")
    check_downloaded(sorted(folder.iterdir()), ModelError)
    read_model_config(folder)


@contextmanager
def explain_config_errors(folder: Path) -> Iterator[None]:
    """Explain to the user why the code inside the context cannot use the configuration of a model.

    Raises:
        ModelError: any error, in words. For a value of a wrong type, transformers raises many kinds of errors.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        hint, reason = "check its config.json", " ".join(str(error).split())[:300] or type(error).__name__
        if "trust_remote_code" in str(error):
            hint = "run the folder's own code with --trust-remote-code"
            reason = "it needs the Python code of the folder"
        message = f"the configuration in {folder} cannot be used: {reason}"
        raise ModelError(message, where=PRETRAINED, hint=hint) from error


def is_converted(folder: Path) -> bool:
    """Return whether a folder contains a model whose dense feed-forward layers were converted to mixtures."""
    return str(read_model_config(folder).get("model_type", "")).startswith(CONVERTED)


def check_weight_files(folder: Path) -> None:
    """Raise a :class:`ModelError` if a model folder has no file with weights."""
    if not any(file for pattern in WEIGHT_FILES for file in folder.glob(pattern)):
        names = ", ".join(sorted(p.name for p in folder.iterdir())[:20])
        hint = f"it needs model.safetensors; it holds: {names}"
        raise ModelError(f"there are no weights in {folder}", where=PRETRAINED, hint=hint)


def quantization_of(folder: Path) -> dict[str, object]:
    """Return how the weights of a model folder are quantized, from its configuration. Empty if they are not."""
    content = read_model_config(folder).get("quantization_config")
    return content if isinstance(content, dict) else {}


def check_not_quantized(config: RunConfig) -> None:
    """Check that the pretrained model has weights that can be trained. A model on the hub must be in the cache.

    Raises:
        ModelError: they are quantized, so that only the other parameters would be trained.
    """
    folder = config_folder(config.model)
    quantization = quantization_of(folder) if folder and config_file(folder).is_file() else {}
    method = str(quantization.get("quant_method", "bitsandbytes"))  # older versions did not write it
    if quantization and method not in DEQUANTIZED:
        raise quantized_error(f"the weights in {config.model.pretrained_model_name_or_path}", method, where=PRETRAINED)


def quantized_error(what: str, method: str, *, where: str) -> ModelError:
    """Return the error for a model with weights in codes."""
    message = f"{what} are quantized ({method}), and only weights in floating-point numbers are trained"
    hint = "name the model that it was made from; --lora-rank 16 --quantize-base nf4 keeps its weights in 4 bits"
    hint += "; or dequantize it (docs/adapters.md)" if method == "bitsandbytes" else ""
    return ModelError(message, where=where, hint=hint)


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
        if path and Path(path).is_dir():
            check_downloaded(sorted(Path(path).iterdir()), ModelError)
        return
    needed_file(config, "vocab_file")
    if kind == "GPT2BPETokenizer":
        needed_file(config, "merge_file")


def no_tokenizer_error() -> ModelError:
    message = "no tokenizer is named, and there is no pretrained model to take it from"
    hint = "give --tokenizer-path FOLDER, or --tokenizer-type with its files"
    return ModelError(message, where="--tokenizer-type", hint=hint)


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


def padded_vocab_size(size: int) -> int:
    """Round a vocabulary size up to a multiple of 128, as Megatron-LM does: 50257 → 50304."""
    return -(-size // 128) * 128


def vocabulary_id(tokenizer: Tokenizer) -> str:
    """Return a short id of a vocabulary without its added tokens. Different vocabularies have different ids."""
    return hash_of(sorted(tokenizer.get_vocab(with_added_tokens=False).items()))


def vocabulary_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the highest token id plus one. A vocabulary can have gaps, so this may exceed its length."""
    return max(tokenizer.get_vocab().values()) + 1


def load_tokenizer(config: RunConfig) -> PreTrainedTokenizerFast:
    """Load the model's own tokenizer, or the one of ``--tokenizer-type``. It always has a padding token.

    Raises:
        ModelError: a file is missing or does not fit the type.
    """
    from transformers import BertTokenizer, GPT2Tokenizer  # takes seconds

    kind = config.data.tokenizer_type
    if kind in FROM_FOLDER:
        tokenizer = _from_folder(config)
    elif kind == "GPT2BPETokenizer":
        vocab, merges = needed_file(config, "vocab_file"), needed_file(config, "merge_file")
        tokenizer = _read(GPT2Tokenizer, vocab, vocab=str(vocab), merges=str(merges))
    else:
        vocab = needed_file(config, "vocab_file")
        tokenizer = _read(BertTokenizer, vocab, vocab=str(vocab), do_lower_case=kind == "BertWordPieceLowerCase")
    if tokenizer.pad_token_id is None:
        # Padded positions are masked and have no label, so any token works.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.sep_token or tokenizer.unk_token
    if tokenizer.pad_token_id is None:
        raise ModelError("the tokenizer has no padding, end or unknown token", hint="add a padding token to its folder")
    return tokenizer


def end_token_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the token that ends a document: the end token, else the separator.

    Raises:
        ModelError: the tokenizer has neither.
    """
    token = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if token is None:
        message = "the tokenizer has no end token"
        raise ModelError(message, where="--tokenizer-type", hint="use a tokenizer that has one")
    assert isinstance(token, int)
    return token


def _read(kind: type[PreTrainedTokenizerFast], file: Path, **arguments: object) -> PreTrainedTokenizerFast:
    try:
        return kind(**arguments)
    # The tokenizers library raises bare Exception for a file in a wrong format.
    except Exception as error:
        message = f"the tokenizer cannot be read: {error}"
        raise ModelError(message, where=str(file), hint="check the file's format") from error


def _from_folder(config: RunConfig) -> PreTrainedTokenizerFast:
    flag = "tokenizer_path" if config.data.tokenizer_path else "pretrained_model_name_or_path"
    path = config.data.tokenizer_path or config.model.pretrained_model_name_or_path
    if path is None:
        raise no_tokenizer_error()
    from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

    code, revision = config.model.trust_remote_code, None if config.data.tokenizer_path else config.model.revision
    folder = model_folder(path, revision, "tokenizer", flag=spelling(flag), code=code)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=code)
    except BaseException as error:  # many kinds: tokenizers raises a bare Exception, and Rust a PanicException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if (folder / "config.json").is_file() and not is_converted(folder):
            with explain_config_errors(folder):  # transformers reads it, too
                AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=code)
        hint = "name a folder with tokenizer.json, or a model on the hub, by --tokenizer-path"
        message = f"there is no tokenizer in {path} that can be read"
        raise ModelError(message, where=spelling(flag), hint=hint) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        hint = "convert it with transformers and save it as tokenizer.json"
        raise ModelError(f"the tokenizer in {path} has no fast form", where=spelling(flag), hint=hint)
    if not isinstance(tokenizer.model_max_length, int | float):
        message = f"model_max_length of the tokenizer is not a number: {str(tokenizer.model_max_length)[:30]!r}"
        raise ModelError(message, where=str(folder / "tokenizer_config.json"), hint="correct it, or leave it out")
    return tokenizer
