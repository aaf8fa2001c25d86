"""Models: from a pretrained folder, or from scratch by architecture and sizes. Nothing is downloaded."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from rapidformer_templates.config import RunConfig, spelling
from rapidformer_templates.data.tokenizers import load_tokenizer, padded_vocab_size, vocabulary_size
from rapidformer_templates.errors import ModelError

SIZE_FLAGS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
}
"""Flags that set a size, with transformers' common name of it (a config's ``attribute_map`` has its own)."""

DECODER_TWINS = {
    "num_layers": ("num_decoder_layers", "decoder_layers"),
    "num_attention_heads": ("decoder_attention_heads",),
}
"""Sizes of the decoder that follow the encoder's in encoder-decoder architectures."""

FEED_FORWARD = (
    "intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim",
    "moe_intermediate_size", "shared_expert_intermediate_size",
)  # fmt: skip
"""Names under which architectures keep the width of their feed-forward layers."""

OFFSET_POSITIONS = {
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "longformer",
    "xmod", "mpnet", "luke",
}  # fmt: skip
"""Architectures that count positions from ``pad_token_id + 1``, so that the first rows of the table are never used."""

SEQUENCE_CLASSIFICATION = "AutoModelForSequenceClassification"

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def objective_of(model_type: str) -> str:
    """The pretraining objective of an architecture: ``masked``, ``causal`` or ``seq2seq``.

    Encoder-decoders are ``seq2seq``; an encoder that transformers can also run as a decoder
    (bert, roberta …) is ``masked``.
    """
    if model_type in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return "seq2seq"
    return "masked" if model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES else "causal"


def model_type_of(config: RunConfig) -> str:
    """The architecture of the run: of the pretrained folder, or ``--model-type``."""
    if config.model.pretrained_model_name_or_path:
        return _pretrained_config(config).model_type
    if config.model.model_type is None:
        raise _no_model()
    return config.model.model_type


def _no_model() -> ModelError:
    hint = "give --pretrained-model-name-or-path FOLDER, or --model-type and sizes to start from scratch"
    return ModelError("no model is named", where="--pretrained-model-name-or-path", hint=hint)


