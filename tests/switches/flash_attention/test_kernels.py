"""The kernel that runs, the models that are refused, and the arguments that flash_attn would receive."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rapidformer_templates.errors import ModelError
from rapidformer_templates.switches.flash_attention.kernels import (
    NAMES,
    attention,
    borders_of,
    check_attention,
    count_kernels,
    packed_attention,
)
from tests.support import compiled_jobs as _jobs  # noqa: F401 - registers them
from tests.support.parity import reference, train

FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
STEPS = "--train-iters 5 --global-batch-size 8 --micro-batch-size 8 --eval-interval 3"
SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.slow
@pytest.mark.parametrize("job", ["causal", "masked", "llama"])
def test_steps_are_those_of_plain_eager(job: str) -> None:
    expected = reference(job, False, STEPS)
    run = train(job, False, f"{STEPS} --use-flash-attn")
    assert len(run["curve"]) == 5
    torch.testing.assert_close(torch.tensor(run["curve"]), torch.tensor(expected["curve"]), rtol=1e-5, atol=1e-6)
    assert run["evaluations"] == pytest.approx(expected["evaluations"], rel=1e-5)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(run["weights"][name], weight, rtol=1e-5, atol=1e-6)
    # Two layers, one micro batch: every call of the first step went through the kernel.
    assert run["summary"]["receipts"]["attention_kernels"] == {FORWARD: 2, f"{FORWARD}_backward": 2}
    assert "attention_kernels" not in expected["summary"]["receipts"]


@pytest.mark.slow
def test_fp64_and_recomputation() -> None:
    expected = reference("causal", True, STEPS)
    run = train("causal", True, f"{STEPS} --use-flash-attn --checkpoint-activations")
    torch.testing.assert_close(torch.tensor(run["curve"]), torch.tensor(expected["curve"]), rtol=1e-10, atol=1e-12)
    assert run["summary"]["receipts"]["attention_kernels"] == {FORWARD: 4, f"{FORWARD}_backward": 2}


@pytest.mark.slow
def test_bf16_within_its_rounding() -> None:
    steps = f"{STEPS} --mixed-precision bf16"
    expected = reference("llama", False, steps)
    run = train("llama", False, f"{steps} --use-flash-attn")
    torch.testing.assert_close(torch.tensor(run["curve"]), torch.tensor(expected["curve"]), rtol=2**-8, atol=0)


def _small(kind: str, **more: Any) -> torch.nn.Module:
    config = CONFIG_MAPPING[kind](**{**SMALL, **more})
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: torch.nn.Linear(2, 2), "it is not a model of transformers"),
        (lambda: _small("gemma2", num_key_value_heads=2, head_dim=8), "the attention of Gemma2ForCausalLM cannot"),
        (lambda: _small("bloom", n_head=2), "the attention of BloomForCausalLM cannot go through torch's scaled"),
        (
            lambda: BertForMaskedLM(BertConfig(**SMALL)),
            "the flash kernel of a CPU has no dropout, and attention_probs_dropout_prob is 0.1",
        ),
    ],
    ids=["module", "gemma2", "bloom", "dropout"],
)
def test_models_that_no_kernel_can_serve_are_refused_by_name(model: Any, why: str) -> None:
    built = model()
    with pytest.raises(ModelError) as caught:
        check_attention(built, "cpu")
    assert caught.value.message.startswith(f"flash attention cannot act: {why}")
    assert caught.value.where == type(built).__name__
    assert "leave out --use-flash-attn" in str(caught.value.hint)


def test_dropout_is_no_obstacle_on_a_gpu() -> None:
    check_attention(BertForMaskedLM(BertConfig(**SMALL)), "cuda")


def test_what_only_the_call_shows_is_refused_there() -> None:
    """T5 learns a bias of the scores."""
    sizes = {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 16, "num_layers": 1, "vocab_size": 64}
    model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))
    check_attention(model, "cpu")
    model.set_attn_implementation(NAMES["flash"])
    ids = torch.randint(1, 64, (1, 5))
    with pytest.raises(ModelError, match="cannot train a bias of the scores"):
        model(input_ids=ids, labels=ids)
    with torch.no_grad():
        model(input_ids=ids, labels=ids)  # evaluations do not force a kernel


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 4), (torch.float32, 6)])
def test_heads_that_the_kernel_of_padded_batches_cannot_read_are_refused(dtype: torch.dtype, size: int) -> None:
    query = torch.zeros(1, 2, 8, size, dtype=dtype, device="meta")
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool, device="meta")
    with pytest.raises(ModelError, match=f"but these have {size}"):
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
