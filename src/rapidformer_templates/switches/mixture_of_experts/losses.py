"""Balance loss and router z loss: their formulas, and how they are added to the gradient and the reports.

The objective of a step is the mean of the user's loss over the targets of the global batch. For each sparse layer, it
adds the mean over the tokens of the global batch of

    ``balance coefficient · balance + z coefficient · z``

The balance loss of a token is the loss of its sample. So both losses are sums over samples. They do not depend on the
micro batch size, accumulation or the number of workers. (A balance loss over a micro batch would depend on its size,
because it is a product of two means.)
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.engines.loss import DividedSequences
from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.system.workers import Workers


def balance_loss(logits: torch.Tensor, chosen: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the balance loss of each row, ``N Σ_i f_i P_i``. It is 1 if all experts have the same load.

    ``f_i`` is the share of the row's choices that select expert ``i``, ``P_i`` the mean of its probability (Fedus et
    al., 2021, equations 4 to 6; per sequence as in DeepSeek-V3). transformers' ``load_balancing_loss_func`` counts
    choices per token, so it is larger by a factor of top-k.

    Args:
        logits: [B, T, N].
        chosen: [B, T, K].
        mask: [B, T], False for padding.

    Returns:
        [B]. 0 for a row of padding.
    """
    shares = F.one_hot(chosen, logits.shape[-1]).sum(2).to(logits.dtype)  # [B, T, N]
    probabilities = logits.softmax(-1)
    tokens: int | torch.Tensor = logits.shape[1]
    if mask is not None:
        shares, probabilities = shares * mask.unsqueeze(-1), probabilities * mask.unsqueeze(-1)
        tokens = mask.sum(1, keepdim=True).clamp(min=1).to(logits.dtype)
    share = shares.sum(1) / (tokens * chosen.shape[-1])
    return logits.shape[-1] * (share * probabilities.sum(1) / tokens).sum(-1)


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Return the router z loss of each token: ``(log Σ_i exp(logit_i))²`` (Zoph et al., 2022, equation 5)."""
    return logits.logsumexp(-1).square()


def token_mask(mask: object, shape: Sequence[int]) -> torch.Tensor | None:
    """Return a batch's attention mask as a mask of its tokens.

    None if it is a different kind of mask, or there is none.
    """
    if isinstance(mask, torch.Tensor) and tuple(mask.shape) == tuple(shape):
        return mask.bool()
    return None


Recorded = tuple[object, tuple[int, ...], dict[int, torch.Tensor]]
"""The attention mask and the shape of a batch, and the records of layers that have no backward."""


class BalanceLosses:
    """The losses of all sparse layers of a model. See :class:`engines.loss.AuxiliaryLosses`.

    A layer attaches its losses to the weights of its choices. A forward may run twice for a micro batch, if activations
    are recomputed, but a backward runs once. So losses and expert loads are recorded in the backward.

    Args:
        layers, experts: their numbers.
        balance, z: coefficients.
    """

    def __init__(self, layers: int, experts: int, *, balance: float, z: float) -> None:
        self.layers = layers
        self.experts = experts
        self.balance = balance
        self.z = z
        self.sequences: DividedSequences | None = None
        self._mask: object = None
        self._shape: tuple[int, ...] = ()
        self._tokens: float = 1.0  # of the global batch
        self._without_backward: dict[int, torch.Tensor] = {}  # what layers record without a backward, by layer
        self._unit = torch.zeros(())  # gradient of one token's loss in the current backward
        self._counts = True  # whether its micro batch counts
        # Per layer: sums of both losses over the tokens, dropped choices, choices of each expert.
        self._step = torch.zeros(layers, 3 + experts, dtype=torch.float64)
        self._run = torch.zeros_like(self._step)

    # Calls from the model.

    def watch(self, model: nn.Module) -> None:
        """Read the padding mask in each forward of the model."""
        names = list(inspect.signature(model.forward).parameters)

        def read_mask(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            arguments = dict(zip(names, args, strict=False)) | kwargs
            self._mask, inputs = arguments.get("attention_mask"), arguments.get("input_ids")
            if isinstance(inputs, torch.Tensor) and inputs.ndim == 3:  # a row for each choice: the model flattens them
                inputs = inputs.flatten(0, 1)
                self._mask = self._mask.flatten(0, 1) if isinstance(self._mask, torch.Tensor) else None
            elif inputs is None:
                inputs = arguments.get("inputs_embeds")
            self._shape = tuple(inputs.shape[:2]) if isinstance(inputs, torch.Tensor) else ()
            self._without_backward = {}
            self._counts = False  # until the backward of the step, not in one that the user's loss runs itself

        model.register_forward_pre_hook(read_mask, with_kwargs=True)

    def mask_of(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Return the mask [B, T] that is False for padding, or None without padding."""
        return token_mask(self._mask, rows.shape[:2])

    def rows_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Reshape a router's output for the local tokens from [B · S, N] to [B, T, N]. One row if B is unknown."""
        if self._divided:
            return self.gather(tokens.unflatten(0, (self._shape[0], -1)))
        fits = len(self._shape) == 2 and self._shape[0] * self._shape[1] == len(tokens)
        return tokens.unflatten(0, self._shape) if fits else tokens.unsqueeze(0)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather values of the local tokens [B, S, …] to [B, T, …], if sequences are divided over workers."""
        divided = self._divided
        return rows if divided is None or divided.length is None else divided.gather(rows, divided.length)

    def local_part_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the local part [B, S, …] of values of all tokens [B, T, …]."""
        return rows if self._divided is None else self._divided.shard(rows)

    @property
    def _divided(self) -> DividedSequences | None:
        """The object that currently divides the sequences of a layer, or None."""
        return None if self.sequences is None or self.sequences.length is None else self.sequences

    def attach(
        self,
        weights: torch.Tensor,
        logits: torch.Tensor,
        chosen: torch.Tensor,
        is_kept: torch.Tensor | None,
        mask: torch.Tensor | None,
        layer: int,
    ) -> torch.Tensor:
        """Return ``weights`` unchanged. The backward through them adds the gradient of this layer's losses.

        Args:
            weights: any tensor that the layer's output depends on.
            logits, chosen, is_kept: see :meth:`layer.Gate.route`.
            mask: [B, T], False for padding.
            layer: index of the layer.
        """
        if not torch.is_grad_enabled():
            return weights
        with torch.autocast(logits.device.type, enabled=False):
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            real = torch.ones_like(logits[..., 0]) if mask is None else mask.to(logits.dtype)
            balance = (balance_loss(logits, chosen, mask) * real.sum(1)).sum()
            z = (z_loss(logits) * real).sum()
            visits = F.one_hot(chosen, self.experts).sum(2).to(logits.dtype) * real.unsqueeze(-1)
            dropped = logits.new_zeros(())
            if is_kept is not None:
                dropped = (~is_kept * real.bool().unsqueeze(-1)).sum().to(logits.dtype)
            record = torch.cat([torch.stack([balance.detach(), z.detach(), dropped]), visits.sum((0, 1))])
            loss = self.balance * balance + self.z * z
        if not weights.requires_grad:  # neither the router nor anything before it is trained
            self._without_backward[layer] = record
            return weights
        return _Attach.apply(weights, loss, record, self, layer)

    def add_record(self, record: torch.Tensor, layer: int) -> None:
        """Add what a layer recorded in a micro batch that counts."""
        if self._step.device != record.device:
            self._step, self._run = self._step.to(record.device), self._run.to(record.device)
        self._step[layer] += record

    # Calls from the engine.

    def begin_step(self, microbatches: Sequence[MicroBatch], workers: Workers) -> None:
        local_tokens = 0  # as the layers see them
        for microbatch in microbatches:
            if not microbatch.idle:
                get = getattr(microbatch.batch, "get", None)
                mask = token_mask(get("attention_mask") if get else None, microbatch.shape)
                if mask is None:
                    local_tokens += microbatch.padded_tokens
                elif microbatch.shown_tokens is not None:  # counted before the batch moved to the device
                    local_tokens += microbatch.shown_tokens
                else:
                    local_tokens += int(mask.sum())
        # All workers of a replica have the same batches.
        (tokens,) = workers.sum(local_tokens if workers.is_replica_leader else 0)
        if not tokens:
            message = "the balance loss is a mean over tokens, and there are no input_ids in the batches to count them"
            hint = "call the tokens input_ids in the batches, and their mask attention_mask"
            raise RapidformerError(message, where="mixture of experts", hint=hint)
        self._tokens = tokens
        self._step.zero_()

    def follow(self, loss: torch.Tensor, microbatch: MicroBatch, scale: float) -> None:
        # A backward begins with the gradient of the loss itself: 1, or the loss scale of an engine with a loss scale.
        loss.register_hook(lambda gradient: self.follow_without_loss(microbatch, gradient * scale))

    def follow_without_loss(self, microbatch: MicroBatch, scale: torch.Tensor) -> None:
        self._counts = not microbatch.idle
        self._unit = scale.double() * (self._counts / self._tokens)
        for layer, record in self._without_backward.items() if self._counts else ():
            self.add_record(record, layer)

    def recorded(self) -> Recorded:
        return self._mask, self._shape, self._without_backward

    def recall(self, recorded: Recorded) -> None:
        self._mask, self._shape, self._without_backward = recorded

    def results(self, workers: Workers) -> dict[str, torch.Tensor]:
        # Each layer is on one stage. All workers that share its matrices or its sequences see it whole.
        counts = workers.tensor_rank == 0 and workers.context_rank == 0
        step = workers.sum_tensor(self._step.to(workers.device) * counts)
        self._run = self._run.to(step.device) + step
        load = _load(step)
        return {
            "balance_loss": step[:, 0].mean() / self._tokens,
            "z_loss": step[:, 1].mean() / self._tokens,
            "expert_load_min": load.min(),
            "expert_load_max": load.max(),
        }

    def receipts(self, workers: Workers) -> dict[str, object]:
        run = self._run.cpu()
        load = _load(run)
        return {
            "expert_load": {"min": round(float(load.min()), 4), "max": round(float(load.max()), 4)},
            "expert_load_by_layer": [[round(float(value), 4) for value in layer] for layer in load],
            "dropped_choices": int(run[:, 2].sum()),
            "dropped_share": round(float(run[:, 2].sum() / run[:, 3:].sum().clamp(min=1)), 6),
        }


def _load(records: torch.Tensor) -> torch.Tensor:
    """Return the load of each expert relative to an even load, [layers, N]."""
    visits = records[:, 3:]
    return visits / visits.mean(1, keepdim=True).clamp(min=1e-9)


class _Attach(torch.autograd.Function):
    """Returns ``weights`` unchanged. In the backward, ``own`` gets its gradient in the objective."""

    @staticmethod
    def forward(
        ctx: Any, weights: torch.Tensor, loss: torch.Tensor, record: torch.Tensor, losses: BalanceLosses, layer: int
    ) -> torch.Tensor:
        ctx.losses, ctx.layer = losses, layer
        ctx.save_for_backward(record)
        ctx.own_type = loss.dtype
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (record,) = ctx.saved_tensors
        losses, unit = ctx.losses, record.new_zeros(())
        if losses._counts:
            losses.add_record(record, ctx.layer)
            unit = losses._unit
        return gradients[0], unit.to(ctx.own_type), None, None, None
