"""Operations on divided hidden states and logits, compared with whole ones, and models that cannot be divided."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    MptForCausalLM,
)

from rapidformer_templates.engines.assembly import Assembly, Building
from rapidformer_templates.engines.collectives import Peers
from rapidformer_templates.errors import ModelError
from rapidformer_templates.planning.plan import Plan
from rapidformer_templates.switches.layout.context import divide_context
from rapidformer_templates.switches.layout.divided_tensors import DividedRows
from rapidformer_templates.switches.layout.sequence_shards import ContextSequenceShards, Streams
from rapidformer_templates.system.workers import Workers
from tests.support.jobs import _bert
from tests.support.messages import Says
from tests.support.worker_pool import alone, run_in_workers

SAMPLES, TOKENS, FEATURES = 2, 7, 6
OPERATIONS: dict[str, Any] = {
    "linear": lambda x, w, labels: functional.linear(x, w, w[0, :3].repeat(2)),
    "norm": lambda x, w, labels: functional.layer_norm(x, (FEATURES,), w[0], w[1]),
    "rms": lambda x, w, labels: w[0] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype),
    "gelu": lambda x, w, labels: functional.gelu(x, approximate="tanh"),
    "softcap": lambda x, w, labels: torch.tanh(x / 3.0) * 3.0,
    "all": lambda x, w, labels: x.sum(),
    "shifted": lambda x, w, labels: functional.cross_entropy(
        x[..., :-1, :].reshape(-1, FEATURES), labels[:, 1:].flatten()
    ),
    "padded": lambda x, w, labels: functional.cross_entropy(
        x.float().view(-1, FEATURES), functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1), reduction="sum"
    ),
    "by token": lambda x, w, labels: functional.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="none"),
    "smoothed": lambda x, w, labels: functional.cross_entropy(
        x.flatten(0, 1), labels.flatten(), weight=w[0].square().detach(), label_smoothing=0.1
    ),
    "one sample": lambda x, w, labels: functional.cross_entropy(x[1], labels[1].clamp(min=0)),
    "some rows": lambda x, w, labels: x[labels >= 0].logsumexp(-1),
    "dropout": lambda x, w, labels: functional.dropout(x, 0.5),  # the first operation that draws
    "again": lambda x, w, labels: x[:, [0, 0, 5]],
    "last": lambda x, w, labels: x[torch.arange(SAMPLES), torch.tensor([3, 6])],
    "columns": lambda x, w, labels: x[..., 1:3],
    "transposed": lambda x, w, labels: functional.cross_entropy(x.transpose(1, 2), labels),
    "softmax": lambda x, w, labels: torch.log_softmax(x, -1),
    "both": lambda x, w, labels: x * x + x,
    "by tokens": lambda x, w, labels: x * torch.arange(float(TOKENS))[:, None],
    "argmax": lambda x, w, labels: x.argmax(-1),
}
DIVIDED = ("linear", "norm", "rms", "gelu", "softcap", "dropout", "again", "last", "both")
"""Operations whose result each worker has only for its rows."""


def _results(workers: Workers | None) -> dict[str, Any]:
    torch.manual_seed(5)
    hidden = torch.randn(SAMPLES, TOKENS, FEATURES)
    weights = torch.randn(FEATURES, FEATURES)
    labels = torch.randint(0, FEATURES, (SAMPLES, TOKENS)).masked_fill(torch.rand(SAMPLES, TOKENS) < 0.3, -100)
    found: dict[str, Any] = {}
    for name, operation in OPERATIONS.items():
        x, w = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        given: Any = x
        if workers is not None:
            peers = Peers(torch.distributed.group.WORLD, workers.world, workers.rank)
            begin, end = peers.share(TOKENS)
            places = np.concatenate([np.arange(begin, end) + TOKENS * sample for sample in range(SAMPLES)])
            given = DividedRows(x[:, begin:end].reshape(-1, FEATURES), (SAMPLES, TOKENS), places, peers)
        result = operation(given, w, labels)
        found[f"{name} is divided"] = isinstance(result, DividedRows)
        found[f"{name} shape"] = tuple(result.shape)
        values = result.whole() if isinstance(result, DividedRows) else result
        found[name] = values.detach()
        if values.requires_grad:
            (values.square().sum() / (workers.world if workers else 1)).backward()
            # Each worker runs the backward of its share of the sum. The gradients are then summed, as an engine does.
            gradients = [x.grad, torch.zeros_like(w) if w.grad is None else w.grad]
            for gradient in gradients if workers else ():
                torch.distributed.all_reduce(gradient)
            found[f"gradient of {name}"] = torch.cat([gradient.flatten() for gradient in gradients])
    return found


def _shards(workers: Workers) -> list[int]:
    """Return the number of logits rows that a worker computes in a step and in an evaluation, with packed documents.

    The loss is compared with that of a whole model.
    """
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    place = dataclasses.replace(workers, context=workers.world)
    ids = torch.randint(0, 40, (2, 13))
    packed = torch.tensor([[*range(5), *range(8)], [*range(9), *range(4)]])
    batch = {"input_ids": ids, "labels": ids, "position_ids": packed}
    whole = model(**batch, use_cache=False)
    expected = model.generate(ids[:, :5], max_new_tokens=4, do_sample=False)
    divided = _divided(model, place)
    output = divided(**batch, use_cache=False)
    torch.testing.assert_close(output.loss, whole.loss, rtol=1e-6, atol=0)  # from logits in fp32
    rows = output.logits.local.shape[0]
    torch.testing.assert_close(output.logits.whole(), whole.logits, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        evaluated = divided(**batch, use_cache=False).logits
    assert type(evaluated) is torch.Tensor
    torch.testing.assert_close(evaluated, whole.logits, rtol=1e-10, atol=1e-12)
    with pytest.raises(ModelError, match="use_cache=False"):
        divided.generate(ids[:, :5], max_new_tokens=4, do_sample=False, use_cache=True)
    generated = divided.generate(ids[:, :5], max_new_tokens=4, do_sample=False, use_cache=False)
    assert torch.equal(generated, expected)
    return [rows, generated.shape[1]]


def _divided(model: nn.Module, workers: Workers) -> Any:
    divide_context(Assembly(model), Building(None, Plan("Trainer"), workers, lambda model: None))
    return model


def _pooled(workers: Workers) -> None:
    """A head that uses one token of each sample."""
    torch.manual_seed(3)
    model = BertForSequenceClassification(_bert()).double()
    place = dataclasses.replace(workers, context=workers.world)
    batch = {"input_ids": torch.randint(0, 20, (3, 5)), "labels": torch.tensor([0, 2, 1])}
    whole = model(**batch).loss
    divided = _divided(model, place)
    torch.testing.assert_close(divided(**batch).loss, whole, rtol=1e-12, atol=0)


def _masks(workers: Workers) -> dict[str, list[torch.Tensor]]:
    """Return the dropout masks of a forward, of whole rows and of shards, and the random state after it."""
    torch.manual_seed(3)
    model: Any = GPT2LMHeadModel(
        GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.5, embd_pdrop=0.5)
    ).train()
    _divided(model, dataclasses.replace(workers, context=workers.world))
    masks: dict[str, list[torch.Tensor]] = {"whole": [], "shard": []}
    original = functional.dropout

    def watched(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = original(x, *args, **kwargs)
        masks["whole" if x.shape[1] == 12 else "shard"].append(result.detach().eq(0))
        return result

    functional.dropout = watched
    try:
        model(torch.zeros(1, 12, dtype=torch.long), use_cache=False)
    finally:
        functional.dropout = original
    return {**masks, "state": [torch.get_rng_state()]}


def _two_workers(workers: Workers) -> dict[str, Any]:
    _pooled(workers)
    return {**_results(workers), "shards": _shards(workers), "masks": _masks(workers)}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_in_workers(2, _two_workers)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return _results(None)


@pytest.mark.distributed
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_give_what_whole_tensors_give(name: str, found: Any, expected: Any) -> None:
    for place in found:
        assert place[f"{name} shape"] == expected[f"{name} shape"]
        torch.testing.assert_close(place[name], expected[name])
        assert place[f"{name} is divided"] is (name in DIVIDED)
        if f"gradient of {name}" in expected:
            torch.testing.assert_close(place[f"gradient of {name}"], expected[f"gradient of {name}"])


def test_what_fsdp_asks_of_an_output_gathers_nothing() -> None:
    rows = DividedRows(torch.zeros(2, 3, requires_grad=True) * 1, (4,), np.arange(2), peers=None)  # type: ignore[arg-type]
    assert rows._base is None
    assert rows.requires_grad
    rows.register_hook(lambda gradient: None)


def test_a_change_in_place_is_refused() -> None:
    """It would change a gathered copy."""
    rows = DividedRows(torch.zeros(2, 3), (4,), np.arange(2), peers=None)  # type: ignore[arg-type]
    for change in (
        lambda: rows.mul_(2.0),
        lambda: rows.__setitem__((..., 1), 0.0),
        lambda: rows.masked_fill_(torch.ones(4, 3) > 0, 1),
    ):
        with pytest.raises(ModelError, match="changes a tensor of which this worker has only a part"):
            change()


def test_a_shard_of_one_sample_lies_as_all_other_blocks_have_it() -> None:
    """torch recompiles a block for other strides."""
    shards = ContextSequenceShards(Peers(None, 2, 0), Streams(0, active=False), "all-to-all", ends=True)  # type: ignore[arg-type]
    assert shards.shard(torch.zeros(1, 8, 3)).stride() == torch.zeros(1, 4, 3).stride()


@pytest.mark.distributed
def test_a_worker_computes_the_logits_of_its_tokens_and_generates_whole(found: Any) -> None:
    assert [place["shards"] for place in found] == [[2 * 7, 9], [2 * 6, 9]]


@pytest.mark.distributed
def test_shards_have_dropout_of_their_own_and_generators_stay_together(found: Any) -> None:
    one, other = (place["masks"] for place in found)
    assert len(one["shard"]) == len(other["shard"]) > 0
    assert not any(torch.equal(a, b) for a, b in zip(one["shard"], other["shard"], strict=True))
    assert torch.equal(one["whole"][0], other["whole"][0])  # the masks of the embeddings
    assert torch.equal(one["state"][0], other["state"][0])


def _mpt() -> nn.Module:
    return MptForCausalLM(MptConfig(d_model=16, n_heads=2, n_layers=2, vocab_size=20, max_seq_len=16))


@pytest.mark.parametrize("model", [lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), _mpt], ids=["own", "mpt"])
def test_what_cannot_be_divided_is_refused(model: Callable[[], nn.Module], says: Says) -> None:
    with says(ModelError):
        _divided(model(), alone())
