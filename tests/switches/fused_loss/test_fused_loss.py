"""The fused loss compared with torch's cross-entropy of whole logits: the function, models, and runs."""

import copy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F  # noqa: N812

from rapidformer_templates.engines.assembly import Assembly
from rapidformer_templates.errors import ModelError
from rapidformer_templates.switches.fused_loss.transform import (
    TANH,
    FusedHead,
    Logits,
    LossRecipe,
    fuse_loss,
    linear_cross_entropy,
    scale,
    shift,
)
from rapidformer_templates.system.workers import Workers
from tests.support.jobs import OTHERS, VOCABULARY, CausalJob, ClassJob, _Job
from tests.support.made import Made
from tests.support.messages import Says
from tests.support.parity import EXACT, assert_close, assert_follows, observed, reference, train
from tests.support.selection import by_default

FUSED = "--fused-linear-cross-entropy"
ON_CPU = SimpleNamespace(workers=Workers(0, 0, 1, torch.device("cpu")))


def _inputs(rows: int, words: int, *, bias: bool, dtype: torch.dtype = torch.float64) -> list[Any]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, 16, dtype=dtype), torch.randn(words, 16, dtype=dtype)
    target = torch.where(torch.rand(rows) < 0.3, -100, torch.randint(0, words, (rows,)))
    tensors = [hidden.requires_grad_(), weight.requires_grad_()]
    return [*tensors, torch.randn(words, dtype=dtype).requires_grad_() if bias else None, target]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 37, 64])
def test_loss_and_gradients_are_those_of_whole_logits(rows: int, bias: bool, smoothing: float) -> None:
    *tensors, target = _inputs(rows, 50, bias=bias)
    hidden, weight, offset = tensors
    logits = F.linear(hidden, weight, offset)
    constant = torch.randn(1, 50, dtype=torch.float64)
    capped = torch.tanh((logits + constant) / 3) * 3
    expected = F.cross_entropy(capped, target, reduction="sum", label_smoothing=smoothing)
    recipe = LossRecipe((shift(constant), scale(1 / 3), TANH, scale(3.0)), smoothing=smoothing)
    actual = linear_cross_entropy(hidden, weight, offset, target, recipe)
    given = [tensor for tensor in tensors if tensor is not None]
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for mine, its in zip(
        torch.autograd.grad(actual * 0.7, given), torch.autograd.grad(expected * 0.7, given), strict=True
    ):
        torch.testing.assert_close(mine, its, rtol=1e-11, atol=1e-12)


def test_a_frozen_weight_gets_no_gradient_and_a_second_backward_is_refused() -> None:
    hidden, weight, _, target = _inputs(8, 11, bias=False)
    total = linear_cross_entropy(hidden, weight.detach(), None, target, LossRecipe())
    total.backward(retain_graph=True)
    assert hidden.grad is not None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_rounds_as_without_fusing(dtype: torch.dtype) -> None:
    *tensors, target = _inputs(64, 200, bias=True, dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        expected = F.cross_entropy(F.linear(*tensors).float(), target, reduction="sum")
        actual = linear_cross_entropy(*tensors, target, LossRecipe())
        again = F.linear(*tensors)
    assert again.grad_fn is not None  # autocast has not cached a weight without a gradient
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    exact = F.cross_entropy(F.linear(*(t.double() for t in tensors)), target, reduction="sum")
    steps = torch.finfo(dtype).eps
    for mine, its, true in zip(
        *(torch.autograd.grad(loss, tensors) for loss in (actual, expected, exact)), strict=True
    ):
        scale = true.abs().max()
        assert (mine - true).abs().max() <= max(2 * (its - true).abs().max(), 2 * steps * scale)


def test_no_tensor_is_as_large_as_the_logits() -> None:
    *tensors, target = _inputs(100, 300, bias=True)
    with Made() as seen:
        linear_cross_entropy(*tensors, target.clamp(min=0), LossRecipe()).backward()
    assert seen.largest == 25 * 300  # a quarter of the rows. Weight and its gradient have 300 × 16
    with Made() as seen:
        F.cross_entropy(F.linear(*tensors), target).backward()
    assert seen.largest == 100 * 300


# Models.

SIZES = {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
SEQ2SEQ = {"vocab_size": 67, "d_model": 32}
MODELS = {
    "softcap": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=16, final_logit_softcapping=3.0)
    ),
    "scaled": lambda: transformers.GraniteForCausalLM(transformers.GraniteConfig(**SIZES, logits_scaling=2.0)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            **SEQ2SEQ, d_kv=16, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0
        )
    ),
    "bias of the logits": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            **SEQ2SEQ,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            dropout=0.0,
        )
    ),
}


