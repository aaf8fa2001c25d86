"""A pretrained model whose fp32 weights alone exceed the memory of a worker: built, trained and exported in parts.

Each worker may have data of 90 % of the fp32 weights from its start to its end, with the libraries (``RLIMIT_DATA``).
The limit counts private memory that can be written, whether or not it is in use, so the holes in the heap of the
allocator count, too. It does not count files that are mapped to be read or shared.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rapidformer_templates.run.folder import read_metrics
from tests.support.scripts.larger_than_a_worker import LR, STEPS, samples

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="a process's data is limited on Linux only"),
]

SCRIPT = Path(__file__).parents[1] / "support/scripts/larger_than_a_worker.py"
LAYOUTS = {
    "fsdp": "--fsdp-memory-optimization --micro-batch-size 1",
    "2 × 2": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 4",
}
SIZES = {"hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 24, "intermediate_size": 4096}
LIMIT = int(0.9 * 4 * 704_128_512)
"""Bytes of data of each worker: 90 % of the fp32 weights."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 704 million parameters, with weights in bf16."""
    path = tmp_path_factory.mktemp("pretrained")
    words = {f"w{number}": number for number in range(7990)} | {"<unk>": 7990, "<pad>": 7991}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>").save_pretrained(path)
    config = LlamaConfig(**SIZES, vocab_size=8000, max_position_embeddings=512)
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


def _train(folder: Path, workers: int, flags: str, save: Path) -> subprocess.CompletedProcess[str]:
    words = f"{LIMIT} --pretrained-model-name-or-path {folder} --nproc-per-node {workers} --save {save} {flags}"
    settings: Any = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, str(SCRIPT), *words.split()], timeout=1000, check=False, **settings)


def _loss(model: LlamaForCausalLM) -> torch.Tensor:
    tokens = torch.stack([sample["input_ids"] for sample in samples()])
    return model(input_ids=tokens, labels=tokens).loss


@pytest.fixture(scope="module")
def unlimited(folder: Path) -> list[float]:
    """The loss of each step and the one after the last step, of a loop of torch's own in this process."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for _ in range(STEPS):
        loss = _loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return [*losses, _loss(model).item()]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("fsdp", marks=[pytest.mark.exhaustive, pytest.mark.timeout(1200)]),
        pytest.param("2 × 2", marks=pytest.mark.longer),
    ],
)
def test_four_workers_train_and_export_it(layout: str, folder: Path, unlimited: list[float], tmp_path: Path) -> None:
    ended = _train(folder, 4, LAYOUTS[layout], tmp_path / "run")
    assert ended.returncode == 0, ended.stderr[-2000:]
    lines = read_metrics(tmp_path / "run/metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line] + [lines[-1]["eval_loss"]]
    assert losses == pytest.approx(unlimited, rel=1e-5)
    exported = LlamaForCausalLM.from_pretrained(tmp_path / "run/export", dtype=torch.float32)
    with torch.no_grad():
        assert _loss(exported).item() == pytest.approx(unlimited[-1], rel=1e-5)


@pytest.mark.longer
def test_one_worker_cannot_build_it(folder: Path, tmp_path: Path) -> None:
    ended = _train(folder, 1, "--micro-batch-size 4", tmp_path / "run")
    assert ended.returncode == 1
    assert "while the model is built" in ended.stderr
    assert "each worker builds the whole model: fewer workers per machine, a smaller model, or --fsdp" in ended.stderr
    assert "Traceback" not in ended.stderr
