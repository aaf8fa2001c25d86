"""How a model uses its labels, which is found by running it on a few tokens, and the smoothing of its labels.

Most causal language models of transformers compare the logits at token ``t`` with label ``t + 1``. The decoders of
BART's family (and of whisper, trocr …) compare them with label ``t``. If the labels equal the inputs, they learn the
identity. Names do not show which is the case. So single labels are changed: a label that changes the loss is compared
with something, and a label that does not is unused.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only
from transformers import PreTrainedModel

from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.blocks import WrappedForward, first_blocks_only, in_eval_mode
from rapidformer_templates.system import accelerator

LENGTH = 4
"""Number of tokens in the row that a model is tried with."""

TRIES = 3
"""Number of other labels tried at a position. Two labels may be equally likely by chance, three hardly ever."""

SAME = 1e-5
"""Relative difference of losses and logits that counts as rounding."""

PADDED = 1e-3
"""The same for rows of different lengths, which are computed in another order."""


@dataclass(frozen=True)
class LabelUse:
    """How a model uses ``labels`` of shape (samples, tokens).

    Attributes:
        model: name of its class.
        shifts: the model compares the logits at token ``t`` with label ``t + 1``, so the first label is unused.
        sees_ahead: the logits at a token depend on later tokens, so the model cannot learn to predict them.
        sees_padding: the logits at a token depend on the padding behind it, and so on the longest row of a batch.
        takes_shifted: the model accepts labels that are already shifted, as ``shift_labels``.
        untried: why the model could not be tried, in which case its name decides. Empty if it could be tried, or if it
            takes no such labels.
    """

    model: str
    shifts: bool = False
    sees_ahead: bool = False
    sees_padding: bool = False
    takes_shifted: bool = True
    untried: str = ""


def check_causal(use: LabelUse, where: str) -> None:
    """Raise a :class:`ModelError` if a model sees the tokens that it must predict."""
    if use.sees_ahead:
        message = f"{use.model} sees the tokens that it must predict: its attention is not causal"
        hint = "use a causal language model, such as gpt2, or train this one with --task masked_lm"
        raise ModelError(message, where=where, hint=hint)


def can_be_tried(model: nn.Module) -> bool:
    """Return whether the model has weights. A plan is made with a model that has none."""
    return not any(parameter.is_meta for parameter in model.parameters())


@torch.no_grad()
def label_use(model: nn.Module) -> LabelUse:
    """Try a model without changing it. All workers that share its weights must call it."""
    reader = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if reader is None or "input_ids" not in parameters or not ("labels" in parameters or takes_any):
        return LabelUse(type(model).__name__)
    with in_evaluation(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about labels that do not fit the head do not matter here
        try:
            # Some models cannot do without a block.
            with suppress(Exception), first_blocks_only(model), outputs_kept(reader):
                return _tried(model, reader)
            return _tried(model, reader)
        except Exception as error:  # any model can fail in its own way on four tokens
            name = next((c.__name__ for c in type(model).__mro__ if c.__module__.startswith("transformers.models")), "")
            named = name.endswith(("ForCausalLM", "LMHeadModel", "DoubleHeadsModel"))
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            return LabelUse(type(model).__name__, shifts=named, untried=reason if named else "")


def _tried(model: nn.Module, reader: PreTrainedModel) -> LabelUse:
    """Try ``model``, which is ``reader`` or a user's module around it."""
    embeddings: Any = reader.get_input_embeddings()
    words = getattr(reader.config, "vocab_size", None)  # smaller if prompts have embeddings, too (cpmant)
    size = min(int(embeddings.num_embeddings), words or sys.maxsize)
    # Avoid the special tokens, which are at the beginning of most vocabularies.
    ids = torch.arange(size // 2, size // 2 + LENGTH, device=embeddings.weight.device)[None] % size
    other_rows = [(ids + LENGTH * i) % size for i in range(1, TRIES + 1)]
    output = model(input_ids=ids, labels=ids)
    loss = _loss_in(output)

    def counts(position: int) -> bool:
        """Return whether the label at a position affects the loss."""
        for other in other_rows:
            labels = ids.clone()
            labels[:, position] = other[:, position]
            if _differ(loss, _loss_in(model(input_ids=ids, labels=labels))):
                return True
        return False

    if not counts(LENGTH - 1):  # a different kind of loss, to which this question does not apply
        return LabelUse(type(model).__name__)
    shifts = not counts(0)
    if "decoder_input_ids" in inspect.signature(reader.forward).parameters:
        return LabelUse(type(model).__name__, shifts=shifts)
    sees_ahead = sees_padding = False
    if hasattr(output, "logits"):
        ends = torch.cat([ids[:, :-1], other_rows[0][:, -1:]], dim=1)
        sees_ahead = _differ(output.logits[:, :-1], model(input_ids=ends, labels=ids).logits[:, :-1])
        padded = torch.cat([ids, other_rows[0]], dim=1)
        mask = {"attention_mask": torch.cat([torch.ones_like(ids), torch.zeros_like(ids)], dim=1)}
        takes_mask = "attention_mask" in inspect.signature(reader.forward).parameters
        logits = model(input_ids=padded, labels=padded, **mask if takes_mask else {}).logits[:, :LENGTH]
        sees_padding = _differ(output.logits, logits, PADDED)
    try:
        shifted_loss = _loss_in(model(input_ids=ids, labels=ids, shift_labels=other_rows[0]))
        takes_shifted = _differ(loss, shifted_loss)
    except TypeError:  # its forward has no such argument
        takes_shifted = False
    return LabelUse(type(model).__name__, shifts, sees_ahead, sees_padding, takes_shifted)


@contextmanager
def outputs_kept(model: nn.Module) -> Iterator[None]:
    """Let each direct submodule return its earlier output inside the context if its inputs are equal.

    Forwards that differ in their labels alone then read only few parameters.
    """
    modules = [module for module in model.children() if "forward" not in vars(module)]
    try:
        for module in modules:
            module.forward = _Kept(module.forward)
        yield
    finally:
        for module in modules:
            del module.forward


class _Kept(WrappedForward):
    """A forward that computes equal inputs once."""

    def __init__(self, forward: Callable[..., object]) -> None:
        super().__init__(forward)
        self._calls: list[tuple[list[object], TreeSpec, object]] = []

    def __call__(self, *args: object, **kwargs: object) -> object:
        inputs, form = tree_flatten((args, kwargs))
        known = (output for others, its_form, output in self._calls if form == its_form and _equal(inputs, others))
        output = next(known, None)
        if output is None:
            output = self.forward(*args, **kwargs)
            self._calls.append(([x.clone() if isinstance(x, torch.Tensor) else x for x in inputs], form, output))
        return tree_map_only(torch.Tensor, torch.clone, output)  # the model may change it in place


def _equal(one: Sequence[object], other: Sequence[object]) -> bool:
    """Return whether two calls have the same tensors and the same other arguments."""
    return all(
        isinstance(b, torch.Tensor) and a.shape == b.shape and torch.equal(a, b)
        if isinstance(a, torch.Tensor)
        else not isinstance(b, torch.Tensor) and (a is b or a == b)
        for a, b in zip(one, other, strict=True)
    )


def _loss_in(output: torch.Tensor | Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss from a model's output."""
    return output if isinstance(output, torch.Tensor) else output["loss"]


def _differ(one: torch.Tensor, other: torch.Tensor, same: float = SAME) -> bool:
    scale = one.abs().max().clamp(min=1e-12)
    return bool((one - other).abs().max() > same * scale)


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Use evaluation mode inside the context. The random state and each module's mode are restored."""
    with accelerator.without_random_trace(model.parameters()), in_eval_mode(model):
        yield


class _Smoothing(TorchFunctionMode):
    """Sets ``label_smoothing`` in every call of ``torch.nn.functional.cross_entropy``."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.acted = False

    def __torch_function__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        arguments = dict(kwargs or {})
        if function is functional.cross_entropy:
            arguments["label_smoothing"] = self.share
            self.acted = True
        return function(*args, **arguments)


@contextmanager
def smoothed_labels(share: float) -> Iterator[None]:
    """Spread ``share`` of each target evenly over all classes in every cross-entropy inside the context, as torch does.

    This also smooths logits that are sharded over workers or never computed, because their loss uses the same function.
    Without gradients nothing is smoothed. An evaluation reports the loss of the original targets.

    Raises:
        ModelError: no cross-entropy was computed inside the context.
    """
    if not share or not torch.is_grad_enabled():
        yield
        return
    with _Smoothing(share) as smoothing:
        yield
    if not smoothing.acted:
        message = "the model's loss is not torch's cross-entropy, the only one that can be smoothed"
        hint = "leave it out, or smooth the labels in compute_loss() of your own script"
        raise ModelError(message, where="--label-smoothing", hint=hint)
