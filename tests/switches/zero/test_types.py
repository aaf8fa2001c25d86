"""A forward that DeepSpeed runs in a narrow type keeps its signature for other code."""

from __future__ import annotations

import inspect

import pytest
import torch

from rapidformer_templates.models.label_use import label_use
from tests.support.jobs import CausalJob

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'rapidformer_templates[deepspeed]'")


@pytest.mark.deepspeed
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_how_a_model_takes_labels_is_found_out_in_every_type(dtype: torch.dtype) -> None:
    from rapidformer_templates.switches.zero.engine import _autocast_forward

    model = CausalJob(["--lr", "1e-3", "--train-iters", "1"]).make()
    takes = inspect.signature(model.forward)
    _autocast_forward(model.to(dtype), dtype)
    assert inspect.signature(model.forward) == takes
    assert label_use(model).shifts
