"""How a model takes its labels, seen by trying it with a few tokens.

Most causal language models of transformers compare the logits at token ``t`` with label ``t + 1``; the decoders
of BART's family (and whisper's, trocr's …) compare them with label ``t``, and learn the identity from labels that
are the inputs. No name tells which: a label that changes the loss is compared with something, one that does not
is not.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rapidformer_templates.errors import ModelError
from rapidformer_templates.system import accelerator

LENGTH = 4
"""Tokens of the row that a model is tried with."""

TRIES = 3
"""Other labels that are tried at a place: two labels may well be about as likely, and three hardly."""

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
    reader = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    if reader is None or not _takes_tokens(model):
        return LabelUse(type(model).__name__)
    with in_evaluation(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a head for other labels makes of them is not used
        try:
            return _tried(model, reader)
        except Exception as error:  # whatever a model of any kind makes of four tokens
            named = _named_like_one(model)
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            return LabelUse(type(model).__name__, shifts=named, untried=reason if named else "")


def _takes_tokens(model: nn.Module) -> bool:
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return "input_ids" in parameters and ("labels" in parameters or takes_any)


def _named_like_one(model: nn.Module) -> bool:
    """Whether transformers calls it a causal language model."""
    name = next((c.__name__ for c in type(model).__mro__ if c.__module__.startswith("transformers.models")), "")
    return name.endswith(("ForCausalLM", "LMHeadModel", "DoubleHeadsModel"))


def _tried(model: nn.Module, reader: PreTrainedModel) -> LabelUse:
    """Try ``model``, which is ``reader`` or a module of the user's own around it."""
    embeddings: Any = reader.get_input_embeddings()
    words = getattr(reader.config, "vocab_size", None)  # fewer where prompts have embeddings too (cpmant)
    size = min(int(embeddings.num_embeddings), words or sys.maxsize)
    # Not the special tokens, which stand at the beginning of most vocabularies.
    ids = torch.arange(size // 2, size // 2 + LENGTH, device=embeddings.weight.device)[None] % size
    others = [(ids + LENGTH * i) % size for i in range(1, TRIES + 1)]
    output = model(input_ids=ids, labels=ids)
    loss = _loss_in(output)

    def counts(position: int) -> bool:
        """Whether the label at a place is compared with something."""
        for other in others:
            labels = ids.clone()
            labels[:, position] = other[:, position]
            if _differ(loss, _loss_in(model(input_ids=ids, labels=labels))):
                return True
        return False

    if not counts(LENGTH - 1):  # a loss of its own kind, to which this question does not apply
        return LabelUse(type(model).__name__)
    shifts = not counts(0)
    if "decoder_input_ids" in inspect.signature(reader.forward).parameters:
        return LabelUse(type(model).__name__, shifts=shifts)
    sees_ahead = False
    if hasattr(output, "logits"):
        ends = torch.cat([ids[:, :-1], others[0][:, -1:]], dim=1)
        sees_ahead = _differ(output.logits[:, :-1], model(input_ids=ends, labels=ids).logits[:, :-1])
    return LabelUse(
        type(model).__name__,
        shifts=shifts,
        sees_ahead=sees_ahead,
        takes_shifted=_takes_shifted(model, ids, others[0], loss),
    )


def _loss_in(output: Any) -> torch.Tensor:
    """The loss that a model puts out, alone or among other things."""
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output["loss"]
    return loss


def _takes_shifted(model: nn.Module, ids: torch.Tensor, others: torch.Tensor, without: torch.Tensor) -> bool:
    try:
        return _differ(without, _loss_in(model(input_ids=ids, labels=ids, shift_labels=others)))
    except TypeError:  # its forward has no such argument
        return False


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    scale = one.abs().max().clamp(min=1e-12)
    return bool((one - other).abs().max() > SAME * scale)


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Without dropout; the random state and each module's mode are put back."""
    modes = [(module, module.training) for module in model.modules()]
    with accelerator.without_random_trace(model.parameters()):
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
