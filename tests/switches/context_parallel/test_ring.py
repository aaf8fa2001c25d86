"""The attention of a ring, compared with torch's attention over whole sequences."""

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rapidformer_templates.engines.collectives import Peers
from rapidformer_templates.switches.layout import context_attention
from rapidformer_templates.switches.layout.context_attention import AttentionMask, ring_attention
from rapidformer_templates.switches.layout.sequence_shards import TokenIntervals
from tests.support.worker_pool import run_in_workers

SAMPLES, HEADS, SIZE, SCALE = 2, 6, 8, 0.4


class Case(NamedTuple):
    length: int = 13
    key_heads: int = 2
    causal: bool = True
    mask: str = ""
    dtype: torch.dtype = torch.float64


CASES = {
    "causal": Case(),
    "every token": Case(causal=False),
    "as many key heads": Case(key_heads=HEADS, length=8),
    "a part without tokens": Case(length=3),
    "padding": Case(causal=False, mask="bool"),
    "numbers": Case(causal=False, mask="float"),
    "bf16": Case(dtype=torch.bfloat16, length=64),
}
KERNEL = "flash_attention"


class _Kernels(TorchDispatchMode):
    """Records the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def _whole(case: Case, device: str = "cpu") -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]:
    """Return queries, keys and values, a gradient of the output, and a mask of whole sequences."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, case.key_heads, case.key_heads, HEADS)
    tensors = [torch.randn(SAMPLES, n, case.length, SIZE, generator=generator).to(device, case.dtype) for n in heads]
    visible = (torch.rand(SAMPLES, 1, case.length, case.length, generator=generator) < 0.7).to(device)
    visible[0, 0, 1] = False  # a row that attends to nothing
    masks = {"": None, "bool": visible, "float": torch.where(visible, 0.5, -torch.inf).to(case.dtype)}
    return tensors[:3], tensors[3], masks[case.mask]


def _expected(case: Case) -> list[torch.Tensor]:
    """Return output and gradients of torch's attention in 64 bits. A row that attends to nothing has zeros."""
    inputs, gradient, mask = _whole(case)
    leaves = [x.double().requires_grad_() for x in inputs]
    key, value = (x.repeat_interleave(HEADS // case.key_heads, 1) for x in leaves[1:])
    scores = leaves[0] @ key.mT * SCALE
    if case.causal:
        scores = scores.masked_fill(~torch.ones(case.length, case.length).tril().bool(), -torch.inf)
    if mask is not None:
        visible, added = (mask, 0.0) if case.mask == "bool" else (mask > -torch.inf, mask.clamp(min=-1.0))
        scores = (scores + added).masked_fill(~visible, -torch.inf)
    output = torch.nan_to_num(scores.softmax(-1)) @ value
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient.double())]


def _ring(case: Case, peers: Peers, device: str = "cpu") -> tuple[list[torch.Tensor], list[str]]:
    """Return this worker's output and gradients at their places in whole sequences, and the kernels that ran."""
    inputs, gradient, mask = _whole(case, device)
    intervals = TokenIntervals(case.length, peers.size, folded=True)

    def part(whole: torch.Tensor) -> torch.Tensor:
        own = whole.new_zeros((*whole.shape[:2], intervals.shard_length, SIZE))
        for place, (begin, end) in intervals.of(peers.rank):
            own[:, :, place : place + end - begin] = whole[:, :, begin:end]
        return own

    leaves = [part(x).requires_grad_() for x in inputs]
    with _Kernels() as seen:
        output = ring_attention(*leaves, AttentionMask(intervals, mask, case.causal, SCALE), peers)
        gradients = torch.autograd.grad(output, leaves, part(gradient))
    wholes = []
    for own in (output.detach(), *gradients):
        whole = own.new_zeros((*own.shape[:2], case.length, SIZE))
        for place, (begin, end) in intervals.of(peers.rank):
            whole[:, :, begin:end] = own[:, :, place : place + end - begin]
        wholes.append(whole)
    return wholes, seen.names


def _all_cases(workers: Any, is_plain: bool) -> dict[str, tuple[list[torch.Tensor], list[str]]]:
    peers = Peers(torch.distributed.group.WORLD, workers.world, workers.rank)  # type: ignore[arg-type]
    asked = "_has_flash_kernel"
    answer = (lambda query, value: False) if is_plain else getattr(context_attention, asked)
    with mock.patch.multiple(context_attention, **{asked: answer, "AT_ONCE": 20}):
        return {name: _ring(case, peers) for name, case in CASES.items()}


@pytest.mark.distributed
@pytest.mark.parametrize("is_plain", [False, True])
def test_a_ring_is_attention_over_whole_sequences(is_plain: bool) -> None:
    found = run_in_workers(2, _all_cases, is_plain)
    for name, case in CASES.items():
        (first, kernels), (second, _) = (each[name] for each in found)
        tolerance = {"rtol": 0.02, "atol": 0.04} if case.dtype == torch.bfloat16 else {"rtol": 1e-10, "atol": 1e-10}
        for one, other, expected in zip(first, second, _expected(case), strict=True):
            torch.testing.assert_close((one + other).double(), expected, **tolerance, msg=lambda m, n=name: f"{n}: {m}")
        is_fused = any(KERNEL in kernel for kernel in kernels)
        assert is_fused == (not is_plain and not case.mask), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none here")
@pytest.mark.parametrize("causal", [False, True])
def test_a_gpu_merges_its_own_kernel_s_results(causal: bool) -> None:
    case = Case(64, causal=causal, dtype=torch.bfloat16)
    found, kernels = _ring(case, Peers(None, 1, 0), "cuda")  # type: ignore[arg-type]
    assert any(KERNEL in kernel for kernel in kernels)
    for actual, expected in zip(found, _expected(case), strict=True):
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=0.02, atol=0.04)