def _fuse(model: nn.Module) -> Any:
    fuse_loss(Assembly(model), ON_CPU)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("name", MODELS)
def test_models_that_do_something_to_their_logits(name: str) -> None:
    torch.manual_seed(1)
    model = MODELS[name]().train()
    fused = _fuse(copy.deepcopy(model))
    ids = torch.randint(3, 67, (3, 16))
    batch = {"input_ids": ids, "labels": torch.where(torch.rand(3, 16) < 0.4, ids, -100)}
    expected, outputs = model(**batch).loss, fused(**batch)
    assert isinstance(outputs.logits, Logits)
    torch.testing.assert_close(outputs.loss, expected, rtol=1e-6, atol=0)
    expected.backward()
    outputs.loss.backward()
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for p, q in zip(model.parameters(), fused.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6 * largest)
    model.eval()
    fused.eval()
    torch.testing.assert_close(fused(**batch).logits, model(**batch).logits, rtol=0, atol=0)


def _logits() -> Logits:
    head: Any = nn.Linear(4, 7)
    head.__class__ = FusedHead
    head.kernel, head.used, head.rows, head.columns = "torch", set(), 0, 0
    logits = head(torch.randn(2, 3, 4))
    assert isinstance(logits, Logits)
    return logits


ASKED: dict[str, Any] = {
    "argmax": lambda x: x.argmax(-1),
    "softmax": lambda x: torch.softmax(x, -1),
    "flat": lambda x: x.view(-1),
    "flattened": lambda x: x.flatten(),
    "difference": lambda x: x - x,
    "sum with a number": lambda x: 1 + x,
    "sum": lambda x: x + torch.ones(2, 3, 7),
    "negative": lambda x: -x,
    "comparison": lambda x: x > 0,
    "contains": lambda x: 0 in x,
    "part": lambda x: x[..., 0],
    "weights": lambda x: F.cross_entropy(x.flatten(0, 1), torch.zeros(6).long(), weight=torch.ones(7)),
    "no sum": lambda x: F.cross_entropy(x.flatten(0, 1), torch.zeros(6).long(), reduction="none"),
    "shape": lambda x: F.cross_entropy(x, torch.zeros(2, 7).long()),
}


@pytest.mark.parametrize("name", ASKED)
def test_whoever_needs_logits_is_told(name: str, says: Says) -> None:
    with says(ModelError):
        ASKED[name](_logits())


def test_models_without_such_a_head_are_refused(says: Says) -> None:
    with says(ModelError):
        _fuse(nn.Sequential(nn.Linear(3, 4)))
    with says(ModelError):
        ClassJob([*ALONE.split(), "--lr", "1e-3", FUSED]).fit()


# Runs.


class LlamaJob(_Job):
    shift = 1

    def make(self) -> nn.Module:
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes)
        )


class NeedsLogitsJob(CausalJob):
    def compute_loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        outputs = model(**batch)
        return outputs.loss + 0.1 * outputs.logits.square().mean()


