"""Both ways to export and to merge write the same model, so their times and memory can be compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from benchmarks.export_memory import EXPORT, MERGE, WAYS, Cost, notes, run_way, write_sources


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    write_sources(LlamaConfig(**sizes, vocab_size=50, architectures=["LlamaForCausalLM"]), folder)
    return folder


@pytest.mark.parametrize("work", WAYS)
def test_the_peer_writes_the_same_model(work: str, sources: Path) -> None:
    written = []
    for way in WAYS[work]:
        cost = run_way((way, sources))
        assert cost.seconds > 0
        assert cost.processor_seconds > 0
        (sources / "output").rename(sources / way)
        written.append(load_file(sources / way / "model.safetensors"))
    ours, peer = written
    assert ours.keys() == peer.keys()
    for name, tensor in peer.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=1e-7)


def test_a_way_is_compared_with_its_peer() -> None:
    costs = {way: Cost(200, 2.0, 1.0) for pair in WAYS.values() for way in pair}
    costs[WAYS[EXPORT][0]] = Cost(50, 3.0, 1.0)
    costs[WAYS[MERGE][0]] = Cost(50, 1.0, 0.5)
    export, merge = notes(costs)
    assert "0.25 × the memory, 1.50 × the time and 1.00 × the processor time" in export
    assert export.endswith("missed")
    assert merge.endswith("reached")
