"""Attention per document: it computes what a mask of the whole row does, at the cost of the documents alone."""

import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rapidformer_templates.errors import ModelError
from rapidformer_templates.switches.flash_attention import kernels
from rapidformer_templates.switches.flash_attention.kernels import (
    NAMES,
    attention,
    borders_of,
    check_attention,
    count_kernels,
    packed_attention,
)
from tests.support import compiled_jobs as _jobs  # noqa: F401 - registers them
from tests.support.made import Made
from tests.support.messages import Says
from tests.support.packed_rows import _gradients, _loss, _model, _packed_batch, _samples
from tests.support.parity import EXACT, assert_close, assert_follows, reference, train

TOKENS = 11
LENGTHS = [[5, 1, 3, 2], [11], [1, 1, 9]]  # of the documents in each row
SCALE = 0.3


def _follows() -> torch.Tensor:
    rows = [torch.cat([torch.arange(length) > 0 for length in lengths]) for lengths in LENGTHS]
    return torch.stack(rows)


def _tensors(dtype: torch.dtype, key_heads: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    heads = (4, key_heads, key_heads)
    return [torch.randn(len(LENGTHS), n, TOKENS, 8, dtype=dtype, requires_grad=True) for n in heads]


def _by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Compute the softmax of the scores in float64, masked to the document and to earlier tokens."""
    groups = query.shape[1] // key.shape[1]
    query, key, value = query.double(), *(t.double().repeat_interleave(groups, dim=1) for t in (key, value))
    document = (~_follows()).cumsum(1)
    seen = (document[:, :, None] == document[:, None, :]) & torch.ones(TOKENS, TOKENS).tril().bool()
    scores = (query @ key.transpose(-1, -2) * SCALE).masked_fill(~seen[:, None], -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def test_borders_are_those_of_rows_and_documents() -> None:
    borders = borders_of(_follows())
    assert borders.dtype == torch.int32
    lengths = [length for row in LENGTHS for length in row]
    assert [end - start for start, end in pairwise(borders.tolist())] == lengths
    # The first token of a row begins a document, even if it is marked as a continuation.
    assert borders_of(torch.ones(2, 3, dtype=torch.bool)).tolist() == [0, 3, 6]


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 3e-2)]
)
def test_output_and_gradients_are_those_of_a_mask(dtype: torch.dtype, tolerance: float, key_heads: int) -> None:
    tensors, weights = _tensors(dtype, key_heads), torch.randn(len(LENGTHS), TOKENS, 4, 8, dtype=torch.float64)
    expected = _by_hand(*tensors)
    gradients = torch.autograd.grad((expected * weights).sum(), tensors)
    output = packed_attention(*tensors, borders_of(_follows()), scale=SCALE)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    found = torch.autograd.grad((output.double() * weights).sum(), tensors)
    for actual, wanted in zip(found, gradients, strict=True):
        torch.testing.assert_close(actual, wanted, atol=4 * tolerance, rtol=tolerance)


def test_queries_in_a_wider_type_are_rounded_to_that_of_the_values() -> None:
    """After rotary positions, autocast leaves queries in a wider type."""
    query, key, value = _tensors(torch.float32, 4)
    narrow = [tensor.bfloat16() for tensor in (query, key, value)]
    borders = borders_of(_follows())
    mixed = packed_attention(query, key, narrow[2], borders, scale=SCALE)
    assert torch.equal(mixed, packed_attention(*narrow, borders, scale=SCALE))


def test_operators_keep_torchs_contract() -> None:
    """Schema, shapes without data, autograd and tracing with varying sizes, as torch checks them itself."""
    borders = borders_of(_follows())
    torch.library.opcheck(kernels._on_cpu, (*_tensors(torch.float64, 2), borders, SCALE))
    query, key, value = (tensor.detach() for tensor in _tensors(torch.float64, 2))
    output, log_sums = kernels._on_cpu(query, key, value, borders, SCALE)
    arguments = (torch.randn_like(output), query, key, value, output, log_sums, borders, SCALE)
    torch.library.opcheck(kernels._backward_on_cpu, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
def test_a_model_computes_the_samples_alone_without_a_mask(kind: str) -> None:
    model = _model(kind).train()
    model.set_attn_implementation(NAMES["flash"])
    samples = _samples([9, 20, 1, 13, 6, 17, 3, 8], labels=True)
    batch = _packed_batch(samples)
    loss = _loss(model, batch)
    loss.backward()
    found = _gradients(model)
    model.set_attn_implementation("sdpa")
    alone = 0.0
    for sample in samples:
        part = _loss(model, {name: torch.from_numpy(row).long()[None] for name, row in sample.items()})
        part.backward()
        alone += part.item()
    assert loss.item() == pytest.approx(alone, abs=1e-10)
    assert max((a - b).abs().max().item() for a, b in zip(found, _gradients(model), strict=True)) < 1e-10


@pytest.mark.parametrize(("name", "has_matrix"), [("sdpa", True), (NAMES["flash"], False)])
@torch.no_grad()
def test_no_matrix_of_tokens_by_tokens_is_made(name: str, has_matrix: bool) -> None:
    rows, tokens = 2, 512
    model = _model("gpt2").eval()
    model.transformer.wpe = torch.nn.Embedding(tokens, 32, dtype=torch.float64)
    model.set_attn_implementation(name)
    batch = {
        "input_ids": torch.randint(2, 90, (rows, tokens)),
        "position_ids": torch.arange(tokens).remainder(64).expand(rows, -1),
    }
    with Made() as seen:
        model.transformer(**batch)
    assert (seen.largest >= rows * tokens * tokens) == has_matrix


def test_short_windows_keep_their_mask() -> None:
    """Borders cannot describe a window within a document."""
    model = _model("mistral").train()
    batch = _packed_batch(_samples([9, 20, 1, 13, 6]))
    results = []
    for name in ("sdpa", NAMES["flash"]):
        model.set_attn_implementation(name)
        with count_kernels() as counts:
            loss = _loss(model, batch)
            loss.backward()
        results.append((loss.item(), _gradients(model)))
    assert counts == {
        "_scaled_dot_product_flash_attention_for_cpu": 2,
        "_scaled_dot_product_flash_attention_for_cpu_backward": 2,
    }
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-10)
    for expected, actual in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)


# Kernels by name.

FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
STEPS = "--train-iters 5 --global-batch-size 8 --micro-batch-size 8 --eval-interval 3"
SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.slow
@pytest.mark.parametrize("job", ["causal", "masked", "llama"])
def test_steps_are_those_of_plain_eager(job: str) -> None:
    expected = reference(job, False, STEPS)
    run = train(job, False, f"{STEPS} --use-flash-attn")
    assert len(run["curve"]) == 5
    assert_follows(run, expected)
    # Two layers, one micro batch: every call of the first step went through the kernel.
    assert run["summary"]["receipts"]["attention_kernels"] == {FORWARD: 2, f"{FORWARD}_backward": 2}
    assert "attention_kernels" not in expected["summary"]["receipts"]


@pytest.mark.slow
def test_fp64_and_recomputation() -> None:
    expected = reference("causal", True, STEPS)
    run = train("causal", True, f"{STEPS} --use-flash-attn --checkpoint-activations")
    assert_follows(run, expected, *EXACT)
    assert run["summary"]["receipts"]["attention_kernels"] == {FORWARD: 4, f"{FORWARD}_backward": 2}


@pytest.mark.slow
def test_bf16_within_its_rounding() -> None:
    steps = f"{STEPS} --mixed-precision bf16"
    expected = reference("llama", False, steps)
    run = train("llama", False, f"{steps} --use-flash-attn")
    assert_close(run["curve"], expected["curve"], 2**-8, 0)


def _small(kind: str, **more: Any) -> torch.nn.Module:
    config = CONFIG_MAPPING[kind](**{**SMALL, **more})
    return AutoModelForCausalLM.from_config(config)


REFUSED: dict[str, Any] = {
    "module": lambda: torch.nn.Linear(2, 2),
    "gemma2": lambda: _small("gemma2", num_key_value_heads=2, head_dim=8),
    "bloom": lambda: _small("bloom", n_head=2),
    "dropout": lambda: BertForMaskedLM(BertConfig(**SMALL)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_models_that_no_kernel_can_serve_are_refused_by_name(name: str, says: Says) -> None:
    model = REFUSED[name]()
    with says(ModelError):
        check_attention(model, "cpu")


def test_dropout_is_no_obstacle_on_a_gpu() -> None:
    check_attention(BertForMaskedLM(BertConfig(**SMALL)), "cuda")


def test_what_only_the_call_shows_is_refused_there(says: Says) -> None:
    """T5 learns a bias of the scores."""
    sizes = {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 16, "num_layers": 1, "vocab_size": 64}
    model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))
    check_attention(model, "cpu")
    model.set_attn_implementation(NAMES["flash"])
    ids = torch.randint(1, 64, (1, 5))
    with says(ModelError):
        model(input_ids=ids, labels=ids)
    with torch.no_grad():
        model(input_ids=ids, labels=ids)  # evaluations do not force a kernel


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 4), (torch.float32, 6)])
def test_heads_that_the_kernel_cannot_read_are_refused(dtype: torch.dtype, size: int, says: Says) -> None:
    query = torch.zeros(1, 2, 8, size, dtype=dtype, device="meta")
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool, device="meta")
    with says(ModelError):
        attention(torch.nn.Identity(), query, query, query, mask, kernel="flash")


def _reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Compute ``flash_attn_func`` as it is documented: (batch, tokens, heads, size)."""
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=kwargs["causal"], scale=kwargs["softmax_scale"]
    )
    assert kwargs["dropout_p"] == 0.0
    return out.transpose(1, 2)