def positions_of(model_config: PreTrainedConfig) -> int | None:
    """The longest sequence that the model can take, tokens; None where positions are relative without a limit."""
    positions = getattr(model_config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    return positions - _position_offset(model_config.model_type, model_config.pad_token_id)


def _position_offset(model_type: str, pad_token_id: int | None) -> int:
    return (pad_token_id or 0) + 1 if model_type in OFFSET_POSITIONS else 0


def check_seq_length(config: RunConfig, model_config: PreTrainedConfig) -> None:
    """Raise a :class:`ModelError` when ``--seq-length`` is more than the model's positions."""
    asked, positions = config.model.seq_length, positions_of(model_config)
    if asked is not None and positions is not None and asked > positions:
        hint = f"use --seq-length {positions} or less"
        if config.model.model_type:
            hint += f", or --max-position-embeddings {asked}"
        raise ModelError(
            f"sequences of {asked} tokens do not fit the model's {positions} positions", where="--seq-length", hint=hint
        )


def seq_length_of(config: RunConfig, model_config: PreTrainedConfig) -> int:
    """``--seq-length``, else the model's positions, else 512 (relative positions: T5's own pretraining length)."""
    check_seq_length(config, model_config)
    return config.model.seq_length or positions_of(model_config) or 512


def build_config(
    config: RunConfig, auto_class: str, tokenizer: PreTrainedTokenizerFast | None = None, **overrides: Any
) -> PreTrainedConfig:
    """The configuration of the model that :func:`build_model` makes, for training (without a cache).

    Raises:
        ModelError: no model is named, the folder or the architecture is not there, it has no head
            for ``auto_class``, or a size flag does not fit it.
    """
    if config.model.pretrained_model_name_or_path:
        model_config = _pretrained_config(config)
        if config.model.dropout is not None:
            overrides = {**_dropout_rates(model_config, config.model.dropout), **overrides}
    elif config.model.model_type:
        model_config = _scratch_config(config, auto_class, tokenizer or load_tokenizer(config))
    else:
        raise _no_model()
    _check_head(model_config, auto_class)
    if auto_class == "AutoModelForCausalLM" and objective_of(model_config.model_type) == "masked":
        overrides["is_decoder"] = True  # without it an encoder would look at the tokens that it is to predict
    if auto_class == SEQUENCE_CLASSIFICATION and model_config.pad_token_id is None:
        # A decoder classifies at the last token before the padding.
        overrides["pad_token_id"] = (tokenizer or load_tokenizer(config)).pad_token_id
    model_config.use_cache = False
    for name, value in overrides.items():
        setattr(model_config, name, value)
    check_seq_length(config, model_config)
    return model_config


def build_model(
    config: RunConfig, auto_class: str, tokenizer: PreTrainedTokenizerFast | None = None, **overrides: Any
) -> PreTrainedModel:
    """The model that the flags ask for, in float32 on the CPU.

    Args:
        config: the run; ``--pretrained-model-name-or-path`` or ``--model-type`` chooses the model.
        auto_class: transformers' class for the task, such as ``AutoModelForCausalLM``.
        tokenizer: gives the vocabulary size and the special tokens; the run's own by default.
        overrides: attributes of the model's configuration, such as ``num_labels``.

    From scratch, sizes that are not given are those of the architecture's default; feed-forward
    layers keep its ratio to the hidden size, in multiples of 8 (four for gpt2, bert and t5); the
    vocabulary is padded to a multiple of 128; without ``--max-position-embeddings`` the positions
    reach ``--seq-length``. The caller seeds torch.

    Raises:
        ModelError: see :func:`build_config`; or the folder has no weights, weights of other
            shapes, or fewer tokens than the tokenizer.
    """
    model_config = build_config(config, auto_class, tokenizer, **overrides)
    tokenizer = tokenizer or load_tokenizer(config)
    factory = getattr(transformers, auto_class)
    path = config.model.pretrained_model_name_or_path
    if path:
        model = _load_weights(factory, path, model_config, config.model.trust_remote_code)
    else:
        try:
            model = factory.from_config(model_config).float()
        except (ValueError, RuntimeError, TypeError, AttributeError) as error:
            hint = "check the sizes against the architecture's own"
            raise ModelError(
                f"a {model_config.model_type} of these sizes cannot be built: {error}", where="--model-type", hint=hint
            ) from error
    if getattr(model, "loss_type", "") is None and auto_class == "AutoModelForCausalLM":
        # Transformers reads the loss off the class's name, which says nothing in GPT2LMHeadModel: it warns
        # at every start that it takes this one.
        model.loss_type = "ForCausalLM"
    embeddings: Any = model.get_input_embeddings()
    size = vocabulary_size(tokenizer)
    if size > embeddings.num_embeddings:
        message = f"the tokenizer has {size} tokens, the model only {embeddings.num_embeddings}"
        raise ModelError(message, where=path, hint="use the model's own tokenizer")
    return model


def _pretrained_config(config: RunConfig) -> PreTrainedConfig:
    flags = config.model
    path = str(flags.pretrained_model_name_or_path)
    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelError(
            f"there is no config.json in {path}", where=_PRETRAINED, hint="name the folder that holds the model"
        )
    try:
        found = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=flags.trust_remote_code)
    except (OSError, ValueError) as error:
        if folder.is_dir():
            hint = (
                "run the folder's own code with --trust-remote-code"
                if "trust_remote_code" in str(error)
                else "check its config.json"
            )
            raise ModelError(
                f"the configuration in {path} cannot be used: {_first_line(error)}", where=_PRETRAINED, hint=hint
            ) from error
        hint = "name a local folder; nothing is downloaded" + _nearest_sibling(folder)
        raise ModelError(
            f"the model '{path}' is neither a folder nor in the local cache", where=_PRETRAINED, hint=hint
        ) from error
    _check_pretrained_sizes(config, found)
    return found


_PRETRAINED = "--pretrained-model-name-or-path"


