"""The forwards of divided layers. Each replaces a module's ``forward``. Parameters keep their names.

Parameters are DTensors. The layers compute with their local parts, and exchange activations where a region of divided
layers begins and ends. So everything between layers is a plain tensor, as the model's code expects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from rapidformer_templates.engines import collectives
from rapidformer_templates.engines.forwards import differentiable
from rapidformer_templates.models.blocks import WrappedForward
from rapidformer_templates.switches.layout.divided_tensors import DividedLogits, DividedVocabularyShard, check_inside
from rapidformer_templates.switches.layout.sequence_shards import DIM, SequenceShards, Streams, first_argument

Forward = Callable[..., Any]

GRADIENTS_OF_PRODUCTS = (nn.Linear, nn.Embedding, Conv1D)
"""Modules whose parameters get gradients that nothing else shares."""

OTHER_SEQUENCES = ("key_value_states", "encoder_hidden_states")
"""Arguments with the output of an encoder, which attention reads. It is whole, also under sequence parallelism."""


@dataclass(frozen=True)
class Regions:
    """The operations where divided regions begin and end.

    Attributes:
        peers: the workers that share the model.
        streams: the streams of random numbers.
        shards: the shards of the sequence. None without sequence parallelism.
    """

    peers: collectives.Peers
    streams: Streams
    shards: SequenceShards | None = None

    @property
    def length(self) -> int | None:
        """Number of tokens of the sequence that is currently divided, or None."""
        return self.shards.length if self.shards else None

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole input of divided layers."""
        if self.length is None:
            self.streams.enter_local_rng()
            return collectives.copy_to_region(x, self.peers)
        return collectives.gather(x, self.peers, DIM, self.length, partial=True)

    def end(self, x: torch.Tensor) -> torch.Tensor:
        """Combine the partial results of divided layers for the layers that follow."""
        if self.length is None:
            self.streams.leave_local_rng()
            return collectives.all_reduce(x, self.peers)
        return collectives.reduce_scatter(x, self.peers, DIM)


class OnLocalParameters(WrappedForward):
    """The forward of a module. While it runs, the module's parameters are this worker's local parts.

    Args:
        module: has parameters directly, not only in its children.
        forward: its forward.
        partial: keys of whole parameters for which each worker computes a part of the gradient.
        peers: those workers.
    """

    def __init__(self, module: nn.Module, forward: Forward, partial: Collection[str], peers: collectives.Peers) -> None:
        super().__init__(forward)
        self.module = module
        self.partial = sorted(partial)
        self.peers = peers

    def local_parameters(self) -> dict[str, torch.Tensor | None]:
        """Return the local part of each parameter."""
        parameters = self.module._parameters.items()
        return {key: self._local_part(value) if isinstance(value, DTensor) else value for key, value in parameters}

    def _local_part(self, parameter: DTensor) -> torch.Tensor:
        local = parameter.to_local()
        if isinstance(self.module, GRADIENTS_OF_PRODUCTS) or not local.requires_grad:
            return local
        # Autograd copies a gradient that two parameters share, such as that of a sum, but does not see it in a DTensor.
        return differentiable(lambda x: x.view_as(x), lambda gradient: gradient.clone(), local)

    def parts(self) -> dict[str, torch.Tensor | None]:
        """Return the local part of each parameter. Through autograd, whole parameters get whole gradients."""
        local = self.local_parameters()
        if self.partial and torch.is_grad_enabled():
            # No walrus: whether torch.compile can trace one in a comprehension depends on how the variables are named.
            partial = [local[key] for key in self.partial]
            whole = collectives.copy_all_to_region([part for part in partial if part is not None], self.peers)
            local |= dict(zip(self.partial, whole, strict=True))
        return local

    def __call__(self, *args: object, **kwargs: object) -> object:
        before = self.module._parameters
        parts = self.parts()
        # No local name for __dict__: after a graph break, torch.compile would not know it as the module's attributes,
        # and the forward would use the parameters from before.
        self.module.__dict__["_parameters"] = parts
        try:
            return self.forward(*args, **kwargs)
        finally:
            self.module.__dict__["_parameters"] = before


def local_parameter_layers(part: nn.Module) -> list[OnLocalParameters]:
    """Return all :class:`OnLocalParameters` forwards in a part of a model, also inside other wrapped forwards."""
    layers: list[OnLocalParameters] = []
    for module in part.modules():
        forward: object = vars(module).get("forward")
        while forward is not None and not isinstance(forward, OnLocalParameters):
            forward = getattr(forward, "forward", None)
        if isinstance(forward, OnLocalParameters):
            layers.append(forward)
    return layers


@contextmanager
def with_local_parameters(layers: Sequence[OnLocalParameters]) -> Iterator[None]:
    """Give modules their local parameters inside the context, so that a graph sees plain tensors."""
    before = [layer.module._parameters for layer in layers]
    try:
        for layer in layers:
            layer.module.__dict__["_parameters"] = layer.local_parameters()
        yield
    finally:
        for layer, parameters in zip(layers, before, strict=True):
            layer.module.__dict__["_parameters"] = parameters


