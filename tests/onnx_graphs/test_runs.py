"""Whole runs with --onnx-runtime-training follow the same runs without: losses, gradient norms, weights.

The batches have many shapes and padding, a step has two of them, and embeddings are tied to heads.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from rapidformer_templates import Data
from tests.parity import jobs
from tests.worker_group import run_in_workers

STEPS = "--train-iters 20 --global-batch-size 8 --micro-batch-size 4 --clip-grad 0.1 --weight-decay 0.1"
ORT = "--onnx-runtime-training"


class DropoutJob(jobs.CausalJob):
    """GPT-2 that leaves out activations at the usual three places."""

    def make(self) -> torch.nn.Module:
        sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
        rates = {"resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.3}
        return GPT2LMHeadModel(GPT2Config(vocab_size=jobs.VOCABULARY, **sizes, **rates))


class _EqualLengths(jobs._Job):
    """Batches of one shape and no validation, so that one graph each way is made."""

    def build_data(self) -> Data:
        samples = [sample for sample in jobs._sequences(400) if len(sample["input_ids"]) >= 8]
        for sample in samples:
            sample["input_ids"], sample["labels"] = sample["input_ids"][:8], sample["input_ids"][:8]
        return Data(train=samples, collate=partial(jobs._pad, classes=self.classes))


class LlamaJob(_EqualLengths):
    """Rotary embeddings, grouped keys and values, root-mean-square normalisation, gated feed-forward."""

    shift = 1

    def make(self) -> torch.nn.Module:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 64}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=jobs.VOCABULARY, **sizes, **heads))


class EqualClassJob(_EqualLengths, jobs.ClassJob):
    """For the workers."""


jobs.OTHERS |= {"dropout": DropoutJob, "llama": LlamaJob, "equal": EqualClassJob}


def _close(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    check = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    check(torch.tensor(actual["curve"]), torch.tensor(expected["curve"]))
    check(torch.tensor(actual["evaluations"]), torch.tensor(expected["evaluations"]))
    assert actual["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        # A key's bias moves all scores of a row alike: its gradient is rounding, which Adam makes a whole step of.
        if "key.bias" not in name and "c_attn.bias" not in name:
            torch.testing.assert_close(actual["weights"][name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("job", ["masked", "frozen", "dropout", "llama"])
def test_run_follows_eager(job: str, tmp_path: Path) -> None:
    expected = jobs.train(job, False, STEPS, str(tmp_path / "eager"))
    actual = jobs.train(job, False, f"{STEPS} {ORT}", str(tmp_path / "ort"))
    assert len(actual["curve"]) == 20
    _close(actual, expected)
    told = actual["summary"]["receipts"]["onnx_runtime"]
    assert told["providers"] == ["CPUExecutionProvider"]
    made = {graph["name"].split()[1] for graph in told["graphs"]}
    assert {"forward", "backward"} <= made
    assert all(0 < graph["nodes"] < graph["nodes_exported"] or graph["nodes_exported"] < 9 for graph in told["graphs"])
    # Of many shapes, all but the first share a graph: what is left is who needs gradients, and how.
    blocks = [graph for graph in told["graphs"] if graph["name"].startswith(("BertLayer", "GPT2Block", "Llama"))]
    assert len(blocks) <= 12
    assert 0 < told["share_of_time"] <= 1


def _in_both(workers: Any, folder: str) -> list[Any]:
    flags = "--train-iters 6 --global-batch-size 8 --micro-batch-size 2"
    ways = {"eager": "", "ort": ORT, "checkpointed": f"{ORT} --checkpoint-activations"}
    return [jobs.train("equal", False, f"{flags} {way}", f"{folder}/{name}") for name, way in ways.items()]


@pytest.mark.distributed
def test_two_workers_follow_eager_ddp(tmp_path: Path) -> None:
    expected, actual, checkpointed = run_in_workers(2, _in_both, str(tmp_path))[0]
    _close(actual, expected)
    _close(checkpointed, expected)
    kept = checkpointed["summary"]["receipts"]
    assert kept["saved_tensor_bytes"] < kept["saved_tensor_bytes_without"]
