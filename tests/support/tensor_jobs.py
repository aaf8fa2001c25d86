"""Tiny models of every architecture with a tensor plan, alone and as jobs."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.switches.checkpoint_activations.declaration import CheckpointActivationsFlags
from rapidformer_templates.switches.checkpoint_activations.transform import checkpoint_activations
from rapidformer_templates.switches.fused_loss.transform import CHUNK_BYTES, fuse_loss
from rapidformer_templates.switches.layout.tensor import divide_matrices
from rapidformer_templates.switches.layout.tensor_plan import tensor_plan_of
from rapidformer_templates.system.workers import Workers
from tests.support.jobs import OTHERS, VOCABULARY, _Job
from tests.support.worker_pool import alone

HIDDEN, HEADS, LAYERS, WIDTH, POSITIONS = 32, 4, 2, 128, 64


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


class _Shift(nn.Module):
    """Adds the sum of two parameters, which have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.full((HIDDEN,), 0.1)), nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.one + self.other)


class _Own(nn.Module):
    tensor_plan: ClassVar = {"layers.*.norm": "replicate", "layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.Sequential(*(_OwnBlock(dropout) for _ in range(LAYERS)))
        self.shift = _Shift()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.head(self.shift(self.layers(self.embedding(input_ids)))))


MODELS: dict[str, Callable[[float, bool], nn.Module]] = {
    "llama": _llama, "gpt_neox": _gpt_neox, "gpt2": _gpt2, "bert": _bert, "roberta": _roberta, "t5": _t5,
    "mixtral": _mixtral,
}  # fmt: skip
"""Models from transformers."""

OWN = {"own": lambda dropout, tied: _Own(dropout)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and how it is divided."""

    model: str
    tensor: int = 1
    tied: bool = True
    sequence: bool = False
    checkpointed: bool = False
    own_loss: bool = False
    """Whether the model computes the loss from labels. If not, it is smoothed cross-entropy of the logits."""
    dropout: float = 0.0
    fused: bool = False
    """Whether head and loss are computed together, in chunks of tokens."""


def _made(name: str, tied: bool, dropout: float = 0.0) -> nn.Module:
    """Build a model in which biases and norms matter."""
    model = (MODELS | OWN)[name](dropout, tied)
    for key, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        elif "bias" in key:
            parameter.data.mul_(0.5)
    return model


class _TensorJob(_Job):
    """The fused loss is computed in chunks of a few rows."""

    model, tied = "", True

    def make(self) -> nn.Module:
        return _made(self.model, self.tied)

    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with mock.patch.dict(CHUNK_BYTES, cpu=FEW_ROWS):
            if self.model != "t5":
                return super().compute_loss(model, batch)
            ids, mask = batch["input_ids"], batch["attention_mask"]
            logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids.roll(1, -1)).logits
            return cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())


CAUSAL = ("llama", "gpt_neox", "gpt2", "mixtral")
OTHERS |= {
    f"tensor-{name}-{'tied' if tied else 'untied'}": type(
        name, (_TensorJob,), {"model": name, "tied": tied, "shift": int(name in CAUSAL)}
    )
    for name in MODELS | OWN
    for tied in (True, False)
}


def build(case: Case, workers: Workers | None = None) -> nn.Module:
    """Build the model of a case, divided over ``workers``."""
    torch.manual_seed(3)
    model = _made(case.model, case.tied, case.dropout).train()
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


def batch_of() -> dict[str, torch.Tensor]:
    """Return padded samples of an odd length, with masked labels."""
    draw = torch.Generator().manual_seed(11)
    ids = torch.randint(1, VOCABULARY, (3, 9), generator=draw)
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    labels = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.3, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


FEW_ROWS = 4 * 4 * (VOCABULARY // 2)
"""Bytes per chunk of the fused loss: four rows on the worker with 33 words, three on the worker with 34."""


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


def shard_dims(model: nn.Module) -> dict[str, int | None]:
    """Return the dimension along which each parameter of ``named_parameters`` is divided, or None if it is whole."""
    divisions = tensor_plan_of(model).divisions
    return {name: divisions[name].dim if name in divisions else None for name, _ in model.named_parameters()}
