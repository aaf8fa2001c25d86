"""Tiny models of every architecture with a tensor plan, and a plain loop that trains them whole or divided."""

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.switches.checkpoint_activations.declaration import CheckpointActivationsFlags
from rapidformer_templates.switches.checkpoint_activations.transform import checkpoint_activations
from rapidformer_templates.switches.fused_loss.transform import CHUNK_BYTES, fuse_loss
from rapidformer_templates.switches.layout.tensor import divide_matrices
from rapidformer_templates.system.workers import Workers
from tests.support.worker_pool import alone

VOCABULARY = 51  # 3 × 17: two and four workers get unequal shares
HIDDEN, HEADS, LAYERS, WIDTH, POSITIONS = 32, 4, 2, 64, 32
CLIP = 0.5


def _llama(dropout: float, tied: bool) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=2 * HEADS,
        num_key_value_heads=HEADS, intermediate_size=WIDTH, max_position_embeddings=POSITIONS,
        attention_dropout=dropout, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _gpt_neox(dropout: float, tied: bool) -> nn.Module:
    config = transformers.GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=WIDTH, max_position_embeddings=POSITIONS, hidden_dropout=dropout,
        attention_dropout=dropout, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    return transformers.GPTNeoXForCausalLM(config)


def _gpt2(dropout: float, tied: bool) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_inner=WIDTH, n_positions=POSITIONS,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, tie_word_embeddings=tied, use_cache=False,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def _bert(dropout: float, tied: bool) -> nn.Module:
    return transformers.BertForMaskedLM(_encoder(transformers.BertConfig, dropout, tied))


def _roberta(dropout: float, tied: bool) -> nn.Module:
    return transformers.RobertaForMaskedLM(_encoder(transformers.RobertaConfig, dropout, tied))


def _encoder(kind: Any, dropout: float, tied: bool) -> Any:
    return kind(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=WIDTH, max_position_embeddings=POSITIONS + 2, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, tie_word_embeddings=tied, pad_token_id=0,
    )  # fmt: skip


def _t5(dropout: float, tied: bool) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=8, d_ff=WIDTH, num_layers=LAYERS, num_heads=HEADS,
        dropout_rate=dropout, tie_word_embeddings=tied, pad_token_id=0, decoder_start_token_id=0, use_cache=False,
        feed_forward_proj="gated-gelu" if tied else "relu",
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _mixtral(dropout: float, tied: bool) -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, intermediate_size=WIDTH, max_position_embeddings=POSITIONS, num_local_experts=4,
        attention_dropout=dropout, tie_word_embeddings=tied, use_cache=False, output_router_logits=True,
    )  # fmt: skip
    config._experts_implementation = "eager"  # the grouped kernel does not support fp64
    return transformers.MixtralForCausalLM(config)


class _OwnBlock(nn.Module):
    """A residual block as users write it, with divided layers next to layers that are not divided."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(HIDDEN), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(self.up(self.norm(x)).relu()))


class _Own(nn.Module):
    tensor_plan: ClassVar = {"layers.*.norm": "replicate", "layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.Sequential(*(_OwnBlock(dropout) for _ in range(LAYERS)))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.head(self.layers(self.embedding(input_ids))))


MODELS: dict[str, Callable[[float, bool], nn.Module]] = {
    "llama": _llama, "gpt_neox": _gpt_neox, "gpt2": _gpt2, "bert": _bert, "roberta": _roberta, "t5": _t5,
    "mixtral": _mixtral,
}  # fmt: skip
"""Models from transformers."""

OWN = {"own": lambda dropout, tied: _Own(dropout)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A run: the model, how it is divided, and the type in which it computes."""

    model: str
    tensor: int = 1
    tied: bool = True
    sequence: bool = False
    checkpointed: bool = False
    kind: str = "float32"
    own_loss: bool = False
    """Whether the model computes the loss from labels. If not, it is smoothed cross-entropy of the logits."""
    dropout: float = 0.0
    fused: bool = False
    """Whether head and loss are computed together, in chunks of tokens."""

    @property
    def whole(self) -> "Case":
        """The same run on one worker, with full logits."""
        return dataclasses.replace(self, tensor=1, sequence=False, checkpointed=False, fused=False)


