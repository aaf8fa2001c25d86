"""Fingerprints of the weights under adapters."""

from __future__ import annotations

import pytest
import torch

from rapidformer_templates.models.adapters import SUMMED, fingerprint
from tests.support.allocations import measured_allocations


@pytest.mark.parametrize("odd", [0, 1])
def test_all_bits_of_a_tensor_are_summed(odd: int) -> None:
    values = torch.arange(2 * SUMMED + 20 + odd, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    content = values.view(torch.int16).numpy().tobytes()
    words = torch.frombuffer(bytearray(content[: len(content) // 4 * 4]), dtype=torch.int32)
    total = int(words.double().sum()) + sum(content[len(words) * 4 :])  # exact: far below 2 ** 53
    assert fingerprint(values).split()[-2] == str(total)


def test_a_fingerprint_needs_less_memory_than_its_tensor() -> None:
    values = torch.ones(24 << 20)
    fingerprint(values)
    with measured_allocations() as allocations:
        fingerprint(values)
    assert 0 < allocations.peak < 0.6 * values.nbytes
