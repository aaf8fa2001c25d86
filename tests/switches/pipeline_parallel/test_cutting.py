"""The stages of a model, run in turn in one process, equal the model. Models that cannot be cut are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.errors import ModelError, RapidformerError
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.switches.layout.pipeline import StageRunner, cut_into_stages
from rapidformer_templates.system.workers import Workers

V = 67
SIZES = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, beside: torch.Tensor | float = 0.0) -> torch.Tensor:
        return x + self.linear(x + beside).tanh()


class Own(nn.Module):
    """A model from no library, with its own parameters next to the blocks and one that nothing uses."""

    def __init__(self, way: str = "straight") -> None:
        super().__init__()
        self.way = way
        self.head = nn.Linear(8, V)  # named before the blocks, called after them
        self.embedding = nn.Embedding(V, 8)
        self.scale = nn.Parameter(torch.full((8,), 0.5))
        self.blocks = nn.ModuleList(Residual() for _ in range(4))
        self.spare = nn.Linear(2, 2)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        embedded = self.embedding(input_ids)
        x = embedded * self.scale
        for block in self.blocks:
            x = block(x, embedded) if self.way == "beside" else block(x)
            x = x * 1.5 if self.way == "between" else x
        if self.way == "around":
            x = x + embedded
        return SimpleNamespace(logits=self.head(x * self.scale), loss=None)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=V,
            n_positions=64,
            n_embd=16,
            n_layer=4,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    ),
    "bert": lambda: BertForMaskedLM(BertConfig(**SIZES, **NO_DROPOUT, intermediate_size=32)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=32, tie_word_embeddings=True)),
    "bloom": lambda: BloomForCausalLM(  # its blocks also return attention weights
        BloomConfig(vocab_size=V, hidden_size=16, n_layer=4, n_head=2, hidden_dropout=0.0, attention_dropout=0.0)
    ),
    "opt": lambda: OPTForCausalLM(  # names its final norm before its blocks
        OPTConfig(**SIZES, ffn_dim=32, word_embed_proj_dim=16, dropout=0.0, max_position_embeddings=64)
    ),
    "deberta": lambda: DebertaV2ForMaskedLM(  # gives every block an embedding of relative positions
        DebertaV2Config(**SIZES, **NO_DROPOUT, intermediate_size=32, relative_attention=True, pos_att_type=["p2c"])
    ),
    "own": Own,
    "own-around": lambda: Own("around"),
    "own-beside": lambda: Own("beside"),
}


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, V, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)}


def _loss(model: nn.Module) -> torch.Tensor:
    batch = _batch()
    output = model(**batch)
    if output.loss is not None:
        return output.loss
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten())


def _cut(model: nn.Module, rank: int, loss: Any = _loss, *, workers: int = 2, **options: Any) -> Assembly:
    worker = Workers(rank, rank, workers, torch.device("cpu"), pipeline=workers)
    flags = SimpleNamespace(**{"virtual_pipeline_size": 1, "pipeline_stages": None, **options})
    assembly = Assembly(model)
    cut_into_stages(assembly, Building(flags, Plan("Trainer"), worker, loss))
    return assembly


@pytest.mark.parametrize(
    "options", [{}, {"virtual_pipeline_size": 2}, {"pipeline_stages": "3,1"}], ids=["1f1b", "interleaved", "uneven"]
)
@pytest.mark.parametrize("kind", MODELS)
def test_the_stages_are_the_model(kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    whole = MODELS[kind]().train()
    if hasattr(whole, "config"):
        whole.config.use_cache = False
    stages = [_cut(copy.deepcopy(whole), rank, **options) for rank in range(2)]
    expected = _loss(whole)
    expected.backward()

    passages = [StageRunner(stage, begins=rank == 0, ends=rank == 1) for rank, stage in enumerate(stages)]
    chain: list[tuple[torch.Tensor | None, torch.Tensor]] = []
    hidden = None
    for number in range(2 * options.get("virtual_pipeline_size", 1)):
        given = None if hidden is None else hidden.detach().requires_grad_()
        hidden = passages[number % 2].run(number // 2, given, lambda model=stages[number % 2].model: _loss(model))
        chain.append((given, hidden))
    gradient = None
    for given, output in reversed(chain):
        output.backward(gradient)
        gradient = None if given is None else given.grad

    torch.testing.assert_close(chain[-1][1], expected, rtol=0, atol=0)
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            if parameter.grad is not None:
                name = stage.placement.whole_name(name)
                found[name] = found[name] + parameter.grad if name in found else parameter.grad
    gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


def test_a_stage_has_its_blocks_and_ends_under_their_own_names() -> None:
    whole = MODELS["gpt2"]()
    first, last = (_cut(copy.deepcopy(whole), rank) for rank in range(2))
    assert list(first.blocks) == ["transformer.h.0", "transformer.h.1"]
    assert list(last.blocks) == ["transformer.h.2", "transformer.h.3"]
    assert {n for n, _ in first.model.named_parameters() if ".h." not in n} == {
        "transformer.wte.weight",
        "transformer.wpe.weight",
    }
    assert {n for n, _ in last.model.named_parameters() if ".h." not in n} == {
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
        "lm_head.weight",
    }
    # The head's matrix is the embedding's matrix and is saved under the embedding's name.
    assert last.placement.names == {"lm_head.weight": "transformer.wte.weight"}
    assert first.placement.stages == last.placement.stages == {"transformer.wte.weight": (0, 1)}


def test_a_heavy_head_leaves_its_stage_fewer_blocks() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=900, n_embd=16, n_layer=8, n_head=2, tie_word_embeddings=False))
    sizes = [len(_cut(copy.deepcopy(model), rank, workers=4).blocks) for rank in range(4)]
    assert sum(sizes) == 8
    assert sizes[0] < sizes[1]
    assert sizes[3] < sizes[2]


def test_hidden_states_have_the_places_that_they_have_in_the_whole_model() -> None:
    whole = MODELS["llama-tied"]().eval()
    batch = _batch()
    expected = whole(**batch, output_hidden_states=True).hidden_states
    seen: list[Any] = []

    def loss(model: nn.Module) -> torch.Tensor:
        output = model(**batch, output_hidden_states=True)
        seen.append(output.hidden_states)
        return output.loss + output.hidden_states[-1].square().mean()

    first, last = (_cut(copy.deepcopy(whole), rank, loss) for rank in range(2))
    seen.clear()
    hidden = StageRunner(first, begins=True, ends=False).run(0, None, lambda: loss(first.model))
    StageRunner(last, begins=False, ends=True).run(0, hidden, lambda: loss(last.model))
    assert [state is None for state in seen[0]] == [True, True, False, False, False]
    for mine, theirs in zip(seen[0][2:], expected[2:], strict=True):
        torch.testing.assert_close(mine, theirs)


def _refused(model: nn.Module, loss: Any = _loss, **options: Any) -> RapidformerError:
    with pytest.raises(RapidformerError) as refused:
        _cut(model, 0, loss, **options)
    assert refused.value.hint
    return refused.value


def test_a_model_without_a_block_list() -> None:
    error = _refused(nn.Linear(4, 4))
    assert isinstance(error, ModelError)
    assert "found no repeated blocks" in error.message
    shared = AlbertForMaskedLM(AlbertConfig(vocab_size=V, hidden_size=16, num_attention_heads=2, intermediate_size=32))
    assert "found no repeated blocks" in _refused(shared).message


def test_a_pipeline_that_does_not_divide() -> None:
    assert "4 blocks cannot be cut into 3 stages" in _refused(MODELS["gpt2"](), workers=3).message
    assert "4 blocks cannot be cut into 4 stages" in _refused(MODELS["gpt2"](), workers=4).message
    with pytest.raises(ModelError, match="has 5 blocks in 2 stages; the model has 4 blocks for 2 stages"):
        _cut(MODELS["gpt2"](), 0, pipeline_stages="3,2")


def test_an_encoder_decoder() -> None:
    config = T5Config(vocab_size=V, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    assert "more than the hidden state" in _refused(T5ForConditionalGeneration(config)).message


def test_something_between_the_blocks() -> None:
    assert "does not hand the hidden state straight from blocks.0 to blocks.1" in _refused(Own("between")).message


def test_a_loss_of_what_the_blocks_keep_aside() -> None:
    """The balancing loss of experts is a mean over all blocks, but a stage has only some of them."""
    model = MixtralForCausalLM(
        MixtralConfig(
            **SIZES, intermediate_size=32, num_key_value_heads=2, num_local_experts=4, output_router_logits=True
        )
    )
    model.config.use_cache = False
    assert "uses more of a block than the hidden state that it passes on" in _refused(model).message


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda model: _loss(model) + _loss(model),
            "compute_loss called the model twice, or the model called its blocks twice",
        ),
        (lambda model: torch.ones((), requires_grad=True), "compute_loss did not call the model"),
    ],
)
def test_a_hook_that_does_not_call_the_model_once(loss: Any, message: str) -> None:
    error = _refused(MODELS["gpt2"](), loss)
    assert error.message == message
    assert error.where == "compute_loss(model, batch)"


def test_a_hook_that_calls_the_model_twice_later_on() -> None:
    """The first sample need not show it."""
    last = _cut(MODELS["gpt2"](), 1)
    hidden = torch.zeros(3, 7, 16)
    with pytest.raises(RapidformerError, match="called the model twice"):
        StageRunner(last, begins=False, ends=True).run(0, hidden, lambda: _loss(last.model) + _loss(last.model))
