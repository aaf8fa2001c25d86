"""Context parallelism as a transform of the model."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.errors import ModelError
from rapidformer_templates.planning.plan import ContextKind
from rapidformer_templates.switches.context_parallel.attention import attend_over_context, check_attention
from rapidformer_templates.switches.context_parallel.divided_rows import OnRows
from rapidformer_templates.switches.context_parallel.sequence_shards import ContextSequenceShards
from rapidformer_templates.switches.context_parallel.trial import DivisionTrial
from rapidformer_templates.switches.tensor_parallel.collectives import Peers
from rapidformer_templates.switches.tensor_parallel.random_streams import Streams, draws_random_numbers
from rapidformer_templates.switches.tensor_parallel.transform import TensorParallel, block_lists
from rapidformer_templates.system.workers import Workers


def divide_context(assembly: Assembly, building: Building) -> None:
    """Divide each sequence over the workers of a context group, starting at the first block of the model.

    Every worker keeps all weights. A backward from this worker's share of the loss leaves the part of the gradient that
    comes from its tokens. The sum over the group is the whole gradient. In training, the output of the last block and
    the logits are :class:`~.divided_rows.DividedRows`.

    Raises:
        ModelError: the model has no blocks, its attention cannot be divided, or other layers mix positions, too.
    """
    model, workers = assembly.model, building.workers
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
    trial = DivisionTrial(part, called, workers) if building.has_values and workers.pipeline == 1 else None
    peers = Peers(group_of(workers), workers.context, workers.context_rank)
    streams = Streams(peers.rank, active=draws_random_numbers(model))
    kind = building.plan.engine_options.context_kind or _kind_for(part, workers)
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


def _kind_for(model: PreTrainedModel, workers: Workers) -> ContextKind:
    """Return all-to-all if the heads of each worker divide, and otherwise ring."""
    heads: int | None = getattr(model.config.get_text_config(), "num_attention_heads", None)
    divides = heads is not None and heads % (workers.tensor * workers.context) == 0
    return "all-to-all" if divides else "ring"


def group_of(workers: Workers) -> dist.ProcessGroup:
    """Return the process group of the workers that share sequences with this one. Call it on every worker."""
    span = workers.context * workers.tensor
    firsts = [block + tensor for block in range(0, workers.world, span) for tensor in range(workers.tensor)]
    group, _ = dist.new_subgroups_by_enumeration([[*range(first, first + span, workers.tensor)] for first in firsts])
    assert group is not None
    return group


def _refusal(model: nn.Module, why: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} {why}", where="--context-parallel-size", hint="leave it out for this model"
    )