def _check_pretrained_sizes(config: RunConfig, found: PreTrainedConfig) -> None:
    """A size flag beside a pretrained model must say what the model is: it cannot change it."""
    sizes = {"model_type": "model_type", **SIZE_FLAGS}
    for flag, attribute in sizes.items():
        asked, there = getattr(config.model, flag), getattr(found, attribute, None)
        if flag == "max_position_embeddings":
            there = positions_of(found)
        if asked is not None and asked != there:
            message = f"the pretrained model's {attribute} is {there}, not {asked}"
            hint = f"leave out {spelling(flag)}, or leave out {_PRETRAINED} to start from scratch"
            raise ModelError(message, where=spelling(flag), hint=hint)


def _scratch_config(config: RunConfig, auto_class: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    flags = config.model
    name = str(flags.model_type)
    if name not in CONFIG_MAPPING:
        near = difflib.get_close_matches(name.lower(), list(CONFIG_MAPPING.keys()), n=3, cutoff=0.4)
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else "name an architecture of transformers, such as gpt2, bert or t5"
        )
        raise ModelError(f"transformers knows no architecture '{name}'", where="--model-type", hint=hint)
    kind = CONFIG_MAPPING[name]
    default = kind()
    _check_head(default, auto_class)
    own = dict(kind.attribute_map)
    values: dict[str, Any] = {}
    for flag, attribute in SIZE_FLAGS.items():
        asked = getattr(flags, flag)
        if asked is None:
            continue
        if not hasattr(default, attribute):
            hint = f"leave out {spelling(flag)}"
            raise ModelError(f"{name} has no {attribute}", where=spelling(flag), hint=hint)
        values[own.get(attribute, attribute)] = asked
        values |= {twin: asked for twin in DECODER_TWINS.get(flag, ()) if hasattr(default, twin)}
    values |= _derived_sizes(default, config)
    values["vocab_size"] = padded_vocab_size(vocabulary_size(tokenizer))
    values |= _special_tokens(default, tokenizer, auto_class)
    if hasattr(default, "max_position_embeddings"):
        values[own.get("max_position_embeddings", "max_position_embeddings")] = _positions(default, config, tokenizer)
    if flags.dropout is not None:
        values |= _dropout_rates(default, flags.dropout)
    try:
        return kind(**values)
    except Exception as error:  # transformers' checks of a configuration raise many kinds
        hint = "check the sizes against the architecture's own"
        raise ModelError(
            f"a {name} of these sizes cannot be built: {error}", where="--model-type", hint=hint
        ) from error


def _derived_sizes(default: PreTrainedConfig, config: RunConfig) -> dict[str, int]:
    """Feed-forward width, head size and key-value heads that follow from the flags."""
    hidden_default: int = default.hidden_size
    hidden: int = config.model.hidden_size or hidden_default
    heads = config.model.num_attention_heads or int(getattr(default, "num_attention_heads", None) or 1)
    if hidden % heads:
        hint = f"choose heads that divide {hidden}"
        raise ModelError(
            f"{heads} attention heads do not divide the hidden size {hidden}", where="--num-attention-heads", hint=hint
        )
    values: dict[str, int] = {}
    if hidden != hidden_default:
        widths = {name: getattr(default, name, None) for name in FEED_FORWARD}
        values = {
            name: max(8, round(w * hidden / hidden_default / 8) * 8) for name, w in widths.items() if isinstance(w, int)
        }
    if isinstance(getattr(default, "head_dim", None), int):
        values[default.attribute_map.get("head_dim", "head_dim")] = hidden // heads
    shared = getattr(default, "num_key_value_heads", None)
    if isinstance(shared, int) and (heads % shared or shared == default.num_attention_heads):
        values["num_key_value_heads"] = heads
    return values


def _positions(default: PreTrainedConfig, config: RunConfig, tokenizer: PreTrainedTokenizerFast) -> int:
    offset = _position_offset(default.model_type, tokenizer.pad_token_id)
    asked = config.model.max_position_embeddings
    if asked is not None:
        return asked + offset
    return max(default.max_position_embeddings, (config.model.seq_length or 0) + offset)


