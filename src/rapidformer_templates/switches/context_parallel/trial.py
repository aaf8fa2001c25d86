"""Check of a divided model: for a few tokens, its output must equal the output of the undivided model.

Only attention sees whole sequences. Other layers may mix positions, too (a convolution, a state space model, linear
attention), or count positions without the model's position ids. They would compute something else on each worker's
part.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import nn
from transformers import PreTrainedModel

from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.label_use import can_be_tried, in_evaluation
from rapidformer_templates.switches.context_parallel.attention import OTHER_WAYS
from rapidformer_templates.switches.context_parallel.sequence_shards import ContextSequenceShards
from rapidformer_templates.system.workers import Workers

ALIKE = 1e-4
"""Maximum difference of hidden states, relative to the largest of them, that counts as rounding."""


class DivisionTrial:
    """Compares the last hidden states of a model before and after it is divided.

    Args:
        model: not divided yet. It is not tested if it needs more than tokens, or if this worker lacks some of its
            weights.
        outer: the model, or the module around it that is called in its place.
        workers: this process and its peers, which must all test the model.
    """

    def __init__(self, model: PreTrainedModel, outer: nn.Module, workers: Workers) -> None:
        self.model = model
        self.outer = outer
        self.workers = workers
        self.length = 4 * workers.context + 1
        self.undivided: torch.Tensor | None = None
        if can_be_tried(model):
            with suppress(Exception):  # some models need other inputs than tokens
                self.undivided = self._hidden()

    def check(self, shards: ContextSequenceShards) -> None:
        """Compare with the model after it has been divided.

        Raises:
            ModelError: the hidden states differ on any worker, or the forward of the divided model fails.
        """
        if self.undivided is None:
            return
        why, difference = "", 0.0
        try:
            divided = self._hidden()
            difference = float((divided - self.undivided).abs().max() / self.undivided.abs().max())
        except Exception as error:  # the undivided model could compute it
            why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        shards.attended, shards.shard_sizes = False, None  # the receipts must come from the first step
        reasons, differences = zip(*self.workers.gather((why, difference)), strict=True)
        if any(reasons):
            raise self._refusal(f"cannot compute on a part of a sequence ({next(filter(None, reasons))})")
        if not all(difference < ALIKE for difference in differences):
            raise self._refusal(
                "mixes the positions of a sequence without attention, or counts them in its layers "
                f"(divided, its hidden states differ by {max(differences):.1e})"
            )

    @torch.no_grad()
    def _hidden(self) -> torch.Tensor:
        """Return the last hidden states of one row of tokens, of shape (1, tokens, features)."""
        embeddings: nn.Module = self.model.get_input_embeddings()
        weight = next(embeddings.parameters())
        ids = torch.arange(len(weight) // 2, len(weight) // 2 + self.length, device=weight.device)[None] % len(weight)
        hidden_states: list[torch.Tensor] = []
        hook = self.model.base_model.register_forward_hook(
            lambda *call: hidden_states.append(call[-1].last_hidden_state)
        )
        try:
            with in_evaluation(self.outer):
                self.outer(input_ids=ids)
        finally:
            hook.remove()
        return hidden_states[0]

    def _refusal(self, why: str) -> ModelError:
        return ModelError(f"{type(self.model).__name__} {why}", where="--context-parallel-size", hint=OTHER_WAYS)