STEPS = "--train-iters 6 --global-batch-size 8 --clip-grad 0.5 --lr-decay-style constant --no-export-model"
ALONE = f"{STEPS} --micro-batch-size 8"
SHORT = f"{STEPS} --micro-batch-size 2 --train-iters 4"
OTHERS["untied-llama"] = LlamaJob
RUNS = ("causal", "untied-llama", "masked")
STAGES = "--pipeline-model-parallel-size 2 --pipeline-stages 1,1"
AGAIN = "--checkpoint-activations"
MATRICES = f"--tensor-model-parallel-size 2 --sequence-parallel {AGAIN}"
FSDP, ZERO_3 = f"--fsdp-memory-optimization {AGAIN}", "--zero-3-memory-optimization"
TENSOR = ("causal", "--tensor-model-parallel-size 2")
MORE = [("masked", STAGES), ("masked", MATRICES), ("masked", ZERO_3), ("causal", MATRICES), ("untied-llama", FSDP)]
MORE += [("untied-llama", flags) for flags in (f"{STAGES} {AGAIN}", "--oss-memory-optimization")]
"""For ``make test-longer``. Rows of the covering table have these pairs of switches, with a tied head."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "double"),
    by_default([("causal", True), ("masked", False)], [(job, double) for job in RUNS for double in (False, True)]),
)
def test_steps_are_those_without(job: str, double: bool) -> None:
    actual = train(job, double, f"{ALONE} --micro-batch-size 4 {FUSED}")
    bounds = EXACT if double else (1e-5, 1e-6)
    # If a gradient is 0, as for the bias of keys, rounding alone moves the weight: a hundredth of a step.
    assert_follows(actual, reference(job, double, ALONE), *bounds, weights=bounds if double else (1e-5, 1e-5))
    receipts = actual["summary"]["receipts"]
    assert receipts["fused_loss_kernel"] == ["torch"]
    assert 0 < receipts["logits_rows"] <= receipts["logits_rows_without"] / 4 + 1


@pytest.mark.slow
def test_the_receipt_would_see_whole_logits() -> None:
    """Break the switch on purpose. The receipt must differ from that of a working switch."""

    def whole(hidden: Any, weight: Any, bias: Any, target: Any, recipe: LossRecipe, words: Any) -> Any:
        return F.cross_entropy(F.linear(hidden, weight, bias), target, reduction="sum")

    with mock.patch("rapidformer_templates.switches.fused_loss.transform.linear_cross_entropy", whole):
        run = train("causal", False, f"{ALONE} --train-iters 1 {FUSED}")
    receipts = run["summary"]["receipts"]
    assert receipts["logits_rows"] == receipts["logits_rows_without"]


@pytest.mark.slow
def test_bf16_follows_bf16_without() -> None:
    flags = f"{ALONE} --mixed-precision bf16"
    plain, fused = reference("causal", False, flags), train("causal", False, f"{flags} {FUSED}")
    assert_close(fused["curve"], plain["curve"], 2**-8, 0)


def test_a_loss_that_needs_logits_is_told(says: Says) -> None:
    job = NeedsLogitsJob([*ALONE.split(), "--lr", "1e-3", FUSED])
    with says(ModelError):
        job.fit()


@pytest.mark.distributed
@pytest.mark.parametrize(("job", "flags"), by_default([TENSOR], [TENSOR, *MORE]))
def test_two_workers_follow_one_without(job: str, flags: str) -> None:
    double = "zero" not in flags  # ZeRO's masters are fp32
    expected = reference(job, double, ALONE)["curve"][:4]
    for run in observed(2, job, double, f"{SHORT} {flags} {FUSED}"):
        assert_close(run["curve"], expected, *(EXACT if double else ()))
        receipts = run["summary"]["receipts"]
        assert 0 < receipts["logits_rows"] <= receipts["logits_rows_without"] / 4 + 1
        if "tensor" in flags:
            assert receipts["logits_columns"] == (-(-VOCABULARY // 2), VOCABULARY)


@pytest.mark.longer
@pytest.mark.distributed
def test_stages_in_bf16_follow_stages_without() -> None:
    plain, fused = (
        observed(2, "causal", False, f"{SHORT} {STAGES} --mixed-precision bf16{more}")[0] for more in ("", f" {FUSED}")
    )
    assert_close(fused["curve"], plain["curve"], 2**-8, 0)
    assert "logits_rows" not in plain["summary"]["receipts"]
