"""Whole runs with ``--onnx-runtime-training`` follow the same runs without: losses, gradient norms, weights.

A step has two padded micro batches. Building graphs takes seconds, so only one job has batches of many shapes.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from tests.support import jobs, parity
from tests.support.compiled_jobs import OneLength
from tests.support.selection import by_default

pytestmark = pytest.mark.slow  # graphs of ten runs

STEPS = "--train-iters 8 --global-batch-size 8 --micro-batch-size 4 --clip-grad 0.1 --weight-decay 0.1"
ORT = "--onnx-runtime-training"


class DropoutJob(OneLength):
    """GPT-2 with dropout at the usual three places."""

    shift = 1

    def make(self) -> torch.nn.Module:
        sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
        rates = {"resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.3}
        return GPT2LMHeadModel(GPT2Config(vocab_size=jobs.VOCABULARY, **sizes, **rates))


class LlamaJob(OneLength):
    """Rotary embeddings, grouped keys and values, RMS normalization, gated feed-forward."""

    shift = 1

    def make(self) -> torch.nn.Module:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 64}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=jobs.VOCABULARY, **sizes, **heads))


class OneShapeClassJob(OneLength, jobs.ClassJob):
    """BERT as a classifier."""


class OneShapeFrozenJob(OneLength, jobs.FrozenJob):
    """The same classifier with frozen embeddings and a frozen first block."""


jobs.OTHERS |= {"onnx-llama": LlamaJob, "one-shape": OneShapeClassJob, "one-shape-frozen": OneShapeFrozenJob}


def _close(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    check = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    check(torch.tensor(actual["curve"]), torch.tensor(expected["curve"]))
    check(torch.tensor(actual["evaluations"]), torch.tensor(expected["evaluations"]))
    assert actual["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        # A key's bias moves all scores of a row equally. Its gradient is rounding, which Adam turns into a whole step.
        if not name.endswith(("key.bias", "c_attn.bias")):
            torch.testing.assert_close(actual["weights"][name], weight, rtol=1e-4, atol=1e-5)


def _graphs(run: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Return the graphs of a run by the class of the module, such as ``BertLayer``."""
    return [g for g in run["summary"]["receipts"]["onnx_runtime"]["graphs"] if g["name"].startswith(f"{kind} ")]


@pytest.mark.longer
def test_batches_of_many_shapes() -> None:
    """BERT's masked LM with evaluations. Its decoder is tied to the embeddings."""
    expected = parity.reference("masked", False, STEPS)
    actual = parity.train("masked", False, f"{STEPS} {ORT}")
    assert len(actual["curve"]) == 8
    _close(actual, expected)
    told = actual["summary"]["receipts"]["onnx_runtime"]
    assert told["providers"] == ["CPUExecutionProvider"]
    assert told["modules"] == {"BertLayer": 2, "BertOnlyMLMHead": 1}
    assert 0 < told["share_of_time"] < 1
    # One graph for the first shape and one for all others. More for later blocks, whose input has a gradient.
    assert len(_graphs(actual, "BertLayer")) <= 10
    backward = [graph for graph in _graphs(actual, "BertLayer") if graph["name"] == "BertLayer backward"]
    assert sum(graph["runs"] for graph in backward) == 8 * 2 * 2  # steps × micro batches × blocks
    assert all(0 < graph["nodes"] < graph["nodes_exported"] / 2 for graph in backward)


RUNS = [
    ("one-shape-frozen", "", "BertLayer"),
    ("one-shape", "--checkpoint-activations", "BertLayer"),
    ("onnx-llama", "", "LlamaDecoderLayer"),
]


@pytest.mark.parametrize(("job", "flags", "kind"), by_default(RUNS[:1], RUNS))
def test_run_follows_eager(job: str, flags: str, kind: str) -> None:
    expected = parity.reference(job, False, STEPS)
    actual = parity.train(job, False, f"{STEPS} {ORT} {flags}")
    assert len(actual["curve"]) == 8
    _close(actual, expected)
    assert {f"{kind} forward", f"{kind} backward"} <= {graph["name"] for graph in _graphs(actual, kind)}
    receipts = actual["summary"]["receipts"]
    if flags:
        assert receipts["saved_tensor_bytes"] < receipts["saved_tensor_bytes_without"]


@pytest.mark.longer
def test_dropout_is_that_of_eager_also_after_a_resume(tmp_path: Path) -> None:
    """Compare GPT-2, stopped after half of its steps, with an uninterrupted run in torch."""
    flags = "--global-batch-size 8 --micro-batch-size 4 --lr 1e-3 --lr-decay-style constant --log-interval 1"

    def curve(way: str, folder: str) -> list[tuple[float, float]]:
        job = DropoutJob([*flags.split(), *way.split(), "--save", str(tmp_path / folder)])
        job.fit()
        found: list[tuple[float, float]] = job.curve
        return found

    whole = curve("--train-iters 6", "eager")
    halves = curve(f"--train-iters 3 {ORT}", "ort") + curve(f"--train-iters 6 --resume {ORT}", "ort")
    torch.testing.assert_close(torch.tensor(halves), torch.tensor(whole), rtol=1e-5, atol=1e-6)
