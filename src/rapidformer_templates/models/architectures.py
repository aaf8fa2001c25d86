"""Transformers architectures: their capabilities, and configurations from scratch with given sizes.

Rotary embeddings whose frequencies depend on the longest row of a forward (LongRoPE, dynamic NTK scaling) are made
independent of it. transformers chooses the frequencies for each forward again (``dynamic_rope_update``), and dynamic
scaling also remembers the longest row so far. The loss of a row would depend on the other rows of its micro batch. So
they are chosen once, by the length of the run's rows, as vLLM chooses them by its ``max_model_len``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

import torch
import transformers
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rapidformer_templates.errors import ModelError, did_you_mean
from rapidformer_templates.models.blocks import WrappedForward
from rapidformer_templates.models.model_files import OWN_EXPERTS, padded_vocab_size, vocabulary_size
from rapidformer_templates.planning.config import RunConfig, spelling
from rapidformer_templates.planning.tasks import TASKS, tasks_with

SIZE_FLAGS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
}
"""Flags that set a size, with the common transformers name. A config's ``attribute_map`` has its own name."""

DECODER_TWINS = {
    "num_layers": ("num_decoder_layers", "decoder_layers"),
    "num_attention_heads": ("decoder_attention_heads",),
}
"""Sizes of the decoder that follow the encoder's in encoder-decoder architectures."""

FEED_FORWARD = (
    "intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim",
    "moe_intermediate_size", "shared_expert_intermediate_size",
)  # fmt: skip
"""Names of the feed-forward width in different architectures."""

EXPERT_SIZES = {
    "num_experts": ("num_local_experts", "num_experts"),
    "moe_top_k": ("num_experts_per_tok",),
    "moe_ffn_hidden_size": ("moe_intermediate_size", "intermediate_size"),
}
"""Flags for the sizes of a mixture of experts, with the names of these sizes in architectures that have experts."""

OFFSET_POSITIONS = {
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "longformer",
    "xmod", "mpnet", "luke",
}  # fmt: skip
"""Architectures whose positions start at ``pad_token_id + 1``, so that the first rows of the table are never used."""

PairLabel = Literal["next_sentence_label", "sentence_order_label"]
"""Names of the labels that heads for sentence-pair pretraining take."""

SEQUENCE_CLASSIFICATION = "AutoModelForSequenceClassification"
CLASSIFICATION = tuple(
    f"AutoModel{end}"
    for name in tasks_with(lambda task: "new_head" in task.own_flags)
    for end in TASKS[name].model_classes
)
"""Auto classes whose heads have one name, ``classifier`` for instance, and different sizes."""


def objective_of(model_type: str) -> str:
    """Return the pretraining objective of an architecture: ``masked``, ``causal`` or ``seq2seq``.

    Encoder-decoders are ``seq2seq``. An encoder that transformers can also run as a decoder (bert, roberta …) is
    ``masked``.
    """
    if model_type in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return "seq2seq"
    return "masked" if model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES else "causal"


def pair_label_of(model_type: str) -> PairLabel:
    """Return the name of the sentence-pair label that an architecture's pretraining head takes.

    Returns:
        ``next_sentence_label`` (bert, ernie, mobilebert …) or ``sentence_order_label`` (albert).

    Raises:
        ModelError: it has no such head, or it takes no padding mask, although pairs differ in length.
    """
    head = modeling_auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES.get(model_type)
    inputs = inspect.signature(getattr(transformers, head).forward).parameters if isinstance(head, str) else {}
    label: PairLabel | None = next((name for name in get_args(PairLabel) if name in inputs), None)
    hint = "use an architecture such as bert or albert, or train on windows instead of pairs"
    if label is None:
        message = f"{model_type} has no head that predicts whether two texts belong together"
        raise ModelError(message, where="--model-type", hint=hint)
    if "attention_mask" not in inputs:
        message = f"{model_type} does not take a padding mask, but sentence pairs differ in length"
        raise ModelError(message, where="--model-type", hint=hint)
    return label