def build(case: Case, workers: Workers | None = None) -> nn.Module:
    """Build the model of a case, divided over ``workers``."""
    torch.manual_seed(3)
    model = (MODELS | OWN)[case.model](case.dropout, case.tied)
    for name, parameter in model.named_parameters():  # make biases and norms matter
        if parameter.ndim == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        elif "bias" in name:
            parameter.data.mul_(0.5)
    model = model.to(torch.float64 if case.kind == "float64" else torch.float32).train()
    assembly = Assembly(model)
    if case.fused:
        fuse_loss(assembly, _building(workers or alone()))
    if workers is not None:
        switches = ("tensor-parallel", *(("sequence-parallel",) if case.sequence else ()))
        divide_matrices(assembly, _building(workers, *switches))
    if case.checkpointed:
        checkpoint_activations(assembly, _building(workers or alone()))
    return model


def _building(workers: Workers, *switches: str) -> Building:
    return Building(CheckpointActivationsFlags(), Plan("Trainer", switches), workers, try_loss=lambda model: None)


def divided(workers: Workers, tensor: int) -> Workers:
    """Return the workers of a test as a layout with ``tensor`` as its tensor parallel size."""
    shape = (1, workers.world // tensor, tensor)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pipeline", "copies", "tensor"))
    return dataclasses.replace(workers, tensor=tensor, mesh=mesh)


def batches(model: str, steps: int = 1, micro: int = 2) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yield the micro batches of each step: padded samples of odd lengths, with masked labels."""
    draw = torch.Generator().manual_seed(11)
    for _ in range(steps):
        step = []
        for _ in range(micro):
            length = int(torch.randint(5, 12, (), generator=draw))
            ids = torch.randint(1, VOCABULARY, (3, length), generator=draw)
            mask = torch.ones_like(ids)
            mask[0, length - 2 :] = 0
            labels = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.3, -100)
            step.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
        yield step


FEW_ROWS = 4 * 4 * (VOCABULARY // 2)
"""Bytes per chunk of the fused loss: four rows on the worker with 25 words, three on the worker with 26."""


def loss_of(case: Case, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with mock.patch.dict(CHUNK_BYTES, cpu=FEW_ROWS):
        return _loss_of(case, model, batch)


def _loss_of(case: Case, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if case.own_loss:
        return model(**batch).loss
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    if case.model == "t5":
        inputs["decoder_input_ids"] = batch["input_ids"].roll(1, -1)
    logits, labels = model(**inputs).logits, batch["labels"]
    return cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=0.1)


def train(case: Case, workers: Workers | None = None, steps: int = 10) -> dict[str, Any]:
    """Train with AdamW, accumulation and gradient clipping. Return losses, norms and the full weights at the end."""
    model = build(case, workers)
    peers = workers.mesh["tensor"].get_group() if workers is not None and workers.mesh is not None else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    curve = []
    for microbatches in batches(case.model, steps):
        total = 0.0
        for batch in microbatches:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.kind == "bfloat16"):
                loss = loss_of(case, model, batch) / len(microbatches)
            loss.backward()
            total += float(loss.detach())
        norm = _norm(model, peers)
        for parameter in (p for p in model.parameters() if p.grad is not None):
            _local(parameter.grad).mul_(min(1.0, CLIP / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
        curve.append((total, norm))
    weights = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return {"curve": curve, "weights": {name: w.detach().double().numpy() for name, w in weights.items()}}


def _norm(model: nn.Module, peers: Any) -> float:
    squares = torch.zeros(2, dtype=torch.float64)
    for parameter in (p for p in model.parameters() if p.grad is not None):
        shared = isinstance(parameter, DTensor) and parameter.placements[0].is_shard()
        squares[int(shared or _is_strided(parameter))] += _local(parameter.grad).double().pow(2).sum()
    if peers is not None:
        dist.all_reduce(squares[1:], group=peers)
    return float(squares.sum().sqrt())


def _is_strided(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and "S" in type(parameter.placements[0]).__name__[:2]


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
