"""Loads the tokenizer that the flags ask for."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from transformers import BertTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast

from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.model_files import (
    FROM_FOLDER,
    missing_tokenizer_error,
    needed_file,
    no_tokenizer_error,
)
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.hub import model_folder
from rapidformer_templates.system.files import hash_of


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
        raise ModelError(
            "the tokenizer has no end token", where="--tokenizer-type", hint="use a tokenizer that has one"
        )
    assert isinstance(token, int)
    return token


def _read(kind: type[PreTrainedTokenizerFast], file: Path, **arguments: object) -> PreTrainedTokenizerFast:
    try:
        return kind(**arguments)
    # The tokenizers library raises bare Exception for a file in a wrong format.
    except Exception as error:
        raise ModelError(
            f"the tokenizer cannot be read: {error}", where=str(file), hint="check the file's format"
        ) from error


def _from_folder(config: RunConfig) -> PreTrainedTokenizerFast:
    flag = "tokenizer_path" if config.data.tokenizer_path else "pretrained_model_name_or_path"
    path = config.data.tokenizer_path or config.model.pretrained_model_name_or_path
    if path is None:
        raise no_tokenizer_error()
    from transformers import AutoTokenizer  # imports torch, which takes seconds

    code, revision = config.model.trust_remote_code, None if config.data.tokenizer_path else config.model.revision
    folder = model_folder(path, revision, "tokenizer", flag=spelling(flag), code=code)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=code)
    except Exception as error:  # transformers raises many kinds of errors, and tokenizers a bare Exception
        raise missing_tokenizer_error(path, flag) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        hint = "convert it with transformers and save it as tokenizer.json"
        raise ModelError(f"the tokenizer in {path} has no fast form", where=spelling(flag), hint=hint)
    return tokenizer
