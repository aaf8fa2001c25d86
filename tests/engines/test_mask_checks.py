"""transformers' models read nothing from the device if the host has answered their questions, and compute the same."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from rapidformer_templates.data.loader import MicroBatch
from rapidformer_templates.engines.current_batch import mask_answers, watch_positions
from rapidformer_templates.engines.local import SingleEngine
from tests.support.ahead import CountReads
from tests.support.mask_hooks import HOOKS, _batch, _model, job_of


@pytest.mark.parametrize("kind", ["no mask", "full mask", "padded", "packed"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_a_forward_reads_nothing_and_is_the_same(name: str, kind: str) -> None:
    model = _model(name)
    batch = _batch(kind)
    microbatch = _looked_at(batch)
    with torch.no_grad(), CountReads() as plain:
        expected = model(**batch).logits
    watch_positions(model)
    with torch.no_grad(), mask_answers(microbatch, batch), CountReads() as counted:
        actual = model(**batch).logits
    assert counted.reads == 0
    assert (plain.reads > 0) == (kind in ("full mask", "padded") or name in ("gpt2", "llama"))
    assert torch.equal(actual, expected)


def _looked_at(batch: Any) -> MicroBatch:
    microbatch = MicroBatch(batch, [0, 1])
    microbatch.inspect_masks()
    return microbatch


@pytest.mark.parametrize("hook", HOOKS)
def test_what_the_hook_gives_the_model_is_what_counts(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that runs ahead trains to the same last digit as one that reads everything."""
    runs = []
    for ahead in (False, True):
        monkeypatch.setattr(SingleEngine, "_supports_async_step", lambda self, ahead=ahead: ahead)
        runs.append(job_of(hook))
    assert runs[0].losses == runs[1].losses
    for one, other in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_answers_are_of_one_thread() -> None:
    model = _model("llama")
    watch_positions(model)
    padded, full = _batch("padded"), _batch("full mask")
    with torch.no_grad():
        expected = model(**padded).logits
    found: list[torch.Tensor] = []

    def elsewhere() -> None:
        with torch.no_grad():
            found.append(model(**padded).logits)

    with mask_answers(_looked_at(full), full):
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
    assert torch.equal(found[0], expected)