def positions_of(model_config: PreTrainedConfig) -> int | None:
    """Return the maximum sequence length in tokens, or None for relative positions without a limit."""
    positions = getattr(model_config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    return positions - _position_offset(model_config.model_type, model_config.pad_token_id)


def _position_offset(model_type: str, pad_token_id: int | None) -> int:
    return (pad_token_id or 0) + 1 if model_type in OFFSET_POSITIONS else 0


def check_head(model_config: PreTrainedConfig, auto_class: str) -> None:
    """Raise a :class:`ModelError` if transformers has no model of this class for the architecture."""
    mapping = getattr(transformers, auto_class)._model_mapping
    if type(model_config) in mapping or hasattr(model_config, "auto_map"):
        return
    usual = {"AutoModelForMaskedLM": "bert", "AutoModelForSeq2SeqLM": "t5"}.get(auto_class, "gpt2")
    hint = f"use an architecture such as {usual}"
    raise ModelError(f"transformers has no {auto_class} for {model_config.model_type}", where="--task", hint=hint)


def has_head_of(pretrained: PreTrainedConfig, *auto_classes: str) -> bool:
    """Return whether a pretrained model was saved with a head of one of these classes."""
    endings = tuple(name.removeprefix("AutoModel") for name in auto_classes)
    return any(name.endswith(endings) for name in pretrained.architectures or ())


def scratch_config(config: RunConfig, auto_class: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    """Return the configuration of ``--model-type`` with the sizes from the flags.

    Raises:
        ModelError: the architecture is unknown or has no head for ``auto_class``, or the sizes do not fit.
    """
    flags = config.model
    name = str(flags.model_type)
    if name not in CONFIG_MAPPING:
        near = did_you_mean(name.lower(), CONFIG_MAPPING.keys(), limit=3, cutoff=0.4)
        hint = near or "name an architecture of transformers, such as gpt2, bert or t5"
        raise ModelError(f"transformers has no architecture '{name}'", where="--model-type", hint=hint)
    kind = CONFIG_MAPPING[name]
    default = kind()
    check_head(default, auto_class)
    attributes = dict(kind.attribute_map)
    values: dict[str, Any] = {}
    for flag, attribute in SIZE_FLAGS.items():
        value = getattr(flags, flag)
        if value is None:
            continue
        if not hasattr(default, attribute):
            hint = f"leave out {spelling(flag)}"
            raise ModelError(f"{name} has no {attribute}", where=spelling(flag), hint=hint)
        values[attributes.get(attribute, attribute)] = value
        values |= {twin: value for twin in DECODER_TWINS.get(flag, ()) if hasattr(default, twin)}
    values |= _derived_sizes(default, config)
    if name in OWN_EXPERTS:
        values |= _expert_sizes(default, config)
    values["vocab_size"] = padded_vocab_size(vocabulary_size(tokenizer))
    values |= _special_tokens(default, tokenizer, auto_class)
    if hasattr(default, "max_position_embeddings"):
        attribute = attributes.get("max_position_embeddings", "max_position_embeddings")
        values[attribute] = _positions(default, config, tokenizer)
    if flags.dropout is not None:
        values |= dropout_rates(default, flags.dropout)
    try:
        return kind(**values)
    except Exception as error:  # transformers' checks of a configuration raise many kinds of errors
        hint = "check the sizes against the architecture's own"
        message = f"a {name} of these sizes cannot be built: {error}"
        raise ModelError(message, where="--model-type", hint=hint) from error


def _derived_sizes(default: PreTrainedConfig, config: RunConfig) -> dict[str, int]:
    """Return the feed-forward width, head size and number of key-value heads that follow from the flags."""
    hidden_default: int = default.hidden_size
    hidden: int = config.model.hidden_size or hidden_default
    heads = config.model.num_attention_heads or int(getattr(default, "num_attention_heads", None) or 1)
    if hidden % heads:
        hint = f"choose heads that divide {hidden}"
        message = f"{heads} attention heads do not divide the hidden size {hidden}"
        raise ModelError(message, where="--num-attention-heads", hint=hint)
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


def _expert_sizes(default: PreTrainedConfig, config: RunConfig) -> dict[str, int]:
    """Return the expert sizes from the flags.

    Each token uses the default number of experts, or all of them if there are fewer.
    """
    options = config.switches.get("mixture-of-experts")  # None if only a model is described
    sizes = {flag: getattr(options, flag, None) for flag in EXPERT_SIZES}
    fields = default.to_dict()
    names = {flag: next((name for name in EXPERT_SIZES[flag] if name in fields), "") for flag in EXPERT_SIZES}
    experts, visited = sizes["num_experts"], fields.get(names["moe_top_k"])
    if experts and isinstance(visited, int) and visited > experts:
        sizes["moe_top_k"] = sizes["moe_top_k"] or experts
    return {names[flag]: value for flag, value in sizes.items() if value}


def _positions(default: PreTrainedConfig, config: RunConfig, tokenizer: PreTrainedTokenizerFast) -> int:
    offset = _position_offset(default.model_type, tokenizer.pad_token_id)
    requested = config.model.max_position_embeddings
    if requested is not None:
        return requested + offset
    return max(default.max_position_embeddings, (config.model.seq_length or 0) + offset)


def _special_tokens(
    default: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, auto_class: str
) -> dict[str, int | None]:
    tokens = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.cls_token_id,
        "eos_token_id": tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id,
    }
    needs_padding = getattr(default, "pad_token_id", None) is not None or auto_class == SEQUENCE_CLASSIFICATION
    if tokens["pad_token_id"] == tokens["eos_token_id"] and not needs_padding:
        tokens["pad_token_id"] = None  # a padding token would freeze the embedding of the end token
    if default.is_encoder_decoder:
        # A decoder starts from the padding token in T5 and from the end token in BART.
        started = getattr(default, "decoder_start_token_id", None)
        tokens["decoder_start_token_id"] = tokens["pad_token_id"] if started is None else tokens["eos_token_id"]
        if hasattr(default, "forced_eos_token_id"):
            tokens["forced_eos_token_id"] = tokens["eos_token_id"]
    return tokens


def dropout_rates(default: PreTrainedConfig, rate: float) -> dict[str, float]:
    """Return every dropout rate of a configuration set to ``rate``. Rates that are None follow another one."""
    rates = {name: value for name, value in default.to_dict().items() if "drop" in name and "layerdrop" not in name}
    # Some configuration files have an integer 0 as the rate.
    names = [n for n, v in rates.items() if isinstance(v, float) or (type(v) is int and v in (0, 1))]
    if not names and rate > 0:
        raise ModelError(f"{default.model_type} has no dropout", where="--dropout", hint="leave out --dropout")
    if rate >= 1:
        message = f"a dropout rate of {rate:g} drops everything"
        raise ModelError(message, where="--dropout", hint="choose a rate below 1")
    return dict.fromkeys(names, rate)


class _ForLength(WrappedForward):
    """The forward of a rotary embedding as if each batch had a row of ``length`` tokens.

    Rows of more than ``limit`` tokens have other frequencies.
    """

    def __init__(self, forward: Callable[..., object], length: int, limit: int) -> None:
        super().__init__(forward)
        self.length, self.limit = length, limit

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, *args: object, **kwargs: object) -> object:
        last = position_ids.new_full((*position_ids.shape[:-1], 1), self.length - 1)
        output = self.forward(x, torch.cat([position_ids, last], dim=-1), *args, **kwargs)
        return tree_map_only(torch.Tensor, lambda tensor: tensor[..., :-1, :], output)