class Divided(WrappedForward):
    """A forward that replaces a module's own, at the edge of a divided region or inside it."""

    def __init__(self, module: nn.Module, forward: Forward, regions: Regions) -> None:
        super().__init__(forward)
        self.regions, self.peers = regions, regions.peers


class Region(Divided):
    """A module whose inputs go into divided layers that it contains."""

    def __init__(self, module: nn.Module, forward: Forward, regions: Regions) -> None:
        super().__init__(module, forward, regions)
        self.first = first_argument(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        for name in OTHER_SEQUENCES:
            if isinstance(kwargs.get(name), torch.Tensor):
                kwargs[name] = collectives.copy_to_region(kwargs[name], self.peers)
        if args:
            return self.forward(self.regions.begin(args[0]), *args[1:], **kwargs)
        kwargs[self.first] = self.regions.begin(kwargs[self.first])
        return self.forward(**kwargs)


class EnteringColumn(Divided):
    """A column-parallel layer in a module with a user's plan. A divided region begins at the layer itself."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.regions.streams.is_local:
            self.regions.streams.enter_local_rng()
        return self.forward(collectives.copy_to_region(x, self.peers))


class AroundColumns(Divided):
    """A module that contains :class:`EnteringColumn` layers. It begins on the shared stream of random numbers."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.regions.streams.reset()
        return self.forward(*args, **kwargs)


class FeatureShardedExperts(Divided):
    """Experts whose features are divided over the workers. Inputs and routing weights are whole.

    Only one worker adds the biases after the experts' rows. The module's ``bias_factor`` controls that.
    """

    def __init__(self, module: Any, forward: Forward, regions: Regions) -> None:
        super().__init__(module, forward, regions)
        if hasattr(module, "bias_factor"):
            module.bias_factor = float(regions.peers.rank == 0)

    def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
        inputs = [
            collectives.copy_to_region(x, self.peers) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for x in args
        ]
        return collectives.all_reduce(self.forward(*inputs, **kwargs), self.peers)


class Row(Divided):
    """A row-parallel layer: each worker has a share of the input features.

    It ends a region and adds its bias to the sum.
    """

    def __init__(self, module: nn.Module, forward: OnLocalParameters, regions: Regions) -> None:
        super().__init__(module, forward, regions)
        self.inner = forward
        plain = nn.functional.linear if isinstance(module, nn.Linear) else torch.matmul
        self.multiply: Forward = getattr(forward.forward, "multiply", plain)  # another switch's product, such as fp8's

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.inner.parts()
        weight, bias = parts["weight"], parts["bias"]
        assert weight is not None
        result = self.regions.end(self.multiply(x, weight))
        return result if bias is None else result + bias.to(result.dtype)


class SplitRow(Row):
    """A row-parallel layer with whole activations as its input."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(collectives.scatter(x, self.peers, -1, even=False))


class GatheredColumn(Divided):
    """A column-parallel layer with whole activations as its output."""

    def __init__(self, module: nn.Linear | Conv1D, forward: Forward, regions: Regions) -> None:
        super().__init__(module, forward, regions)
        self.features = module.weight.shape[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        columns = self.forward(collectives.copy_to_region(x, self.peers))
        return collectives.gather(columns, self.peers, -1, self.features, partial=False)


class VocabularyEmbedding(Divided):
    """An embedding in which each worker has the rows of some tokens."""

    def __init__(self, module: nn.Embedding, forward: Forward, regions: Regions) -> None:
        super().__init__(module, forward, regions)
        self.vocabulary = module.num_embeddings
        self.begin, self.end = self.peers.share(self.vocabulary)
        padding = module.padding_idx
        owns_padding = padding is not None and self.begin <= padding < self.end
        module.padding_idx = padding - self.begin if padding is not None and owns_padding else None

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        check_inside((tokens >= 0) & (tokens < self.vocabulary), self.vocabulary, "token of the input")
        elsewhere = (tokens < self.begin) | (tokens >= self.end)
        rows = self.forward((tokens - self.begin).masked_fill(elsewhere, 0))
        return collectives.all_reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.peers)


class VocabularyHead(Divided):
    """The output layer for logits, in which each worker has the columns of some tokens.

    In training, its output stays divided: see :class:`DividedLogits`. In evaluation, it is whole. A head that computes
    the loss itself gets the range of its vocabulary and returns the loss over the whole vocabulary.

    Attributes:
        columns: (on this worker, in total) of the latest logits.
    """

    def __init__(self, module: nn.Linear, forward: Forward, regions: Regions) -> None:
        super().__init__(module, forward, regions)
        self.module: nn.Module = module
        self.vocabulary = module.weight.shape[0]
        self.words = DividedVocabularyShard(self.peers, self.vocabulary)
        self.columns: tuple[int, int] | None = None

    def __call__(self, x: torch.Tensor, *loss: object) -> torch.Tensor:
        begin, end = self.peers.share(self.vocabulary)
        self.columns = (end - begin, self.vocabulary)
        result: torch.Tensor
        if loss:
            result = self.forward(collectives.copy_to_region(x, self.peers), *loss, words=self.words)
            return result
        logits = DividedLogits(self.forward(collectives.copy_to_region(x, self.peers)), self.peers, self.vocabulary)
        return logits if self.module.training else logits.whole()
