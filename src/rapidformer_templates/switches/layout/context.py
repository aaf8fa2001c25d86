"""Context parallelism as a transform of the model, and the check of a divided model.

Only attention sees whole sequences. Other layers may mix positions, too (a convolution, a state space model, linear
attention), or count positions without the model's position ids. They would compute something else on each worker's
part. So the output of a divided model for a few tokens must equal the output of the undivided model. A count may have
no effect on the first thousand positions (the temperature of llama4), so layers that count are refused in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.engines.collectives import Peers
from rapidformer_templates.engines.contract import Engine, Receipt
from rapidformer_templates.errors import ModelError
from rapidformer_templates.models.blocks import BlockArguments, BlockOutput, hidden_of, with_hidden
from rapidformer_templates.models.label_use import can_be_tried, in_evaluation
from rapidformer_templates.switches.layout.context_attention import OTHER_WAYS, attend_over_context, check_attention
from rapidformer_templates.switches.layout.divided_tensors import OnRows
from rapidformer_templates.switches.layout.pipeline import LeaveStage
from rapidformer_templates.switches.layout.sequence_shards import ContextSequenceShards, Streams, draws_random_numbers
from rapidformer_templates.switches.layout.tensor import TensorParallel, block_lists
from rapidformer_templates.system.workers import Workers


def divide_context(assembly: Assembly, building: Building[object]) -> None:
    """Divide each sequence over the workers of a context group, starting at the first block of the model.

    Every worker keeps all weights. A backward from this worker's share of the loss leaves the part of the gradient that
    comes from its tokens. The sum over the group is the whole gradient. In training, the output of the last block and
    the logits are :class:`~.divided_tensors.DividedRows`.

    Raises:
        ModelError: the model has no blocks, its attention cannot be divided, or other layers mix positions, too.
    """
    model, workers = assembly.model, building.workers
    assembly.limit_derivatives(0, "--context-parallel-size")  # a worker gets the part of its tokens
    part = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    if part is None:
        raise _refusal(model, "is not a transformers model: only the attention of those can be divided from outside")
    if getattr(part.config, "is_encoder_decoder", False):
        raise _refusal(model, "has an encoder and a decoder, with two sequences")
    blocks = block_lists(assembly)
    if not blocks:
        raise _refusal(model, "has no repeated blocks")
    check_attention(part)
    losses = assembly.losses
    called = part if losses is None else model  # a mixture's losses read the batch of the outer model
    trial = DivisionTrial(part, called, blocks, workers) if building.has_values else None
    span = workers.context * workers.tensor  # neighbours with the same tensor rank share sequences
    firsts = [block + tensor for block in range(0, workers.world, span) for tensor in range(workers.tensor)]
    group = workers.open_groups([range(first, first + span, workers.tensor) for first in firsts])
    assert group is not None
    peers = Peers(group, workers.context, workers.context_rank)
    streams = Streams(peers.rank, active=draws_random_numbers(model))
    # All-to-all divides the heads of each worker. A ring works with any number of them.
    heads: int | None = getattr(part.config.get_text_config(), "num_attention_heads", None)
    divides = heads is not None and heads % (workers.tensor * workers.context) == 0
    kind = building.plan.engine_options.context_kind or ("all-to-all" if divides else "ring")
    shards = ContextSequenceShards(peers, streams, kind, ends=workers.ends_pipeline)
    attend_over_context(part, shards)
    shards.install(model, blocks)
    divided = assembly.find(TensorParallel)
    if divided is not None and divided.head is not None:
        head = divided.head.module
        head.forward = OnRows(head.forward)
    if losses is not None:
        losses.sequences = shards
    assembly.record(shards)
    if trial is not None:
        trial.check(shards)


def _refusal(model: nn.Module, why: str, hint: str = "leave it out for this model") -> ModelError:
    return ModelError(f"{type(model).__name__} {why}", where="--context-parallel-size", hint=hint)


ALIKE = 1e-4
"""Maximum difference of hidden states, relative to the largest of them, that counts as rounding."""


class DivisionTrial:
    """Compares the hidden states after the blocks of a model before and after it is divided.

    Args:
        model: not divided yet. It is not tested if it has no weights.
        outer: the model, or the module around it that is called in its place.
        blocks: the lists of its blocks. In a pipeline, those on this worker, which are tested without the others.
        workers: this process and its peers, which must all test the model.
    """

    def __init__(
        self, model: PreTrainedModel, outer: nn.Module, blocks: Sequence[Sequence[nn.Module]], workers: Workers
    ) -> None:
        self.model, self.outer, self.blocks, self.workers = model, outer, blocks, workers
        self.length = 4 * workers.context + 1
        self.why = ""
        self.undivided: torch.Tensor | None = None
        try:
            self.undivided = self._hidden() if can_be_tried(model) else None
        except Exception as error:  # some models need other inputs than tokens
            self.why = f"cannot be tried on tokens alone ({_first_line(error)})"

    def check(self, shards: ContextSequenceShards) -> None:
        """Compare with the model after it has been divided.

        Raises:
            ModelError: on any worker, the hidden states differ, a block counts its tokens, or a forward fails.
        """
        why, difference, count = self.why, 0.0, _TokenCount(shards)
        if self.undivided is not None:
            try:
                with count:
                    divided = self._hidden()
                difference = float((divided - self.undivided).abs().max() / self.undivided.abs().max())
            except Exception as error:  # the undivided model could compute it
                why = f"cannot compute on a part of a sequence ({_first_line(error)})"
        shards.attended, shards.shard_sizes = False, None  # the receipts must come from the first step
        reasons, differences, counts = zip(*self.workers.gather((why, difference, count.found)), strict=True)
        if any(reasons):
            raise _refusal(self.model, next(filter(None, reasons)), OTHER_WAYS)
        if not all(difference < ALIKE for difference in differences):
            why = "mixes the positions of a sequence without attention, or counts them in its layers"
            how = f"(divided, its hidden states differ by {max(differences):.1e})"
            raise _refusal(self.model, f"{why} {how}", OTHER_WAYS)
        if any(counts):
            raise _refusal(self.model, "counts the positions of a sequence in its layers", OTHER_WAYS)

    @torch.no_grad()
    def _hidden(self) -> torch.Tensor:
        """Return the hidden states after the last block for two rows of tokens, of shape (2, tokens, features)."""
        words: int = self.model.config.get_text_config().vocab_size
        device = next(self.model.parameters()).device
        ids = torch.arange(words // 2, words // 2 + 2 * self.length, device=device).view(2, -1) % words
        ends: list[torch.Tensor] = []

        def end(block: nn.Module, args: object, output: BlockOutput) -> None:
            ends.append(output[0] if isinstance(output, tuple) else output)
            if self.workers.pipeline > 1 and block is self.blocks[-1][-1]:
                raise LeaveStage(ends[-1])

        with ExitStack() as hooks, in_evaluation(self.outer), suppress(LeaveStage):
            for blocks in self.blocks:
                hooks.callback(blocks[-1].register_forward_hook(end).remove)
            if self.workers.pipeline > 1:
                first = self.blocks[0][0]
                handle = first.register_forward_pre_hook(_replace_by_noise, with_kwargs=True, prepend=True)
                hooks.callback(handle.remove)
            # A model for multiple choice takes the two rows as the choices of one question.
            self.outer(input_ids=ids[None] if type(self.model).__name__.endswith("MultipleChoice") else ids)
        return ends[-1]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _replace_by_noise(block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> BlockArguments:
    """Replace the hidden state of a block, which comes from another stage."""
    hidden = hidden_of(args, kwargs)
    noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden)
    return with_hidden(args, kwargs, noise)


class _TokenCount(TorchFunctionMode):
    """Notices whether a block counts the tokens of its part, which are positions from 0 in each part.

    There are two rows, so that an index over all tokens has another length.
    """

    def __init__(self, shards: ContextSequenceShards) -> None:
        super().__init__()
        self.shards = shards
        self.found = False

    def __torch_function__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        result = function(*args, **(kwargs or {}))
        if function is torch.arange and self.shards.length is not None and self.shards.shard_sizes:
            self.found |= isinstance(result, torch.Tensor) and len(result) == self.shards.shard_sizes[0]
        return result


class ContextDivision(Receipt):
    """Reports ``context_tokens``, ``context_attention`` and ``context_kind``.

    ``context_tokens`` is [tokens of a sequence on this worker, in total]. ``context_attention`` is whether attention
    was divided, and ``context_kind`` is how.
    """

    def after_step(self, engine: Engine) -> dict[str, object]:
        shards = engine.assembly.find(ContextSequenceShards)
        if shards is None:
            return {}
        return {"context_tokens": shards.shard_sizes, "context_attention": shards.attended, "context_kind": shards.kind}