def choose_frequencies(model: nn.Module, length: int | None) -> None:
    """Let the rotary embeddings of a model use the same frequencies for all rows. A second call changes nothing.

    Args:
        length: the longest row of the run, in tokens. None if it is unknown.

    Raises:
        ModelError: it is unknown, and the model accepts rows that have other frequencies.
    """
    parts: Iterator[Any] = model.modules()
    for part in parts:
        limit = _limit_of(part)
        if limit is None or isinstance(part.forward, _ForLength):
            continue
        positions = part.config.max_position_embeddings
        if length is None and positions > limit:
            raise ModelError(
                f"the rotary frequencies of {type(model).__name__} differ for rows of more than {limit:,} tokens, "
                "and the length of the rows is not given",
                where="--seq-length",
                hint=f"give the number of tokens of the longest row: {limit:,} or less, or more",
            )
        part.forward = _ForLength(part.forward, length or positions, limit)


def has_chosen_frequencies(model: nn.Module) -> bool:
    """Return whether a module of the model was changed by :func:`choose_frequencies`."""
    return any(isinstance(part.forward, _ForLength) for part in model.modules())


def notes_about_frequencies(model: nn.Module) -> list[str]:
    """Return a note if all rows have the frequencies of long rows, although the model has others for short ones."""
    forwards = {part.forward for part in model.modules() if isinstance(part.forward, _ForLength)}
    return [
        f"with --seq-length {length}, all rows have the rotary frequencies of rows above {limit} tokens. transformers "
        "alone would use those of short rows for a batch without a longer row"
        for length, limit in {(forward.length, forward.limit) for forward in forwards}
        if length > limit
    ]


def _limit_of(part: Any) -> int | None:
    """Return the number of tokens above which a module has other frequencies. None if it always has the same."""
    kinds, limits = getattr(part, "rope_type", None), []
    by_layer: Mapping[str | None, object] = kinds if isinstance(kinds, Mapping) else {None: kinds}
    for layer, kind in by_layer.items():
        if kind == "longrope":
            parameters = part.config.rope_parameters
            limits.append((parameters[layer] if layer else parameters)["original_max_position_embeddings"])
        elif "dynamic" in str(kind):
            limits.append(part.config.max_position_embeddings)
    return min(limits, default=None)
