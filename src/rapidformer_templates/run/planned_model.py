"""The model, the batches and the loss of a script's own hooks, as the planner traces them: on tensors without data."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from rapidformer_templates.data.loader import MicroBatch, load
from rapidformer_templates.data.order import BatchRequest
from rapidformer_templates.data.random_streams import Stream
from rapidformer_templates.data.types import Batch, Endless
from rapidformer_templates.engines.loss import loss_and_count
from rapidformer_templates.errors import ConfigError, ModelError, RapidformerError
from rapidformer_templates.models.blocks import find_blocks
from rapidformer_templates.planning.config import RunConfig
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.run.building import build_data, turn_off_cache
from rapidformer_templates.run.configure import PLAN_ONE_LAYOUT, own_hooks_of_model
from rapidformer_templates.run.hooks import checked_model
from rapidformer_templates.run.run import Run, Template
from rapidformer_templates.system.workers import Workers


class DefaultModel(Protocol):
    """Builds the model that the flags describe."""

    def build(self, blocks: int | None) -> nn.Module:
        """Build the model with ``blocks`` blocks in each stack, or with all of them."""


class HookModel:
    """Builds what a template's ``build_model``, ``build_data`` and ``compute_loss`` make.

    The data are built once, because the shapes of a batch follow from its samples. The model is built several times.

    Attributes:
        tokens: tokens per sample. 1 if a batch has no ``input_ids``.
    """

    def __init__(self, template: Template, default: Callable[[RunConfig], DefaultModel]) -> None:
        """``default`` describes the model if the template has no ``build_model``. That hook may load weights."""
        self._run = Run(Plan("Trainer"), template.config, template, (), Workers(0, 0, 1, torch.device("cpu")))
        template.run_begins(self._run)
        self._default = None if self._run.overrides("build_model") else default(template.config)
        self._samples = build_data(self._run)
        self._batches: dict[int, Batch] = {}
        self.tokens = max(self._load(1).padded_tokens, 1)

    def build(self, blocks: int | None) -> nn.Module:
        """Build the model with ``blocks`` blocks in each stack, or with all of them.

        Raises:
            ModelError: the hook fails on tensors without data, or the blocks are not in a list.
        """
        if self._default:
            return self._default.build(blocks)
        with _explained("build_model()"):
            model = checked_model(self._run.hooks.build_model())
        turn_off_cache(model)
        if blocks is None:
            return model
        # Remove blocks from the middle of each stack, until ``blocks`` are left.
        stacks = dict.fromkeys(name.rpartition(".")[0] for name in find_blocks(model))
        for stack in map(model.get_submodule, stacks):
            if not isinstance(stack, (nn.ModuleList, nn.Sequential)):
                raise ModelError(
                    f"the planner cannot leave out blocks of a {type(stack).__name__}",
                    where="build_model()",
                    hint="keep the blocks in a torch.nn.ModuleList",
                )
            if len(stack) > blocks:
                del stack[blocks - 1 : -1]
        return model

    def batch(self, samples: int) -> Batch:
        """Return a micro batch with the shapes of the first samples."""
        if samples not in self._batches:
            with unset_fake_temporarily():
                self._batches[samples] = self._load(samples).batch
        return _without_data(self._batches[samples])

    def compute_loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss of the hook.

        Raises:
            ModelError: the hook fails on tensors without data.
        """
        with _explained("compute_loss(model, batch)"):
            loss: torch.Tensor = loss_and_count(self._run.hooks.compute_loss(model, batch))[0]
        return loss

    def _load(self, samples: int) -> MicroBatch:
        indices = list(range(samples))
        if not isinstance(self._samples, Endless):
            indices = [index % len(self._samples) for index in indices]
        key = (self._run.config.training.seed, Stream.TRIAL)
        request = BatchRequest(indices, key, list(range(samples)))
        (microbatch,) = load(self._samples, self._run.data, [request], workers=0, pin_memory=False)
        return microbatch


def hook_model(
    template: Template, default: Callable[[RunConfig], DefaultModel], *, searching: bool = False
) -> HookModel | None:
    """Return the source of a model that a script's own hooks make, or None if its flags describe model and batches.

    Args:
        default: see :class:`HookModel`.
        searching: whether layouts are compared, which needs the state of each optimizer in every layout.

    Raises:
        ConfigError: layouts are compared, and the script has its own optimizer.
    """
    own = own_hooks_of_model(type(template))
    if searching and "build_optimizer" in own:
        raise ConfigError(
            f"a search cannot see what {type(template).__name__}.build_optimizer makes",
            where="build_optimizer()",
            hint=PLAN_ONE_LAYOUT,
        )
    return HookModel(template, default) if own else None


@contextmanager
def _explained(hook: str) -> Iterator[None]:
    """Convert an exception of a hook to a :class:`ModelError`."""
    try:
        yield
    except RapidformerError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or "it gives no reason"
        raise ModelError(
            f"{hook} cannot be planned: {type(error).__name__}: {reason}",
            where=hook,
            hint="the planner calls it with tensors that have shapes but no values: read neither values nor weights",
        ) from error


def _without_data(batch: Batch) -> Batch:
    """Return a batch with new tensors of the same shapes and types."""
    if isinstance(batch, UserDict):  # transformers' BatchEncoding
        other = copy.copy(batch)
        other.data = _without_data(batch.data)
        return other
    return tree_map_only(torch.Tensor, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), batch)