def _reference_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **kwargs: Any,
) -> torch.Tensor:
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert cu_seqlens_q.dtype == torch.int32
    sizes = cu_seqlens_q.diff().tolist()
    assert max(sizes) <= max_seqlen_q == max_seqlen_k
    parts = zip(*(t.split(sizes) for t in (query, key, value)), strict=True)
    return torch.cat([_reference(q[None], k[None], v[None], **kwargs)[0] for q, k, v in parts])


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the package, which needs a GPU, by its signatures, computed with torch."""
    module: Any = ModuleType("flash_attn")
    module.flash_attn_func, module.flash_attn_varlen_func = _reference, _reference_packed
    monkeypatch.setitem(sys.modules, "flash_attn", module)


def _heads(count: int) -> torch.Tensor:
    return torch.randn(2, count, 7, 8, dtype=torch.bfloat16)


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("causal", [True, False])
def test_package_is_called_as_it_is_documented(causal: bool) -> None:
    torch.manual_seed(0)
    query, key, value = _heads(4), _heads(2), _heads(2)
    layer: Any = SimpleNamespace(is_causal=causal, num_key_value_groups=2)
    ours, _ = attention(layer, query, key, value, None, kernel="flash_attn")
    torchs, _ = attention(layer, query, key, value, None, kernel="flash")
    torch.testing.assert_close(ours, torchs)
    with count_kernels() as counts:  # the package ignores a mask
        attention(layer, query, key, value, torch.ones(2, 1, 7, 7, dtype=torch.bool), kernel="flash_attn")
    assert counts


@pytest.mark.usefixtures("flash_attn")
def test_package_gets_the_borders_of_documents() -> None:
    torch.manual_seed(0)
    query, key, value = _heads(4), _heads(2), _heads(2)
    follows = torch.tensor([[0, 1, 1, 0, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1]]).bool()
    ours = packed_attention(query, key, value, borders_of(follows), scale=0.4, package=True)
    on_cpu = packed_attention(query, key, value, borders_of(follows), scale=0.4)
    torch.testing.assert_close(ours, on_cpu, atol=2**-7, rtol=2**-7)