def _special_tokens(default: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, auto_class: str) -> dict[str, Any]:
    tokens = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.cls_token_id,
        "eos_token_id": tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id,
    }
    needs_padding = default.pad_token_id is not None or auto_class == SEQUENCE_CLASSIFICATION
    if tokens["pad_token_id"] == tokens["eos_token_id"] and not needs_padding:
        tokens["pad_token_id"] = None  # it would freeze the embedding of the end token
    if default.is_encoder_decoder:
        # A decoder starts from the padding token in T5 and from the end token in BART.
        started = getattr(default, "decoder_start_token_id", None)
        tokens["decoder_start_token_id"] = tokens["pad_token_id"] if started is None else tokens["eos_token_id"]
        if hasattr(default, "forced_eos_token_id"):
            tokens["forced_eos_token_id"] = tokens["eos_token_id"]
    return tokens


def _dropout_rates(default: PreTrainedConfig, rate: float) -> dict[str, float]:
    """Every dropout rate of a configuration set to ``rate``; those that are None follow another one."""
    names = [n for n, v in default.to_dict().items() if "drop" in n and "layerdrop" not in n and isinstance(v, float)]
    if not names and rate > 0:
        raise ModelError(f"{default.model_type} has no dropout", where="--dropout", hint="leave out --dropout")
    if rate >= 1:
        raise ModelError(
            f"a dropout rate of {rate:g} drops everything", where="--dropout", hint="choose a rate below 1"
        )
    return dict.fromkeys(names, rate)


def _check_head(model_config: PreTrainedConfig, auto_class: str) -> None:
    mapping = getattr(transformers, auto_class)._model_mapping
    if type(model_config) in mapping or hasattr(model_config, "auto_map"):
        return
    hint = "use an architecture such as " + {"AutoModelForMaskedLM": "bert", "AutoModelForSeq2SeqLM": "t5"}.get(
        auto_class, "gpt2"
    )
    raise ModelError(f"transformers has no {auto_class} for {model_config.model_type}", where="--task", hint=hint)


def _load_weights(factory: Any, path: str, model_config: PreTrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    folder = Path(path)
    if folder.is_dir() and not any(file for pattern in WEIGHT_FILES for file in folder.glob(pattern)):
        there = ", ".join(sorted(p.name for p in folder.iterdir())[:20])
        raise ModelError(
            f"there are no weights in {path}", where=_PRETRAINED, hint=f"it needs model.safetensors; it holds: {there}"
        )
    try:
        with _quiet_loading():
            model, info = factory.from_pretrained(
                path,
                config=model_config,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                ignore_mismatched_sizes=True,  # they are named below, all at once
                output_loading_info=True,
            )
    except Exception as error:  # a damaged file: safetensors, torch and transformers each raise their own kind
        raise ModelError(
            f"the weights in {path} cannot be read: {_first_line(error)}",
            where=_PRETRAINED,
            hint="fetch the folder anew",
        ) from error
    for name, there, needed in sorted(info["mismatched_keys"]):
        message = f"the weight {name} is of shape {tuple(there)} in {path} and {tuple(needed)} in the model"
        raise ModelError(
            message,
            where=_PRETRAINED,
            hint="the head was trained for other labels or sizes; take it out, or start from the base model",
        )
    missing = sorted(info["missing_keys"])
    body = [name for name in missing if name.startswith(f"{model.base_model_prefix}.") and "pooler" not in name]
    if len(missing) == len(model.state_dict()):
        raise ModelError(
            f"no weight in {path} belongs to a {type(model).__name__}",
            where=_PRETRAINED,
            hint="check the folder's config.json",
        )
    if body:  # a new head is what fine-tuning is about; a hole in the body is damage
        message = f"{len(body)} weights are missing in {path}, such as {body[0]}"
        raise ModelError(message, where=_PRETRAINED, hint="fetch the folder anew")
    return model


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Without transformers' bars and load report, which every worker would print over the others."""
    logger = logging.getLogger("transformers")
    level, bars = logger.level, transformers_logging.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _nearest_sibling(folder: Path) -> str:
    names = [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else []
    near = difflib.get_close_matches(folder.name, names, n=1, cutoff=0.5)
    return f"; did you mean {folder.parent / near[0]}?" if near else ""


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
