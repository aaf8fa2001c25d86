"""The norm of the gradient of each layer, in every layout (``--log-layer-grad-norms``)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rapidformer_templates.engines.contract import Engine
from rapidformer_templates.engines.shards import named_tensors
from rapidformer_templates.models.blocks import canonical_name


class LayerGradNorms:
    """Measures the gradient of each layer before it is clipped.

    A layer is a repeated block, or a module with parameters outside of the blocks, such as an embedding or the head.
    Every trained parameter belongs to one layer, so the norms of all layers together give ``grad_norm``.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        assembly, workers = engine.assembly, engine.workers
        trained = [name for name, tensor in named_tensors(assembly).items() if tensor.requires_grad]
        blocks = [canonical_name(name) for name in assembly.blocks]
        layers = {}
        for name in map(assembly.placement.whole_name, trained):  # a stage may have a tied matrix as its head
            module = name.rpartition(".")[0] or name
            layers[name] = next((block for block in blocks if name.startswith(f"{block}.")), module)
        # A worker may have the gradients of parameters that are in another worker's part of the model.
        self._layers = {name: layer for of_rank in workers.gather(layers) for name, layer in of_rank.items()}
        self._indices = {layer: index for index, layer in enumerate(dict.fromkeys(self._layers.values()))}
        self._norms = torch.zeros(len(self._indices))
        engine.before_update.append(self._measure)

    def measured(self) -> Mapping[str, torch.Tensor]:
        """Return the norms of the last step by the name of their metric. The same on every worker."""
        return {f"grad_norm/{layer}": self._norms[index] for layer, index in self._indices.items()}

    def _measure(self) -> None:
        """Measure the norms of all layers. Each value of the gradient counts on one worker, and the workers add up."""
        engine = self._engine
        squares = torch.zeros(len(self._indices), dtype=torch.float64, device=engine.workers.device)
        for shard in engine.shards("gradients"):
            if shard.counts_once:
                dtype = torch.promote_types(shard.values.dtype, torch.float32)
                norm = torch.linalg.vector_norm(shard.values, dtype=dtype)
                squares[self._indices[self._layers[shard.name]]] += norm.to(squares).square()
        self._norms = engine.workers.sum_tensor(squares).sqrt() / engine.gradient_scale
