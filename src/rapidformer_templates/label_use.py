"""How a model takes its labels, seen by trying it with a few tokens.

Most causal language models of transformers compare the logits at token ``t`` with label ``t + 1``; the decoders
of BART's family (and whisper's, trocr's …) compare them with label ``t``, and learn the identity from labels that
are the inputs. No name tells which: a label that changes the loss is compared with something, one that does not
is not.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rapidformer_templates.errors import ModelError

LENGTH = 4
"""Tokens of the row that a model is tried with."""

SAME = 1e-5
"""Relative difference of losses, and of logits, up to which it is rounding."""


@dataclass(frozen=True)
class LabelUse:
    """What a model does with ``labels`` of shape (samples, tokens).

    Attributes:
        model: its class.
        shifts: it compares the logits at token ``t`` with label ``t + 1``, so a sample's first label is none.
        sees_ahead: the logits at a token depend on later tokens, so that it cannot learn to predict them.
        takes_shifted: it takes labels that are shifted already, as ``shift_labels``.
        untried: why it could not be tried, in which case its name decides; empty if it could, or takes no such labels.
    """

    model: str
    shifts: bool = False
    sees_ahead: bool = False
    takes_shifted: bool = True
    untried: str = ""


def check_causal(use: LabelUse, where: str) -> None:
    """Raise a :class:`ModelError` when a model sees the tokens that it is to predict."""
    if use.sees_ahead:
        raise ModelError(
            f"{use.model} sees the tokens that it is to predict: its attention is not causal",
            where=where,
            hint="use a causal language model, such as gpt2, or train this one with --task masked_lm",
        )


def can_be_tried(model: nn.Module) -> bool:
    """Whether the weights are here: under ZeRO-3 they come together in the engine's forwards alone."""
    return not any(hasattr(parameter, "ds_id") or parameter.is_meta for parameter in model.parameters())


@torch.no_grad()
def label_use(model: nn.Module) -> LabelUse:
    """Try a model; afterwards it is as before. Workers that share a model's weights must all call it."""
    if not isinstance(model, PreTrainedModel) or not _takes_tokens(model):
        return LabelUse(type(model).__name__)
    with _in_evaluation(model):
        try:
            return _tried(model)
        except Exception as error:  # whatever a model of any kind makes of four tokens
            named = _named_like_one(model)
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            return LabelUse(type(model).__name__, shifts=named, untried=reason if named else "")


def _takes_tokens(model: PreTrainedModel) -> bool:
    return {"input_ids", "labels"} <= set(inspect.signature(model.forward).parameters)


def _named_like_one(model: nn.Module) -> bool:
    """Whether transformers calls it a causal language model."""
    name = next((c.__name__ for c in type(model).__mro__ if c.__module__.startswith("transformers.models")), "")
    return name.endswith(("ForCausalLM", "LMHeadModel", "DoubleHeadsModel"))


def _tried(model: PreTrainedModel) -> LabelUse:
    embeddings: Any = model.get_input_embeddings()
    size = int(embeddings.num_embeddings)
    device = embeddings.weight.device
    # Not the special tokens, which stand at the beginning of most vocabularies.
    ids = torch.arange(size // 2, size // 2 + LENGTH, device=device)[None] % size
    others = (ids + LENGTH) % size
    begins = torch.cat([others[:, :1], ids[:, 1:]], dim=1)
    ends = torch.cat([ids[:, :-1], others[:, -1:]], dim=1)
    output = model(input_ids=ids, labels=ids)
    first_counts = _differ(output.loss, model(input_ids=ids, labels=begins).loss)
    last_counts = _differ(output.loss, model(input_ids=ids, labels=ends).loss)
    if not last_counts:  # a loss of its own kind, to which this question does not apply
        return LabelUse(type(model).__name__)
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        return LabelUse(type(model).__name__, shifts=not first_counts)
    ahead = model(input_ids=ends, labels=ids).logits
    return LabelUse(
        type(model).__name__,
        shifts=not first_counts,
        sees_ahead=_differ(output.logits[:, :-1], ahead[:, :-1]),
        takes_shifted=_takes_shifted(model, ids, others, output.loss),
    )


def _takes_shifted(model: PreTrainedModel, ids: torch.Tensor, others: torch.Tensor, without: torch.Tensor) -> bool:
    try:
        return _differ(without, model(input_ids=ids, labels=ids, shift_labels=others).loss)
    except TypeError:  # its forward has no such argument
        return False


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    scale = one.abs().max().clamp(min=1e-12)
    return bool((one - other).abs().max() > SAME * scale)


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Without dropout; the random state and each module's mode are put back."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
